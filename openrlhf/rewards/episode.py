"""The record of one episode: what a policy and an agent said to each other, and what it was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf.rewards.agent_calls import AgentError, read_number

_RESULT_KEYS = ("observation_tokens", "action_ranges", "reward")


@dataclass(frozen=True)
class Episode:
    """One finished episode of S tokens and T turns."""

    prompt: str  # as the executor got it; an agent's reset may have changed what the policy saw
    label: Any
    token_ids: tuple[int, ...]  # (S) prompt, then actions and feedback in turn
    action_ranges: tuple[tuple[int, int], ...]  # (T) half-open ranges of the policy's own tokens
    logprobs: tuple[float, ...] | None  # (S) nats at the time of sampling, 0 outside of actions; None: not known
    step_rewards: tuple[float | None, ...]  # (T) None: not scored
    reward: float | None  # of the whole episode; None: not scored, leave it out of means and of the loss
    scores: float | None  # for dynamic filtering
    extra_logs: Mapping[str, Any] = field(default_factory=dict)  # of the last step
    truncated: bool = False  # ended by a limit: turns, context, or the tokens of the last action
    ended: str = "done"  # "done", "turns" or "context"

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.action_ranges:
            if not end <= start < stop <= len(self.token_ids):
                raise AgentError(
                    f"action_ranges must be ordered, disjoint and inside the {len(self.token_ids)} tokens; got "
                    f"{list(self.action_ranges)}"
                )
            end = stop
        if not self.action_ranges or self.action_ranges[0][0] == 0:
            raise AgentError("an episode needs a prompt of at least one token and at least one action")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise AgentError(f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens")
        if len(self.step_rewards) != len(self.action_ranges):
            raise AgentError(f"{len(self.step_rewards)} step rewards for {len(self.action_ranges)} actions")

    @classmethod
    def of(cls, result: Any) -> Episode:
        """The record of what an executor's `execute` returned.

        Args:
            result: a dictionary with observation_tokens, action_ranges and reward; where present rollout_log_probs,
                scores, extra_logs, truncated, prompt, label, step_rewards, ended. Without step_rewards the reward
                belongs to the last action.
        Raises:
            AgentError: a missing key, a value of another type, or parts that contradict each other.
        """
        if not isinstance(result, Mapping):
            raise AgentError(
                f"execute returned {type(result).__name__}; expected a dictionary with the keys {list(_RESULT_KEYS)}. "
                "An override must return what super().execute(...) gives: there is no result queue"
            )
        missing = [key for key in _RESULT_KEYS if key not in result]
        if missing:
            raise AgentError(f"execute returned the keys {list(result)}, which lack {missing}")
        ranges = tuple((int(start), int(stop)) for start, stop in result["action_ranges"])
        reward = read_number(result["reward"], "'reward' of execute")
        steps = result.get("step_rewards")
        if steps is None or _sum(steps) != reward:  # an override may have changed the sum
            steps = [0.0] * (len(ranges) - 1) + [reward]
        logprobs = result.get("rollout_log_probs")
        scores = result.get("scores")
        return cls(
            prompt=result.get("prompt", ""),
            label=result.get("label"),
            token_ids=tuple(int(token) for token in result["observation_tokens"]),
            action_ranges=ranges,
            logprobs=None if logprobs is None else tuple(float(value) for value in logprobs),
            step_rewards=tuple(steps),
            reward=reward,
            scores=reward if scores is None else read_number(scores, "'scores' of execute"),
            extra_logs=dict(result.get("extra_logs") or {}),
            truncated=bool(result.get("truncated", False)),
            ended=result.get("ended", "done"),
        )

    @property
    def turns(self) -> int:
        """How many actions the policy took."""
        return len(self.action_ranges)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens before the first action."""
        return self.token_ids[: self.action_ranges[0][0]]

    @property
    def action_mask(self) -> Tensor:
        """(S,) bool, True on the policy's own tokens."""
        mask = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for start, stop in self.action_ranges:
            mask[start:stop] = True
        return mask

    @property
    def dense_rewards(self) -> Tensor:
        """(S,) float32: each step's reward at the last token of its action, 0 elsewhere and where it is not scored."""
        rewards = torch.zeros(len(self.token_ids))
        for (_, stop), reward in zip(self.action_ranges, self.step_rewards, strict=True):
            rewards[stop - 1] = reward or 0.0
        return rewards


def mean_logs(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean of every finite number in the extra logs, over the episodes that have it; texts and lists are left out."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.extra_logs.items():
            with suppress(AgentError):
                number = read_number(value, "")
                if number is not None:
                    found.setdefault(str(name), []).append(number)
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}


def _sum(rewards: Sequence[float | None]) -> float | None:
    return None if None in rewards else sum(rewards)
