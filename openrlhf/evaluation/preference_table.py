"""Plain-text tables of the figures of preference sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"reward": "reward", "goal_similarity": "goal similarity"}


def format_preferences(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of several sets: accuracy, accuracy by length, RewardBench scores, and notes on what was left out.

    Args:
        summaries: results of `summarise_preferences` by the name of their set; `left_out` is shown where it is there.
    """
    accuracy_rows = [["set", "subset", "score", "rows", "pairs", "accuracy", "ties", "mean margin"]]
    length_rows = [["set", "score", "chosen longer", "chosen shorter", "equal", "prefers longer", "longer is better"]]
    best_rows = [["set", "subset", "score", "best of n"]]
    bench_rows = [["set", "score", "RewardBench", "overall", "sections"]]
    notes: list[str] = []
    for name, summary in summaries.items():
        for subset, figures in {"all": summary, **summary["subsets"]}.items():
            for score, accuracy in figures["accuracy"].items():
                counts = [str(figures["rows"]), str(figures["pairs"])]
                margin = figures["margin"][score]["mean"]
                ties = str(figures["ties"][score])
                accuracy_rows.append(
                    [name, subset, _NAMES[score], *counts, _interval(accuracy), ties, _number(margin[0])]
                )
            for score, value in (figures["best_of_n"] or {}).items():
                best_rows.append([name, subset, _NAMES[score], _interval(value)])
        length_rows += _length_rows(name, summary)
        for score, bench in (summary["rewardbench"] or {}).items():
            sections = ", ".join(f"{section} {_number(value)}" for section, value in bench["sections"].items())
            bench_rows.append([name, _NAMES[score], str(bench["version"]), _number(bench["overall"]), sections])
        notes += _notes(name, summary)
    parts = ["Accuracy on pairs [95% interval over prompts]; a tie is not a win", _aligned(accuracy_rows)]
    parts += ["", "Accuracy by length of the responses (pairs)", _aligned(length_rows)]
    if len(best_rows) > 1:
        parts += ["", "The highest response is a chosen one (1/k when k tie)", _aligned(best_rows)]
    if len(bench_rows) > 1:
        parts += ["", "RewardBench", _aligned(bench_rows)]
    return "\n".join(parts + ([""] + notes if notes else []))


def format_preference_comparisons(records: Sequence[Mapping[str, Any]]) -> str:
    """Table of the records of `compare_preferences`, with `set`, `a_label` and `b_label`."""
    rows = [
        ["set", "score", "a", "b", "pairs", "a", "b", "a minus b", "only a", "only b", "p (McNemar)", "p (prompts)"]
    ]
    for one in records:
        figures = _interval((one["difference"], one["low"], one["high"]), sign="+")
        values = [
            str(one["pairs"]),
            _number(one["a"]),
            _number(one["b"]),
            figures,
            str(one["better"]),
            str(one["worse"]),
        ]
        tests = [_number(one["p_value"]), _number(one["p_bootstrap"])]
        rows.append([one["set"], _NAMES[one["score"]], one["a_label"], one["b_label"], *values, *tests])
    return "Accuracy on the same pairs [95% interval over prompts]\n" + _aligned(rows)


def _length_rows(name: str, summary: Mapping[str, Any]) -> list[list[str]]:
    length = summary["length"]
    rows = []
    for score in summary["accuracy"]:
        cells = [
            f"{_number(length[kind]['accuracy'][score][0])} ({length[kind]['pairs']})"
            for kind in ("chosen_longer", "chosen_shorter", "equal")
        ]
        agreement = _interval(length["prefers_longer"][score])
        rows.append([name, _NAMES[score], *cells, agreement, _interval(length["longer_is_better"])])
    return rows


def _notes(name: str, summary: Mapping[str, Any]) -> list[str]:
    counts = [f"{count} rows left out ({reason})" for reason, count in summary.get("left_out", {}).items()]
    words = {
        "without_reward": "rows without a reward (the prompt leaves no room)",
        "truncated": "responses cut",
        "identical": "pairs of equal responses",
    }
    counts += [f"{summary[key]} {word}" for key, word in words.items() if summary[key]]
    notes = [f"{name}: " + ", ".join(counts)] if counts else []
    bench = (summary["rewardbench"] or {}).get("reward")
    if bench and bench["missing"]:
        missing = bench["missing"]
        named = missing if isinstance(missing, list) else [subset for section in missing.values() for subset in section]
        notes.append(f"{name}: RewardBench {bench['version']} subsets that are missing: {', '.join(named)}")
    return notes


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(values: Sequence[float | None], sign: str = "") -> str:
    value, low, high = values
    if value is None:
        return "-"
    return f"{value:{sign}.3f}" + ("" if low is None else f" [{low:{sign}.3f}, {high:{sign}.3f}]")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
