"""Majority vote over the answers to one question; the goal filter's functions can be imported from here too.

Policies are those of `openrlhf.evaluation.ballots`; when nothing with an answer is kept, the unfiltered vote counts and
the question is a fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openrlhf.evaluation.ballots import TieRule, check_tie_rule, count_votes, group_answers
from openrlhf.evaluation.filtering import (
    FilterResult,
    VoteReport,
    filter_by_goal,
    filter_tradeoff,
    vote_with_filter,
)
from openrlhf.evaluation.threshold_choice import EqualAccuracy, split_questions, threshold_at_equal_accuracy
from openrlhf.rewards.grading import grade_answer

__all__ = [
    "EqualAccuracy",
    "FilterResult",
    "TieRule",
    "Vote",
    "VoteReport",
    "filter_by_goal",
    "filter_tradeoff",
    "group_answers",
    "majority_vote",
    "split_questions",
    "threshold_at_equal_accuracy",
    "vote_with_filter",
]


@dataclass(frozen=True)
class Vote:
    """Outcome of the vote on one question."""

    answer: str | None  # the winning answer as first written; None when there is no answer at all
    votes: int  # completions that gave it
    tied: int  # answers with that many votes, 1 = no tie
    fallback: bool  # nothing with an answer was kept, so all completions voted


def majority_vote(
    answers: Sequence[str | None],
    keep: Sequence[bool] | None = None,
    scores: Sequence[float] | None = None,
    tie_rule: TieRule = "score",
    expected: str | None = None,
) -> Vote:
    """Most frequent answer among K completions of one question.

    Args:
        answers: K answers, None where a completion has none.
        keep: K flags, True = the completion may vote; None keeps all.
        scores: K numbers (goal similarity or reward) that decide ties by their mean over an answer's voters.
        tie_rule: "score" as in the module's policies; "original" gives a tie to the answer equal to `expected`,
            which flatters the vote and exists only to compare with published numbers.
        expected: the correct answer, needed by "original" only.
    Raises:
        ValueError: lengths differ, unknown tie rule, or "original" without `expected`.
    """
    check_tie_rule(tie_rule)
    for name, values in (("keep", keep), ("scores", scores)):
        if values is not None and len(values) != len(answers):
            raise ValueError(f"expected one value an answer in {name}, got {len(values)} for {len(answers)} answers")
    if tie_rule == "original" and expected is None:
        raise ValueError("tie_rule 'original' needs the expected answer; pass expected or use tie_rule 'score'")
    groups, texts = group_answers(answers)
    written = [answers[int(np.flatnonzero(groups == group)[0])] for group in range(len(texts))]
    correct = None
    if tie_rule == "original":
        correct = np.array([grade_answer(answer, expected) for answer in written], bool)
    kept = np.ones(len(answers), bool) if keep is None else np.asarray(keep, bool)
    fallback = not (kept & (groups >= 0)).any() and not kept.all()
    ranking = None if scores is None else np.asarray(scores, np.float64)
    outcome = count_votes(groups, len(texts), (kept | fallback)[None], ranking, correct=correct)
    winner = int(outcome.winner[0])
    return Vote(None if winner < 0 else written[winner], int(outcome.votes[0]), int(outcome.tied[0]), fallback)
