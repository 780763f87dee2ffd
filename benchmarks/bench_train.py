"""Speed and memory of training a reward model, against TRL's RewardTrainer.

    python benchmarks/bench_train.py                                    # pocket pairs, a Llama of 5 million parameters
    python benchmarks/bench_train.py --data hh --tokenizer MODEL        # helpful-harmless pairs
    python benchmarks/bench_train.py --data gsm8k --model MODEL
    python benchmarks/bench_train.py --data pool --responses_per_prompt 8 --tokenizer MODEL      # all pairs of a prompt
    python benchmarks/bench_train.py --growth                           # cost by prompt share and by length
    python benchmarks/bench_train.py --quick                            # under a minute

Every way trains from the same weights on the same token ids (ours makes them, the peer is given them, both count what
they saw, and the counts must agree), with the same precision, threads, optimizer and clipping, each in a process of its
own, in turn, several times; medians. Ours is the path of train_rm, with further flags for each variant (--variant
'NAME=FLAGS' adds one).
    TRL defaults         8 pairs a pass and a step, rows in random order, gradient checkpointing: its defaults
    TRL no checkpointing the same without checkpointing
    TRL grouped, N       its length grouping, N pairs a pass, as many passes a step as give --peer_batch_size
Precision and gradient checkpointing aside nothing of the peer is changed for speed. Ours and TRL in random order train
on the first --pairs of the shuffled data; TRL grouped on as many, which are whole steps of its order of all of the
data, evenly spread by length: so few pairs alone would be grouped badly. A rate is that of the tokens, divided by those
of a pair. With --responses_per_prompt ours trains on a prompt with its responses, each computed once, and the peer on
all (correct, wrong) pairs of the same groups, or on --peer_pairs of them, spread by length.

Timed are all steps of the training, logging and data order included, loading and tokenisation not; a short training in
the same process goes before it. By the wall clock or (--clock cpu, for a machine with other work on it) the time of the
process on the CPU. Memory is the largest resident size of the process up to the last step (on a GPU: allocated there).
The mean loss of the steps is printed for all; the orders differ, so the peer's need not be equal. Losses of our
variants are compared with those of the plain path step by step. --profile: where the time of a step of ours goes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measuring import run_measurement
from train_profile import print_profiles
from train_tasks import LEARNING_RATE, ROOT, generated_rows, make_model, prepare, read_rows

sys.path.insert(0, str(ROOT))
FOLDER = Path(__file__).resolve().parent


def measure(run: dict, task: dict, model: Path, folder: Path, arguments: argparse.Namespace, profile: bool) -> dict:
    """Run one measurement and read what it printed."""
    batch, size = run["batch"], run["pass"]
    settings = {"threads": arguments.threads, "epochs": arguments.epochs}
    if run["peer"]:
        rows = task["peer"]["grouped" if run["grouped"] else "random"]
        settings |= {
            "model": str(model), "ids": rows["ids"], "warmup": task["peer"]["warmup"], "batch": size,
            "accumulation": batch // size, "in_order": run["grouped"], "gradient_checkpointing": run["checkpointing"],
            "max_len": arguments.max_len, "bf16": arguments.precision == "bf16", "learning_rate": LEARNING_RATE,
            "scratch": str(folder / "peer"),
        }  # fmt: skip
        words, python = [str(FOLDER / "train_peer.py")], arguments.peer_python
    else:
        rows, few = task, min(size, task["warmup_examples"])
        settings["flags"] = [*task["flags"], *sizes(batch, size), *run["flags"]]
        settings |= {"warmup": [*task["warmup"], *sizes(few, few), *run["flags"]], "profile": profile}
        words, python = [str(FOLDER / "train_ours.py")], sys.executable
    found = run_measurement([*words, json.dumps(settings)], arguments.threads, python)
    expected = rows["pairs"] * arguments.epochs, rows["tokens"] * arguments.epochs
    if (found["pairs"], found["tokens"]) != expected:
        raise SystemExit(f"{run['name']}: saw {found['pairs']} pairs, {found['tokens']} tokens; expected {expected}")
    return found


def sizes(batch: int, micro: int) -> list[str]:
    """Flags of train_rm."""
    return ["--train_batch_size", str(batch), "--micro_train_batch_size", str(micro)]


def our_runs(arguments: argparse.Namespace) -> list[dict]:
    """Our variants: padded rows, packed rows by number and by tokens, and those asked for."""
    variants = {
        "plain": ["--prefix_sharing", "off"],
        "packed": ["--prefix_sharing", "on"],
        f"packed, {arguments.batch_tokens} tokens": [
            "--prefix_sharing", "on", "--batch_tokens", str(arguments.batch_tokens),
        ],
    }  # fmt: skip
    for text in arguments.variant:
        name, _, flags = text.partition("=")
        variants[name] = shlex.split(flags)
    size, runs = arguments.batch_size, []
    for name, flags in variants.items():
        by_tokens = "--batch_tokens" in flags
        for micro in [size] if by_tokens else sorted({min(one, size) for one in arguments.micro_batch_sizes}):
            label = name if by_tokens else f"{name}, {micro}"
            runs.append({"name": label, "peer": False, "batch": size, "pass": micro, "flags": flags})
    return runs


def peer_runs(arguments: argparse.Namespace) -> list[dict]:
    """TRL at its defaults and at its best; [] where its environment is missing."""
    if not Path(arguments.peer_python).is_file():
        return []
    default = {"peer": True, "batch": 8, "pass": 8, "grouped": False}
    runs = [{"name": "TRL defaults", "checkpointing": True, **default}]
    runs.append({"name": "TRL no checkpointing", "checkpointing": False, **default})
    for size in arguments.peer_batches:
        batch = {"batch": arguments.peer_batch_size, "pass": size}
        runs.append({"name": f"TRL grouped, {size}", "peer": True, "grouped": True, "checkpointing": False, **batch})
    return runs


def run_all(runs: list[dict], task: dict, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, dict]:
    """All runs in turn, ``repeats`` times; medians by name, the profile of the last one."""
    found: dict[str, list[dict]] = {run["name"]: [] for run in runs}
    for repeat in range(arguments.repeats):
        profile = arguments.profile and repeat == arguments.repeats - 1
        for run in runs:
            found[run["name"]].append(measure(run, task, model, folder, arguments, profile))
            print(f"{run['name']}: {found[run['name']][-1]}"[:160], file=sys.stderr)
    rows = {}
    for name, results in found.items():
        seconds = "seconds" if arguments.clock == "wall" else "cpu_seconds"
        rates = [one["tokens"] / one[seconds] * task["pairs"] / task["tokens"] for one in results]
        rows[name] = {
            **results[-1], "pairs_per_s": statistics.median(rates), "runs": rates,
            "memory": statistics.median(one["memory"] for one in results),
            "tokens_per_s": statistics.median(rates) * task["tokens"] / task["pairs"],
            "flops_per_s": statistics.median(rates) * task["flops"] / task["pairs"],
        }  # fmt: skip
    return rows


def print_rows(rows: dict[str, dict]) -> None:
    """One line a run; tokens and operations are those of pairs computed whole, so that sharing shows as more."""
    print(f"\n{'':22}{'pairs/s':>9}{'tokens/s':>10}{'GFLOP/s':>9}{'MiB':>7}{'mean loss':>11}{'tokens seen':>13}")
    for name, row in rows.items():
        print(
            f"{name:22}{row['pairs_per_s']:9.2f}{row['tokens_per_s']:10.0f}{row['flops_per_s'] / 1e9:9.1f}"
            f"{row['memory']:7.0f}{row['loss']:11.5f}{row['tokens']:13d}"
        )
    ours = {name: row["losses"] for name, row in rows.items() if "losses" in row}
    first, *others = ours
    for name in others:
        if len(ours[name]) == len(ours[first]):
            worst = max(abs(a - b) for a, b in zip(ours[name], ours[first], strict=True))
            rows[name]["loss_difference"] = worst
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
        mean, part = task["tokens"] / task["pairs"] / 2, 2 - 2 * task["unique_tokens"] / task["tokens"]
        table.append({"tokens": mean, "prompt_share": part, "milliseconds": cost})
        print(f"{mean:8.0f}{part:8.2f}" + "".join(f"{cost[run['name']]:22.1f}" for run in runs), flush=True)
    return table


def ratios(rows: dict[str, dict]) -> list[tuple[float, str]]:
    """Ratios of pairs/s worth reading, the best of ours against the peer's best last."""
    ours = {name: row["pairs_per_s"] for name, row in rows.items() if "losses" in row}
    peer = {name: row["pairs_per_s"] for name, row in rows.items() if "losses" not in row}
    best = max(ours, key=ours.__getitem__)
    against = []
    if plain := [name for name in ours if name.startswith("plain")]:
        against.append(("our plain path", max(ours[name] for name in plain)))
    if "TRL defaults" in peer:
        against.append(("TRL defaults", peer["TRL defaults"]))
    if peer:
        strongest = max(peer, key=peer.__getitem__)
        against.append((f"{strongest}, the peer's best", peer[strongest]))
        print(f"memory: ours ({best}) / {strongest} = {rows[best]['memory'] / rows[strongest]['memory']:.2f}")
    return [(ours[best] / rate, f"training speed, ours ({best}) against {name}") for name, rate in against]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="pocket", help="pocket, hh, gsm8k, pool, generated, or a file of pairs or solutions")
    add("--solutions", default=os.environ.get("DATA"), help="file of gsm8k or pool; default: $DATA, else shared/data")
    add("--pairs_per_question", type=int, default=4, help="of labelled solutions")
    add("--responses_per_prompt", type=int, help="of labelled solutions: train on groups, TRL on all their pairs")
    add("--length", type=int, default=256, help="of generated rows: tokens of prompt and response")
    add("--prompt_share", type=float, default=0.5, help="of generated rows: the prompt's part of them")
    add("--input_template", help="of train_rm; default: pocket's for pocket, else as train_rm")
    add("--model", default="5m", help="5m or 300m (Llamas made here), pocket, or a folder")
    add("--tokenizer", help="of a Llama made here: a folder; default: pocket's")
    add("--pairs", type=int, default=256, help="pairs to train on; questions, with --responses_per_prompt")
    add("--peer_pairs", type=int, help="pairs that the peer trains on; default: all of the same")
    add("--epochs", type=int, default=1)
    add("--max_len", type=int, default=1024)
    add("--batch_size", type=int, help="pairs (prompts) a step of ours; default: 32 pairs, 4 prompts")
    add("--micro_batch_sizes", type=int, nargs="+", default=[4, 8], help="pairs (prompts) a pass of ours")
    add("--batch_tokens", type=int, default=4096, help="tokens a packed pass of ours")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="further flags of train_rm")
    add("--peer_batch_size", type=int, default=32, help="pairs a step of TRL grouped (its defaults: 8)")
    add("--peer_batches", type=int, nargs="+", default=[2, 4, 8], help="pairs a pass of TRL grouped")
    add("--peer_python", default=os.environ.get("PEER_PYTHON", str(ROOT / ".venv-peers/bin/python")))
    add("--only", nargs="+", metavar="NAME", help="only the ways whose names begin so")
    add("--precision", choices=["float32", "bf16"], default="float32")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=os.cpu_count())
    add("--clock", choices=["wall", "cpu"], default="wall", help="cpu: of the process alone, for a busy machine")
    add("--profile", action="store_true", help="where the time of a step of ours goes")
    add("--growth", action="store_true", help="cost by prompt share and length instead")
    add("--json", help="file for all figures")
    add("--quick", action="store_true", help="few pairs, one run of each of three ways, one thread, processor time")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.pairs, arguments.repeats, arguments.batch_size, arguments.peer_batch_size = 32, 1, 16, 16
        arguments.micro_batch_sizes, arguments.peer_batches = [8], [8]
        arguments.threads, arguments.clock = 1, "cpu"
        arguments.only = arguments.only or ["plain", "packed, 8", "TRL grouped"]
    arguments.batch_size = arguments.batch_size or (4 if arguments.responses_per_prompt else 32)
    if arguments.data == "pocket" and not arguments.input_template:
        arguments.input_template = "pocket"
    if arguments.growth or arguments.data == "generated":
        arguments.input_template = "{question}"
    if arguments.responses_per_prompt and (arguments.growth or arguments.data in ("pocket", "hh", "generated")):
        parser.error("--responses_per_prompt: wants labelled solutions, such as --data pool")
    if bad := [size for size in arguments.peer_batches if arguments.peer_batch_size % size]:
        parser.error(f"--peer_batches {bad}: expected parts of --peer_batch_size {arguments.peer_batch_size}")
    return arguments


