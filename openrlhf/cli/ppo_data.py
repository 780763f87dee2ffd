"""Data of train_ppo: prompts, held-out prompts, and texts that the policy keeps predicting."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openrlhf.cli.common import POCKET
from openrlhf.cli.splits import POCKET_HELD_OUT, load_splits, problem_rows, refuse_training_rows
from openrlhf.datasets.sources import load_rows
from openrlhf.trainer.ppo_config import PPOConfig, prompt_limit

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.datasets.prompts import PromptData
    from openrlhf.datasets.sft import SFTData

logger = logging.getLogger(__name__)

POCKET_PROMPTS = 4000  # problems of the embedded task, when --max_samples says nothing else


def load_prompts(config: PPOConfig, tokenizer: Any) -> tuple[PromptData, PromptData | None]:
    """Training and held-out prompts; of pocket, questions of disjoint splits."""
    from openrlhf.datasets.prompts import PromptOptions, prepare_prompts

    is_pocket = config.dataset == POCKET
    if is_pocket and (config.dataset_split != "train" or (config.eval_split and not config.eval_dataset)):
        raise ValueError("pocket has splits of its own: drop --prompt_split and --eval_split, or name --eval_dataset")
    if is_pocket:
        train = problem_rows("train", config.max_samples or POCKET_PROMPTS, config.seed)
        held_out = None
        if config.eval_dataset not in (None, POCKET):
            named = replace(config, dataset=config.eval_dataset, dataset_split=config.eval_split or "train")
            named = replace(named, dataset_probs=None, max_samples=None, eval_dataset=None, eval_split=None)
            held_out = load_splits(replace(named, eval_fraction=0.0), config.input_key)[0]
        elif config.eval_fraction > 0:
            held_out = problem_rows("validation", POCKET_HELD_OUT, config.seed)
    else:
        train, held_out = load_splits(config, config.input_key)
    options = PromptOptions(
        input_key=config.input_key,
        label_key=config.label_key or ("answer" if is_pocket else None),
        input_template=template_of(config, config.dataset),
        apply_chat_template=config.apply_chat_template,
        max_len=prompt_limit(config),
    )
    prompts = prepare_prompts(train, tokenizer, options)
    if held_out is None or not len(held_out):
        return prompts, None
    evaluation = prepare_prompts(held_out, tokenizer, options)
    refuse_training_rows(config, prompts.fingerprint, evaluation.fingerprint)
    return prompts, evaluation


def load_texts(config: PPOConfig, tokenizer: Any) -> SFTData | None:
    """Texts of --pretrain_data; None without.

    Raises:
        ValueError: fewer than an optimizer step takes.
    """
    from openrlhf.datasets.sft import SFTOptions, prepare_sft

    if config.pretrain_data is None:
        return None
    if config.pretrain_data == POCKET:
        rows = problem_rows("sft", config.max_samples or POCKET_PROMPTS, config.seed)
    else:
        rows = load_rows(
            config.pretrain_data,
            config.pretrain_split,
            probs=config.pretrain_data_probs,
            max_samples=config.max_samples,
            seed=config.seed,
            on_bad_row=config.on_bad_row,
        )
    options = SFTOptions(
        input_key=config.pretrain_input_key or config.input_key,
        output_key=config.output_key,
        input_template=template_of(config, config.pretrain_data),
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )
    texts = prepare_sft(rows, tokenizer, options, whole_texts=True)
    if len(texts) < config.train_batch_size:
        raise ValueError(
            f"--pretrain_data {config.pretrain_data} has {len(texts)} texts and an optimizer step takes as many as "
            f"--train_batch_size {config.train_batch_size}; add texts or lower it"
        )
    return texts


def template_of(config: PPOConfig, dataset: str) -> str | None:
    """The template of a data set's prompts; that of pocket where none is named."""
    return config.input_template or (POCKET if dataset == POCKET and not config.apply_chat_template else None)
