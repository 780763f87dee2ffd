"""From the scores of sampled responses to the advantage of every token.

Pure functions. A response is a row of A columns whose mask is True on the policy's own tokens; with an agent the tokens
of the environment lie between them. Masked positions may hold anything. Responses without a score (NaN) are left out of
every mean and baseline and have no token in the loss. Formulas and sources together: docs/rl.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.models.functional import at_least_float32, last_valid_index, masked_mean
from openrlhf.trainer.groups import check_scores, group_figures
from openrlhf.trainer.rl_options import check_discounts, check_overlong, check_range, check_stop_properly

STD_EPS = 1e-9  # added to a group's standard deviation, as in OpenRLHF
VARIANCE_FLOOR = 1e-8  # of whitening, as in OpenRLHF


@dataclass(frozen=True)
class RolloutRewards:
    """What B responses of a rollout got. Give the whole rollout, not a micro-batch: groups and means are over rows."""

    score: Tensor  # (B,) float, reward units; NaN: not scored
    group: Tensor  # (B,) int64, equal for responses to one prompt
    mask: Tensor  # (B, A) bool, True on the policy's tokens, at least one a row
    kl: Tensor  # (B, A) float, `approx_kl` to the reference, nats
    kl_coef: float = 0.0  # reward units per nat; 0 where the KL divergence is no part of the reward
    dense: Tensor | None = None  # (B, A) float, rewards of single tokens (agent steps, goal shaping), reward units
    values: Tensor | None = None  # (B, A) float, the critic at the state that each token is drawn in

    def __post_init__(self) -> None:
        rows, shape = self.score.shape, self.mask.shape
        if len(rows) != 1 or self.group.shape != rows or len(shape) != 2 or shape[:1] != rows:
            raise ValueError(
                f"expected score and group (B,) and mask (B, A), got {tuple(rows)}, {tuple(self.group.shape)} and "
                f"{tuple(shape)}"
            )
        for name, tensor in (("kl", self.kl), ("dense", self.dense), ("values", self.values)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"expected {name} of the mask's shape {tuple(shape)}, got {tuple(tensor.shape)}")
        check_scores(self.score)

    @property
    def scored(self) -> Tensor:
        """(B,) bool, True on responses with a score."""
        return ~self.score.isnan()

    @property
    def total(self) -> Tensor:
        """(B,) score and dense rewards of a response together; NaN: not scored."""
        score = at_least_float32(self.score)
        return score if self.dense is None else score + kept(self.dense, self.mask).sum(1)


@dataclass(frozen=True)
class AdvantageSettings:
    """How an estimator works; `openrlhf.trainer.rl_options.check_algorithm` says what goes together."""

    gamma: float = 1.0  # discount a token
    gae_lambda: float = 1.0  # 1: no bias from the critic, 0: one step of it
    scale: bool = True  # whitening divides by the standard deviation; False (--no_advantage_std_norm): only the mean
    drop_equal: bool = True  # groups whose scores are all equal have no token in the loss

    def __post_init__(self) -> None:
        check_discounts(self.gamma, self.gae_lambda)


@dataclass(frozen=True)
class Advantages:
    """What the update learns from; constants, without gradients."""

    advantages: Tensor  # (B, A) float; 0 outside of loss_mask
    returns: Tensor  # (B, A) float, what the critic should say; without a critic the rewards to come, less the baseline
    loss_mask: Tensor  # (B, A) bool, the mask without unscored responses and dropped groups


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """Values in float32 or better; 0 where the mask is False."""
    return at_least_float32(values).masked_fill(~mask, 0.0)


def clip_rewards(score: Tensor, low: float, high: float) -> Tensor:
    """Scores (B,) cut to [low, high]; NaN stays.

    Raises:
        ValueError: low is not below high, or a score is infinite: cutting would hide a broken reward.
    Source: as `reward_clip_range` of TRL's RLOO, on the raw score. OpenRLHF cuts after the baseline is subtracted,
        where a range of -10..10 does nothing to a normalised score.
    """
    check_range("reward_clip_range", low, high)
    check_scores(score)
    return score.clamp(low, high)


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Penalty that grows in a straight line over the last tokens before the limit.

        -factor * clip((length - (limit - buffer)) / buffer, 0, 1)

    Args:
        lengths: (B,) response tokens. limit: the longest response. buffer: tokens before it that cost, 1 to limit.
        factor: reward units at the limit.
    Returns:
        (B,) float32, 0 or below; add it to the score.
    Raises:
        ValueError: buffer or factor outside of its range.
    Source: DAPO, arXiv 2503.14476, equation 13, and OpenRLHF. In the paper a response cut at the limit costs 1 and the
        line ends at it, which is the same.
    """
    check_overlong(limit, buffer, factor)
    return -factor * ((lengths.float() - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def penalise_truncated(score: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """The stop-properly penalty on responses that were cut at the length limit.

    Args:
        score: (B,) float; NaN stays NaN, whatever coef.
        truncated: (B,) bool, True on responses without an end of their own.
        coef: in [0, 1]: factor of their scores, meant for scores of 0 and above (it makes a negative score better);
            negative: their score, whatever it was.
    Raises:
        ValueError: coef above 1.
    Source: OpenRLHF (`stop_properly_penalty_coef`), after ProRL v2.
    """
    check_stop_properly(coef)
    penalised = score * coef if coef >= 0 else torch.where(score.isnan(), score, torch.full_like(score, coef))
    return torch.where(truncated, penalised, score)


def shape_rewards(score: Tensor, kl: Tensor, mask: Tensor, coef: float, dense: Tensor | None = None) -> Tensor:
    """Rewards of single tokens.

        r_t = dense_t - coef kl_t + score [t is the last token of the policy]

    Args:
        score: (B,) float, a number for every response.
        kl: (B, A) float, nats. mask: (B, A) bool, True on the policy's tokens. dense: (B, A) float, or None.
        coef: reward units per nat, 0 or more. With 0 the KL is not looked at and may be infinite.
    Returns:
        (B, A) float32 or better; 0 at masked positions.
    Raises:
        ValueError: a row of the mask is empty, shapes differ, coef is negative, a score is no finite number, or the KL
            or a dense reward is not finite at a token of the policy.
    Source: Ziegler et al. 2019, arXiv 1909.08593, equation 2, spread over the tokens as in Stiennon et al. 2020 and
        OpenRLHF. The score stands at the last masked-in token, never at a fixed column.
    """
    if not 0 <= coef < float("inf"):
        raise ValueError(f"the KL coefficient must be 0 or more, got {coef}")
    if kl.shape != mask.shape or score.shape != mask.shape[:1] or (dense is not None and dense.shape != mask.shape):
        raise ValueError(
            f"expected score (B,), kl, mask and dense (B, A), got {tuple(score.shape)}, {tuple(kl.shape)}, "
            f"{tuple(mask.shape)} and {None if dense is None else tuple(dense.shape)}"
        )
    last = last_valid_index(mask).unsqueeze(1)
    parts = {"score": at_least_float32(score).unsqueeze(1)}
    rewards = torch.zeros(mask.shape, dtype=parts["score"].dtype, device=mask.device).scatter(1, last, parts["score"])
    if dense is not None:
        parts["dense reward"] = kept(dense, mask)
        rewards = rewards + parts["dense reward"]
    if coef > 0:
        parts["KL divergence"] = kept(kl, mask)
        rewards = rewards - coef * parts["KL divergence"]
    for name, part in parts.items():
        if not part.isfinite().all():
            rows = (~part.isfinite()).any(dim=1).nonzero().flatten().tolist()
            raise ValueError(f"the {name} of responses {rows[:5]} is not finite")
    return rewards


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, gae_lambda: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the policy's tokens.

        delta_t = r_t + gamma V_next(t) - V_t        A_t = delta_t + gamma lambda A_next(t)        R_t = A_t + V_t

    next(t) is the following token of the policy: tokens of an environment in between neither end the response nor count
    as time. After the last token V and A are 0, also where the response was cut at the length limit.

    Args:
        rewards, values: (B, A) float. mask: (B, A) bool, True on the policy's tokens.
        gamma: in (0, 1]. gae_lambda: in [0, 1].
    Returns:
        Advantages and returns, each (B, A) float32 or better; 0 at masked positions.
    Raises:
        ValueError: shapes differ, or a discount lies outside of its range.
    Source: Schulman et al. 2015, arXiv 1506.02438, equation 16. OpenRLHF sets rewards and values of masked positions to
        0 and walks over them; that is the same only where nothing masked lies between the policy's tokens.
    """
    check_discounts(gamma, gae_lambda)
    if rewards.shape != mask.shape or values.shape != mask.shape:
        raise ValueError(
            f"expected rewards, values and mask of one shape (B, A), got {tuple(rewards.shape)}, "
            f"{tuple(values.shape)} and {tuple(mask.shape)}"
        )
    rewards, values = kept(rewards, mask), kept(values, mask)
    following, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(values[:, 0])
    columns = []
    for reward, value, counted in zip(*(x.unbind(1)[::-1] for x in (rewards, values, mask)), strict=True):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * following
        following = torch.where(counted, advantage, following)
        next_value = torch.where(counted, value, next_value)
        columns.append(following)
    advantages = torch.stack(columns[::-1], dim=1).masked_fill(~mask, 0.0)
    return advantages, advantages + values


def whiten(values: Tensor, mask: Tensor, scale: bool = True) -> Tensor:
    """Values shifted to mean 0 and, with `scale`, divided by their standard deviation, both over the masked-in entries.

    Args:
        values: float. mask: bool, same shape, True counts.
    Returns:
        Same shape, float32 or better; 0 at masked positions and where all values are equal.
    Source: OpenRLHF: population variance (n), floored at 1e-8, over all tokens of the rollout.
    """
    centred = kept(values, mask)
    centred = kept(centred - masked_mean(centred, mask), mask)
    return centred * masked_mean(centred.square(), mask).clamp(min=VARIANCE_FLOOR).rsqrt() if scale else centred


@torch.no_grad()
def actor_critic(rollout: RolloutRewards, settings: AdvantageSettings) -> Advantages:
    """PPO's estimator: `gae` on shaped rewards and the critic's values, then `whiten` (advantages only, not returns).

    Source: Schulman et al. 2017, arXiv 1707.06347; whitening as in OpenRLHF.
    Raises:
        ValueError: the rollout has no values, or as in `shape_rewards`.
    """
    if rollout.values is None:
        raise ValueError("the estimator 'gae' needs the values of a critic; choose another one to train without")
    loss_mask = rollout.mask & rollout.scored.unsqueeze(1)
    rewards = shape_rewards(rollout.score.nan_to_num(0.0), rollout.kl, rollout.mask, rollout.kl_coef, rollout.dense)
    advantages, returns = gae(rewards, rollout.values, rollout.mask, settings.gamma, settings.gae_lambda)
    return Advantages(whiten(advantages, loss_mask, settings.scale), kept(returns, loss_mask), loss_mask)


@torch.no_grad()
def reinforce(rollout: RolloutRewards, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++: rewards to come, whitened over the rollout; no critic and no groups.

        A_t = whiten(sum over s >= t of gamma^(s - t) r_s),  s and t counted in tokens of the policy

    Source: Hu 2025, arXiv 2501.03262, and OpenRLHF.
    """
    return _rewards_to_come(rollout, settings, torch.zeros_like(rollout.total), None, rollout.scored, whitened=True)


@torch.no_grad()
def rloo(rollout: RolloutRewards, settings: AdvantageSettings) -> Advantages:
    """REINFORCE leave-one-out: the baseline of a response is the mean of the other responses to its prompt.

        b_i = sum over j != i of R_j / (n - 1),   R = score + sum of dense rewards

    Source: Ahmadian et al. 2024, arXiv 2402.14740, and OpenRLHF. In the paper R holds the KL penalty too, so the
        baseline does; in OpenRLHF and here the baseline is of R without KL, and the KL penalty is of the token.
    """
    figures = group_figures(rollout.total, rollout.group)
    others = (figures.total - rollout.total.nan_to_num(0.0)) / (figures.scored - 1).clamp(min=1)
    return _within_groups(rollout, settings, figures, others, None, whitened=False)


@torch.no_grad()
def reinforce_baseline(rollout: RolloutRewards, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++-baseline: less the mean of the group, then whitened over the rollout.

    The mean holds the response itself, which scales R - b by (n - 1)/n but not the KL penalty.
    Source: Hu 2025, arXiv 2501.03262, and OpenRLHF.
    """
    figures = group_figures(rollout.total, rollout.group)
    return _within_groups(rollout, settings, figures, figures.mean, None, whitened=True)


@torch.no_grad()
def group_norm(rollout: RolloutRewards, settings: AdvantageSettings) -> Advantages:
    """GRPO: less the mean of the group, divided by its standard deviation (n - 1) + 1e-9.

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1, and OpenRLHF. The paper adds the KL divergence to the loss
        (k3); OpenRLHF and here it is in the reward, undivided, unless it is switched to the loss.
    """
    figures = group_figures(rollout.total, rollout.group)
    return _within_groups(rollout, settings, figures, figures.mean, figures.std + STD_EPS, whitened=False)


@torch.no_grad()
def dr_grpo(rollout: RolloutRewards, settings: AdvantageSettings) -> Advantages:
    """Dr. GRPO: less the mean of the group, not divided by anything.

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2, and OpenRLHF. Its second half, a sum over tokens divided by
        a constant, is reduction 'constant' of `ppo_policy_loss`; OpenRLHF leaves that out.
    """
    figures = group_figures(rollout.total, rollout.group)
    return _within_groups(rollout, settings, figures, figures.mean, None, whitened=False)


ESTIMATORS: dict[str, Callable[[RolloutRewards, AdvantageSettings], Advantages]] = {
    "gae": actor_critic,
    "reinforce": reinforce,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "group_norm": group_norm,
    "dr_grpo": dr_grpo,
}


def _within_groups(rollout, settings, figures, baseline, scale, whitened) -> Advantages:
    """Rewards to come of the responses that can be compared: scored, another scored one beside them, not all equal."""
    if (figures.size == 1).any():
        rows = (figures.size == 1).nonzero().flatten().tolist()
        raise ValueError(
            f"responses {rows[:5]} are the only ones to their prompts; an estimator that compares the responses to a "
            "prompt needs two or more (samples_per_prompt), all of them in one call"
        )
    if settings.gamma != 1:
        raise ValueError(f"estimators that compare whole responses know no discount, got gamma={settings.gamma}")
    used = rollout.scored & (figures.scored > 1)
    if settings.drop_equal:
        used = used & ~figures.equal
    return _rewards_to_come(rollout, settings, baseline, scale, used, whitened)


def _rewards_to_come(rollout, settings, baseline, scale, used, whitened) -> Advantages:
    """Discounted sums of ((score - baseline) at the last token + dense rewards) / scale - KL penalty.

    baseline, scale: (B,); scale None is 1. used: (B,) bool, the responses with a part in the loss.
    """
    score = torch.where(used, at_least_float32(rollout.score) - baseline, 0.0).to(rollout.total.dtype)
    dense = rollout.dense
    if scale is not None:
        factor = torch.where(used, 1 / scale, 0.0).to(score.dtype)
        score = score * factor
        dense = None if dense is None else kept(dense, rollout.mask) * factor.unsqueeze(1)
    rewards = shape_rewards(score, rollout.kl, rollout.mask, rollout.kl_coef, dense)
    returns, _ = gae(rewards, torch.zeros_like(rewards), rollout.mask, settings.gamma)
    loss_mask = rollout.mask & used.unsqueeze(1)
    returns = kept(returns, loss_mask)
    return Advantages(whiten(returns, loss_mask, settings.scale) if whitened else returns, returns, loss_mask)
