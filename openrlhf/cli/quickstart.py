"""The whole method in one command on the embedded task: pairs, two reward models, goal state, scores, one table."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.cli import train_rm
from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model, run_command
from openrlhf.cli.parser import parse_config
from openrlhf.cli.study_cell import chosen_sequences
from openrlhf.evaluation.filtering import filter_tradeoff
from openrlhf.evaluation.metrics import auroc, auroc_interval, paired_auroc_difference, prefix_scores
from openrlhf.evaluation.paired import compare_all
from openrlhf.evaluation.plots import plot_quickstart
from openrlhf.evaluation.report import write_report
from openrlhf.evaluation.summary import summarise_rows
from openrlhf.evaluation.threshold_choice import threshold_at_equal_accuracy
from openrlhf.trainer.config import TrainRMConfig, flag
from openrlhf.utils.checkpoint import atomic_write_text, ensure_writable
from openrlhf.utils.manifest import finish_manifest, write_manifest

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.evaluation.goal_state import GoalState

logger = logging.getLogger(__name__)

PERCENTS = (25, 50, 75, 100)
SCORES = {  # label in the table -> (model, key of a scored row)
    "vanilla reward": ("vanilla", "partial_rewards"),
    "contrastive reward": ("contrastive", "partial_rewards"),
    "goal similarity": ("contrastive", "cosine_sim"),
}
SPLITS = {"test": "in distribution", "ood": "out of distribution"}


@dataclass(frozen=True)
class QuickstartConfig:
    """Train a vanilla and a contrastive reward model on the embedded task and compare them in one table."""

    output: str = flag("./runs/quickstart", "Folder of everything that is written")
    seeds: str = flag("0", "Comma list; every seed repeats sampling, training and scoring")
    max_epochs: int = flag(3, "Passes over the pairs")
    train_batch_size: int = flag(32, "Pairs per step")
    learning_rate: float = flag(4e-4, "Peak learning rate of both models")
    contrastive_loss_beta: float = flag(0.5, "Weight of the contrastive term")
    eval_questions: int = flag(250, "Questions of each held-out set")
    eval_samples: int = flag(8, "Completions scored per question")
    max_pairs: int | None = flag(None, "Train on at most this many pairs")


def train_models(config: QuickstartConfig, seed: int, folder: Path) -> None:
    """Train both strategies from the same start on the same pairs with the same steps; finished ones are kept."""
    from openrlhf.models.pretrained import checkpoint_fingerprint

    for strategy in ("vanilla", "contrastive"):
        settings = TrainRMConfig(
            pretrain=POCKET,
            dataset=POCKET,
            save_path=str(folder / strategy),
            reward_model_strategy=strategy,
            contrastive_loss_beta=config.contrastive_loss_beta,
            max_epochs=config.max_epochs,
            train_batch_size=config.train_batch_size,
            micro_train_batch_size=config.train_batch_size,
            learning_rate=config.learning_rate,
            max_samples=config.max_pairs,
            max_len=256,
            logging_steps=10,
            seed=seed,
        )
        manifest = folder / strategy / "manifest.json"
        if manifest.is_file():
            written = json.loads(manifest.read_text())
            wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
            same_start = written.get("pretrain_weights") == checkpoint_fingerprint(resolve_pocket_model(POCKET))
            if written["status"] == "finished" and written["config"] == wanted and same_start:
                logger.info("%s model of seed %d: already trained", strategy, seed)
                continue
        logger.info("training the %s model, seed %d", strategy, seed)
        train_rm.run(settings)


@lru_cache(maxsize=1)  # both models of a seed are asked for the same pairs
def training_sequences(seed: int, max_pairs: int | None) -> list[list[int]]:
    """Token ids of prompt and chosen response of every training pair."""
    from openrlhf.models.pretrained import load_tokenizer

    settings = TrainRMConfig(pretrain=POCKET, dataset=POCKET, seed=seed, max_len=256, max_samples=max_pairs)
    pairs, _ = train_rm.load_pairs(settings, load_tokenizer(resolve_pocket_model(POCKET)))
    return list(chosen_sequences(pairs))


def score_all(config: QuickstartConfig, seed: int, folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Scored rows by model and split; goal states are computed on the way."""
    from openrlhf.evaluation.sampling import pocket_completions
    from openrlhf.evaluation.scored_files import score_completions
    from openrlhf.models.pretrained import checkpoint_fingerprint, load_reward_model, load_tokenizer

    policy = resolve_pocket_model(POCKET)
    completions = {
        split: pocket_completions(
            cache_folder(), policy, split, config.eval_questions, config.eval_samples, seed=10_000 + seed
        )
        for split in ("validation", *SPLITS)
    }
    sizes = f"{config.eval_questions}x{config.eval_samples}"
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for strategy in ("vanilla", "contrastive"):
        checkpoint = folder / strategy
        model, tokenizer = load_reward_model(checkpoint).eval(), load_tokenizer(checkpoint)
        fingerprint = checkpoint_fingerprint(checkpoint)
        goal = goal_of(config, model, seed, folder / "goals" / strategy, fingerprint)
        rows[strategy] = {
            split: score_completions(
                model,
                tokenizer,
                items,
                template=POCKET,
                max_len=256,
                goal=goal,
                out_path=folder / "scores" / strategy / f"{split}-{sizes}-{fingerprint}.jsonl",
                checkpoint=fingerprint,
            )
            for split, items in completions.items()
        }
    return rows


