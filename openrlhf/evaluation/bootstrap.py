"""Intervals from bootstrap draws of whole questions, made once for a set and shared by all its figures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Numbers that a block of draws may fill at a time, so that memory does not grow with rows times draws.
BLOCK_NUMBERS = 1 << 21


class Interval(NamedTuple):
    """A figure with its 95% bootstrap interval; None where it is undefined."""

    value: float | None
    low: float | None
    high: float | None


UNDEFINED = Interval(None, None, None)


@dataclass(frozen=True)
class QuestionDraws:
    """How often each of n draws holds each of Q questions.

    Completions of one question are not independent, so a draw takes Q whole questions with replacement.
    """

    numbers: dict[Hashable, int]  # question -> column of the weights
    weights: np.ndarray  # (n, Q) uint8; n = 0 for fewer than two questions

    def columns(self, groups: Sequence[Hashable]) -> np.ndarray:
        """(N,) int64 column of the question of each row."""
        return np.fromiter((self.numbers[group] for group in groups), np.int64, len(groups))


def draw_questions(groups: Sequence[Hashable], n: int = 1000, seed: int = 0) -> QuestionDraws:
    """Draw the questions of a set n times.

    Args:
        groups: question of each row, in any number of rows; columns follow their first appearance.
        n: draws; none are made for fewer than two questions.
        seed: seed of the draws.
    """
    numbers: dict[Hashable, int] = {}
    for group in groups:
        numbers.setdefault(group, len(numbers))
    count = len(numbers)
    # uint8: a question is drawn once on average; more than 255 times has a probability below 1e-500.
    weights = np.zeros((n if count > 1 else 0, count), np.uint8)
    generator = np.random.default_rng(seed)
    for draw in weights:
        draw[:] = np.bincount(generator.integers(0, count, count), minlength=count)
    return QuestionDraws(numbers, weights)


def percentile_interval(value: float | None, draws: np.ndarray) -> Interval:
    """The value with the 2.5 and 97.5 percentiles of its draws; NaN draws (undefined there) are left out.

    Bounds are None for fewer than two draws, and everything is None without a value.
    """
    if value is None:
        return UNDEFINED
    defined = draws[~np.isnan(draws)]
    if len(defined) < 2:
        return Interval(float(value), None, None)
    low, high = np.percentile(defined, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def two_sided_p(draws: np.ndarray) -> float | None:
    """Twice the smaller share of draws on either side of 0, at least 2 / (draws + 1); None for fewer than two draws."""
    defined = draws[~np.isnan(draws)]
    if len(defined) < 2:
        return None
    tail = min(int((defined <= 0).sum()), int((defined >= 0).sum()))
    return min(1.0, 2.0 * (tail + 1) / (len(defined) + 1))


def question_sums(draws: QuestionDraws, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n, T) sums of the values over each draw.

    Args:
        columns: (N,) question of each row.
        values: (N, T) or (N,) numbers of each row, T = 1 for the latter.
    """
    values = _as_columns(values)
    per_question = np.zeros((draws.weights.shape[1], values.shape[1]))
    np.add.at(per_question, columns, values)
    count = draws.weights.shape[0]
    sums = np.empty((count, values.shape[1]))
    step = max(BLOCK_NUMBERS // max(draws.weights.shape[1], 1), 1)
    for start in range(0, count, step):
        sums[start : start + step] = draws.weights[start : start + step].astype(np.float64) @ per_question
    return sums


def ratio_intervals(
    draws: QuestionDraws, columns: np.ndarray, above: np.ndarray, below: np.ndarray | None = None
) -> list[Interval]:
    """Intervals of T ratios of sums over rows, such as correct votes per question or saved tokens per token.

    Args:
        columns: (N,) question of each row (or of each question).
        above: (N, T) numerators, or (N,) for one ratio.
        below: denominators in the same shape; None counts rows, so that the ratio is a mean.
    Returns:
        T intervals; undefined where the denominators sum to 0, without bounds where fewer than two questions count.
    """
    above = _as_columns(above)
    below = np.ones_like(above) if below is None else _as_columns(below)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = question_sums(draws, columns, above) / question_sums(draws, columns, below)
    intervals = []
    for t in range(above.shape[1]):
        total = below[:, t].sum()
        value = above[:, t].sum() / total if total else None
        counted = len(np.unique(columns[below[:, t] != 0]))
        intervals.append(percentile_interval(value, ratios[:, t] if counted > 1 else ratios[:0, t]))
    return intervals


def _as_columns(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[:, None] if values.ndim == 1 else values
