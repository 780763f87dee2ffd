"""Reward models as reward sources: the reward at the end, and shaping by goal similarity along the response.

The shaping is potential-based (Ng, Harada and Russell 1999, "Policy invariance under reward transformations"): the
potential of a prefix is its goal similarity, the Q-value of the paper; see `potential_shaping`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.datasets.templates import message_text, render_chat_prompt, render_question
from openrlhf.datasets.tokenize import encode_dialogues_with_ends, encode_prompts, encode_responses_with_ends
from openrlhf.evaluation.batching import cut_windows
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.scoring import EncodedCompletion, ScoredCompletion, Scorer, fit_response
from openrlhf.models.reward_model import RewardModel, read_settings
from openrlhf.rewards.source import RewardRequest, RewardResult

logger = logging.getLogger(__name__)


class TextScorer:
    """Scores texts with a reward model, tokenised as in its training; used by one thread at a time.

    Args:
        model: set to eval mode.
        max_len: tokens of prompt + response + EOS; responses are cut, prompts never.
        goal: goal state of this model, for goal similarities; without one, scores are of the last token alone.
        batch_tokens: tokens of a forward pass; None: what suits the model's device.
        normalize: subtract the mean and divide by the standard deviation of rewards that the checkpoint records.
    Raises:
        ValueError: a goal of another hidden size, or nothing recorded to normalise with.
    """

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Any,
        max_len: int,
        *,
        goal: GoalState | None = None,
        batch_tokens: int | None = None,
        normalize: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.scorer = Scorer(model, goal, batch_tokens, last_only=goal is None)
        self.mean, self.std = 0.0, 1.0
        if normalize:
            recorded = read_settings(model.config)
            if recorded.get("reward_mean") is None or recorded.get("reward_std") is None:
                raise ValueError(
                    "--normalize_reward: the reward model records no mean and std of its rewards; train it with an "
                    "evaluation set, or drop the flag"
                )
            self.mean, self.std = recorded["reward_mean"], recorded["reward_std"] or 1.0

    def encode(self, prompts: Sequence[str], responses: Sequence[str]) -> list[EncodedCompletion]:
        """Token ids of N rendered prompts with their responses, which need not end in EOS."""
        texts = list(dict.fromkeys(prompts))
        known = dict(zip(texts, encode_prompts(self.tokenizer, texts), strict=True))
        encoded = encode_responses_with_ends(self.tokenizer, responses)
        pairs = zip(prompts, encoded, strict=True)
        return [fit_response(known[prompt], ids, self.max_len, ends) for prompt, (ids, ends) in pairs]

    def encode_dialogues(self, texts: Sequence[str]) -> list[EncodedCompletion]:
        """Token ids of N texts of prompt and response; all of it counts as response, and its end may be cut."""
        encoded = encode_dialogues_with_ends(self.tokenizer, texts)
        return [fit_response([], ids, self.max_len, ends) for ids, ends in encoded]

    def score(self, encoded: Sequence[EncodedCompletion]) -> list[ScoredCompletion]:
        """Scores of N texts, each as if it were alone; ValueError for a reward that is not finite."""
        scored: list[ScoredCompletion] = []
        for window in cut_windows(encoded, self.scorer.window_tokens):
            first = len(scored)
            scored += self.scorer.score(window, name_of=lambda i, first=first: f"sample {first + i}")
        return scored

    def rewards(self, scored: Sequence[ScoredCompletion]) -> np.ndarray:
        """(N,) float32, normalised if asked for; NaN where the prompt left no room."""
        raw = np.array([np.nan if one.reward is None else one.reward for one in scored], dtype=np.float64)
        return ((raw - self.mean) / self.std).astype(np.float32)


class RewardModelSource:
    """A reward model of this project, or any that transformers loads, as a reward source.

    Prompts are rendered by the reward model's template where the request has them as the data does, else taken as the
    policy reads them. Text is tokenised by the reward model's tokenizer, whatever the policy's is. With a goal, dense
    rewards for the policy's tokens come beside the reward; see `potential_shaping`.

    Args:
        template, apply_chat_template: how the model's prompts are rendered; None: prompts as the policy reads them.
        goal, shaping_coef, gamma: goal state, weight in reward units, and the discount of the training.
        max_len, batch_tokens, normalize: as for `TextScorer`.
    """

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Any,
        *,
        name: str = "reward_model",
        template: str | None = None,
        apply_chat_template: bool = False,
        max_len: int = 2048,
        goal: GoalState | None = None,
        shaping_coef: float = 0.0,
        gamma: float = 1.0,
        batch_tokens: int | None = None,
        normalize: bool = False,
    ) -> None:
        self.name = name
        self.texts = TextScorer(model, tokenizer, max_len, goal=goal, batch_tokens=batch_tokens, normalize=normalize)
        self.template = template
        self.apply_chat_template = apply_chat_template
        self.shaping_coef = shaping_coef if goal is not None else 0.0
        self.gamma = gamma
        self._told: set[str] = set()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Any,
        *,
        goal_state_path: str | Path | None = None,
        bf16: bool = False,
        **settings: Any,
    ) -> RewardModelSource:
        """The source of a checkpoint as `find_checkpoint` gives it; the goal state is read before the weights.

        Raises:
            ValueError: goals per question, a goal state of another checkpoint, or what loading raises.
        """
        goal = None if goal_state_path is None else checkpoint.load_goal(goal_state_path)
        if goal is not None and not isinstance(goal, GoalState):
            raise ValueError(f"{goal_state_path}: goal shaping needs one goal state, found goals per question")
        model, tokenizer = checkpoint.load(bf16)
        return cls(
            model,
            tokenizer,
            name=checkpoint.name,
            template=checkpoint.template,
            apply_chat_template=checkpoint.apply_chat_template,
            max_len=checkpoint.max_len,
            goal=goal,
            **settings,
        )

    def score(self, request: RewardRequest) -> RewardResult:
        """See `RewardSource.score`; a prompt that leaves no room for its response is not scored."""
        encoded = self.texts.encode(self._prompts(request), request.responses)
        self._tell_other_tokens(request, encoded)
        shapes = self.shaping_coef != 0
        scored = self.texts.score([_with_prompt_end(one) for one in encoded] if shapes else encoded)
        dense = None
        if shapes:
            if request.response_ids is None:
                raise ValueError(f"{self.name}: goal shaping needs the policy's tokens (response_ids) in the request")
            dense = [self._shaping(request, i, *pair) for i, pair in enumerate(zip(encoded, scored, strict=True))]
        rewards = self.texts.rewards(scored)
        truncated = sum(one.truncated for one in encoded) / len(encoded)
        return RewardResult(rewards, rewards, dense, {"truncated": truncated})

    def close(self) -> None:
        """Nothing to give back."""

    def _prompts(self, request: RewardRequest) -> list[str]:
        if self.template is None or request.inputs is None:
            return request.prompts
        rendered = []
        for given, prompt in zip(request.inputs, request.prompts, strict=True):
            if not isinstance(given, str) and not self.apply_chat_template and len(given) == 1:
                given = message_text(given[0])
            if isinstance(given, str):
                how = {"template": self.template, "apply_chat_template": self.apply_chat_template}
                rendered.append(render_question(given, self.texts.tokenizer, **how))
            elif self.apply_chat_template:
                rendered.append(render_chat_prompt(given, self.texts.tokenizer))
            else:
                self._tell(
                    f"{self.name} has a template for one question: conversations go to it as the policy reads them"
                )
                rendered.append(prompt)
        return rendered

    def _shaping(
        self, request: RewardRequest, place: int, encoded: EncodedCompletion, scored: ScoredCompletion
    ) -> np.ndarray:
        ids = request.response_ids[place]
        if scored.cosine_sim is None:  # no room: nothing is known of it
            return np.zeros(len(ids), np.float32)
        potentials = np.array(scored.cosine_sim[:-1])  # without EOS; the first is the prompt's
        if not encoded.prompt_ids:
            potentials = np.concatenate([[0.0], potentials])
        if not _same_tokens(ids, encoded):
            if request.token_ends is None:
                raise ValueError(
                    f"{self.name}: sample {place} has other tokens in the reward model's tokenizer, and the request "
                    "has no token_ends to map its shaping; make it with RewardRequest.from_tokens"
                )
            potentials = map_potentials(potentials, encoded.token_ends[:-1], request.token_ends[place])
        return potential_shaping(potentials[: len(ids)], self.gamma, self.shaping_coef)

    def _tell_other_tokens(self, request: RewardRequest, encoded: Sequence[EncodedCompletion]) -> None:
        if request.response_ids is None:
            return
        other = sum(not _same_tokens(ids, one) for ids, one in zip(request.response_ids, encoded, strict=True))
        if other:
            mapped = ", and its shaping goes to the policy's tokens by characters" if self.shaping_coef else ""
            self._tell(
                f"{self.name}: {other} of {len(encoded)} responses have other tokens in the reward model's tokenizer "
                f"or are cut: their text is tokenised anew{mapped} (said once)",
                kind="other tokens",
            )

    def _tell(self, message: str, kind: str | None = None) -> None:
        if (kind or message) not in self._told:
            self._told.add(kind or message)
            logger.info(message)


def potential_shaping(potentials: np.ndarray, gamma: float, coef: float) -> np.ndarray:
    """Rewards for the tokens of a response that leave every policy's rank as it is.

    Token t leads from state t, after t tokens, to state t + 1 and gets coef * (gamma * phi_{t+1} - phi_t); the state
    after the last token has the potential 0. So the discounted sum over a response is -coef * phi_0, which depends on
    the prompt alone.

    Args:
        potentials: (A,) phi of the states before each token; the first is the prompt's.
        gamma: the discount of the return.
    Returns:
        (A,) float32, reward units.
    Source: Ng, Harada and Russell 1999, theorem 1.
    """
    after = np.append(potentials[1:], 0.0) if len(potentials) else potentials
    return (coef * (gamma * after - potentials)).astype(np.float32)


def map_potentials(potentials: np.ndarray, token_ends: Sequence[int], policy_ends: Sequence[int]) -> np.ndarray:
    """Potentials of a reward model's states, as those of the states of a policy that cuts the text elsewhere.

    The state before a policy's token gets the potential of the last state of the reward model that has read no more.

    Args:
        potentials: (R + 1,) the prompt's, then one after each of the reward model's R tokens.
        token_ends: (R,) character where each of these tokens ends, never falling.
        policy_ends: (A,) the same of the policy's tokens.
    Returns:
        (A,) potentials of the states before each of the policy's tokens.
    """
    read = np.searchsorted(token_ends, policy_ends[:-1], side="right")  # tokens that end by then
    return potentials[np.concatenate([[0], read])][: len(policy_ends)]


def _with_prompt_end(encoded: EncodedCompletion) -> EncodedCompletion:
    """The completion with the last token of its prompt in front of the response, so that its state is scored too."""
    if not encoded.prompt_ids or not encoded.response_ids:
        return encoded
    return dataclasses.replace(
        encoded,
        prompt_ids=encoded.prompt_ids[:-1],
        response_ids=encoded.prompt_ids[-1:] + encoded.response_ids,
        token_ends=None,
    )


def _same_tokens(policy_ids: Sequence[int], encoded: EncodedCompletion) -> bool:
    """Whether a policy's response is the reward model's, up to an end token."""
    own = encoded.response_ids[:-1]
    return len(policy_ids) in (len(own), len(own) + 1) and list(policy_ids[: len(own)]) == own
