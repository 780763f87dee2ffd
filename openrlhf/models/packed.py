"""Many sequences without padding, every beginning they share computed once.

The tokens of R sequences form a tree: sequences that begin alike (the two responses of a pair, all responses of a
prompt, even prompts of one template) go the same way until they part. Each node of the tree is one packed token.
Whatever works token by token (embedding, projections, feed-forward layers, norms) runs on the packed tokens alone, and
that is nearly all the work. Attention runs on rows that are put together from them, several of like length at a time:
see :mod:`openrlhf.models.packed_attention`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CAUSAL_BLOCK = 32  # a causal call computes whole blocks of this many keys on a CPU, the hidden ones of the last too


@dataclass(frozen=True)
class AttentionRows:
    """Size and mask of b rows that attend in one call: A queries and K keys each, padding included."""

    rows: int  # b
    queries: int  # A
    keys: int  # K
    visible: Tensor | None  # (b, 1, A, K) bool, True where a query sees a key; None: causal, the queries are the keys

    def to(self, device: torch.device | str) -> AttentionRows:
        """The same rows on another device."""
        visible = None if self.visible is None else self.visible.to(device, non_blocking=True)
        return AttentionRows(self.rows, self.queries, self.keys, visible)


@dataclass(frozen=True)
class PackedRows:
    """The T different tokens of R sequences, and how the sequences are read from them.

    Padding points at token 0 and is never read.
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, as in sequences of their own
    places: Tensor  # (R, S) int64, the packed token that is token t of sequence r
    attention: tuple[AttentionRows, ...]
    queries: Tensor  # (sum of b * A,) int64, the packed tokens that ask in all attention rows, laid end to end
    keys: Tensor  # (sum of b * K,) int64, those that are seen, from the first token of each row's sequence on
    answers: Tensor  # (T,) int64, the number in `queries` of each packed token

    def tokens_at(self, positions: Tensor) -> Tensor:
        """(R,) int64, the packed token at a position of each sequence, counted from 0: (R,) int64 on any device."""
        return self.places.gather(1, positions.to(self.places.device).unsqueeze(1)).squeeze(1)

    def to(self, device: torch.device | str) -> PackedRows:
        """The same on another device."""
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return PackedRows(
            *(
                tuple(one.to(device) for one in value)
                if isinstance(value, tuple)
                else value.to(device, non_blocking=True)
                for value in values
            )
        )


