"""Seconds until a command answers: `--help` of every command, the first training step, the first score.

    python benchmarks/bench_startup.py            # medians of 5 rounds
    python benchmarks/bench_startup.py --quick    # one round, under a minute

Every measurement starts a new process; a round takes each of them once, in turn, so that a busy minute of the machine
meets all alike. The first step is that of train_rm on pocket pairs (time until its line in metrics.jsonl), the first
score that of eval_rm on 8 completions (time until its file has a line); pairs and model are made before.
Beside them: `import transformers, torch`, which every tool of this kind needs, and `trl reward --help` where the
environment .venv-trl of build_scripts/check_trl.sh exists.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "train_rm", "train_sft", "get_representation", "eval_rm", "metrics", "grade", "inspect_response",
    "probe_states", "study", "data_setup", "quickstart", "lora_combiner", "build_pocket",
)  # fmt: skip
TRL = ROOT / ".venv-trl" / "bin"
IMPORTS = "import transformers, torch"
HELP = "train_rm --help"
TRL_HELP = "trl reward --help"


def environment(threads: int) -> dict[str, str]:
    """Of every process measured: this project, nothing asked of the hub."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    return os.environ | settings


def seconds_of(command: list[str], threads: int) -> float:
    """Wall time of a whole process."""
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(threads), cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return time.perf_counter() - start


def seconds_to_file(command: list[str], threads: int, folder: Path, pattern: str) -> tuple[float, float]:
    """Seconds from the start of a process until a file of the folder has a line, and until the process ends."""
    start, seconds = time.perf_counter(), None
    with open(folder.with_name(folder.name + ".log"), "w+") as log:
        process = subprocess.Popen(command, env=environment(threads), cwd=ROOT, stdout=log, stderr=log)
        while seconds is None and process.poll() is None:
            if any(path.stat().st_size for path in folder.glob(pattern)):
                seconds = time.perf_counter() - start
            time.sleep(0.02)
        if process.wait() != 0 or seconds is None:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {log.read()[-1000:]}")
    return seconds, time.perf_counter() - start


def train_command(folder: Path) -> list[str]:
    """One step of train_rm on the pairs of pocket."""
    flags = "--pretrain pocket --dataset pocket --max_samples 8 --train_batch_size 8 --max_len 256"
    return [sys.executable, "-m", "openrlhf.cli.train_rm", *flags.split(), "--save_path", str(folder)]


def eval_command(model: Path, completions: Path, folder: Path) -> list[str]:
    """eval_rm on a few completions."""
    flags = ["--reward_model_path", str(model), "--completions_data_path", str(completions), "--save_dir", str(folder)]
    return [sys.executable, "-m", "openrlhf.cli.eval_rm", "--vanilla", "--bootstrap", "10", *flags]


def write_completions(path: Path) -> None:
    """Eight completions of four questions, half of them right."""
    rows = [
        {"question": f"What is {n} + 1?", "generated_solution": f"It is {n + 1 + wrong}.", "is_correct": not wrong}
        for n in range(4)
        for wrong in (0, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(rounds: int, threads: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of every measurement in every round."""
    model, completions = folder / "model", folder / "completions.jsonl"
    seconds_of(train_command(model), threads)  # makes the model, fills the cache of pocket pairs and of the disk
    write_completions(completions)
    python = [sys.executable]
    lines = {"import openrlhf": [*python, "-c", "import openrlhf"], IMPORTS: [*python, "-c", IMPORTS]}
    lines |= {f"{name} --help": [*python, "-m", f"openrlhf.cli.{name}", "--help"] for name in COMMANDS}
    if (TRL / "trl").exists():
        lines[TRL_HELP] = [str(TRL / "python"), str(TRL / "trl"), "reward", "--help"]
    taken: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, line in lines.items():
            taken.setdefault(name, []).append(seconds_of(line, threads))
        run, scores = folder / f"run-{number}", folder / f"scores-{number}"
        step, end = seconds_to_file(train_command(run), threads, run, "metrics.jsonl")
        taken.setdefault("first step of train_rm", []).append(step)
        taken.setdefault("its run of one step", []).append(end)
        score, end = seconds_to_file(eval_command(model, completions, scores), threads, scores, "*/*/*/*.jsonl")
        taken.setdefault("first score of eval_rm", []).append(score)
        taken.setdefault("its run of 8 completions", []).append(end)
    return taken


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS (default: 1)")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    if rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {rounds}")
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(rounds, arguments.threads, Path(folder))
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    print(f"{'seconds, medians of ' + str(rounds):30}{'median':>8}{'least':>8}{'most':>8}")
    for name, seconds in taken.items():
        print(f"{name:30}{medians[name]:8.2f}{min(seconds):8.2f}{max(seconds):8.2f}")
    slowest = max((f"{name} --help" for name in COMMANDS), key=medians.get)
    print(f"slowest help: {slowest}, {medians[slowest]:.2f} s")
    if arguments.json:
        machine = {"cpu_cores": os.cpu_count(), "python": platform.python_version(), "threads": arguments.threads}
        record = {"machine": machine, "rounds": rounds, "medians": medians, "seconds": taken}
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n")
    peer = TRL_HELP if TRL_HELP in medians else IMPORTS
    print(f"ratio {medians[peer] / medians[HELP]:.2f} start-up speed, {HELP} against {peer}")


if __name__ == "__main__":
    main()
