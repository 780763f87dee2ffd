"""Goal states of a reward model: ``python -m openrlhf.cli.get_representation --dataset DATA --reward_model DIR``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model, run_command
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.adapters import PreferenceOptions
from openrlhf.datasets.completions import sample_files
from openrlhf.datasets.sources import load_rows
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import ensure_writable, hold_lock
from openrlhf.utils.manifest import finish_manifest, write_manifest
from openrlhf.utils.ranks import Ranks

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.cli.goal_inputs import GoalPart, GoalResponses
    from openrlhf.cli.reward_checkpoint import RewardCheckpoint
    from openrlhf.evaluation.goal_accumulator import GoalSums
    from openrlhf.evaluation.goal_state import GoalState, QuestionGoals

    Goal = GoalState | QuestionGoals

logger = logging.getLogger(__name__)

DEFAULT_MIN_VALUE = 3.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class RepresentationConfig:
    """Mean hidden state of chosen, correct or well rated responses, as goal state of a reward model."""

    dataset: str | None = flag(
        None,
        "Preference data as for train_rm, best the data it was trained on; completions with is_correct (a file, or a "
        "folder of output-*.jsonl); or rated responses, with --attribute",
        "dataset_path",
        "dataset-path",
    )
    reward_model: str | None = flag(None, "Reward model checkpoint", "reward_model_path", "reward-model-path")
    save_dir: str | None = flag(None, "Folder for goal_state.npy [1, hidden] and goal_state.json")
    attribute: list[str] | None = flag(
        None, "Columns of ratings: one goal state each, in SAVE_DIR/ATTRIBUTE; all_categories_good: all of them at once"
    )
    min_value: float | None = flag(None, "Lowest rating of a good response, with --attribute (default: 3)")
    per_question: bool = flag(False, "One goal per question, from its correct solutions: an upper bound")
    overwrite: bool = flag(False, "Start anew, and replace a goal state or unfinished sums that are there")
    dataset_probs: str | None = flag(None, "Comma list of shares, one per data set")
    dataset_split: str = flag("train", "Split to read")
    dataset_format: str | None = flag(None, "Format of preference rows; default: told by their columns")
    prompt_key: str | None = flag(None, "Column of the prompt")
    chosen_key: str | None = flag(None, "Column of the chosen response")
    rejected_key: str | None = flag(None, "Column of the rejected response")
    response_key: str | None = flag(None, "Column of the response, with --attribute (default: response)")
    on_bad_row: Literal["error", "skip"] = flag("error", "Unreadable or incomplete row: stop, or skip and count")
    input_template: str | None = flag(None, "Prompt template; default: the checkpoint's")
    apply_chat_template: bool = flag(False, "Render with the tokenizer's chat template; default: the checkpoint's")
    max_len: int | None = flag(None, "Tokens of prompt + response; default: the checkpoint's")
    max_samples: int | None = flag(None, "At most this many rows, drawn at random")
    batch_tokens: int | None = flag(
        None, "Most tokens of a forward pass, padding included (default: 16384 on a GPU, 2048 on a CPU)"
    )
    num_proc: int | None = flag(None, "Processes for tokenisation")
    bf16: bool = flag(False, "Compute in bfloat16")
    attn_implementation: str | None = flag(None, "Attention of transformers: sdpa, eager, flash_attention_2, ...")
    seed: int = flag(42, "Seed of --max_samples and --dataset_probs")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        missing = [name for name in ("dataset", "reward_model", "save_dir") if not getattr(self, name)]
        if missing:
            raise ValueError(f"pass --{' and --'.join(missing)}")
        if self.attribute and self.per_question:
            raise ValueError("--attribute and --per_question exclude each other; make them in two runs")
        for name in ("min_value", "response_key"):
            if getattr(self, name) is not None and not self.attribute:
                raise ValueError(f"--{name} goes with --attribute: name the columns of ratings")
        if self.min_value is not None and not math.isfinite(self.min_value):
            raise ValueError(f"--min_value: expected a number, got {self.min_value}")
        if self.input_template is not None and self.apply_chat_template:
            raise ValueError("--input_template and --apply_chat_template exclude each other: leave one out")
        for name in ("batch_tokens", "max_len", "max_samples", "num_proc"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        for name in self.attribute or []:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"--attribute {name}: no folder of --save_dir can have this name; rename the column")


def run(config: RepresentationConfig) -> list[Goal]:
    """Compute and save the goal states; returns them, in the order of the attributes."""
    config.validate()
    from openrlhf.cli.common import start_ranks

    with start_ranks() as ranks:
        _from_main(ranks, lambda: ensure_writable(config.save_dir, inside=True))
        with hold_lock(config.save_dir, ranks.rank == 0):
            return _run(config, ranks)


def _run(config: RepresentationConfig, ranks: Ranks) -> list[Goal]:
    from openrlhf.cli.goal_resume import find_earlier
    from openrlhf.evaluation.goal_state import load_goal
    from openrlhf.models.pretrained import load_tokenizer

    checkpoint = _main_first(ranks, lambda: _find_checkpoint(config))
    tokenizer = load_tokenizer(checkpoint.folder)
    responses = _main_first(ranks, lambda: read_responses(config, checkpoint, tokenizer))
    folders = [_folder(config, part) for part in responses.parts]
    identities = [_identity(config, checkpoint, part) for part in responses.parts]
    wanted, sums = _from_main(ranks, lambda: find_earlier(config.save_dir, folders, identities, config.overwrite))
    if wanted:
        pending = responses if len(wanted) == len(folders) else responses.only(wanted)
        sums = _sum_responses(config, ranks, checkpoint, pending, sums, [identities[part] for part in wanted])
        _from_main(ranks, lambda: _save(config, checkpoint, pending, sums))
    goals = _from_main(ranks, lambda: [load_goal(folder) for folder in folders])
    if ranks.rank == 0:
        _print_goals(config, responses, goals, wanted)
    return goals


def read_responses(config: RepresentationConfig, checkpoint: RewardCheckpoint, tokenizer: Any) -> GoalResponses:
    """The responses that the flags ask for.

    Raises:
        ValueError: columns or values that do not fit, or no response at all.
    """
    from openrlhf.cli.goal_inputs import (
        completion_responses,
        is_completions,
        preference_responses,
        question_preference_responses,
        rated_responses,
    )

    rows = _load_rows(config)
    if config.attribute:
        return rated_responses(
            rows,
            tokenizer,
            checkpoint,
            attributes=config.attribute,
            min_value=_min_value(config),
            prompt_key=config.prompt_key or "prompt",
            response_key=config.response_key or "response",
        )
    keys = (config.dataset_format, config.prompt_key, config.chosen_key, config.rejected_key)
    if not any(keys) and is_completions(rows.column_names):
        return completion_responses(rows, tokenizer, checkpoint, config.per_question)
    options = PreferenceOptions(
        format=config.dataset_format,
        prompt_key=config.prompt_key,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        input_template=None if checkpoint.apply_chat_template else checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template,
        max_len=checkpoint.max_len,
    )
    if config.per_question:
        return question_preference_responses(rows, tokenizer, checkpoint, options)
    return preference_responses(rows, tokenizer, options, config.num_proc)


def _find_checkpoint(config: RepresentationConfig) -> RewardCheckpoint:
    from openrlhf.cli.reward_checkpoint import find_checkpoint

    return find_checkpoint(
        config.reward_model,
        input_template=config.input_template,
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )


def _load_rows(config: RepresentationConfig):
    if config.dataset == POCKET:
        import datasets

        from openrlhf.evaluation.sampling import pocket_preferences, pocket_question_count

        questions = pocket_question_count(config.max_samples)
        policy = resolve_pocket_model(POCKET)
        pairs = pocket_preferences(cache_folder(), policy, n_questions=questions, seed=config.seed, split="train")
        return datasets.Dataset.from_list(pairs[: config.max_samples])
    folder = Path(config.dataset).expanduser()
    samples = sample_files(folder) if folder.is_dir() else []  # never the greedy file with them
    return load_rows(
        ",".join(map(str, samples)) or config.dataset,
        config.dataset_split,
        probs=config.dataset_probs,
        max_samples=config.max_samples,
        seed=config.seed,
        on_bad_row=config.on_bad_row,
    )


def _min_value(config: RepresentationConfig) -> float:
    return DEFAULT_MIN_VALUE if config.min_value is None else config.min_value


def _folder(config: RepresentationConfig, part: GoalPart) -> Path:
    return Path(config.save_dir) / (part.attribute or "")


def _identity(config: RepresentationConfig, checkpoint: RewardCheckpoint, part: GoalPart) -> dict[str, Any]:
    """What a goal state must share with one that is there: the fields of it that decide its value."""
    return {
        "per_question": config.per_question,
        "checkpoint": checkpoint.fingerprint,
        "dtype": "bfloat16" if config.bf16 else "float32",
        "template": checkpoint.template,
        "apply_chat_template": checkpoint.apply_chat_template,
        "max_len": checkpoint.max_len,
        "dataset_fingerprint": part.fingerprint,
        "attribute": part.attribute,
        "columns": part.columns,
        "min_value": _min_value(config) if part.attribute else None,
    }


def _sum_responses(
    config: RepresentationConfig,
    ranks: Ranks,
    checkpoint: RewardCheckpoint,
    responses: GoalResponses,
    sums: GoalSums | None,
    identities: Sequence[dict[str, Any]],
) -> GoalSums:
    """Sums over all responses; those so far are written after every window."""
    from openrlhf.evaluation.goal_accumulator import SUMS_FILE, GoalSums, accumulate_states, save_sums
    from openrlhf.evaluation.scoring import BATCH_TOKENS

    path = Path(config.save_dir) / SUMS_FILE
    if ranks.rank == 0:
        data = {part.attribute or "train": {"fingerprint": part.fingerprint, **part.counts} for part in responses.parts}
        write_manifest(
            config.save_dir, "get_representation", config, {"checkpoint": checkpoint.fingerprint, "data": data}
        )
        if sums is not None:
            logger.info("going on after %d of %d responses", sums.position, len(responses.members))
    model, _ = checkpoint.load(config.bf16, config.attn_implementation)
    sums = sums or GoalSums.zeros(responses.goals, model.hidden_size)
    for added in accumulate_states(
        model,
        responses.read(sums.position),
        sums,
        batch_tokens=config.batch_tokens or BATCH_TOKENS[model.device.type == "cuda"],
        ranks=ranks,
        total=len(responses.members),
    ):
        sums = added
        if ranks.rank == 0:
            save_sums(path, sums, {"goals": identities})
    return sums


def _save(config: RepresentationConfig, checkpoint: RewardCheckpoint, responses: GoalResponses, sums: GoalSums) -> None:
    from openrlhf.evaluation.goal_accumulator import SUMS_FILE
    from openrlhf.evaluation.goal_state import goal_of_sums, question_goals_of_sums

    shared = {
        "template": checkpoint.template,
        "apply_chat_template": checkpoint.apply_chat_template,
        "max_len": checkpoint.max_len,
        "checkpoint": checkpoint.fingerprint,
        "checkpoint_name": config.reward_model,
        "dtype": "bfloat16" if config.bf16 else "float32",
        "dataset": config.dataset,
    }
    problems = []
    for number, part in enumerate(responses.parts):
        details = shared | {"dataset_fingerprint": part.fingerprint, "counts": part.counts}
        if part.attribute:
            details |= {"attribute": part.attribute, "columns": part.columns, "min_value": _min_value(config)}
        try:
            if responses.questions is not None:
                goal = question_goals_of_sums(sums, responses.questions, **details)
            else:
                goal = goal_of_sums(sums, number, **details)
        except ValueError as error:  # the other attributes are written first
            problems.append(f"{part.attribute}: {error}" if part.attribute else str(error))
            continue
        goal.save(_folder(config, part))
    (Path(config.save_dir) / SUMS_FILE).unlink(missing_ok=True)
    finish_manifest(config.save_dir, "failed" if problems else "finished")
    if problems:
        raise ValueError("; ".join(problems))


def _print_goals(
    config: RepresentationConfig, responses: GoalResponses, goals: Sequence[Goal], computed: Sequence[int]
) -> None:
    from openrlhf.evaluation.goal_state import FILE_NAME, QuestionGoals

    for number, (part, goal) in enumerate(zip(responses.parts, goals, strict=True)):
        folder = _folder(config, part)
        if isinstance(goal, QuestionGoals):
            what, shape = f"goals of {len(goal.questions)} questions from", list(goal.vectors.shape)
        else:
            what, shape = f"goal state{f' {part.attribute!r}' if part.attribute else ''} of", list(goal.vector.shape)
        there = "" if number in computed else " (was there already; --overwrite computes it anew)"
        print(f"{what} {goal.count} chosen responses, shape {shape}: {folder / FILE_NAME}{there}")
        shown = {name: count for name, count in (goal.counts or {}).items() if count}
        cosine = "-" if goal.mean_pairwise_cosine is None else f"{goal.mean_pairwise_cosine:.4f}"
        counts = ", ".join(f"{name} {count}" for name, count in shown.items())
        print(f"  mean norm {goal.mean_norm:.4f}, mean pairwise cosine {cosine}; rows: {counts}")


def _from_main(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Result of work in the main process, known in every process; its error ends all of them."""
    result, failure = None, None
    if ranks.rank == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
    told, result = ranks.gather_objects((None if failure is None else str(failure), result))[0]
    if failure is not None:
        raise failure
    if told is not None:
        raise ValueError(f"stopped by the main process: {told}")
    return result


def _main_first(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Work in the main process first, so that the others find its downloads and caches, then in all of them."""
    result: list[Result] = []
    _from_main(ranks, lambda: result.append(work()))
    return result[0] if ranks.rank == 0 else work()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(RepresentationConfig, argv)) and None)


if __name__ == "__main__":
    main()
