"""Recompute the tables of scored files: ``python -m openrlhf.cli.metrics --scored_path SAVE_DIR/MODEL``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.completions import read_jsonl
from openrlhf.evaluation.metrics import paired_auroc_difference
from openrlhf.evaluation.summary import format_table, summarise_rows
from openrlhf.evaluation.voting import filter_by_goal
from openrlhf.trainer.config import flag
from openrlhf.utils.checkpoint import atomic_write_text


@dataclass(frozen=True)
class MetricsConfig:
    """AUROC, prefix AUROC and votes of rows that eval_rm has scored."""

    scored_path: list[str] | None = flag(
        None, "Folders or files written by eval_rm; two are also compared row by row", "scored-paths"
    )
    filter_threshold: float | None = flag(None, "Goal similarity below which the filtered vote drops a completion")
    warmup_tokens: int = flag(0, "Response tokens that the filter never judges")
    tie_rule: Literal["score", "original"] = flag(
        "score", "Ties of the vote: by score, or to the correct answer (only to compare with published numbers)"
    )
    bootstrap: int = flag(1000, "Draws for the 95% intervals")
    seed: int = flag(0, "Seed of the intervals and of the split for the equal-accuracy threshold")
    output: str | None = flag(None, "JSON file for all figures")


Rows = list[dict[str, Any]]


def run(config: MetricsConfig) -> dict[str, Any]:
    """Print the tables of every path; returns all figures by path and set."""
    if not config.scored_path:
        raise ValueError("pass --scored_path with folders or files written by eval_rm")
    filter_by_goal([0.0], config.filter_threshold, config.warmup_tokens)
    options = {key: getattr(config, key) for key in ("warmup_tokens", "tie_rule", "bootstrap", "seed")}
    scored = {path: read_scored_sets(Path(path)) for path in config.scored_path}
    results: dict[str, Any] = {}
    for path, sets in scored.items():
        results[path] = {
            name: summarise_rows(rows, threshold=config.filter_threshold, **options) for name, rows in sets.items()
        }
        print(f"{path}\n{format_table(results[path])}\n")
    if len(scored) == 2:
        _print_comparison(scored, config)
    if config.output:
        atomic_write_text(config.output, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return results


def read_scored_sets(path: Path) -> dict[str, Rows]:
    """Scored rows by set: the folder they lie in, relative to `path`, or the name of a single file.

    Raises:
        ValueError: nothing there, an unreadable line, or rows that eval_rm has not scored.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl")) if path.is_dir() else []
    if (path / "summary.json").is_file():  # what the last eval_rm scored; older files of other runs may lie beside them
        named = json.loads((path / "summary.json").read_text(encoding="utf-8")).get("files")
        files = [path / name for name in named] if named else files
    if not files:
        raise ValueError(f"{path}: expected a file or folder of rows scored by eval_rm, found no .jsonl file")
    sets: dict[str, Rows] = {}
    for file in files:
        name = path.stem if path.is_file() else file.parent.relative_to(path).as_posix()
        rows = sets.setdefault(name, [])
        for line, row in read_jsonl(file):
            if "question" not in row or "reward" not in row:
                raise ValueError(
                    f"{file}:{line}: expected a row scored by eval_rm (question, reward), got keys {list(row)}"
                )
            rows.append(row)
    return sets


def _print_comparison(scored: Mapping[str, Mapping[str, Rows]], config: MetricsConfig) -> None:
    (first_path, first_sets), (second_path, second_sets) = scored.items()
    print(f"AUROC of the reward, {first_path} minus {second_path} [95% interval over questions]")
    common = sorted(first_sets.keys() & second_sets.keys())
    if not common:
        print(f"no set in common: {sorted(first_sets)} and {sorted(second_sets)}")
    for name in common:
        pairs = _matching(first_sets[name], second_sets[name])
        if not pairs:
            print(f"{name}: no common completions")
            continue
        difference = paired_auroc_difference(
            [one["is_correct"] for one, _ in pairs],
            [one["reward"] for one, _ in pairs],
            [other["reward"] for _, other in pairs],
            [one["question"] for one, _ in pairs],
            config.bootstrap,
            config.seed,
        )
        value, low, high, p_value = difference
        figures = "undefined" if low is None else f"{value:+.3f} [{low:+.3f}, {high:+.3f}], p = {p_value:.3f}"
        print(f"{name}: {figures} ({len(pairs)} completions)")


def _matching(first: Rows, second: Rows) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of the same completion that both have a reward and a label."""
    usable = [row for row in second if row["reward"] is not None]
    others = {(row["question"], row["generated_solution"], row.get("sample")): row for row in usable}
    pairs = []
    for row in first:
        other = others.get((row["question"], row["generated_solution"], row.get("sample")))
        if other is not None and row["reward"] is not None and row.get("is_correct") is not None:
            pairs.append((row, other))
    return pairs


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(MetricsConfig, argv)) and None)


if __name__ == "__main__":
    main()
