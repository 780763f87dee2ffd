"""Losses of a policy and its critic, as functions of tensors.

All take (B, A) tensors and a bool mask that is True on the tokens that count; masked positions may hold anything, NaN
included. They work in float32 or better. Metrics are sums over the counted tokens, with their number as ``tokens``, so
that they add up over micro-batches and processes. A loss is a mean over the units (tokens or responses) of its own
arguments: weigh the loss of a micro-batch by its :func:`count_units` over those of the whole update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.models.functional import approx_kl, at_least_float32, masked_log_ratio, masked_mean
from openrlhf.models.losses import LossOutput
from openrlhf.models.policy_options import check_policy_loss, check_reduction

LOG_RATIO_BOUND = 20.0  # nats; exp of a larger log ratio is cut here, as in OpenRLHF


def count_units(mask: Tensor, reduction: str = "token") -> Tensor:
    """() int64: what a loss with this reduction is a mean over: tokens, or responses with at least one token."""
    check_reduction(reduction, 1.0 if reduction == "constant" else None)
    return mask.sum() if reduction == "token" else mask.any(dim=1).sum()


def reduce_tokens(values: Tensor, mask: Tensor, reduction: str = "token", normaliser: float | None = None) -> Tensor:
    """One number of the values of all counted tokens; 0 when none counts.

        token     sum over all tokens / number of tokens                                (DAPO 2503.14476, OpenRLHF)
        sequence  mean over responses of the mean over the tokens of each               (GRPO 2402.03300)
        constant  sum over all tokens / (number of responses * normaliser)              (Dr. GRPO 2503.20783)

    Args:
        values: (B, A) float. mask: (B, A) bool. normaliser: tokens, the longest response allowed; for 'constant' only.
    Returns:
        () mean over what :func:`count_units` counts; a response without a counted token is no response.
    Raises:
        ValueError: unknown reduction, or a normaliser missing or without effect.
    """
    check_reduction(reduction, normaliser)
    if reduction == "token":
        return masked_mean(values, mask)
    if reduction == "sequence":
        return masked_mean(values, mask, dim=1).sum() / count_units(mask, reduction).clamp(min=1)
    return values.masked_fill(~mask, 0.0).sum() / (count_units(mask, reduction).clamp(min=1) * normaliser)


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    reduction: str = "token",
    normaliser: float | None = None,
    ratio: str = "token",
) -> LossOutput:
    """The clipped objective of PPO, negated.

        r = exp(logprobs - old_logprobs)
        J = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
        with dual_clip c, where A < 0:  J = max(J, c A)
        loss = reduce_tokens(-J)

    Args:
        logprobs: (B, A) nats, with a gradient. old_logprobs, advantages: (B, A), constants.
        mask: (B, A) bool, True on the tokens that count.
        eps_low, eps_high: how far the ratio may leave 1; unequal as in DAPO ("clip higher").
        dual_clip: above 1; bounds the loss of a bad token that has become likely. None: off.
        reduction, normaliser: see :func:`reduce_tokens`.
        ratio: 'token' (PPO), or 'sequence' (GSPO): one ratio for a response, exp of the mean log ratio of its tokens;
            needs reduction 'sequence'.
    Returns:
        loss: (); its gradient at r = 1 is that of -A logprobs.
        metrics: ``tokens``; ``ratio``; ``clipped`` (tokens whose clipped term is the smaller one: no gradient there);
            ``dual_clipped``; ``approx_kl``: (r - 1) - log r, the k3 estimate of KL(old || new), nats.
    Raises:
        ValueError: shapes differ, or a setting outside of its range.
    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; dual clip Ye et al. 2019, arXiv 1912.09729;
        eps_high arXiv 2503.14476; GSPO Zheng et al. 2025, arXiv 2507.18071. Log ratios are cut to +-20 as in OpenRLHF.
    """
    check_policy_loss(eps_low, eps_high, dual_clip, reduction, normaliser, ratio)
    _check_shapes(mask, advantages=advantages)
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask)
    if ratio == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1).unsqueeze(1).expand_as(mask).masked_fill(~mask, 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratios = log_ratio.exp()
    weight = at_least_float32(advantages.detach()).masked_fill(~mask, 0.0)
    plain, clipped = ratios * weight, ratios.clamp(1 - eps_low, 1 + eps_high) * weight
    objective = torch.minimum(plain, clipped)
    floored = torch.zeros_like(mask)
    if dual_clip is not None:
        floored = (weight < 0) & (objective < dual_clip * weight)
        objective = torch.where(floored, dual_clip * weight, objective)
    metrics = _sums(
        mask,
        ratio=ratios,
        clipped=clipped < plain,
        dual_clipped=floored,
        approx_kl=log_ratio.expm1() - log_ratio,
    )
    return LossOutput(reduce_tokens(-objective, mask, reduction, normaliser), metrics)


def ppo_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = None,
    reduction: str = "token",
    normaliser: float | None = None,
) -> LossOutput:
    """Half the squared error of the critic, the larger one of the value and of the value held near the old one.

        loss = reduce_tokens(max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2)

    Args:
        values: (B, A) reward units, with a gradient. old_values, returns: (B, A), constants.
        mask, reduction, normaliser: as of :func:`ppo_policy_loss`.
        clip: above 0, reward units (OpenRLHF: 0.5); None: plain squared error.
    Returns:
        loss: (), squared reward units.
        metrics: ``tokens``; ``value``; ``squared_error`` (unclipped); ``value_clipped`` (tokens whose clipped term is
            the larger one).
    Raises:
        ValueError: shapes differ, clip is not above 0, or a reduction that does not exist.
    Source: PPO's published code (Schulman et al. 2017), and OpenRLHF.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip must be above 0, or None for no clipping, got {clip}")
    _check_shapes(mask, values=values, old_values=old_values, returns=returns)
    values, old_values, returns = (
        at_least_float32(x).masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach())
    )
    error = (values - returns).square()
    near = error
    if clip is not None:
        near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    loss = reduce_tokens(torch.maximum(error, near) / 2, mask, reduction, normaliser)
    return LossOutput(loss, _sums(mask, value=values, squared_error=error, value_clipped=near > error))


