"""Pairwise losses of reward modelling, as functions of tensors.

Every loss works in float32 or better whatever the dtype of its arguments: in bfloat16 a small margin disappears
before the log-sigmoid sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A differentiable scalar and what a person wants to see of it."""

    loss: Tensor  # () float
    metrics: dict[str, Tensor] = field(default_factory=dict)  # name -> () float, detached, sums over pairs or tokens


def _reward_gap(chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
    if chosen.shape != rejected.shape or chosen.dim() != 1:
        raise ValueError(
            f"expected chosen and rejected rewards of one shape (P,), got {tuple(chosen.shape)} and "
            f"{tuple(rejected.shape)}"
        )
    if margin is not None and margin.shape != chosen.shape:
        raise ValueError(f"expected a margin of shape {tuple(chosen.shape)}, got {tuple(margin.shape)}")
    dtype = torch.promote_types(chosen.dtype, torch.float32)
    gap = chosen.to(dtype) - rejected.to(dtype)
    return gap if margin is None else gap - margin.to(dtype)


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over pairs.

    Args:
        values: (P,) float. weight: (P,) what each counts; None counts all alike.
    """
    return values.mean() if weight is None else (values * weight.to(values.dtype)).sum() / weight.sum()


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, weight: Tensor | None = None
) -> Tensor:
    """Negative log-likelihood that the chosen response wins.

    Args:
        chosen, rejected: (P,) rewards of each pair, any float dtype (compared in float32 or better).
        margin: (P,) reward gap required, in reward units; None means 0.
        weight: (P,) what each pair counts in the mean; None counts all alike.
    Returns:
        () mean over pairs, in nats; ln 2 when rewards are equal and margin is None.
    Raises:
        ValueError: shapes differ.
    Source: Bradley and Terry 1952; margin as in Llama 2, arXiv 2307.09288.
    """
    return weighted_mean(-F.logsigmoid(_reward_gap(chosen, rejected, margin)), weight)


def log_exp_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, weight: Tensor | None = None
) -> Tensor:
    """log(1 + exp(rejected - chosen)), the form of arXiv 2204.05862.

    The same function of the rewards as :func:`bradley_terry_loss`; kept under its own name because users select it
    with ``--loss logexp``. Evaluated as a softplus, so that it does not overflow.
    Arguments, result and errors as there.
    """
    return weighted_mean(F.softplus(-_reward_gap(chosen, rejected, margin)), weight)


def centering_loss(chosen: Tensor, rejected: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean square of chosen + rejected: pulls the rewards of a pair towards zero mean.

    Args:
        chosen, rejected: (P,) rewards. weight: as for :func:`bradley_terry_loss`.
    Returns:
        () mean over pairs, in squared reward units.
    Source: Eisenstein et al. 2023, arXiv 2312.09244, section on auxiliary losses.
    """
    return weighted_mean(_reward_gap(chosen, -rejected, None).square(), weight)


PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "sigmoid": bradley_terry_loss,
    "logexp": log_exp_loss,
}


def next_token_loss(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Cross-entropy of the response tokens given all tokens before them.

    Args:
        logits: (B, S, V) float; the entry at t predicts token t + 1.
        input_ids: (B, S) int64.
        response_mask: (B, S) bool, True on the tokens that count; column 0 cannot count.
    Returns:
        () mean over counted tokens, in nats; 0 when none counts.
    """
    target_mask = response_mask[:, 1:]
    chosen = logits[:, :-1][target_mask]  # (tokens, V)
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    targets = input_ids[:, 1:][target_mask]
    return F.cross_entropy(chosen, targets, reduction="sum") / max(targets.numel(), 1)
