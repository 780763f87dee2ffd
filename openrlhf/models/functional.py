"""Small tensor functions shared by models, losses and scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.models.policy_options import KL_KINDS, check_choice

K3_BOUND = 20.0  # nats; exp of a larger log ratio is cut here, where its gradient becomes 0
# Float32 numbers of a slice of logits: 4 MiB, which stay in a CPU's cache, or 64 MiB, so that a GPU has few launches.
CHUNK_FLOATS = {"cpu": 2**20, "cuda": 2**24}


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the entries where the mask is True; 0 where a slice has none.

    Args:
        values: float, any shape.
        mask: bool, same shape, True means "counts". Masked entries may hold anything, NaN included.
        dim: reduced dimension; None reduces all.
    """
    kept = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def last_valid_index(mask: Tensor) -> Tensor:
    """Column of the last True of each row.

    Args:
        mask: (B, S) bool or 0/1 integers, True on real tokens; padding may be on either side.
    Returns:
        (B,) int64.
    Raises:
        ValueError: a row has no True (index -1 would silently read another token). On a GPU, where asking would wait
            for all work before it, the device raises instead.
    """
    mask = mask.bool()
    filled = mask.any(dim=1)
    if mask.device.type != "cpu":
        torch._assert_async(filled.all(), "a row of the mask holds no token")
    elif not filled.all():
        rows = (~filled).nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} of the mask hold no token; drop them before scoring")
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(dim=1)


def states_at(states: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """States at some columns of some rows.

    Args:
        states: (R, S, H).
        rows: (P,) int64; a row may occur more than once.
        columns: (P, N) int64 columns, those of each named row.
    Returns:
        (P, N, H).
    """
    flat = rows.unsqueeze(1) * states.shape[1] + columns
    return states.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, tuple(columns.shape))


def position_ids_from_mask(mask: Tensor) -> Tensor:
    """Positions counted from the first real token of each row; 0 on left padding.

    Args:
        mask: (B, S) bool or 0/1 integers, True on real tokens.
    Returns:
        (B, S) int64.
    """
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def logprobs_from_logits(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_floats: int | None = None,
) -> Tensor:
    """Log-probability of each token given the tokens before it, under softmax(logits / temperature).

    Computed in float32 or better on slices of the logits, which the backward pass computes again: no float32 copy of
    all logits is ever made. Pass contiguous logits as the model gives them; a cut of them would be copied.

    Args:
        logits: (B, S, V) float; the entry at t is of token t + 1. Masked entries may hold anything, NaN included.
        token_ids: (B, S) int64.
        mask: (B, S) bool, True on the tokens that count; None counts all. Column 0, which nothing predicts, never does.
        temperature: above 0; the one the tokens were sampled with.
        chunk_floats: upper bound of tokens times V in one slice (at least one token); None: by the device.
    Returns:
        (B, S) nats, float32 or better; 0, without a gradient, where nothing counts.
    Raises:
        ValueError: shapes differ, or temperature is not above 0.
    """

    def pick(scaled: Tensor, targets: Tensor) -> Tensor:
        return scaled.gather(1, targets.unsqueeze(1)).squeeze(1) - scaled.logsumexp(1)

    if token_ids.shape != logits.shape[:-1]:
        raise ValueError(f"expected token ids of shape {tuple(logits.shape[:-1])}, got {tuple(token_ids.shape)}")
    return _of_predicted_tokens(pick, logits, token_ids, mask, temperature, chunk_floats)


def entropy_from_logits(
    logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0, chunk_floats: int | None = None
) -> Tensor:
    """Entropy of the distribution that each token was drawn from: at column t, that of the logits at t - 1.

    Arguments, memory, result (nats) and errors as of :func:`logprobs_from_logits`. A token that cannot be drawn (logit
    -inf) adds 0.
    """

    def entropy(scaled: Tensor, _: Tensor) -> Tensor:
        logprobs = scaled.log_softmax(1)
        return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(1)

    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return _of_predicted_tokens(entropy, logits, ids, mask, temperature, chunk_floats)


