"""From a rollout with log-probabilities to what the updates learn from."""

from __future__ import annotations

import torch

from openrlhf.models.functional import approx_kl
from openrlhf.trainer.advantages import (
    ESTIMATORS,
    Advantages,
    AdvantageSettings,
    RolloutRewards,
    clip_rewards,
    overlong_penalty,
    penalise_truncated,
)
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.rollout import Rollout
from openrlhf.trainer.rollout_figures import rollout_figures


def rollout_advantages(
    rollout: Rollout, settings: PPOSettings, kl_coef: float
) -> tuple[Advantages, dict[str, float | None]]:
    """Scores with their penalties, the KL divergence, and the advantages; docs/rl.md has the order.

    Returns:
        Advantages of all responses, and the figures of the rollout.
    """
    mask, score, lengths = rollout.action_mask, rollout.reward, rollout.action_mask.sum(dim=1)
    if settings.reward_clip_range is not None:
        score = clip_rewards(score, *settings.reward_clip_range)
    if settings.overlong_buffer is not None:
        score = score + overlong_penalty(
            lengths, settings.max_new_tokens, settings.overlong_buffer, settings.overlong_factor
        )
    if settings.stop_properly_coef is not None:
        score = penalise_truncated(score, rollout.truncated, settings.stop_properly_coef)
    kl = torch.zeros(mask.shape)
    if rollout.reference_logprobs is not None:
        kl = approx_kl(rollout.logprobs, rollout.reference_logprobs, settings.kl_kind, mask)
    rewards = RolloutRewards(
        score,
        rollout.group,
        mask,
        torch.zeros(mask.shape) if settings.kl_in_loss else kl,
        0.0 if settings.kl_in_loss else kl_coef,
        rollout.dense,
        rollout.values,
    )
    advantages = ESTIMATORS[settings.estimator](
        rewards, AdvantageSettings(settings.gamma, settings.gae_lambda, settings.scale_advantages)
    )
    return advantages, rollout_figures(rollout, rewards, kl, kl_coef, advantages, settings)
