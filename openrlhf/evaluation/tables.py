"""The figures of scored sets as tables for people and as rows for a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Summaries = Mapping[str, Mapping[str, Any]]

COUNTS = {
    "without_reward": "rows without reward (the prompt leaves no room)",
    "without_label": "rows without label",
    "without_goal": "rows without goal similarity",
    "truncated": "rows truncated",
    "duplicates": "rows that repeat an earlier one (counted like the others)",
    "unjudged": "questions without vote (a row has neither expected answer nor label)",
}
CSV_COLUMNS = ("model", "set", "figure", "name", "value", "low", "high")
FEWER = "* the unfiltered vote of fewer completions, drawn at random, that cost as many tokens"
TRADEOFF_LINES = 6  # points of the trade-off curve that the table shows


def format_table(summaries: Summaries) -> str:
    """Plain-text tables of several sets, and notes on what was left out.

    Args:
        summaries: results of `summarise_rows` by the name of their set.
    """
    parts: list[str] = []
    for title, rows, note in (
        _auroc_table(summaries),
        _prefix_table(summaries),
        _accuracy_table(summaries),
        _filter_table(summaries),
        _tradeoff_table(summaries),
        _equal_accuracy_table(summaries),
        _calibration_table(summaries),
        _step_table(summaries),
    ):
        if len(rows) > 1:
            parts += [title, aligned(rows), *([note] if note else []), ""]
    return "\n".join(parts + [note for name, summary in summaries.items() for note in _notes(name, summary)]).rstrip()


def format_comparisons(records: Sequence[Mapping[str, Any]]) -> str:
    """Table of `compare_all`; empty text for no records."""
    if not records:
        return ""
    rows = [["set", "comparison", "difference", "p", "rows", "unmatched"]]
    for record in records:
        if record["a"] == record["b"]:
            words = f"{record['a']}: {_words(record['score'])}"
        else:
            words = f"{_words(record['score'])}: {record['a']} minus {record['b']}"
        difference = signed([record["difference"], record["low"], record["high"]])
        unmatched = str(record.get("unmatched", 0) + record.get("left_out", 0))
        rows.append([record["set"], words, difference, _p_value(record["p_value"]), str(record["rows"]), unmatched])
    title = "AUROC differences on the same completions [95% interval over questions]"
    note = "unmatched: rows of either model that the other lacks, or whose score or label is missing or differs"
    return "\n".join([title, aligned(rows), note])


def figure_rows(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure of the metrics command as one row of `CSV_COLUMNS`; undefined numbers are None.

    Args:
        results: {"models": {LABEL: {"sets": {SET: summary}}}, "comparisons": [...]}.
    """
    for model, details in results["models"].items():
        for set_name, summary in details["sets"].items():
            for figure, name, (value, low, high) in _long(summary):
                yield dict(zip(CSV_COLUMNS, (model, set_name, figure, name, value, low, high), strict=True))
    for one in results["comparisons"]:
        model = one["a"] if one["a"] == one["b"] else f"{one['a']} minus {one['b']}"
        figures = {"AUROC difference": (one["difference"], one["low"], one["high"])}
        figures |= {key: (one[key], None, None) for key in ("p_value", "rows")}
        for figure, (value, low, high) in figures.items():
            yield dict(zip(CSV_COLUMNS, (model, one["set"], figure, one["score"], value, low, high), strict=True))


def _words(score: str) -> str:
    """A score's name for people."""
    return score.replace("_mean", ", mean").replace("_", " ")


def number(value: float | None) -> str:
    """Three decimals, "-" for None."""
    return "-" if value is None else f"{value:.3f}"


def interval(values: Sequence[float | None] | None) -> str:
    """`0.750 [0.701, 0.803]`, without brackets where there are no bounds, "-" where it is undefined."""
    if values is None or values[0] is None:
        return "-"
    return number(values[0]) + ("" if values[1] is None else f" [{values[1]:.3f}, {values[2]:.3f}]")


def signed(values: Sequence[float | None]) -> str:
    """An interval of a difference: `+0.050 [-0.010, +0.110]`."""
    if values[0] is None:
        return "-"
    return f"{values[0]:+.3f}" + ("" if values[1] is None else f" [{values[1]:+.3f}, {values[2]:+.3f}]")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first one underlined."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


Table = tuple[str, list[list[str]], str]  # title, rows of cells with the head first, note


