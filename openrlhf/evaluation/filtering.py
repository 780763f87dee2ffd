"""The goal filter: completions dropped while they are written, tokens saved, and the vote among the rest.

When nothing with an answer is kept, the unfiltered vote counts, the question is a fallback and saves no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openrlhf.evaluation.ballots import Ballot, TieRule, check_tie_rule, count_votes, make_ballots
from openrlhf.evaluation.bootstrap import QuestionDraws, ratio_intervals
from openrlhf.evaluation.selection import accuracy_at_share, vote_by_count

Rows = Sequence[Mapping[str, Any]]


class FilterResult(NamedTuple):
    """What a live filter does to one completion."""

    kept: bool
    tokens_used: int


@dataclass(frozen=True)
class VoteReport:
    """Filtered against unfiltered majority vote over a set of questions."""

    threshold: float | None
    questions: int
    completions: int
    accuracy: float  # per question, after filtering and fallback
    unfiltered_accuracy: float  # per question
    tokens_saved: float  # share of all response tokens of all completions
    dropped: float  # share of completions below the threshold
    fallbacks: int  # questions decided by the unfiltered vote because nothing was kept
    unanswered: int  # questions without any answer: counted as wrong


@dataclass(frozen=True)
class FilterOutcomes:
    """What T thresholds do to Q questions; counts are completions unless said."""

    thresholds: list[float | None]  # T
    right: np.ndarray  # (Q, T) bool, the filtered vote (or its fallback) is right
    used: np.ndarray  # (Q, T) response tokens
    dropped: np.ndarray  # (Q, T)
    correct_kept: np.ndarray  # (Q, T)
    fallback: np.ndarray  # (Q, T) bool
    unfiltered_right: np.ndarray  # (Q,) bool
    unanswered: np.ndarray  # (Q,) bool, no completion has an answer
    completions: np.ndarray  # (Q,)
    correct: np.ndarray  # (Q,)
    tokens: np.ndarray  # (Q,)

    def report(self, t: int) -> VoteReport:
        """Totals at the t-th threshold."""
        total = int(self.tokens.sum())
        return VoteReport(
            threshold=self.thresholds[t],
            questions=len(self.tokens),
            completions=int(self.completions.sum()),
            accuracy=float(self.right[:, t].mean()),
            unfiltered_accuracy=float(self.unfiltered_right.mean()),
            tokens_saved=1 - int(self.used[:, t].sum()) / total if total else 0.0,
            dropped=int(self.dropped[:, t].sum()) / int(self.completions.sum()),
            fallbacks=int(self.fallback[:, t].sum()),
            unanswered=int(self.unanswered.sum()),
        )


def filter_by_goal(cosine_sim: Sequence[float], threshold: float | None, warmup_tokens: int = 0) -> FilterResult:
    """Stop a completion at the first token at or after `warmup_tokens` whose goal similarity is below the threshold.

    Compared in float32, the precision of the scores and of a live filter.

    Args:
        cosine_sim: (A,) goal similarity at each response token.
        threshold: in [-1, 1]; None keeps everything.
        warmup_tokens: response tokens at the start that are never judged.
    Returns:
        (kept, tokens_used): a dropped completion used t + 1 tokens when token t (0-based) is the first below.
    Raises:
        ValueError: no token, negative warm-up, or a threshold that is not a number in [-1, 1].
    """
    check_filter(threshold, warmup_tokens)
    kept, used = _filter(_running_minimum(cosine_sim, warmup_tokens), len(cosine_sim), [threshold], warmup_tokens)
    return FilterResult(bool(kept[0]), int(used[0]))


def vote_with_filter(
    rows: Rows, threshold: float | None, *, warmup_tokens: int = 0, tie_rule: TieRule = "score"
) -> VoteReport:
    """Majority vote on every question with and without the goal filter.

    Tokens saved are those after the point where a dropped completion is stopped. A fallback question saves nothing:
    its vote needs every completion in full.

    Args:
        rows: scored completions with `question`, `predicted_answer`, `expected_answer` (or `is_correct`),
            `num_actions`, and `cosine_sim` when a threshold is given. Ties are decided by the last goal similarity,
            else by `reward`, where every row of the question has it.
        threshold, warmup_tokens: as for `filter_by_goal`.
        tie_rule: as for `majority_vote`.
    Raises:
        ValueError: no rows, a threshold without `cosine_sim`, or neither expected answer nor label (names the row).
    """
    check_filter(threshold, warmup_tokens)
    ballots = make_ballots(rows) if threshold is None else make_goal_ballots(rows)
    return filter_outcomes(ballots, [threshold], warmup_tokens, tie_rule).report(0)


def filter_tradeoff(
    rows: Rows, *, warmup_tokens: int = 0, tie_rule: TieRule = "score", candidates: int = 25
) -> list[VoteReport]:
    """Reports without a filter and at up to `candidates` rising thresholds: tokens saved against accuracy.

    Args, Raises: as `vote_with_filter`; every row needs `cosine_sim`.
    """
    check_filter(None, warmup_tokens)
    ballots = make_goal_ballots(rows)
    thresholds = [None, *candidate_thresholds(ballots, candidates, warmup_tokens)]
    outcomes = filter_outcomes(ballots, thresholds, warmup_tokens, tie_rule)
    return [outcomes.report(t) for t in range(len(thresholds))]


def tradeoff_points(
    ballots: Sequence[Ballot],
    draws: QuestionDraws,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
    candidates: int = 25,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The trade-off curve with intervals: without a filter, then at up to `candidates` rising thresholds.

    Args:
        ballots: questions whose completions all have goal similarities.
        draws: draws that hold every question.
        seed: of the subsets for `fewer_samples`.
    Returns:
        By threshold: `accuracy` and `tokens_saved` [value, low, high]; `fewer_samples`, the expected accuracy of the
        unfiltered vote of fewer completions that cost as many tokens, see `accuracy_at_share`; `correct_kept` and
        `wrong_dropped`, shares of the correct and of the wrong completions (None where there are none); `dropped`,
        share of all completions; `fallbacks`, questions. The last four count what the filter itself does, also in
        fallback questions.
    """
    thresholds = [None, *candidate_thresholds(ballots, candidates, warmup_tokens)]
    outcomes = filter_outcomes(ballots, thresholds, warmup_tokens, tie_rule)
    columns = draws.columns([ballot.question for ballot in ballots])
    tokens = np.repeat(outcomes.tokens[:, None], len(thresholds), axis=1)
    accuracy = ratio_intervals(draws, columns, outcomes.right)
    saved = ratio_intervals(draws, columns, tokens - outcomes.used, tokens)
    completions, correct = int(outcomes.completions.sum()), int(outcomes.correct.sum())
    by_count = vote_by_count(ballots, tie_rule, seed)
    points = []
    for t, threshold in enumerate(thresholds):
        dropped, kept = int(outcomes.dropped[:, t].sum()), int(outcomes.correct_kept[:, t].sum())
        wrong = completions - correct
        points.append(
            {
                "threshold": threshold,
                "accuracy": list(accuracy[t]),
                "tokens_saved": list(saved[t]),
                "fewer_samples": float(accuracy_at_share(by_count, 1 - (saved[t][0] or 0.0)).mean()),
                "correct_kept": kept / correct if correct else None,
                "wrong_dropped": (dropped - (correct - kept)) / wrong if wrong else None,
                "dropped": dropped / completions,
                "fallbacks": int(outcomes.fallback[:, t].sum()),
            }
        )
    return points


