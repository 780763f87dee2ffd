"""Completions grouped by question and answer, and the winner of a vote among any of them.

Policies: answers are grouped by equivalence; missing answers do not vote; a tie goes to the answer with the higher mean
score when scores exist, else to the answer whose normalised text sorts first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from openrlhf.rewards.grading import grade_answer, normalise_answer

TieRule = Literal["score", "original"]

# Relative to the largest number added: sums of the same numbers in another order differ by less, and stay ties.
TIE_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Ballot:
    """K completions of one question with G different answers, ready for any vote or choice among them."""

    question: str
    groups: np.ndarray  # (K,) int64 answer of each completion, -1 = none
    correct: np.ndarray  # (G,) bool, whether the answer is right
    labels: np.ndarray  # (K,) bool, whether the completion is right
    lengths: np.ndarray  # (K,) int64 response tokens including EOS
    rewards: np.ndarray | None  # (K,) float64, None unless every completion has one
    cosine_sim: list[np.ndarray] | None  # K float32 goal similarities by token, None unless every completion has them

    @property
    def similarities(self) -> np.ndarray | None:
        """(K,) float64 goal similarity at the last token."""
        return None if self.cosine_sim is None else np.array([one[-1] for one in self.cosine_sim], np.float64)

    @property
    def tie_scores(self) -> np.ndarray | None:
        """(K,) what decides ties: goal similarity where every completion of the question has one, else the reward."""
        return self.rewards if self.cosine_sim is None else self.similarities


class Winners(NamedTuple):
    """Outcome of S votes of one question."""

    winner: np.ndarray  # (S,) int64 winning answer, -1 when nobody votes
    votes: np.ndarray  # (S,) completions that gave it
    tied: np.ndarray  # (S,) answers with as many votes (or as much weight), 1 = no tie


def make_ballots(rows: Sequence[Mapping[str, Any]]) -> list[Ballot]:
    """One ballot a question, in order of appearance.

    An answer is right by `expected_answer` where there is one, else by the label of the first completion that gives it.
    A completion is right by its label `is_correct` where there is one, else by its answer.

    Args:
        rows: scored completions with `question`, `predicted_answer`, `num_actions`, `expected_answer` or `is_correct`,
            and where they exist `reward` and `cosine_sim`.
    Raises:
        ValueError: no rows, no `num_actions`, or neither expected answer nor label (names the row).
    """
    if not rows:
        raise ValueError("expected scored completions to vote on, got none")
    members: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.get("num_actions") is None:
            raise ValueError(f"row {number}: expected key 'num_actions'; score the file with eval_rm")
        if not can_be_judged(row):
            raise ValueError(
                f"row {number}: expected 'expected_answer' or 'is_correct' to judge the vote, found neither"
            )
        members.setdefault(row["question"], []).append(number)
    return [_ballot(question, [rows[number] for number in numbers]) for question, numbers in members.items()]


def can_be_judged(row: Mapping[str, Any]) -> bool:
    """Whether a row says what is right: by an expected answer or a label."""
    return row.get("expected_answer") is not None or row.get("is_correct") is not None


def group_answers(answers: Sequence[str | None]) -> tuple[np.ndarray, list[str]]:
    """Group K answers by equivalence.

    Returns:
        (K,) int64 group of each answer, -1 for a missing one, and the normalised text of each group; groups are
        numbered in the order of that text, so the result does not depend on the order of the answers.
    """
    texts = [normalise_answer(answer) for answer in answers]
    written = dict(sorted(zip(texts, map(str, answers), strict=True), reverse=True))  # one spelling of each text
    representatives: list[str] = []
    number: dict[str, int] = {"": -1}
    for text in sorted(set(texts) - {""}):
        same = (i for i, other in enumerate(representatives) if grade_answer(written[text], written[other]))
        number[text] = next(same, len(representatives))
        if number[text] == len(representatives):
            representatives.append(text)
    return np.array([number[text] for text in texts], dtype=np.int64), representatives


def count_votes(
    groups: np.ndarray,
    answers: int,
    voters: np.ndarray,
    scores: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    correct: np.ndarray | None = None,
) -> Winners:
    """Winner of S votes of one question, each among its own voters.

    Args:
        groups: (K,) answer of each completion, -1 = none; numbered in the order of the answers' texts.
        answers: G, number of different answers.
        voters: (S, K) bool, True = the completion votes if it has an answer.
        scores: (K,) numbers whose mean over an answer's voters decides ties.
        weights: (K,) weight of each vote; None counts heads.
        correct: (G,) bool; given, a tie goes to a right answer before scores are asked.
    """
    if answers == 0:
        nobody = np.zeros(len(voters), np.int64)
        return Winners(nobody - 1, nobody, nobody)
    gave = (groups[:, None] == np.arange(answers)).astype(np.float64)  # (K, G); a missing answer is in no column
    ballots = voters.astype(np.float64)
    votes = ballots @ gave
    if weights is None:
        tied = _highest(votes, votes > 0, np.zeros(len(votes)))
    else:
        tied = _highest(ballots @ (gave * weights[:, None]), votes > 0, _largest(ballots, weights))
    count = tied.sum(axis=1)
    final = tied
    if scores is not None:
        means = ballots @ (gave * scores[:, None]) / np.maximum(votes, 1)
        final = _highest(means, tied, _largest(ballots, scores))
    if correct is not None:
        right = tied & correct
        final = np.where(right.any(axis=1, keepdims=True), right, final)
    winner = np.where(final.any(axis=1), final.argmax(axis=1), -1)  # argmax: the first in the order of the texts
    return Winners(winner, votes[np.arange(len(votes)), winner].astype(np.int64), count)


def check_tie_rule(tie_rule: str) -> None:
    """Refuse an unknown rule."""
    if tie_rule not in ("score", "original"):
        raise ValueError(f"expected tie_rule 'score' or 'original', got {tie_rule!r}")


def _highest(values: np.ndarray, allowed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(S, G) bool, True on the allowed entries of each row that are as high as its highest one."""
    values = np.where(allowed, values, -np.inf)
    best = values.max(axis=1, keepdims=True)
    return allowed & (values >= best - TIE_TOLERANCE * scale[:, None])


def _largest(ballots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(S,) largest absolute value among the voters of each vote."""
    return (ballots * np.abs(values)).max(axis=1, initial=0.0)


def _ballot(question: str, rows: Sequence[Mapping[str, Any]]) -> Ballot:
    groups, texts = group_answers([row.get("predicted_answer") for row in rows])
    correct = np.array([_is_right(rows[int(np.flatnonzero(groups == group)[0])]) for group in range(len(texts))], bool)
    labels = [
        bool(row["is_correct"]) if row.get("is_correct") is not None else bool(group >= 0 and correct[group])
        for row, group in zip(rows, groups, strict=True)
    ]
    has_reward = all(row.get("reward") is not None for row in rows)
    has_goal = all(row.get("cosine_sim") is not None and len(row["cosine_sim"]) for row in rows)
    return Ballot(
        question=question,
        groups=groups,
        correct=correct,
        labels=np.array(labels, bool),
        lengths=np.array([row["num_actions"] for row in rows], np.int64),
        rewards=np.array([row["reward"] for row in rows], np.float64) if has_reward else None,
        cosine_sim=[np.asarray(row["cosine_sim"], np.float32) for row in rows] if has_goal else None,
    )


def _is_right(row: Mapping[str, Any]) -> bool:
    if row.get("expected_answer") is not None:
        return grade_answer(row["predicted_answer"], row["expected_answer"])
    return bool(row["is_correct"])
