"""All figures of a scored set of completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from openrlhf.evaluation.ballots import Ballot, TieRule, can_be_judged, make_ballots
from openrlhf.evaluation.bootstrap import QuestionDraws, draw_questions, ratio_intervals
from openrlhf.evaluation.calibration import calibration
from openrlhf.evaluation.filtering import filter_outcomes, tradeoff_points
from openrlhf.evaluation.metrics import auroc_intervals, prefix_scores
from openrlhf.evaluation.paired import SCORES, completion_key
from openrlhf.evaluation.selection import FIGURES, GOAL_FIGURES, selection_accuracies, subset_sizes
from openrlhf.evaluation.step_level import step_level
from openrlhf.evaluation.tables import format_table
from openrlhf.evaluation.threshold_choice import check_disjoint, equal_accuracy, in_first_part

__all__ = ["PREFIX_PERCENTS", "SCORES", "format_table", "summarise_rows"]

PREFIX_PERCENTS = (25, 50, 75, 100)
Rows = Sequence[Mapping[str, Any]]


def summarise_rows(
    rows: Rows,
    *,
    threshold: float | None = None,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
    bootstrap: int = 1000,
    seed: int = 0,
    percentiles: Sequence[float] = PREFIX_PERCENTS,
    validation: Rows | None = None,
) -> dict[str, Any]:
    """Figures of one set of scored completions.

    Undefined figures are None; an interval is [value, low, high], 95%, from one set of draws of questions for all.

    Args:
        rows: scored completions of any number of questions.
        threshold: goal similarity below which the filtered vote drops a completion; None: no filtered vote.
        warmup_tokens, tie_rule: as in `vote_with_filter`.
        bootstrap, seed: draws of questions, and the seed of everything random.
        percentiles: percents of the response for `prefix_auroc`.
        validation: scored completions of other questions, to choose the equal-accuracy threshold on; None: one half of
            the questions by a hash, and the figures are those of the other half.
    Returns:
        Counts: `rows`, `questions`, `correct` (share of the labelled), `without_label`, `without_reward`,
        `without_goal` (rewarded rows without goal similarity), `truncated`, `duplicates`, `unjudged` (questions that do
        not vote because a row has neither expected answer nor label).
        `auroc`: of "reward", "goal_similarity" (last token) and "goal_similarity_mean" (mean over the response), the
        latter two over the rows that have it; `prefix_auroc`: by percent, for the first two.
        `accuracy` and `accuracy_by_n`: see `selection_accuracies`; `vote`, `filtered_vote`, `equal_accuracy`: reports
        of voting; `tradeoff`: see `tradeoff_points`; all None unless half of the questions have several completions.
        `calibration`, `step_level`: see there. Rows without what a figure needs are left out of it and counted.
    Raises:
        ValueError: a score that is not finite, or a row that cannot be read (names the row); a question that is in both
            `rows` and `validation`.
    """
    draws = draw_questions([row["question"] for row in rows], bootstrap, seed)
    scored = [row for row in rows if row.get("reward") is not None]
    with_goal = [row for row in scored if row.get("cosine_sim") is not None]
    labelled = [row for row in scored if row.get("is_correct") is not None]
    known = [bool(row["is_correct"]) for row in rows if row.get("is_correct") is not None]
    votes, unjudged = _vote_figures(
        scored, draws, threshold, warmup_tokens=warmup_tokens, tie_rule=tie_rule, seed=seed, validation=validation
    )
    return {
        "rows": len(rows),
        "questions": len(draws.numbers),
        "correct": sum(known) / len(known) if known else None,
        "without_label": len(rows) - len(known),
        "without_reward": len(rows) - len(scored),
        "without_goal": len(scored) - len(with_goal),
        "truncated": sum(bool(row.get("truncated")) for row in rows),
        "duplicates": len(rows) - len({completion_key(row) for row in rows}),
        "unjudged": unjudged,
        **_auroc_figures(labelled, bool(with_goal), percentiles, draws),
        **votes,
        "calibration": calibration(
            [row["is_correct"] for row in labelled],
            [row["reward"] for row in labelled],
            [row["question"] for row in labelled],
            draws,
        ),
        "step_level": step_level(rows, draws),
    }


def _auroc_figures(
    labelled: Rows, has_goal: bool, percentiles: Sequence[float], draws: QuestionDraws
) -> dict[str, Any]:
    figures: dict[str, Any] = {"auroc": {}, "prefix_auroc": {}}
    for score, key in SCORES.items():
        if score == "goal_similarity" and not has_goal:
            continue
        rows = [row for row in labelled if row.get(key) is not None] if score == "goal_similarity" else labelled
        labels, questions = [row["is_correct"] for row in rows], [row["question"] for row in rows]
        scores = {f"{percent:g}": prefix_scores(rows, key, percent) for percent in (*percentiles, 100)}
        if score == "goal_similarity":
            scores["mean"] = [float(np.asarray(row[key], np.float32).mean(dtype=np.float64)) for row in rows]
        found = auroc_intervals(labels, scores, questions, draws)
        figures["auroc"][score] = list(found["100"])
        if score == "goal_similarity":
            figures["auroc"]["goal_similarity_mean"] = list(found["mean"])
        figures["prefix_auroc"][score] = {f"{percent:g}": list(found[f"{percent:g}"]) for percent in percentiles}
    return figures


def _vote_figures(
    scored: Rows,
    draws: QuestionDraws,
    threshold: float | None,
    *,
    warmup_tokens: int,
    tie_rule: TieRule,
    seed: int,
    validation: Rows | None,
) -> tuple[dict[str, Any], int]:
    """Figures of several completions a question, and how many questions cannot be judged."""
    names = ("accuracy", "accuracy_by_n", "vote", "filtered_vote", "equal_accuracy", "tradeoff")
    figures: dict[str, Any] = dict.fromkeys(names)
    rows, unjudged = judged_rows(scored)
    counts = Counter(row["question"] for row in rows)
    if not counts or 2 * sum(count > 1 for count in counts.values()) < len(counts):
        return figures, unjudged
    ballots = make_ballots(rows)
    with_goal = [row for row in rows if row.get("cosine_sim") is not None]
    goal_ballots = ballots if len(with_goal) == len(rows) else make_ballots(with_goal) if with_goal else []
    figures["accuracy"], figures["accuracy_by_n"] = _accuracies(ballots, goal_ballots, draws, tie_rule, seed)
    figures["vote"] = asdict(filter_outcomes(ballots, [None], 0, tie_rule).report(0))
    if not goal_ballots:
        return figures, unjudged
    if threshold is not None:
        filtered = filter_outcomes(goal_ballots, [threshold], warmup_tokens, tie_rule)
        figures["filtered_vote"] = asdict(filtered.report(0))
    figures["tradeoff"] = tradeoff_points(goal_ballots, draws, warmup_tokens, tie_rule, seed=seed)
    if validation is None:
        chosen_on = [ballot for ballot in goal_ballots if in_first_part(ballot.question, 0.5, seed)]
        reported_on = [ballot for ballot in goal_ballots if not in_first_part(ballot.question, 0.5, seed)]
    else:
        others = [row for row in judged_rows(validation)[0] if row.get("reward") is not None]
        others = [row for row in others if row.get("cosine_sim") is not None]
        chosen_on, reported_on = make_ballots(others) if others else [], goal_ballots
        check_disjoint([ballot.question for ballot in chosen_on], [ballot.question for ballot in reported_on])
    if chosen_on and reported_on:
        chosen = equal_accuracy(chosen_on, reported_on, draws, warmup_tokens, tie_rule, seed=seed)
        intervals = {key: list(getattr(chosen, key)) for key in ("saving", "accuracy_difference", "gain_over_fewer")}
        figures["equal_accuracy"] = asdict(chosen) | intervals
    return figures, unjudged


def judged_rows(rows: Rows) -> tuple[list[Mapping[str, Any]], int]:
    """Rows of the questions that can be judged in full, and how many cannot: a row lacks expected answer and label."""
    unjudged = {row["question"] for row in rows if not can_be_judged(row)}
    return [row for row in rows if row["question"] not in unjudged], len(unjudged)


def _accuracies(
    ballots: Sequence[Ballot], goal_ballots: Sequence[Ballot], draws: QuestionDraws, tie_rule: TieRule, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`accuracy` and `accuracy_by_n`, goal figures over the questions and completions that have goal similarities."""
    accuracy: dict[str, Any] = {}
    by_n: dict[str, Any] = {}
    plain = [name for name in FIGURES if name not in GOAL_FIGURES]
    for some, names in ((ballots, plain), (goal_ballots, GOAL_FIGURES)):
        if not some:
            continue
        columns = draws.columns([ballot.question for ballot in some])
        for name, values in selection_accuracies(some, names, tie_rule, seed).items():
            accuracy[name] = list(ratio_intervals(draws, columns, values[:, -1])[0])
            by_n[name] = {str(size): float(values[:, i].mean()) for i, size in enumerate(subset_sizes(some))}
    in_order = [name for name in FIGURES if name in accuracy]
    return {name: accuracy[name] for name in in_order}, {name: by_n[name] for name in in_order}
