"""A study as it is declared: tasks, variants and seeds of a JSON file, checked in full before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.cli.common import POCKET
from openrlhf.cli.parser import FlagParser
from openrlhf.datasets.pocket import DEFAULT_LEVEL, LEVELS
from openrlhf.trainer.config import TrainRMConfig, validate

# Flags of train_rm that a study sets itself, from the task, the seed and the place of a cell.
OWN_FLAGS = frozenset(
    "pretrain dataset dataset_split dataset_probs eval_dataset eval_split seed save_path ckpt_path load_checkpoint "
    "s3_save_path dry_run local_rank save_steps use_wandb use_tensorboard".split()
)
# Flags that a task of preferences does not take, each with the reason.
REFUSED_PREFERENCES = {
    "responses_per_prompt": "is for labelled responses",
    "max_samples": "would cut the held-out pairs too, to others for every seed",
}
STEPS_SET = "steps"  # name of the evaluation set of a task's step-level file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class PocketTask:
    """The embedded task; questions, samples and pairs are drawn anew for every seed, those of evaluation too."""

    level: int = DEFAULT_LEVEL
    questions: int = 1500
    pairs_per_question: int = 4
    eval_questions: int = 250
    eval_samples: int = 8
    flags: Mapping[str, Any] = field(default_factory=dict)
    pretrain: str = field(default=POCKET, init=False)

    @property
    def paths(self) -> dict[str, str]:
        """Data files by place in the task: none."""
        return {}

    @property
    def defaults(self) -> dict[str, Any]:
        """Flags that hold unless the study says otherwise; held-out sets are apart, so that all pairs train."""
        return {"input_template": POCKET, "eval_fraction": 0.0}


@dataclass(frozen=True)
class ResponsesTask:
    """Labelled responses of a file; the evaluation sets are files of their own, the same for all seeds."""

    pretrain: str
    train: str
    eval: Mapping[str, str]
    steps: str | None = None
    pairs_per_question: int = 1
    questions: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> dict[str, str]:
        """Data files by place in the task."""
        files = {"train": self.train} | {f"eval.{name}": path for name, path in self.eval.items()}
        return files if self.steps is None else files | {"steps": self.steps}

    @property
    def defaults(self) -> dict[str, Any]:
        """Flags that hold unless the study says otherwise."""
        return {"eval_fraction": 0.0}


@dataclass(frozen=True)
class PreferencesTask:
    """Preference pairs of a file; a share of the prompts, the same for all seeds, is held out."""

    pretrain: str
    train: str
    eval_fraction: float = 0.25
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> dict[str, str]:
        """Data files by place in the task."""
        return {"train": self.train}

    @property
    def defaults(self) -> dict[str, Any]:
        """Flags that hold unless the study says otherwise."""
        return {"eval_fraction": self.eval_fraction}


Task = PocketTask | ResponsesTask | PreferencesTask
KINDS: dict[str, type] = {"pocket": PocketTask, "responses": ResponsesTask, "preferences": PreferencesTask}


@dataclass(frozen=True)
class Study:
    """A declared grid of trainings: every task with every variant and every seed."""

    name: str
    about: str
    baseline: str  # differences are against this variant
    tasks: Mapping[str, Task]
    variants: Mapping[str, Mapping[str, Any]]  # flags of train_rm by name
    seeds: tuple[int, ...]
    common: Mapping[str, Any] = field(default_factory=dict)  # flags of train_rm for all

    def config(self, task: str, variant: str, seed: int) -> TrainRMConfig:
        """What a cell trains with, without its data and folders; task flags override common ones, variants both.

        Raises:
            ValueError: flags that cannot be combined.
        """
        declared = self.tasks[task]
        flags = declared.defaults | dict(self.common) | dict(declared.flags) | dict(self.variants[variant])
        if flags.get("apply_chat_template") and isinstance(declared, PocketTask):
            flags["input_template"] = None
        for name, why in REFUSED_PREFERENCES.items():
            if flags.get(name) is not None and isinstance(declared, PreferencesTask):
                raise ValueError(f"task {task!r} with variant {variant!r}: {name} {why}; leave it out")
        if flags.get("responses_per_prompt") and isinstance(declared, ResponsesTask):
            flags.setdefault("strip_calculator", True)  # as in the pairs that are made of the same responses
        config = TrainRMConfig(**flags, pretrain=declared.pretrain, dataset=task, seed=seed)
        try:
            validate(config)
        except ValueError as error:
            raise ValueError(f"task {task!r} with variant {variant!r}: {error}") from error
        return config


def read_study(path: str | Path) -> Study:
    """A study file.

    Raises:
        ValueError: no JSON, a name twice, an unknown or missing key, a value of a wrong kind, or flags that train_rm
            would refuse; names the place.
    """
    try:
        declared = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ValueError(f"--study: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: no study: {error}") from error
    try:
        return parse_study(declared)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_study(declared: Any) -> Study:
    """A study from its JSON value; what raises as `read_study`."""
    known = {one.name for one in dataclasses.fields(Study)}
    _check_keys("study", declared, known, known - {"common", "about"})
    tasks = {name: _read_task(f"tasks.{name}", one) for name, one in _named("tasks", declared["tasks"]).items()}
    variants = {
        name: read_flags(f"variants.{name}", flags) for name, flags in _named("variants", declared["variants"]).items()
    }
    seeds = declared["seeds"]
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ValueError(f"seeds: expected a list of different whole numbers, got {seeds!r:.80}")
    _named("name", {_text("name", declared["name"]): None})
    if _text("baseline", declared["baseline"]) not in variants:
        raise ValueError(f"baseline: expected one of the variants {list(variants)}, got {declared['baseline']!r}")
    study = Study(
        name=declared["name"],
        about=_text("about", declared.get("about", "")),
        baseline=declared["baseline"],
        tasks=tasks,
        variants=variants,
        seeds=tuple(_number("seeds", seed, int, 0) for seed in seeds),
        common=read_flags("common", declared.get("common", {})),
    )
    for task in study.tasks:
        for variant in study.variants:
            study.config(task, variant, study.seeds[0])
    return study


def read_flags(place: str, flags: Any) -> dict[str, Any]:
    """Flags of train_rm by field name, with the values that the command line would give them.

    Raises:
        ValueError: a name that is no flag or one of OWN_FLAGS, or a value that the flag does not take.
    """
    if not isinstance(flags, dict):
        raise ValueError(f"{place}: expected flags of train_rm by name, got {flags!r:.80}")
    fields = {one.name: one for one in dataclasses.fields(TrainRMConfig)}
    parser = FlagParser(TrainRMConfig, exit_on_error=False, add_help=False)
    values: dict[str, Any] = {}
    for name, value in flags.items():
        if name in OWN_FLAGS:
            raise ValueError(f"{place}: {name!r} is set by the study itself; leave it out")
        if name not in fields:
            raise ValueError(f"{place}: {_unknown('flag of train_rm', name, fields)}")
        if value is None and fields[name].default is None:
            values[name] = None
            continue
        items = value if isinstance(value, list) else [value]
        if not items or any(item is None or isinstance(item, dict | list) for item in items):
            raise ValueError(f"{place}.{name}: no value of this flag: {value!r:.80}")
        words = [f"--{name}={items[0]}"] if len(items) == 1 else [f"--{name}", *map(str, items)]
        try:
            read, rest = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ValueError(f"{place}.{name}: {error.message}") from error
        values[name] = getattr(read, name)
        if rest or (isinstance(value, list) and isinstance(values[name], list) and len(values[name]) < len(value)):
            raise ValueError(f"{place}.{name}: no value of this flag: {value!r:.80}")
    return values


def _read_task(place: str, declared: Any) -> Task:
    kind = declared.get("kind") if isinstance(declared, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{place}.kind: expected one of {sorted(KINDS)}, got {kind!r}")
    fields = {one.name: one for one in dataclasses.fields(KINDS[kind]) if one.init}
    needed = {
        name
        for name, one in fields.items()
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    _check_keys(place, declared, {"kind", *fields}, needed)
    values: dict[str, Any] = {}
    for name, value in declared.items():
        where = f"{place}.{name}"
        if name in ("pretrain", "train") or (name == "steps" and value is not None):
            values[name] = _text(where, value, empty=False)
        elif name == "flags":
            values[name] = read_flags(where, value)
        elif name == "eval":
            values[name] = {
                one: _text(f"{where}.{one}", path, empty=False) for one, path in _named(where, value).items()
            }
        elif name == "eval_fraction":
            values[name] = _number(where, value, float, 0)
            if not 0 < value < 1:
                raise ValueError(f"{where}: expected a share above 0 and below 1, got {value!r}")
        elif name != "kind" and not (value is None and fields[name].default is None):
            values[name] = _number(where, value, int, 1)
    if "level" in values and values["level"] not in LEVELS:
        raise ValueError(f"{place}.level: expected one of {sorted(LEVELS)}, got {values['level']}")
    if STEPS_SET in values.get("eval", {}):
        raise ValueError(f"{place}.eval.{STEPS_SET}: the name is kept for the step-level file; choose another")
    if kind == "preferences" and "eval_fraction" in values.get("flags", {}):
        raise ValueError(f"{place}.flags: 'eval_fraction' is a key of the task itself; put it there")
    return KINDS[kind](**values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice in one object")
    return dict(pairs)


def _check_keys(place: str, value: Any, known: Iterable[str], needed: Iterable[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected a JSON object, got {value!r:.80}")
    for name in value:
        if name not in known:
            raise ValueError(f"{place}: {_unknown('key', name, known)}")
    missing = sorted(set(needed) - set(value))
    if missing:
        raise ValueError(f"{place}: expected the key {missing[0]!r}, found {list(value)}")


def _named(place: str, value: Any) -> dict[str, Any]:
    """A JSON object that is not empty and whose names can be folders."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{place}: expected a JSON object with at least one name, got {value!r:.80}")
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{place}: a name may hold letters, digits and . _ + -, got {name!r}")
    return value


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _text(place: str, value: Any, empty: bool = True) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{place}: expected text, got {value!r:.80}")
    return value


def _number(place: str, value: Any, kind: type, least: int) -> Any:
    fits = isinstance(value, int) or (kind is float and isinstance(value, float))
    if isinstance(value, bool) or not fits or value < least:
        raise ValueError(f"{place}: expected a {'whole ' * (kind is int)}number of at least {least}, got {value!r:.80}")
    return value
