"""The reward model: any causal backbone of transformers with one scalar head, read at every token.

A checkpoint is an ordinary Hugging Face folder (``<Family>ForSequenceClassification``, ``num_labels`` 1, head
``score.weight`` [1, H]), so transformers, TRL and vLLM load it unchanged. What only this project needs lies under the
key ``goal_reward`` of ``config.json``.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openrlhf.models.functional import at_least_float32, last_valid_index, position_ids_from_mask
from openrlhf.models.last_layer import only_last_tokens
from openrlhf.models.packed import PackedRows, last_rows, pack_rows, unpack
from openrlhf.models.packed_attention import ARGUMENT, NO_MASK, attention_for, base_attention

SETTINGS_KEY = "goal_reward"
VALUE_HEADS = ("linear", "mlp")
# By "on a GPU": pairs of query and key whose attention costs as much as the start of another call.
PACKING_SLACK = {False: 2048, True: 1 << 19}
# By the same: keys of all rows of an attention call. The rows are copies, and those of a long prompt are many.
CALL_KEYS = {False: 1 << 14, True: 1 << 18}


@dataclass(frozen=True)
class RewardOutput:
    """What one forward pass tells of B sequences."""

    hidden_states: Tensor | None  # (B, S, H) last layer after the final norm, model dtype; None where not asked for
    values: Tensor  # (B, S) float32, the head at every token, reward units
    reward: Tensor  # (B,) float32, the value at the last real token
    aux_loss: Tensor | None = None  # () load-balancing loss of a mixture-of-experts model, when asked for


class LinearHead(nn.Linear):
    """Value head H -> 1 without bias, in float32 (or better) whatever dtype the backbone computes in.

    A bfloat16 product would round rewards before they are compared: small margins would become ties.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, 1, bias=False, device="meta")
        self.weight = linear.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) -> (..., 1) float32."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return F.linear(at_least_float32(hidden_states), at_least_float32(self.weight))


class MLPHead(nn.Module):
    """Two-layer value head: linear H -> H, GELU, linear H -> 1, in float32 as :class:`LinearHead`.

    Its first layer is called ``weight`` on purpose: another library that expects ``score.weight`` of shape [1, H]
    then refuses the checkpoint with a size mismatch instead of scoring with a random head.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.out = LinearHead(nn.Linear(hidden_size, 1, bias=False))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) -> (..., 1) float32."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
            hidden = F.gelu(F.linear(at_least_float32(hidden_states), weight, bias))
            return self.out(hidden)


class RewardModel(nn.Module):
    """A sequence-classification network of transformers, seen as a reward model.

    Args:
        network: ``<Family>ForSequenceClassification`` with one label and a head called ``score``.
        with_aux_loss: also return the load-balancing loss of a mixture-of-experts model.
    """

    def __init__(self, network: nn.Module, with_aux_loss: bool = False) -> None:
        super().__init__()
        if type(network.score) is nn.Linear:
            network.score = LinearHead(network.score)
        self.network = network
        self.with_aux_loss = with_aux_loss

    @property
    def config(self):
        """The network's transformers configuration."""
        return self.network.config

    @property
    def hidden_size(self) -> int:
        """H, the width of the last hidden state."""
        return self.config.get_text_config().hidden_size

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.network.parameters()).device

    @property
    def switch_length(self) -> int | None:
        """Tokens above which all rows of a batch get other rotary positions (longrope, dynamic); None: it never is so.

        A row of at most this length must then not share a batch with a longer one.
        """
        return min(rotary_kinds(self.config).values(), default=None)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        packed: PackedRows | None = None,
        with_states: bool = True,
    ) -> RewardOutput:
        """Score B sequences.

        Args:
            input_ids: (B, S) int64, padded on either side.
            attention_mask: (B, S) bool or 0/1, 1 on real tokens.
            packed: the same sequences without padding (:meth:`pack`): computed instead, with the same result on real
                tokens.
            with_states: False leaves the states of packed rows out: laid out as (B, S, H) they are larger than packed.
        Raises:
            ValueError: a row without a real token.
        """
        if packed is not None:
            return self._forward_packed(packed, attention_mask, with_states)
        extra = {"output_router_logits": True} if self.with_aux_loss else {}
        outputs = self.run_backbone(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=position_ids_from_mask(attention_mask),
            use_cache=False,
            **extra,
        )
        hidden_states = outputs.last_hidden_state
        values = at_least_float32(self.network.score(hidden_states).squeeze(-1))
        last = last_valid_index(attention_mask)
        reward = values.gather(1, last.unsqueeze(1)).squeeze(1)
        aux_loss = self._aux_loss(outputs.router_logits, attention_mask) if self.with_aux_loss else None
        return RewardOutput(hidden_states, values, reward, aux_loss)

    def pack(self, input_ids: Tensor, attention_mask: Tensor, share: bool = True) -> PackedRows:
        """The layout of R sequences that suits this model and its device; lies there.

        Args:
            input_ids: (R, S) int64 on the CPU, padded on the right. attention_mask: (R, S) bool, True on real tokens.
            share: compute what sequences begin with alike once.
        Raises:
            ValueError: a sequence without a token, or padding before one.
        """
        packed = pack_rows(input_ids, attention_mask, share=share, suffixes=self.takes_masks, **self._call_limits)
        return packed.to(self.device)

    def pack_last(self, packed: PackedRows, length: Tensor) -> PackedRows:
        """The last tokens of the sequences of `pack`, for `read_packed`.

        Args:
            length: (R,) int64 tokens of each sequence.
        """
        return last_rows(packed, length, **self._call_limits)

    @property
    def takes_masks(self) -> bool:
        """Whether the attention of this model takes a mask of any form."""
        return base_attention(self.config) in ("sdpa", "eager")

    @property
    def _call_limits(self) -> dict[str, int]:
        on_gpu = self.device.type == "cuda"
        return {"slack": PACKING_SLACK[on_gpu], "call_keys": CALL_KEYS[on_gpu]}

    def run_backbone(self, **inputs):
        """The backbone's output on rows that are not packed, by the attention of the model's own name."""
        with attention_for(self.config, packed=False):
            return self.network.base_model(**inputs)

    def read_packed(self, packed: PackedRows, last: PackedRows | None = None) -> tuple[Tensor, Tensor]:
        """States and values of packed tokens, not laid out as rows: ``packed.places`` finds them.

        Args:
            last: of the same rows, from :meth:`pack_last`: its R tokens alone are read, and the last layer computes no
                others. Not for every architecture, see `openrlhf.models.packing_support.probe_last`.
        Returns:
            (T, H) last hidden states in the model's dtype and (T,) float32 values; (R, H) and (R,) with `last`.
        """
        return self._read(self._run_packed(packed, last))

    def _read(self, outputs) -> tuple[Tensor, Tensor]:
        states = outputs.last_hidden_state[0]
        return states, at_least_float32(self.network.score(states).squeeze(-1))

    def _run_packed(self, packed: PackedRows, last: PackedRows | None = None):
        """The backbone's output on packed tokens, a batch of one row."""
        extra = {"output_router_logits": True} if self.with_aux_loss else {}
        narrowed = nullcontext() if last is None else only_last_tokens(self.network, packed, last)
        with attention_for(self.config, packed=True), narrowed:
            return self.network.base_model(
                input_ids=packed.input_ids.unsqueeze(0),
                attention_mask=torch.ones(NO_MASK, dtype=torch.bool, device=packed.input_ids.device),
                position_ids=packed.position_ids.unsqueeze(0),
                use_cache=False,
                **{ARGUMENT: packed},
                **extra,
            )

    def _forward_packed(self, packed: PackedRows, attention_mask: Tensor, with_states: bool) -> RewardOutput:
        outputs = self._run_packed(packed)
        states, token_values = self._read(outputs)  # (T, H), (T,)
        values = unpack(token_values, packed.places)
        last = last_valid_index(attention_mask)
        reward = values.gather(1, last.unsqueeze(1)).squeeze(1)
        every_token = torch.ones_like(packed.input_ids).unsqueeze(0)
        aux_loss = self._aux_loss(outputs.router_logits, every_token) if self.with_aux_loss else None
        return RewardOutput(unpack(states, packed.places) if with_states else None, values, reward, aux_loss)

    def _aux_loss(self, router_logits: tuple[Tensor, ...], attention_mask: Tensor) -> Tensor:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.config.get_text_config()
        return load_balancing_loss_func(
            router_logits, count_experts(config), config.num_experts_per_tok, attention_mask.long()
        )


