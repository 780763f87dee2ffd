"""Whatever the API takes as a reward (source, text, callable, torch module), as a reward source."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from openrlhf.evaluation.batching import pad_right, token_batches
from openrlhf.evaluation.scoring import BATCH_TOKENS
from openrlhf.models.reward_model import RewardModel
from openrlhf.rewards.function import FunctionReward
from openrlhf.rewards.model import RewardModelSource
from openrlhf.rewards.numbers import read_numbers
from openrlhf.rewards.source import RewardRequest, RewardResult, RewardSource, parse_reward_source


def as_reward_source(reward: Any, tokenizer: Any = None, name: str | None = None, **options: Any) -> RewardSource:
    """Any reward that the API takes, as a reward source.

    Args:
        reward: a reward source, a text for `parse_reward_source`, a callable, or a torch module: a sequence
            classification model of transformers (or our RewardModel) with `tokenizer` scores the texts in its own
            tokens; another module whose `forward` takes `input_ids` and `attention_mask` gets the policy's tokens; any
            other module is called as a function.
        tokenizer: of a reward model.
        options: for `parse_reward_source`, `RewardModelSource` or `FunctionReward`.
    Raises:
        ValueError: nothing that can give rewards.
    """
    if isinstance(reward, str | Path):
        return parse_reward_source(str(reward), **options)
    if callable(getattr(reward, "score", None)) and not hasattr(reward, "forward"):
        return reward
    if not callable(reward):
        raise ValueError(f"expected a reward source, a callable, a torch module or a text, got {type(reward).__name__}")
    if not hasattr(reward, "forward"):
        return FunctionReward(reward, name, **options)
    return _module_source(reward, tokenizer, name, options)


def _module_source(module: nn.Module, tokenizer: Any, name: str | None, options: dict[str, Any]) -> RewardSource:
    name = name or type(module).__name__
    if tokenizer is not None:
        if not isinstance(module, RewardModel) and not (hasattr(module, "score") and hasattr(module, "base_model")):
            raise ValueError(f"{name}: expected a model for sequence classification with a head 'score'")
        model = module if isinstance(module, RewardModel) else RewardModel(module)
        return RewardModelSource(model, tokenizer, name=name, **options)
    if "input_ids" in inspect.signature(module.forward).parameters:
        return ModuleReward(module, name, **options)
    return FunctionReward(module.eval(), name, **options)


class ModuleReward:
    """A torch module called with the policy's own tokens, as a reward source; no gradient is kept.

    Args:
        module: set to eval mode; called with `input_ids` (B, S) int64, padded on the right, and `attention_mask` (B, S)
            int64; gives (B,) or (B, 1), by itself or as `logits` or `reward` of its output.
        batch_tokens: tokens of a forward pass, padding included; None: what suits its device.
    """

    def __init__(self, module: nn.Module, name: str, batch_tokens: int | None = None) -> None:
        self.module = module.eval()
        self.name = name
        parameter = next(module.parameters(), torch.zeros(()))
        self.device = parameter.device
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self.device.type == "cuda"]
        self.pad_id = getattr(getattr(module, "config", None), "pad_token_id", None) or 0

    @torch.inference_mode()
    def score(self, request: RewardRequest) -> RewardResult:
        """See `RewardSource.score`."""
        if request.prompt_ids is None or request.response_ids is None:
            raise ValueError(f"{self.name}: a module of token ids needs prompt_ids and response_ids in the request")
        rows = [prompt + response for prompt, response in zip(request.prompt_ids, request.response_ids, strict=True)]
        rewards = np.full(len(rows), np.nan, np.float32)
        for batch in token_batches([len(row) for row in rows], self.batch_tokens):
            ids, mask = pad_right([rows[i] for i in batch], self.pad_id, self.device)
            out = self.module(input_ids=ids, attention_mask=mask.long())
            for part in ("reward", "logits"):
                out = getattr(out, part, out)
            rewards[batch] = read_numbers(out, len(batch), f"module {self.name}")
        return RewardResult(rewards, rewards)

    def close(self) -> None:
        """Nothing to give back."""
