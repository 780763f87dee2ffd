"""All figures of a scored set of completions, and the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from openrlhf.evaluation.metrics import auroc, auroc_interval, prefix_scores
from openrlhf.evaluation.voting import TieRule, split_questions, threshold_at_equal_accuracy, vote_with_filter

PREFIX_PERCENTS = (25, 50, 75, 100)
SCORES = {"reward": "partial_rewards", "goal_similarity": "cosine_sim"}  # name in tables: per-token key of the rows


def summarise_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    threshold: float | None = None,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
    bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures of one set of scored completions.

    Args:
        rows: scored completions of any number of questions.
        threshold: goal similarity below which the filtered vote drops a completion; None: no filtered vote.
        warmup_tokens, tie_rule: as in `vote_with_filter`.
        bootstrap, seed: draws of questions for the intervals, and of the split for the equal-accuracy threshold.
    Returns:
        Counts (`rows`, `questions`, `without_label`, `without_reward`, `truncated`) and the share `correct`; `auroc`:
        [value, low, high] of "reward", "goal_similarity" (last token) and "goal_similarity_mean" (mean over the
        response); `prefix_auroc`: by percent, for the first two; `vote`, `filtered_vote`, `equal_accuracy`: reports of
        voting, None where they do not apply. Rows without a reward or label are counted and left out of what needs
        them; undefined figures are None.
    """
    scored = [row for row in rows if row.get("reward") is not None]
    labelled = [row for row in scored if row.get("is_correct") is not None]
    has_goal = bool(scored) and all(row.get("cosine_sim") is not None for row in scored)
    labels = [row["is_correct"] for row in labelled]
    questions = [row["question"] for row in labelled]
    names = [name for name in SCORES if name == "reward" or has_goal]
    final = {name: prefix_scores(labelled, SCORES[name], 100) for name in names}
    if has_goal:
        final["goal_similarity_mean"] = [float(np.mean(row["cosine_sim"])) for row in labelled]
    known = [row["is_correct"] for row in rows if row.get("is_correct") is not None]
    return {
        "rows": len(rows),
        "questions": len({row["question"] for row in rows}),
        "correct": sum(known) / len(known) if known else None,
        "without_label": len(rows) - len(known),
        "without_reward": len(rows) - len(scored),
        "truncated": sum(bool(row.get("truncated")) for row in rows),
        "auroc": {
            name: list(auroc_interval(labels, values, questions, bootstrap, seed)) for name, values in final.items()
        },
        "prefix_auroc": {
            name: {str(p): auroc(labels, prefix_scores(labelled, SCORES[name], p)) for p in PREFIX_PERCENTS}
            for name in names
        },
        **_votes(scored, threshold if has_goal else None, has_goal, warmup_tokens, tie_rule, seed),
    }


def format_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Plain-text tables of several sets: AUROC, prefix AUROC, votes, and a note on what was left out.

    Args:
        summaries: results of `summarise_rows` by the name of their set.
    """
    names = {key: None for summary in summaries.values() for key in summary["auroc"]}  # in order, once each
    auroc_rows = [["set", "rows", "questions", "correct", *(f"AUROC {name}" for name in names)]]
    prefix_rows = [["set", "score", *(f"{p}%" for p in PREFIX_PERCENTS)]]
    vote_rows = [["set", "vote", "threshold", "accuracy", "unfiltered", "tokens saved", "dropped", "fallbacks"]]
    notes = []
    for name, summary in summaries.items():
        counts = [str(summary["rows"]), str(summary["questions"]), _number(summary["correct"])]
        auroc_rows.append([name, *counts, *(_interval(summary["auroc"].get(score)) for score in names)])
        for score, values in summary["prefix_auroc"].items():
            prefix_rows.append([name, score, *(_number(values[str(p)]) for p in PREFIX_PERCENTS)])
        vote_rows += [[name, *row] for row in _vote_rows(summary)]
        left_out = {key: summary[key] for key in ("without_reward", "without_label", "truncated") if summary[key]}
        if summary["vote"] and summary["vote"]["unanswered"]:
            left_out["questions without any answer"] = summary["vote"]["unanswered"]
        if left_out:
            words = {key: key if " " in key else f"rows {key.replace('_', ' ')}" for key in left_out}
            notes.append(f"{name}: " + ", ".join(f"{count} {words[key]}" for key, count in left_out.items()))
    parts = ["AUROC at the last token [95% interval over questions]", _aligned(auroc_rows)]
    parts += ["", "AUROC after a part of the response", _aligned(prefix_rows)]
    if len(vote_rows) > 1:
        parts += ["", "Majority vote (accuracy per question, tokens over all completions)", _aligned(vote_rows)]
    if any(summary["equal_accuracy"] for summary in summaries.values()):
        parts.append("* threshold that saves most at no loss on one half of the questions, shown on the other half")
    return "\n".join(parts + ([""] + notes if notes else []))


def _votes(
    scored: Sequence[Mapping[str, Any]],
    threshold: float | None,
    has_goal: bool,
    warmup_tokens: int,
    tie_rule: TieRule,
    seed: int,
) -> dict[str, Any]:
    """Vote reports; None unless there are several completions a question and every one can be judged."""
    votes: dict[str, Any] = {"vote": None, "filtered_vote": None, "equal_accuracy": None}
    judged = all(row.get("expected_answer") is not None or row.get("is_correct") is not None for row in scored)
    if len(scored) == len({row["question"] for row in scored}) or not judged:
        return votes
    votes["vote"] = asdict(vote_with_filter(scored, None, tie_rule=tie_rule))
    if threshold is not None:
        report = vote_with_filter(scored, threshold, warmup_tokens=warmup_tokens, tie_rule=tie_rule)
        votes["filtered_vote"] = asdict(report)
    validation, test = split_questions(scored, 0.5, seed)
    if has_goal and validation and test:
        chosen = threshold_at_equal_accuracy(validation, test, warmup_tokens=warmup_tokens, tie_rule=tie_rule)
        votes["equal_accuracy"] = asdict(chosen)
    return votes


def _vote_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    equal = summary["equal_accuracy"]
    labels = {
        "majority": summary["vote"],
        "filtered": summary["filtered_vote"],
        "equal accuracy*": equal and equal["test"],
    }
    rows = []
    for label, report in labels.items():
        if report is not None:
            threshold = "-" if report["threshold"] is None else f"{report['threshold']:.3f}"
            figures = [_number(report[key]) for key in ("accuracy", "unfiltered_accuracy", "tokens_saved", "dropped")]
            rows.append([label, threshold, *figures, str(report["fallbacks"])])
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(values: Sequence[float | None] | None) -> str:
    if values is None or values[0] is None:
        return "-"
    return _number(values[0]) + ("" if values[1] is None else f" [{values[1]:.3f}, {values[2]:.3f}]")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
