"""The tables of a study as Markdown and JSON, with their plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.evaluation.study_plots import overview_sets, plot_overview, plot_study
from openrlhf.evaluation.summary import PREFIX_PERCENTS
from openrlhf.utils.atomic import atomic_write_text

WORDS = {"reward": "reward", "goal_similarity": "goal similarity"}
JUDGED_BY = {
    "completions": "AUROC of correct against wrong completions",
    "pairs": "share of held-out pairs whose chosen response scores higher",
    "steps": "share of wrong solutions whose first wrong step the rule names",
}


def write_tables(summary: Mapping[str, Any], folder: Path, name: str) -> None:
    """Write NAME.md, NAME.json and, when there is a finished cell, NAME.png and NAME-overview.png.

    Args:
        summary: of `summarise_study`, with `study`, `about` and `cells` (numbers `finished` and `declared`).
    """
    atomic_write_text(folder / f"{name}.json", json.dumps(summary, indent=1) + "\n")
    atomic_write_text(folder / f"{name}.md", format_study(summary))
    if summary["tasks"]:
        plot_study(summary, folder / f"{name}.png")
    if overview_sets(summary):
        plot_overview(summary, folder / f"{name}-overview.png")


def format_study(summary: Mapping[str, Any]) -> str:
    """All tables of a study as Markdown."""
    cells = summary["cells"]
    lines = [f"# {summary['study']}", "", *([summary["about"], ""] if summary["about"] else [])]
    lines += [
        f"{cells['finished']} of {cells['declared']} cells are finished. Numbers are means over seeds; differences are "
        f"against {summary['baseline']} on the seeds that both have, with 95% intervals: over seeds (t), or over seeds "
        "and questions where all seeds share the evaluation set.",
        "",
    ]
    for task, part in summary["tasks"].items():
        lines += [f"## {task}", "", *_effort_table(part["variants"]), ""]
        for name, figures in part["sets"].items():
            lines += _set_lines(task, name, figures)
    return "\n".join(lines)


def _set_lines(task: str, name: str, figures: Mapping[str, Any]) -> list[str]:
    share = "" if figures["correct"] is None or figures["kind"] == "pairs" else f", {figures['correct']:.1%} correct"
    ways = "seeds and questions" if figures["shared"] else "seeds"
    words = f"Judged by the {JUDGED_BY[figures['kind']]}; intervals over {ways}."
    lines = [f"### {task}: {name}", "", f"{figures['completions']:,.0f} completions{share}. {words}", ""]
    if figures["chance"] is not None:
        lines[2] += f" {figures['judged']:,} are judged; a random step is right in {figures['chance']:.1%}."
    if figures["kind"] == "steps":
        return [*lines, *_step_table(figures["measures"]), ""]
    for score in WORDS:
        lines += [*_score_table(score, figures["measures"]), ""]
    lines += [*_difference_table(figures["measures"]), ""]
    if any(figures["votes"].values()):
        lines += [*_vote_table(figures["votes"]), ""]
    return lines


def _effort_table(variants: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, _seeds(one["seeds"]), f"{one['examples']:,.0f}", f"{one['steps']:,.0f}"]
        + [f"{one['seconds'][part]:.0f}" for part in ("training", "scoring")]
        for name, one in variants.items()
    ]
    return markdown_table(["variant", "seeds", "examples", "steps", "training (s)", "scoring (s)"], rows)


def _score_table(score: str, measures: Mapping[str, Any]) -> list[str]:
    """Means of one score at the last token and along the response."""
    rows = [
        [variant, str(len(one["values"])), _number(one["mean"]), _number(one["sd"]), _difference(one["difference"])]
        + [_number(measures[f"{score}@{percent}"][variant]["mean"]) for percent in PREFIX_PERCENTS[:-1]]
        for variant, one in measures[f"{score}@100"].items()
    ]
    prefixes = [f"{percent}%" for percent in PREFIX_PERCENTS[:-1]]
    return markdown_table(["variant", "seeds", WORDS[score], "sd", "minus baseline", *prefixes], rows)


def _difference_table(measures: Mapping[str, Any]) -> list[str]:
    """Differences from the baseline along the response."""
    kinds = [("reward", "difference", "reward"), ("goal_similarity", "difference", "goal similarity")]
    kinds.append(("goal_similarity", "from_reward", "goal similarity minus the baseline's reward"))
    rows = []
    for variant in measures["reward@100"]:
        for score, key, words in kinds:
            cells = [_difference(measures[f"{score}@{percent}"][variant][key]) for percent in PREFIX_PERCENTS]
            if any(cells):
                rows.append([variant, words, *cells])
    return markdown_table(["variant", "minus baseline", *(f"{percent}%" for percent in PREFIX_PERCENTS)], rows)


def _step_table(measures: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            rule,
            variant,
            str(len(one["values"])),
            _number(one["mean"]),
            _number(one["sd"]),
            _difference(one["difference"]),
        ]
        for rule, variants in measures.items()
        for variant, one in variants.items()
    ]
    return markdown_table(["rule", "variant", "seeds", "accuracy", "sd", "minus baseline"], rows)


def _vote_table(votes: Mapping[str, Any]) -> list[str]:
    rows = []
    for variant, one in votes.items():
        if one is None:
            continue
        row = [variant, *(f"{one[key]:.1%}" for key in ("majority vote", "best of n, reward"))]
        row.append(f"{one['best of n, goal similarity']:.1%}")
        for score in ("goal_similarity", "reward"):
            filtered = one["filtered_vote"][score]
            told = None if filtered is None else (filtered["accuracy"], filtered["tokens_saved"])
            row += ["", ""] if told is None else [f"{value:.1%}" for value in told]
        rows.append(row)
    heads = ["variant", "majority vote", "best of n, reward", "best of n, goal similarity"]
    for words in ("goal", "reward"):
        heads += [f"filtered by {words}", "tokens saved"]
    return markdown_table(heads, rows)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _seeds(seeds: Sequence[int]) -> str:
    whole = len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}-{seeds[-1]}" if whole else ", ".join(map(str, seeds))


def _difference(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return ""
    low, high = difference["interval"]
    told = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{difference['mean']:+.3f}{told}"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
