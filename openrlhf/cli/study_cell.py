"""One cell of a study: train, score, keep the figures."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.cli import train_rm
from openrlhf.cli.study_data import POCKET_SETS, evaluation_completions, training_files
from openrlhf.cli.study_file import STEPS_SET, PocketTask, PreferencesTask
from openrlhf.cli.study_plan import CELL_FILE, SCORES_FILE, Cell, declaration, read_finished, recorded_flags
from openrlhf.datasets.completions import Completion
from openrlhf.evaluation.study_scores import (
    Kind,
    goal_trajectory,
    measure_values,
    score_arrays,
    step_figures,
    vote_figures,
)
from openrlhf.utils.atomic import atomic_dir, hold_lock
from openrlhf.utils.manifest import git_state, package_versions
from openrlhf.utils.run_log import RUN_FILES

PAIRS_SET = "held-out"  # name of the evaluation set of preferences
GOAL_BATCH_TOKENS = 16_384
GOAL_RESPONSES = 1000  # of the training data, whose mean the goal state is: more change it little
Scored = dict[str, tuple[Kind, list[dict[str, Any]]]]  # rows by name of the set


def run_cell(cell: Cell, output: Path, study: str, keep_models: bool = False) -> dict[str, Any]:
    """Train and score one cell; its folder appears when everything is in it. Returns what cell.json holds.

    A cell that is finished meanwhile, by another study with the same OUTPUT, is not run again.

    Args:
        study: name under which it runs, recorded only.
        keep_models: keep the weights beside the figures.
    Raises:
        ValueError: another process runs the same cell, or its data or flags do not work.
    """
    place = cell.folder(output)
    with hold_lock(place):
        return read_finished(cell, output) or _run_cell(cell, output, study, keep_models)


def _run_cell(cell: Cell, output: Path, study: str, keep_models: bool) -> dict[str, Any]:
    import torch

    with atomic_dir(cell.folder(output)) as folder:
        config = dataclasses.replace(cell.config, save_path=str(folder / "model"), **training_files(cell, output))
        completions = evaluation_completions(cell)  # what cannot be judged shows before anything is trained
        began = time.monotonic()
        last = train_rm.run(config)
        trained = time.monotonic()
        scored = score_cell(cell, config, folder / "model", completions)
        scoring = time.monotonic() - trained
        kinds = {name: kind for name, (kind, _) in scored.items()}
        arrays = {name: score_arrays(rows, kind) for name, (kind, rows) in scored.items()}
        validation = scored[POCKET_SETS[0]][1] if isinstance(cell.declared, PocketTask) else None
        sets = {
            name: {
                "kind": kind,
                "shared": not isinstance(cell.declared, PocketTask),  # the same completions for all seeds
                **_counts(arrays[name]),
                "measures": measure_values(arrays[name], kind),
                "votes": None
                if kind != "completions"
                else vote_figures(rows, None if rows is validation else validation),
                "step_level": step_figures(rows) if kind == "steps" else None,
                "trajectory": goal_trajectory(rows),
            }
            for name, (kind, rows) in scored.items()
        }
        manifest = json.loads((folder / "model" / "manifest.json").read_text(encoding="utf-8"))
        record = {
            "identity": cell.identity,
            "status": "finished",
            "name": cell.name,
            "study": study,
            "task": cell.task,
            "variant": cell.variant,
            "seed": cell.seed,
            "declared": declaration(cell.declared),
            "inputs": {"pretrain": cell.declared.pretrain, **cell.declared.paths},
            "flags": recorded_flags(cell.config),
            "pretrain_weights": manifest["pretrain_weights"],
            "pairs": manifest["data"]["counts"],
            "steps": manifest["total_steps"],
            "last_evaluation": last,
            "seconds": {"training": trained - began, "scoring": scoring},
            "sets": sets,
            "git": git_state(Path(__file__).resolve().parents[2]),
            "packages": package_versions(),
            "hardware": manifest["hardware"],
            "threads": torch.get_num_threads(),
        }
        np.savez_compressed(
            folder / SCORES_FILE, **{f"{name}/{key}": part for name in kinds for key, part in arrays[name].items()}
        )
        (folder / CELL_FILE).write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        if not keep_models:
            _drop_weights(folder / "model")
    return record


def score_cell(cell: Cell, config, folder: Path, completions: Mapping[str, Sequence[Completion]]) -> Scored:
    """Rewards and goal similarities of every evaluation set; the goal state is of the training pairs' chosen responses.

    Args:
        config: as the model in `folder` was trained, with its data.
        completions: by name of the set; of preferences none.
    """
    from openrlhf.cli.reward_checkpoint import find_checkpoint
    from openrlhf.evaluation.goal_state import compute_goal_state
    from openrlhf.evaluation.scored_files import score_completions

    checkpoint = find_checkpoint(str(folder))
    model, tokenizer = checkpoint.load()
    train, held_out = train_rm.load_pairs(config, tokenizer)
    rendering = {
        "template": checkpoint.template,
        "apply_chat_template": checkpoint.apply_chat_template,
        "max_len": checkpoint.max_len,
    }
    goal = compute_goal_state(
        model,
        islice(chosen_sequences(train), GOAL_RESPONSES),
        batch_tokens=GOAL_BATCH_TOKENS,
        checkpoint=checkpoint.fingerprint,
        dataset="training pairs",
        progress=False,
        **rendering,
    )
    if isinstance(cell.declared, PreferencesTask):
        return {PAIRS_SET: ("pairs", _score_pairs(model, held_out, goal))}
    scored: Scored = {}
    for name, part in completions.items():
        rows = score_completions(model, tokenizer, part, goal=goal, progress=False, **rendering)
        scored[name] = ("steps" if name == STEPS_SET else "completions", rows)
    return scored


def chosen_sequences(data) -> Iterator[list[int]]:
    """Token ids of prompt and response of every chosen response of prepared pairs, or correct one of groups."""
    for i in range(len(data)):
        example = data[i]
        responses = example.correct if hasattr(example, "correct") else [example.chosen_ids]
        for response in responses:
            yield [*example.prompt_ids, *response]


def _score_pairs(model, held_out, goal) -> list[dict[str, Any]]:
    """Rows of the chosen and the rejected response of every pair in turn, of one question where the prompt is one."""
    from openrlhf.evaluation.scoring import EncodedCompletion, score_encoded

    encoded, rows = [], []
    for i in range(len(held_out)):
        pair = held_out[i]
        for is_chosen, response in ((True, pair.chosen_ids), (False, pair.rejected_ids)):
            encoded.append(EncodedCompletion(list(pair.prompt_ids), list(response), False))
            rows.append({"question": str(pair.prompt_ids), "is_correct": is_chosen})
    scored = score_encoded(model, encoded, goal=goal, progress=False)
    return [row | vars(one) for row, one in zip(rows, scored, strict=True)]


def _counts(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    known = arrays["label"] >= 0
    return {
        "completions": len(known),
        "questions": len(np.unique(arrays["question"])),
        "correct": float(arrays["label"][known].mean()) if known.any() else None,
        "without_reward": int(np.isnan(arrays["reward"][:, -1]).sum()),
    }


def _drop_weights(folder: Path) -> None:
    """Remove everything but the record of the training."""
    for item in folder.iterdir():
        if item.name not in RUN_FILES:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
