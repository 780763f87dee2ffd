"""Speed and memory of scoring many completions a question, against the text-classification pipeline of transformers.

    python benchmarks/bench_score.py                                   # pocket completions, a pocket-sized model
    python benchmarks/bench_score.py --model CKPT --completions FILE   # your model and data
    python benchmarks/bench_score.py --growth                          # by completions a question, and by prompt length
    python benchmarks/bench_score.py --quick                           # under a minute

Four ways score the same completions with the same weights, precision (float32) and threads, each in a process of its
own, in turn, several times:
    ours          what eval_rm does: what completions begin with alike computed once, no padding; with the value and the
                  goal similarity of every token
    rewards only  the same without them, as eval_rm --preferences: the pipeline gives no more than rewards either
    whole rows    ours with padded rows of like length that share nothing
    pipeline      transformers.pipeline("text-classification") with several batch sizes, input in file order
Equal completions of one question are removed first: we would score them once. Time is that of scoring with
tokenisation, without loading. Tokens are those of prompt + response of every completion, whatever was computed. Memory
is the largest resident size of the process. Rewards are compared where nothing is cut: the pipeline cuts the EOS too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import largest_resident_size, run_measurement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def prepare(folder: Path, arguments: argparse.Namespace, before: int = 0) -> tuple[Path, Path]:
    """(checkpoint, completions) of the benchmark; the model and data of pocket are made here.

    Args:
        before: words, other ones for every question, that are put in front of it: longer prompts.
    """
    from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model
    from openrlhf.datasets.completions import completion_to_row, read_completions, write_jsonl
    from openrlhf.evaluation.sampling import pocket_completions
    from openrlhf.models.pretrained import load_reward_model, load_tokenizer, save_reward_model

    policy = resolve_pocket_model(POCKET)
    if arguments.completions:
        completions = read_completions(arguments.completions)
    else:
        completions = pocket_completions(cache_folder(), policy, "ood", arguments.questions, 2 * arguments.samples)
    kept: dict[str, dict[str, object]] = {}
    for one in completions:
        texts = kept.setdefault(one.question, {})
        if len(texts) < arguments.samples:
            texts.setdefault(one.generated_solution, one)
    chosen = [one for texts in list(kept.values())[: arguments.questions] for one in texts.values()]
    # A sample of every question after the other, as files output-rs0, output-rs1, ... hold them.
    order = {id(one): (i, n) for n, texts in enumerate(kept.values()) for i, one in enumerate(texts.values())}
    chosen.sort(key=lambda one: order[id(one)])
    if before:
        words = " ".join(kept).split()
        starts = {question: place % max(1, len(words) - before) for place, question in enumerate(kept)}
        in_front = {question: " ".join(words[start : start + before]) for question, start in starts.items()}
        chosen = [dataclasses.replace(one, question=f"{in_front[one.question]} {one.question}") for one in chosen]
    write_jsonl(folder / "completions.jsonl", (completion_to_row(one) for one in chosen))
    print(f"{len(chosen)} completions of {len({one.question for one in chosen})} questions")
    if arguments.model:
        return Path(arguments.model), folder / "completions.jsonl"
    checkpoint = folder / "model"
    checkpoint.mkdir(exist_ok=True)
    tokenizer = load_tokenizer(policy)
    model = load_reward_model(policy, allow_missing_head=True, pad_token_id=tokenizer.pad_token_id)
    save_reward_model(checkpoint, model, tokenizer, settings={"template": POCKET, "max_len": 512})
    return checkpoint, folder / "completions.jsonl"


def start_clock(name: str) -> Callable[[], float]:
    """Seconds since now, of the wall or of this process's processor time; what loading left behind is removed first."""
    gc.collect()
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[name]
    start = clock()
    return lambda: clock() - start


