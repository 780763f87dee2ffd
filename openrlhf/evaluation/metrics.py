"""AUROC with bootstrap intervals over questions, prefix scores and pair accuracy: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A figure with its 95% bootstrap interval; None where it is undefined."""

    value: float | None
    low: float | None
    high: float | None


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
    truth, values = _checked(labels, scores)
    return _Ranked(truth, values).weighted_auroc(np.ones(len(truth)))


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
    truth, values = _checked(labels, scores)
    ranked = _Ranked(truth, values)
    value = ranked.weighted_auroc(np.ones(len(truth)))
    draws = [ranked.weighted_auroc(weights) for weights in _question_weights(groups, len(truth), n, seed)]
    low, high = _percentile_interval([draw for draw in draws if draw is not None])
    return Interval(value, low, high) if value is not None else Interval(None, None, None)


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
    truth, first = _checked(labels, a)
    _, second = _checked(labels, b)
    ranked_a, ranked_b = _Ranked(truth, first), _Ranked(truth, second)
    ones = np.ones(len(truth))
    value_a, value_b = ranked_a.weighted_auroc(ones), ranked_b.weighted_auroc(ones)
    if value_a is None or value_b is None:
        return PairedDifference(None, None, None, None)
    differences = []
    for weights in _question_weights(groups, len(truth), n, seed):
        draw_a, draw_b = ranked_a.weighted_auroc(weights), ranked_b.weighted_auroc(weights)
        if draw_a is not None and draw_b is not None:
            differences.append(draw_a - draw_b)
    low, high = _percentile_interval(differences)
    p_value = None
    if low is not None:
        draws = np.asarray(differences)
        tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
        p_value = min(1.0, 2.0 * (tail + 1) / (len(draws) + 1))
    return PairedDifference(value_a - value_b, low, high, p_value)


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


class _Ranked:
    """Scores ranked once, so that AUROC under any row weights costs one pass over the rows."""

    def __init__(self, truth: np.ndarray, scores: np.ndarray):
        unique, self.level = np.unique(scores, return_inverse=True)  # level: (N,) rank of the score, ties share one
        self.levels = len(unique)
        self.truth = truth

    def weighted_auroc(self, weights: np.ndarray) -> float | None:
        """AUROC with row i counted weights[i] times; None when a class has no weight."""
        correct = np.bincount(self.level, weights * self.truth, self.levels)
        wrong = np.bincount(self.level, weights * ~self.truth, self.levels)
        pairs = correct.sum() * wrong.sum()
        if pairs == 0:
            return None
        wrong_below = np.cumsum(wrong) - wrong
        return float((correct * (wrong_below + 0.5 * wrong)).sum() / pairs)


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


def _question_weights(groups: Sequence[Hashable], rows: int, n: int, seed: int) -> Iterator[np.ndarray]:
    """(N,) weights of n bootstrap draws of whole questions; nothing for fewer than two questions."""
    if len(groups) != rows:
        raise ValueError(f"expected one group a row, got {len(groups)} groups and {rows} rows")
    numbers: dict[Hashable, int] = {}
    member = np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)
    if len(numbers) < 2:
        return
    generator = np.random.default_rng(seed)
    for _ in range(n):
        drawn = generator.integers(0, len(numbers), len(numbers))
        yield np.bincount(drawn, minlength=len(numbers))[member].astype(np.float64)


def _percentile_interval(draws: Sequence[float]) -> tuple[float | None, float | None]:
    if len(draws) < 2:
        return None, None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
