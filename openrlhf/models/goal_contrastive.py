"""The method in one file: which states are compared, and how (arXiv 2407.13887).

A *source* state of the chosen response and a *goal* state of the same response, never before its source, are pulled
together; a source state and a *negative* state of the rejected response of the same prompt are pushed apart. All
similarities are cosines of last-layer hidden states. Formulas and departures from the published code: docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.models.functional import states_at
from openrlhf.models.losses import LossOutput, weighted_mean

COSINE_EPS = 1e-8  # floor of a vector norm: a zero state has similarity 0 and a finite gradient


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


def sample_positions(
    chosen_length: Tensor,
    rejected_length: Tensor,
    draws: StateDraws,
    source_state_percentile: float = 0.0,
    goal_state_percentile: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions inside the responses, counted from 0 at the first response token.

    Args:
        chosen_length, rejected_length: (B,) int64 response tokens, EOS included; a length of 0 yields position 0.
        draws: uniform numbers, one row a pair.
        source_state_percentile: sources lie in [p, 1] of the chosen response.
        goal_state_percentile: goals lie in [max(p, source), 1] of it; negatives stand in the goal's place and lie in
            [p, 1] of the rejected response.
    Returns:
        source (B, N), goal (B, N) with goal >= source, negative_source (B, M), negative (B, M), int64.
    """
    last = (chosen_length - 1).clamp(min=0).unsqueeze(1)
    rejected_last = (rejected_length - 1).clamp(min=0).unsqueeze(1)
    source_low = percentile_index(chosen_length, source_state_percentile).unsqueeze(1)
    goal_low = percentile_index(chosen_length, goal_state_percentile).unsqueeze(1)
    negative_low = percentile_index(rejected_length, goal_state_percentile).unsqueeze(1)
    source = position_at(draws.source, source_low, last)
    goal = position_at(draws.goal, torch.maximum(goal_low, source), last)
    negative_source = position_at(draws.negative_source, source_low, last)
    negative = position_at(draws.negative, negative_low, rejected_last)
    return source, goal, negative_source, negative


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine over the last dimension in float32 or better; 0 for a zero vector, with a finite gradient."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return F.cosine_similarity(a.to(dtype), b.to(dtype), dim=-1, eps=COSINE_EPS)


def _all_pairs(source: Tensor, other: Tensor) -> Tensor:
    """(b, N, H), (b, K, H) -> (b, N, K) cosines."""
    return cosine(source.unsqueeze(2), other.unsqueeze(1))


def pair_reduction(positive: Tensor, negative: Tensor) -> Tensor:
    """One value a pair: mean of -log sigmoid(positive) plus mean of -log(1 - sigmoid(negative)).

    Args:
        positive: (b, ...) scaled similarities of sources with goals; negative: (b, ...) with negatives.
    Returns:
        (b,) in nats.
    """
    return F.softplus(-positive).flatten(1).mean(1) + F.softplus(negative).flatten(1).mean(1)


def original_reduction(positive: Tensor, negative: Tensor) -> Tensor:
    """The published code's reduction: sigmoids are averaged over the whole batch before the logarithm.

    Args as :func:`pair_reduction`. Returns () in nats. It depends on how a batch is split; kept for comparison.
    """
    return -torch.log(torch.sigmoid(positive).mean()) - torch.log(torch.sigmoid(-negative).mean())


def cosine_similarities(source: Tensor, goal: Tensor, negative_source: Tensor, negative: Tensor, pairwise: bool):
    """Strategy ``cosine``: every source against its own goal, every negative source against its own negative.

    Args:
        source, goal: (b, N, H); negative_source, negative: (b, M, H).
        pairwise: False compares each source with every goal (and negative) of its pair, as the published code does,
            whereby a goal may lie before a source.
    Returns:
        positive (b, N) or (b, N, N), negative (b, M) or (b, M, M).
    """
    if pairwise:
        return cosine(source, goal), cosine(negative_source, negative)
    return _all_pairs(source, goal), _all_pairs(negative_source, negative)


def cosine_avg_similarities(source: Tensor, goal: Tensor, negative_source: Tensor, negative: Tensor, pairwise: bool):
    """Strategy ``cosine_avg``: every source against the mean of the pair's goals (and of its negatives).

    Arguments and result as :func:`cosine_similarities`; ``pairwise`` changes nothing here.
    """
    return _all_pairs(source, goal.mean(1, keepdim=True)), _all_pairs(negative_source, negative.mean(1, keepdim=True))