def goal_of(config: QuickstartConfig, model, seed: int, folder: Path, fingerprint: str) -> GoalState:
    """Goal state of a checkpoint, read when it was computed before."""
    from openrlhf.evaluation.goal_state import GoalState, compute_goal_state

    if (folder / "goal_state.npy").is_file():
        goal = GoalState.load(folder / "goal_state.npy")
        if goal.checkpoint == fingerprint:
            return goal
    goal = compute_goal_state(
        model,
        training_sequences(seed, config.max_pairs),
        batch_tokens=16384,
        template=POCKET,
        max_len=256,
        checkpoint=fingerprint,
        dataset="pocket training pairs",
    )
    goal.save(folder)
    return goal


def summarise(rows: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Every figure of one seed, as plain numbers."""
    figures: dict[str, Any] = {}
    for split in SPLITS:
        labels = [row["is_correct"] for row in rows["vanilla"][split]]
        questions = [row["question"] for row in rows["vanilla"][split]]
        last = {name: prefix_scores(rows[model][split], key, 100) for name, (model, key) in SCORES.items()}
        equal = threshold_at_equal_accuracy(rows["contrastive"]["validation"], rows["contrastive"][split])
        curve = filter_tradeoff(rows["contrastive"][split])
        figures[split] = {
            "completions": len(labels),
            "correct": float(np.mean(labels)),
            "auroc": {name: list(auroc_interval(labels, scores, questions)) for name, scores in last.items()},
            "difference": {
                name: list(paired_auroc_difference(labels, last[name], last["vanilla reward"], questions))
                for name in ("contrastive reward", "goal similarity")
            },
            "prefix_auroc": {
                name: {str(p): auroc(labels, prefix_scores(rows[model][split], key, p)) for p in PERCENTS}
                for name, (model, key) in SCORES.items()
            },
            "vote": dataclasses.asdict(equal.test),
            "tradeoff": [[report.tokens_saved, report.accuracy] for report in curve],
        }
        vanilla_goal = prefix_scores(rows["vanilla"][split], "cosine_sim", 100)
        figures[split]["auroc"]["goal similarity (vanilla model)"] = list(
            auroc_interval(labels, vanilla_goal, questions)
        )
    return figures


def average(per_seed: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over seeds of every number, in the same nesting; None where a seed has none."""
    first = per_seed[0]
    if isinstance(first, dict):
        return {key: average([seed[key] for seed in per_seed]) for key in first}
    if isinstance(first, list):
        length = min(len(seed) for seed in per_seed)  # trade-off curves may differ by a point
        return [average([seed[i] for seed in per_seed]) for i in range(length)]
    if any(value is None for value in per_seed):
        return None
    return first if isinstance(first, str) else float(np.mean(per_seed))


def _number(value: float | None, signed: bool = False) -> str:
    return "n/a" if value is None or math.isnan(value) else f"{value:+.3f}" if signed else f"{value:.3f}"


def format_report(per_seed: dict[int, dict[str, Any]]) -> str:
    """The table as Markdown, readable in a terminal too."""
    mean = average(list(per_seed.values()))
    seeds = ", ".join(map(str, per_seed))
    note = "" if len(per_seed) == 1 else " (means over seeds, also of the interval ends)"
    lines = [f"Pocket quickstart, seed {seeds}{note}", ""]
    for split, words in SPLITS.items():
        part = mean[split]
        lines += [
            f"{words}: {part['completions']:.0f} completions, {part['correct']:.1%} correct",
            "",
            "| score | AUROC [95% interval] | minus vanilla reward | " + " | ".join(f"{p}%" for p in PERCENTS) + " |",
            "| --- | --- | --- | " + " | ".join("---" for _ in PERCENTS) + " |",
        ]
        for name, (value, low, high) in part["auroc"].items():
            difference = part["difference"].get(name)
            told = (
                ""
                if difference is None
                else (
                    f"{_number(difference[0], True)} [{_number(difference[1], True)}, {_number(difference[2], True)}]"
                )
            )
            prefix = part["prefix_auroc"].get(name, {})
            cells = [_number(prefix[str(p)]) if prefix else "" for p in PERCENTS]
            lines.append(
                f"| {name} | {_number(value)} [{_number(low)}, {_number(high)}] | {told} | {' | '.join(cells)} |"
            )
        vote = part["vote"]
        lines += [
            "",
            f"majority vote {vote['unfiltered_accuracy']:.1%}; filtered by goal similarity {vote['accuracy']:.1%} with "
            f"{vote['tokens_saved']:.1%} of the tokens saved (threshold chosen on validation questions)",
            "",
        ]
    gains = [mean[split]["difference"]["contrastive reward"] for split in SPLITS]
    if len(per_seed) == 1 and all(gain[1] is not None and gain[1] > 0 for gain in gains):
        verdict = "The contrastive model is better than the vanilla one on both sets (intervals exclude 0)."
    elif all(gain[0] is not None and gain[0] > 0 for gain in gains):
        verdict = "The contrastive model is ahead on both sets, but not beyond chance in this run."
    else:
        verdict = "The contrastive model is not better than the vanilla one on both sets in this run."
    lines.append(verdict)
    return "\n".join(lines) + "\n"


def plot(per_seed: dict[int, dict[str, Any]], path: Path) -> None:
    """Prefix AUROC and the filter trade-off, in distribution."""
    part = average(list(per_seed.values()))["test"]
    plot_quickstart(
        {
            "prefix_auroc": {
                name: {float(p): value for p, value in curve.items()} for name, curve in part["prefix_auroc"].items()
            },
            "filter_tradeoff": {"contrastive model": [(x, y) for x, y in part["tradeoff"]]},
            "title": f"Pocket, held-out questions, seed {', '.join(map(str, per_seed))}",
        },
        path,
    )


def write_html(path: Path, per_seed: dict[int, dict[str, dict[str, list[dict[str, Any]]]]], output: Path) -> None:
    """The report of the metrics command for every model and held-out set, with a browser of single completions."""
    scored: dict[str, dict[str, list[dict[str, Any]]]] = {}
    results: dict[str, Any] = {"models": {}, "comparisons": []}
    for seed, rows in per_seed.items():
        for strategy, splits in rows.items():
            label = strategy if len(per_seed) == 1 else f"{strategy}, seed {seed}"
            sets = {split: splits[split] for split in SPLITS}
            scored[label] = sets
            results["models"][label] = {
                "path": str(output / f"seed-{seed}" / strategy),
                "model": None,
                "sets": {name: summarise_rows(part, validation=splits["validation"]) for name, part in sets.items()},
            }
        own = {label: sets for label, sets in scored.items() if len(per_seed) == 1 or label.endswith(f" {seed}")}
        results["comparisons"] += compare_all(own, 1000, 0)
    write_report(path, results, scored, title="Quickstart on pocket: vanilla and contrastive reward model")


def run(config: QuickstartConfig) -> dict[int, dict[str, Any]]:
    """Run every seed and write report.html, report.md, results.json and report.png. Returns the figures by seed.

    Raises:
        ValueError: the seeds are not numbers, or the output folder is not writable.
    """
    try:
        seeds = [int(part) for part in config.seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds takes a comma list of whole numbers, got {config.seeds!r}") from None
    for name in ("max_epochs", "train_batch_size", "eval_questions", "eval_samples"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}")
    output = Path(config.output)
    ensure_writable(output, inside=True)
    output.mkdir(parents=True, exist_ok=True)
    write_manifest(output, "quickstart", config, {"seed": seeds})
    began = time.monotonic()
    per_seed, rows = {}, {}
    try:
        for seed in seeds:
            folder = output / f"seed-{seed}"
            train_models(config, seed, folder)
            rows[seed] = score_all(config, seed, folder)
            per_seed[seed] = summarise(rows[seed])
    except BaseException as error:
        finish_manifest(output, f"failed: {type(error).__name__}")
        raise
    report = format_report(per_seed)
    atomic_write_text(output / "results.json", json.dumps(per_seed, indent=1) + "\n")
    atomic_write_text(output / "report.md", report)
    plot(per_seed, output / "report.png")
    write_html(output / "report.html", rows, output)
    finish_manifest(output, "finished")
    print(report)
    print(f"{time.monotonic() - began:.0f} s; table, plot, scores and both checkpoints are in {output}")
    print(f"report with figures and single completions, token by token: {output / 'report.html'}")
    return per_seed


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(QuickstartConfig, argv)) and None)


if __name__ == "__main__":
    main()
