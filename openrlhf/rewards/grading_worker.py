"""Symbolic comparison of two expressions by math-verify, in worker processes that can be killed.

math-verify bounds its own time with SIGALRM, which exists only in the main thread, and some inputs never return. So it
runs in a child process: callers may be in any thread, a comparison that exceeds its limit is killed with its process,
and the next comparison starts a new one. Run as `python -m openrlhf.rewards.grading_worker` this file is the child.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # importing sympy takes 1 to 2 s, more on a loaded machine
MEMORY_LIMIT_BYTES = 4 << 30  # address space of one worker
MAX_WORKERS = 4


class _TimeLimitError(Exception):
    """The worker did not answer in time."""


class _WorkerDiedError(Exception):
    """The worker's pipe is closed."""


def equal_expressions(first: str, second: str, time_limit_s: float = 5.0) -> bool:
    r"""Whether math-verify finds two LaTeX expressions equal in either direction.

    Args:
        first, second: expressions without `$`, for example `\frac{\pi}{6}+0.5`.
        time_limit_s: seconds for this comparison, without the start of a worker.
    Returns:
        The verdict; False, with a warning in the log, when the limit is exceeded or the worker dies twice.
    Raises:
        RuntimeError: a worker does not start, for example because math-verify is not installed.
    """
    for _ in range(2):  # an idle worker may have been killed from outside: try once more with a new one
        try:
            with _pool().borrow() as worker:
                return worker.ask(first, second, time_limit_s)
        except _TimeLimitError:
            logger.warning(
                "comparing %.80r with %.80r took over %.1f s: counted as different", first, second, time_limit_s
            )
            return False
        except _WorkerDiedError:
            continue
    logger.warning("comparing %.80r with %.80r ended its worker: counted as different", first, second)
    return False


class _Worker:
    """One child process and its two pipes; used by one thread at a time."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf.rewards.grading_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent only
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            problem = self._read(START_LIMIT_S)["problem"]
        except (_TimeLimitError, _WorkerDiedError) as error:
            problem = f"no answer from {sys.executable} -m openrlhf.rewards.grading_worker ({type(error).__name__})"
        if problem:
            self.kill()
            raise RuntimeError(f"the answer grading worker did not start: {problem}")

    def ask(self, first: str, second: str, time_limit_s: float) -> bool:
        request = json.dumps({"first": first, "second": second, "limit": time_limit_s}) + "\n"
        try:
            self.process.stdin.write(request.encode())
        except OSError as error:
            raise _WorkerDiedError from error
        return self._read(time_limit_s)["equal"]

    def _read(self, limit_s: float) -> dict:
        deadline, data = time.monotonic() + limit_s, b""
        while not data.endswith(b"\n"):
            if not wait([self.process.stdout], max(deadline - time.monotonic(), 0)):
                raise _TimeLimitError
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                raise _WorkerDiedError
            data += part
        return json.loads(data)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class _WorkerPool:
    """At most MAX_WORKERS children, started when needed and kept for the next comparison."""

    def __init__(self) -> None:
        self.free_places = threading.Semaphore(min(MAX_WORKERS, os.cpu_count() or 1))
        self.idle: list[_Worker] = []

    @contextmanager
    def borrow(self) -> Iterator[_Worker]:
        """A worker for one comparison; it is killed when the comparison fails."""
        with self.free_places:
            try:
                worker = self.idle.pop()
            except IndexError:
                worker = _Worker()
            try:
                yield worker
            except BaseException:
                worker.kill()
                raise
            self.idle.append(worker)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().kill()


_shared_pool: _WorkerPool | None = None
_shared_lock = threading.Lock()


def _pool() -> _WorkerPool:
    global _shared_pool
    with _shared_lock:
        if _shared_pool is None:
            _shared_pool = _WorkerPool()
            atexit.register(_shared_pool.close)
        return _shared_pool


def _forget_pool() -> None:
    """In a forked child: the workers belong to the parent, and the lock may be held by a thread that is not here."""
    global _shared_pool, _shared_lock
    if _shared_pool is not None:
        atexit.unregister(_shared_pool.close)
    _shared_pool, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _serve() -> None:
    """The child: read one JSON request a line, answer one JSON line; end with the parent's pipe."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a print inside a library must not reach the answers

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        answer({"problem": f"{error}; run `pip install math-verify`"})
        return

    # Without math-verify's removal of units, to which "t", "s" and "ab" belong (it would make `1+2m` equal to 3), and
    # without its search for a number in a text that is no expression (`1,2 & 5` would be 5). grading.py removes units.
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    whole_text = [LatexExtractionConfig(normalization_config=rules)]

    @lru_cache(maxsize=4096)  # an expected answer comes back with every completion
    def parsed(text: str) -> list:
        return parse(f"${text}$", whole_text, parsing_timeout=None)

    def equal(first: str, second: str) -> bool:
        left, right = parsed(first), parsed(second)
        return bool(left and right) and any(
            verify(*pair, timeout_seconds=None) for pair in ((left, right), (right, left))
        )

    equal("1+1", "2")  # load what sympy loads late, outside any limit
    answer({"problem": None})
    for line in sys.stdin:
        request = json.loads(line)
        # Default action of SIGALRM: end the process. It matters only when the parent is gone and cannot kill us.
        signal.setitimer(signal.ITIMER_REAL, request["limit"] + 1)
        verdict = equal(request["first"], request["second"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer({"equal": verdict})


if __name__ == "__main__":
    _serve()
