"""Buffers of the keys and values of many rows, and the cache of transformers that lets a model write into them.

A row is a stretch of columns of a slot. Passes read and write a range of slots at one column; between passes rows are
copied and shifted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LEAST_ROOM = 64  # columns that buffers have free when they are made


@dataclass
class Frame:
    """The part of the buffers that a pass reads and writes, and their size."""

    low: int = 0  # slots of the pass: low to high
    high: int = 0
    first: int = 0  # first column that any of them uses
    end: int = 0  # column of the first new token
    slots: int = 0
    columns: int = 0


class BufferLayer(CacheLayerMixin):
    """Buffers of one layer: keys and values of shape (slots, heads, columns, head size)."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make buffers for states (rows, heads, tokens, head size) like these."""
        slots, columns = self.frame.slots, self.frame.columns
        # Zeros: whatever lies in padding is multiplied with a weight of 0, and must be finite.
        self.keys, self.values = (
            states.new_zeros(slots, states.shape[1], columns, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the states of new tokens; returns those of all tokens of the frame."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        frame, stop = self.frame, self.frame.end + key_states.shape[-2]
        found = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            rows = buffer[frame.low : frame.high]
            rows[:, :, frame.end : stop] = states
            found.append(rows[:, :, frame.first : stop])
        return found[0], found[1]

    def get_seq_length(self) -> int:
        """Columns of the frame before the new tokens."""
        return self.frame.end - self.frame.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the frame with the new tokens, and the offset of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class Buffers:
    """Buffers of all layers; `cache` is what a forward pass gets, `frame` where it reads and writes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.frame = Frame()
        self.cache = Cache(layer_class_to_replicate=functools.partial(BufferLayer, self.frame))

    @property
    def layers(self) -> int:
        """Layers that have kept states."""
        return sum(layer.is_initialized for layer in self.cache.layers)

    def resize(self, slots: int, columns: int, used: range) -> None:
        """Give the buffers at least so many slots and columns.

        Args:
            used: columns that are kept; the first of them becomes the first of all.
        """
        frame = self.frame
        slots, columns = max(slots, frame.slots), max(columns, frame.columns)
        if (slots, columns, used.start) == (frame.slots, frame.columns, 0):
            return
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_empty(slots, old.shape[1], columns, old.shape[3])
                new[: frame.slots, :, : len(used)] = old[:, :, used.start : used.stop]
                new[: frame.slots, :, len(used) :] = 0
                new[frame.slots :] = 0
                setattr(layer, name, new)
        frame.slots, frame.columns = slots, columns

    def copy(self, sources: Sequence[int], targets: Sequence[int], columns: range) -> None:
        """Copy columns of slots into others; all are read before any is written."""
        source, target = torch.tensor([sources, targets], device=self.device)
        for buffer in self._all():
            part = buffer[:, :, columns.start : columns.stop]
            part.index_copy_(0, target, part.index_select(0, source))

    def shift(self, slots: Sequence[int], shifts: Sequence[int], columns: range) -> None:
        """Fill columns of each slot with what lies so many columns before them; before the first column: anything."""
        slot, shift = torch.tensor([slots, shifts], device=self.device)[:, :, None, None]
        column = torch.arange(columns.start, columns.stop, device=self.device)
        for buffer in self._all():
            heads = buffer.shape[1]
            line = (slot * heads + torch.arange(heads, device=self.device)[:, None]) * self.frame.columns
            lines = buffer.view(-1, buffer.shape[3])
            moved = lines.index_select(0, (line + (column - shift).clamp(min=0)).flatten())
            lines.index_copy_(0, (line + column).flatten(), moved)

    def _all(self) -> list[Tensor]:
        return [buffer for layer in self.cache.layers for buffer in (layer.keys, layer.values)]
