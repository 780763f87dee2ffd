"""Scores of the responses to one prompt: their figures, and which prompts are worth an update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.trainer.rl_options import check_range

SPREAD_TOLERANCE = 1e-6  # scores this near, relative to the larger of 1 and their size, are equal but for rounding


@dataclass(frozen=True)
class GroupFigures:
    """Figures of the group of each of B responses, over those of its responses that have a score."""

    size: Tensor  # (B,) int64, responses with and without a score
    scored: Tensor  # (B,) int64, responses with a score
    total: Tensor  # (B,) float64, sum of the scores
    mean: Tensor  # (B,) float64; NaN where none has a score
    std: Tensor  # (B,) float64, sample standard deviation (n - 1); 0 where fewer than two have a score
    equal: Tensor  # (B,) bool, no two scores differ (by more than rounding); True with fewer than two scores


def group_figures(scores: Tensor, group: Tensor) -> GroupFigures:
    """Figures of each response's group.

    Args:
        scores: (B,) float; NaN: not scored, left out of everything but `size`.
        group: (B,) int64, equal for the responses to one prompt; groups may differ in size and lie in any order.
    Raises:
        ValueError: shapes differ, or a score is infinite.
    """
    if scores.dim() != 1 or group.shape != scores.shape:
        raise ValueError(f"expected scores and groups (B,), got {tuple(scores.shape)} and {tuple(group.shape)}")
    check_scores(scores)
    _, place, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    has_score = ~scores.isnan()
    kept = torch.where(has_score, scores, torch.zeros_like(scores)).double()

    def total(values: Tensor) -> Tensor:
        return kept.new_zeros(len(sizes)).index_add(0, place, values.double())[place]

    def extreme(fill: float, how: str) -> Tensor:
        values = torch.where(has_score, kept, torch.full_like(kept, fill))
        return kept.new_full((len(sizes),), fill).scatter_reduce(0, place, values, how)[place]

    count = total(has_score)
    mean = total(kept) / count
    deviation = torch.where(has_score, kept - mean, torch.zeros_like(kept))
    low, high = extreme(torch.inf, "amin"), extreme(-torch.inf, "amax")
    size_of_scores = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return GroupFigures(
        size=sizes[place],
        scored=count.long(),
        total=total(kept),
        mean=mean,
        std=(total(deviation.square()) / (count - 1).clamp(min=1)).sqrt(),
        equal=~(high - low > SPREAD_TOLERANCE * size_of_scores),
    )


def keep_groups(scores: Tensor, group: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Dynamic filtering: the prompts whose responses are neither all good nor all bad.

    A group is kept when the mean of its scores lies strictly inside (low, high) and two of its scores differ. Equal
    scores inside the range would pass the mean alone, though every advantage is 0. Unscored responses are left out of
    mean and spread; a group with fewer than two scores is dropped.

    Args:
        scores: (B,) float, the 0..1 scores of the reward source (its rewards where it gives no scores); NaN: none.
        group: (B,) int64, equal for the responses to one prompt.
    Returns:
        (B,) bool, True on every response of a kept group.
    Raises:
        ValueError: shapes differ, a score is infinite, or low is not below high.
    Source: DAPO, arXiv 2503.14476, section 3.2, which drops accuracy 0 and 1. Mean and range as OpenRLHF; its later
        version drops groups of standard deviation 0 too (OpenRLHF/OpenRLHF#1270), here up to rounding.
    """
    check_range("dynamic filtering's range", low, high)
    figures = group_figures(scores, group)
    return (low < figures.mean) & (figures.mean < high) & ~figures.equal


def check_scores(scores: Tensor) -> None:
    """Refuse infinite scores, which no mean survives; NaN means "not scored" and passes."""
    if scores.isinf().any():
        rows = scores.isinf().nonzero().flatten().tolist()
        raise ValueError(f"the scores of responses {rows[:5]} are infinite; a reward must be a number, or NaN for none")
