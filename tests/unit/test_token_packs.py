"""Packs and batches of sequences, and the digits of float32 numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openrlhf.evaluation.batching import pad_right, token_packs
from openrlhf.evaluation.decimals import shortest_decimals


def test_packs_by_hand():
    """In the order of tokens: 1 2 3 4, 1 2 3 5 6, 1 9, 300 7, 300 8 9; new tokens 4, 2, 1, 2, 2."""
    sequences = [[300, 8, 9], [1, 9], [1, 2, 3, 5, 6], [300, 7], [1, 2, 3, 4]]
    assert token_packs(sequences, 100) == [[4, 2, 1, 3, 0]]
    assert token_packs(sequences, 7) == [[4, 2, 1], [3, 0]]  # 4 + 2 + 1, then 2 + 2
    # A limit of 5: 1 2 3 5 6 would begin a pack with 3 tokens again, of which 4 is no fourfold, so it stays.
    assert token_packs(sequences, 5) == [[4, 2], [1, 3], [0]]
    # A limit of 1: nor is 2, the tokens of 300 7, a fourfold of the 1 that 300 8 9 would repeat.
    assert token_packs(sequences, 1) == [[4, 2], [1], [3, 0]]
    assert token_packs([], 5) == []
    with pytest.raises(ValueError, match="at least 1, got 0"):
        token_packs(sequences, 0)


def test_a_long_beginning_is_repeated_in_few_packs():
    """40 tokens shared, 5 of each own: a pack holds four times 40 tokens or more, 24 rows, whatever batch_tokens is."""
    sequences = [[7] * 40 + [100 + i] * 5 for i in range(60)]
    assert [len(pack) for pack in token_packs(sequences, 10)] == [24, 24, 12]
    assert [len(pack) for pack in token_packs(sequences, 240)] == [40, 20]


def test_padding_by_hand():
    ids, mask = pad_right([[3, 4, 5], [], [6]], 9, "cpu")
    assert ids.tolist() == [[3, 4, 5], [9, 9, 9], [6, 9, 9]] and ids.dtype == torch.int64
    assert mask.tolist() == [[True, True, True], [False, False, False], [True, False, False]]


def test_decimals_are_those_of_str():
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    usual = generator.normal(size=60_000).astype(np.float32)
    edges = np.array([0, -0.0, 1, 0.1, 0.5, -1 / 3, 1e-13, 9.999999e-14, 1e-45, 3.4028235e38, 16777216, 1e27, 2**-10])
    powers = 2.0 ** np.arange(-140, 120)
    values = np.concatenate([bits[np.isfinite(bits)], usual, usual / 1000, edges, powers]).astype(np.float32)
    assert shortest_decimals(values).tolist() == [float(str(value)) for value in values]
    odd = shortest_decimals(np.array([np.nan, np.inf, -np.inf], np.float32))
    assert np.isnan(odd[0]) and odd[1:].tolist() == [np.inf, -np.inf]