def _auroc_table(summaries: Summaries) -> Table:
    names = {key: None for summary in summaries.values() for key in summary["auroc"]}  # in order, once each
    rows = [["set", "rows", "questions", "correct", *(f"AUROC {_words(name)}" for name in names)]]
    for name, summary in summaries.items():
        counts = [str(summary["rows"]), str(summary["questions"]), number(summary["correct"])]
        rows.append([name, *counts, *(interval(summary["auroc"].get(score)) for score in names)])
    return "AUROC at the last token [95% interval over questions]", rows, ""


def _prefix_table(summaries: Summaries) -> Table:
    percents = {p: None for summary in summaries.values() for curve in summary["prefix_auroc"].values() for p in curve}
    show = interval if len(percents) <= 4 else (lambda values: number(values[0]) if values else "-")
    rows = [["set", "score", *(f"{p}%" for p in percents)]]
    for name, summary in summaries.items():
        for score, curve in summary["prefix_auroc"].items():
            rows.append([name, _words(score), *(show(curve.get(p)) for p in percents)])
    return "AUROC after a part of the response", rows, ""


def _accuracy_table(summaries: Summaries) -> Table:
    curves = [curve for one in summaries.values() for curve in (one["accuracy_by_n"] or {}).values()]
    sizes = sorted({size for curve in curves for size in curve}, key=int)
    rows = [["set", "choice", "all completions", *(f"n={size}" for size in sizes)]]
    for name, summary in summaries.items():
        for figure, values in (summary["accuracy"] or {}).items():
            by_n = summary["accuracy_by_n"][figure]
            rows.append([name, figure, interval(values), *(number(by_n.get(size)) for size in sizes)])
    return "Accuracy per question with several completions (n: with n of them)", rows, ""


def _filter_table(summaries: Summaries) -> Table:
    rows = [["set", "threshold", "accuracy", "unfiltered", "tokens saved", "dropped", "fallbacks"]]
    for name, summary in summaries.items():
        report = summary["filtered_vote"]
        if report:
            figures = [number(report[key]) for key in ("accuracy", "unfiltered_accuracy", "tokens_saved", "dropped")]
            rows.append([name, number(report["threshold"]), *figures, str(report["fallbacks"])])
    return "Majority vote filtered by goal similarity, at the given threshold", rows, ""


def _tradeoff_table(summaries: Summaries) -> Table:
    rows = [["set", "threshold", "accuracy", "tokens saved", "fewer*", "correct kept", "wrong dropped", "fallbacks"]]
    for name, summary in summaries.items():
        for point in _some_points(summary["tradeoff"] or []):
            threshold = "no filter" if point["threshold"] is None else number(point["threshold"])
            cells = [interval(point["accuracy"]), interval(point["tokens_saved"])]
            cells += [
                number(point["fewer_samples"]),
                number(point["correct_kept"]),
                number(point["wrong_dropped"]),
                str(point["fallbacks"]),
            ]
            rows.append([name, threshold, *cells])
    return "Majority vote filtered by goal similarity, some thresholds up to the largest saving", rows, FEWER


