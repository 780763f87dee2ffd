"""Agents: environments that answer a policy over several turns, and what runs one episode.

The contract is OpenRLHF's (0.9.1 and later): a class with `reset` and `step` for the environment, a class with
`execute` for the episode. Tokens stay what they were: each text is tokenised once and its ids are appended to those of
the episode; what the policy generated is never tokenised again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from openrlhf.datasets.tokenize import encode_continuations, encode_prompt
from openrlhf.models.generation import GenerationEngine
from openrlhf.models.sampling import spread_seeds
from openrlhf.rewards.agent_calls import AgentError, StepResult, call, construct, read_observation, read_step
from openrlhf.rewards.episode import Episode

logger = logging.getLogger(__name__)

MAX_TURNS = 16
STEP_LIMIT_S = 300.0


class AgentInstanceBase:
    """The environment of one episode; every sample gets an instance of its own.

    The methods may be coroutine functions, `__init__` too. Sync ones run in a thread.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called without arguments."""

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        """Start the episode.

        Args:
            states: `observation` and `prompt` (both the rendered prompt), `label`, `sampling_params`.
        Returns:
            A dictionary with `observation`, the text that the policy sees first, and where wanted `sampling_params`.
        """
        return states

    async def step(self, states: dict, **kwargs: Any) -> dict:
        """Answer one action of the policy.

        Args:
            states: `observation_text` (all text before the action), `action_text`, `label`, `sampling_params`.
        Returns:
            A dictionary with `rewards` (one number), `environment_feedback` (text appended for the policy), `done`, and
            where wanted `scores`, `extra_logs` (those of the last step count) and `sampling_params` of the next turn.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a step method")

    def close(self) -> Any:
        """Called once at the end of the episode, also of one that failed."""


class AgentExecutorBase:
    """Runs episodes; override `execute` for a loop of your own.

    Args:
        agent_instance_cls: class of the environment, with `reset` and `step`; not needed when `execute` is overridden.
        max_turns: actions of one episode at most; None: MAX_TURNS.
        rest: accepted and not used. Executors of OpenRLHF before 0.9.1 pass max_length, the engine, the tokenizer and a
            queue for results here; `execute` gets the first three, and returns its result.
    """

    agent_instance_cls: type | None = None  # defaults for subclasses that do not call this constructor
    max_turns: int = MAX_TURNS
    step_limit_s: float = STEP_LIMIT_S  # of one call of reset or step
    max_length = hf_tokenizer = llm_engine = None  # set for an `execute` that does not take them

    def __init__(self, agent_instance_cls: type | None = None, max_turns: int | None = None, *rest: Any) -> None:
        if agent_instance_cls is not None and not (
            inspect.isclass(agent_instance_cls) and callable(getattr(agent_instance_cls, "step", None))
        ):
            raise ValueError(
                f"expected a class with a step method, got {agent_instance_cls!r}; pass the class and not an instance: "
                "every sample gets a new one"
            )
        self.agent_instance_cls = agent_instance_cls
        if max_turns is not None:
            self.max_turns = max_turns

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: GenerationEngine | None = None,
        images: Any = None,
    ) -> dict:
        """Run one episode of the agent class.

        Args:
            prompt: rendered text.
            sampling_params: as SamplingParams; its max_tokens bounds one action, None leaves it to the context.
            max_length: tokens of the whole episode.
        Returns:
            prompt, label, reward (sum over steps; None if a step is not scored), step_rewards, scores, extra_logs,
            observation_tokens (all ids), action_ranges (half-open), rollout_log_probs (0 outside of actions),
            truncated, ended. Episode.of reads it.
        Raises:
            AgentError: the agent raises, hangs, or returns what cannot be read; names the turn.
            ValueError: the prompt leaves no room for an action, or there are images.
        """
        if self.agent_instance_cls is None:
            raise NotImplementedError(f"{type(self).__name__} needs an execute method or an agent class")
        if images:
            raise ValueError("images are not supported here: the policy takes text only")
        turns = _Turns(
            self.hf_tokenizer if hf_tokenizer is None else hf_tokenizer,
            self.llm_engine if llm_engine is None else llm_engine,
            self.max_length if max_length is None else max_length,
        )
        agent = await construct(self.agent_instance_cls)
        try:
            await self._play(agent, turns, prompt, label, sampling_params)
        finally:
            close = getattr(agent, "close", None)
            if callable(close):
                await call(close, {}, {}, self.step_limit_s)
        return {"prompt": prompt, "label": label, **turns.result()}

    async def _play(self, agent: Any, turns: _Turns, prompt: str, label: Any, params: Any) -> None:
        name = type(agent).__name__
        states = {"observation": prompt, "prompt": prompt, "label": label, "sampling_params": copy.copy(params)}
        reset = getattr(agent, "reset", None)
        returned = states if reset is None else await call(reset, states, states, self.step_limit_s)
        observation, changed = read_observation(returned, f"{name}.reset")
        params = _next_params(params, changed)
        turns.start(observation)
        while not turns.ended:
            before = turns.text
            action = await turns.act(params)
            states = {
                "observation_text": before,
                "action_text": action,
                "label": label,
                "sampling_params": copy.copy(params),
            }
            names = {"observation": before, "state": before, "action": action, "prompt": prompt, **states}
            title = f"{name}.step"
            try:
                returned = await call(agent.step, states, names, self.step_limit_s)
                step = read_step(returned, title, before + action)
            except AgentError as error:
                raise AgentError(f"turn {len(turns.action_ranges)}: {error}") from error
            turns.answer(step, self.max_turns)
            params = _next_params(params, step.sampling_params)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Runs episodes of an agent class.

    Args:
        agent_instance_cls: class with `reset` and `step`, made anew for every sample.
        max_turns: actions of one episode at most; None: MAX_TURNS.
    """

    def __init__(self, agent_instance_cls: type, max_turns: int | None = None) -> None:
        if agent_instance_cls is None:
            raise ValueError("MultiTurnAgentExecutor needs a class with reset and step, got None")
        super().__init__(agent_instance_cls, max_turns)


class _Turns:
    """The tokens of a running episode."""

    def __init__(self, tokenizer: Any, engine: GenerationEngine | None, max_length: int | None) -> None:
        if tokenizer is None or engine is None or max_length is None:
            raise ValueError("execute needs max_length, hf_tokenizer and llm_engine")
        self.tokenizer, self.engine, self.max_length = tokenizer, engine, max_length
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.action_ranges: list[tuple[int, int]] = []
        self.rewards: list[float | None] = []
        self.scores: float | None = None
        self.extra_logs: dict = {}
        self.ended = ""
        self.cut = False  # the last action reached its limit of tokens

    @property
    def room(self) -> int:
        return self.max_length - len(self.token_ids)

    def start(self, observation: str) -> None:
        self.text = observation
        self.token_ids = encode_prompt(self.tokenizer, observation)
        self.logprobs = [0.0] * len(self.token_ids)
        if not self.token_ids or self.room < 1:
            raise ValueError(
                f"the first observation has {len(self.token_ids)} tokens and the episode's limit is {self.max_length}: "
                "it needs at least one, and room for one more; raise the limit or leave the prompt out"
            )

    async def act(self, params: Any) -> str:
        """Let the policy continue; the text of its action."""
        params = copy.copy(params)
        params.max_tokens = min(getattr(params, "max_tokens", None) or self.room, self.room)
        generation = await self.engine.generate(list(self.token_ids), params)
        start = len(self.token_ids)
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.text += generation.text
        self.action_ranges.append((start, len(self.token_ids)))
        self.cut = generation.finish_reason == "length"
        return generation.text

    def answer(self, step: StepResult, max_turns: int) -> None:
        """Append the feedback, as much as there is room for, and tell whether the episode is over."""
        self.rewards.append(step.reward)
        self.scores = step.scores if step.scores is not None else self.reward
        self.extra_logs = step.extra_logs
        feedback = encode_continuations(self.tokenizer, [step.feedback])[0][: self.room]
        self.token_ids += feedback
        self.logprobs += [0.0] * len(feedback)
        self.text += step.feedback
        if step.done:
            self.ended = "done"
        elif len(self.action_ranges) >= max_turns:
            self.ended = "turns"
        elif self.room < 1:
            self.ended = "context"

    @property
    def reward(self) -> float | None:
        return None if None in self.rewards else sum(self.rewards)

    def result(self) -> dict:
        return {
            "reward": self.reward,
            "step_rewards": self.rewards,
            "scores": self.scores,
            "extra_logs": self.extra_logs,
            "observation_tokens": self.token_ids,
            "action_ranges": self.action_ranges,
            "rollout_log_probs": self.logprobs,
            "truncated": self.ended != "done" or self.cut,
            "ended": self.ended,
        }


def _next_params(params: Any, changed: Any) -> Any:
    """Sampling settings that an agent asked for; they keep the sample's seed where they name none."""
    if changed is None or changed is params:
        return params
    changed = copy.copy(changed)
    if getattr(changed, "seed", None) is None:
        changed.seed = getattr(params, "seed", None)
    return changed


