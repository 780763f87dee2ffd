"""What the hidden states of reward models tell: ``python -m openrlhf.cli.probe_states --reward_model_path DIR ...``."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.cli.common import POCKET, run_command
from openrlhf.cli.completion_files import find_completions, grade_files
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.completions import Completion
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import atomic_write_text, ensure_writable, hold_lock
from openrlhf.utils.manifest import finish_manifest, write_manifest

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.cli.reward_checkpoint import RewardCheckpoint
    from openrlhf.evaluation.goal_state import GoalState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeConfig:
    """What hidden states tell of the outcome along a response: linear probes against reward and goal similarity."""

    reward_model_path: list[str] | None = flag(
        None, "Reward model checkpoints: folders, s3:// addresses or hub ids", "reward_model", "reward-model"
    )
    completions_data_path: str | None = flag(
        None, "Folder with BENCHMARK/output-greedy.jsonl and output-*.jsonl, a file of completions, or 'pocket'"
    )
    save_dir: str | None = flag(
        None,
        "Folder for probes.json, probes.md and probes.png; of several models: in SAVE_DIR/MODEL, and comparison.png",
    )
    goal_state_path: list[str] | None = flag(
        None,
        "Goal states made by get_representation, one a model in the same order; default: the mean last state of "
        "correct completions that are not scored with it",
    )
    probe_data_path: str | None = flag(
        None, "Completions of other questions to fit probes on; default: the other folds of five folds of questions"
    )
    benchmarks: list[str] | None = flag(None, "Folders (or files) under --completions_data_path; default: all")
    max_samples: int | None = flag(None, "At most this many labelled completions of each path, drawn at random")
    input_template: str | None = flag(None, "Prompt template; default: the checkpoint's")
    apply_chat_template: bool = flag(False, "Render with the tokenizer's chat template; default: the checkpoint's")
    max_len: int | None = flag(None, "Tokens of prompt + response; default: the checkpoint's")
    batch_tokens: int | None = flag(
        None, "Tokens of a forward pass, shared beginnings once (default: 16384 on a GPU, 2048 on a CPU)"
    )
    bf16: bool = flag(False, "Compute in bfloat16")
    attn_implementation: str | None = flag(None, "Attention of transformers: sdpa, eager, flash_attention_2, ...")
    bootstrap: int = flag(1000, "Draws of questions for the 95% intervals")
    seed: int = flag(0, "Seed of the folds, the intervals, --max_samples, and of pocket")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        names = ("reward_model_path", "completions_data_path", "save_dir")
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            raise ValueError(f"pass --{' and --'.join(missing)}")
        models, goals = len(self.reward_model_path), len(self.goal_state_path or [])
        if goals and goals != models:
            raise ValueError(f"--goal_state_path: expected one for each of the {models} models, got {goals}")
        if self.input_template is not None and self.apply_chat_template:
            raise ValueError("--input_template and --apply_chat_template exclude each other: leave one out")
        for name in ("max_samples", "max_len", "batch_tokens", "bootstrap"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"--seed: expected 0 or more, got {self.seed}")
        if self.probe_data_path not in (None, POCKET) and not Path(self.probe_data_path).exists():
            raise ValueError(f"--probe_data_path: expected completions at {self.probe_data_path}, found nothing")


@dataclass(frozen=True)
class LabelledCompletions:
    """Labelled completions of one path, of all its benchmarks together."""

    files: list[str]  # BENCHMARK/KIND/NAME each
    completions: list[Completion]
    without_label: int  # completions left out

    @property
    def labels(self) -> list[bool | None]:
        """Whether each is correct."""
        return [one.is_correct for one in self.completions]

    @property
    def questions(self) -> list[str]:
        """The question of each."""
        return [one.question for one in self.completions]


def run(config: ProbeConfig) -> dict[str, Any]:
    """Read the states of every model, fit probes, write and print; returns the figures by model (docs/probes.md)."""
    config.validate()
    from openrlhf.cli.reward_checkpoint import find_checkpoints
    from openrlhf.evaluation.goal_state import GoalState
    from openrlhf.evaluation.linear_probes import check_probe_data, question_folds

    checkpoints = find_checkpoints(
        config.reward_model_path,
        input_template=config.input_template,
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )
    goals: list[GoalState | None] = [None] * len(checkpoints)
    if config.goal_state_path:
        pairs = zip(checkpoints, config.goal_state_path, strict=True)
        goals = [checkpoint.load_goal(path) for checkpoint, path in pairs]
        for goal, path in zip(goals, config.goal_state_path, strict=True):
            if not isinstance(goal, GoalState):
                raise ValueError(f"{path}: expected one goal state for all questions, found goals per question")
    ensure_writable(config.save_dir, inside=True)
    judged = read_labelled(config.completions_data_path, config.benchmarks, config.max_samples, config.seed)
    fitted = None
    if config.probe_data_path is None:  # what cannot be fitted shows before a model is loaded
        question_folds(judged.labels, judged.questions, seed=config.seed)
    else:
        fitted = read_labelled(config.probe_data_path, None, config.max_samples, config.seed)
        check_probe_data(fitted.labels, fitted.questions, judged.labels, judged.questions)
    if len({file.split("/")[0] for file in judged.files}) > 1:
        logger.warning(
            "the completions of all benchmarks are judged together; name one with --benchmarks (docs/probes.md)"
        )
    root = Path(config.save_dir)
    results = {}
    with hold_lock(root):
        write_manifest(
            root, "probe_states", config, {"checkpoints": {one.name: one.fingerprint for one in checkpoints}}
        )
        try:
            for checkpoint, goal in zip(checkpoints, goals, strict=True):
                result = _probe(config, checkpoint, goal, judged, fitted)
                _write(result, root / checkpoint.name if len(checkpoints) > 1 else root)
                results[checkpoint.name] = result
            if len(results) > 1:
                from openrlhf.evaluation.probe_report import plot_probes

                print(f"comparison: {plot_probes(results, root / 'comparison.png')}")
        except BaseException as error:
            finish_manifest(root, f"failed: {type(error).__name__}")
            raise
        finish_manifest(root, "finished")
    return results


def read_labelled(
    path: str, benchmarks: Sequence[str] | None, max_samples: int | None, seed: int
) -> LabelledCompletions:
    """Completions as eval_rm reads and grades them, without those that have no label, or some of them drawn at random.

    Raises:
        ValueError: as `find_completions`, or no label at all.
    """
    files = grade_files(find_completions(path, benchmarks, seed))
    completions = [one for file in files for one in file.completions]
    labelled = [one for one in completions if one.is_correct is not None]
    if not labelled:
        raise ValueError(
            f"{path}: expected completions with is_correct, or with an expected_answer to grade them by; none of "
            f"{len(completions)} has one (see the grade command)"
        )
    without = len(completions) - len(labelled)
    if max_samples is not None and max_samples < len(labelled):
        drawn = np.random.default_rng(seed).permutation(len(labelled))[:max_samples]
        labelled = [labelled[row] for row in np.sort(drawn)]
    return LabelledCompletions([f"{file.benchmark}/{file.kind}/{file.name}" for file in files], labelled, without)


def _probe(
    config: ProbeConfig,
    checkpoint: RewardCheckpoint,
    goal: GoalState | None,
    judged: LabelledCompletions,
    fitted: LabelledCompletions | None,
) -> dict[str, Any]:
    """Every figure of one model."""
    from openrlhf.evaluation.linear_probes import FOLDS, INVERSE_PENALTIES
    from openrlhf.evaluation.place_states import PERCENTS, read_places
    from openrlhf.evaluation.state_probes import state_figures

    model, tokenizer = checkpoint.load(config.bf16, config.attn_implementation)
    logger.info("%s: %d completions", checkpoint.name, len(judged.completions))

    def read(data: LabelledCompletions):
        return read_places(
            model,
            tokenizer,
            data.completions,
            template=checkpoint.template,
            apply_chat_template=checkpoint.apply_chat_template,
            max_len=checkpoint.max_len,
            batch_tokens=config.batch_tokens,
        )

    own, fit = read(judged), None if fitted is None else read(fitted)
    source = "given" if goal is not None else "other folds" if fit is None else "probe data"
    figures = state_figures(
        own,
        fit,
        None if goal is None else goal.vector,
        bootstrap=config.bootstrap,
        seed=config.seed,
        progress=True,
    )
    return {
        "model": checkpoint.described(),
        "files": judged.files,
        "left_out": {
            "without label": judged.without_label,
            "whose prompt leaves no room": len(judged.completions) - len(own),
        },
        "percents": list(PERCENTS),
        "probe": {"kind": "logistic regression on standardised states, classes balanced", "C": list(INVERSE_PENALTIES)},
        "fitted_on": (
            {"folds": FOLDS, "seed": config.seed}
            if fit is None
            else {"files": fitted.files, "rows": len(fit), "questions": len(set(fit.questions))}
        ),
        "goal_state": {"source": source, "digest": None if goal is None else goal.digest},
        **figures,
    }


def _write(result: dict[str, Any], folder: Path) -> None:
    from openrlhf.evaluation.probe_report import plot_probes, probe_tables

    tables = probe_tables(result)
    atomic_write_text(folder / "probes.json", json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    atomic_write_text(folder / "probes.md", tables)
    plot_probes({result["model"]["name"]: result}, folder / "probes.png")
    print(f"{tables}\nprobes.json, probes.md and probes.png: {folder}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(ProbeConfig, argv)) and None)


if __name__ == "__main__":
    main()
