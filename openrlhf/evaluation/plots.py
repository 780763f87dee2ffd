"""Plots of evaluation results; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito 2008: distinguishable with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_prefix_auroc(axes: Any, curves: Mapping[str, Mapping[float, float | None]]) -> None:
    """AUROC against the share of the response that has been read, one line a score.

    Args:
        axes: matplotlib axes, drawn on.
        curves: by label, AUROC by percent of the response; None (undefined) leaves a gap.
    """
    for index, (label, values) in enumerate(curves.items()):
        percents = sorted(values, key=float)
        heights = [float("nan") if values[p] is None else values[p] for p in percents]
        style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot([float(p) for p in percents], heights, label=label, **style)
    axes.axhline(0.5, color="0.6", linewidth=1, linestyle=":")
    axes.set_xlabel("share of the response read (%)")
    axes.set_ylabel("AUROC of correct against wrong")
    axes.set_title("How early wrong solutions are recognised")
    if curves:
        axes.set_xticks(sorted({float(percent) for values in curves.values() for percent in values}))
        axes.legend(frameon=False, fontsize="small")


def draw_filter_tradeoff(axes: Any, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Accuracy of the majority vote against tokens saved, one line a model.

    Args:
        axes: matplotlib axes, drawn on.
        curves: by label, (share of tokens saved, accuracy) at rising thresholds; the first point is the unfiltered
            vote, drawn as a dashed level. Points behind the largest saving are left out: there whole questions are lost
            and fall back to the unfiltered vote.
    """
    for index, (label, points) in enumerate(curves.items()):
        best = max(range(len(points)), key=[saved for saved, _ in points].__getitem__, default=0)
        points = points[: best + 1]
        color = COLORS[index % len(COLORS)]
        saved, accuracy = [100 * x for x, _ in points], [100 * y for _, y in points]
        axes.plot(saved, accuracy, color=color, marker=MARKERS[index % len(MARKERS)], markersize=4, label=label)
        if points:
            axes.axhline(accuracy[0], color=color, linewidth=1, linestyle="--")
    axes.set_xlabel("tokens saved (%)")
    axes.set_ylabel("majority vote accuracy (%)")
    axes.set_title("Filtering by goal similarity (dashed: no filter)")
    if curves:
        axes.legend(frameon=False, fontsize="small")


def plot_quickstart(results: Mapping[str, Any], path: str | Path) -> Path:
    """Prefix AUROC on the left, filter trade-off on the right, as one PNG.

    Args:
        results: `prefix_auroc` as `draw_prefix_auroc` takes it, `filter_tradeoff` as `draw_filter_tradeoff` does; an
            optional `title`.
        path: file to write; its folder is made when absent.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and leaves pyplot's global state alone
    left, right = figure.subplots(1, 2)
    draw_prefix_auroc(left, results["prefix_auroc"])
    draw_filter_tradeoff(right, results["filter_tradeoff"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    if results.get("title"):
        figure.suptitle(results["title"])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return Path(path)
