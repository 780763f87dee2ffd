"""Speed and memory of reinforcement learning, against TRL's GRPOTrainer.

    python benchmarks/bench_rl.py                              # pocket's policy, 256 prompts with 4 responses each
    python benchmarks/bench_rl.py --updates 4                  # several optimizer steps from each rollout
    python benchmarks/bench_rl.py --model MODEL --prompts 16 --rollout_prompts 16 --micro_batch_sizes 8
    python benchmarks/bench_rl.py --quick                      # under a minute

Both sides train the same policy from the same weights on the same prompts by the same objective (advantages by mean
and deviation of a group, clipped ratio, mean over tokens, no KL divergence), with the same Python reward, number of
responses to a prompt, longest response, EOS, temperature 1, AdamW, learning rate, clipping of gradients, float32 and
threads, each in a process of its own, in turn, several times; medians. Ours is the path of train_ppo.
    ours, N        N responses a pass with gradients
    TRL, N         the same; no gradient checkpointing, no vLLM
    TRL defaults   8 responses a pass, gradient checkpointing: its defaults (bfloat16, another, is off)
Responses are drawn, so their lengths differ between the sides by chance: both count what they sampled, and tokens/s
stands beside samples/s. The learning rate is small, so that the policy, and with it the lengths, hardly move. Prompt
tokens, samples and updates must be equal, or the benchmark ends with an error. With one update a rollout TRL leaves out
the pass for the old log-probabilities, as they are those of the update itself; ours does not. Ours leaves out responses
to prompts whose responses all score alike, as they teach nothing; TRL does not.

Timed are all steps of a run, sampling, reward and logging included, loading not; a short run in the same process goes
before it. By the wall clock or (--clock cpu, for a machine with other work on it) the time of the process on the CPU.
Memory is the largest resident size of the process up to the last step (on a GPU: allocated there). Parts are wall
seconds; TRL's training holds what is not sampling or reward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measuring import run_measurement

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
sys.path.insert(0, str(ROOT))

COUNTS = ("samples", "prompt_tokens", "updates")  # equal on both sides
PARTS = ("sampling", "reward", "logprobs", "training")


def write_prompts(path: Path, count: int) -> Path:
    """Questions of pocket as its policy reads them, with their answers."""
    from openrlhf.datasets.pocket import generate_problems
    from openrlhf.datasets.templates import render_prompt

    rows = [
        {"prompt": render_prompt("pocket", problem.question), "answer": str(problem.answer)}
        for problem in generate_problems("train", count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def our_flags(arguments: argparse.Namespace, prompts: Path, save: Path, micro: int) -> list[str]:
    """Flags of train_ppo."""
    responses = arguments.rollout_prompts * arguments.samples
    values = {
        "pretrain": arguments.model,
        "prompt_data": prompts,
        "input_key": "prompt",
        "remote_rm_url": FOLDER / "rl_reward.py",
        "save_path": save,
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0,
        "n_samples_per_prompt": arguments.samples,
        "rollout_batch_size": arguments.rollout_prompts,
        "train_batch_size": responses // arguments.updates,
        "micro_train_batch_size": micro,
        "micro_rollout_batch_size": micro,
        "generate_max_len": arguments.max_tokens,
        "actor_learning_rate": arguments.learning_rate,
        "lr_scheduler": "constant",
        "num_episodes": 1,
        "eval_fraction": 0,
    }
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def list_runs(arguments: argparse.Namespace) -> list[dict]:
    """Ways of both sides; of ours alone where the peer's environment is missing."""
    sizes = arguments.micro_batch_sizes
    runs = [{"name": f"ours, {size}", "peer": False, "micro": size} for size in sizes]
    if Path(arguments.peer_python).is_file():
        runs += [{"name": f"TRL, {size}", "peer": True, "micro": size, "checkpointing": False} for size in sizes]
        runs.append({"name": "TRL defaults", "peer": True, "micro": 8, "checkpointing": True})
    return [run for run in runs if not arguments.only or run["name"].startswith(tuple(arguments.only))]