def _some_points(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few points of the curve, evenly spaced up to the one that saves most; behind it whole questions fall back."""
    if not points:
        return []
    best = max(range(len(points)), key=lambda t: points[t]["tokens_saved"][0])
    steps = min(TRADEOFF_LINES - 1, best)
    return [points[round(best * k / steps)] for k in range(steps + 1)] if steps else [points[0]]


def _equal_accuracy_table(summaries: Summaries) -> Table:
    rows = [
        ["set", "questions", "threshold", "tokens saved", "accuracy", "minus unfiltered", "+/-", "p", "minus fewer*"]
    ]
    for name, summary in summaries.items():
        equal = summary["equal_accuracy"]
        if equal:
            cells = [str(equal["test"]["questions"]), number(equal["threshold"]), interval(equal["saving"])]
            cells += [number(equal["test"]["accuracy"]), signed(equal["accuracy_difference"])]
            cells += [f"{equal['better']}/{equal['worse']}", _p_value(equal["p_value"])]
            rows.append([name, *cells, signed(equal["gain_over_fewer"])])
    note = (
        "threshold that saves most without a loss on the validation questions, shown on the others;\n"
        f"+/-: questions won and lost; p: exact McNemar\n{FEWER}"
    )
    return "Largest saving at no loss of accuracy", rows, note


def _calibration_table(summaries: Summaries) -> Table:
    rows = [["set", "ECE", "Brier", "shift", "ECE after the shift", "Brier after it"]]
    for name, summary in summaries.items():
        found = summary["calibration"]
        if found:
            centred = found["centred"] or {}
            shift = "-" if not centred else f"{centred['shift']:+.3f}"
            after = [interval(centred.get("ece")), interval(centred.get("brier"))]
            rows.append([name, interval(found["ece"]), interval(found["brier"]), shift, *after])
    return "Calibration of sigmoid(reward) (shift: subtracted so that the mean is the share correct)", rows, ""


def _step_table(summaries: Summaries) -> Table:
    rows = [["set", "rows", "rule", "first wrong step found", "within one step"]]
    for name, summary in summaries.items():
        steps = summary["step_level"]
        if not steps or not steps["rows"]:
            continue
        count = str(steps["rows"])
        rows.append([name, count, "a random step", interval(steps["chance"]), interval(steps["chance_within_one"])])
        for rule, values in steps["accuracy"].items():
            rows.append([name, count, rule, interval(values), interval(steps["within_one"][rule])])
        for one in steps["differences"]:
            cells = [signed(one["difference"]), f"p = {_p_value(one['p_value'])}"]
            rows.append([name, count, f"{one['rule']}: goal minus reward", *cells])
        for score, values in steps["auroc"].items():
            rows.append([name, count, f"AUROC of steps before the error, {score}", interval(values), "-"])
    return "First wrong step", rows, ""


def _notes(name: str, summary: Mapping[str, Any]) -> Iterator[str]:
    told = {words: summary[key] for key, words in COUNTS.items() if summary[key]}
    if "goal_similarity" not in summary["auroc"]:
        told.pop(COUNTS["without_goal"], None)  # a vanilla set: nobody expects any
    if summary["vote"] and summary["vote"]["unanswered"]:
        told["questions without any answer"] = summary["vote"]["unanswered"]
    if told:
        yield f"{name}: " + ", ".join(f"{count} {words}" for words, count in told.items())
    steps = summary["step_level"]
    if steps and steps["left_out"]:
        told = ", ".join(f"{count} {reason}" for reason, count in steps["left_out"].items())
        yield f"{name}: rows left out of the first wrong step: {told}"
    if steps and steps["cut_off"]:
        yield f"{name}: in {steps['cut_off']} rows the last steps were cut off and are no candidates"


def _p_value(value: float | None) -> str:
    return "-" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _long(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[float | None]]]:
    """(figure, name, [value, low, high]) of one set."""
    for key in ("rows", "questions", "correct", *COUNTS):
        yield "count", key, (summary[key], None, None)
    for score, values in summary["auroc"].items():
        yield "auroc", score, values
    for score, curve in summary["prefix_auroc"].items():
        for percent, values in curve.items():
            yield "prefix_auroc", f"{score}, {percent}%", values
    for name, values in (summary["accuracy"] or {}).items():
        yield "accuracy", name, values
        for size, value in summary["accuracy_by_n"][name].items():
            yield "accuracy_by_n", f"{name}, n={size}", (value, None, None)
    for figure in ("vote", "filtered_vote"):
        for key, value in (summary[figure] or {}).items():
            yield figure, key, (value, None, None)
    for point in summary["tradeoff"] or []:
        place = "no filter" if point["threshold"] is None else f"threshold {point['threshold']:.6g}"
        for key, value in point.items():
            if key != "threshold":
                yield "tradeoff", f"{key}, {place}", value if isinstance(value, list) else (value, None, None)
    if summary["equal_accuracy"]:
        for key, value in _flat(summary["equal_accuracy"]):
            yield "equal_accuracy", key, value
    yield from _long_calibration(summary["calibration"])
    for key, value in _flat({k: v for k, v in (summary["step_level"] or {}).items() if k != "differences"}):
        yield "step_level", key, value
    for one in (summary["step_level"] or {}).get("differences", []):
        yield "step_level", f"goal minus reward, {one['rule']}", one["difference"]
        yield "step_level", f"p_value, {one['rule']}", (one["p_value"], None, None)


def _long_calibration(found: Mapping[str, Any] | None) -> Iterator[tuple[str, str, Sequence[float | None]]]:
    for figure, part in (("calibration", found), ("calibration, centred", (found or {}).get("centred"))):
        if not part:
            continue
        for key in ("ece", "brier"):
            yield figure, key, part[key]
        if "shift" in part:
            yield figure, "shift", (part["shift"], None, None)
        for one in part["bins"]:
            place = f"{one['low']:.1f} to {one['high']:.1f}"
            yield figure, f"correct, {place}", (one["correct"], one["ci_low"], one["ci_high"])
            for key in ("predicted", "count"):
                yield figure, f"{key}, {place}", (one[key], None, None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Sequence[float | None]]]:
    """Numbers and intervals of nested records under names joined by commas."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}, ")
        else:
            yield prefix + key, value if isinstance(value, list) else (value, None, None)
