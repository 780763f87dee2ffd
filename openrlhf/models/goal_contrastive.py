"""The method in one file: which states are compared, and how (arXiv 2407.13887).

A *source* state of the chosen response and a *goal* state of the same response, never before its source, are pulled
together; a source state and a *negative* state of the rejected response of the same prompt are pushed apart. All
similarities are cosines of last-layer hidden states. Formulas and departures from the published code: docs/losses.md;
where the states lie: :mod:`openrlhf.models.goal_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.models.functional import at_least_float32, states_at
from openrlhf.models.goal_sampling import GOAL_SAMPLINGS, StateDraws, first_difference, sample_positions
from openrlhf.models.losses import LossOutput, weighted_mean

COSINE_EPS = 1e-8  # floor of a vector norm: a zero state has similarity 0 and a finite gradient
REDUCTIONS = ("pair", "original")
STARTS = ("response", "goals_diverge", "diverge")


@dataclass(frozen=True)
class PairStates:
    """What is drawn from b pairs."""

    source: Tensor  # (b, N, H) of the chosen response
    goal: Tensor  # (b, N, H) of the same response, each at or after its source
    negative_source: Tensor  # (b, M, H) of the chosen response
    negative: Tensor  # (b, M, H) of the rejected response
    last: Tensor  # (b, H) last state of the chosen response
    source_value: Tensor | None  # (b, N) value head at the sources; None where not given
    negative_value: Tensor | None  # (b, M) value head at the negatives
    usable: Tensor  # (b,) bool, both responses have tokens
    prompt: Tensor  # (b,) int64, equal for pairs of one prompt


@dataclass(frozen=True)
class Comparison:
    """What a strategy makes of the states."""

    loss: Tensor  # (b,) nats, one value a pair; () where pairs are reduced together
    positive: Tensor  # (b, ...) similarities of sources with goals
    negative: Tensor  # (b, ...) similarities with negatives


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine over the last dimension in float32 or better; 0 for a zero vector, with a finite gradient."""
    return F.cosine_similarity(at_least_float32(a), at_least_float32(b), dim=-1, eps=COSINE_EPS)


def _all_pairs(source: Tensor, other: Tensor) -> Tensor:
    """(b, N, H), (b, K, H) -> (b, N, K), what :func:`cosine` gives, without (b, N, K, H) in between."""
    source, other = (F.normalize(at_least_float32(x), dim=-1, eps=COSINE_EPS) for x in (source, other))
    with torch.autocast(source.device.type, enabled=False):  # which would round the product to bfloat16
        return source @ other.transpose(1, 2)


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


def cosine_strategy(states: PairStates, temperature: float, reduction: str) -> Comparison:
    """Strategy ``cosine`` of the paper: every source against its own goal, every negative source against its negative.

    Reduced as published (``original``), each source meets every goal of its pair, whereby a goal may lie before it.
    """
    if reduction == "pair":
        positive, negative = cosine(states.source, states.goal), cosine(states.negative_source, states.negative)
    else:
        positive = _all_pairs(states.source, states.goal)
        negative = _all_pairs(states.negative_source, states.negative)
    return _logistic(positive, negative, states.usable, temperature, reduction)


def cosine_avg_strategy(states: PairStates, temperature: float, reduction: str) -> Comparison:
    """Strategy ``cosine_avg``: every source against the mean of the pair's goals (and of its negatives)."""
    positive = _all_pairs(states.source, states.goal.mean(1, keepdim=True))
    negative = _all_pairs(states.negative_source, states.negative.mean(1, keepdim=True))
    return _logistic(positive, negative, states.usable, temperature, reduction)


def _logistic(positive: Tensor, negative: Tensor, usable: Tensor, temperature: float, reduction: str) -> Comparison:
    if reduction == "pair":
        return Comparison(pair_reduction(positive / temperature, negative / temperature), positive, negative)
    if not usable.any():
        return Comparison(positive.sum() * 0.0, positive, negative)  # zero, but still differentiable
    loss = original_reduction(positive[usable] / temperature, negative[usable] / temperature)
    return Comparison(loss, positive, negative)


def infonce_strategy(states: PairStates, temperature: float, reduction: str) -> Comparison:
    """Strategy ``infonce``: every source tells its own goal from all negatives of its pair.

    Source: van den Oord et al. 2018, arXiv 1807.03748; with states of one trajectory, arXiv 2206.07568.
    """
    positive, negative = cosine(states.source, states.goal), _all_pairs(states.source, states.negative)
    return Comparison(_cross_entropy(positive, negative, temperature), positive, negative)