def pack_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    share: bool = True,
    suffixes: bool = True,
    slack: int = 0,
    call_keys: int = sys.maxsize,
) -> PackedRows:
    """Lay out R sequences as packed tokens.

    Args:
        input_ids: (R, S) int64 on the CPU, padded on the right. attention_mask: (R, S) bool, True on real tokens.
        share: False keeps every token of every sequence: padding alone is left out.
        suffixes: sequences that share about half of their tokens and more ask for the rest only, under a mask, instead
            of being causal rows as a whole. False where attention takes no mask.
        slack: pairs of query and key that may be padding before another attention call is worth its start.
        call_keys: most keys of an attention call, padding included; a single longer row is a call of its own.
    Raises:
        ValueError: a sequence without a token, or padding before one.
    """
    ids, mask = input_ids.numpy(), attention_mask.numpy()
    if not mask[:, 0].all() or (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError(f"expected rows padded on the right with a token each, got a mask of {tuple(mask.shape)}")
    length = mask.sum(1)  # (R,)
    order, shared = _sort_rows(ids, mask, length) if share else (np.arange(len(ids)), np.zeros(len(ids), np.int64))
    ids, mask, length = ids[order], mask[order], length[order]

    column = np.arange(ids.shape[1])
    new = mask & (column >= shared[:, None])  # tokens that the row before does not begin with
    number = np.where(new, np.cumsum(new).reshape(new.shape) - 1, -1)
    # What is not new is the newest token of its column: the rows between have it from there too.
    places = np.where(mask, np.maximum.accumulate(number, axis=0), 0)
    start = np.where(suffixes & (2 * shared + CAUSAL_BLOCK > length), shared, 0)  # first column that asks
    asking = np.flatnonzero(length > shared)
    attention, queries, keys, answer = _attention_rows(places, length, start, asking, slack, call_keys)
    unsorted = np.empty_like(places)
    unsorted[order] = places
    return PackedRows(
        torch.from_numpy(ids[new]),
        torch.from_numpy(np.broadcast_to(column, ids.shape)[new]),
        torch.from_numpy(unsorted),
        attention,
        torch.from_numpy(queries),
        torch.from_numpy(keys),
        torch.from_numpy(answer[new]),
    )


def last_rows(packed: PackedRows, length: Tensor, *, slack: int = 0, call_keys: int = sys.maxsize) -> PackedRows:
    """The same R sequences where their last tokens alone ask, for keys of all packed tokens.

    Args:
        packed: from `pack_rows`. length: (R,) int64 tokens of each sequence.
        slack, call_keys: as for `pack_rows`.
    Returns:
        R tokens, in the order of the sequences and on the device of `packed`, each under all columns of `places`.
        `keys` are numbers of tokens of `packed`.
    """
    places, lengths = packed.places.cpu().numpy(), length.cpu().numpy()
    rows = np.arange(len(places))
    attention, _, keys, answer = _attention_rows(places, lengths, lengths - 1, rows, slack, call_keys)
    answers = answer[rows, lengths - 1]  # a query a row: the queries are the rows in another order
    tokens = packed.tokens_at(length - 1)
    last = PackedRows(
        packed.input_ids[tokens],
        packed.position_ids[tokens],
        torch.from_numpy(rows)[:, None].expand(places.shape),
        attention,
        torch.from_numpy(np.argsort(answers)),
        torch.from_numpy(keys),
        torch.from_numpy(answers),
    )
    return last.to(packed.places.device)


def _sort_rows(ids: np.ndarray, mask: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their tokens, and how many tokens each begins with like the one before: (R,), (R,)."""
    big_endian = ids.astype(">u4")  # bytes in the order of the numbers
    order = np.array(sorted(range(len(ids)), key=lambda row: big_endian[row, : length[row]].tobytes()))
    ids, mask = ids[order], mask[order]
    alike = (ids[1:] == ids[:-1]) & mask[1:] & mask[:-1]
    shared = np.logical_and.accumulate(alike, axis=1).sum(1)
    return order, np.concatenate([[0], shared])


def _attention_rows(
    places: np.ndarray, length: np.ndarray, start: np.ndarray, rows: np.ndarray, slack: int, call_keys: int
) -> tuple[tuple[AttentionRows, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Attention calls for some rows, their queries and keys, and (R, S) the number of the query at each column."""
    answer = np.zeros_like(places)
    calls, queries, keys, offset = [], [], [], 0
    for part in (rows[start[rows] == 0], rows[start[rows] > 0]):
        for members in _like_lengths(length, start, part, slack, call_keys):
            seen, asking = int(length[members].max()), int((length - start)[members].max())
            columns = start[members, None] + np.arange(asking)  # (b, A)
            real = columns < length[members, None]
            columns = np.minimum(columns, places.shape[1] - 1)
            queries.append(np.where(real, places[members[:, None], columns], 0).ravel())
            keys.append(places[members, :seen].ravel())
            visible = None
            if start[members[0]]:
                visible = torch.from_numpy(np.arange(seen) <= columns[:, None, :, None])
            calls.append(AttentionRows(len(members), asking, seen, visible))
            numbers = offset + np.arange(real.size).reshape(real.shape)
            answer[np.broadcast_to(members[:, None], real.shape)[real], columns[real]] = numbers[real]
            offset += real.size
    return tuple(calls), np.concatenate(queries), np.concatenate(keys), answer


def _like_lengths(
    length: np.ndarray, start: np.ndarray, rows: np.ndarray, slack: int, call_keys: int
) -> list[np.ndarray]:
    """Rows in groups of like size, the longest first; see `pack_rows` for how far a group goes."""
    groups: list[list[int]] = []
    keys = used = asking = 0
    for row in sorted(rows.tolist(), key=lambda row: (-length[row], start[row])):
        own = int(length[row] - start[row])
        asking = max(asking, own)
        if groups:
            keys = (len(groups[-1]) + 1) * int(length[groups[-1][0]])
        if not groups or keys > call_keys or keys * asking - used - own * int(length[row]) > slack:
            groups.append([])
            used, asking = 0, own
        groups[-1].append(row)
        used += own * int(length[row])
    return [np.array(group) for group in groups]


def unpack(packed: Tensor, places: Tensor) -> Tensor:
    """Values of packed tokens in the layout of separate rows.

    Args:
        packed: (T, ...). places: (R, S), see :class:`PackedRows`.
    Returns:
        (R, S, ...); on padding a copy of some token, which nothing may read.
    """
    return packed.index_select(0, places.flatten()).unflatten(0, tuple(places.shape))