async def gather_episodes(
    executor: Any,
    prompts: Sequence[str],
    labels: Sequence[Any],
    sampling_params: Any,
    max_length: int,
    tokenizer: Any,
    engine: GenerationEngine,
    first: int = 0,
) -> list[Episode]:
    """Run one episode for each prompt, all at once.

    Args:
        executor: has `execute`, as AgentExecutorBase.
        prompts, labels: N rendered prompts and what the agent gets as `label`; repeat a prompt for several samples.
        sampling_params: of all samples; sample i gets a seed made of the seed here and i.
        max_length: tokens of one episode.
        first: i of the first sample.
    Returns:
        N episodes in the order of the prompts.
    Raises:
        AgentError: an episode fails; names the sample and the cause. The other episodes are cancelled.
    """
    if len(prompts) != len(labels):
        raise ValueError(f"{len(prompts)} prompts and {len(labels)} labels")
    arguments = {"max_length": max_length, "hf_tokenizer": tokenizer, "llm_engine": engine}
    accepted = inspect.signature(executor.execute).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for name in [name for name in arguments if name not in accepted]:  # OpenRLHF before 0.9.1
            setattr(executor, name, arguments.pop(name))

    async def run(sample: int, params: Any) -> Episode:
        try:
            return Episode.of(await executor.execute(prompts[sample], labels[sample], params, **arguments))
        except Exception as error:
            told = error if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
            raise AgentError(f"sample {first + sample}: {told}") from error

    tasks = [asyncio.ensure_future(run(*one)) for one in enumerate(spread_seeds(sampling_params, len(prompts), first))]
    try:
        episodes = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    capped = sum(episode.ended == "turns" for episode in episodes)
    if capped:
        logger.warning(
            "%d of %d episodes were ended at the limit of turns; the agent never said done", capped, len(episodes)
        )
    return episodes


def run_episodes(*args: Any, **kwargs: Any) -> list[Episode]:
    """gather_episodes for callers without a running event loop."""
    return asyncio.run(gather_episodes(*args, **kwargs))
