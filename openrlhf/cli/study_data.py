"""Training and evaluation data of a study's cells: made once, and shared by all variants of a task and seed."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model
from openrlhf.cli.splits import load_splits
from openrlhf.cli.study_file import STEPS_SET, PocketTask, PreferencesTask, ResponsesTask
from openrlhf.cli.study_plan import Cell
from openrlhf.datasets.completions import Completion, read_completions
from openrlhf.datasets.pairing import build_pairs, remove_calculator
from openrlhf.datasets.sources import load_rows
from openrlhf.evaluation.labels import grade_completions
from openrlhf.utils.atomic import atomic_write_bytes

POCKET_SETS = ("validation", "test", "ood")
EVALUATION_SEED = 10_000  # added to the seed of a cell: its evaluation samples are not those of any training
SPLIT_SEED = 0  # of the held-out prompts of preferences, which all seeds share

Rows = Sequence[Mapping[str, Any]]


def training_files(cell: Cell, output: Path) -> dict[str, str]:
    """Write the rows that a cell trains on under OUTPUT/data; returns `dataset`, and `eval_dataset` of preferences.

    Files are named by what they hold, so cells with the same rows share one, and what is prepared of it.

    Raises:
        ValueError: rows that cannot be read, too few questions, or no pairs.
    """
    task, config = cell.declared, cell.config
    in_groups = config.responses_per_prompt is not None
    if isinstance(task, PreferencesTask):
        train, held_out = load_splits(
            dataclasses.replace(config, dataset=task.train, seed=SPLIT_SEED, max_samples=None), config.prompt_key
        )
        return {"dataset": _write_rows(output, train), "eval_dataset": _write_rows(output, held_out)}
    if isinstance(task, PocketTask):
        return {"dataset": _write_rows(output, _pocket_rows(task, cell.seed, in_groups))}
    if in_groups and task.questions is None:
        return {"dataset": task.train}
    rows = load_rows(task.train, on_bad_row=config.on_bad_row)
    if task.questions is not None:
        rows = choose_questions(rows, task.questions, cell.seed)
    if in_groups:
        return {"dataset": _write_rows(output, rows)}
    pairs, counts = build_pairs(
        rows, task.pairs_per_question, cell.seed, strip_calculator=True, include_unparsed=config.include_unparsed
    )
    if not pairs:
        raise ValueError(f"{task.train}: no question has both a correct and a wrong solution ({counts})")
    return {"dataset": _write_rows(output, pairs)}


def choose_questions(rows: Rows, count: int, seed: int) -> list[Mapping[str, Any]]:
    """Rows of the first questions after a shuffle by the seed, so that a larger count holds the smaller one's.

    Raises:
        ValueError: fewer questions than asked for.
    """
    keys = [" ".join(str(row.get("question", row.get("problem"))).split()) for row in rows]
    order = list(dict.fromkeys(keys))
    if count > len(order):
        raise ValueError(f"questions: expected at most {len(order)}, all that the training file has, got {count}")
    random.Random(seed).shuffle(order)
    kept = set(order[:count])
    return [row for row, key in zip(rows, keys, strict=True) if key in kept]


def evaluation_completions(cell: Cell) -> dict[str, list[Completion]]:
    """Labelled completions by name of the set; calculator annotations are removed as from the training pairs.

    Raises:
        ValueError: a file that cannot be read or holds nothing, or one without correct or without wrong completions.
    """
    from openrlhf.evaluation.sampling import pocket_completions

    task = cell.declared
    if isinstance(task, PocketTask):
        seed = EVALUATION_SEED + cell.seed
        sets = {}
        for split in POCKET_SETS:
            with _alone(f"{split}-{task.level}-{task.eval_questions}-{task.eval_samples}-{seed}"):
                sets[split] = pocket_completions(
                    cache_folder(), resolve_pocket_model(POCKET), split, task.eval_questions, task.eval_samples,
                    seed=seed, level=task.level, progress=False,
                )  # fmt: skip
        return sets
    if isinstance(task, ResponsesTask):
        files = dict(task.eval) | ({} if task.steps is None else {STEPS_SET: task.steps})
        sets = {name: [_strip(one) for one in _labelled(path)] for name, path in files.items()}
        for name, path in task.eval.items():
            labels = {one.is_correct for one in sets[name]} - {None}
            if labels != {True, False}:
                raise ValueError(
                    f"{path}: expected correct and wrong completions, by is_correct or by an expected_answer to grade "
                    f"them by, found {'no label' if not labels else 'correct ones' if True in labels else 'wrong ones'}"
                )
        return sets
    return {}


def _labelled(path: str) -> list[Completion]:
    completions = read_completions(path)
    if not completions:
        raise ValueError(f"{path}: expected completions, the file holds none")
    return grade_completions(completions)[0]


def _strip(completion: Completion) -> Completion:
    extra = dict(completion.extra)
    if isinstance(extra.get("steps"), list):
        extra["steps"] = [remove_calculator(step) for step in extra["steps"]]
    text = remove_calculator(completion.generated_solution)
    return dataclasses.replace(completion, generated_solution=text, extra=extra)


def _pocket_rows(task: PocketTask, seed: int, in_groups: bool) -> Rows:
    from openrlhf.evaluation.sampling import pocket_preferences, pocket_solutions

    settings = {"seed": seed, "n_questions": task.questions, "level": task.level, "progress": False}
    policy = resolve_pocket_model(POCKET)
    with _alone(f"train-{task.level}-{task.questions}-{seed}"):
        if in_groups:
            return pocket_solutions(cache_folder(), policy, **settings)
        return pocket_preferences(cache_folder(), policy, pairs_per_question=task.pairs_per_question, **settings)


def _write_rows(output: Path, rows: Rows) -> str:
    data = "".join(json.dumps(dict(row)) + "\n" for row in rows).encode()
    path = output / "data" / f"{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        atomic_write_bytes(path, data)
    return str(path)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait until no other process samples what the name says: it then finds the result in the cache."""
    place = cache_folder() / f".study-{name}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
