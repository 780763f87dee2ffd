"""AUROC with bootstrap intervals over questions, prefix scores and pair accuracy: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf.evaluation.bootstrap import (
    BLOCK_NUMBERS,
    UNDEFINED,
    Interval,
    QuestionDraws,
    draw_questions,
    percentile_interval,
    two_sided_p,
)

__all__ = [
    "Interval",
    "PairedDifference",
    "auroc",
    "auroc_draws",
    "auroc_interval",
    "auroc_intervals",
    "pair_accuracy",
    "paired_auroc_difference",
    "prefix_index",
    "prefix_scores",
]


class PairedDifference(NamedTuple):
    """AUROC of `a` minus AUROC of `b` on the same rows, with a 95% interval and a two-sided bootstrap p-value."""

    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None


def auroc(labels: Sequence[bool | int], scores: Sequence[float]) -> float | None:
    """Probability that a correct item scores above a wrong one, a tie counting one half.

    Args:
        labels: N true/false (or 1/0) values, true = correct.
        scores: N finite numbers, higher = better.
    Returns:
        A number in [0, 1], whatever the order of the rows; None when there is no correct or no wrong item.
    Raises:
        ValueError: lengths differ, a label is not true/false, or a score is not a finite number (names the row).
    Source: Mann and Whitney 1947 (midranks).
    """
    return _RankedScores(*_checked(labels, scores)).auroc()


def auroc_interval(
    labels: Sequence[bool | int], scores: Sequence[float], groups: Sequence[Hashable], n: int = 1000, seed: int = 0
) -> Interval:
    """AUROC with a 95% percentile bootstrap interval that resamples whole questions.

    Completions of one question are not independent, so they are drawn together.

    Args:
        labels, scores: as for `auroc`, N each.
        groups: N question identifiers.
        n: bootstrap draws; draws without both classes are left out.
        seed: seed of the draws.
    Returns:
        (value, low, high); all None for one class, bounds None for fewer than two questions.
    Raises:
        ValueError: as `auroc`, or groups of another length.
    """
    _check_groups(groups, len(labels))
    return auroc_intervals(labels, {"": scores}, groups, draw_questions(groups, n, seed))[""]


def auroc_intervals(
    labels: Sequence[bool | int],
    scores: Mapping[str, Sequence[float]],
    groups: Sequence[Hashable],
    draws: QuestionDraws,
) -> dict[str, Interval]:
    """`auroc_interval` of several scores of the same rows, on draws that other figures may share.

    Args:
        labels, groups: as for `auroc_interval`, N each.
        scores: N scores by name.
        draws: draws over questions that include all of `groups`.
    """
    columns = draws.columns(groups)
    several = len(np.unique(columns)) > 1
    intervals = {}
    for name, values in scores.items():
        ranked = _RankedScores(*_checked(labels, values))
        value = ranked.auroc()
        drawn = ranked.drawn(columns, draws.weights) if several and value is not None else np.empty(0)
        intervals[name] = percentile_interval(value, drawn)
    return intervals


def auroc_draws(
    labels: Sequence[bool | int], scores: Sequence[float], groups: Sequence[Hashable], draws: QuestionDraws
) -> np.ndarray:
    """(n,) AUROC on each draw of questions, NaN where a draw has no correct or no wrong item; arguments as above."""
    return _RankedScores(*_checked(labels, scores)).drawn(draws.columns(groups), draws.weights)


def paired_auroc_difference(
    labels: Sequence[bool | int],
    a: Sequence[float],
    b: Sequence[float],
    groups: Sequence[Hashable],
    n: int = 1000,
    seed: int = 0,
) -> PairedDifference:
    """Difference of two AUROCs on the same rows; both are computed on the same resampled questions.

    Args:
        labels, groups: as for `auroc_interval`, N each.
        a, b: N scores of the two models, row by row.
    Returns:
        (difference, low, high, p_value); p_value is twice the smaller share of draws on either side of 0,
        at least 2 / (draws + 1). All None for one class; bounds and p None for fewer than two questions.
    Raises:
        ValueError: as `auroc_interval`.
    """
    _check_groups(groups, len(labels))
    first, second = _RankedScores(*_checked(labels, a)), _RankedScores(*_checked(labels, b))
    value_a, value_b = first.auroc(), second.auroc()
    if value_a is None or value_b is None:
        return PairedDifference(*UNDEFINED, None)
    draws = draw_questions(groups, n, seed)
    columns = draws.columns(groups)
    differences = first.drawn(columns, draws.weights) - second.drawn(columns, draws.weights)
    return PairedDifference(*percentile_interval(value_a - value_b, differences), two_sided_p(differences))


def prefix_index(num_actions: int, percent: float) -> int:
    """0-based position of the response token that ends the first `percent` % of the response.

    Args:
        num_actions: response tokens including EOS, at least 1.
        percent: in (0, 100].
    Returns:
        ceil(percent / 100 * num_actions) - 1, inside [0, num_actions - 1].
    Raises:
        ValueError: either number is out of range.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"expected a percentage in (0, 100], got {percent}")
    if num_actions < 1:
        raise ValueError(f"expected at least one response token, got {num_actions}")
    # 1e-9: a product such as 7 * 100 / 7 must not be pushed to the next token by rounding.
    return max(math.ceil(percent * num_actions / 100 - 1e-9), 1) - 1


