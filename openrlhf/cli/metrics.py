"""Figures of scored files: ``python -m openrlhf.cli.metrics --scored_path SAVE_DIR/MODEL [SAVE_DIR/OTHER]``."""

from __future__ import annotations

import csv
import io
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.evaluation.filtering import check_filter
from openrlhf.evaluation.metrics import prefix_index
from openrlhf.evaluation.paired import compare_all
from openrlhf.evaluation.scored_rows import read_scored_sets, read_summary, scored_files
from openrlhf.evaluation.summary import PREFIX_PERCENTS, summarise_rows
from openrlhf.evaluation.tables import CSV_COLUMNS, figure_rows, format_comparisons, format_table
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import atomic_write_text, ensure_writable

__all__ = ["MetricsConfig", "main", "read_scored_sets", "run"]

logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class MetricsConfig:
    """AUROC, votes, filter trade-off, calibration and comparisons of rows that eval_rm has scored."""

    scored_path: list[str] | None = flag(
        None,
        "Folders or files written by eval_rm; a folder of models stands for each of them; several are also compared",
        "scored-paths",
    )
    validation_path: list[str] | None = flag(
        None,
        "Scored files of other questions, one a --scored_path, to choose the threshold of equal accuracy on; "
        "default: one half of the questions",
    )
    benchmarks: list[str] | None = flag(None, "Sets to read, as BENCHMARK or BENCHMARK/KIND; default: all")
    percentiles: list[float] = flag(list(PREFIX_PERCENTS), "Percents of the response for the prefix AUROC")
    filter_threshold: float | None = flag(None, "Goal similarity below which the filtered vote drops a completion")
    warmup_tokens: int = flag(0, "Response tokens that the filter never judges")
    tie_rule: Literal["score", "original"] = flag(
        "score", "Ties of the vote: by score, or to the correct answer (only to compare with published numbers)"
    )
    bootstrap: int = flag(1000, "Draws of questions for the 95% intervals")
    seed: int = flag(0, "Seed of the draws and of the split for the equal-accuracy threshold")
    output: str | None = flag(None, "JSON file for all figures", "json")
    csv: str | None = flag(None, "CSV file for all figures, one a line: " + ", ".join(CSV_COLUMNS))
    report: str | None = flag(None, "HTML file for tables, plots and a browser of completions")
    figures: str | None = flag(None, "Folder for the plots as PNG and PDF")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        if not self.scored_path:
            raise ValueError("pass --scored_path with folders or files written by eval_rm")
        check_filter(self.filter_threshold, self.warmup_tokens)
        if not self.percentiles:
            raise ValueError("--percentiles: expected at least one number, got none")
        for percent in self.percentiles:
            prefix_index(1, percent)
        if self.bootstrap < 1 or self.seed < 0:
            raise ValueError(
                f"--bootstrap: expected 1 or more, --seed: 0 or more, got {self.bootstrap} and {self.seed}"
            )
        for path in (*self.scored_path, *(self.validation_path or [])):
            if not Path(path).exists():
                raise ValueError(f"{path}: expected a file or folder of rows scored by eval_rm, found nothing there")
        for name in ("output", "csv", "report"):
            file = getattr(self, name)
            if file is not None:
                if Path(file).is_dir():
                    raise ValueError(f"--{name}: expected the name of a file, {file} is a folder")
                ensure_writable(Path(file).parent, inside=True)
        if self.figures is not None:
            ensure_writable(self.figures, inside=True)


def run(config: MetricsConfig) -> dict[str, Any]:
    """Print the tables of every model and write what was asked for; returns all figures (docs/metrics.md).

    Raises:
        ValueError: a setting or a file that cannot be used.
    """
    config.validate()
    paths = _models(config.scored_path)
    # Unknown benchmarks and sets show before the first row is read.
    sets = {label: list(scored_files(path, config.benchmarks)) for label, path in paths.items()}
    others = _validation_sets(config.validation_path or [], sets)
    _check_outputs(config, [*paths.values(), *(path for path, _ in others.values())])
    scored: dict[str, dict[str, Rows]] = {}
    results: dict[str, Any] = {"models": {}, "comparisons": []}
    options = {key: getattr(config, key) for key in ("warmup_tokens", "tie_rule", "bootstrap", "seed", "percentiles")}
    for label, path in paths.items():
        scored[label] = read_scored_sets(path, config.benchmarks)
        validation = dict.fromkeys(sets[label])
        if others:
            other_path, names = others[label]
            rows_of = read_scored_sets(other_path, None if other_path.is_file() else sorted(set(names.values())))
            validation = {name: rows_of[names[name]] for name in sets[label]}
        summaries = {}
        for name, rows in scored[label].items():
            logger.info("%s, %s: %d rows", label, name, len(rows))
            summaries[name] = summarise_rows(
                rows, threshold=config.filter_threshold, validation=validation[name], **options
            )
        summary = read_summary(path) or {}
        model = summary.get("model") and {**summary["model"], "goal_state": summary.get("goal_state")}
        results["models"][label] = {"path": str(path), "model": model, "sets": summaries}
        print(f"{label} ({path})\n\n{format_table(summaries)}\n")
    results["comparisons"] = compare_all(scored, config.bootstrap, config.seed)
    for text in (_without_partners(scored), format_comparisons(results["comparisons"])):
        if text:
            print(text + "\n")
    _write(config, results, scored)
    return results


