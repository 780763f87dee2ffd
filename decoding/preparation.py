"""What is known before weights are loaded: checkpoints, goal states, rendered questions, and what answers depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from decoding.config import POOL_METHODS, DecodingConfig
from decoding.prompts import Rendering, check_lengths, choose_rendering, read_questions, render_questions
from decoding.records import Question
from openrlhf.cli.common import resolve_pocket_model
from openrlhf.cli.reward_checkpoint import RewardCheckpoint, find_checkpoint, model_folder
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.threshold_choice import check_disjoint
from openrlhf.models.key_values import context_of
from openrlhf.models.pretrained import checkpoint_fingerprint, is_adapter, load_tokenizer

logger = logging.getLogger(__name__)

# Flags that the answers of every method depend on, besides models and questions.
_COMMON = ("dt_name", "max_tokens", "stop", "bf16")
_SAMPLING = ("temperature", "top_p")
_BEAM = (
    "beam_size n_samples step_boundary max_step_tokens beam_search_max_step guidance reward_weight self_eval_weight "
    "step_score conf_ratio not_use_logprob not_use_conf accumulate bs_temperature bs_temperature_decay bs_min_score "
    "reject_sample unbiased"
).split()
_FILTER = ("threshold", "warmup_tokens", "check_every", "stop_when_decided")


@dataclass(frozen=True)
class Preparation:
    """One call, ready for its weights."""

    policy_folder: str
    policy_fingerprint: str
    tokenizer: Any  # of the policy
    rendering: Rendering
    checkpoint: RewardCheckpoint | None
    goals: list[GoalState]
    questions: list[Question]
    validation: list[Question] | None  # to choose the filter's threshold on

    def described(self) -> dict[str, Any]:
        """What the flags alone do not tell, for people and for the manifest."""
        return {
            "policy": {"name": self.policy_folder, "fingerprint": self.policy_fingerprint},
            "rendering": dataclasses.asdict(self.rendering),
            "reward_model": None if self.checkpoint is None else self.checkpoint.described(),
            "goal_states": [goal.digest for goal in self.goals],
            "questions": len(self.questions),
            "expected_answers": sum(question.expected_answer is not None for question in self.questions),
        }


def prepare(config: DecodingConfig) -> Preparation:
    """Read everything but weights.

    Raises:
        ValueError: a model, goal state or row that cannot be used.
        RuntimeError: the hub does not give a model.
    """
    folder, fingerprint = _find_policy(config.policy_name)
    checkpoint, goals = None, []
    if config.reward_model_path is not None:
        checkpoint = find_checkpoint(config.reward_model_path)
        goals = [_load_goal(checkpoint, path) for path in config.goal_state_path or []]
    tokenizer = load_tokenizer(folder)
    reward = None if checkpoint is None else (checkpoint, load_tokenizer(checkpoint.folder))
    rendering = choose_rendering(config, tokenizer)
    questions = render_questions(read_questions(config), rendering, tokenizer, reward)
    validation = None
    if config.validation_file is not None:
        asked = read_questions(config, config.validation_file)
        validation = render_questions(asked, rendering, tokenizer, reward)
        unknown = [question.index for question in validation if question.expected_answer is None]
        if unknown:
            raise ValueError(f"--validation_file: row {unknown[0]} has no expected answer to choose a threshold by")
        check_disjoint([one.text for one in validation], [one.text for one in questions])
    for group in [questions] if validation is None else [questions, validation]:
        _check_contexts(config, group, folder, tokenizer, reward)
    return Preparation(folder, fingerprint, tokenizer, rendering, checkpoint, goals, questions, validation)


def method_settings(config: DecodingConfig, prepared: Preparation, method: str) -> dict[str, Any]:
    """By flag, what the answers of a method depend on besides its seed and the questions, as plain JSON values."""
    names = list(_COMMON)
    more: dict[str, Any] = {}
    if method != "greedy":
        names += _SAMPLING
    if method in (*POOL_METHODS, "filtered_vote"):
        more["pool_samples"] = config.pool_size
    if method == "beam":
        names += _BEAM
        more["goal_weights"] = config.weights_of_goals
    if method == "filtered_vote":
        names += _FILTER
        if prepared.validation is not None:
            texts = [[one.text, one.expected_answer] for one in prepared.validation]
            more["validation_file"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    settings = {
        "model_name": prepared.policy_fingerprint,
        "reward_model_path": None if prepared.checkpoint is None else prepared.checkpoint.fingerprint,
        "goal_state_path": [goal.digest for goal in prepared.goals],
        "input_template": prepared.rendering.template,
        "apply_chat_template": prepared.rendering.chat,
        **{name: getattr(config, name) for name in names},
        **more,
    }
    return json.loads(json.dumps(settings))


def _find_policy(name: str) -> tuple[str, str]:
    """Folder of the policy and the fingerprint of its weights."""
    folder = str(model_folder(resolve_pocket_model(name), "a language model", "--model_name is a folder or a hub id"))
    if is_adapter(folder):
        raise ValueError(f"--model_name {name} is a LoRA adapter; merge it with lora_combiner and pass the result")
    kinds = AutoConfig.from_pretrained(folder).architectures or []
    if any("ForSequenceClassification" in kind for kind in kinds):
        raise ValueError(
            f"--model_name {name} is a reward model ({kinds[0]}), which cannot generate; pass it with "
            "--reward_model_path, and the language model that answers with --model_name"
        )
    return folder, checkpoint_fingerprint(folder)


def _load_goal(checkpoint: RewardCheckpoint, path: str) -> GoalState:
    goal = checkpoint.load_goal(path)
    if not isinstance(goal, GoalState):
        raise ValueError(f"--goal_state_path {path} holds goals of single questions; decoding takes one for all")
    return goal


def _check_contexts(
    config: DecodingConfig,
    questions: list[Question],
    policy_folder: str,
    tokenizer: Any,
    reward: tuple[RewardCheckpoint, Any] | None,
) -> None:
    """Refuse prompts that leave no room for a response of --max_tokens in either model."""
    prompts = [(one.index, one.policy_prompt) for one in questions]
    context = _context(policy_folder)
    longest = check_lengths(prompts, tokenizer, context, 1, "policy")
    if context is not None and longest + config.max_tokens > context:
        logger.warning(
            "the longest prompt has %d of the policy's %d tokens: its response ends before --max_tokens %d",
            longest, context, config.max_tokens,
        )  # fmt: skip
    if reward is None:
        return
    checkpoint, reward_tokenizer = reward
    prompts = [(one.index, one.reward_prompt) for one in questions]
    context = None if is_adapter(checkpoint.folder) else _context(str(checkpoint.folder))
    room = config.max_tokens + 1  # EOS is read behind a response that was cut off
    longest = check_lengths(prompts, reward_tokenizer, context, room, "reward model")
    if longest + room > checkpoint.max_len:
        logger.warning(
            "a prompt of %d tokens and --max_tokens %d are more than the %d that %s was trained on",
            longest, config.max_tokens, checkpoint.max_len, checkpoint.name,
        )  # fmt: skip


def _context(folder: str) -> int | None:
    return context_of(AutoConfig.from_pretrained(folder))