CONTRASTIVE_STRATEGIES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "cosine": cosine_similarities,
    "cosine_avg": cosine_avg_similarities,
}
REDUCTIONS = ("pair", "original")


def goal_contrastive_loss(
    hidden_states: Tensor,
    response_mask: Tensor,
    draws: StateDraws,
    *,
    chosen: Tensor | None = None,
    rejected: Tensor | None = None,
    weight: Tensor | None = None,
    strategy: str = "cosine",
    reduction: str = "pair",
    temperature: float = 1.0,
    source_state_percentile: float = 0.0,
    goal_state_percentile: float = 0.0,
) -> LossOutput:
    """The contrastive term of the goal-conditioned reward model.

    Args:
        hidden_states: (R, S, H) last-layer states.
        response_mask: (R, S) bool, True on response tokens including EOS; one run of True a row.
        draws: uniform numbers for the P pairs (:func:`draw_states`).
        chosen, rejected: (P,) int64 rows of each pair's responses; None: the first half of the rows is chosen, the
            second half rejected, in the same order.
        weight: (P,) what each pair counts in the means; None counts all alike.
        strategy: a name of ``CONTRASTIVE_STRATEGIES``. reduction: ``pair`` or ``original``.
        temperature: divides every cosine.
    Returns:
        loss: () mean over pairs, in nats; a pair without a usable chosen or rejected response counts 0.
        metrics: weighted sums over pairs of ``positive_similarity``, ``negative_similarity`` and
            ``contrastive_skipped``.
    Raises:
        ValueError: unknown strategy or reduction, temperature not above 0, an odd number of rows without ``chosen``, or
            weights with the reduction ``original``, which knows no pairs.
    Source: arXiv 2407.13887, section 3.
    """
    if strategy not in CONTRASTIVE_STRATEGIES or reduction not in REDUCTIONS:
        raise ValueError(
            f"expected strategy in {sorted(CONTRASTIVE_STRATEGIES)} and reduction in {list(REDUCTIONS)}, "
            f"got {strategy!r} and {reduction!r}"
        )
    if temperature <= 0:
        raise ValueError(f"expected temperature > 0, got {temperature}")
    if reduction == "original" and weight is not None:
        raise ValueError("the reduction 'original' averages over the whole batch and takes no weights of pairs")
    if chosen is None or rejected is None:
        if hidden_states.shape[0] % 2:
            raise ValueError(f"expected 2B rows, got {hidden_states.shape[0]}; or name the rows of the pairs")
        chosen, rejected = torch.arange(hidden_states.shape[0], device=hidden_states.device).chunk(2)
    length, start = response_mask.long().sum(1), response_mask.long().argmax(1)  # (R,)
    usable = (length[chosen] > 0) & (length[rejected] > 0)  # (P,)
    source, goal, negative_source, negative = sample_positions(
        length[chosen], length[rejected], draws, source_state_percentile, goal_state_percentile
    )
    places = [(chosen, source), (chosen, goal), (chosen, negative_source), (rejected, negative)]
    states = [states_at(hidden_states, rows, start[rows].unsqueeze(1) + position) for rows, position in places]
    positive_similarity, negative_similarity = CONTRASTIVE_STRATEGIES[strategy](*states, pairwise=reduction == "pair")
    if reduction == "pair":
        per_pair = pair_reduction(positive_similarity / temperature, negative_similarity / temperature)
        loss = weighted_mean(torch.where(usable, per_pair, torch.zeros_like(per_pair)), weight)
    elif usable.any():
        loss = original_reduction(positive_similarity[usable] / temperature, negative_similarity[usable] / temperature)
    else:
        loss = hidden_states.sum() * 0.0  # no usable pair: zero, but still differentiable
    with torch.no_grad():
        weights = torch.ones_like(usable, dtype=torch.float32) if weight is None else weight
        counted = usable * weights
        metrics = {
            "positive_similarity": (positive_similarity.flatten(1).mean(1) * counted).sum(),
            "negative_similarity": (negative_similarity.flatten(1).mean(1) * counted).sum(),
            "contrastive_skipped": (~usable * weights).sum(),
        }
    return LossOutput(loss, metrics)
