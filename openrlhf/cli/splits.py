"""Training and evaluation rows of a run, kept apart."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.datasets.sources import load_rows, split_rows
from openrlhf.trainer.config import TrainConfig

if TYPE_CHECKING:  # torch takes seconds to import; flags are read without it
    from openrlhf.datasets.preference import PreferenceData
    from openrlhf.datasets.response_groups import ResponseGroups

logger = logging.getLogger(__name__)

EVAL_NAMES = {"validation": "validation|valid|val|dev|eval", "test": "test"}


POCKET_HELD_OUT = 500  # problems of the embedded task that trained policies are evaluated on


def problem_rows(split: str, count: int, seed: int) -> Any:
    """Generated problems of pocket with their solutions, as a `datasets.Dataset`; no question is in two splits."""
    from dataclasses import asdict

    import datasets

    from openrlhf.datasets.pocket import generate_problems

    return datasets.Dataset.from_list([asdict(problem) for problem in generate_problems(split, count, seed=seed)])


def load_splits(config: TrainConfig, prompt_key: str | None) -> tuple[Any, Any | None]:
    """Training and evaluation rows; the latter are named, or taken out of the former with all rows of a prompt.

    Args:
        prompt_key: column that names the prompt of a row; None: the usual names.
    """

    def rows(spec: str, split: str):
        probs = config.dataset_probs if spec == config.dataset else None
        return load_rows(
            spec, split, probs=probs, max_samples=config.max_samples, seed=config.seed, on_bad_row=config.on_bad_row
        )

    train = rows(config.dataset, config.dataset_split)
    if config.eval_dataset or config.eval_split:
        source = config.eval_dataset or config.dataset
        return train, rows(source, config.eval_split or usual_eval_split(source))
    if config.eval_fraction == 0:
        return train, None
    if len(train) < 2:
        raise ValueError(f"{config.dataset} has {len(train)} row, none is left for evaluation; pass --eval_fraction 0")
    group_columns = {"group_columns": [prompt_key]} if prompt_key else {}
    return split_rows(train, config.eval_fraction, config.seed, **group_columns)


def usual_eval_split(source: str) -> str:
    """Split to evaluate on when none is named: of a local folder, validation or test where it has files of it."""
    folder = Path(source)
    names = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    saved = (folder / "dataset_dict.json").is_file()  # made by save_to_disk: its splits are named as they are
    for split, pattern in EVAL_NAMES.items():
        found = [name for name in names if re.match(rf"({pattern})(?![a-z])", name)]
        if found:
            return found[0] if saved else split
    return "train"


def warn_of_shared_prompts(train: PreferenceData | ResponseGroups, held_out: PreferenceData | ResponseGroups) -> None:
    """Say how many evaluation prompts are also trained on; whether that is a mistake, only the user knows."""
    train_prompts, eval_prompts = train.prompt_hashes(), held_out.prompt_hashes()
    shared = len(train_prompts & eval_prompts)
    if shared:
        logger.warning("%d of %d evaluation prompts are also among the training rows", shared, len(eval_prompts))


def refuse_training_rows(config: TrainConfig, train_fingerprint: str, eval_fingerprint: str) -> None:
    """Evaluation on the training rows tells nothing.

    Raises:
        ValueError: both have one fingerprint.
    """
    if train_fingerprint == eval_fingerprint:
        raise ValueError(
            f"the evaluation rows are the training rows: {config.eval_dataset or config.dataset} has no split "
            f"{config.eval_split or ''} of its own; name other data, or drop the flag and use --eval_fraction"
        )
