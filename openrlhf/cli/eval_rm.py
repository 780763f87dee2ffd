"""Score completions or preference pairs with reward models: ``python -m openrlhf.cli.eval_rm ...``."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openrlhf.cli.common import run_command, start_ranks
from openrlhf.cli.completion_files import CompletionFile, find_completions, grade_files
from openrlhf.cli.parser import parse_config
from openrlhf.evaluation.filtering import filter_by_goal
from openrlhf.evaluation.metrics import prefix_index
from openrlhf.evaluation.scored_rows import read_scored_sets, read_summary
from openrlhf.evaluation.summary import PREFIX_PERCENTS, format_table, summarise_rows
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import atomic_write_text, ensure_writable, hold_lock
from openrlhf.utils.manifest import finish_manifest, write_manifest
from openrlhf.utils.ranks import Ranks

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.cli.reward_checkpoint import RewardCheckpoint
    from openrlhf.evaluation.goal_state import GoalState, QuestionGoals
    from openrlhf.evaluation.preference_sets import PreferenceSet

    Goal = GoalState | QuestionGoals

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalRMConfig:
    """Reward and goal similarity of completions of maths benchmarks, with AUROC and votes; accuracy on preferences."""

    completions_data_path: str | None = flag(
        None, "Folder with BENCHMARK/output-greedy.jsonl and output-*.jsonl, a file of completions, or 'pocket'"
    )
    preferences: list[str] | None = flag(
        None, "Preference sets (file, folder or hub id): HH, LLMBar, RewardBench 1 and 2, or any training format"
    )
    reward_model_path: list[str] | None = flag(
        None, "Reward model checkpoints: folders, s3:// addresses or hub ids", "reward_model", "reward-model"
    )
    goal_state_path: list[str] | None = flag(
        None, "Goal states made by get_representation, one a model in the same order: folders or .npy files"
    )
    save_dir: str = flag("./rm_eval_data", "Scored rows go to SAVE_DIR/MODEL/BENCHMARK/greedy or all")
    benchmarks: list[str] | None = flag(None, "Folders (or files) under --completions_data_path; default: all")
    vanilla: bool = flag(False, "Score without a goal state")
    filter_threshold: float | None = flag(None, "Goal similarity below which the filtered vote drops a completion")
    warmup_tokens: int = flag(0, "Response tokens that the filter never judges")
    tie_rule: Literal["score", "original"] = flag(
        "score", "Ties of the vote: by score, or to the correct answer (only to compare with published numbers)"
    )
    percentiles: list[float] = flag(list(PREFIX_PERCENTS), "Percents of the response for the prefix AUROC")
    dataset_format: str | None = flag(None, "Format of the rows of --preferences; default: told by their columns")
    prompt_key: str | None = flag(None, "Column of the prompt in --preferences")
    chosen_key: str | None = flag(None, "Column of the chosen response in --preferences")
    rejected_key: str | None = flag(None, "Column of the rejected response in --preferences")
    subset_key: str = flag("subset", "Column of --preferences by which accuracy is also told")
    on_bad_row: Literal["error", "skip"] = flag("error", "Unusable row of --preferences: stop, or skip and count")
    max_samples: int | None = flag(None, "At most this many rows of each preference set, drawn at random")
    input_template: str | None = flag(None, "Prompt template; default: the checkpoint's")
    apply_chat_template: bool = flag(False, "Render with the tokenizer's chat template; default: the checkpoint's")
    max_len: int | None = flag(None, "Tokens of prompt + response; default: the checkpoint's")
    batch_tokens: int | None = flag(
        None, "Tokens of a forward pass, shared beginnings once (default: 16384 on a GPU, 2048 on a CPU)"
    )
    share_prompts: Literal["auto", "off"] = flag(
        "auto", "Compute what completions begin with alike once, where the architecture allows it; or never"
    )
    bf16: bool = flag(False, "Compute in bfloat16")
    attn_implementation: str | None = flag(None, "Attention of transformers: sdpa, eager, flash_attention_2, ...")
    bootstrap: int = flag(1000, "Draws for the 95% intervals")
    seed: int = flag(0, "Seed of the intervals, of the split for the equal-accuracy threshold, and of pocket")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        if not self.reward_model_path:
            raise ValueError("pass --reward_model_path with one or more checkpoints")
        if not self.completions_data_path and not self.preferences:
            raise ValueError("pass --completions_data_path with completions, or --preferences with preference sets")
        if self.vanilla and self.goal_state_path:
            raise ValueError("--vanilla scores without a goal state: leave it or --goal_state_path out")
        if self.completions_data_path and not self.vanilla and not self.goal_state_path:
            raise ValueError("pass either --goal_state_path (made by get_representation) or --vanilla")
        models, goals = len(self.reward_model_path), len(self.goal_state_path or [])
        if goals and goals != models:
            raise ValueError(f"--goal_state_path: expected one for each of the {models} models, got {goals}")
        if self.input_template is not None and self.apply_chat_template:
            raise ValueError("--input_template and --apply_chat_template exclude each other: leave one out")
        for name in ("batch_tokens", "bootstrap", "max_len", "max_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("max_samples", "dataset_format", "prompt_key", "chosen_key", "rejected_key"):
            if getattr(self, name) is not None and not self.preferences:
                raise ValueError(f"--{name} goes with --preferences: it would change nothing here")
        if self.benchmarks and not self.completions_data_path:
            raise ValueError("--benchmarks goes with --completions_data_path: pass the folder that holds them")
        if not self.percentiles:
            raise ValueError("--percentiles: expected at least one number, got none")
        for percent in self.percentiles:
            prefix_index(1, percent)
        filter_by_goal([0.0], self.filter_threshold, self.warmup_tokens)


def run(config: EvalRMConfig) -> dict[str, Any]:
    """Score, save and print; returns for each model, by name, what its summary.json holds."""
    config.validate()
    from openrlhf.cli.eval_preferences import compare_preference_folders
    from openrlhf.cli.reward_checkpoint import find_checkpoints

    checkpoints = find_checkpoints(
        config.reward_model_path,
        input_template=config.input_template,
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )
    goals = [one.load_goal(path) for one, path in zip(checkpoints, config.goal_state_path or [], strict=False)]
    ensure_writable(config.save_dir, inside=True)
    files = []
    if config.completions_data_path:
        files = grade_files(find_completions(config.completions_data_path, config.benchmarks, config.seed))
    preferences = [_read_preferences(config, checkpoint) for checkpoint in checkpoints]
    summaries = {}
    with start_ranks() as ranks:
        for number, checkpoint in enumerate(checkpoints):
            goal = goals[number] if goals else None
            folder = Path(config.save_dir) / checkpoint.name
            with hold_lock(folder, ranks.rank == 0):
                try:
                    summaries[checkpoint.name] = _evaluate(config, checkpoint, goal, files, preferences[number], ranks)
                except BaseException as error:
                    if ranks.rank == 0:
                        finish_manifest(folder, f"failed: {type(error).__name__}")
                    raise
        if config.preferences and len(checkpoints) > 1 and ranks.rank == 0:
            folders = {checkpoint.name: Path(config.save_dir) / checkpoint.name for checkpoint in checkpoints}
            records = compare_preference_folders(folders, bootstrap=config.bootstrap, seed=config.seed)
            file = Path(config.save_dir) / "preference_comparisons.json"
            atomic_write_text(file, json.dumps(records, indent=2, ensure_ascii=False) + "\n")
            print(f"\ncomparisons: {file}")
    return summaries


def _evaluate(
    config: EvalRMConfig,
    checkpoint: RewardCheckpoint,
    goal: Goal | None,
    files: Sequence[CompletionFile],
    preferences: Sequence[PreferenceSet],
    ranks: Ranks,
) -> dict[str, Any]:
    """Score everything with one model."""
    from openrlhf.cli.eval_preferences import evaluate_preferences
    from openrlhf.evaluation.goal_state import GoalState, QuestionGoals
    from openrlhf.evaluation.scored_files import ScoringJob, score_jobs

    folder = Path(config.save_dir) / checkpoint.name
    if ranks.rank == 0:
        write_manifest(folder, "eval_rm", config, {"checkpoint": checkpoint.fingerprint})
    model, tokenizer = checkpoint.load(config.bf16, config.attn_implementation)
    summary: dict[str, Any] = {"model": checkpoint.described(), "goal_state": goal.digest if goal else None, "sets": {}}
    summary["files"] = [f"{file.benchmark}/{file.kind}/{file.name}.jsonl" for file in files]
    summary |= _kept(folder, checkpoint, bool(files), bool(preferences))
    for benchmark, members in groupby(files, key=lambda file: file.benchmark.split("/")[0]):
        jobs = [
            ScoringJob(file.completions, folder / file.benchmark / file.kind / f"{file.name}.jsonl") for file in members
        ]
        logger.info("%s, %s: %d completions", checkpoint.name, benchmark, sum(len(job.completions) for job in jobs))
        score_jobs(
            model,
            tokenizer,
            jobs,
            template=checkpoint.template,
            apply_chat_template=checkpoint.apply_chat_template,
            max_len=checkpoint.max_len,
            goal=goal,
            batch_tokens=config.batch_tokens,
            checkpoint=checkpoint.fingerprint,
            ranks=ranks,
            share_prompts=config.share_prompts == "auto",
        )
    if preferences:
        if isinstance(goal, QuestionGoals):
            logger.warning("goals of single questions do not fit preference sets: they get the reward alone")
        summary["preferences"] = evaluate_preferences(
            preferences,
            checkpoint,
            model,
            tokenizer,
            goal if isinstance(goal, GoalState) else None,
            folder,
            batch_tokens=config.batch_tokens,
            share_prompts=config.share_prompts == "auto",
            bootstrap=config.bootstrap,
            seed=config.seed,
            ranks=ranks,
        )
    if ranks.rank == 0 and files:
        options = {key: getattr(config, key) for key in ("warmup_tokens", "tie_rule", "bootstrap", "seed")}
        atomic_write_text(folder / "summary.json", json.dumps(summary) + "\n")  # names the files that are read next
        for name, rows in read_scored_sets(folder).items():
            summary["sets"][name] = summarise_rows(
                rows, threshold=config.filter_threshold, percentiles=config.percentiles, **options
            )
        print(f"{checkpoint.name}\n{format_table(summary['sets'])}\n")
    if ranks.rank == 0:
        atomic_write_text(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        finish_manifest(folder, "finished")
        print(f"scored rows and summary.json: {folder}")
    return summary


def _kept(folder: Path, checkpoint: RewardCheckpoint, has_files: bool, has_preferences: bool) -> dict[str, Any]:
    """What an earlier call of the same model wrote into summary.json about the kind of data that this call has not."""
    try:
        earlier = read_summary(folder) or {}
    except ValueError as error:  # this call writes a new one
        logger.warning("%s", error)
        return {}
    if (earlier.get("model") or {}).get("fingerprint") != checkpoint.fingerprint:
        return {}
    names = [] if has_files else ["goal_state", "files", "sets"] if earlier.get("files") else []
    names += [] if has_preferences else ["preferences"]
    return {name: earlier[name] for name in names if name in earlier}


def _read_preferences(config: EvalRMConfig, checkpoint: RewardCheckpoint) -> list[PreferenceSet]:
    if not config.preferences:
        return []
    from openrlhf.cli.eval_preferences import read_preference_sets

    return read_preference_sets(
        config.preferences,
        checkpoint,
        dataset_format=config.dataset_format,
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        subset_key=config.subset_key,
        on_bad_row=config.on_bad_row,
        max_samples=config.max_samples,
        seed=config.seed,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(EvalRMConfig, argv)) and None)


if __name__ == "__main__":
    main()
