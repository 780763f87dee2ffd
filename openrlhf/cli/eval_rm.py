"""Score completions with a reward model: ``python -m openrlhf.cli.eval_rm --reward_model_path DIR ...``."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from openrlhf.cli.common import run_command
from openrlhf.cli.completion_files import CompletionFile, find_completions
from openrlhf.cli.parser import parse_config
from openrlhf.cli.reward_checkpoint import RewardCheckpoint, find_checkpoint
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.scoring import grade_completions, score_completions
from openrlhf.evaluation.summary import format_table, summarise_rows
from openrlhf.evaluation.voting import filter_by_goal
from openrlhf.trainer.config import flag
from openrlhf.utils.checkpoint import atomic_write_text, ensure_writable
from openrlhf.utils.manifest import finish_manifest, write_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalRMConfig:
    """Reward and goal similarity of completions of maths benchmarks, with AUROC and votes."""

    completions_data_path: str | None = flag(
        None, "Folder with BENCHMARK/output-greedy.jsonl and output-*.jsonl, a file of completions, or 'pocket'"
    )
    reward_model_path: str | None = flag(None, "Reward model checkpoint", "reward_model", "reward-model")
    goal_state_path: str | None = flag(None, "Goal state made by get_representation: its folder or .npy file")
    save_dir: str = flag("./rm_eval_data", "Scored rows go to SAVE_DIR/MODEL/BENCHMARK/greedy or all")
    benchmarks: list[str] | None = flag(None, "Folders (or files) under --completions_data_path; default: all")
    vanilla: bool = flag(False, "Score without a goal state")
    filter_threshold: float | None = flag(None, "Goal similarity below which the filtered vote drops a completion")
    warmup_tokens: int = flag(0, "Response tokens that the filter never judges")
    tie_rule: Literal["score", "original"] = flag(
        "score", "Ties of the vote: by score, or to the correct answer (only to compare with published numbers)"
    )
    input_template: str | None = flag(None, "Prompt template; default: the checkpoint's")
    apply_chat_template: bool = flag(False, "Render with the tokenizer's chat template; default: the checkpoint's")
    max_len: int | None = flag(None, "Tokens of prompt + response; default: the checkpoint's")
    batch_tokens: int = flag(16384, "Most tokens of a forward pass, padding included")
    bf16: bool = flag(False, "Compute in bfloat16")
    attn_implementation: str | None = flag(None, "Attention of transformers: sdpa, eager, flash_attention_2, ...")
    bootstrap: int = flag(1000, "Draws for the 95% intervals")
    seed: int = flag(0, "Seed of the intervals, of the split for the equal-accuracy threshold, and of pocket")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        missing = [name for name in ("completions_data_path", "reward_model_path") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"pass --{' and --'.join(missing)}")
        if self.vanilla == (self.goal_state_path is not None):
            raise ValueError("pass either --goal_state_path (made by get_representation) or --vanilla")
        if self.batch_tokens < 1 or self.bootstrap < 1:
            raise ValueError(
                f"--batch_tokens and --bootstrap: expected 1 or more, got {self.batch_tokens}, {self.bootstrap}"
            )
        filter_by_goal([0.0], self.filter_threshold, self.warmup_tokens)


def run(config: EvalRMConfig) -> dict[str, Any]:
    """Score, save and print; returns what summary.json holds."""
    config.validate()
    checkpoint = find_checkpoint(
        config.reward_model_path,
        input_template=config.input_template,
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )
    goal = None if config.vanilla else _load_goal(config.goal_state_path, checkpoint)
    folder = Path(config.save_dir) / checkpoint.name
    ensure_writable(folder, inside=True)
    files = _graded(find_completions(config.completions_data_path, config.benchmarks, config.seed))
    write_manifest(folder, "eval_rm", config, {"checkpoint": checkpoint.fingerprint})
    model, tokenizer = checkpoint.load(config.bf16, config.attn_implementation)
    sets: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        name = f"{file.benchmark}/{file.kind}"
        logger.info("%s: scoring %d completions of %s", name, len(file.completions), file.name)
        sets.setdefault(name, []).extend(
            score_completions(
                model,
                tokenizer,
                file.completions,
                template=checkpoint.template,
                apply_chat_template=checkpoint.apply_chat_template,
                max_len=checkpoint.max_len,
                goal=goal,
                batch_tokens=config.batch_tokens,
                out_path=folder / file.benchmark / file.kind / f"{file.name}.jsonl",
                checkpoint=checkpoint.fingerprint,
            )
        )
    options = {key: getattr(config, key) for key in ("warmup_tokens", "tie_rule", "bootstrap", "seed")}
    summaries = {
        name: summarise_rows(rows, threshold=config.filter_threshold, **options) for name, rows in sets.items()
    }
    described = {key: value for key, value in asdict(checkpoint).items() if key != "folder"}
    summary = {"model": described, "goal_state": goal.digest if goal else None, "sets": summaries}
    summary["files"] = [f"{file.benchmark}/{file.kind}/{file.name}.jsonl" for file in files]
    atomic_write_text(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    finish_manifest(folder, "finished")
    print(format_table(summaries))
    print(f"\nscored rows and summary.json: {folder}")
    return summary


def _graded(files: Sequence[CompletionFile]) -> list[CompletionFile]:
    graded = []
    for file in files:
        completions, count = grade_completions(file.completions)
        if count:
            logger.info("%s/%s/%s: graded %d rows without a label", file.benchmark, file.kind, file.name, count)
        graded.append(replace(file, completions=completions))
    return graded


def _load_goal(path: str, checkpoint: RewardCheckpoint) -> GoalState:
    goal = GoalState.load(path)
    goal.check(checkpoint.fingerprint)
    same = ("template", "apply_chat_template")
    if any(getattr(goal, name) != getattr(checkpoint, name) for name in same):
        raise ValueError(
            f"the goal state was made with template {goal.template!r} (chat template: {goal.apply_chat_template}), "
            f"scoring uses {checkpoint.template!r} ({checkpoint.apply_chat_template}); use the same for both"
        )
    return goal


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(EvalRMConfig, argv)) and None)


if __name__ == "__main__":
    main()
