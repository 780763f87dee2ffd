"""Token sequences grouped into padded batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")
WINDOW_BATCHES = 16  # sequences of about this many batches are sorted together: less padding, bounded memory
LEAST_PACK = 4  # a pack holds this many times the tokens that the next one repeats


def token_batches(lengths: Sequence[int], batch_tokens: int, switch_length: int | None = None) -> list[list[int]]:
    """Positions of N sequences grouped by length, the longest first.

    Args:
        lengths: N token counts.
        batch_tokens: most tokens of a batch, padding included; a longer single sequence is a batch of its own.
        switch_length: sequences longer than this are in no batch with others; see `RewardModel.switch_length`.
    Returns:
        Batches of positions; every position is in exactly one.
    Raises:
        ValueError: batch_tokens below 1.
    """
    if batch_tokens < 1:
        raise ValueError(f"expected batch_tokens of at least 1, got {batch_tokens}")
    batches: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        apart = switch_length is not None and lengths[position] <= switch_length < longest
        if not batches or apart or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = lengths[position]
        batches[-1].append(position)
    return batches


def cut_windows(
    items: Iterable[Item], window_tokens: int, tokens_of: Callable[[Item], int] = len
) -> Iterator[list[Item]]:
    """Consecutive items, cut into lists of about window_tokens tokens, in the order given.

    Args:
        tokens_of: tokens of an item; by default its length.
    """
    window: list[Item] = []
    tokens = 0
    for item in items:
        window.append(item)
        tokens += tokens_of(item)
        if tokens >= window_tokens:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def token_windows(sequences: Iterable[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Consecutive sequences, cut into lists of about WINDOW_BATCHES batches, in the order given."""
    return cut_windows(sequences, WINDOW_BATCHES * batch_tokens)


def token_packs(sequences: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Positions of N sequences, those that begin alike together, cut by the tokens that are computed.

    A beginning that sequences share counts once a pack, and a cut inside it makes it be computed again. So a pack goes
    on beyond batch_tokens until a cut repeats less than a quarter of it: 8,000 tokens where a prompt has 2,000.

    Args:
        sequences: N lists of token ids.
        batch_tokens: tokens of a pack, shared ones once.
    Returns:
        Packs of positions; every position is in exactly one.
    Raises:
        ValueError: batch_tokens below 1.
    """
    if batch_tokens < 1:
        raise ValueError(f"expected batch_tokens of at least 1, got {batch_tokens}")
    rows = [np.asarray(sequence, dtype=">u4") for sequence in sequences]  # bytes in the order of the numbers
    packs: list[list[int]] = []
    held, before = 0, np.zeros(0)
    for position in sorted(range(len(rows)), key=lambda i: rows[i].tobytes()):
        row = rows[position]
        size = min(len(row), len(before))
        other = np.flatnonzero(row[:size] != before[:size])
        shared = int(other[0]) if other.size else size
        full = held + len(row) - shared > batch_tokens and shared * LEAST_PACK <= held
        if not packs or full:
            packs.append([])
            held, shared = 0, 0
        packs[-1].append(position)
        held += len(row) - shared
        before = row
    return packs


def response_batches(prompts: Sequence[int], responses: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions of N responses behind cached prompts, grouped by length, the longest first.

    Args:
        prompts, responses: N token counts each.
        batch_tokens: most tokens of a batch, prompts and padding of both included; a single longer one is alone.
    """
    batches: list[list[int]] = []
    widest = longest = 0
    for position in sorted(range(len(responses)), key=lambda i: (-responses[i], -prompts[i], i)):
        width = max(widest, prompts[position])
        if not batches or (len(batches[-1]) + 1) * (width + longest) > batch_tokens:
            batches.append([])
            width, longest = prompts[position], responses[position]
        widest = width
        batches[-1].append(position)
    return batches


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """B sequences as one right-padded batch.

    Returns:
        input_ids (B, S) int64 and attention_mask (B, S) bool, True on real tokens.
    """
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(sequences), np.int64, lengths.sum())
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
