"""Cells dealt to worker processes, with one progress bar; what fails is told, the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from openrlhf.cli.study_plan import Cell

POLL_SECONDS = 0.2
STOP_SECONDS = 10  # that a worker has to end before it is killed
TAIL_LINES = 15  # of the log of a failed cell that are shown
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Worker:
    """A process that runs one cell."""

    cell: Cell
    process: subprocess.Popen
    log: Path


def deal_cells(
    cells: Sequence[Cell],
    words: Sequence[str],
    *,
    logs: Path,
    workers: int,
    threads: int = 1,
    finished: int = 0,
    max_seconds: float | None = None,
    on_finished: Callable[[], Any] = lambda: None,
) -> list[str]:
    """Run cells in order, several at a time.

    Args:
        words: flags of the study command for every worker; `--cell NAME` is added.
        logs: folder of the output of every cell, IDENTITY.log.
        workers: processes at a time. threads: of each.
        finished: cells that the bar counts as done.
        max_seconds: no cell is started after so many.
        on_finished: called after every cell that has not failed.
    Returns:
        Names of the cells that failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running, failures = list(cells), [], []
    began = time.monotonic()
    bar = tqdm(total=finished + len(cells), initial=finished, desc="cells", unit="cell", smoothing=0)
    with bar, _stopped_at_end(running):
        while waiting or running:
            late = max_seconds is not None and time.monotonic() - began > max_seconds
            if late and waiting:
                bar.write(f"time is up: {len(waiting)} cells are not started")
                waiting.clear()
            while waiting and len(running) < workers:
                running.append(_start(waiting.pop(0), words, logs, threads))
            for worker in [one for one in running if one.process.poll() is not None]:
                running.remove(worker)
                bar.update()
                if worker.process.returncode == 0:
                    on_finished()
                    continue
                failures.append(worker.cell.name)
                bar.write(f"{worker.cell.name} failed with status {worker.process.returncode}; end of {worker.log}:")
                bar.write("".join(f"    {line}\n" for line in _tail(worker.log)))
            time.sleep(POLL_SECONDS)
    return failures


def _start(cell: Cell, words: Sequence[str], logs: Path, threads: int) -> Worker:
    """A process of its own for a cell, with so many threads."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",  # a folder "datasets" of the current folder is not the package
    }
    log = logs / f"{cell.identity}.log"
    command = [sys.executable, "-m", "openrlhf.cli.study", *words, "--cell", cell.name]
    with open(log, "w", encoding="utf-8") as handle:
        process = subprocess.Popen(command, env=environment, stdout=handle, stderr=subprocess.STDOUT)
    return Worker(cell, process, log)


@contextmanager
def _stopped_at_end(running: list[Worker]) -> Iterator[None]:
    """Whatever ends the block, Ctrl-C and a plain `kill` too, ends the workers."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for worker in running:
            worker.process.terminate()
        for worker in running:
            try:
                worker.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def _tail(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    return [line for line in text.split("\n") if line.strip()][-TAIL_LINES:]