def main() -> None:
    arguments = parse()
    runs, peers = our_runs(arguments), peer_runs(arguments)
    if not peers:
        print(f"no {arguments.peer_python} (benchmarks/setup_peers.sh makes it): compared with our own plain path only")
    if arguments.growth:
        peers = [run for run in peers if run["grouped"]][:1]
    runs += peers
    if arguments.only:
        runs = [run for run in runs if run["name"].startswith(tuple(arguments.only))]
        if not any(not run["peer"] for run in runs):
            raise SystemExit(f"--only {' '.join(arguments.only)}: no way of ours begins so")
    record: dict = {"settings": vars(arguments), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder, arguments)
        if arguments.growth:
            record["growth"] = table = growth(model, folder, runs, arguments)
            last = table[2]["milliseconds"]
            ours = {run["name"]: last[run["name"]] for run in runs if not run["peer"]}
            plain = min(cost for name, cost in ours.items() if name.startswith("plain"))
            what = "training speed where prompts are 90%, our best against our plain path"
            found = [(plain / min(ours.values()), what)]
        else:
            task = prepare(read_rows(arguments, model), folder / "data", model, arguments)
            print(
                f"{task['examples']} examples, {task['pairs']} pairs, {task['tokens']} tokens in them, "
                f"{task['unique_tokens']} where each prompt and response counts once, longest row {task['longest']}"
            )
            rows = run_all(runs, task, model, folder, arguments)
            print_rows(rows)
            print_profiles(rows)
            found = ratios(rows)
            record |= {"data": {k: v for k, v in task.items() if isinstance(v, int | float)}, "results": rows}
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
