"""Every method with its models: from questions to answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.config import DecodingConfig
from decoding.guided import decode_guided
from decoding.pools import PoolSettings, draw_pools
from decoding.preparation import Preparation, method_settings
from decoding.records import Answered, Question
from decoding.sampling import PolicySession
from decoding.scoring import PrefixScorer, same_tokenizer
from decoding.voting import Grade, Pool, answer_filtered, answer_pool, choose_on_validation
from openrlhf.datasets.tokenize import encode_prompts
from openrlhf.evaluation.scoring import ScoringBar
from openrlhf.models.policy import Policy
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

THRESHOLD_FILE = "threshold.json"


@dataclass(frozen=True)
class Models:
    """Loaded models; without a reward model its parts are None."""

    policy: Policy
    reward: RewardModel | None
    tokenizer: Any  # of the reward model
    goals: list[np.ndarray]  # each (1, H) float32


def load_models(config: DecodingConfig, prepared: Preparation) -> Models:
    """Both models, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    policy = Policy.from_pretrained(prepared.policy_folder, device, dtype, config.attn_implementation)
    if prepared.checkpoint is None:
        return Models(policy, None, None, [])
    reward, tokenizer = prepared.checkpoint.load(config.bf16, config.attn_implementation)
    return Models(policy, reward, tokenizer, [goal.vector for goal in prepared.goals])


class Drawer:
    """Answers questions by the methods of a configuration; models are loaded when the first question is asked.

    Args:
        grade: predicted answer of a response, and whether it is right.
    """

    def __init__(self, config: DecodingConfig, prepared: Preparation, grade: Grade) -> None:
        self._config, self._prepared, self._grade = config, prepared, grade

    @cached_property
    def models(self) -> Models:
        """The loaded models."""
        return load_models(self._config, self._prepared)

    def draw(self, methods: Sequence[str], seed: int, questions: Sequence[Question]) -> Iterator[list[Answered]]:
        """For each question, as it is done, the answers of all these methods.

        Args:
            methods: "greedy", "beam" or "filtered_vote" alone, or those of one pool.
        """
        config = self._config
        if methods == ("beam",):
            return self._beam(seed, questions)
        if methods == ("greedy",):
            pools = self._pools(questions, seed, PoolSettings(1, batch_rows=config.batch_rows), temperature=0.0)
            return (answer_greedy(pool, seed) for pool in pools)
        if methods == ("filtered_vote",):
            return self._filtered(seed, questions)
        pools = self._pools(questions, seed, PoolSettings(config.pool_size, batch_rows=config.batch_rows))
        return (answer_pool(pool, seed, methods) for pool in pools)

    @cached_property
    def threshold(self) -> float | None:
        """The filter's: given, or chosen on the validation questions and kept in the output folder."""
        config = self._config
        if config.validation_file is None:
            return config.threshold
        file = Path(config.output_dir) / THRESHOLD_FILE
        settings = method_settings(config, self._prepared, "filtered_vote") | {"seed": config.seed}
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if earlier.get("settings") == settings:
            return earlier["threshold"]
        questions = self._prepared.validation
        plain = PoolSettings(config.pool_size, batch_rows=config.batch_rows)
        pools = []
        with ScoringBar(len(questions), desc="validation", unit="question") as bar:
            for pool in self._pools(questions, config.seed, plain):
                pools.append(pool)
                bar.add(1, pool.policy_tokens)
        pools.sort(key=lambda pool: pool.question.index)
        report = choose_on_validation(pools, config.warmup_tokens)
        atomic_write_text(file, json.dumps({"settings": settings, **vars(report)}, indent=2) + "\n")
        told = "no threshold saves tokens at equal accuracy: nothing is filtered"
        if report.threshold is not None:
            told = f"threshold {report.threshold:.4f} saves {report.tokens_saved:.1%} of the tokens"
        logger.info("%d validation questions: %s", len(questions), told)
        return report.threshold

    def _beam(self, seed: int, questions: Sequence[Question]) -> Iterator[list[Answered]]:
        models = self.models
        answers = decode_guided(
            models.policy,
            questions,
            self._config.guided_settings(),
            seed=seed,
            model=models.reward,
            tokenizer=models.tokenizer,
            goals=models.goals,
            chat=self._prepared.rendering.chat,
            with_trace=self._config.keeps_trace,
            method="beam",
        )
        return ([self._graded(one)] for one in answers)

    def _graded(self, answered: Answered) -> Answered:
        """The answer of the best response, and whether it is right."""
        predicted, right = self._grade(answered.question, answered.responses[0].text)
        return replace(answered, answer=predicted, is_correct=right)

    def _filtered(self, seed: int, questions: Sequence[Question]) -> Iterator[list[Answered]]:
        config = self._config
        told = {"threshold": self.threshold, "warmup_tokens": config.warmup_tokens, "check_every": config.check_every}
        settings = PoolSettings(
            config.pool_size, **told, stop_when_decided=config.stop_when_decided, batch_rows=config.batch_rows
        )
        answers = (answer_filtered(pool, seed, told) for pool in self._pools(questions, seed, settings))
        return ([one if config.keeps_trace else replace(one, trace=None)] for one in answers)

    def _pools(
        self, questions: Sequence[Question], seed: int, settings: PoolSettings, temperature: float | None = None
    ) -> Iterator[Pool]:
        config, models = self._config, self.models
        prompts = encode_prompts(models.policy.tokenizer, [one.policy_prompt for one in questions])

        def open_policy(prompts: Sequence[Sequence[int]]) -> PolicySession:
            return PolicySession(
                models.policy,
                prompts,
                temperature=config.temperature if temperature is None else temperature,
                top_p=config.top_p,
                max_tokens=config.max_tokens,
                stops=config.stops,
            )

        return draw_pools(questions, prompts, open_policy, self._open_scorer(), self._grade, settings, seed)

    def _open_scorer(self) -> Callable[[Sequence[str]], PrefixScorer] | None:
        """Several goal states belong together, in the beam search: the scores of samples leave them out."""
        models = self.models
        if models.reward is None:
            return None
        goals = models.goals if len(models.goals) == 1 else []
        same = same_tokenizer(models.policy.tokenizer, models.tokenizer)
        return lambda prompts: PrefixScorer(models.reward, models.tokenizer, goals, prompts, same)


def answer_greedy(pool: Pool, seed: int) -> list[Answered]:
    """The one response of a pool that was drawn at temperature 0."""
    (only,) = pool.samples
    return [
        Answered(
            pool.question,
            "greedy",
            seed,
            [only.response],
            only.answer,
            only.is_right,
            pool.policy_tokens,
            pool.reward_tokens,
            pool.seconds,
        )
    ]
