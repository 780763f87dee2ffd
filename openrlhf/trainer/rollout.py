"""Sampled responses with everything that an update needs: rewards, log-probabilities, KL divergence and values.

Columns are those of whole sequences, prompt included: with an agent the policy's tokens lie in several pieces. Log-
probabilities are those of `rollout_logprobs`; those that sampling gave are not used.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openrlhf.datasets.prompts import PromptData
from openrlhf.evaluation.batching import pad_right
from openrlhf.models.generation import PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.models.sampling import SamplingParams, mix_seed, spread_seeds
from openrlhf.rewards.agent import run_episodes
from openrlhf.rewards.episode import mean_logs
from openrlhf.rewards.source import RewardRequest, RewardSource

_PER_ROW = ("group", "reward", "score", "truncated")
_PER_TOKEN = ("input_ids", "attention_mask", "action_mask", "dense")
_COMPUTED = ("logprobs", "entropy", "reference_logprobs", "values")


@dataclass(frozen=True)
class Rollout:
    """N sequences of at most S tokens, padded on the right; the samples of one prompt stand together.

    Everything lies on the CPU. Columns outside of action_mask hold 0 in the float tensors.
    """

    input_ids: Tensor  # (N, S) int64
    attention_mask: Tensor  # (N, S) bool, True on real tokens
    action_mask: Tensor  # (N, S) bool, True on the policy's own tokens, at least one a row
    group: Tensor  # (N,) int64, equal for the samples of one prompt
    reward: Tensor  # (N,) float32 of the whole response, or of an agent's last step, reward units; NaN: not scored
    score: Tensor  # (N,) float32, what dynamic filtering reads; NaN: not scored
    truncated: Tensor  # (N,) bool, ended by a limit
    dense: Tensor | None = None  # (N, S) float32, rewards of single tokens, reward units
    logprobs: Tensor | None = None  # (N, S) float32 of the policy that sampled, nats; None until `with_logprobs`
    entropy: Tensor | None = None  # (N, S) float32 of the distribution each token was drawn from, nats
    reference_logprobs: Tensor | None = None  # (N, S) float32, nats; None without a reference
    values: Tensor | None = None  # (N, S) float32, the critic before each token; None without a critic
    logs: dict[str, float] = field(default_factory=dict)  # of the reward source, and seconds
    samples: list[dict[str, Any]] = field(default_factory=list)  # N of prompt, response, reward: for people

    def __post_init__(self) -> None:
        rows, shape = self.input_ids.shape[:1], self.input_ids.shape
        for names, expected in ((_PER_ROW, rows), (_PER_TOKEN + _COMPUTED, shape)):
            for name in names:
                tensor = getattr(self, name)
                if tensor is not None and tensor.shape != expected:
                    raise ValueError(f"expected {name} of shape {tuple(expected)}, got {tuple(tensor.shape)}")
        if not self.action_mask.any(dim=1).all():
            raise ValueError("a response without a token of the policy; there is nothing to learn from")

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> Tensor:
        """(N,) int64 tokens of each whole sequence."""
        return self.attention_mask.sum(dim=1)

    @property
    def total(self) -> Tensor:
        """(N,) reward and dense rewards together; NaN: not scored."""
        return self.reward if self.dense is None else self.reward + self.dense.sum(dim=1)

    @property
    def computed(self) -> dict[str, Tensor]:
        """What `with_logprobs` has added, by name."""
        named = {name: getattr(self, name) for name in _COMPUTED}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_computed(self, parts: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> Rollout:
        """The rollout with what was computed for its rows in several parts.

        Args:
            parts: (n,) int64 rows and the `computed` of a `select` of them; together they hold every row once.
        """
        filled = {name: torch.zeros(self.input_ids.shape) for name in parts[0][1]}
        for rows, computed in parts:
            for name, tensor in computed.items():
                filled[name][rows, : tensor.shape[1]] = tensor
        return dataclasses.replace(self, **filled)

    def select(self, rows: Tensor) -> Rollout:
        """Only these rows, (n,) int64, cut to the longest of them."""
        width = int(self.lengths[rows].max())
        parts = {name: getattr(self, name) for name in _PER_ROW + _PER_TOKEN + _COMPUTED}
        cut = {
            name: None if tensor is None else tensor[rows] if name in _PER_ROW else tensor[rows, :width]
            for name, tensor in parts.items()
        }
        return dataclasses.replace(self, **cut, samples=[self.samples[i] for i in rows.tolist()])

    @staticmethod
    def join(parts: Sequence[Rollout], pad_id: int, at_once: bool = False) -> Rollout:
        """Several rollouts one behind the other; logs are weighted by their responses.

        Args:
            at_once: made at the same time, by several processes: seconds are those of the slowest, not added up.
        """
        width = max(part.input_ids.shape[1] for part in parts)
        joined = {}
        for name in _PER_ROW + _PER_TOKEN + _COMPUTED:
            tensors = [getattr(part, name) for part in parts]
            if all(tensor is None for tensor in tensors):
                continue
            if name not in _PER_ROW:
                fill = pad_id if name == "input_ids" else 0
                like = [
                    torch.zeros(part.input_ids.shape) if tensor is None else tensor
                    for part, tensor in zip(parts, tensors, strict=True)
                ]
                tensors = [nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in like]
            joined[name] = torch.cat(tensors)
        logs = join_logs([(part.logs, len(part)) for part in parts], at_once)
        return Rollout(**joined, logs=logs, samples=[one for part in parts for one in part.samples])


def join_logs(parts: Sequence[tuple[Mapping[str, float], int]], at_once: bool = False) -> dict[str, float]:
    """Logs of several parts, weighted by how many responses each is over; seconds add up.

    Args:
        parts: logs and responses of each.
        at_once: see `Rollout.join`.
    """
    joined = {}
    for name in dict.fromkeys(name for logs, _ in parts for name in logs):
        held = [(logs[name], count) for logs, count in parts if name in logs]
        if name.startswith("seconds"):
            joined[name] = (max if at_once else sum)(value for value, _ in held)
        else:
            joined[name] = sum(value * count for value, count in held) / sum(count for _, count in held)
    return joined


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128  # of one response, or of one action of an agent
    max_len: int = 2048  # tokens of a whole episode with an agent
    batch_tokens: int = 65_536  # of one forward pass of sampling

    def params(self, seed: int) -> SamplingParams:
        """Of a response, or of one action of an agent."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_new_tokens, seed=seed)


