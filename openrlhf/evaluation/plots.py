"""Drawing functions of evaluation figures on matplotlib axes; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito 2008: distinguishable with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
CORRECT_COLOR, WRONG_COLOR = COLORS[0], COLORS[1]
LINE_LETTERS = 72  # of small text in the width of a figure
BLOCK_SPACE = 0.5  # lines between blocks of intervals
INK = "#1b1c20"  # text and axes; the page replaces it by its own text colour
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.color": INK,
    "text.parse_math": False,  # names may hold a $
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "openrlhf",  # the same figure gives the same bytes
    "pdf.fonttype": 42,
}

Interval = Sequence[float | None]  # [value, low, high]; the bounds, or all three, may be None
Block = tuple[str, Sequence[tuple[int, bool, Interval]]]  # see draw_intervals
Curve = Mapping[str, float | Interval | None]  # by the place on the x axis, as text or number


@contextmanager
def plain_style():
    """The settings that every figure is drawn and saved with."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def draw_intervals(
    axes: Any,
    blocks: Sequence[Block],
    x_label: str,
    labels: Sequence[str] = (),
    reference: float | None = None,
    limits: tuple[float, float] | None = None,
) -> None:
    """Points with intervals from top to bottom, those of a block below its heading; undefined ones say so.

    Args:
        blocks: (heading, rows); a row is (colour number, whether the point is hollow, interval). Hollow is the goal
            similarity, filled the reward.
        labels: models by colour number, for the legend; empty: they are not told apart.
        reference: x of a dotted line, such as chance.
        limits: ends of the x axis.
    """
    if reference is not None:
        axes.axvline(reference, color="0.55", linewidth=1, linestyle=":")
    beside = axes.get_yaxis_transform()  # x as a share of the width, y as the line
    line = 0.0
    for heading, rows in blocks:
        if heading and all(value is None for _, _, (value, _, _) in rows):
            heading, rows = f"{heading}: undefined", ()
        for words in heading.split("\n") if heading else []:
            axes.text(0, line, _name(words, LINE_LETTERS), transform=beside, va="center", fontsize=8)
            line += 1
        for number, hollow, (value, low, high) in rows:
            color = COLORS[number % len(COLORS)]
            if value is None:
                axes.text(0, line, "undefined", transform=beside, va="center", fontsize=8, style="italic", color=color)
            else:
                if low is not None and high is not None:
                    axes.plot([low, high], [line, line], color=color, solid_capstyle="butt")
                marker = {"marker": MARKERS[number % len(MARKERS)], "markerfacecolor": "white" if hollow else color}
                axes.plot([value], [line], color=color, linestyle="none", markersize=5, **marker)
            line += 1
        line += BLOCK_SPACE
    for number, label in enumerate(labels):
        axes.plot([], [], color=COLORS[number % len(COLORS)], marker=MARKERS[number % len(MARKERS)], label=_name(label))
    kinds = {hollow for _, rows in blocks for _, hollow, _ in rows}
    if len(kinds) > 1 and (labels or max(len(rows) for _, rows in blocks) > 1):
        for name, face in (("filled: reward", INK), ("hollow: goal similarity", "white")):
            axes.plot([], [], color=INK, marker="o", markerfacecolor=face, linestyle="none", label=name)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(line - BLOCK_SPACE, -1)
    if limits is not None:
        axes.set_xlim(*limits)
    axes.set_xlabel(x_label)


def interval_lines(blocks: Sequence[Block]) -> float:
    """Height of `draw_intervals` in lines."""
    return sum((heading.count("\n") + 1 if heading else 0) + len(rows) + BLOCK_SPACE for heading, rows in blocks)


def interval_limits(blocks: Sequence[Block], reference: float) -> tuple[float, float]:
    """Ends of an x axis that holds the reference and every interval."""
    found = [part for _, rows in blocks for _, _, interval in rows for part in interval if part is not None]
    low, high = min([*found, reference]), max([*found, reference])
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def draw_curves(
    axes: Any, curves: Mapping[str, Curve], styles: Mapping[str, Mapping[str, Any]] | None = None, scale: float = 1.0
) -> list[float]:
    """Lines with a band where there are intervals; undefined points leave a gap. Returns the places on the x axis.

    Args:
        curves: by label, a value or interval by x.
        styles: by label, settings of the line; by default the colours and markers in order.
        scale: factor of the heights, 100 for percent.
    """
    for index, (label, curve) in enumerate(curves.items()):
        style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        style |= dict((styles or {}).get(label, {}))
        places = sorted(curve, key=float)
        x, heights = [float(place) for place in places], [curve[place] for place in places]
        value, low, high = (scale * np.array(part, float) for part in zip(*map(_three, heights), strict=True))
        axes.plot(x, value, label=_name(label), **style)
        if np.isfinite(low).any():
            axes.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)
    return sorted({float(place) for curve in curves.values() for place in curve})


