"""How well sigmoid(reward) says the probability that a completion is correct."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from openrlhf.evaluation.bootstrap import QuestionDraws, percentile_interval, question_sums, ratio_intervals
from openrlhf.evaluation.selection import sigmoid

BINS = 10
Z_95 = 1.959963984540054  # two-sided 95% of the normal distribution


def calibration(
    labels: Sequence[bool], rewards: Sequence[float], groups: Sequence[Hashable], draws: QuestionDraws
) -> dict[str, Any] | None:
    """Reliability curve, expected calibration error and Brier score of sigmoid(reward), raw and after a shift.

    A Bradley-Terry reward is defined up to a constant for each prompt, so the raw figures say whether sigmoid(reward)
    may be read as a probability as it stands; the centred ones, after one shift for the whole set that makes the mean
    prediction equal the share of correct completions, say how well it ranks and spreads.

    Args:
        labels, rewards, groups: N labels, rewards and questions.
        draws: draws of questions that include all of `groups`.
    Returns:
        `bins`, `ece`, `brier` as `reliability` gives them, and `centred`: the same with `shift`, None where all or no
        completions are correct. None for no rows.
    """
    if len(labels) == 0:
        return None
    truth, values = np.asarray(labels, bool), np.asarray(rewards, np.float64)
    columns = draws.columns(groups)
    raw = reliability(truth, sigmoid(values), columns, draws)
    shift = centring_shift(truth, values)
    centred = None if shift is None else {"shift": shift} | reliability(truth, sigmoid(values - shift), columns, draws)
    return raw | {"centred": centred}


def reliability(truth: np.ndarray, predicted: np.ndarray, columns: np.ndarray, draws: QuestionDraws) -> dict[str, Any]:
    """Ten bins of equal width, empty ones left out, with calibration error and Brier score.

    Args:
        truth: (N,) bool.
        predicted: (N,) probabilities.
        columns: (N,) question of each row in the draws.
    Returns:
        `bins`: `low`, `high` (a value on an edge belongs to the upper bin, 1 to the last), `count`, `predicted` (mean),
        `correct` (share) with its Wilson interval `ci_low`, `ci_high` (rows counted as independent); `ece`: mean of
        |predicted - correct| weighted by count; `brier`: mean squared error. Both are [value, low, high], bootstrap
        over questions. The draws add noise to every bin, so those of `ece` lie somewhat above its value.
    """
    place = np.minimum((predicted * BINS).astype(int), BINS - 1)
    in_bin = place[:, None] == np.arange(BINS)  # (N, BINS)
    count = in_bin.sum(axis=0)
    gap = np.where(in_bin, (predicted - truth)[:, None], 0.0)
    bins = []
    for b in np.flatnonzero(count):
        members = in_bin[:, b]
        right = int(truth[members].sum())
        low, high = wilson_interval(right, int(count[b]))
        bins.append(
            {
                "low": b / BINS,
                "high": (b + 1) / BINS,
                "count": int(count[b]),
                "predicted": float(predicted[members].mean()),
                "correct": right / int(count[b]),
                "ci_low": low,
                "ci_high": high,
            }
        )
    several = len(np.unique(columns)) > 1
    with np.errstate(invalid="ignore"):
        drawn = np.abs(question_sums(draws, columns, gap)).sum(axis=1) / question_sums(draws, columns, in_bin).sum(
            axis=1
        )
    ece = percentile_interval(np.abs(gap.sum(axis=0)).sum() / len(truth), drawn if several else drawn[:0])
    (brier,) = ratio_intervals(draws, columns, (predicted - truth) ** 2)
    return {"bins": bins, "ece": list(ece), "brier": list(brier)}


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """95% interval of a share of independent trials.

    Source: Wilson 1927.
    """
    share, spread = right / count, Z_95**2 / count
    middle = share + spread / 2
    half = Z_95 * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # The ends are exactly 0 and 1 where nothing or everything is right; rounding must not move them.
    low = 0.0 if right == 0 else (middle - half) / (1 + spread)
    high = 1.0 if right == count else (middle + half) / (1 + spread)
    return low, high


def centring_shift(truth: np.ndarray, rewards: np.ndarray) -> float | None:
    """The constant to subtract from rewards so that the mean of their sigmoids is the share of correct rows.

    None when all or none are correct: no constant is enough then.
    """
    share = float(truth.mean())
    if share in (0.0, 1.0):
        return None
    odds = math.log(share / (1 - share))
    low, high = float(rewards.min()) - odds, float(rewards.max()) - odds  # every prediction too high; too low
    for _ in range(200):  # bisection to the last bit
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if sigmoid(rewards - middle).mean() > share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