def measure(run: dict, folder: Path, arguments: argparse.Namespace) -> dict:
    """Run one measurement and read what it printed."""
    from openrlhf.cli.common import resolve_pocket_model

    prompts, warmup = folder / "prompts.jsonl", folder / "warmup.jsonl"
    responses = arguments.rollout_prompts * arguments.samples
    if run["peer"]:
        settings = {
            "model": resolve_pocket_model(arguments.model), "prompts": str(prompts), "warmup": str(warmup),
            "micro": run["micro"], "update": responses // arguments.updates, "rollout": responses,
            "samples": arguments.samples, "max_tokens": arguments.max_tokens,
            "gradient_checkpointing": run["checkpointing"], "learning_rate": arguments.learning_rate,
            "scratch": str(folder / "peer"), "threads": arguments.threads,
        }  # fmt: skip
        return run_measurement(
            [str(FOLDER / "rl_peer.py"), json.dumps(settings)], arguments.threads, arguments.peer_python
        )
    with tempfile.TemporaryDirectory(dir=folder) as name:
        settings = {
            "flags": our_flags(arguments, prompts, Path(name) / "run", run["micro"]),
            "warmup": our_flags(arguments, warmup, Path(name) / "warmup", run["micro"]),
            "threads": arguments.threads,
        }
        return run_measurement([str(FOLDER / "rl_ours.py"), json.dumps(settings)], arguments.threads)


def summarise(results: list[dict], clock: str) -> dict:
    """Medians of the repeats of one way."""
    seconds = "seconds" if clock == "wall" else "cpu_seconds"
    return {
        **results[-1],
        "samples_per_s": statistics.median(one["samples"] / one[seconds] for one in results),
        "tokens_per_s": statistics.median(one["tokens"] / one[seconds] for one in results),
        "runs": [one["samples"] / one[seconds] for one in results],
        "tokens": statistics.median(one["tokens"] for one in results),
        "memory": statistics.median(one["memory"] for one in results),
        "parts": {part: statistics.median(one["parts"].get(part, 0.0) for one in results) for part in PARTS},
    }


def run_all(runs: list[dict], folder: Path, arguments: argparse.Namespace) -> dict[str, dict]:
    """All ways in turn, ``repeats`` times; medians by name.

    Raises:
        SystemExit: the sides saw different prompts, samples or updates.
    """
    found: dict[str, list[dict]] = {run["name"]: [] for run in runs}
    for _ in range(arguments.repeats):
        for run in runs:
            result = measure(run, folder, arguments)
            found[run["name"]].append(result)
            print(f"{run['name']}: {result}"[:200], file=sys.stderr)
            first = found[runs[0]["name"]][0]
            if different := [name for name in COUNTS if result[name] != first[name]]:
                told = ", ".join(f"{name} {result[name]} against {first[name]}" for name in different)
                raise SystemExit(f"{run['name']} did other work than {runs[0]['name']}: {told}")
    return {name: summarise(results, arguments.clock) for name, results in found.items()}


def print_rows(rows: dict[str, dict]) -> None:
    """One line a way."""
    heads = ("samples/s", "tokens/s", "MiB", "tokens", "reward", *PARTS)
    print(f"\n{'':14}" + "".join(f"{head:>11}" for head in heads))
    for name, row in rows.items():
        shares = "".join(f"{row['parts'][part] / sum(row['parts'].values()):11.1%}" for part in PARTS)
        print(
            f"{name:14}{row['samples_per_s']:11.1f}{row['tokens_per_s']:11.0f}{row['memory']:11.0f}"
            f"{row['tokens']:11.0f}{row['reward']:11.3f}{shares}"
        )


