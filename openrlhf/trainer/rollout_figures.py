"""What is logged of a rollout; names as `early_warnings` reads them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from openrlhf.models.functional import masked_mean
from openrlhf.models.policy_losses import explained_variance
from openrlhf.trainer.advantages import Advantages, RolloutRewards
from openrlhf.trainer.early_warnings import repeated_ngram_share
from openrlhf.trainer.groups import group_figures
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.rollout import Rollout


def rollout_figures(
    rollout: Rollout, rewards: RolloutRewards, kl: Tensor, kl_coef: float, advantages: Advantages, settings: PPOSettings
) -> dict[str, float | None]:
    """Figures of a rollout with log-probabilities.

    Args:
        kl: (N, S) nats, estimate of each token's divergence from the reference; not looked at without one.
    Returns:
        Means over responses or tokens, None where nothing is scored: docs/rl.md says what each is.
    """
    mask, raw = rollout.action_mask, rollout.total
    scored = raw[~raw.isnan()]
    ends = rollout.reward[~rollout.reward.isnan()]
    repeated = [repeated_ngram_share(ids[kept].tolist()) for ids, kept in zip(rollout.input_ids, mask, strict=True)]
    figures = {
        "reward": scored.mean().item() if len(scored) else None,
        "reward_std": scored.std().item() if len(scored) > 1 else None,
        "shaped_reward": rewards.total.nanmean().item() if len(scored) else None,
        "unscored_share": 1 - len(scored) / len(raw),
        "response_length": mask.sum(dim=1).float().mean().item(),
        "truncated_share": rollout.truncated.float().mean().item(),
        "entropy": masked_mean(rollout.entropy, mask).item(),
        "repeated_share": float(np.mean(repeated)),
        "learning_share": advantages.loss_mask.any(dim=1).float().mean().item(),
        "responses": len(rollout),
        "kl_coef": kl_coef,
    }
    if settings.reward_clip_range is not None and len(ends):
        low, high = settings.reward_clip_range
        figures["reward_clipped_share"] = ((ends < low) | (ends > high)).float().mean().item()
    if settings.samples_per_prompt > 1:
        figures["equal_group_share"] = group_figures(rewards.total, rollout.group).equal.float().mean().item()
    if rollout.reference_logprobs is not None:
        figures["kl"] = masked_mean(kl, mask).item()
    if rollout.values is not None:
        figures["explained_variance"] = explained_variance(
            rollout.values, advantages.returns, advantages.loss_mask
        ).item()
    return figures
