"""Goal state of a reward model: ``python -m openrlhf.cli.get_representation --dataset DATA --reward_model DIR ...``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model, run_command
from openrlhf.cli.parser import parse_config
from openrlhf.cli.reward_checkpoint import find_checkpoint
from openrlhf.datasets.preference import PreferenceOptions, prepare_preferences
from openrlhf.datasets.sources import load_rows
from openrlhf.evaluation.goal_state import GoalState, compute_goal_state
from openrlhf.trainer.config import flag
from openrlhf.utils.checkpoint import ensure_writable
from openrlhf.utils.manifest import finish_manifest, write_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RepresentationConfig:
    """Mean hidden state of the chosen responses of a preference data set, as goal state of a reward model."""

    dataset: str | None = flag(
        None, "Preference data: as for train_rm, best the data it was trained on", "dataset_path", "dataset-path"
    )
    reward_model: str | None = flag(None, "Reward model checkpoint", "reward_model_path", "reward-model-path")
    save_dir: str | None = flag(None, "Folder for goal_state.npy [1, hidden] and goal_state.json")
    dataset_probs: str | None = flag(None, "Comma list of shares, one per data set")
    dataset_split: str = flag("train", "Split to read")
    dataset_format: str | None = flag(None, "Format of the rows; default: told by their columns")
    prompt_key: str | None = flag(None, "Column of the prompt")
    chosen_key: str | None = flag(None, "Column of the chosen response")
    rejected_key: str | None = flag(None, "Column of the rejected response")
    on_bad_row: Literal["error", "skip"] = flag("error", "Unreadable or incomplete row: stop, or skip and count")
    input_template: str | None = flag(None, "Prompt template; default: the checkpoint's")
    apply_chat_template: bool = flag(False, "Render with the tokenizer's chat template; default: the checkpoint's")
    max_len: int | None = flag(None, "Tokens of prompt + response; default: the checkpoint's")
    max_samples: int | None = flag(None, "At most this many rows, drawn at random")
    batch_tokens: int = flag(16384, "Most tokens of a forward pass, padding included; does not change the result")
    num_proc: int | None = flag(None, "Processes for tokenisation")
    bf16: bool = flag(False, "Compute in bfloat16")
    attn_implementation: str | None = flag(None, "Attention of transformers: sdpa, eager, flash_attention_2, ...")
    seed: int = flag(42, "Seed of --max_samples and --dataset_probs")


def run(config: RepresentationConfig) -> GoalState:
    """Compute and save the goal state."""
    missing = [name for name in ("dataset", "reward_model", "save_dir") if getattr(config, name) is None]
    if missing:
        raise ValueError(f"pass --{' and --'.join(missing)}")
    checkpoint = find_checkpoint(
        config.reward_model,
        input_template=config.input_template,
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )
    ensure_writable(config.save_dir, inside=True)
    rows = _load_preference_rows(config)
    model, tokenizer = checkpoint.load(config.bf16, config.attn_implementation)
    options = PreferenceOptions(
        format=config.dataset_format,
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        input_template=None if checkpoint.apply_chat_template else checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template,
        max_len=checkpoint.max_len,
    )
    pairs = prepare_preferences(rows, tokenizer, options, num_proc=config.num_proc)
    extra = {"checkpoint": checkpoint.fingerprint, "data": {"train": pairs.fingerprint, "counts": pairs.counts}}
    write_manifest(config.save_dir, "get_representation", config, extra)
    goal = compute_goal_state(
        model,
        (pair.prompt_ids + pair.chosen_ids for pair in map(pairs.__getitem__, range(len(pairs)))),
        batch_tokens=config.batch_tokens,
        template=checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template,
        max_len=checkpoint.max_len,
        checkpoint=checkpoint.fingerprint,
        dataset=config.dataset,
        total=len(pairs),
    )
    array_path, json_path = goal.save(config.save_dir)
    finish_manifest(config.save_dir, "finished")
    print(f"goal state of {goal.count} chosen responses, shape {list(goal.vector.shape)}: {array_path}, {json_path}")
    return goal


def _load_preference_rows(config: RepresentationConfig):
    if config.dataset == POCKET:
        import datasets

        from openrlhf.evaluation.sampling import pocket_preferences, pocket_question_count

        questions = pocket_question_count(config.max_samples)
        policy = resolve_pocket_model(POCKET)
        pairs = pocket_preferences(cache_folder(), policy, n_questions=questions, seed=config.seed, split="train")
        return datasets.Dataset.from_list(pairs[: config.max_samples])
    return load_rows(
        config.dataset,
        config.dataset_split,
        probs=config.dataset_probs,
        max_samples=config.max_samples,
        seed=config.seed,
        on_bad_row=config.on_bad_row,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(RepresentationConfig, argv)) and None)


if __name__ == "__main__":
    main()
