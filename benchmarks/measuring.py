"""What the benchmarks share: a measurement in a process of its own, and the memory of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def largest_resident_size() -> float:
    """Peak of this process in MiB = 2^20 bytes; getrusage would include the process that started it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def run_measurement(words: list[str], threads: int) -> dict[str, Any]:
    """Run a Python program offline and read the JSON object of its last printed line; its errors end this program."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *words], env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().split("\n")[-1])