def draw_prefix_auroc(
    axes: Any, curves: Mapping[str, Curve], styles: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """AUROC against the share of the response that has been read, one line a score; see draw_curves."""
    axes.axhline(0.5, color="0.55", linewidth=1, linestyle=":")
    percents = draw_curves(axes, curves, styles)
    axes.set_xlabel("share of the response read (%)")
    axes.set_ylabel("AUROC of correct against wrong")
    axes.set_xticks(percents)


def draw_accuracy_by_n(
    axes: Any, curves: Mapping[str, Curve], styles: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Accuracy of ways to choose an answer against the completions sampled of each question (doubling axis)."""
    counts = draw_curves(axes, curves, styles, scale=100)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:g}" for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("completions sampled of each question")
    axes.set_ylabel("accuracy (%)")


def draw_filter_tradeoff(
    axes: Any,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    chosen: Mapping[str, float | None] | None = None,
    numbers: Mapping[str, int] | None = None,
    key: str = "accuracy",
    y_label: str = "majority vote accuracy (%)",
) -> None:
    """A share of the filtered vote against tokens saved, one line a model, with band.

    Args:
        curves: by label, points at rising thresholds with `threshold`, `tokens_saved` and `key`, each a share or an
            interval of one; the first point has no filter and its height is drawn as a dashed level. Points behind
            the largest saving are left out: there whole questions are lost and fall back to the unfiltered vote.
            `fewer_samples` of the points, where there, is a dotted line.
        chosen: by label, the threshold whose point is ringed.
        numbers: by label, the number of the colour; by default in order.
    """
    for index, (label, points) in enumerate(curves.items()):
        saved = [_three(point["tokens_saved"])[0] for point in points]
        points = points[: max(range(len(points)), key=saved.__getitem__, default=0) + 1]
        if not points:
            continue
        index = (numbers or {}).get(label, index)
        color = COLORS[index % len(COLORS)]
        x = [100 * value for value in saved[: len(points)]]
        heights = zip(*(_three(point[key]) for point in points), strict=True)
        value, low, high = (100 * np.array(part, float) for part in heights)
        axes.plot(x, value, color=color, marker=MARKERS[index % len(MARKERS)], label=_name(label))
        if np.isfinite(low).any():
            rising = np.array(x) >= np.maximum.accumulate(x)  # a saving may fall on the way; a band cannot turn back
            axes.fill_between(np.array(x)[rising], low[rising], high[rising], color=color, alpha=0.13, linewidth=0)
        axes.axhline(value[0], color=color, linewidth=1, linestyle="--", alpha=0.8)
        fewer = [point.get("fewer_samples") for point in points]
        if key == "accuracy" and None not in fewer:
            order = np.argsort(x)
            fewer_style = {"color": color, "linestyle": ":", "linewidth": 1.4}
            axes.plot(np.array(x)[order], 100 * np.array(fewer)[order], **fewer_style)
        threshold = (chosen or {}).get(label)
        if threshold is not None:
            levels = [-np.inf if point["threshold"] is None else point["threshold"] for point in points]
            nearest = int(np.argmin(np.abs(np.array(levels) - threshold)))
            ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.6}
            axes.plot(x[nearest], value[nearest], color=color, linestyle="none", **ring)
    axes.set_xlabel("tokens saved (%)")
    axes.set_ylabel(y_label)


def draw_histogram(axes: Any, correct: Sequence[float], wrong: Sequence[float], x_label: str) -> None:
    """Distribution of a score over correct and over wrong completions, each as shares of its own."""
    values = np.concatenate([np.asarray(correct, float), np.asarray(wrong, float)])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1e-3, 31)
    for part, name, color, line in (
        (correct, "correct", CORRECT_COLOR, "-"),
        (wrong, "wrong", WRONG_COLOR, "--"),
    ):
        if len(part):
            shares = 100 * np.histogram(part, edges)[0] / len(part)
            axes.stairs(shares, edges, fill=True, color=color, alpha=0.22)
            axes.stairs(shares, edges, color=color, linestyle=line, label=f"{name} ({len(part):,})", linewidth=1.4)
    axes.set_xlabel(x_label)
    axes.set_ylabel("share of its class (%)")


def draw_calibration(
    axes: Any, curves: Mapping[str, Sequence[Mapping[str, Any]]], numbers: Mapping[str, int] | None = None
) -> None:
    """Share of correct completions against the mean sigmoid reward of each bin; empty bins are left out.

    Args:
        curves: by label, bins with `count`, `predicted`, `correct`, `ci_low` and `ci_high`.
        numbers: by label, the number of the colour; by default in order.
    """
    axes.plot([0, 1], [0, 1], color="0.55", linewidth=1, linestyle=":")
    for index, (label, bins) in enumerate(curves.items()):
        index = (numbers or {}).get(label, index)
        color = COLORS[index % len(COLORS)]
        bins = [one for one in bins if one["count"] and one["correct"] is not None]
        x = [one["predicted"] for one in bins]
        for one in bins:
            if one["ci_low"] is not None and one["ci_high"] is not None:
                axes.plot([one["predicted"]] * 2, [one["ci_low"], one["ci_high"]], color=color, linewidth=1)
        axes.plot(
            x, [one["correct"] for one in bins], color=color, marker=MARKERS[index % len(MARKERS)], label=_name(label)
        )
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("mean sigmoid of the reward")
    axes.set_ylabel("share that is correct")


def draw_bars(
    axes: Any, bars: Mapping[str, Interval], chance: float | None, x_label: str, numbers: Mapping[str, int]
) -> None:
    """Horizontal bars with intervals, from zero; the dotted line is chance, `numbers` the colour of each bar."""
    for place, (label, (value, low, high)) in enumerate(bars.items()):
        if value is None:
            axes.text(0.02, place, "undefined", transform=axes.get_yaxis_transform(), va="center", style="italic")
            continue
        axes.barh(place, 100 * value, height=0.6, color=COLORS[numbers[label] % len(COLORS)], alpha=0.7)
        if low is not None and high is not None:
            axes.plot([100 * low, 100 * high], [place, place], color=INK, linewidth=1.2)
    if chance is not None:
        axes.axvline(100 * chance, color=INK, linewidth=1, linestyle=":", label="chance")
    axes.set_yticks(range(len(bars)), [_name(label, 44) for label in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x_label)


def make_figure(draw: Callable[[Any], None], size: tuple[float, float]) -> Any:
    """One pair of axes of this size (inches), drawn on, with a legend below where several things are named."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and leaves pyplot's global state alone
    axes = figure.subplots()
    draw(axes)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(loc="outside lower center", ncols=1 if max(map(len, labels)) > 34 else 2)
    return figure


def plot_quickstart(results: Mapping[str, Any], path: str | Path) -> Path:
    """Prefix AUROC on the left, filter trade-off on the right, as one PNG.

    Args:
        results: `prefix_auroc` as `draw_prefix_auroc` takes it; `filter_tradeoff`: by label, (share of tokens saved,
            accuracy) at rising thresholds, the first without a filter; an optional `title`.
        path: file to write; its folder is made when absent.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tradeoff = {
        label: [{"threshold": None, "tokens_saved": saved, "accuracy": accuracy} for saved, accuracy in points]
        for label, points in results["filter_tradeoff"].items()
    }
    with plain_style():
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        draw_prefix_auroc(left, results["prefix_auroc"])
        left.set_title("How early wrong solutions are recognised")
        draw_filter_tradeoff(right, tradeoff)
        right.set_title("Filtering by goal similarity (dashed: no filter)")
        for axes in (left, right):
            if axes.get_legend_handles_labels()[1]:
                axes.legend()
        if results.get("title"):
            figure.suptitle(results["title"])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return Path(path)


def middle(value: float | Interval | None) -> float | None:
    """The figure of an interval, or of a plain number."""
    return value if value is None or np.isscalar(value) else value[0]


def _three(value: float | Interval | None) -> tuple[float, float, float]:
    """(value, low, high) with NaN for what is undefined."""
    parts = [value, None, None] if value is None or np.isscalar(value) else list(value)
    return tuple(float("nan") if part is None else float(part) for part in parts)


def _name(label: str, longest: int = 64) -> str:
    """A label as matplotlib can draw it: printable, not hidden (leading _), not longer than a line."""
    label = "".join(letter if letter.isprintable() else "\ufffd" for letter in label)
    half = longest // 2 - 1
    label = label if len(label) <= longest else label[:half] + "…" + label[-half:]
    return f" {label}" if label.startswith("_") else label