def infonce_batch_strategy(states: PairStates, temperature: float, reduction: str) -> Comparison:
    """Strategy ``infonce_batch``: as ``infonce``, with one goal of every pair of another prompt as further negatives.

    They are those of the same forward pass, so the value depends on how a batch is split.
    """
    positive, negative = cosine(states.source, states.goal), _all_pairs(states.source, states.negative)
    others = _all_pairs(states.source.flatten(0, 1).unsqueeze(0), states.goal[:, 0].unsqueeze(0))
    others = others.view(*positive.shape, -1)  # (b, N, b)
    same = (states.prompt.unsqueeze(1) == states.prompt) | ~states.usable
    others = others.masked_fill(same.unsqueeze(1), -torch.inf)
    return Comparison(_cross_entropy(positive, torch.cat([negative, others], 2), temperature), positive, negative)


def _cross_entropy(positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """(b, N), (b, N, K) -> (b,): -log of the softmax of each positive among its negatives, mean over N."""
    logits = torch.cat([positive.unsqueeze(2), negative], 2) / temperature
    return (logits.logsumexp(2) - logits[:, :, 0]).mean(1)


def goal_margin_strategy(states: PairStates, temperature: float, reduction: str) -> Comparison:
    """Strategy ``goal_margin``: Bradley-Terry on the goal similarity itself.

    A source is nearer than a negative to the goal state, here the mean last state of the chosen responses of the
    forward pass, as a constant: so the value depends on how a batch is split.
    """
    counts = states.usable.to(states.last.dtype)
    goal = (states.last.detach() * counts.unsqueeze(1)).sum(0) / counts.sum().clamp(min=1)
    positive, negative = cosine(states.source, goal), cosine(states.negative, goal)
    gaps = positive.unsqueeze(2) - negative.unsqueeze(1)  # (b, N, M)
    return Comparison(F.softplus(-gaps / temperature).flatten(1).mean(1), positive, negative)


def value_strategy(states: PairStates, temperature: float, reduction: str) -> Comparison:
    """Strategy ``value``: Bradley-Terry of the value head at drawn prefixes, no similarity at all.

    Every source of the chosen response is worth more than every negative of the rejected one. The similarities are
    for the log.
    """
    if states.source_value is None or states.negative_value is None:
        raise ValueError("the strategy 'value' compares values: give those of the head")
    gaps = (states.source_value.unsqueeze(2) - states.negative_value.unsqueeze(1)) / temperature  # (b, N, M)
    with torch.no_grad():
        positive, negative = cosine(states.source, states.goal), cosine(states.negative_source, states.negative)
    return Comparison(F.softplus(-gaps).flatten(1).mean(1), positive, negative)


CONTRASTIVE_STRATEGIES: dict[str, Callable[[PairStates, float, str], Comparison]] = {
    "cosine": cosine_strategy,
    "cosine_avg": cosine_avg_strategy,
    "infonce": infonce_strategy,
    "infonce_batch": infonce_batch_strategy,
    "goal_margin": goal_margin_strategy,
    "value": value_strategy,
}


def goal_contrastive_loss(
    hidden_states: Tensor,
    response_mask: Tensor,
    draws: StateDraws,
    *,
    input_ids: Tensor | None = None,
    values: Tensor | None = None,
    chosen: Tensor | None = None,
    rejected: Tensor | None = None,
    weight: Tensor | None = None,
    prompt: Tensor | None = None,
    strategy: str = "cosine",
    reduction: str = "pair",
    temperature: float = 1.0,
    start: str = "response",
    source_state_percentile: float = 0.0,
    goal_state_percentile: float = 0.0,
    goal_sampling: str = "uniform",
    goal_discount: float = 0.9,
    goal_stop_gradient: bool = False,
) -> LossOutput:
    """The contrastive term of the goal-conditioned reward model.

    Args:
        hidden_states: (R, S, H) last-layer states.
        response_mask: (R, S) bool, True on response tokens including EOS; one run of True a row.
        draws: uniform numbers for the P pairs (:func:`~openrlhf.models.goal_sampling.draw_states`).
        input_ids: (R, S) int64, needed where ``start`` looks for the first different token.
        values: (R, S) the value head at every token, needed by the strategy ``value``.
        chosen, rejected: (P,) int64 rows of each pair's responses; None: the first half of the rows is chosen, the
            second half rejected, in the same order.
        weight: (P,) what each pair counts in the means; None counts all alike.
        prompt: (P,) int64, equal for pairs of one prompt, which are not negatives of each other; None: all differ.
        strategy: a name of ``CONTRASTIVE_STRATEGIES``. reduction: ``pair`` or ``original``, of the cosine strategies.
        temperature: divides every cosine; with ``value`` the differences of values.
        start: what may be drawn: ``response``, every token; ``diverge``, only tokens from the first on in which the
            responses of the pair differ; ``goals_diverge``, only goals and negatives from there on.
        source_state_percentile, goal_state_percentile, goal_sampling, goal_discount: see
            :func:`~openrlhf.models.goal_sampling.sample_positions`.
        goal_stop_gradient: goals and negatives are constants.
    Returns:
        loss: () mean over pairs, in nats; a pair without a usable chosen or rejected response counts 0.
        metrics: weighted sums over pairs of ``positive_similarity``, ``negative_similarity`` and
            ``contrastive_skipped``.
    Raises:
        ValueError: unknown name, temperature not above 0, discount outside (0, 1), an odd number of rows without
            ``chosen``, ids or values that are needed and not given, or weights with the reduction ``original``, which
            knows no pairs.
    Source: arXiv 2407.13887, section 3.
    """
    _check(strategy, reduction, temperature, start, goal_sampling, goal_discount)
    if reduction == "original" and weight is not None:
        raise ValueError("the reduction 'original' averages over the whole batch and takes no weights of pairs")
    if chosen is None or rejected is None:
        if hidden_states.shape[0] % 2:
            raise ValueError(f"expected 2B rows, got {hidden_states.shape[0]}; or name the rows of the pairs")
        chosen, rejected = torch.arange(hidden_states.shape[0], device=hidden_states.device).chunk(2)
    length = response_mask.long().sum(1)  # (R,)
    differing: Tensor | int = 0
    if start != "response":
        if input_ids is None:
            raise ValueError(f"start {start!r} looks for the first different token: give the input_ids")
        differing = first_difference(input_ids, response_mask, chosen, rejected)
    positions = sample_positions(
        length[chosen],
        length[rejected],
        draws,
        source_state_percentile,
        goal_state_percentile,
        differing if start == "diverge" else 0,
        differing,
        goal_sampling,
        goal_discount,
    )
    if prompt is None:
        prompt = torch.arange(len(chosen), device=hidden_states.device)
    states = _states_of_pairs(hidden_states, values, response_mask, chosen, rejected, positions, prompt)
    if goal_stop_gradient:
        states = replace(states, goal=states.goal.detach(), negative=states.negative.detach())
    found = CONTRASTIVE_STRATEGIES[strategy](states, temperature, reduction)
    loss = found.loss
    if loss.dim():
        loss = weighted_mean(torch.where(states.usable, loss, torch.zeros_like(loss)), weight)
    with torch.no_grad():
        usable = states.usable
        weights = torch.ones_like(usable, dtype=torch.float32) if weight is None else weight
        counted = usable * weights
        metrics = {
            "positive_similarity": (found.positive.flatten(1).mean(1) * counted).sum(),
            "negative_similarity": (found.negative.flatten(1).mean(1) * counted).sum(),
            "contrastive_skipped": (~usable * weights).sum(),
        }
    return LossOutput(loss, metrics)


def _states_of_pairs(
    hidden_states: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    positions: tuple[Tensor, Tensor, Tensor, Tensor],
    prompt: Tensor,
) -> PairStates:
    """The states at positions of `sample_positions`; arguments as :func:`goal_contrastive_loss`."""
    length, first = response_mask.long().sum(1), response_mask.long().argmax(1)  # (R,)
    source, goal, negative_source, negative = positions
    last = (length[chosen] - 1).clamp(min=0).unsqueeze(1)

    def at(x: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        return at_least_float32(states_at(x, rows, first[rows].unsqueeze(1) + position))

    return PairStates(
        at(hidden_states, chosen, source),
        at(hidden_states, chosen, goal),
        at(hidden_states, chosen, negative_source),
        at(hidden_states, rejected, negative),
        at(hidden_states, chosen, last).squeeze(1),
        None if values is None else at(values, chosen, source),
        None if values is None else at(values, rejected, negative),
        (length[chosen] > 0) & (length[rejected] > 0),
        prompt,
    )


def _check(strategy: str, reduction: str, temperature: float, start: str, sampling: str, discount: float) -> None:
    tables = {"strategy": CONTRASTIVE_STRATEGIES, "reduction": REDUCTIONS, "start": STARTS}
    tables["goal_sampling"] = GOAL_SAMPLINGS
    given = {"strategy": strategy, "reduction": reduction, "start": start, "goal_sampling": sampling}
    for name, value in given.items():
        if value not in tables[name]:
            raise ValueError(f"expected {name} in {sorted(tables[name])}, got {value!r}")
    if reduction == "original" and strategy not in ("cosine", "cosine_avg"):
        raise ValueError(f"the reduction 'original' belongs to cosine and cosine_avg, got strategy {strategy!r}")
    if temperature <= 0:
        raise ValueError(f"expected temperature > 0, got {temperature}")
    if not 0 < discount < 1:
        raise ValueError(f"expected goal_discount between 0 and 1, got {discount}")
