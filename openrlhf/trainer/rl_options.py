"""Which choices of a reinforcement-learning run go together; without torch, so that flags are refused at once."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from openrlhf.models.policy_options import check_policy_loss
from openrlhf.trainer.kl_control import make_kl_controller


@dataclass(frozen=True)
class EstimatorTraits:
    """What an advantage estimator needs."""

    critic: bool  # values of a critic
    groups: bool  # two or more responses to each prompt
    whitened: bool  # advantages of a rollout are shifted to mean 0 and, unless switched off, scaled to variance 1


# The names in the table of openrlhf.trainer.advantages, whose import takes seconds; a test keeps them equal.
ESTIMATOR_TRAITS = {
    "gae": EstimatorTraits(critic=True, groups=False, whitened=True),
    "reinforce": EstimatorTraits(critic=False, groups=False, whitened=True),
    "rloo": EstimatorTraits(critic=False, groups=True, whitened=False),
    "reinforce_baseline": EstimatorTraits(critic=False, groups=True, whitened=True),
    "group_norm": EstimatorTraits(critic=False, groups=True, whitened=False),
    "dr_grpo": EstimatorTraits(critic=False, groups=True, whitened=False),
}


def check_range(name: str, low: float, high: float) -> None:
    """Refuse a range that is empty or not made of numbers."""
    if not low < high:
        raise ValueError(f"{name} must be two numbers, the lower one first, got {low} and {high}")


def check_discounts(gamma: float, gae_lambda: float) -> None:
    """Refuse discounts outside of their ranges."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma must lie in (0, 1], got {gamma}")
    if not 0 <= gae_lambda <= 1:
        raise ValueError(f"gae_lambda must lie in [0, 1], got {gae_lambda}")


def check_overlong(limit: int, buffer: int, factor: float) -> None:
    """Refuse a buffer that is no part of the limit, and a penalty that rewards."""
    if not 0 < buffer <= limit:
        raise ValueError(f"the overlong buffer must be 1 to {limit} tokens (the longest response), got {buffer}")
    if not 0 <= factor < math.inf:
        raise ValueError(f"the overlong penalty factor must be 0 or more, got {factor}")


def check_stop_properly(coef: float) -> None:
    """Refuse a factor that makes truncated responses better."""
    if not -math.inf < coef <= 1:
        raise ValueError(
            f"the stop-properly coefficient must be a factor in [0, 1] or a fixed negative reward, got {coef}"
        )


def check_algorithm(
    estimator: str,
    samples_per_prompt: int,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    kl_coef: float = 0.0,
    kl_target: float | None = None,
    kl_horizon: float = 10_000,
    reward_clip_range: tuple[float, float] | None = None,
    filter_range: tuple[float, float] | None = None,
    longest_response: int | None = None,
    overlong_buffer: int | None = None,
    overlong_factor: float = 1.0,
    stop_properly_coef: float | None = None,
    **policy_loss,
) -> None:
    """Refuse choices that do not go together, before anything is loaded.

    Args:
        estimator: a name of `ESTIMATOR_TRAITS`.
        samples_per_prompt: responses to each prompt.
        filter_range: dynamic filtering keeps prompts whose mean score lies strictly inside; None: no filtering.
        longest_response: tokens. overlong_buffer: tokens before that with a growing penalty; None: no penalty.
        policy_loss: the settings of `openrlhf.models.policy_options.check_policy_loss`.
    Raises:
        ValueError: names what was given and what to do.
    """
    if estimator not in ESTIMATOR_TRAITS:
        near = difflib.get_close_matches(estimator, ESTIMATOR_TRAITS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown advantage estimator {estimator!r}{hint}; known: {', '.join(ESTIMATOR_TRAITS)}")
    traits = ESTIMATOR_TRAITS[estimator]
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt must be 1 or more, got {samples_per_prompt}")
    check_discounts(gamma, gae_lambda)
    if samples_per_prompt == 1 and (traits.groups or filter_range is not None):
        needs = f"the estimator {estimator!r}" if traits.groups else "dynamic filtering"
        other = ", or choose reinforce or gae" if traits.groups else ""
        raise ValueError(
            f"{needs} compares responses to one prompt and learns nothing from a single one; raise "
            f"samples_per_prompt (--n_samples_per_prompt) to 2 or more{other}"
        )
    if traits.groups and gamma != 1:
        raise ValueError(f"{estimator!r} compares whole responses and knows no discount, got gamma={gamma}; pass 1")
    if not traits.critic and gae_lambda != 1:
        raise ValueError(f"gae_lambda={gae_lambda} has no effect without a critic ({estimator!r}); leave it at 1")
    make_kl_controller(kl_coef, kl_target, kl_horizon)
    for name, ends in (("reward_clip_range", reward_clip_range), ("dynamic filtering's range", filter_range)):
        if ends is not None:
            check_range(name, *ends)
    if overlong_buffer is not None:
        if longest_response is None:
            raise ValueError("an overlong buffer needs to know the longest response allowed, got None")
        check_overlong(longest_response, overlong_buffer, overlong_factor)
    if stop_properly_coef is not None:
        check_stop_properly(stop_properly_coef)
    check_policy_loss(**policy_loss)