def kl_loss(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    kind: str = "k3",
    reduction: str = "token",
    normaliser: float | None = None,
) -> LossOutput:
    """Divergence from the reference as a term of the loss, instead of a part of the reward.

    What is minimised, on responses drawn from the policy: k2 the divergence KL(policy || reference), k3 the opposite
    one, KL(reference || policy), both exactly in expectation; k1 has a gradient of expectation zero and holds nothing.

    Args:
        logprobs: (B, A) nats, with a gradient. reference: (B, A), constant. kind: see
            :func:`openrlhf.models.functional.approx_kl`.
        mask, reduction, normaliser: as of :func:`ppo_policy_loss`.
    Returns:
        loss: () nats. metrics: ``tokens``, ``kl``.
    Raises:
        ValueError: shapes differ, unknown kind or reduction.
    Source: GRPO (Shao et al. 2024) has k3 in the loss; k2 and k1 as in OpenRLHF (``use_kl_loss``).
    """
    divergence = approx_kl(logprobs, reference.detach(), kind, mask)
    return LossOutput(reduce_tokens(divergence, mask, reduction, normaliser), _sums(mask, kl=divergence))


def entropy_loss(
    entropy: Tensor, mask: Tensor, reduction: str = "token", normaliser: float | None = None
) -> LossOutput:
    """Minus the mean entropy: times a coefficient above 0, the entropy bonus.

    Args:
        entropy: (B, A) nats, of :func:`openrlhf.models.functional.entropy_from_logits`.
        mask, reduction, normaliser: as of :func:`ppo_policy_loss`.
    Returns:
        loss: () nats, 0 or below. metrics: ``tokens``, ``entropy``.
    Source: Williams and Peng 1991; PPO's equation 9.
    """
    _check_shapes(mask, entropy=entropy)
    return LossOutput(
        -reduce_tokens(at_least_float32(entropy), mask, reduction, normaliser), _sums(mask, entropy=entropy)
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over the counted tokens: 1 a perfect critic, 0 no better than the mean, below worse.

    Returns:
        () float; NaN where the returns are all equal.
    """
    _check_shapes(mask, values=values, returns=returns)
    target, error = (
        at_least_float32(x).masked_fill(~mask, 0.0) for x in (returns.detach(), (returns - values).detach())
    )
    spread, unexplained = (masked_mean((x - masked_mean(x, mask)).square(), mask) for x in (target, error))
    return torch.where(spread > 0, 1 - unexplained / spread, torch.nan)


def _sums(mask: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """Detached float sums over the counted tokens, and how many those are."""
    sums = {name: x.detach().float().masked_fill(~mask, 0.0).sum() for name, x in values.items()}
    return {"tokens": mask.sum().float(), **sums}


def _check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"expected {name} and a bool mask of one shape, got {tuple(tensor.shape)} and {mask.dtype} "
                f"{tuple(mask.shape)}"
            )
