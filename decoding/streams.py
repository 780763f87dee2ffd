"""Uniform random numbers of one response: they depend on its key and the place in it, on nothing else."""

from __future__ import annotations

import hashlib
import json

import numpy as np

BLOCK = 64  # numbers drawn at a time; a multiple of 4, the numbers of one step of Philox's counter


class Stream:
    """Endless uniform numbers, each found by its place.

    The same key gives the same numbers on every machine, in whatever order they are asked for.

    Args:
        key: seed, question, sample, ...; 1 and "1" are different.
    """

    def __init__(self, *key: int | str) -> None:
        digest = hashlib.sha256(json.dumps(key).encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        self._blocks: dict[int, list[float]] = {}

    def uniform(self, position: int) -> float:
        """A number in [0, 1), for the token at this place of the response."""
        block, place = divmod(position, BLOCK)
        if block not in self._blocks:
            philox = np.random.Philox(key=self._key, counter=block * (BLOCK // 4))
            self._blocks[block] = np.random.Generator(philox).random(BLOCK).tolist()
        return self._blocks[block][place]
