"""The cells of a study, their identities, and which of them are finished."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.cli.common import resolve_pocket_model
from openrlhf.cli.study_file import PocketTask, Study, Task
from openrlhf.trainer.config import TrainRMConfig

CELL_FILE = "cell.json"
SCORES_FILE = "scores.npz"
DATA_MARK = "{data}"  # in a path of a study file: the folder of --data
# Fields of the configuration that say where things lie, not what is trained; what lies there has a fingerprint.
_PLACES = ("save_path", "ckpt_path", "pretrain", "dataset", "eval_dataset")


@dataclass(frozen=True)
class Cell:
    """One training of a study with its evaluation."""

    task: str
    variant: str
    seed: int
    declared: Task  # with real paths
    config: TrainRMConfig  # without data and folders
    identity: str  # hash of everything that its figures depend on, but for the code

    @property
    def name(self) -> str:
        """TASK/VARIANT/seed-N."""
        return f"{self.task}/{self.variant}/seed-{self.seed}"

    def folder(self, output: Path) -> Path:
        """Where it lies when it is finished."""
        return output / "cells" / self.identity


def plan_cells(study: Study, data: str) -> list[Cell]:
    """All cells, seed by seed, so that stopping early leaves whole comparisons.

    Args:
        data: what `{data}` in a path stands for.
    Raises:
        ValueError: a file or a start model that is not there.
    """
    tasks = {name: _resolve(f"tasks.{name}", task, data) for name, task in study.tasks.items()}
    inputs = {name: fingerprint_inputs(task) for name, task in tasks.items()}
    cells = []
    for seed in study.seeds:
        for name, task in tasks.items():
            for variant in study.variants:
                config = study.config(name, variant, seed)
                cells.append(Cell(name, variant, seed, task, config, cell_identity(task, config, inputs[name])))
    return cells


def cell_identity(task: Task, config: TrainRMConfig, inputs: Mapping[str, str]) -> str:
    """16 hex digits that are equal for cells that give the same figures, whatever their study and variant are called.

    Flags at their default are left out, so that a new flag of train_rm makes no finished cell another one;
    `read_finished` compares all flags that a cell has recorded.

    Args:
        inputs: from `fingerprint_inputs`.
    """
    flags = {
        one.name: getattr(config, one.name)
        for one in dataclasses.fields(config)
        if one.name not in _PLACES and getattr(config, one.name) != _default(one)
    }
    whole = {"task": declaration(task), "flags": flags | {"seed": config.seed}, "inputs": dict(inputs)}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def declaration(task: Task) -> dict[str, Any]:
    """What a task says beside its flags, with the names of files and start models left out."""
    values = {name: value for name, value in dataclasses.asdict(task).items() if name not in ("flags", "pretrain")}
    values |= {name: sorted(value) for name, value in values.items() if isinstance(value, dict)}
    return {name: value for name, value in values.items() if name not in ("train", "steps")} | {
        "kind": type(task).__name__
    }


def fingerprint_inputs(task: Task) -> dict[str, str]:
    """Hashes of the start model's weights and of each data file; of the problems of the embedded task."""
    from openrlhf.models.pretrained import checkpoint_fingerprint

    inputs = {"pretrain": checkpoint_fingerprint(resolve_pocket_model(task.pretrain))}
    if isinstance(task, PocketTask):
        from openrlhf.datasets.pocket import generate_problems

        problems = [dataclasses.asdict(problem) for problem in generate_problems("ood", 20, 0, task.level)]
        inputs["problems"] = hashlib.sha256(json.dumps(problems).encode()).hexdigest()
    for place, path in task.paths.items():
        inputs[place] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return inputs


def recorded_flags(config: TrainRMConfig) -> dict[str, Any]:
    """All flags of a cell but those that name places, as they come back from JSON."""
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name not in _PLACES}
    return json.loads(json.dumps(flags))


def read_finished(cell: Cell, output: Path) -> dict[str, Any] | None:
    """What cell.json of a finished cell holds; None when the cell has yet to run.

    A cell that was run when a flag had another default has recorded another value, and does not count.
    """
    try:
        record = json.loads((cell.folder(output) / CELL_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    wanted = recorded_flags(cell.config)
    same = all(name in wanted and wanted[name] == value for name, value in record["flags"].items())
    return record if same and record["status"] == "finished" else None


def cell_line(cell: Cell, record: Mapping[str, Any]) -> dict[str, Any]:
    """What a table's numbers rest on, for one line of a file: how to run the cell again, and what it gave.

    Args:
        record: what cell.json of the finished cell holds; flags at their default and trajectories are left out.
    """
    defaults = {one.name: _default(one) for one in dataclasses.fields(TrainRMConfig)}
    flags = {name: value for name, value in record["flags"].items() if value != defaults[name]}
    sets = {
        name: {key: value for key, value in one.items() if key != "trajectory"} for name, one in record["sets"].items()
    }
    # Of the study that asks, which may call a shared cell by another name than the one that ran it.
    pattern = re.sub(r"[.+]", r"\\\g<0>", cell.name)
    named = {"name": cell.name, "only": f"^{pattern}$", "flags": flags, "sets": sets}
    kept = "identity seed declared pretrain_weights inputs pairs steps seconds git packages".split()
    line = named | {name: record[name] for name in kept if name in record}
    if "inputs" in line:  # folders are those of one machine; the identity holds what lies there
        line["inputs"] = {place: Path(path).name for place, path in line["inputs"].items()}
    return line


def _resolve(place: str, task: Task, data: str) -> Task:
    """The task with real paths, all of which must exist."""
    if isinstance(task, PocketTask):
        return task

    def real(path: str) -> str:
        return path.replace(DATA_MARK, data)

    changes: dict[str, Any] = {"pretrain": real(task.pretrain), "train": real(task.train)}
    if getattr(task, "steps", None):
        changes["steps"] = real(task.steps)
    if hasattr(task, "eval"):
        changes["eval"] = {name: real(path) for name, path in task.eval.items()}
    task = dataclasses.replace(task, **changes)
    for name, path in task.paths.items():
        if not Path(path).is_file():
            raise ValueError(f"{place}.{name}: no such file: {path} ({DATA_MARK} is the folder of --data)")
    if not (Path(resolve_pocket_model(task.pretrain)) / "config.json").is_file():
        raise ValueError(
            f"{place}.pretrain: expected 'pocket' or a model folder, found no config.json in {task.pretrain}"
        )
    return task


def _default(one: dataclasses.Field) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
