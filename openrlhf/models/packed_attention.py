"""Attention over packed tokens, by the attention that the model has anyway.

transformers looks its attention function up by name in every layer. Ours stands in front of the one that the model
uses (sdpa, flash-attention, eager): it puts rows together from packed queries, keys and values, calls the other one,
and takes the answer of each packed token. Called without packed rows, it only hands on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openrlhf.models.packed import AttentionRows, PackedRows

PREFIX = "packed_"
ARGUMENT = "packed_rows"  # under this name the rows travel through the layers of a model
NO_MASK = (1, 1, 1, 1)  # shape of a mask that stands for none: of four dimensions, models make none of their own
_NAMES = threading.Condition()
_HOLDERS: dict[tuple[int, str], _Holders] = {}  # by the configuration's id and the name


class KeysFound(Exception):
    """Ends a layer at its attention; its arguments are the keys and values."""


@dataclass(frozen=True)
class RowsBehindKeys:
    """Packed rows whose tokens ask for keys and values that were computed before, see `openrlhf.models.last_layer`."""

    rows: PackedRows
    found: tuple[Tensor, Tensor] | None = None  # keys and values, (1, heads, T, d) each; None: raise KeysFound


def base_attention(config) -> str:
    """Name of the attention that a model uses, whether or not ours stands in front of it."""
    return (config._attn_implementation or "eager").removeprefix(PREFIX)


@dataclass
class _Holders:
    """Passes that go on under one name of one configuration."""

    found: str | None  # the name before the first of them
    threads: list[int]  # one entry a pass
    leaves: bool = False  # one of them keeps gradients


@contextmanager
def attention_for(config, packed: bool) -> Iterator[None]:
    """The attention that a forward pass looks up by the name in its configuration: ours in front of it, or none.

    The name is changed in place, as some models do otherwise by it, and a pass that meets the wrong one would read
    packed tokens as one sequence. So passes of other threads under another name wait, and those under the same one go
    side by side. A pass with gradients leaves its name: gradient checkpointing looks it up again in the backward pass.
    Others put back what they found, the last of those side by side, so that they may lie between the two.
    """
    thread, name = threading.get_ident(), _packed_name(config) if packed else base_attention(config)
    with _NAMES:
        _NAMES.wait_for(lambda: _may_hold(config, name, thread))
        outer = config._attn_implementation
        holders = _HOLDERS.setdefault((id(config), name), _Holders(outer, []))
        holders.threads.append(thread)
        holders.leaves |= torch.is_grad_enabled()
        if outer != name:
            config._attn_implementation = name
    try:
        yield
    finally:
        with _NAMES:
            holders.threads.remove(thread)
            if not holders.threads:
                del _HOLDERS[id(config), name]
                if not holders.leaves:
                    config._attn_implementation = holders.found
            _NAMES.notify_all()


def _may_hold(config, name: str, thread: int) -> bool:
    """No pass of another thread goes on under another name."""
    return not any(
        number == id(config) and held != name and any(other != thread for other in holders.threads)
        for (number, held), holders in _HOLDERS.items()
    )


def _packed_name(config) -> str:
    """Name of our attention in front of the model's own; known to transformers from now on."""
    base = base_attention(config)
    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(packed_attention, base))
        if base in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def packed_attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_rows: PackedRows | RowsBehindKeys | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer.

    Args:
        base: name of the attention that computes.
        query: (1, heads, T, d) of packed tokens. key, value: the same with the heads of keys.
        attention_mask: of calls without packed rows.
        options: of the layer, such as scaling; handed on.
    Returns:
        (1, T, heads, d) and None; without packed rows what the base returns.
    Raises:
        ValueError: a layer made a mask of its own for packed rows: attention would not heed it.
        KeysFound: asked for by the rows.
    """
    attend = _attention_function(base, module)
    if packed_rows is None:
        return attend(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.shape != NO_MASK:
        raise ValueError(f"{type(module).__name__} makes its own mask {tuple(attention_mask.shape)} of packed rows")
    if isinstance(packed_rows, RowsBehindKeys):
        if packed_rows.found is None:
            raise KeysFound(key, value)
        (key, value), packed_rows = packed_rows.found, packed_rows.rows
    options.pop("position_ids", None)  # flash-attention would look for sequences in them
    rows = packed_rows.attention
    by_row = (
        _rows_of(query, packed_rows.queries, [(one.rows, one.queries) for one in rows]),
        *(_rows_of(states, packed_rows.keys, [(one.rows, one.keys) for one in rows]) for states in (key, value)),
    )
    answers = [
        attend(module, *states, _mask_of(one, base, query), **options)[0]  # (b, A, heads, d)
        for one, *states in zip(rows, *by_row, strict=True)
    ]
    together = torch.cat([answer.flatten(0, 1) for answer in answers])
    return together.index_select(0, packed_rows.answers).unsqueeze(0), None


def _rows_of(states: Tensor, tokens: Tensor, shapes: list[tuple[int, int]]) -> Iterator[Tensor]:
    """(1, heads, T, d) and the packed tokens of all rows -> (b, heads, A, d) for each shape (b, A).

    All rows are copied at once where gradients are kept, as each copy would have one of T tokens; else call by call.
    """
    by_token = states[0].transpose(0, 1).flatten(1)  # (T, heads * d)
    sizes = [b * width for b, width in shapes]
    if states.requires_grad:
        parts = iter(by_token.index_select(0, tokens).split(sizes))
    else:
        parts = (by_token.index_select(0, part) for part in tokens.split(sizes))
    heads = states.shape[1]
    return (part.view(*shape, heads, -1).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True))


def _mask_of(rows: AttentionRows, base: str, query: Tensor) -> Tensor | None:
    """The mask as the base takes it: None for causal rows, numbers to add for eager attention, else boolean."""
    if base != "eager":
        return rows.visible
    visible = rows.visible
    if visible is None:
        visible = torch.ones(1, 1, rows.queries, rows.keys, dtype=torch.bool, device=query.device).tril()
    hidden = query.new_zeros(visible.shape)
    return hidden.masked_fill_(~visible, torch.finfo(query.dtype).min)


def _attention_function(base: str, module: nn.Module) -> Callable:
    """Eager attention is not in the table of transformers: it is written in each model's own file."""
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    return sys.modules[type(module).__module__].eager_attention_forward
