"""What gives rewards: the request, the result, and one protocol for functions, servers, models and sums of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from openrlhf.datasets.tokenize import decode_response_with_ends
from openrlhf.rewards.numbers import Logs, normalize_groups

_PER_SAMPLE = ("prompts", "responses", "labels", "inputs", "prompt_ids", "response_ids", "token_ends")


@dataclass(frozen=True)
class RewardRequest:
    """N sampled responses; the samples of one prompt stand together."""

    queries: list[str]  # N, prompt and response as one text, special tokens of the response (EOS) written out
    prompts: list[str]  # N, as the policy reads them; each query starts with its prompt
    responses: list[str]  # N, without special tokens
    labels: list[Any] | None = None  # N, the label column; None where the data has none
    inputs: list[Any] | None = None  # N, the prompt as the data holds it: question, or messages before the answer
    prompt_ids: list[list[int]] | None = None  # N, the policy's tokens
    response_ids: list[list[int]] | None = None  # N of A_i tokens
    token_ends: list[list[int]] | None = None  # N of A_i, character of the response where each token ends
    columns: Mapping[str, list[Any]] = field(default_factory=dict)  # further columns of the data, N each
    step: int | None = None  # optimizer steps so far
    epoch: int | None = None
    group_size: int = 1  # samples of each prompt

    def __post_init__(self) -> None:
        count = len(self.queries)
        sizes = {name: len(getattr(self, name)) for name in _PER_SAMPLE if getattr(self, name) is not None}
        wrong = {name: size for name, size in (sizes | _lengths(self.columns)).items() if size != count}
        if wrong or count == 0:
            raise ValueError(f"expected a reward request of one value a sample, got {count} queries and {wrong}")
        if self.group_size < 1 or count % self.group_size:
            raise ValueError(f"expected {count} samples in groups of equal size, got group_size {self.group_size}")

    def __len__(self) -> int:
        return len(self.queries)

    @classmethod
    def from_tokens(
        cls,
        tokenizer: Any,
        prompts: Sequence[str],
        prompt_ids: Sequence[list[int]],
        response_ids: Sequence[list[int]],
        **others: Any,
    ) -> RewardRequest:
        """The request for N responses that a policy has sampled.

        Args:
            tokenizer: the policy's.
            prompts: N rendered prompts. prompt_ids, response_ids: N lists of their tokens and of what was sampled.
            others: further fields.
        """
        pairs = list(zip(prompt_ids, response_ids, strict=True))
        decoded = [decode_response_with_ends(tokenizer, *pair) for pair in pairs]
        written = [decode_response_with_ends(tokenizer, *pair, keep_special=True)[0] for pair in pairs]
        return cls(
            queries=[prompt + text for prompt, text in zip(prompts, written, strict=True)],
            prompts=list(prompts),
            responses=[text for text, _ in decoded],
            prompt_ids=list(prompt_ids),
            response_ids=list(response_ids),
            token_ends=[ends for _, ends in decoded],
            **others,
        )

    def part(self, start: int, stop: int) -> RewardRequest:
        """The samples from `start` to before `stop`, in groups of their own."""
        parts = {name: getattr(self, name) for name in ("queries", *_PER_SAMPLE)}
        parts = {name: None if values is None else values[start:stop] for name, values in parts.items()}
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        return dataclasses.replace(self, **parts, columns=columns, group_size=1)


@dataclass(frozen=True)
class RewardResult:
    """Rewards of N responses."""

    rewards: np.ndarray  # (N,) float32, for the whole response; NaN: not scored
    scores: np.ndarray  # (N,) float32, what dynamic filtering reads, 0 to 1 by convention; NaN: not scored
    dense: list[np.ndarray] | None = None  # N of (A_i,) float32, added token by token to the reward at the end
    extra_logs: Logs = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rewards", "scores"):
            array = getattr(self, name)
            if array.ndim != 1 or array.shape != self.rewards.shape or array.dtype != np.float32:
                raise ValueError(f"expected {name} of shape (N,) and float32, got {array.shape} {array.dtype}")
        if self.dense is not None and len(self.dense) != len(self.rewards):
            raise ValueError(f"expected dense rewards of {len(self.rewards)} samples, got {len(self.dense)}")

    def metrics(self) -> dict[str, float]:
        """Mean, sample std (n - 1) and unscored share of the rewards, and the mean of every extra log."""
        return _summary(self.rewards, "") | {
            name: float(np.nanmean(values))
            for name, values in self.extra_logs.items()
            if not np.isnan(values).all()  # of nothing at all too
        }


class RewardSource(Protocol):
    """What scores responses. A failure is an exception, never a number."""

    name: str  # in logs and errors

    def score(self, request: RewardRequest) -> RewardResult:
        """Rewards in the order of the samples.

        Raises:
            ValueError: an answer that cannot be used, or a request that lacks what the source needs.
            RuntimeError: a function or a server failed.
        """

    def close(self) -> None:
        """Give back connections and threads."""


class WeightedSum:
    """Several sources as one: each sample's reward is the weighted sum over the sources that scored it.

    A sample that no source scored is not scored. The score for dynamic filtering is the weighted mean of the scores,
    over the sources of positive weight. Every source's mean, std and unscored share are logged under its name.

    Args:
        weights: one a source; 0 only logs it.
        normalize_first: give each source's rewards mean 0 and standard deviation 1 within the samples of a prompt
            before they are summed (`normalize_then_sum`); dense rewards are weighted only. False leaves it to the
            advantages (`sum_then_normalize`).
    Raises:
        ValueError: no source, another number of weights, or one that is not finite.
    """

    def __init__(
        self, sources: Sequence[RewardSource], weights: Sequence[float] | None = None, normalize_first: bool = False
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else [float(weight) for weight in weights]
        if not sources or len(weights) != len(sources):
            names = [source.name for source in sources]
            raise ValueError(f"--reward_weights: expected one weight for each of {names}, got {weights}")
        if not all(map(math.isfinite, weights)) or not any(weights):
            raise ValueError(f"--reward_weights: expected finite weights that are not all 0, got {weights}")
        self.sources = list(sources)
        self.weights = weights
        self.normalize_first = normalize_first
        self.names = _distinct([source.name for source in sources])
        self.name = " + ".join(f"{weight:g} {name}" for weight, name in zip(weights, self.names, strict=True))

    def score(self, request: RewardRequest) -> RewardResult:
        """See `RewardSource.score`; ValueError also for groups of one with `normalize_first`."""
        if self.normalize_first and request.group_size < 2:
            raise ValueError("normalize_then_sum needs several samples a prompt; raise --n_samples_per_prompt")
        results = [source.score(request) for source in self.sources]
        logs: Logs = {}
        for name, source, result in zip(self.names, self.sources, results, strict=True):
            if len(result.rewards) != len(request):
                raise ValueError(f"{source.name}: expected {len(request)} rewards, got {len(result.rewards)}")
            logs |= _summary(result.rewards, f"{name}/")
            logs |= {f"{name}/{key}": values for key, values in result.extra_logs.items()}
        rewards = [result.rewards for result in results]
        if self.normalize_first:
            rewards = [normalize_groups(values, request.group_size) for values in rewards]
        positive = [weight if weight > 0 else 0.0 for weight in self.weights]
        total = _weighted_sum(rewards, self.weights)
        scores = total
        if any(positive):
            sums = _weighted_sum([result.scores for result in results], positive)
            shares = _weighted_sum([np.where(np.isnan(r.scores), np.nan, 1.0) for r in results], positive)
            scores = np.divide(sums, shares, out=np.full_like(sums, np.nan), where=shares > 0)
        dense = [
            [weight * tokens for tokens in result.dense]
            for weight, result in zip(self.weights, results, strict=True)
            if result.dense is not None
        ]
        summed = [np.sum(parts, axis=0, dtype=np.float32) for parts in zip(*dense, strict=True)] if dense else None
        return RewardResult(total.astype(np.float32), scores.astype(np.float32), summed, logs)

    def close(self) -> None:
        """Close every source."""
        for source in self.sources:
            source.close()


def parse_reward_source(
    spec: str,
    *,
    find_checkpoint: Callable[[str], Any] | None = None,
    goal_state_path: str | None = None,
    goal_shaping_coef: float = 0.0,
    gamma: float = 1.0,
    normalize_reward: bool = False,
    bf16: bool = False,
    timeout_s: float | None = None,
    tries: int = 5,
    token: str | None = None,
) -> RewardSource:
    """The reward source that a flag names.

    Args:
        spec: a Python file with `reward_func` (`FILE.py`, or `FILE.py:NAME` for another function), one URL or a comma
            list of URLs of equal reward servers, or a reward checkpoint (folder, hub id or s3:// address).
        find_checkpoint: how a checkpoint is found; the commands pass `find_checkpoint` of the module of that name.
        goal_state_path, goal_shaping_coef, gamma: goal shaping of a reward model; see `RewardModelSource`.
        normalize_reward: subtract the mean and divide by the std that the checkpoint records.
        bf16: compute a reward model in bfloat16.
        timeout_s: seconds for one call; None: 600 for a function, 180 for a request.
        tries: requests to a server before its failure counts.
        token: bearer token of the servers.
    Raises:
        ValueError: nothing usable at `spec`, or settings that do not go with it.
        RuntimeError: no server answers.
    """
    spec = spec.strip()
    schemes = [part.partition("://")[0].strip().lower() if "://" in part else "" for part in spec.split(",")]
    unknown = [scheme for scheme in schemes if scheme not in ("", "http", "https", "s3")]
    if unknown:  # the scheme alone: an address may hold a login
        raise ValueError(
            "expected an address that begins with http:// or https:// (a reward server) or s3:// (a checkpoint), got "
            f"{unknown[0]}://"
        )
    is_url = [scheme in ("http", "https") for scheme in schemes]
    file, _, function = spec.partition(".py:") if ".py:" in spec else (spec, "", "")
    is_file = bool(function) or spec.endswith(".py")
    if not spec or any(is_url) != all(is_url) or (is_file and "," in spec and not Path(spec).is_file()):
        raise ValueError(f"expected one reward source (a .py file, URLs, or a checkpoint), got {spec!r}")
    if (goal_state_path is None) != (goal_shaping_coef == 0):
        raise ValueError(
            "goal shaping needs --goal_state_path and a --goal_shaping_coef other than 0, "
            f"got {goal_state_path} and {goal_shaping_coef:g}"
        )
    if all(is_url) or is_file:
        if goal_state_path is not None or normalize_reward:
            flag = "--goal_state_path" if goal_state_path is not None else "--normalize_reward"
            raise ValueError(f"{flag} needs a reward model, {spec} is none")
        if is_file:
            from openrlhf.rewards.function import FunctionReward, load_reward_function

            path, name = (file + ".py", function) if function else (spec, "reward_func")
            return FunctionReward(load_reward_function(path, name), Path(path).stem, timeout_s or 600.0)
        from openrlhf.rewards.remote import RemoteReward

        source = RemoteReward(spec.split(","), token=token, timeout_s=timeout_s or 180.0, tries=tries)
        source.check()
        return source
    if find_checkpoint is None:
        raise ValueError(f"{spec} is neither a .py file nor a URL, and no way to find reward checkpoints was given")
    from openrlhf.rewards.model import RewardModelSource

    return RewardModelSource.from_checkpoint(
        find_checkpoint(spec),
        goal_state_path=goal_state_path,
        shaping_coef=goal_shaping_coef,
        gamma=gamma,
        normalize=normalize_reward,
        bf16=bf16,
    )


def _weighted_sum(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """(N,) float64 sum over the sources that are not NaN; NaN where all of those with a weight are."""
    used = [i for i, weight in enumerate(weights) if weight]
    stacked = np.stack([values[i] for i in used]).astype(np.float64)  # (sources, N)
    total = np.nansum(stacked * np.array(weights)[used, None], axis=0)
    return np.where(np.isnan(stacked).all(axis=0), np.nan, total)


def _summary(rewards: np.ndarray, prefix: str) -> dict[str, float]:
    scored = rewards[~np.isnan(rewards)].astype(np.float64)
    spread = {"mean": float(scored.mean())} if len(scored) else {}
    spread |= {"std": float(scored.std(ddof=1))} if len(scored) > 1 else {}
    figures = spread | {"unscored": 1 - len(scored) / len(rewards)}
    return {f"{prefix}{name}": value for name, value in figures.items()}


def _lengths(columns: Mapping[str, list[Any]]) -> dict[str, int]:
    return {name: len(values) for name, values in columns.items()}


def _distinct(names: Sequence[str]) -> list[str]:
    """Names with -2, -3, ... behind those that came before."""
    distinct: list[str] = []
    for name in names:
        tries = [name, *(f"{name}-{number}" for number in range(2, len(names) + 1))]
        distinct.append(next(one for one in tries if one not in distinct))
    return distinct