def score_ours(checkpoint, completions, share: bool, batch_tokens: int | None, clock: str) -> tuple[float, list[float]]:
    """Seconds and rewards of our scorer, which also compares every token with a goal state, here a random one."""
    import numpy as np

    from openrlhf.evaluation.goal_state import GoalState
    from openrlhf.evaluation.scored_files import ScoringJob, score_jobs

    model, tokenizer = checkpoint.load()
    vector = np.random.default_rng(0).normal(size=(1, model.hidden_size)).astype(np.float32)
    goal = GoalState(vector, 1, 1.0, checkpoint.template, False, checkpoint.max_len, "", "")
    seconds = start_clock(clock)
    (rows,) = score_jobs(
        model, tokenizer, [ScoringJob(completions)], template=checkpoint.template, max_len=checkpoint.max_len,
        goal=goal, batch_tokens=batch_tokens, share_prompts=share, keep_rows=True, progress=False,
    )  # fmt: skip
    return seconds(), [row["reward"] for row in rows]


def score_last(checkpoint, completions, batch_tokens: int | None, clock: str) -> tuple[float, list[float]]:
    """Seconds and rewards of our scorer where nothing but the reward is asked for."""
    from openrlhf.evaluation.scoring import encode_completions, score_encoded

    model, tokenizer = checkpoint.load()
    seconds = start_clock(clock)
    encoded = encode_completions(
        tokenizer, completions, template=checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template, max_len=checkpoint.max_len,
    )  # fmt: skip
    scored = score_encoded(model, encoded, batch_tokens=batch_tokens, last_only=True, progress=False)
    return seconds(), [one.reward for one in scored]


def score_pipeline(checkpoint, completions, batch_size: int, clock: str) -> tuple[float, list[float]]:
    """Seconds and rewards of the pipeline of transformers."""
    import torch
    from transformers import pipeline

    from openrlhf.datasets.templates import render_question
    from openrlhf.datasets.tokenize import encode_prompt

    classify = pipeline(
        "text-classification", model=str(checkpoint.folder), device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=torch.float32, function_to_apply="none", batch_size=batch_size, truncation=True,
        max_length=checkpoint.max_len, add_special_tokens=False,
    )  # fmt: skip
    tokenizer, end = classify.tokenizer, classify.tokenizer.eos_token
    rendering = {"template": checkpoint.template, "apply_chat_template": checkpoint.apply_chat_template}
    probe = render_question(completions[0].question, tokenizer, **rendering)
    # BOS as text, where our prompts start with one that is not in the template.
    added = len(encode_prompt(tokenizer, probe)) - len(tokenizer(probe, add_special_tokens=False)["input_ids"])
    begin = tokenizer.decode(encode_prompt(tokenizer, probe)[:added])
    seconds = start_clock(clock)
    texts = [
        begin + render_question(one.question, tokenizer, **rendering) + one.generated_solution + end
        for one in completions
    ]
    found = [result["score"] for result in classify(texts)]
    return seconds(), found


def work(arguments: argparse.Namespace) -> None:
    """One measurement, in a process of its own."""
    import torch

    from openrlhf.cli.reward_checkpoint import find_checkpoint
    from openrlhf.datasets.completions import read_completions
    from openrlhf.evaluation.scoring import encode_completions
    from openrlhf.models.pretrained import load_tokenizer

    torch.set_num_threads(arguments.threads)
    checkpoint = find_checkpoint(arguments.model)
    completions = read_completions(arguments.completions)
    kind, _, size = arguments.work.partition(":")
    if kind == "pipeline":
        seconds, rewards = score_pipeline(checkpoint, completions, int(size), arguments.clock)
    elif kind == "rewards only":
        seconds, rewards = score_last(checkpoint, completions, arguments.batch_tokens, arguments.clock)
    else:
        seconds, rewards = score_ours(checkpoint, completions, kind == "ours", arguments.batch_tokens, arguments.clock)
    memory = largest_resident_size()
    encoded = encode_completions(
        load_tokenizer(checkpoint.folder), completions, template=checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template, max_len=checkpoint.max_len,
    )  # fmt: skip
    tokens = sum(map(len, encoded))
    rewards = [None if one.truncated else reward for one, reward in zip(encoded, rewards, strict=True)]
    print(json.dumps({"seconds": seconds, "tokens": tokens, "memory": memory, "rewards": rewards}))


def measure(kind: str, checkpoint: Path, completions: Path, arguments: argparse.Namespace) -> dict:
    """Run one measurement and read what it printed."""
    command = [__file__, "--work", kind, "--model", str(checkpoint), "--completions", str(completions)]
    command += ["--threads", str(arguments.threads), "--clock", arguments.clock]
    command += ["--batch_tokens", str(arguments.batch_tokens)] if arguments.batch_tokens else []
    return run_measurement(command, arguments.threads)