def filter_outcomes(
    ballots: Sequence[Ballot], thresholds: Sequence[float | None], warmup_tokens: int = 0, tie_rule: TieRule = "score"
) -> FilterOutcomes:
    """Filter and vote on every question at every threshold.

    Args:
        ballots: Q questions; all have goal similarities unless every threshold is None.
        thresholds: T thresholds, None = no filter.
    """
    check_tie_rule(tie_rule)
    shape = (len(ballots), len(thresholds))
    right, fallback = np.zeros(shape, bool), np.zeros(shape, bool)
    used, dropped, correct_kept = (np.zeros(shape, np.int64) for _ in range(3))
    unfiltered = np.zeros(len(ballots), bool)
    for q, ballot in enumerate(ballots):
        kept, tokens = _filter_ballot(ballot, thresholds, warmup_tokens)  # (T, K) each
        answered = ballot.groups >= 0
        fallback[q] = ~(kept & answered).any(axis=1) & ~kept.all(axis=1)
        voters = np.vstack([kept | fallback[q][:, None], np.ones((1, len(answered)), bool)])  # last: no filter
        known = ballot.correct if tie_rule == "original" else None
        winner = count_votes(ballot.groups, len(ballot.correct), voters, ballot.tie_scores, correct=known).winner
        decided = (winner >= 0) & np.append(ballot.correct, False)[winner]  # -1 takes the appended False
        right[q], unfiltered[q] = decided[:-1], decided[-1]
        used[q] = np.where(fallback[q], ballot.lengths.sum(), tokens.sum(axis=1))
        dropped[q] = (~kept).sum(axis=1)
        correct_kept[q] = (kept & ballot.labels).sum(axis=1)
    return FilterOutcomes(
        thresholds=list(thresholds),
        right=right,
        used=used,
        dropped=dropped,
        correct_kept=correct_kept,
        fallback=fallback,
        unfiltered_right=unfiltered,
        unanswered=np.array([not (ballot.groups >= 0).any() for ballot in ballots], bool),
        completions=np.array([len(ballot.groups) for ballot in ballots], np.int64),
        correct=np.array([ballot.labels.sum() for ballot in ballots], np.int64),
        tokens=np.array([ballot.lengths.sum() for ballot in ballots], np.int64),
    )


