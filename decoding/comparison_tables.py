"""The comparison of decoding methods as Markdown tables and as a plot of accuracy against tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.evaluation.plots import COLORS, MARKERS, draw_curves, plain_style
from openrlhf.evaluation.study_tables import markdown_table

Record = Mapping[str, Any]

FILTER_NOTE = (
    "Stopped and decided are shares of the samples (below the threshold; not needed any more), fallbacks of the "
    "questions. Saved and difference are against the plain vote of the same samples; after the fact is what filtering "
    "those whole samples finds, in tokens of the reward model and without waiting for the next check. An unscored vote "
    "needs no reward model: it leaves out the time that scoring the plain samples took."
)


def format_comparison(result: Mapping[str, Any]) -> str:
    """All tables as Markdown.

    Args:
        result: of `compare_methods`.
    """
    seeds = ", ".join(map(str, result["seeds"]))
    left_out = f" ({result['left_out']} that cannot be judged are left out)" if result["left_out"] else ""
    over = "questions and seeds" if len(result["seeds"]) > 1 else "questions"
    lines = [
        f"{result['questions']} questions{left_out}, seeds {seeds}. Tokens and seconds are a question's; intervals are "
        f"95% over {over}.",
        "",
        *_method_table(result["methods"]),
    ]
    if any(one["against"] is not None for one in result["methods"]):
        lines += ["", *_difference_table(result["methods"]), "", *_difference_notes(result["methods"])]
    filtered = [one for one in result["methods"] if one["filter"] is not None]
    if filtered:
        lines += ["", *_filter_table(filtered), "", FILTER_NOTE]
    return "\n".join(lines).rstrip() + "\n"


def plot_comparison(result: Mapping[str, Any], path: str | Path) -> Path:
    """Accuracy against policy tokens a question (log axis) as one PNG: a line for a pool of growing size, else a point.

    Args:
        result: of `compare_methods`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    with plain_style():
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for number, one in enumerate(result["methods"]):
            color, marker = COLORS[number % len(COLORS)], MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
            points = one["curve"] if one["curve"] and one["method"] != "sample" else [one]
            curve = {point["policy_tokens"]: _ends(point["accuracy"]) for point in points}
            line = "none" if len(curve) == 1 else ("-", "--", ":")[number // len(COLORS) % 3]
            style = {"color": color, "marker": marker, "linestyle": line}
            draw_curves(axes, {method_name(one): curve}, {method_name(one): style}, scale=100)
            if len(curve) == 1:
                ((x, (value, low, high)),) = curve.items()
                if low is not None:
                    axes.plot([x, x], [100 * low, 100 * high], color=color, solid_capstyle="butt")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("policy tokens a question")
        axes.set_ylabel("accuracy (%)")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=130, metadata={"Software": None})
    return path


def method_name(one: Record) -> str:
    """Folder and method."""
    return f"{one['run']}/{one['method']}" if one["run"] else one["method"]


def _method_table(methods: Sequence[Record]) -> list[str]:
    rows = [
        [method_name(one), str(len(one["seeds"])), _percent(one["accuracy"]), _spread_of_seeds(one["accuracy"])]
        + [f"{one['policy_tokens']:.1f}", f"{one['reward_tokens']:.1f}", f"{one['seconds']:.4g}"]
        for one in methods
    ]
    return markdown_table(
        ["method", "seeds", "accuracy (%)", "by seed", "policy tokens", "reward tokens", "seconds"], rows
    )


def _difference_table(methods: Sequence[Record]) -> list[str]:
    rows = []
    for one in methods:
        if one["against"] is None:
            continue
        against = one["against"]
        mark = "" if against["within"] is not False else " *"
        samples = f"{against['samples']:.1f}{mark}" if against["equal_tokens"] else "as it is"
        rows.append(
            [method_name(one), against["baseline"], samples]
            + [_percent(against["accuracy"]), _percent(against["difference"], signed=True)]
        )
    return markdown_table(["method", "baseline", "its samples", "its accuracy (%)", "difference (points)"], rows)


def _difference_notes(methods: Sequence[Record]) -> list[str]:
    notes = ["The baseline draws as many samples as cost the method's policy tokens, on average over questions."]
    against = [one["against"] for one in methods if one["against"] is not None]
    if any(one["within"] is False for one in against):
        notes.append(
            "\\* its pool cannot follow: at least one sample is drawn and at most all that there are; draw more for a "
            "fair comparison."
        )
    return notes


def _filter_table(methods: Sequence[Record]) -> list[str]:
    heads = [
        "method",
        "threshold",
        "check every",
        "stopped",
        "decided",
        "fallbacks",
        "tokens saved (%)",
        "after the fact (%)",
    ]
    heads += ["time saved (%)", "of an unscored vote (%)", "difference (points)", "after the fact (points)"]
    rows = []
    for one in methods:
        found, after = one["filter"], one["filter"]["after_the_fact"]
        threshold = "none" if found["threshold"] is None else f"{found['threshold']:.4f}"
        rows.append(
            [method_name(one), threshold, str(found["check_every"])]
            + [f"{found[name]:.1%}" for name in ("stopped", "decided", "fallbacks")]
            + [_percent(found["tokens_saved"]), _percent(after and after["tokens_saved"])]
            + [_percent(found[name]) for name in ("seconds_saved", "seconds_saved_unscored")]
            + [_percent(one, signed=True) for one in (found["difference"], after and after["difference"])]
        )
    return markdown_table(heads, rows)


def _percent(spread: Mapping[str, Any] | None, signed: bool = False) -> str:
    if spread is None:
        return "n/a"
    sign = "+" if signed else ""  # adding 0.0 turns -0.0 into 0.0
    value, low, high = (None if part is None else f"{round(100 * part, 1) + 0.0:{sign}.1f}" for part in _ends(spread))
    return value if low is None else f"{value} [{low}, {high}]"


def _spread_of_seeds(spread: Mapping[str, Any]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in spread["by_seed"])


def _ends(spread: Mapping[str, Any]) -> list[float | None]:
    return [spread["value"], *spread["interval"]]