def _of_predicted_tokens(
    function: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperature: float,
    chunk_floats: int | None,
) -> Tensor:
    """``function`` of slices (T, V) of scaled logits and the tokens (T,) they predict, at those tokens' columns."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    if mask is None:
        mask = torch.ones_like(token_ids, dtype=torch.bool)
    elif mask.shape != token_ids.shape or mask.dtype != torch.bool:
        raise ValueError(f"expected a bool mask {tuple(token_ids.shape)}, got {mask.dtype} {tuple(mask.shape)}")

    counted = mask.roll(-1, dims=1)
    counted[:, -1] = False
    chunk_floats = chunk_floats or CHUNK_FLOATS.get(logits.device.type, CHUNK_FLOATS["cuda"])
    tokens = max(1, chunk_floats // logits.shape[-1])
    rows = (logits.flatten(0, -2), token_ids.roll(-1, dims=1).flatten(), counted.flatten())
    values = _InSlices.apply(function, temperature, tokens, *rows)
    return F.pad(values.view(token_ids.shape)[:, :-1], (1, 0))


def _slices(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


def _of_slice(function, temperature: float, rows: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    # Masked logits are replaced before any operation: behind one, the gradient of a NaN is NaN whatever its weight.
    scaled = at_least_float32(rows).masked_fill(~counted.unsqueeze(1), 0.0) / temperature
    return function(scaled, targets).masked_fill(~counted, 0.0)


class _InSlices(torch.autograd.Function):
    """A function of rows of logits, slice by slice; the backward pass computes a slice again and keeps nothing else."""

    @staticmethod
    def forward(ctx, function, temperature, tokens, *rows):
        ctx.save_for_backward(*rows)
        ctx.settings = function, temperature, tokens
        return torch.cat([_of_slice(function, temperature, *part) for part in _slices(tokens, *rows)])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        function, temperature, tokens = ctx.settings
        logits, *others = ctx.saved_tensors
        logits_gradient = torch.empty_like(logits)
        for part, targets, counted, above, below in _slices(tokens, logits, *others, gradient, logits_gradient):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                values = _of_slice(function, temperature, part, targets, counted)
            below.copy_(torch.autograd.grad(values, part, above)[0])
        return None, None, None, logits_gradient, None, None


def approx_kl(logprobs: Tensor, reference: Tensor, kind: str = "k1", mask: Tensor | None = None) -> Tensor:
    """Estimate, at each token drawn from the policy, of the KL divergence from the policy to a reference.

    With d = logprobs - reference:

        k1 = d                  unbiased, may be negative
        k2 = d^2 / 2            biased; as a loss its gradient is that of the KL divergence
        k3 = exp(-d) - 1 + d    unbiased, never negative; -d is cut at 20 first, so that exp stays finite in float32

    Args:
        logprobs, reference: same shape, nats; compared in float32 or better.
        kind: 'k1', 'k2' or 'k3'.
        mask: bool, same shape, True on the policy's tokens; None counts all.
    Returns:
        Same shape, nats; 0, without a gradient, at masked positions, whatever they hold.
    Raises:
        ValueError: unknown kind, or shapes differ.
    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    check_choice("the KL estimate", kind, KL_KINDS)
    difference = masked_log_ratio(logprobs, reference, mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    negative = (-difference).clamp(max=K3_BOUND)
    return negative.expm1() - negative


def masked_log_ratio(logprobs: Tensor, reference: Tensor, mask: Tensor | None) -> Tensor:
    """logprobs - reference in float32 or better; 0, without a gradient, where the mask is False.

    Raises:
        ValueError: shapes differ, or the mask is not bool.
    """
    shape = logprobs.shape
    if reference.shape != shape or (mask is not None and (mask.shape != shape or mask.dtype != torch.bool)):
        raise ValueError(
            f"expected log-probabilities and a bool mask of one shape, got {tuple(shape)}, {tuple(reference.shape)}, "
            + ("no mask" if mask is None else f"{mask.dtype} {tuple(mask.shape)}")
        )
    difference = at_least_float32(logprobs) - at_least_float32(reference)
    return difference if mask is None else difference.masked_fill(~mask, 0.0)
