"""The data of the next update, made while this one is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Prefetcher(Generic[Made]):
    """Makes what each step needs, one step ahead, in a thread.

    Args:
        make: from the number of a step; must depend on nothing else. Its errors are raised by `take`.
        steps: there are this many; nothing is made beyond.
    """

    def __init__(self, make: Callable[[int], Made], steps: int) -> None:
        self.make, self.steps = make, steps
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self.ahead: tuple[int, Future[Made]] | None = None

    def take(self, step: int) -> Made:
        """What a step needs; waits if it is not there yet. Steps may be asked for in any order."""
        if self.ahead is None or self.ahead[0] != step:
            self.ahead = step, self.thread.submit(self.make, step)
        made = self.ahead[1].result()
        self.ahead = (step + 1, self.thread.submit(self.make, step + 1)) if step + 1 < self.steps else None
        return made
