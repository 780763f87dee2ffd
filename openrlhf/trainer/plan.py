"""Which examples every optimizer step sees: the one place where steps, epochs and batches are counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


@lru_cache(maxsize=4)
def _epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(examples)


@dataclass(frozen=True)
class TrainingPlan:
    """Order and size of the updates of a run.

    The epochs' orders stand one behind the other and are cut into global batches: what is left of an epoch is carried
    over into the next one, and the last batch of the run may be shorter. No example is skipped or seen twice in an
    epoch, and the order depends on the seed alone, not on the number of processes.

    Args:
        examples: size of the data set. batch_size: examples per update over all processes.
        micro_batch_size: examples per forward pass and process.
        batch_tokens: tokens per forward pass and process, in place of a number of examples.
    Raises:
        ValueError: fewer examples than a batch, or batch_size is not a multiple of micro_batch_size * world_size.
    """

    examples: int
    epochs: int
    batch_size: int
    micro_batch_size: int
    world_size: int = 1
    seed: int = 0
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.examples < self.batch_size:
            raise ValueError(
                f"{self.examples} training examples are fewer than one batch of --train_batch_size {self.batch_size}; "
                "lower it or add data"
            )
        if self.batch_tokens is None and self.batch_size % (self.micro_batch_size * self.world_size):
            raise ValueError(
                f"--train_batch_size {self.batch_size} must be a multiple of --micro_train_batch_size "
                f"{self.micro_batch_size} x {self.world_size} processes"
            )

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return -(-self.examples * self.epochs // self.batch_size)

    @property
    def accumulation(self) -> int:
        """Micro-batches per update and process; with ``batch_tokens`` their number varies."""
        return self.batch_size // (self.micro_batch_size * self.world_size)

    def indices(self, step: int) -> np.ndarray:
        """Examples of update ``step`` (counted from 0): (batch_size,) int64, fewer in the last one."""
        first, last = step * self.batch_size, min((step + 1) * self.batch_size, self.examples * self.epochs)
        places = np.arange(first, last)
        parts = [
            _epoch_order(self.examples, self.seed, int(epoch))[places[places // self.examples == epoch] % self.examples]
            for epoch in np.unique(places // self.examples)
        ]
        return np.concatenate(parts)

    def epochs_done(self, steps: int) -> int:
        """Whole epochs contained in the first ``steps`` updates."""
        return min(steps * self.batch_size, self.examples * self.epochs) // self.examples

    def micro_batches(self, tokens: np.ndarray, rank: int, padded: bool = True) -> list[np.ndarray]:
        """Split one update among micro-batches.

        Args:
            tokens: (n,) tokens of the update's examples.
            rank: of this process.
            padded: rows of a micro-batch are padded to the longest: it holds examples of like length. Else every
                micro-batch gets about as many tokens.
        Returns:
            ``accumulation`` arrays of places 0..n-1 in the update (with ``batch_tokens`` as many as needed); one may be
            empty in a short update. Every rank gets as many, and over all ranks each place occurs once. Without
            ``batch_tokens`` the largest come first: what the later ones need then fits into memory that is there.
        """
        if self.batch_tokens is not None:
            parts = cut_by_tokens(tokens, self.batch_tokens, padded)
            return even_slots(parts, self.world_size)[rank :: self.world_size]
        order, count = np.argsort(tokens, kind="stable"), self.accumulation * self.world_size
        if padded:
            return np.array_split(order, count)[rank :: self.world_size][::-1]
        return [order[::-1][slot::count] for slot in range(rank, count, self.world_size)]


def cut_by_tokens(tokens: np.ndarray, batch_tokens: int, padded: bool = True) -> list[np.ndarray]:
    """Batches of similar length that hold at most so many tokens; a longer row is alone in its batch.

    Args:
        tokens: (n,) tokens of the rows. padded: padding to the longest of the batch counts too.
    Returns:
        Arrays of places 0..n-1, shortest rows first.
    """
    order = np.argsort(tokens, kind="stable")
    starts, held = [0], 0
    for i, place in enumerate(order):
        held = (i - starts[-1] + 1) * tokens[place] if padded else held + tokens[place]
        if i > starts[-1] and held > batch_tokens:
            starts.append(i)
            held = tokens[place]
    return np.split(order, starts[1:])


def even_slots(slots: list[np.ndarray], multiple: int) -> list[np.ndarray]:
    """Halve the largest batches until their number is a multiple; empty ones where nothing is left to halve."""
    slots = list(slots)
    while len(slots) % multiple:
        largest = max(range(len(slots)), key=lambda i: len(slots[i]))
        slots[largest : largest + 1] = np.array_split(slots[largest], 2)
    return slots


def even_batches(tokens: np.ndarray, size: int, rank: int, world_size: int) -> list[np.ndarray]:
    """Batches of similar length for one process, for training passes: every process gets as many, some may be empty.

    Args:
        tokens: (n,) tokens of the rows. size: rows of a batch.
    Returns:
        Arrays of places 0..n-1, shortest rows first; over all processes every place once.
    """
    order = np.argsort(tokens, kind="stable")
    slots = [order[start : start + size] for start in range(0, len(order), size)]
    return even_slots(slots, world_size)[rank::world_size]


def evaluation_batches(
    tokens: np.ndarray,
    size: int,
    rank: int,
    world_size: int,
    batch_tokens: int | None = None,
    padded: bool = True,
) -> list[tuple[np.ndarray, bool]]:
    """Batches of similar length for one process; over all processes every row counts once.

    Args:
        tokens: (n,) tokens of the examples. size: examples per batch. batch_tokens, padded: tokens per batch instead,
            as in :func:`cut_by_tokens`.
    Returns:
        (rows, counts) of each pass; every process gets as many, the last one may repeat a batch that does not count.
    """
    order = np.argsort(tokens, kind="stable")
    batches = [(order[start : start + size], True) for start in range(0, len(order), size)]
    if batch_tokens is not None:
        batches = [(rows, True) for rows in cut_by_tokens(tokens, batch_tokens, padded)]
    fillers = [(batches[0][0], False)] * (-len(batches) % world_size) if batches else []
    return (batches + fillers)[rank::world_size]


def step_generator(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """CPU generator that depends on seed, step and stream alone, so that a resumed run draws the same numbers."""
    state = np.random.SeedSequence([seed, step, stream]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 31 | int(state[1]) >> 1)
