"""Work of torch that several threads do side by side on a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

MOST_WORKERS = 4  # each holds the activations of a pass
Item = TypeVar("Item")
Result = TypeVar("Result")


def map_side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``map(work, items)`` by several threads that share torch's; results in order, items taken as they are needed.

    Operations too small to gain from a second core leave it idle in one pass, and find it busy with another one here.
    While the results are read, operations of the calling thread use the threads of a single worker. With one thread of
    torch everything happens in the calling thread.

    Args:
        work: safe in several threads at once; enters `torch.inference_mode` by itself, as it belongs to a thread.
    Raises:
        Exception: what work raised, at the place of its item.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MOST_WORKERS)
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    torch.set_num_threads(threads // workers)  # new threads start with this number
    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) > workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for one in waiting:  # the reader has stopped, or work has failed
                    one.cancel()
    finally:
        torch.set_num_threads(threads)
