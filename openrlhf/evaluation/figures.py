"""Which figures a set of results gives, as PNG and PDF files and as SVG for the report."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.evaluation import plots
from openrlhf.evaluation.heat import is_correct

SCORE_NAMES = {
    "reward": "reward",
    "goal_similarity": "goal similarity",
    "goal_similarity_mean": "goal similarity, mean",
}
SIZE = (4.9, 3.3)  # inches, one column of the report
PANEL_LINES = 40  # of points and headings in a panel; further ones go to another panel

# Lines of the accuracy figure: shades for the two levels, then one colour a way and dashes for the goal similarity.
ACCURACY_STYLES: dict[str, dict[str, Any]] = {
    "any correct": {"color": "0.35", "linestyle": ":", "marker": "None"},
    "mean of samples": {"color": "0.6", "linestyle": "-", "marker": "None"},
    "majority vote": {"color": plots.COLORS[0], "marker": "o"},
    "best of n, reward": {"color": plots.COLORS[1], "marker": "s"},
    "weighted vote, reward": {"color": plots.COLORS[2], "marker": "^"},
    "best of n, goal similarity": {"color": plots.COLORS[1], "marker": "s", "linestyle": "--", "fillstyle": "none"},
    "weighted vote, goal similarity": {"color": plots.COLORS[2], "marker": "^", "linestyle": "--", "fillstyle": "none"},
}

Results = Mapping[str, Any]
Scored = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # by model and set


@dataclass(frozen=True)
class EvaluationFigure:
    """One pair of axes, not drawn yet."""

    kind: str  # section of the report
    name: str  # file name without ending
    title: str
    draw: Callable[[Any], None]  # takes matplotlib axes
    size: tuple[float, float] = SIZE  # inches


def list_figures(results: Results, scored: Scored) -> list[EvaluationFigure]:
    """Every figure that the results have figures for, in the order of the report.

    Args:
        results: `models` (by label `sets`, each a result of `summarise_rows`) and `comparisons`.
        scored: scored rows by model and set, for the histograms.
    """
    models = results["models"]
    names = list(dict.fromkeys(name for model in models.values() for name in model["sets"]))
    figures = _auroc(models, names)
    for make in (_prefix, _accuracy, _tradeoff, _calibration, _steps):
        figures += [figure for name in names for figure in make(models, name)]
    figures += [figure for name in names for figure in _histograms(scored, name)]
    figures += _comparisons(results.get("comparisons") or [], list(models))
    taken: dict[str, int] = {}
    for place, figure in enumerate(figures):  # sets a/b and a-b have one file name
        count = taken[figure.name] = taken.get(figure.name, 0) + 1
        figures[place] = figure if count == 1 else replace(figure, name=f"{figure.name}-{count}")
    return figures


def save_figures(folder: str | Path, results: Results, scored: Scored) -> list[Path]:
    """Write every figure as PNG (200 dpi) and PDF; returns the files. Arguments as for `list_figures`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with plots.plain_style():
        for figure in list_figures(results, scored):
            drawn = plots.make_figure(figure.draw, figure.size)
            for ending, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
                files.append(folder / f"{figure.name}.{ending}")
                drawn.savefig(files[-1], dpi=200, metadata=metadata)
    return files


def figure_svg(figure: EvaluationFigure, prefix: str) -> str:
    """The figure as an <svg> element to put into a page; its ids start with `prefix`, so they stay unique there."""
    buffer = io.StringIO()
    with plots.plain_style():
        drawn = plots.make_figure(figure.draw, figure.size)
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{prefix}", text)
    return text.replace(plots.INK, "currentColor")


def _auroc(models: Mapping[str, Any], names: Sequence[str]) -> list[EvaluationFigure]:
    blocks = []
    for name in names:
        rows = [
            (number, score != "reward", interval)
            for number, (_, summary) in _of_set(models, name)
            for score, interval in (summary.get("auroc") or {}).items()
            if score != "goal_similarity_mean"
        ]
        if rows:
            blocks.append((name if len(names) > 1 else "", rows))
    labels = list(models) if len(models) > 1 else []
    return _interval_figures("auroc", "AUROC at the last token", blocks, labels, "AUROC of correct against wrong", 0.5)


