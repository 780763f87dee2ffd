"""Speed and memory of training a reward model, against TRL's RewardTrainer.

    python benchmarks/bench_train.py                                    # pocket pairs, a Llama of 5 million parameters
    python benchmarks/bench_train.py --data hh --tokenizer MODEL        # helpful-harmless pairs
    python benchmarks/bench_train.py --data gsm8k --solutions FILE --model MODEL
    python benchmarks/bench_train.py --growth                           # cost by prompt share and by length
    python benchmarks/bench_train.py --quick                            # under a minute

Every way trains from the same weights on the same token ids (ours makes them, the peer is given them, both count what
they saw), with the same precision, threads, optimizer and clipping, each in a process of its own, in turn, several
times. Ours is the path of train_rm, with further flags for each variant (--variant 'NAME=FLAGS' adds one).
    TRL defaults         8 pairs a pass and a step, rows in random order, gradient checkpointing: its defaults
    TRL no checkpointing the same without checkpointing
    TRL grouped, N       its length grouping, N pairs a pass, as many passes a step as give --batch_size
Precision and gradient checkpointing aside nothing of the peer is changed for speed. Time is that of the optimizer
steps after the first --batch_size pairs, without loading and tokenisation, with logging and data order, by the wall
clock or (--clock cpu, for a machine with other work on it) of the process on the CPU. A pair counts once an epoch.
Memory is the largest resident size of the process at the last step (on a GPU: allocated there). The mean loss of the
epochs is printed for all; the orders differ, so the peer's need not be equal. Losses of our variants are compared with
those of the plain path step by step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from train_peer import now, peak_memory
from train_tasks import LEARNING_RATE, generated_rows, make_model, pair_rows, prepare

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# one measurement, in a process of its own


def matmul_rate(precision: str, threads: int, clock: str) -> float:
    """Floating-point operations a second of a square matrix product on this device, best of several."""
    import torch

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(10):
        start = now()
        a @ a
        wall, cpu = (end - begin for end, begin in zip(now(), start, strict=True))
        best = min(best, wall if clock == "wall" else cpu)
    return 2 * size**3 / best


class Timed:
    """A trainer whose steps are timed."""

    def __init__(self, trainer, warmup: int, total: int) -> None:
        self.trainer, self.warmup, self.total = trainer, warmup, total
        self.marks: list[tuple[float, float]] = []
        self.sums: list = []
        self.memory = 0.0

    def __getattr__(self, name: str):
        return getattr(self.trainer, name)

    def train_step(self, step: int):
        result = self.trainer.train_step(step)
        self.sums.append(result[0])
        if step + 1 in (self.warmup, self.total):
            self.marks.append(now())
        if step + 1 == self.total:
            self.memory = peak_memory()
        return result


def train_ours(settings: dict) -> dict:
    """Train by train_rm's own path; figures as those of train_peer.train, and the loss of every step."""
    import torch

    from openrlhf.cli import train_rm
    from openrlhf.cli.parser import parse_config
    from openrlhf.trainer import loop
    from openrlhf.trainer.config import TrainRMConfig
    from openrlhf.trainer.reward_trainer import SUMS

    torch.set_num_threads(settings["threads"])
    run_training, timed = loop.run_training, []

    def measured(engine, trainer, plan, *others):
        timed.append(Timed(trainer, settings["warmup"], plan.total_steps))
        return run_training(engine, timed[0], plan, *others)

    loop.run_training = measured  # train_rm imports it when it runs
    try:
        train_rm.run(parse_config(TrainRMConfig, settings["flags"]))
    finally:
        loop.run_training = run_training
    clock = timed[0]
    sums = [dict(zip(SUMS, one.tolist(), strict=True)) for one in clock.sums]
    data = clock.trainer.data
    seen = [data[i] for i in range(len(data))]
    tokens = sum(2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in seen)
    losses = [one["loss"] / one["pairs"] for one in sums]
    return {
        "seconds": clock.marks[-1][0] - clock.marks[0][0],
        "cpu_seconds": clock.marks[-1][1] - clock.marks[0][1],
        "pairs": sum(one["pairs"] for one in sums[settings["warmup"] :]),
        "tokens": tokens * settings["epochs"],
        "memory": clock.memory,
        "loss": statistics.fmean(losses),
        "losses": losses,
        "steps": len(sums),
    }


