"""The last layer of packed rows, run for the tokens that are read: of the others it needs the keys and values.

A hook before the layer runs it twice. The first time all packed tokens go as far as its attention, which ends the run
with the keys and values (`KeysFound`); the second time the last tokens go all the way and see those keys. No code is
written per architecture: what a layer is given by token is narrowed by its shape, and
`openrlhf.models.packing_support.probe_last` says whether the result is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from openrlhf.models.packed import PackedRows
from openrlhf.models.packed_attention import ARGUMENT, KeysFound, RowsBehindKeys


@contextmanager
def only_last_tokens(network: nn.Module, packed: PackedRows, last: PackedRows) -> Iterator[None]:
    """While this is open, a pass over `packed` leaves its last layer with the R tokens of `last`, in their order.

    Passes over other rows, such as those of other threads, are as without it.

    Args:
        last: from `openrlhf.models.packed.last_rows`, of the same sequences.
    Raises:
        ValueError: no list of as many layers as the configuration says is found in the network.
    """
    tokens = packed.tokens_at(last.position_ids)

    def narrow(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(narrow(part) for part in value)
        by_token = isinstance(value, Tensor) and value.dim() in (2, 3) and value.shape[:2] == (1, len(packed.input_ids))
        return value.index_select(1, tokens) if by_token else value

    def run_in_two(
        layer: nn.Module, given: tuple, named: dict[str, Any] | None = None
    ) -> tuple[tuple, dict[str, Any]] | None:
        # None: a pass of another thread, while this hook is put on or taken off; torch does that in two steps.
        if named is None or named.get(ARGUMENT) is not packed:
            return None
        try:
            layer(*given, **named | {ARGUMENT: RowsBehindKeys(packed)})
        except KeysFound as found:
            keys, values = found.args
            named = {name: narrow(value) for name, value in named.items()}
            return narrow(given), named | {ARGUMENT: RowsBehindKeys(last, (keys, values))}
        raise ValueError(f"{type(layer).__name__} did not ask its attention for packed rows")

    hook = _last_layer(network).register_forward_pre_hook(run_in_two, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _last_layer(network: nn.Module) -> nn.Module:
    count = network.config.get_text_config().num_hidden_layers
    for module in network.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module[-1]
    raise ValueError(f"no list of {count} layers in {type(network).__name__}")