def count_experts(config) -> int | None:
    """Number of experts of a mixture-of-experts configuration; None for a dense model."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return None


def rotary_kinds(config) -> dict[str, int]:
    """Kinds of rotary positions that depend on the longest row of a batch, each with the length where that starts."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    found = {}
    for part in [parameters] if "rope_type" in parameters else parameters.values():  # one, or one a kind of layer
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind in ("longrope", "dynamic"):
            found[kind] = int(part.get("original_max_position_embeddings") or text.max_position_embeddings)
    return found


def read_settings(config) -> dict[str, Any]:
    """Our own settings of a checkpoint: template, max_len, loss, reward mean and std, ...; empty for a foreign one."""
    return dict(getattr(config, SETTINGS_KEY, None) or {})


def disable_dropout(config) -> None:
    """Set every dropout probability of a configuration and the noise of its router to 0, in place.

    Rewards of a pair must be comparable.
    """
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if ("dropout" in name or name.endswith(("pdrop", "jitter_noise"))) and isinstance(value, float):
                setattr(part, name, 0.0)


def initialise_head(head: nn.Module, hidden_size: int, seed: int) -> None:
    """Start a value head: normal with std 1 / (H + 1), so that first rewards are near 0; the same for one seed.

    In place. The head's parameters must be whole (gathered) when a sharding engine holds them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            inner = isinstance(head, MLPHead) and name == "weight"
            std = 1 / math.sqrt(hidden_size) if inner else 1 / (hidden_size + 1)
            drawn = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(drawn.to(parameter.dtype))


def check_head(state: dict[str, Tensor], hidden_size: int, kind: str, where: str | Path) -> None:
    """Refuse a head that is absent, empty, of another shape, all zero or not finite.

    Args:
        state: tensors by name; those starting with ``score.`` are the head.
    Raises:
        ValueError: names the key, its shape and the place.
    """
    shapes = {"score.weight": (1, hidden_size)}
    if kind == "mlp":
        shapes = {"score.weight": (hidden_size, hidden_size), "score.out.weight": (1, hidden_size)}
    for key, shape in shapes.items():
        tensor = state.get(key)
        if tensor is None:
            raise ValueError(f"{where}: the value head '{key}' is missing")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}: the value head '{key}' has shape {tuple(tensor.shape)}, expected {shape}")
        if not torch.isfinite(tensor).all() or not tensor.any():
            raise ValueError(
                f"{where}: the value head '{key}' is all zero or not finite; the run that saved it is broken"
            )