def compare(rows: dict[str, dict]) -> list[tuple[float, str]]:
    """Ratios of the fastest of ours to TRL's defaults and, last, to the fastest of TRL."""
    ours = max((name for name in rows if name.startswith("ours")), key=lambda name: rows[name]["samples_per_s"])
    peers = [name for name in rows if name.startswith("TRL")]
    best = max(peers, key=lambda name: rows[name]["samples_per_s"])
    found = []
    if "TRL defaults" in peers:
        ratio = rows[ours]["samples_per_s"] / rows["TRL defaults"]["samples_per_s"]
        found.append((ratio, f"samples/s, {ours} against TRL defaults"))
    for name, unit in (("memory", "peak memory"), ("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        found.append((rows[ours][name] / rows[best][name], f"{unit}, {ours} against {best}, TRL's fastest"))
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="pocket", help="policy: pocket or a folder")
    add("--prompts", type=int, default=256, help="whole rollouts of them")
    add("--rollout_prompts", type=int, default=64, help="prompts of a rollout")
    add("--samples", type=int, default=4, help="responses to a prompt")
    add("--updates", type=int, default=1, help="optimizer steps from a rollout, each on a part of it")
    add("--max_tokens", type=int, default=64, help="of a response")
    add("--micro_batch_sizes", type=int, nargs="+", default=[16, 64], help="responses of a pass, on both sides")
    add("--learning_rate", type=float, default=1e-6)
    add("--peer_python", default=os.environ.get("PEER_PYTHON", str(ROOT / ".venv-peers/bin/python")))
    add("--only", nargs="+", metavar="NAME", help="only the ways whose names begin so")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=os.cpu_count())
    add("--clock", choices=["wall", "cpu"], default="wall", help="cpu: of the process alone, for a busy machine")
    add("--json", help="file for all figures")
    add("--quick", action="store_true", help="few prompts, one run of one way a side, one thread, processor time")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.prompts, arguments.rollout_prompts, arguments.repeats = 64, 32, 1
        arguments.micro_batch_sizes, arguments.threads, arguments.clock = [32], 1, "cpu"
        arguments.only = arguments.only or ["ours", "TRL, "]
    responses = arguments.rollout_prompts * arguments.samples
    if arguments.prompts % arguments.rollout_prompts or responses % arguments.updates:
        parser.error("--prompts: expected whole rollouts, --updates: equal parts of a rollout's responses")
    if bad := [size for size in [*arguments.micro_batch_sizes, 8] if responses // arguments.updates % size]:
        parser.error(f"passes of {bad} are no parts of an update of {responses // arguments.updates} responses")
    return arguments


def main() -> None:
    arguments = parse()
    runs = list_runs(arguments)
    if not any(run["name"].startswith("ours") for run in runs):
        raise SystemExit(f"--only {' '.join(arguments.only)}: no way of ours begins so")
    record: dict = {"settings": vars(arguments), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", arguments.prompts)
        write_prompts(folder / "warmup.jsonl", arguments.rollout_prompts)
        rows = run_all(runs, folder, arguments)
    first = rows[runs[0]["name"]]
    print(
        f"{arguments.prompts} prompts of {first['prompt_tokens'] / first['samples']:.0f} tokens, {first['samples']} "
        f"responses of at most {arguments.max_tokens} tokens, {first['updates']} updates; ours trains on "
        f"{first['learning_share']:.1%} of the responses"
    )
    print_rows(rows)
    found = compare(rows) if any(run["peer"] for run in runs) else []
    record |= {"results": rows, "ratios": [{"ratio": number, "what": what} for number, what in found]}
    record["wall_seconds"] = time.perf_counter() - start
    if target := arguments.json:
        for name in ("model", "peer_python", "json"):  # names, no machine's paths
            record["settings"][name] = Path(getattr(arguments, name)).name
        Path(target).write_text(json.dumps(record, indent=2) + "\n")
    for number, what in found:
        print(f"ratio {number:.2f} {what}")
    if not found:
        print(f"no ratio: TRL is not installed at {arguments.peer_python}; benchmarks/setup_peers.sh installs it")


if __name__ == "__main__":
    main()
