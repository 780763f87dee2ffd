"""What runs of train_ppo have left in their folders: settings, metrics, warnings and held-out samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.trainer.early_warnings import EarlyWarning, read_warnings
from openrlhf.utils.manifest import MANIFEST_NAME
from openrlhf.utils.run_log import METRICS_NAME, SAMPLES_NAME

Line = Mapping[str, Any]
# Settings in which repetitions of a run differ, or that change nothing that is measured.
_OF_ONE_RUN = frozenset(
    "seed save_path ckpt_path load_checkpoint save_steps save_hf_ckpt max_ckpt_num max_ckpt_mem disable_ds_ckpt "
    "logging_steps report use_wandb wandb_org wandb_group wandb_project wandb_run_name use_tensorboard "
    "local_rank num_proc micro_train_batch_size micro_rollout_batch_size".split()
)


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    name: str
    settings: Mapping[str, Any]  # resolved flags; {} without a manifest
    command_line: str | None
    status: str | None  # "running", "finished" or "failed: ..."
    train: Mapping[int, Line]  # metrics of rollouts by step
    evaluations: Mapping[int, Line]  # of held-out prompts by step
    warnings: Sequence[EarlyWarning]
    samples: Mapping[int, Sequence[Line]]  # lines of samples.jsonl by step
    repetition_of: str | None = None  # runs of one such name are repetitions; None: those of equal settings are

    @property
    def rollouts(self) -> int:
        """The last rollout that was logged; 0 without any."""
        return max(self.train, default=0)

    @property
    def seconds(self) -> float | None:
        """From the first evaluation or rollout that was logged to the last; None without a time."""
        lines = [*self.evaluations.values(), *self.train.values()]
        times = [line["time"] for line in lines if "time" in line]
        return max(times) - min(times) if times else None

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The settings that repetitions of the run share."""
        return {name: value for name, value in self.settings.items() if name not in _OF_ONE_RUN}


def read_run(folder: str | Path, name: str | None = None, repetition_of: str | None = None) -> RunRecord:
    """Read the --save_path of a run, which may still go on.

    Args:
        name: None: the folder's own.
        repetition_of: see `RunRecord`.
    Raises:
        ValueError: no folder, no metrics in it, a folder of another command, or a line that is no metric.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name the --save_path of a train_ppo run")
    if not (folder / METRICS_NAME).is_file():
        raise ValueError(f"{folder} holds no {METRICS_NAME}; name the --save_path of a train_ppo run")
    manifest = {}
    if (folder / MANIFEST_NAME).is_file():
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    if manifest.get("command", "train_ppo") != "train_ppo":
        raise ValueError(f"{folder} is a run of {manifest['command']}; name the --save_path of a train_ppo run")
    splits: dict[str, dict[int, Line]] = {"train": {}, "eval": {}, "warning": {}}
    for line in read_lines(folder / METRICS_NAME):
        if line.get("split") in splits:
            splits[line["split"]][line["step"]] = line
    samples: dict[int, list[Line]] = {}
    if (folder / SAMPLES_NAME).is_file():
        for line in read_lines(folder / SAMPLES_NAME):
            samples.setdefault(line["step"], []).append(line)
    return RunRecord(
        name=name or folder.resolve().name,
        settings=manifest.get("config", {}),
        command_line=manifest.get("command_line"),
        status=manifest.get("status"),
        train=splits["train"],
        evaluations=splits["eval"],
        warnings=[one for step, line in splits["warning"].items() for one in read_warnings(step, line)],
        samples=samples,
        repetition_of=repetition_of,
    )


def read_lines(path: Path) -> list[Line]:
    """Lines with a step of a JSON-lines file; a last one that a running or killed process left unfinished is left out.

    Raises:
        ValueError: another line is no JSON object with a step; names it.
    """
    found = []
    lines = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            found.append({**line, "step": int(line["step"])})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):  # every whole line ends in a line break
                raise ValueError(f"{path}, line {number}: expected a JSON object with a step") from error
    return found


def read_runs(folders: Sequence[str | Path], by_folder: bool = False) -> list[RunRecord]:
    """Several runs, named by the last parts of their paths that tell them apart.

    Args:
        by_folder: those that lie in the same folder are repetitions of one run, whatever their settings.
    Raises:
        ValueError: as `read_run`, or a folder is given twice.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a folder is given twice: {' '.join(map(str, folders))}")
    names = [""] * len(paths)
    for length in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    shared = [str(path.parent) if by_folder else None for path in paths]
    return [read_run(folder, *of) for folder, of in zip(folders, zip(names, shared, strict=True), strict=True)]


def group_runs(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Repetitions together, in the order of their first: runs of one `repetition_of`, or that differ in the seed only.

    Runs without settings stand alone.
    """
    groups: dict[str, list[RunRecord]] = {}
    for number, run in enumerate(runs):
        key = run.repetition_of or (json.dumps(run.experiment, sort_keys=True) if run.settings else str(number))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def differing_settings(groups: Sequence[Sequence[RunRecord]]) -> dict[str, list[Any]]:
    """Settings that are not the same in all groups: the value of each group by name."""
    experiments = [group[0].experiment for group in groups]
    names = dict.fromkeys(name for one in experiments for name in one)
    columns = {name: [one.get(name) for one in experiments] for name in names}
    return {name: values for name, values in columns.items() if any(value != values[0] for value in values)}
