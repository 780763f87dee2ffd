"""Both sequences of a pair in one row: what they begin with is computed once.

A row is ``[shared beginning | rest of chosen | rest of rejected]``. The shared beginning is the prompt, and whatever
tokens the two responses begin with alike. Each rest sees the beginning and itself, and the positions of the second
start again behind the beginning: every token sees what it sees in a row of its own. The mask is a function of two
numbers a token, which say as well how several pairs lie in one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = 3  # segment of padding; 0, 1, 2: the shared beginning, the rest of the chosen, the rest of the rejected


@dataclass(frozen=True)
class PackedRows:
    """B pairs as B right-padded rows of P tokens, and where the tokens of the 2B sequences lie in them."""

    input_ids: Tensor  # (B, P) int64
    position_ids: Tensor  # (B, P) int64, as in rows of their own; 0 on padding
    segment: Tensor  # (B, P) int64, which part of the row a token belongs to
    context: Tensor  # (B, P) int64, the segment that a token sees besides its own
    places: Tensor  # (2B, S) int64, token t of sequence i is number places[i, t] of the B * P tokens; 0 on padding

    def to(self, device: torch.device | str) -> PackedRows:
        """The same rows on another device."""
        return PackedRows(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def pack_pairs(input_ids: Tensor, attention_mask: Tensor) -> PackedRows:
    """Put the two sequences of every pair into one row.

    Args:
        input_ids: (2B, S) int64, right-padded, chosen first, then the rejected in the same order.
        attention_mask: (2B, S) bool, True on real tokens.
    Raises:
        ValueError: an odd number of rows, or padding before a token.
    """
    if input_ids.shape[0] % 2 or (attention_mask[:, 1:] & ~attention_mask[:, :-1]).any():
        raise ValueError(f"expected 2B rows padded on the right, got {tuple(input_ids.shape)}")
    chosen, rejected = input_ids.chunk(2)
    chosen_mask, rejected_mask = attention_mask.chunk(2)
    chosen_length, rejected_length = chosen_mask.sum(1, keepdim=True), rejected_mask.sum(1, keepdim=True)  # (B, 1)
    alike = (chosen == rejected) & chosen_mask & rejected_mask
    shared = alike.long().cumprod(1).sum(1, keepdim=True)  # (B, 1) tokens of the beginning

    total = chosen_length + rejected_length - shared
    width = int(total.max())
    column = torch.arange(width, device=input_ids.device).expand(len(chosen), -1)  # (B, P)
    is_rejected, is_padding = column >= chosen_length, column >= total
    position = torch.where(is_rejected, column - chosen_length + shared, column).masked_fill(is_padding, 0)
    ids = torch.where(
        is_rejected, rejected.gather(1, position), chosen.gather(1, position.clamp(max=chosen.shape[1] - 1))
    )
    segment = (column >= shared).long() + is_rejected.long() + is_padding.long()
    context = torch.where(is_padding, PADDING, 0)  # padding sees padding: a row of a mask must not be empty

    token = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(chosen)  # (B, S)
    rejected_column = torch.where(token < shared, token, token - shared + chosen_length)
    columns = torch.cat([token, rejected_column])  # (2B, S): the chosen tokens lie where they always do
    first = torch.arange(len(chosen), device=input_ids.device).repeat(2).unsqueeze(1) * width
    places = torch.where(attention_mask, first + columns, 0)
    return PackedRows(ids, position, segment, context, places)


def visible_tokens(segment: Tensor, context: Tensor) -> Tensor:
    """Which tokens of its row each token sees: those before it, and itself, of its own segment and of its context.

    Args:
        segment, context: (B, P) int64. Segments of a row are numbered apart; padding is a segment of its own.
    Returns:
        (B, P, P) bool, True where the token of the row sees that of the column. Every row has a True.
    """
    own = segment.unsqueeze(2) == segment.unsqueeze(1)
    continued = context.unsqueeze(2) == segment.unsqueeze(1)
    return (own | continued).tril()


def attention_bias(visible: Tensor, attn_implementation: str, dtype: torch.dtype) -> Tensor:
    """The mask as attention takes it: boolean for sdpa, added to the scores for eager attention.

    Args:
        visible: (B, P, P) bool. dtype: of the model.
    Returns:
        (B, 1, P, P) bool or dtype.
    """
    if attn_implementation != "eager":
        return visible.unsqueeze(1)
    hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return hidden.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def unpack(packed: Tensor, places: Tensor) -> Tensor:
    """Values of packed tokens in the layout of separate rows.

    Args:
        packed: (B, P, ...). places: (2B, S), see :class:`PackedRows`.
    Returns:
        (2B, S, ...); on padding a copy of some token, which nothing may read.
    """
    return packed.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, tuple(places.shape))
