"""Keys and values of prompts, computed once and shared by all responses to a prompt.

Prompts are padded on the left, so that distances between tokens stay what they are without padding: sliding windows and
relative positions see the same as in one unpadded row.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from openrlhf.models.functional import position_ids_from_mask
from openrlhf.models.reward_model import RewardModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptCache:
    """Keys and values of P prompts in every layer."""

    layers: list[tuple[Tensor, Tensor]]  # per layer (P, heads, T, head size) keys and values
    mask: Tensor  # (P, T) bool, True on real tokens, padding on the left


class CacheUnsupported(Exception):
    """The architecture keeps no plain keys and values (state-space or hybrid models): score rows whole."""


def compute_prompts(model: RewardModel, input_ids: Tensor, attention_mask: Tensor) -> PromptCache:
    """Run P prompts through the backbone and keep their keys and values.

    Args:
        input_ids: (P, T) int64, padded on the left.
        attention_mask: (P, T) bool, True on real tokens.
    Raises:
        CacheUnsupported: a layer of the architecture has no keys and values of every token.
    """
    network = model.network.base_model
    cache = DynamicCache()
    model.run_backbone(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=position_ids_from_mask(attention_mask),
        use_cache=True,
        **{cache_argument(network): cache},
    )
    expected = input_ids.shape
    layers = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or (keys.shape[0], keys.shape[-2]) != expected:
            raise CacheUnsupported(type(network).__name__)
        layers.append((keys, values))
    if len(layers) != model.config.get_text_config().num_hidden_layers:
        raise CacheUnsupported(type(network).__name__)
    return PromptCache(layers, attention_mask)


def run_responses(
    model: RewardModel, prompts: PromptCache, rows: Sequence[int], input_ids: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Last hidden states and values of B responses, each behind its prompt.

    Args:
        rows: B numbers of prompts in `prompts`.
        input_ids: (B, A) int64 responses, padded on the right.
        attention_mask: (B, A) bool, True on real tokens.
    Returns:
        hidden states (B, A, H) in the model's dtype and values (B, A) float32, as one forward pass over prompt and
        response gives them.
    """
    network = model.network.base_model
    index = torch.as_tensor(rows, device=input_ids.device)
    prompt_mask = prompts.mask[index]
    unused = int(prompts.mask.shape[1] - prompt_mask.sum(1).max())  # columns that pad every chosen prompt
    prompt_mask = prompt_mask[:, unused:]
    cache = DynamicCache([(keys[index, :, unused:], values[index, :, unused:]) for keys, values in prompts.layers])
    mask = torch.cat([prompt_mask, attention_mask], dim=1)
    hidden_states = model.run_backbone(
        input_ids=input_ids,
        attention_mask=mask.long(),
        position_ids=position_ids_from_mask(mask)[:, prompt_mask.shape[1] :],
        use_cache=True,
        **{cache_argument(network): cache},
    ).last_hidden_state
    return hidden_states, model.network.score(hidden_states).squeeze(-1).float()


def supports_prompt_cache(model: RewardModel) -> bool:
    """Whether prompts can be cached: the backbone takes a cache and leaves keys and values of tokens in every layer."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            compute_prompts(model, ids, torch.ones_like(ids, dtype=torch.bool))
    except Exception as error:  # models with other caches raise many unrelated types
        logger.info("%s: prompts are not shared (%r)", type(model.network).__name__, error)
        return False
    return True


def cache_argument(network: torch.nn.Module) -> str:
    """What the forward pass of a backbone calls its cache: the name changed with transformers 5.24."""
    names = inspect.signature(type(network).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