def base_seed(seed: int, position: int, stream: int = 0) -> int:
    """Seed of the draws for the prompts from this position of the stream of prompts on."""
    return mix_seed(seed, position, stream)


def sample_rollout(
    policy: Policy,
    prompts: PromptData,
    indices: Sequence[int],
    reward: RewardSource,
    sampling: Sampling,
    *,
    samples_per_prompt: int = 1,
    seed: int = 0,
    first_group: int = 0,
    first_sample: int = 0,
    step: int | None = None,
    epoch: int | None = None,
) -> Rollout:
    """Responses to some prompts, scored in one call of the reward source.

    Args:
        indices: P prompts. seed: of all draws; a response depends on it and on its number, not on batches.
        first_group, first_sample: numbers of the first prompt's group and of the first response; the others count on.
        step, epoch: told to the reward source.
    Returns:
        P * samples_per_prompt responses, without log-probabilities.
    """
    request, sampled, spent = request_rewards(
        policy, prompts, indices, sampling, samples_per_prompt=samples_per_prompt, seed=seed,
        first_sample=first_sample, step=step, epoch=epoch,
    )  # fmt: skip
    start = time.monotonic()
    result = reward.score(request)
    if len(result.rewards) != len(request):
        raise ValueError(f"{reward.name}: expected {len(request)} rewards, got {len(result.rewards)}")
    input_ids, attention_mask = pad_right(
        [prompt + response for prompt, response in zip(request.prompt_ids, request.response_ids, strict=True)],
        policy.tokenizer.pad_token_id,
        "cpu",
    )
    columns = torch.arange(input_ids.shape[1])
    prompt_lengths = torch.tensor([len(ids) for ids in request.prompt_ids])
    action_mask = attention_mask & (columns >= prompt_lengths.unsqueeze(1))
    dense = None
    if result.dense is not None:
        dense = torch.zeros(input_ids.shape)
        for row, tokens in enumerate(result.dense):
            if len(tokens) != len(request.response_ids[row]):
                raise ValueError(
                    f"{reward.name}: sample {row} has {len(request.response_ids[row])} tokens and {len(tokens)} dense "
                    "rewards"
                )
            begin = int(prompt_lengths[row])
            dense[row, begin : begin + len(tokens)] = torch.from_numpy(np.asarray(tokens, np.float32))
    scored = result.metrics()
    logs = {f"{reward.name}/{name}": value for name, value in scored.items() if name not in ("mean", "std", "unscored")}
    return Rollout(
        input_ids=input_ids,
        attention_mask=attention_mask,
        action_mask=action_mask,
        group=first_group + torch.arange(len(indices)).repeat_interleave(samples_per_prompt),
        reward=torch.from_numpy(result.rewards.copy()),
        score=torch.from_numpy(result.scores.copy()),
        truncated=torch.tensor([one.ended == "length" for one in sampled]),
        dense=dense,
        logs={**logs, "seconds_sampling": spent, "seconds_reward": time.monotonic() - start},
        samples=[
            {"prompt": prompt, "response": response, "reward": None if np.isnan(value) else float(value)}
            for prompt, response, value in zip(request.prompts, request.responses, result.rewards, strict=True)
        ],
    )