def _interval_figures(
    kind: str, title: str, blocks: Sequence[plots.Block], labels: Sequence[str], x_label: str, reference: float
) -> list[EvaluationFigure]:
    """Points with intervals, in panels of about equal height that share their x axis."""
    panels: list[list[plots.Block]] = []
    for block in blocks:
        if not panels or plots.interval_lines([*panels[-1], block]) > PANEL_LINES:
            panels.append([])
        panels[-1].append(block)
    limits = plots.interval_limits(blocks, reference)
    figures = []
    for number, panel in enumerate(panels, 1):
        draw = partial(
            plots.draw_intervals, blocks=panel, labels=labels, x_label=x_label, reference=reference, limits=limits
        )
        size = (SIZE[0], 0.7 + 0.19 * (plots.interval_lines(panel) + len(labels)))
        words = f"{title}, {number} of {len(panels)}" if len(panels) > 1 else title
        figures.append(EvaluationFigure(kind, kind, words, draw, size))
    return figures


def _prefix(models: Mapping[str, Any], name: str) -> list[EvaluationFigure]:
    curves, styles = {}, {}
    for number, (label, summary) in _of_set(models, name):
        for score, curve in (summary.get("prefix_auroc") or {}).items():
            if any(plots.middle(value) is not None for value in curve.values()):
                words = (
                    f"{label}, {SCORE_NAMES.get(score, score)}" if len(models) > 1 else SCORE_NAMES.get(score, score)
                )
                curves[words] = curve
                styles[words] = {
                    "color": plots.COLORS[number % len(plots.COLORS)],
                    "marker": plots.MARKERS[number % len(plots.MARKERS)],
                    "linestyle": "-" if score == "reward" else "--",
                    "fillstyle": "full" if score == "reward" else "none",
                }
    if not curves:
        return []
    draw = partial(plots.draw_prefix_auroc, curves=curves, styles=styles)
    return [EvaluationFigure("prefix", f"prefix_auroc-{_file(name)}", name, draw, _size(len(curves)))]


def _accuracy(models: Mapping[str, Any], name: str) -> list[EvaluationFigure]:
    figures = []
    for _, (label, summary) in _of_set(models, name):
        curves = {way: curve for way, curve in (summary.get("accuracy_by_n") or {}).items() if curve}
        if curves:
            curves = {way: curves[way] for way in [*ACCURACY_STYLES, *curves] if way in curves}  # in a fixed order
            draw = partial(plots.draw_accuracy_by_n, curves=curves, styles=ACCURACY_STYLES)
            title = f"{name}, {label}" if len(models) > 1 else name
            file = f"accuracy-{_file(name)}-{_file(label)}"
            figures.append(EvaluationFigure("accuracy", file, title, draw, _size(len(curves))))
    return figures


def _tradeoff(models: Mapping[str, Any], name: str) -> list[EvaluationFigure]:
    curves = {label: summary["tradeoff"] for _, (label, summary) in _of_set(models, name) if summary.get("tradeoff")}
    if not curves:
        return []
    equal = {label: summary.get("equal_accuracy") or {} for _, (label, summary) in _of_set(models, name)}
    chosen = {label: report.get("threshold") for label, report in equal.items()}
    numbers = _numbers(models)
    vote = partial(plots.draw_filter_tradeoff, curves=curves, chosen=chosen, numbers=numbers)
    kept = partial(
        plots.draw_filter_tradeoff,
        curves=curves,
        chosen=chosen,
        numbers=numbers,
        key="correct_kept",
        y_label="correct completions kept (%)",
    )
    file = f"tradeoff-{_file(name)}"
    return [
        EvaluationFigure("tradeoff", file, f"{name}: accuracy", vote, _size(len(curves))),
        EvaluationFigure("tradeoff", f"{file}-kept", f"{name}: correct completions kept", kept, _size(len(curves))),
    ]


