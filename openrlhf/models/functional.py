"""Small tensor functions shared by models, losses and scoring."""

from __future__ import annotations

import torch
from torch import Tensor


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
