"""From models to a trainer: the reference, the critic, and the engines that train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from openrlhf.datasets.prompts import PromptData
from openrlhf.datasets.sft import SFTData
from openrlhf.models.reward_model import RewardModel, disable_dropout, initialise_head
from openrlhf.rewards.adapting import as_reward_source
from openrlhf.trainer.engine import Engine, LocalEngine, OptimizerSettings
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.ppo_trainer import PPOTrainer

OPTIMIZER = OptimizerSettings(1e-6, (0.9, 0.95), 0.0, 1.0, "constant", 0, 0.0, 1)


def make_trainer(
    model: nn.Module,
    tokenizer: Any,
    prompts: PromptData | Sequence[str],
    reward: Any,
    settings: PPOSettings,
    *,
    value_model: nn.Module | None = None,
    reference: nn.Module | None = None,
    reward_tokenizer: Any = None,
    held_out: PromptData | Sequence[str] | None = None,
    gold: Any = None,
    optimizer: OptimizerSettings = OPTIMIZER,
    critic_optimizer: OptimizerSettings | None = None,
    texts: SFTData | None = None,
    engine: Callable[[], Engine] = LocalEngine,
) -> PPOTrainer:
    """A trainer from models and any reward.

    Args:
        model: causal language model of transformers; it is trained in place, without dropout.
        prompts, held_out: texts as the policy reads them, or `PromptData` with labels and columns.
        reward, gold: what `as_reward_source` takes (a callable, a torch module, a source, a text), or for `reward` an
            agent's executor. reward_tokenizer: of a module that scores texts.
        value_model: critic of `gae`, a sequence-classification network or a `RewardModel` over the policy's tokens;
            None: the policy's own layers with a new head. It has nothing to do with `reward`.
        reference: what the KL divergence is measured from; None: a copy of `model`, where the coefficient is above 0.
        optimizer: of the policy; total_steps of 1 or less is replaced by those of the run. critic_optimizer: None: the
            same with 9e-6.
        texts: what the policy keeps predicting, with the weight `ptx_coef` of the settings.
        engine: what policy and critic are trained by; called for each.
    Raises:
        ValueError: settings that do not go together, too few prompts, or a value model without use.
    """
    if value_model is not None and not settings.needs_critic:
        raise ValueError(f"{settings.estimator!r} uses no value model; choose the estimator gae, or leave it out")
    if not isinstance(prompts, PromptData):
        prompts = PromptData.of(prompts, tokenizer)
    if held_out is not None and not isinstance(held_out, PromptData):
        held_out = PromptData.of(held_out, tokenizer)
    source = reward if hasattr(reward, "execute") else as_reward_source(reward, reward_tokenizer)
    copied = settings.kl_coef > 0 and reference is None
    if copied:
        reference = copy.deepcopy(model)
    if settings.needs_critic and value_model is None:
        value_model = critic_from_policy(model, settings.seed)  # before an engine turns the policy into bfloat16
    total = settings.total_updates(len(prompts))
    actor, critic = engine(), None
    actor.prepare(without_dropout(model), _over(optimizer, total))
    if value_model is not None:
        critic = engine()
        critic.prepare(
            without_dropout(value_model if isinstance(value_model, RewardModel) else RewardModel(value_model)),
            _over(critic_optimizer or replace(optimizer, learning_rate=9e-6), total),
        )
    if reference is not None:
        reference = without_dropout(reference).to(actor.device).eval().requires_grad_(False)
        dtype = next(actor.module.parameters()).dtype  # an engine for bfloat16 rounds the policy
        for parameter in reference.parameters() if copied else []:  # not its buffers, as the engine
            parameter.data = parameter.data.to(dtype)
    gold = None if gold is None else as_reward_source(gold)
    return PPOTrainer(actor, tokenizer, prompts, source, settings, critic, reference, held_out, gold, texts)


def critic_from_policy(model: nn.Module, seed: int) -> RewardModel:
    """A critic with the layers of a policy, copied, and a new value head whose first values are near 0."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    disable_dropout(config)
    with torch.random.fork_rng(devices=[]):
        network = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    network.base_model.load_state_dict(model.base_model.state_dict())
    initialise_head(network.score, config.get_text_config().hidden_size, seed)
    return RewardModel(network)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout layer off, in place: an update must see the distribution that was sampled from."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model


def _over(optimizer: OptimizerSettings, total: int) -> OptimizerSettings:
    return optimizer if optimizer.total_steps > 1 else replace(optimizer, total_steps=total)
