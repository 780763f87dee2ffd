"""The figures of state probes as Markdown tables and as one plot of three panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.evaluation.plots import COLORS, MARKERS, draw_curves, draw_prefix_auroc, plain_style
from openrlhf.evaluation.tables import interval, number, signed

SCORES = {"probe": "linear probe", "reward": "reward", "goal_similarity": "goal similarity"}
LINES = {"probe": "-", "reward": "--", "goal_similarity": ":", "correct": "-", "wrong": "--"}
GOALS = {
    "given": "the one given",
    "other folds": "mean last state of the correct completions of the other folds",
    "probe data": "mean last state of the correct completions of the probe data",
}


def probe_tables(result: Mapping[str, Any]) -> str:
    """Markdown of one model's figures.

    Args:
        result: `state_figures` with `model`, `files`, `left_out`, `fitted_on` and `goal_state` of the command.
    """
    counts = [f"{count} {words}" for words, count in result["left_out"].items() if count]
    fitted = result["fitted_on"]
    percents = list(result["effective_rank"])
    intro = [
        f"# What the states of {result['model']['name']} tell",
        "",
        f"{result['rows']} completions of {result['questions']} questions, {100 * result['correct']:.1f}% correct, "
        f"from {', '.join(result['files'])}." + (f" Left out: {', '.join(counts)}." if counts else ""),
        (
            f"Probes are fitted on the other folds of {fitted['folds']} folds of questions."
            if "folds" in fitted
            else f"Probes are fitted on {fitted['rows']} completions of {fitted['questions']} other questions."
        ),
        f"Goal state: {GOALS[result['goal_state']['source']]}.",
        "Intervals are 95%, over questions. docs/probes.md says what the figures mean.",
    ]
    aurocs = {"AUROC": "auroc", "AUROC within questions": "auroc_within_questions"}
    parts = ["\n".join(intro)]
    for title, key in aurocs.items():
        parts += [f"## {title}", _table(percents, {SCORES[name]: _cells(one) for name, one in result[key].items()})]
    gaps = {f"minus {SCORES[name]}": _signed(one) for name, one in result["probe_minus"].items()}
    parts += ["## AUROC of the linear probe minus that of a read-out", _table(percents, gaps)]
    separation = {
        "d prime of goal similarity": _cells(result["d_prime"]),
        "effective rank": {name: number(value) for name, value in result["effective_rank"].items()},
    }
    cosine = f"Cosine of the mean last states of correct and of wrong completions: {interval(result['mean_cosine'])}."
    parts += ["## Separation", _table(percents, separation), cosine]
    means = {
        f"{SCORES[key]}, {word}": _cells(curve)
        for key, curves in result["trajectories"].items()
        for word, curve in curves.items()
    }
    parts += ["## Trajectories (means)", _table(percents, means)]
    return "\n\n".join(parts) + "\n"


def plot_probes(results: Mapping[str, Mapping[str, Any]], path: str | Path) -> Path:
    """AUROC of probe, reward and goal similarity, mean goal similarities, and d prime by place, as one PNG.

    Args:
        results: by model, as for `probe_tables`. One model has its curves in colours; several have a colour each.
        path: file to write, in a folder that exists.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    aurocs, means, distances = {}, {}, {}
    for model, result in results.items():
        aurocs |= {(model, key): result["auroc"][key] for key in SCORES}
        means |= {(model, key): curve for key, curve in result["trajectories"]["goal_similarity"].items()}
        distances[model, ""] = result["d_prime"]
    with plain_style():
        figure = Figure(figsize=(13, 4.2 + 0.3 * len(results)), layout="constrained")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(1, 3)
        draw_prefix_auroc(left, *_named(aurocs, list(results)))
        left.set_title("What tells correct from wrong")
        draw_curves(middle, *_named(means, list(results)))
        middle.set_ylabel("mean goal similarity")
        middle.set_title("Where correct and wrong completions go")
        right.axhline(0, color="0.55", linewidth=1, linestyle=":")
        draw_curves(right, *_named(distances, list(results)))
        right.set_ylabel("d prime of the goal similarity")
        right.set_title("How far apart they are")
        for axes in (left, middle, right):
            axes.set_xlabel("share of the response read (%)")
            axes.set_xticks(left.get_xticks())
            if len(axes.get_legend_handles_labels()[1]) > 1:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=3)
        if len(results) == 1:
            figure.suptitle(*results)
        figure.savefig(path, dpi=150)
    return Path(path)


def _named(
    curves: Mapping[tuple[str, str], Any], models: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Curves and their styles by label: the model's colour and the score's line, or a colour a score for one model."""
    named, styles = {}, {}
    for model, key in curves:
        words = SCORES.get(key, key)
        label = words if len(models) == 1 else f"{model}: {words}" if words else model
        named[label] = curves[model, key]
        index = models.index(model) if len(models) > 1 else len(styles)
        styles[label] = {
            "color": COLORS[index % len(COLORS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": LINES.get(key, "-"),
        }
    return named, styles


def _table(percents: Sequence[str], columns: Mapping[str, Mapping[str, str]]) -> str:
    """A Markdown table with a line for every share of the response."""
    head = ["response read", *columns]
    rows = [[f"{percent}%", *(cells[percent] for cells in columns.values())] for percent in percents]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _cells(curve: Mapping[str, Sequence[float | None]]) -> dict[str, str]:
    return {percent: interval(values) for percent, values in curve.items()}


def _signed(curve: Mapping[str, Sequence[float | None]]) -> dict[str, str]:
    return {percent: signed(values) for percent, values in curve.items()}
