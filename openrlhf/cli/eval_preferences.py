"""Preference sets of eval_rm: read before the model, score, write, print."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.cli.reward_checkpoint import RewardCheckpoint
from openrlhf.datasets.jsonl import OnBadRow, read_jsonl
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.preference_figures import SCORES, compare_preferences, summarise_preferences
from openrlhf.evaluation.preference_scoring import score_preferences
from openrlhf.evaluation.preference_sets import PreferenceSet, ReadingOptions, read_preference_set, source_name
from openrlhf.evaluation.preference_table import format_preference_comparisons, format_preferences
from openrlhf.evaluation.resuming import scoring_settings
from openrlhf.evaluation.scoring import Scorer
from openrlhf.models.pretrained import load_tokenizer
from openrlhf.utils.atomic import atomic_write_text
from openrlhf.utils.ranks import OneProcess, Ranks

logger = logging.getLogger(__name__)

FOLDER = "preferences"


def read_preference_sets(
    files: Sequence[str],
    checkpoint: RewardCheckpoint,
    *,
    dataset_format: str | None = None,
    prompt_key: str | None = None,
    chosen_key: str | None = None,
    rejected_key: str | None = None,
    subset_key: str = "subset",
    on_bad_row: OnBadRow = "error",
    max_samples: int | None = None,
    seed: int = 0,
) -> list[PreferenceSet]:
    """Read, check and render all preference sets; needs the checkpoint's tokenizer but not its weights.

    Args:
        files: sources as `read_preference_set` takes them. Two of one name get numbers.
        checkpoint: says how prompts are rendered.
        dataset_format, prompt_key, chosen_key, rejected_key, subset_key, on_bad_row, max_samples, seed: as the fields
            of `ReadingOptions`, for all files.
    Raises:
        ValueError: no file, a source that cannot be read, a bad row, or a set without usable rows.
    """
    if not files:
        raise ValueError("--preferences: expected at least one file, folder or hub id")
    if "pocket" in files and not Path("pocket").exists():
        raise ValueError("--preferences pocket: the embedded task has no preference set; name a file, folder or hub id")
    options = ReadingOptions(
        template=checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template,
        format=dataset_format,
        prompt_key=prompt_key,
        chosen_key=chosen_key,
        rejected_key=rejected_key,
        subset_key=subset_key,
        on_bad_row=on_bad_row,
        max_samples=max_samples,
        seed=seed,
    )
    tokenizer = load_tokenizer(checkpoint.folder)
    names = _unique_names(files)
    return [read_preference_set(file, tokenizer, options, name) for file, name in zip(files, names, strict=True)]


def evaluate_preferences(
    sets: Sequence[PreferenceSet],
    checkpoint: RewardCheckpoint,
    model: Any,
    tokenizer: Any,
    goal: GoalState | None,
    folder: str | Path,
    *,
    batch_tokens: int | None = None,
    share_prompts: bool = True,
    bootstrap: int = 1000,
    seed: int = 0,
    ranks: Ranks | None = None,
    progress: bool = True,
    scorer: Any = None,
) -> dict[str, Any]:
    """Score preference sets and write their rows and figures under `folder`/preferences; all processes call this alike.

    Args:
        sets: from `read_preference_sets` with the same checkpoint.
        folder: of the model, such as SAVE_DIR/MODEL.
        batch_tokens, share_prompts: as `Scorer` takes them.
        bootstrap, seed: draws of prompts for the intervals.
        scorer: what scores windows of sequences; None: `Scorer` of the model.
    Returns:
        What preferences/summary.json holds: `model`, `goal_state`, `files`, and `sets`: by name `source`, `format`,
        `left_out` and the figures of `summarise_preferences`.
    Raises:
        ValueError: a reward that is not finite, or files there of other rows or settings.
    """
    ranks = ranks or OneProcess()
    scorer = scorer or Scorer(model, goal, batch_tokens, ranks, share_prompts, last_only=True)
    folder = Path(folder) / FOLDER
    settings = scoring_settings(
        model,
        goal,
        checkpoint=checkpoint.fingerprint,
        template=checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template,
        max_len=checkpoint.max_len,
    )
    summaries: dict[str, dict[str, Any]] = {}
    for one in sets:
        logger.info("%s: scoring %d rows of %s (%s)", one.name, len(one.items), one.source, one.format)
        rows = score_preferences(
            one.items,
            tokenizer,
            scorer,
            max_len=checkpoint.max_len,
            out_path=folder / f"{one.name}.jsonl",
            settings=settings,
            progress=progress,
        )
        described = {"source": one.source, "format": one.format, "left_out": one.left_out}
        summaries[one.name] = described | summarise_preferences(rows, bootstrap=bootstrap, seed=seed)
    summary = {
        "model": checkpoint.described(),
        "goal_state": goal.digest if goal else None,
        "files": [f"{name}.jsonl" for name in summaries],
        "sets": summaries,
    }
    if ranks.rank == 0:
        atomic_write_text(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        print(f"{checkpoint.name}\n{format_preferences(summaries)}")
        print(f"\nscored preference sets and summary.json: {folder}")
    return summary


def compare_preference_folders(
    folders: Mapping[str, str | Path], *, bootstrap: int = 1000, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare every two models on the preference sets that both have scored, and print the table.

    Args:
        folders: folder of each model (the one `evaluate_preferences` was given) by its label.
    Returns:
        Records of `compare_preferences` with `set`, `a_label` and `b_label`; empty where no set is common.
    """
    scored = {label: _scored_sets(Path(folder) / FOLDER) for label, folder in folders.items()}
    records = []
    for (a, a_sets), (b, b_sets) in itertools.combinations(scored.items(), 2):
        for name in (name for name in a_sets if name in b_sets):
            for score in SCORES:
                found = compare_preferences(a_sets[name], b_sets[name], score, bootstrap=bootstrap, seed=seed)
                if found["pairs"]:
                    records.append({"set": name, "a_label": a, "b_label": b} | found)
    if records:
        print(format_preference_comparisons(records))
    return records


def _scored_sets(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of the sets that the last evaluation in a folder scored, by name; none where there was no evaluation."""
    summary = folder / "summary.json"
    if not summary.is_file():
        return {}
    files = json.loads(summary.read_text(encoding="utf-8"))["files"]
    return {file.removesuffix(".jsonl"): [row for _, row in read_jsonl(folder / file)] for file in files}


def _unique_names(files: Sequence[str]) -> list[str]:
    names: list[str] = []
    for file in files:
        name = base = source_name(file)
        for number in itertools.count(2):
            if name not in (*names, "summary"):
                break
            name = f"{base}-{number}"
        names.append(name)
    return names
