"""Intervals of a difference between two ways to train, over seeds, and over seeds and questions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf.evaluation.bootstrap import UNDEFINED, Interval, percentile_interval


def t_interval(values: Sequence[float]) -> Interval:
    """Mean with a 95% t interval.

    Args:
        values: S independent numbers, one a seed.
    Returns:
        mean and mean -+ t(0.975, S - 1) * s / sqrt(S), s with S - 1 below; without bounds for one number, undefined
        for none.
    Source: Student 1908.
    """
    from scipy.stats import t  # takes a second to import

    values = np.asarray(values, np.float64)
    if not len(values):
        return UNDEFINED
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, None, None)
    half = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def two_level_interval(values: Sequence[float], drawn: np.ndarray, seed: int = 0) -> Interval:
    """Mean over seeds with a 95% percentile interval that resamples seeds and questions.

    Every draw takes S seeds with replacement and, for all of them alike, the questions of one draw: all seeds are
    judged on the same questions, so what is particular to these does not average out over seeds.

    Args:
        values: (S,) the figure of each seed over all questions.
        drawn: (S, n) the figure of each seed on each of n draws of the shared questions, NaN where undefined.
        seed: of the draws of seeds.
    Returns:
        The mean of `values`, and the 2.5 and 97.5 percentiles; no bounds for one seed or fewer than two draws,
        undefined for no seed.
    Raises:
        ValueError: another number of rows than of values.
    """
    values, drawn = np.asarray(values, np.float64), np.asarray(drawn, np.float64)
    if drawn.ndim != 2 or len(drawn) != len(values):
        raise ValueError(f"expected one row of draws a seed, got {drawn.shape} for {len(values)} seeds")
    if not len(values):
        return UNDEFINED
    count, n = drawn.shape
    picked = np.random.default_rng(seed).integers(0, count, (count, n))
    means = np.take_along_axis(drawn, picked, axis=0).mean(axis=0)
    return percentile_interval(float(values.mean()), means if count > 1 else means[:0])


def paired_by_seed(a: dict[int, float | None], b: dict[int, float | None]) -> dict[int, float]:
    """a - b of the seeds that have both, in rising order."""
    shared = [seed for seed in sorted(a.keys() & b.keys()) if a[seed] is not None and b[seed] is not None]
    return {seed: a[seed] - b[seed] for seed in shared}