def request_rewards(
    policy: Policy,
    prompts: PromptData,
    indices: Sequence[int],
    sampling: Sampling,
    *,
    samples_per_prompt: int = 1,
    seed: int = 0,
    first_sample: int = 0,
    step: int | None = None,
    epoch: int | None = None,
) -> tuple[RewardRequest, list[Any], float]:
    """Sample responses and make the request for their rewards; see `sample_rollout`.

    Returns:
        The request, N sampled responses, and the seconds that sampling took.
    """
    start = time.monotonic()
    rows = [int(index) for index in indices for _ in range(samples_per_prompt)]
    params = spread_seeds(sampling.params(seed), len(rows), first_sample)
    sampled = policy.sample([prompts.ids[i] for i in rows], params, sampling.batch_tokens)
    request = RewardRequest.from_tokens(
        policy.tokenizer,
        [prompts.texts[i] for i in rows],
        [prompts.ids[i] for i in rows],
        [one.ids for one in sampled],
        labels=None if prompts.labels is None else [prompts.labels[i] for i in rows],
        inputs=[prompts.inputs[i] for i in rows],
        columns={name: [values[i] for i in rows] for name, values in prompts.columns.items()},
        step=step,
        epoch=epoch,
        group_size=samples_per_prompt,
    )
    return request, sampled, time.monotonic() - start


def episode_rollout(
    engine: PolicyEngine,
    prompts: PromptData,
    indices: Sequence[int],
    executor: Any,
    sampling: Sampling,
    *,
    samples_per_prompt: int = 1,
    seed: int = 0,
    first_group: int = 0,
    first_sample: int = 0,
) -> Rollout:
    """Episodes of an agent in place of responses; arguments and result as of `sample_rollout`.

    The reward of the last step is that of the response, those of earlier steps are dense rewards at the last token of
    their action. An episode with an unscored step is not scored.
    """
    start = time.monotonic()
    rows = [int(index) for index in indices for _ in range(samples_per_prompt)]
    episodes = run_episodes(
        executor,
        [prompts.texts[i] for i in rows],
        [None if prompts.labels is None else prompts.labels[i] for i in rows],
        sampling.params(seed),
        sampling.max_len,
        engine.policy.tokenizer,
        engine,
        first_sample,
    )
    tokenizer = engine.policy.tokenizer
    input_ids, attention_mask = pad_right([one.token_ids for one in episodes], tokenizer.pad_token_id, "cpu")
    action_mask = torch.zeros_like(attention_mask)
    dense = torch.zeros(input_ids.shape)
    last = []
    for row, episode in enumerate(episodes):
        width = len(episode.token_ids)
        action_mask[row, :width] = episode.action_mask
        dense[row, :width] = episode.dense_rewards
        dense[row, episode.action_ranges[-1][1] - 1] = 0.0
        last.append(np.nan if episode.reward is None else episode.step_rewards[-1])
    totals = [np.nan if one.reward is None else float(one.reward) for one in episodes]
    scores = [np.nan if one.scores is None else float(one.scores) for one in episodes]
    return Rollout(
        input_ids=input_ids,
        attention_mask=attention_mask,
        action_mask=action_mask,
        group=first_group + torch.arange(len(indices)).repeat_interleave(samples_per_prompt),
        reward=torch.tensor(last, dtype=torch.float32),
        score=torch.tensor(scores, dtype=torch.float32),
        truncated=torch.tensor([one.truncated for one in episodes]),
        dense=dense,
        logs={f"agent/{name}": value for name, value in mean_logs(episodes).items()}
        | {
            "turns": sum(one.turns for one in episodes) / len(episodes),
            "seconds_sampling": time.monotonic() - start,
        },
        samples=[
            {
                "prompt": one.prompt,
                "response": tokenizer.decode(list(one.token_ids[len(one.prompt_ids) :])),
                "reward": None if np.isnan(total) else total,
            }
            for one, total in zip(episodes, totals, strict=True)
        ],
    )
