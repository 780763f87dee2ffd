"""Which states of a pair the goal term compares: positions in the two responses, from numbers drawn beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GOAL_SAMPLINGS = ("uniform", "geometric", "last")


@dataclass(frozen=True)
class StateDraws:
    """Uniform numbers in [0, 1) that fix the sampled positions of B pairs; one row a pair."""

    source: Tensor  # (B, N) float
    goal: Tensor  # (B, N) float
    negative_source: Tensor  # (B, M) float
    negative: Tensor  # (B, M) float

    def select(self, rows: Tensor) -> StateDraws:
        """The draws of some pairs. ``rows``: (b,) int64."""
        return StateDraws(self.source[rows], self.goal[rows], self.negative_source[rows], self.negative[rows])

    def to(self, device: torch.device | str) -> StateDraws:
        """The same draws on another device."""
        return StateDraws(*(x.to(device) for x in (self.source, self.goal, self.negative_source, self.negative)))


def draw_states(pairs: int, sim_samples: int, unsim_samples: int, generator: torch.Generator) -> StateDraws:
    """Draw the uniform numbers for ``pairs`` pairs.

    Drawn for a whole global batch at once and then selected by row, so that the positions of a pair do not depend on
    how the batch is split over ranks and micro-batches.
    """
    widths = (sim_samples, sim_samples, unsim_samples, unsim_samples)
    drawn = torch.rand(pairs, sum(widths), generator=generator)
    return StateDraws(*drawn.split(widths, dim=1))


def position_at(draw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Integer position low + floor(draw * (high - low + 1)), uniform over low..high inclusive.

    Args:
        draw: float in [0, 1). low, high: int64, broadcastable, low <= high.
    """
    span = high - low + 1
    return low + torch.minimum((draw * span).floor().long(), span - 1)


def percentile_index(length: Tensor, percentile: float) -> Tensor:
    """First position at or after a relative place in the response: ceil(p * (length - 1)).

    Args:
        length: int64 number of response tokens. percentile: 0 is the first token, 1 the last.
    """
    # Rounded before the ceiling: 0.1 * 30 is 3.0000000000000004 and must not become 4.
    return torch.ceil(torch.round(percentile * (length - 1).double(), decimals=6)).long().clamp(min=0)


def geometric_position(draw: Tensor, low: Tensor, high: Tensor, discount: float) -> Tensor:
    """Integer position low + k with k in 0..high - low and probability proportional to discount ** k.

    Args:
        draw, low, high: as for :func:`position_at`. discount: in (0, 1).
    Source: goals of discounted contrastive reinforcement learning, arXiv 2206.07568, cut to the response.
    """
    span = high - low + 1
    steps = torch.log1p(-draw.double() * (1 - discount ** span.double())) / math.log(discount)
    return low + torch.minimum(steps.floor().long(), span - 1)


def first_difference(input_ids: Tensor, response_mask: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Number of response tokens with which the two responses of a pair begin alike.

    Args:
        input_ids: (R, S) int64. response_mask: (R, S) bool, one run of True a row.
        chosen, rejected: (P,) int64 rows.
    Returns:
        (P,) int64, the length of the shorter one where it begins the other.
    """
    length, start = response_mask.long().sum(1), response_mask.long().argmax(1)
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    tokens = input_ids.gather(1, (start.unsqueeze(1) + column).clamp(max=input_ids.shape[1] - 1))  # from the first one
    both = column < torch.minimum(length[chosen], length[rejected]).unsqueeze(1)
    return ((tokens[chosen] == tokens[rejected]) & both).long().cumprod(1).sum(1)


def sample_positions(
    chosen_length: Tensor,
    rejected_length: Tensor,
    draws: StateDraws,
    source_state_percentile: float = 0.0,
    goal_state_percentile: float = 0.0,
    first_source: Tensor | int = 0,
    first_goal: Tensor | int = 0,
    goal_sampling: str = "uniform",
    goal_discount: float = 0.9,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions inside the responses, counted from 0 at the first response token.

    Args:
        chosen_length, rejected_length: (B,) int64 response tokens, EOS included; a length of 0 yields position 0.
        draws: uniform numbers, one row a pair.
        source_state_percentile: sources lie in [p, 1] of the chosen response.
        goal_state_percentile: goals lie in [max(p, source), 1] of it; negatives stand in the goal's place and lie in
            [p, 1] of the rejected response.
        first_source, first_goal: (B,) int64 positions before which no source, no goal and negative lies; a response
            that ends earlier gives its last token.
        goal_sampling: ``uniform``; ``geometric``, k tokens after the first possible one with weight goal_discount ** k;
            or ``last``, the last token of the response, for negatives too.
    Returns:
        source (B, N), goal (B, N) with goal >= source, negative_source (B, M), negative (B, M), int64.
    """
    last = (chosen_length - 1).clamp(min=0).unsqueeze(1)
    rejected_last = (rejected_length - 1).clamp(min=0).unsqueeze(1)

    def lowest(length: Tensor, percentile: float, first: Tensor | int, end: Tensor) -> Tensor:
        place = percentile_index(length, percentile)
        return torch.maximum(place, torch.as_tensor(first, device=place.device)).unsqueeze(1).minimum(end)

    source_low = lowest(chosen_length, source_state_percentile, first_source, last)
    goal_low = lowest(chosen_length, goal_state_percentile, first_goal, last)
    negative_low = lowest(rejected_length, goal_state_percentile, first_goal, rejected_last)
    source = position_at(draws.source, source_low, last)
    negative_source = position_at(draws.negative_source, source_low, last)
    goal_low = torch.maximum(goal_low, source)
    if goal_sampling == "last":
        goal, negative = last.expand_as(draws.goal), rejected_last.expand_as(draws.negative)
    elif goal_sampling == "geometric":
        goal = geometric_position(draws.goal, goal_low, last, goal_discount)
        negative = position_at(draws.negative, negative_low, rejected_last)
    else:
        goal = position_at(draws.goal, goal_low, last)
        negative = position_at(draws.negative, negative_low, rejected_last)
    return source, goal, negative_source, negative