def _check_outputs(config: MetricsConfig, paths: Sequence[Path]) -> None:
    """Refuse to write one file over another, or over the scores."""
    read = {file.resolve() for path in paths for files in scored_files(path).values() for file in files}
    read |= {(path / "summary.json").resolve() for path in paths if path.is_dir()}
    taken: dict[Path, str] = {}
    for name in ("output", "csv", "report"):
        if getattr(config, name) is None:
            continue
        file = Path(getattr(config, name)).resolve()
        if file in read:
            raise ValueError(f"--{name}: {file} holds scores that are read here; choose another file")
        if file in taken:
            raise ValueError(f"--{name}: {file} is already the file of --{taken[file]}; choose another one")
        taken[file] = name


def _models(scored_path: Sequence[str]) -> dict[str, Path]:
    """Paths by label: the name of the folder or file, with folders above it as far as names are the same."""
    paths: list[Path] = []
    for word in scored_path:
        path = Path(word)
        inside = sorted(file.parent for file in path.glob("*/summary.json")) if path.is_dir() else []
        paths += inside if inside and not (path / "summary.json").is_file() else [path]
    full = [path.resolve() for path in paths]
    again = next((str(paths[i]) for i in range(len(full)) if full[i] in full[:i]), None)
    if again is not None:
        raise ValueError(f"--scored_path: {again} is given twice")
    parts = [(*path.parts[:-1], path.name.split(".jsonl")[0]) for path in full]
    labels = []
    for own in parts:
        depth = 1
        while depth < len(own) and sum(other[-depth:] == own[-depth:] for other in parts) > 1:
            depth += 1
        labels.append("/".join(own[-depth:]))
    return dict(zip(labels, paths, strict=True))


def _validation_sets(
    validation_path: Sequence[str], sets: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Path, dict[str, str]]]:
    """By label of a model, the path of its validation rows and the set there for each of its own; empty without a path.

    One model's goal similarities cannot set another's threshold, so every model has a path of its own.
    """
    if not validation_path:
        return {}
    paths = list(_models(validation_path).values())
    if len(paths) != len(sets):
        raise ValueError(
            f"--validation_path: expected one a --scored_path, in the same order, got {len(paths)} for {len(sets)}"
        )
    chosen = {}
    for path, (label, names) in zip(paths, sets.items(), strict=True):
        found = list(scored_files(path))
        missing = [name for name in names if name not in found]
        if missing and len(found) > 1:
            raise ValueError(
                f"--validation_path {path}: no set {missing[0]!r}, found {', '.join(found)}; pass one set for all, or "
                "the same sets as in --scored_path (see --benchmarks)"
            )
        chosen[label] = path, {name: found[0] if len(found) == 1 else name for name in names}
    return chosen


def _without_partners(scored: Mapping[str, Mapping[str, Rows]]) -> str:
    """A line when models have no set in common, so that a missing comparison is explained."""
    if len(scored) < 2:
        return ""
    sets = list(scored.values())
    if any(set(a) & set(b) for i, a in enumerate(sets) for b in sets[i + 1 :]):
        return ""
    return "nothing to compare: no set in common: " + "; ".join(f"{label} {list(one)}" for label, one in scored.items())


def _write(config: MetricsConfig, results: Mapping[str, Any], scored: Mapping[str, Mapping[str, Rows]]) -> None:
    if config.output:
        text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write_text(config.output, text + "\n")
    if config.csv:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(figure_rows(results))
        atomic_write_text(config.csv, text.getvalue())
    if config.report or config.figures:
        from openrlhf.evaluation.report import save_figures, write_report

        if config.report:
            options = {"warmup_tokens": config.warmup_tokens, "seed": config.seed}
            write_report(config.report, results, scored, command=shlex.join(sys.argv), **options)
        if config.figures:
            save_figures(config.figures, results, scored)
    for name in ("output", "csv", "report", "figures"):
        if getattr(config, name):
            print(f"{name}: {getattr(config, name)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(MetricsConfig, argv)) and None)


if __name__ == "__main__":
    main()
