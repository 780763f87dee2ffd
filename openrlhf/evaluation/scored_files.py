"""Scored completions in JSONL files: written in the order read, resumed after a kill, several files at a time.

The files of one benchmark hold a sample each of the same questions. Their rows are scored together, row by row over all
files, so that the prompt of a question is computed once for all its samples.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from openrlhf.datasets.completions import Completion, completion_to_row
from openrlhf.datasets.jsonl import append_jsonl, read_jsonl, write_jsonl
from openrlhf.evaluation.batching import cut_windows
from openrlhf.evaluation.resuming import open_scores, scoring_settings
from openrlhf.evaluation.scoring import (
    EncodedCompletion,
    Goal,
    ScoredCompletion,
    Scorer,
    ScoringBar,
    encode_completions,
)
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.ranks import OneProcess, Ranks

logger = logging.getLogger(__name__)

_ENCODE_ROWS = 256  # rows tokenised at a time


@dataclass(frozen=True)
class ScoringJob:
    """Completions that are scored into one file."""

    completions: Sequence[Completion]
    out_path: Path | None = None  # JSONL; <stem>.settings.json beside it records what it was scored with


def score_completions(
    model: RewardModel,
    tokenizer,
    completions: Sequence[Completion],
    *,
    out_path: str | Path | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Score completions, each as if it were alone; returns one row each, in order.

    With `out_path` rows are appended as they are done; a second call with the same completions and settings goes on
    where the first one was killed. Options, errors: as `score_jobs`.
    """
    path = None if out_path is None else Path(out_path)
    (rows,) = score_jobs(model, tokenizer, [ScoringJob(completions, path)], keep_rows=True, **options)
    return rows


def score_jobs(
    model: RewardModel,
    tokenizer,
    jobs: Sequence[ScoringJob],
    *,
    template: str,
    apply_chat_template: bool = False,
    max_len: int,
    goal: Goal | None = None,
    batch_tokens: int | None = None,
    checkpoint: str | None = None,
    ranks: Ranks | None = None,
    progress: bool = True,
    share_prompts: bool = True,
    keep_rows: bool = False,
) -> list[list[dict[str, Any]]]:
    """Score the completions of several files together.

    Args:
        template, apply_chat_template, max_len: as in training; see `encode_completions`.
        goal: adds `cosine_sim`; with goals per question, rows of questions without one have none.
        batch_tokens: most tokens of a forward pass, padding included; does not change the scores. None: as `Scorer`.
        checkpoint: fingerprint of the model, recorded beside the files.
        ranks: processes that share the work; all call this function alike, the main one writes.
        keep_rows: return the rows (of all files) instead of empty lists.
    Returns:
        For each job its rows in order: the completion's keys and those of `ScoredCompletion`.
    Raises:
        ValueError: a reward that is not finite, or a file that holds rows of other completions or settings.
    """
    ranks = ranks or OneProcess()
    encode = {"template": template, "apply_chat_template": apply_chat_template, "max_len": max_len}
    settings = scoring_settings(model, goal, checkpoint=checkpoint, **encode)
    scorer = Scorer(model, goal, batch_tokens, ranks, share_prompts)
    done = [_resume(job, settings) if ranks.rank == 0 else 0 for job in jobs]
    done = ranks.gather_objects(done)[0]  # what the main process found, once it has mended the files
    rows: list[list[dict[str, Any]]] = [
        [row for _, row in read_jsonl(job.out_path)] if keep_rows and count else []
        for job, count in zip(jobs, done, strict=True)
    ]
    total = sum(len(job.completions) for job in jobs)
    unscored = without_goal = 0
    with ScoringBar(total, sum(done), disable=not progress or ranks.rank > 0) as bar:
        for window in _windows(tokenizer, jobs, done, scorer.window_tokens, encode):
            scored = scorer.score(
                [encoded for _, _, encoded in window],
                [jobs[job].completions[row].question for job, row, _ in window],
                lambda i, window=window: _place(jobs, *window[i][:2]),
                bar,
            )
            new: dict[int, list[dict[str, Any]]] = {}
            for (job, row, _), one in zip(window, scored, strict=True):
                unscored += one.reward is None
                without_goal += goal is not None and one.reward is not None and one.cosine_sim is None
                new.setdefault(job, []).append(completion_to_row(jobs[job].completions[row]) | vars(one))
            for job, added in new.items():
                if keep_rows:
                    rows[job] += added
                if ranks.rank == 0 and jobs[job].out_path is not None:
                    append_jsonl(jobs[job].out_path, added)
    if unscored and ranks.rank == 0:
        logger.warning("%d completions have a prompt too long for max_len %d: no reward", unscored, max_len)
    if without_goal and ranks.rank == 0:
        logger.warning("%d completions are of questions without a goal: no goal similarity", without_goal)
    ranks.gather_objects(None)  # nobody reads a file before it is whole
    return rows


def _windows(
    tokenizer, jobs: Sequence[ScoringJob], done: Sequence[int], window_tokens: int, options: dict[str, Any]
) -> Iterator[list[tuple[int, int, EncodedCompletion]]]:
    """(job, row, tokens) of what is left, row by row over all jobs, in lists of about window_tokens tokens."""
    longest = max((len(job.completions) for job in jobs), default=0)
    places = (
        (job, row)
        for row in range(min(done, default=0), longest)
        for job in range(len(jobs))
        if done[job] <= row < len(jobs[job].completions)
    )

    def encoded_rows() -> Iterator[tuple[int, int, EncodedCompletion]]:
        while part := list(islice(places, _ENCODE_ROWS)):
            texts = [jobs[job].completions[row] for job, row in part]
            for (job, row), encoded in zip(part, encode_completions(tokenizer, texts, **options), strict=True):
                yield job, row, encoded

    return cut_windows(encoded_rows(), window_tokens, lambda item: len(item[2]))


def _place(jobs: Sequence[ScoringJob], job: int, row: int) -> str:
    path = jobs[job].out_path
    return f"completion {row}" if path is None else f"{path}: completion {row}"


def _resume(job: ScoringJob, settings: dict[str, Any]) -> int:
    """Number of rows already in the file, which get the labels of now."""
    if job.out_path is None or not open_scores(job.out_path, settings):
        return 0
    return _refresh_labels(job.out_path, job.completions)


def _refresh_labels(path: Path, completions: Sequence[Completion]) -> int:
    """Check that the rows belong to these completions and give them the labels of now; returns their number.

    Scores stay; labels and answers may have been corrected since, and samples numbered anew after a file was added.
    """
    changed = False
    count = 0
    for count, (row, current) in enumerate(_with_labels_of(path, completions), start=1):
        changed = changed or current != row
        if any(row.get(key) != current.get(key) for key in ("question", "generated_solution")):
            raise ValueError(f"{path}: row {count - 1} belongs to another completion; remove the file to score anew")
    if changed:
        write_jsonl(path, (current for _, current in _with_labels_of(path, completions)))
    if count:
        logger.info("%s: %d of %d completions are scored already", path, count, len(completions))
    return count


def _with_labels_of(path: Path, completions: Sequence[Completion]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of a scored file, as they are and with the other keys taken from the completions."""
    scored_keys = [field.name for field in dataclasses.fields(ScoredCompletion)]
    for number, (_, row) in enumerate(read_jsonl(path)):
        if number == len(completions):
            raise ValueError(
                f"{path} holds more rows than the {len(completions)} completions to score; remove it to score anew"
            )
        yield row, completion_to_row(completions[number]) | {key: row.get(key) for key in scored_keys}
