"""What the benchmarks share: a measurement in a process of its own, its clocks, and the memory of a process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def now() -> tuple[float, float]:
    """Seconds of the wall clock and of this process's work on the CPU, after everything that was started on a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def largest_resident_size() -> float:
    """Peak of this process in MiB = 2^20 bytes; getrusage would include the process that started it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def peak_memory() -> float:
    """Peak of this process in MiB; on a GPU that of what was allocated there."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else largest_resident_size()


def forget_peak() -> None:
    """Let the peak memory start again from what is in use now; memory that is free goes back to the system."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def run_measurement(words: list[str], threads: int, python: str = sys.executable) -> dict[str, Any]:
    """Run a Python program offline and read the JSON object of its last printed line; its errors end this program.

    Args:
        words: path of the program and its arguments. python: of another environment, to which nothing of this project
            is visible but the program's own folder.
    """
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ""}
    done = subprocess.run([python, *words], env={**os.environ, **own}, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)[:200]} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().split("\n")[-1])
