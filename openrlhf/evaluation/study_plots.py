"""The plots of a study: differences from the baseline on the left, scores along the response on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from openrlhf.evaluation.plots import (
    COLORS,
    MARKERS,
    Block,
    draw_curves,
    draw_intervals,
    interval_limits,
    interval_lines,
    plain_style,
)
from openrlhf.evaluation.summary import PREFIX_PERCENTS

WIDTH = 11.0  # inches
LINE_HEIGHT = 0.2  # inches of a line of intervals
LEAST_HEIGHT = 2.8  # inches of a panel
SCORES = {"reward": "-", "goal_similarity": "--"}  # solid and dashed lines
Y_LABELS = {"completions": "AUROC", "pairs": "pair accuracy"}


def plot_study(summary: Mapping[str, Any], path: Path) -> Path:
    """One row of panels for each task and evaluation set, as one PNG.

    Args:
        summary: of `summarise_study`; at least one task.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (f"{task}: {name}", figures)
        for task, part in summary["tasks"].items()
        for name, figures in part["sets"].items()
    ]
    blocks = [difference_blocks(figures) for _, figures in panels]
    heights = [max(LEAST_HEIGHT, LINE_HEIGHT * interval_lines(one) + 1) for one in blocks]
    with plain_style():
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(panels), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
        for (title, figures), one, (left, right) in zip(panels, blocks, axes, strict=True):
            _draw_differences(left, title, one, summary["baseline"])
            if figures["kind"] in Y_LABELS:
                _draw_prefixes(right, figures)
            else:
                right.set_axis_off()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    return path


def difference_blocks(figures: Mapping[str, Any]) -> list[Block]:
    """Differences from the baseline by variant as `draw_intervals` takes them; of step-level sets by rule too."""
    steps = figures["kind"] == "steps"
    names = list(figures["measures"]) if steps else [f"{score}@100" for score in SCORES]
    found: dict[str, list] = {}
    for measure in names:
        is_goal = "goal" in measure
        for number, (variant, one) in enumerate(figures["measures"][measure].items()):
            if one["difference"] is not None:
                heading = f"{variant}: {_rule(measure)}" if steps else variant
                interval = [one["difference"]["mean"], *one["difference"]["interval"]]
                found.setdefault(heading, []).append((number, is_goal, interval))
    return list(found.items())


def plot_overview(summary: Mapping[str, Any], path: Path) -> Path:
    """One row of two panels for the whole study, as one PNG: for a page that shows one picture.

    On the left the differences of all tasks and sets, but for step-level ones; on the right the scores along the
    response, mean over the same sets.

    Args:
        summary: of `summarise_study`, with at least one set that is not of kind "steps".
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sets = overview_sets(summary)
    # Of all sets: a task may have a variant finished that the first one has not.
    variants = list(dict.fromkeys(one for figures in sets.values() for one in figures["measures"]["reward@100"]))
    blocks = overview_blocks(sets, variants)
    with plain_style():
        height = max(LEAST_HEIGHT, LINE_HEIGHT * interval_lines(blocks) + 1)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _draw_differences(left, f"{summary['study']}: minus {summary['baseline']}", blocks, summary["baseline"])
        kinds = {figures["kind"] for figures in sets.values()}
        means = {
            measure: {variant: {"mean": _mean_over_sets(sets, measure, variant)} for variant in variants}
            for measure in (f"{score}@{percent}" for score in SCORES for percent in PREFIX_PERCENTS)
        }
        right.set_title(f"mean over {len(sets)} sets" if len(sets) > 1 else next(iter(sets)))
        _draw_prefixes(right, {"measures": means, "kind": "completions" if "completions" in kinds else "pairs"})
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    return path


def overview_sets(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Figures by "task: set" of every set that `plot_overview` shows."""
    return {
        f"{task}: {name}": figures
        for task, part in summary["tasks"].items()
        for name, figures in part["sets"].items()
        if figures["kind"] in Y_LABELS
    }


def overview_blocks(sets: Mapping[str, Mapping[str, Any]], variants: Sequence[str]) -> list[Block]:
    """Differences by set as `draw_intervals` takes them, a point for each variant and score.

    Args:
        variants: names by colour number.
    """
    blocks: list[Block] = []
    for name, figures in sets.items():
        rows = []
        for score in SCORES:
            for variant, one in figures["measures"][f"{score}@100"].items():
                if one["difference"] is not None:
                    interval = [one["difference"]["mean"], *one["difference"]["interval"]]
                    rows.append((variants.index(variant), score != "reward", interval))
        if rows:
            blocks.append((name, rows))
    return blocks


def _mean_over_sets(sets: Mapping[str, Mapping[str, Any]], measure: str, variant: str) -> float | None:
    found = [figures["measures"][measure].get(variant, {}).get("mean") for figures in sets.values()]
    return None if not found or None in found else fmean(found)


def _rule(measure: str) -> str:
    return measure.removesuffix(" goal similarity").removesuffix(" reward").removesuffix(" of")


def _draw_differences(axes: Any, title: str, blocks: list[Block], baseline: str) -> None:
    axes.set_title(title)
    if not blocks:
        axes.text(0.5, 0.5, f"nothing to compare with {baseline} yet", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    draw_intervals(axes, blocks, f"minus {baseline}", reference=0.0, limits=interval_limits(blocks, 0.0))


def _draw_prefixes(axes: Any, figures: Mapping[str, Any]) -> None:
    curves, styles = {}, {}
    for score, line in SCORES.items():
        for number, variant in enumerate(figures["measures"][f"{score}@100"]):
            label = variant if score == "reward" else f"_{variant}"
            curves[label] = {str(p): figures["measures"][f"{score}@{p}"][variant]["mean"] for p in PREFIX_PERCENTS}
            styles[label] = {
                "color": COLORS[number % len(COLORS)],
                "marker": MARKERS[(number + number // len(COLORS)) % len(MARKERS)],  # a new one each time round
                "linestyle": line,
            }
    axes.axhline(0.5, color="0.55", linewidth=1, linestyle=":")
    axes.set_xticks(draw_curves(axes, curves, styles))
    axes.set_xlabel("share of the response read (%)")
    axes.set_ylabel(f"{Y_LABELS[figures['kind']]} (dashed: goal similarity)")
    lines, labels = axes.get_legend_handles_labels()
    shown = [(one, label) for one, label in zip(lines, labels, strict=True) if not label.startswith((" _", "_"))]
    axes.legend(*zip(*shown, strict=True), loc="center left", bbox_to_anchor=(1, 0.5))