def measure(run: dict, task: dict, model: Path, folder: Path, arguments: argparse.Namespace) -> dict:
    """Run one measurement and read what it printed."""
    batch = run["batch"]
    settings = {
        "threads": arguments.threads,
        "epochs": arguments.epochs,
        "warmup": max(1, arguments.batch_size // batch),
    }
    if run["peer"]:
        settings |= {
            "model": str(model), "ids": task["ids"], "batch": run["pass"], "accumulation": batch // run["pass"],
            "grouped": run["grouped"], "gradient_checkpointing": run["checkpointing"], "max_len": arguments.max_len,
            "bf16": arguments.precision == "bf16", "learning_rate": LEARNING_RATE, "scratch": str(folder / "peer"),
        }  # fmt: skip
        command = [arguments.peer_python, str(Path(__file__).with_name("train_peer.py"))]
    else:
        sizes = ["--train_batch_size", str(batch), "--micro_train_batch_size", str(run["pass"])]
        settings["flags"] = [*task["flags"], *sizes, *run["flags"]]
        command = [sys.executable, __file__, "--work"]
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": "",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run([*command, json.dumps(settings)], env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{run['name']} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().split("\n")[-1])


# what is measured, and the tables


def our_runs(arguments: argparse.Namespace) -> list[dict]:
    """Our variants: the plain path and what this version has beyond it."""
    from openrlhf.trainer.config import TrainRMConfig

    known = {field.name for field in dataclasses.fields(TrainRMConfig)}
    plain = ["--prefix_sharing", "off"] if "prefix_sharing" in known else []
    variants = {"plain": plain}
    if "prefix_sharing" in known:
        variants["prefix sharing"] = ["--prefix_sharing", "on"]
    if {"prefix_sharing", "batch_tokens"} <= known:
        variants["sharing, packed"] = ["--prefix_sharing", "on", "--batch_tokens", str(arguments.batch_tokens)]
    for text in arguments.variant:
        name, _, flags = text.partition("=")
        variants[name] = shlex.split(flags)
    size, runs = arguments.batch_size, []
    for name, flags in variants.items():
        packed = any(word.startswith("--batch_tokens") for word in flags)  # the tokens then say what a pass holds
        for micro in [size] if packed else sorted({min(one, size) for one in arguments.micro_batch_sizes}):
            label = name if packed else f"{name}, {micro}"
            runs.append({"name": label, "peer": False, "batch": size, "pass": micro, "flags": flags})
    return runs


def peer_runs(arguments: argparse.Namespace) -> list[dict]:
    """TRL at its defaults and at its best; [] where its environment is missing."""
    if not Path(arguments.peer_python).is_file():
        return []
    default = {"peer": True, "batch": 8, "pass": 8, "grouped": False}
    runs = [{"name": "TRL defaults", "checkpointing": True, **default}]
    if not arguments.quick:
        runs.append({"name": "TRL no checkpointing", "checkpointing": False, **default})
    for size in arguments.peer_batches:
        grouped = {"peer": True, "batch": arguments.batch_size, "pass": size, "grouped": True, "checkpointing": False}
        runs.append({"name": f"TRL grouped, {size}", **grouped})
    return runs


def run_all(runs: list[dict], task: dict, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, dict]:
    """All runs in turn, ``repeats`` times; medians by name."""
    found: dict[str, list[dict]] = {run["name"]: [] for run in runs}
    for _ in range(arguments.repeats):
        for run in runs:
            found[run["name"]].append(measure(run, task, model, folder, arguments))
            print(f"{run['name']}: {found[run['name']][-1]}"[:160], file=sys.stderr)
    rows = {}
    for name, results in found.items():
        seconds = "seconds" if arguments.clock == "wall" else "cpu_seconds"
        rates = [one["pairs"] / one[seconds] for one in results]
        rows[name] = {
            **results[0], "pairs_per_s": statistics.median(rates), "runs": rates,
            "memory": statistics.median(one["memory"] for one in results),
            "tokens_per_s": statistics.median(rates) * task["tokens"] / task["pairs"],
            "flops_per_s": statistics.median(rates) * task["flops"] / task["pairs"],
        }  # fmt: skip
    return rows


def print_rows(rows: dict[str, dict], rate: float) -> None:
    """One line a run; utilisation is that of the rows computed whole, so that sharing shows as more."""
    print(
        f"\n{'':22}{'pairs/s':>9}{'tokens/s':>10}{'MiB':>7}{'of matmul rate':>16}{'mean loss':>11}{'tokens seen':>13}"
    )
    for name, row in rows.items():
        print(
            f"{name:22}{row['pairs_per_s']:9.2f}{row['tokens_per_s']:10.0f}{row['memory']:7.0f}"
            f"{row['flops_per_s'] / rate:16.3f}{row['loss']:11.5f}{row['tokens']:13d}"
        )
    first, *others = rows
    for name in others:
        losses, wanted = rows[name].get("losses", []), rows[first]["losses"]
        if len(losses) == len(wanted):
            worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
            print(f"{name}: largest difference of a step's loss from {first!r}: {worst:.1e}")


def growth(model: Path, folder: Path, runs: list[dict], arguments: argparse.Namespace) -> list[dict]:
    """Milliseconds a pair as the prompt's share and the length grow, on generated pairs."""
    from openrlhf.models.pretrained import load_tokenizer

    tokenizer, table = load_tokenizer(model), []
    cases = [(256, 0.1), (256, 0.5), (256, 0.9), (128, 0.5), (512, 0.5)]
    print(f"\nmilliseconds a pair\n{'tokens':>8}{'prompt':>8}" + "".join(f"{run['name']:>22}" for run in runs))
    for number, (length, share) in enumerate(cases):
        rows = generated_rows(tokenizer, arguments.pairs, length, share)
        task = prepare(rows, folder / f"growth-{number}", model, arguments)
        results = run_all(runs, task, model, folder, arguments)
        cost = {name: 1000 / row["pairs_per_s"] for name, row in results.items()}
        mean, part = task["tokens"] / task["pairs"] / 2, 2 * task["shared_tokens"] / task["tokens"]
        table.append({"tokens": mean, "prompt_share": part, "milliseconds": cost})
        print(f"{mean:8.0f}{part:8.2f}" + "".join(f"{cost[run['name']]:22.1f}" for run in runs), flush=True)
    return table


def ratios(rows: dict[str, dict]) -> list[tuple[float, str]]:
    """Ratios of pairs/s worth reading, the best of ours against the peer's best last."""
    ours = {name: row["pairs_per_s"] for name, row in rows.items() if "losses" in row}
    peer = {name: row["pairs_per_s"] for name, row in rows.items() if "losses" not in row}
    best = max(ours, key=lambda name: ours[name])
    plain = max((name for name in ours if name.startswith("plain")), key=lambda name: ours[name])
    if not peer:
        return [(ours[best] / ours[plain], f"training speed, ours ({best}) against our plain path ({plain})")]
    strongest = max(peer, key=lambda name: peer[name])
    memory = rows[best]["memory"] / rows[strongest]["memory"]
    print(f"memory: ours ({best}) / {strongest} = {memory:.2f}")
    against = [("our plain path", ours[plain]), ("TRL defaults", peer["TRL defaults"])]
    against.append((f"{strongest}, the peer's best", peer[strongest]))
    return [(ours[best] / rate, f"training speed, ours ({best}) against {name}") for name, rate in against]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="pocket", help="pocket, hh, gsm8k, generated, or a file of pairs or solutions"
    )
    parser.add_argument(
        "--solutions", default=os.environ.get("DATA"), help="labelled solutions of gsm8k; default: $DATA"
    )
    parser.add_argument("--pairs_per_question", type=int, default=4, help="of labelled solutions")
    parser.add_argument("--length", type=int, default=256, help="of generated rows: tokens of prompt and response")
    parser.add_argument("--prompt_share", type=float, default=0.5, help="of generated rows: the prompt's part of them")
    parser.add_argument("--input_template", help="of train_rm; default: pocket's for pocket, else as train_rm")
    parser.add_argument("--model", default="5m", help="5m or 300m (Llamas made here), pocket, or a folder")
    parser.add_argument("--tokenizer", help="of a Llama made here: a folder; default: pocket's")
    parser.add_argument("--pairs", type=int, default=256, help="pairs to read")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_len", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=32, help="pairs a step (TRL's defaults: 8)")
    parser.add_argument("--micro_batch_sizes", type=int, nargs="+", default=[4, 8], help="pairs a pass of ours")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="tokens a packed pass of ours")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=FLAGS", help="further flags of train_rm"
    )
    parser.add_argument("--peer_batches", type=int, nargs="+", default=[4, 8, 16], help="pairs a pass of TRL grouped")
    parser.add_argument("--peer_python", default=os.environ.get("PEER_PYTHON", str(ROOT / ".venv-peers/bin/python")))
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: of the process alone, for a busy machine"
    )
    parser.add_argument("--growth", action="store_true", help="cost by prompt share and length instead")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="few pairs, one run of each")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.repeats, arguments.batch_size, arguments.peer_batches = 48, 1, 16, [8]
        arguments.micro_batch_sizes = [8]
    if arguments.data == "pocket" and not arguments.input_template:
        arguments.input_template = "pocket"
    if arguments.growth or arguments.data == "generated":
        arguments.input_template = "{question}"
    return arguments


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(train_ours(json.loads(sys.argv[2]))))
        return
    arguments = parse()
    runs, peers = our_runs(arguments), peer_runs(arguments)
    if not peers:
        print(f"no {arguments.peer_python} (benchmarks/setup_peers.sh makes it): compared with our own plain path only")
    record: dict = {"settings": vars(arguments), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder, arguments)
        if arguments.growth:
            runs += [run for run in peers if run["name"].startswith("TRL grouped")][:1]
            record["growth"] = table = growth(model, folder, runs, arguments)
            last = table[2]["milliseconds"]
            ours = {run["name"]: last[run["name"]] for run in runs if not run["peer"]}
            plain = min(cost for name, cost in ours.items() if name.startswith("plain"))
            found = [
                (plain / min(ours.values()), "training speed where prompts are 90%, our best against our plain path")
            ]
        else:
            if peers and arguments.batch_size != 8 and not arguments.quick:
                runs.append({**runs[0], "name": "plain, 8 a step", "batch": 8, "pass": 8})
            task = prepare(pair_rows(arguments, model)[: arguments.pairs], folder / "data", model, arguments)
            print(
                f"{task['pairs']} pairs, {task['tokens']} tokens ({task['shared_tokens']} of them a prompt's second "
                f"time), longest row {task['longest']}; {arguments.epochs} epoch(s)"
            )
            rate = matmul_rate(arguments.precision, arguments.threads, arguments.clock)
            rows = run_all(runs + peers, task, model, folder, arguments)
            print_rows(rows, rate)
            found = ratios(rows)
            record |= {"data": {k: v for k, v in task.items() if k not in ("flags", "ids")}, "results": rows}
            record["matmul_flops_per_s"] = rate
    record["ratios"] = [{"ratio": number, "what": what} for number, what in found]
    record["wall_seconds"] = time.perf_counter() - start
    if target := arguments.json:
        for name in ("data", "solutions", "model", "tokenizer", "peer_python", "json"):  # names, no machine's paths
            record["settings"][name] = Path(getattr(arguments, name) or "").name
        Path(target).write_text(json.dumps(record, indent=2) + "\n")
    for number, what in found:
        print(f"ratio {number:.2f} {what}")


if __name__ == "__main__":
    main()
