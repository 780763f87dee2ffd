"""Memory and speed of preparing generated preference pairs.

    python benchmarks/bench_prepare.py --pairs 1000000
    python benchmarks/bench_prepare.py --quick          # under a minute

Writes generated pairs as JSON lines, loads and tokenises them in a fresh process as training does, draws batches, and
prints the largest resident memory of that process and its workers together (sampled every 50 ms), in MiB = 2^20 bytes.
Pages of memory-mapped files count as resident, and pages that workers share count once for each of them. Speed is
compared with that of a loop that tokenises prompt and response of one row after the other, on the first rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def write_pairs(path: Path, count: int) -> None:
    """Short generated pairs: a two-line sum, one right and one wrong."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            a, b, c = (rng.randrange(1, 1000) for _ in range(3))
            question = f"Ann has {a} apples. She buys {b} and sells {c}. How many apples does she have?"
            solution = f"{a} + {b} = {a + b}\n{a + b} - {c} = {a + b - c}\n\\boxed{{{a + b - c}}}"
            wrong = f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}\n\\boxed{{{a + b + c}}}"
            row = {"question": question, "correct": solution, "incorrect": wrong}
            file.write(json.dumps(row) + "\n")


def prepare(path: str, num_proc: int | None) -> None:
    """What training does with the file before its first step, and 200 batches."""
    sys.path.insert(0, str(ROOT))
    from openrlhf.datasets.preference import PreferenceOptions, prepare_preferences
    from openrlhf.datasets.sources import load_rows, split_rows
    from tests.tiny import tiny_tokenizer

    start = time.perf_counter()
    rows = load_rows(path)
    print(f"loaded    {len(rows)} rows in {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    train, held_out = split_rows(rows, 0.01, seed=0)
    print(f"split     {len(train)} and {len(held_out)} rows in {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    tokenizer = tiny_tokenizer()
    data = prepare_preferences(
        train, tokenizer, PreferenceOptions(input_template="plain", max_len=512), num_proc=num_proc
    )
    seconds = time.perf_counter() - start
    print(f"prepared  {len(data)} pairs in {seconds:.1f} s", flush=True)
    Path(path).with_suffix(".ratio").write_text(str(len(data) / seconds / loop_rate(train, tokenizer)))
    start = time.perf_counter()
    rng = random.Random(0)
    for _ in range(200):
        data.collate(rng.sample(range(len(data)), 64), pad_id=0)
    print(f"collated  200 batches of 64 pairs in {time.perf_counter() - start:.1f} s", flush=True)


def loop_rate(rows, tokenizer) -> float:
    """Pairs a second of a loop over rows that tokenises each of the two texts by itself."""
    few = [rows[i] for i in range(min(len(rows), 2000))]
    start = time.perf_counter()
    for row in few:
        for response in (row["correct"], row["incorrect"]):
            tokenizer(row["question"] + "\n" + response + tokenizer.eos_token)
    return len(few) / (time.perf_counter() - start)


def children_of(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def memory_of(pids: list[int]) -> tuple[int, int]:
    """(resident, anonymous) bytes of these processes: with and without pages of mapped files."""
    resident = anonymous = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "RssAnon")))
        resident += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
        anonymous += int(fields.get("RssAnon", "0 kB").split()[0]) * 1024
    return resident, anonymous


def measure(command: list[str], environment: dict[str, str]) -> tuple[int, int]:
    """Run a command and return the peaks of (resident, anonymous) memory of all its processes together."""
    process = subprocess.Popen(command, env=environment)
    peaks = [0, 0]

    def sample() -> None:
        while process.poll() is None:
            for i, value in enumerate(memory_of(children_of(process.pid))):
                peaks[i] = max(peaks[i], value)
            time.sleep(0.05)

    sampler = threading.Thread(target=sample)
    sampler.start()
    code = process.wait()
    sampler.join()
    if code:
        raise SystemExit(code)
    return peaks[0], peaks[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--num_proc", type=int, default=None, help="worker processes; default: as training chooses")
    parser.add_argument("--quick", action="store_true", help="20,000 pairs")
    parser.add_argument("--prepare_file", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs = 20_000
    if arguments.prepare_file:
        prepare(arguments.prepare_file, arguments.num_proc)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        write_pairs(path, arguments.pairs)
        print(f"generated {arguments.pairs} pairs, {path.stat().st_size / MIB:.0f} MiB of JSON lines", flush=True)
        command = [sys.executable, __file__, "--prepare_file", str(path)]
        if arguments.num_proc:
            command += ["--num_proc", str(arguments.num_proc)]
        resident, anonymous = measure(command, {**os.environ, "HF_DATASETS_CACHE": str(Path(folder) / "cache")})
        ratio = float(path.with_suffix(".ratio").read_text())
    print(f"peak resident memory of all processes: {resident / MIB:.0f} MiB ({anonymous / MIB:.0f} MiB not file pages)")
    print(f"ratio {ratio:.2f} preparation speed, ours against a loop over the rows")


if __name__ == "__main__":
    main()
