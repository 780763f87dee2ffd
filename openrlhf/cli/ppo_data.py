"""Data of train_ppo: prompts, and held-out prompts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from openrlhf.cli.common import POCKET
from openrlhf.cli.splits import load_splits, problem_rows, refuse_training_rows
from openrlhf.trainer.ppo_config import PPOConfig, prompt_limit

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.datasets.prompts import PromptData

logger = logging.getLogger(__name__)

POCKET_PROMPTS, POCKET_HELD_OUT = 4000, 500  # problems of the embedded task, when --max_samples says nothing else


def load_prompts(config: PPOConfig, tokenizer: Any) -> tuple[PromptData, PromptData | None]:
    """Training and held-out prompts; of pocket, questions of disjoint splits."""
    from openrlhf.datasets.prompts import PromptOptions, prepare_prompts

    is_pocket = config.dataset == POCKET
    if is_pocket:
        train = problem_rows("train", config.max_samples or POCKET_PROMPTS, config.seed)
        held_out = problem_rows("validation", POCKET_HELD_OUT, config.seed) if config.eval_fraction > 0 else None
    else:
        train, held_out = load_splits(config, config.input_key)
    options = PromptOptions(
        input_key=config.input_key,
        label_key=config.label_key or ("answer" if is_pocket else None),
        input_template=config.input_template or (POCKET if is_pocket and not config.apply_chat_template else None),
        apply_chat_template=config.apply_chat_template,
        max_len=prompt_limit(config),
    )
    prompts = prepare_prompts(train, tokenizer, options)
    if held_out is None or not len(held_out):
        return prompts, None
    evaluation = prepare_prompts(held_out, tokenizer, options)
    refuse_training_rows(config, prompts.fingerprint, evaluation.fingerprint)
    return prompts, evaluation