def _calibration(models: Mapping[str, Any], name: str) -> list[EvaluationFigure]:
    figures = []
    for part, file, words in (
        ("raw", "calibration", name),
        ("centred", "calibration-shifted", f"{name}, after the shift"),
    ):
        curves = {}
        for _, (label, summary) in _of_set(models, name):
            found = summary.get("calibration") or {}
            found = found if part == "raw" else found.get("centred") or {}
            if any(one["count"] for one in found.get("bins") or ()):
                curves[label] = found["bins"]
        if curves:
            draw = partial(plots.draw_calibration, curves=curves, numbers=_numbers(models))
            figures.append(EvaluationFigure("calibration", f"{file}-{_file(name)}", words, draw, _size(len(curves))))
    return figures


def _steps(models: Mapping[str, Any], name: str) -> list[EvaluationFigure]:
    figures = []
    for _, (label, summary) in _of_set(models, name):
        report = summary.get("step_level")
        if report and report.get("accuracy"):
            draw = partial(
                plots.draw_bars,
                bars=report["accuracy"],
                chance=plots.middle(report.get("chance")),
                x_label="first wrong step found (%)",
                numbers={rule: int("reward" in rule) for rule in report["accuracy"]},
            )
            title = f"{name}, {label}" if len(models) > 1 else name
            size = (SIZE[0], 1.3 + 0.3 * len(report["accuracy"]))
            figures.append(EvaluationFigure("steps", f"steps-{_file(name)}-{_file(label)}", title, draw, size))
    return figures


def _histograms(scored: Scored, name: str) -> list[EvaluationFigure]:
    figures = []
    for label, sets in scored.items():
        labelled = [row for row in sets.get(name, ()) if is_correct(row) is not None and row.get("reward") is not None]
        with_goal = [row for row in labelled if row.get("cosine_sim") is not None]
        title = f"{name}, {label}" if len(scored) > 1 else name
        for words, key, rows in (("reward", "partial_rewards", labelled), ("goal similarity", "cosine_sim", with_goal)):
            if rows:
                values = {
                    wanted: [float(row[key][-1]) for row in rows if is_correct(row) == wanted] for wanted in (1, 0)
                }
                draw = partial(
                    plots.draw_histogram, correct=values[1], wrong=values[0], x_label=f"{words} at the last token"
                )
                file = f"scores-{_file(name)}-{_file(label)}-{words.split()[0]}"
                figures.append(EvaluationFigure("scores", file, f"{title}: {words}", draw, (SIZE[0], 2.7)))
    return figures


def score_words(score: str) -> str:
    """Name of a compared score, or of the difference of two."""
    return score.replace("goal_similarity", "goal similarity").replace(" minus ", " − ")


def comparison_words(one: Mapping[str, Any]) -> str:
    """What is subtracted from what: one score of two models, or two scores of one model."""
    score = score_words(one["score"])
    return f"{one['a']}: {score}" if one["a"] == one["b"] else f"{score}: {one['a']} − {one['b']}"


def _comparisons(comparisons: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[EvaluationFigure]:
    sets = list(dict.fromkeys(one["set"] for one in comparisons))
    blocks = []
    for one in sorted(comparisons, key=lambda one: sets.index(one["set"])):
        words = [one["set"]] * (len(sets) > 1)
        words.append(comparison_words(one) if len(labels) > 1 else score_words(one["score"]))
        heading = " · ".join(words)
        heading = heading if len(heading) <= plots.LINE_LETTERS else "\n".join(words)
        number = labels.index(one["a"]) if one["a"] in labels else 0
        blocks.append((heading, [(number, one["score"] != "reward", [one["difference"], one["low"], one["high"]])]))
    return _interval_figures("comparisons", "Differences", blocks, [], "difference of AUROC", 0.0)


def _of_set(models: Mapping[str, Any], name: str) -> list[tuple[int, tuple[str, Mapping[str, Any]]]]:
    """(model number, (label, figures of this set)) of the models that have it."""
    return [
        (number, (label, model["sets"][name]))
        for number, (label, model) in enumerate(models.items())
        if name in model["sets"]
    ]


def _numbers(models: Mapping[str, Any]) -> dict[str, int]:
    """Colour of each model, the same in every figure."""
    return {label: number for number, label in enumerate(models)}


def _size(lines: int) -> tuple[float, float]:
    """Room for the legend below the axes."""
    return (SIZE[0], SIZE[1] + 0.08 * max(lines - 2, 0))


def _file(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "set"
