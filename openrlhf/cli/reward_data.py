"""Training and evaluation data of a reward model: pairs or labelled responses, of files or of the embedded task."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model
from openrlhf.cli.splits import load_splits, refuse_training_rows, warn_of_shared_prompts
from openrlhf.datasets.adapters import PreferenceOptions
from openrlhf.datasets.completions import are_labelled
from openrlhf.trainer.config import TrainRMConfig

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.datasets.preference import PreferenceData
    from openrlhf.datasets.response_groups import ResponseGroups


def pocket_rows(config: TrainRMConfig):
    """Training and evaluation rows of the embedded task, pairs or labelled responses, from disjoint questions."""
    import datasets

    from openrlhf.evaluation.sampling import pocket_preferences, pocket_question_count, pocket_solutions

    policy = resolve_pocket_model(POCKET)
    questions = pocket_question_count(config.max_samples)
    make = pocket_preferences if config.responses_per_prompt is None else pocket_solutions
    train = make(cache_folder(), policy, seed=config.seed, split="train", n_questions=questions)
    held_out = make(cache_folder(), policy, seed=config.seed, split="validation", n_questions=min(questions, 200))
    if config.max_samples:
        train, held_out = train[: config.max_samples], held_out[: config.max_samples]
    return datasets.Dataset.from_list(train), datasets.Dataset.from_list(held_out)


def pair_rows(config: TrainRMConfig):
    """Training and evaluation rows; either may be the embedded task."""
    named_eval = config.eval_dataset or config.eval_split
    if config.dataset == POCKET and (not named_eval or config.eval_dataset == POCKET):
        return pocket_rows(config)
    if config.dataset == POCKET:
        other = dataclasses.replace(
            config,
            dataset=config.eval_dataset or POCKET,
            dataset_split=config.eval_split or "train",
            dataset_probs=None,
            eval_dataset=None,
            eval_split=None,
            eval_fraction=0.0,
        )
        return pocket_rows(config)[0], load_splits(other, config.prompt_key)[0]
    if config.eval_dataset == POCKET:
        train = load_splits(dataclasses.replace(config, eval_dataset=None, eval_fraction=0.0), config.prompt_key)[0]
        return train, pocket_rows(config)[1]
    return load_splits(config, config.prompt_key)


def prepare_rows(
    config: TrainRMConfig, rows, tokenizer, options: PreferenceOptions, in_groups: bool
) -> PreferenceData | ResponseGroups:
    """Tokenised rows: labelled responses in groups, or pairs."""
    from openrlhf.datasets.preference import prepare_preferences
    from openrlhf.datasets.response_groups import prepare_groups

    if not in_groups:
        return prepare_preferences(rows, tokenizer, options, num_proc=config.num_proc)
    return prepare_groups(
        rows,
        tokenizer,
        options,
        config.responses_per_prompt,
        seed=config.seed,
        strip_calculator=config.strip_calculator,
        include_unparsed=config.include_unparsed,
        num_proc=config.num_proc,
    )


def load_pairs(
    config: TrainRMConfig, tokenizer
) -> tuple[PreferenceData | ResponseGroups, PreferenceData | ResponseGroups | None]:
    """Tokenised training and evaluation examples; with --responses_per_prompt those for evaluation may be pairs too."""
    is_pocket = config.dataset == POCKET
    train_rows, eval_rows = pair_rows(config)
    options = PreferenceOptions(
        format=config.dataset_format,
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        input_template=config.input_template or (POCKET if is_pocket and not config.apply_chat_template else None),
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
        on_long=config.on_long,
    )
    in_groups = config.responses_per_prompt is not None
    train = prepare_rows(config, train_rows, tokenizer, options, in_groups)
    held_out = None
    if eval_rows is not None and len(eval_rows):
        if not config.apply_chat_template:
            options = dataclasses.replace(options, input_template=train.options.input_template)
        in_groups = in_groups and are_labelled(eval_rows.column_names)
        try:
            held_out = prepare_rows(config, eval_rows, tokenizer, options, in_groups)
        except ValueError as error:
            raise ValueError(f"evaluation rows: {error}") from error
        refuse_training_rows(config, train.fingerprint, held_out.fingerprint)
        warn_of_shared_prompts(train, held_out)
    if config.margin_loss and not train.has_margin:
        raise ValueError(f"--margin_loss: {config.dataset} has no column 'margin'")
    return train, held_out
