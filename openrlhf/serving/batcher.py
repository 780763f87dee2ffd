"""Items of concurrent calls, gathered into batches for one function that runs in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class FullError(Exception):
    """More items wait than are allowed to."""


@dataclass(eq=False)
class _Job(Generic[Item, Result]):
    """The items of one call."""

    items: Sequence[Item]
    arrived: float = field(default_factory=time.monotonic)
    taken: int = 0  # items that are in a batch already
    results: list[Result] = field(default_factory=list)
    future: Future[list[Result]] = field(default_factory=Future)


class Batcher(Generic[Item, Result]):
    """Calls a function with the items of several callers at once; a large call is cut into several batches.

    Args:
        work: results of items, in order; called from one thread.
        batch_size: items of a batch.
        wait_s: how long the first item waits for others.
        max_waiting: items that may wait; more are refused.
    """

    def __init__(
        self, work: Callable[[list[Item]], Sequence[Result]], batch_size: int, wait_s: float, max_waiting: int
    ) -> None:
        self.work = work
        self.batch_size = batch_size
        self.wait_s = wait_s
        self.max_waiting = max_waiting
        self.waiting = 0  # items in no batch yet
        self._jobs: deque[_Job[Item, Result]] = deque()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether calls are still answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, items: Sequence[Item]) -> Future[list[Result]]:
        """The results of the items, in order, or the error of the function.

        Raises:
            FullError: too many items wait.
            RuntimeError: the batcher is closed.
        """
        job = _Job[Item, Result](list(items))
        if not job.items:
            job.future.set_result([])
            return job.future
        with self._changed:
            if not self.is_alive:
                raise RuntimeError("the batcher is closed")
            if self.waiting and self.waiting + len(job.items) > self.max_waiting:
                raise FullError(f"{self.waiting} texts wait already")
            self._jobs.append(job)
            self.waiting += len(job.items)
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        """Answer what was submitted, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._gather():
            try:
                found = list(self.work([item for _, items in batch for item in items]))
            except Exception as error:
                if len(batch) == 1:
                    self._fail(batch[0][0], error)
                    continue
                for part in batch:  # so that only the call that is to blame gets the error
                    self._run_part(*part)
                continue
            for job, items in batch:
                self._add(job, found[: len(items)])
                found = found[len(items) :]

    def _run_part(self, job: _Job[Item, Result], items: list[Item]) -> None:
        try:
            self._add(job, self.work(items))
        except Exception as error:
            self._fail(job, error)

    def _gather(self) -> list[tuple[_Job[Item, Result], list[Item]]]:
        """Items of the next batch by call, in order of arrival; empty when there is nothing left to do."""
        batch: list[tuple[_Job[Item, Result], list[Item]]] = []
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if self._jobs:
                left = self._jobs[0].arrived + self.wait_s - time.monotonic()
                self._changed.wait_for(lambda: self.waiting >= self.batch_size or self._closing, timeout=max(left, 0))
            room = self.batch_size
            while room and self._jobs:
                job = self._jobs[0]
                items = list(job.items[job.taken : job.taken + room])
                job.taken += len(items)
                self.waiting -= len(items)
                room -= len(items)
                batch.append((job, items))
                if job.taken == len(job.items):
                    self._jobs.popleft()
        return batch

    def _add(self, job: _Job[Item, Result], results: Sequence[Result]) -> None:
        job.results += results
        if len(job.results) == len(job.items) and not job.future.done():
            job.future.set_result(job.results)

    def _fail(self, job: _Job[Item, Result], error: Exception) -> None:
        with self._changed:
            if job in self._jobs:  # the rest of it needs no work
                self._jobs.remove(job)
                self.waiting -= len(job.items) - job.taken
        if not job.future.done():
            job.future.set_exception(error)