def candidate_thresholds(ballots: Sequence[Ballot], count: int, warmup_tokens: int = 0) -> list[float]:
    """Up to `count` thresholds just above quantiles of the completions' lowest similarity: each drops at least one."""
    judged = [one[warmup_tokens:] for ballot in ballots for one in ballot.cosine_sim or []]
    minima = np.array([one.min() for one in judged if len(one)], np.float32)
    if not len(minima):
        return []
    quantiles = np.unique(np.quantile(minima, np.linspace(0, 1, count), method="lower"))
    above = np.nextafter(quantiles.astype(np.float32), np.float32(2))
    return [float(value) for value in np.minimum(above, np.float32(1))]


def _filter_ballot(
    ballot: Ballot, thresholds: Sequence[float | None], warmup_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) bool kept and (T, K) int64 tokens used."""
    shape = (len(thresholds), len(ballot.lengths))
    kept, used = np.ones(shape, bool), np.tile(ballot.lengths, (shape[0], 1))
    if any(threshold is not None for threshold in thresholds):
        for k, similarities in enumerate(ballot.cosine_sim):
            lowest = _running_minimum(similarities, warmup_tokens)
            kept[:, k], used[:, k] = _filter(lowest, int(ballot.lengths[k]), thresholds, warmup_tokens)
    return kept, used


def _filter(
    lowest: np.ndarray, length: int, thresholds: Sequence[float | None], warmup_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(T,) kept and (T,) tokens used; `lowest` never rises, so the first value below is found by bisection."""
    limits = np.array([-np.inf if threshold is None else threshold for threshold in thresholds], np.float32)
    first = np.searchsorted(-lowest, -limits, side="right")
    kept = first == len(lowest)
    return kept, np.where(kept, length, warmup_tokens + first + 1)


def _running_minimum(cosine_sim: Sequence[float], warmup_tokens: int) -> np.ndarray:
    similarities = np.asarray(cosine_sim, np.float32)
    if similarities.ndim != 1 or len(similarities) == 0:
        raise ValueError(f"expected goal similarities of at least one response token, got shape {similarities.shape}")
    if not np.isfinite(similarities).all():
        raise ValueError(f"expected finite goal similarities, got {similarities[~np.isfinite(similarities)][0]}")
    return np.minimum.accumulate(similarities[warmup_tokens:])


def make_goal_ballots(rows: Rows) -> list[Ballot]:
    """Ballots of rows that all have goal similarities.

    Raises:
        ValueError: as `make_ballots`, or a row without `cosine_sim`.
    """
    for number, row in enumerate(rows):
        if row.get("num_actions") is None or row.get("cosine_sim") is None:
            raise ValueError(
                f"row {number}: expected keys 'num_actions' and 'cosine_sim'; "
                "score the file with eval_rm and a goal state"
            )
    return make_ballots(rows)


def check_filter(threshold: float | None, warmup_tokens: int) -> None:
    """Refuse a threshold outside of [-1, 1] and a negative warm-up."""
    if threshold is not None and not (math.isfinite(threshold) and -1 <= threshold <= 1):
        raise ValueError(f"expected a goal similarity threshold in [-1, 1], got {threshold}")
    if warmup_tokens < 0:
        raise ValueError(f"expected warmup_tokens of 0 or more, got {warmup_tokens}")
