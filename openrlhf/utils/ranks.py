"""The processes that share one evaluation: how many there are, and how their results come together."""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """Processes started together by a launcher; every method is called by all of them in the same order."""

    rank: int  # of this process, 0 = main
    world_size: int

    def gather_objects(self, value: Any) -> list[Any]:
        """The picklable values of all processes in the order of their ranks, known in every process."""


class OneProcess:
    """No launcher: everything is done here."""

    rank = 0
    world_size = 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]