def prefix_scores(rows: Sequence[Mapping[str, Any]], key: str, percent: float) -> list[float]:
    """Value of each scored completion after the first `percent` % of its response.

    Args:
        rows: scored completions with `num_actions` and a per-token list under `key`.
        key: "partial_rewards" (reward head) or "cosine_sim" (goal similarity).
        percent: in (0, 100]; 100 is the last token.
    Returns:
        One number a row, in the order of the rows.
    Raises:
        ValueError: a row lacks the list, or its length is not `num_actions` (names the row).
    """
    scores = []
    for number, row in enumerate(rows):
        values, length = row.get(key), row.get("num_actions")
        if values is None or length is None:
            raise ValueError(
                f"row {number}: expected keys {key!r} and 'num_actions'; score the file with eval_rm first"
            )
        if len(values) != length:
            raise ValueError(f"row {number}: expected {length} values (num_actions) in {key!r}, got {len(values)}")
        scores.append(float(values[prefix_index(length, percent)]))
    return scores


def pair_accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> tuple[float | None, int]:
    """Share of pairs whose chosen reward is strictly higher; a tie is not a win.

    Args:
        chosen, rejected: (N,) finite rewards of each pair.
    Returns:
        (accuracy over all N pairs, number of ties); accuracy is None for no pairs.
    Raises:
        ValueError: lengths differ or a reward is not finite (names the pair).
    """
    first, second = _finite(chosen), _finite(rejected)
    if len(first) != len(second):
        raise ValueError(f"expected as many rejected as chosen rewards, got {len(second)} and {len(first)}")
    if len(first) == 0:
        return None, 0
    return float((first > second).mean()), int((first == second).sum())


class _RankedScores:
    """Scores sorted once, so that AUROC under any weights of the rows is a sum over running totals."""

    def __init__(self, truth: np.ndarray, scores: np.ndarray):
        order = np.argsort(scores, kind="stable")  # by rising score
        self.correct, self.wrong = order[truth[order]], order[~truth[order]]
        # Of the sorted wrong rows, those before `below` score lower than a correct row, those before `upto` not higher.
        self.below = np.searchsorted(scores[self.wrong], scores[self.correct], side="left")
        self.upto = np.searchsorted(scores[self.wrong], scores[self.correct], side="right")
        self.tied = bool((self.below != self.upto).any())

    def auroc(self) -> float | None:
        """Share of won pairs; None when a class is empty."""
        pairs = len(self.correct) * len(self.wrong)
        return float((self.below + self.upto).sum() / 2 / pairs) if pairs else None

    def drawn(self, columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """(n,) AUROC of each draw; NaN where a class has no row.

        Args:
            columns: (N,) question of each row.
            weights: (n, Q) times that a draw holds each question.
        """
        results = np.full(len(weights), np.nan)
        step = max(BLOCK_NUMBERS // max(len(columns), 1), 1)
        for start in range(0, len(weights), step):
            block = weights[start : start + step]
            wrong = np.zeros((len(block), len(self.wrong) + 1))  # total weight of the first k sorted wrong rows
            np.cumsum(block[:, columns[self.wrong]], axis=1, out=wrong[:, 1:])
            correct = block[:, columns[self.correct]].astype(np.float64)
            won = np.take(wrong, self.below, axis=1)
            won = won + np.take(wrong, self.upto, axis=1) if self.tied else 2 * won  # a tie is half a win
            pairs = correct.sum(axis=1) * wrong[:, -1]
            np.divide(
                np.einsum("di,di->d", correct, won), 2 * pairs, out=results[start : start + step], where=pairs > 0
            )
        return results


def _checked(labels: Sequence[bool | int], scores: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    if len(labels) != len(scores):
        raise ValueError(f"expected one score a label, got {len(labels)} labels and {len(scores)} scores")
    for row, label in enumerate(labels):
        if label is None or label not in (0, 1):
            raise ValueError(f"row {row}: expected a label true or false, got {label!r}")
    return np.asarray(labels, dtype=bool), _finite(scores)


def _finite(scores: Sequence[float]) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)  # None becomes NaN and is refused below
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"row {row}: expected a finite score, got {scores[row]} ({len(bad)} of {len(values)} rows)")
    return values


def _check_groups(groups: Sequence[Hashable], rows: int) -> None:
    if len(groups) != rows:
        raise ValueError(f"expected one group a row, got {len(groups)} groups and {rows} rows")