def show_growth(arguments: argparse.Namespace) -> None:
    """Speed against the pipeline by completions a question, and by words in front of the prompt with 16 of them."""
    results = []
    pipelines = [f"pipeline:{size}" for size in arguments.batch_sizes]
    for samples, before in [(1, 0), (4, 0), (16, 0), (50, 0), (16, 50), (16, 150), (16, 250)]:
        arguments.samples = samples
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, completions = prepare(Path(folder), arguments, before)
            runs = {kind: [] for kind in ("ours", *pipelines)}
            for _ in range(arguments.repeats):
                for kind, found in runs.items():
                    found.append(measure(kind, checkpoint, completions, arguments))
        seconds = {kind: statistics.median(run["seconds"] for run in found) for kind, found in runs.items()}
        memory = {kind: statistics.median(run["memory"] for run in found) for kind, found in runs.items()}
        best = min(pipelines, key=seconds.get)
        row = {"samples": samples, "words_before": before, "ratio": seconds[best] / seconds["ours"]}
        results.append(row | {"tokens": runs["ours"][0]["tokens"], "seconds": seconds, "mib": memory})
        print(
            f"{samples:3} completions a question, {before:3} words before: ratio {row['ratio']:.2f} "
            f"({seconds['ours']:.2f} and {seconds[best]:.2f} s), memory {memory['ours'] / memory[best]:.2f}"
        )
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "samples"}
        Path(arguments.json).write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="reward checkpoint; default: the pocket policy with a new head")
    parser.add_argument("--completions", help="completions; default: sampled from the pocket policy")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--samples", type=int, default=50, help="completions a question, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[8, 32], help="of the pipeline")
    parser.add_argument("--batch_tokens", type=int, help="of our scorer; default: that of eval_rm")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu where other work runs")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="few questions, one run of each")
    parser.add_argument("--growth", action="store_true", help="ratios by completions a question and by prompt length")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    if arguments.quick:
        arguments.questions, arguments.repeats, arguments.batch_sizes = 8, 1, [8]
    if arguments.growth:
        show_growth(arguments)
        return
    pipelines = [f"pipeline:{size}" for size in arguments.batch_sizes]
    kinds = {"ours": [], "rewards only": [], "whole rows": []} | {kind: [] for kind in pipelines}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, completions = prepare(Path(folder), arguments)
        for _ in range(arguments.repeats):
            for kind, runs in kinds.items():
                runs.append(measure(kind, checkpoint, completions, arguments))
    reference = kinds["ours"][0]["rewards"]
    rows = {}
    print(f"\n{'':14}{'seconds':>9}{'tokens/s':>10}{'MiB':>7}{'largest difference of a reward':>33}")
    for kind, runs in kinds.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        memory = statistics.median(run["memory"] for run in runs)
        pairs = zip(reference, runs[0]["rewards"], strict=True)
        difference = max((abs(a - b) for a, b in pairs if a is not None), default=float("nan"))
        rows[kind] = {"seconds": seconds, "tokens_per_s": runs[0]["tokens"] / seconds, "mib": memory}
        print(f"{kind:14}{seconds:9.2f}{runs[0]['tokens'] / seconds:10.0f}{memory:7.0f}{difference:33.1e}")
    best = min(pipelines, key=lambda kind: rows[kind]["seconds"])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"settings": vars(arguments), "results": rows}, indent=2) + "\n")
    print(f"memory: ours / {best} = {rows['ours']['mib'] / rows[best]['mib']:.2f}")
    print(f"ratio {rows['whole rows']['seconds'] / rows['ours']['seconds']:.2f} ours against our own whole rows")
    # The best pipeline last, and of its lines that of all tokens.
    for kind in sorted(pipelines, key=lambda kind: -rows[kind]["seconds"]):
        for way, what in (("rewards only", "rewards alone"), ("ours", "values and goal similarities of all tokens")):
            print(f"ratio {rows[kind]['seconds'] / rows[way]['seconds']:.2f} scoring speed, {what}, against {kind}")


if __name__ == "__main__":
    main()
