"""Reward, per-token value and per-token goal similarity of completions, written in order and resumable."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from openrlhf.datasets.completions import Completion, completion_to_row, read_jsonl, write_jsonl
from openrlhf.datasets.templates import render_question
from openrlhf.datasets.tokenize import encode_prompts, encode_responses
from openrlhf.evaluation.batching import WINDOW_BATCHES, pad_right, token_batches
from openrlhf.evaluation.goal_state import GoalState, goal_similarity
from openrlhf.models.reward_model import RewardModel
from openrlhf.rewards.grading import extract_answer, grade_answer
from openrlhf.utils.checkpoint import atomic_write_text

logger = logging.getLogger(__name__)

_ENCODE_ROWS = 256  # rows tokenised at a time


@dataclasses.dataclass(frozen=True)
class EncodedCompletion:
    """Token ids of one completion, cut to the length limit."""

    ids: list[int]  # prompt + response, ends in EOS; empty when nothing of the response fits behind the prompt
    num_actions: int  # response tokens including EOS
    truncated: bool  # the end of the response (or all of it) was cut off


@dataclasses.dataclass(frozen=True)
class ScoredCompletion:
    """What scoring adds to the keys of a completion; numbers are None when nothing of the response fits."""

    reward: float | None  # reward units, the value at the last token
    partial_rewards: list[float] | None  # (A,) the value head at every response token
    cosine_sim: list[float] | None  # (A,) goal similarity at every response token; None without a goal state
    num_actions: int  # A, response tokens including EOS
    truncated: bool


def encode_completions(
    tokenizer, completions: Sequence[Completion], *, template: str, apply_chat_template: bool, max_len: int
) -> list[EncodedCompletion]:
    """Token ids of completions, exactly as a reward model is trained on them.

    A response that is too long loses its end and keeps its EOS; prompts are never cut.

    Args:
        template: prompt template, unused with `apply_chat_template`.
        max_len: tokens of prompt + response + EOS.
    """
    prompts = encode_prompts(
        tokenizer,
        [
            render_question(one.question, tokenizer, template=template, apply_chat_template=apply_chat_template)
            for one in completions
        ],
    )
    responses = encode_responses(tokenizer, [one.generated_solution for one in completions])
    encoded = []
    for prompt, response in zip(prompts, responses, strict=True):
        room = max_len - len(prompt)
        if len(response) <= room:
            encoded.append(EncodedCompletion(prompt + response, len(response), False))
        elif room >= 2:  # at least one response token and EOS
            encoded.append(EncodedCompletion(prompt + response[: room - 1] + response[-1:], room, True))
        else:
            encoded.append(EncodedCompletion([], 0, True))
    return encoded


def score_completions(
    model: RewardModel,
    tokenizer,
    completions: Sequence[Completion],
    *,
    template: str,
    apply_chat_template: bool = False,
    max_len: int,
    goal: GoalState | None = None,
    batch_tokens: int = 16384,
    out_path: str | Path | None = None,
    checkpoint: str | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Score completions, each as if it were alone.

    With `out_path` rows are appended as they are done, in the order of the completions; a second call with the same
    completions and settings goes on where the first one was killed.

    Args:
        template, apply_chat_template, max_len: as in training; see `encode_completions`.
        goal: adds `cosine_sim`.
        batch_tokens: most tokens of a forward pass, padding included.
        out_path: JSONL file; `<stem>.settings.json` beside it records what it was scored with.
        checkpoint: fingerprint of the model, recorded there.
    Returns:
        One row a completion, in order: the completion's keys and those of `ScoredCompletion`.
    Raises:
        ValueError: a reward that is not finite, or `out_path` holds rows of other completions or settings.
    """
    model.eval()
    rows: list[dict[str, Any]] = []
    if out_path is not None:
        settings = {
            "checkpoint": checkpoint,
            "goal_state": goal.digest if goal else None,
            "dtype": str(next(model.parameters()).dtype),
            "template": template,
            "apply_chat_template": apply_chat_template,
            "max_len": max_len,
        }
        rows = _resume(Path(out_path), settings, completions)
    vector = None if goal is None else torch.from_numpy(goal.vector).to(model.device)
    windows = _windows(
        tokenizer,
        completions[len(rows) :],
        template=template,
        apply_chat_template=apply_chat_template,
        max_len=max_len,
        window_tokens=WINDOW_BATCHES * batch_tokens,
    )
    with _TokenBar(len(completions), len(rows), disable=not progress) as bar:
        for window in windows:
            first = len(rows)
            for scored in _score_window(model, window, vector, batch_tokens, bar, first):
                rows.append(completion_to_row(completions[len(rows)]) | vars(scored))
            if out_path is not None:
                _append(Path(out_path), rows[first:])
    unscored = sum(row["reward"] is None for row in rows)
    if unscored:
        logger.warning(
            "%d of %d completions have a prompt too long for max_len %d: no reward", unscored, len(rows), max_len
        )
    return rows


def grade_completions(completions: Sequence[Completion]) -> tuple[list[Completion], int]:
    """Label completions that have no label by their expected answer.

    The predicted answer, where absent, is the last box or number of the solution; where no completion has one, it is
    found for all, so that they can vote. Labels that exist are kept; without an expected answer there is no label.

    Returns:
        The completions in order, and how many were graded.
    """
    labelled, graded = [], 0
    if all(one.predicted_answer is None for one in completions):
        answers = [extract_answer(one.generated_solution) for one in completions]
        completions = [
            dataclasses.replace(one, predicted_answer=answer) for one, answer in zip(completions, answers, strict=True)
        ]
    for one in completions:
        if one.is_correct is None and one.expected_answer is not None:
            predicted = (
                one.predicted_answer if one.predicted_answer is not None else extract_answer(one.generated_solution)
            )
            correct = grade_answer(predicted, one.expected_answer)
            one = dataclasses.replace(one, predicted_answer=predicted, is_correct=correct)
            graded += 1
        labelled.append(one)
    return labelled, graded


class _TokenBar(tqdm):
    """Progress over completions that also shows tokens per second."""

    def __init__(self, total: int, initial: int, disable: bool):
        super().__init__(total=total, initial=initial, desc="scoring", unit="completion", disable=disable)
        self.tokens = 0

    def add(self, completions: int, tokens: int) -> None:
        self.tokens += tokens
        elapsed = self.format_dict["elapsed"]
        self.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s" if elapsed else "", refresh=False)
        self.update(completions)


def _windows(
    tokenizer, completions: Sequence[Completion], *, window_tokens: int, **options: Any
) -> Iterator[list[EncodedCompletion]]:
    window: list[EncodedCompletion] = []
    tokens = 0
    for start in range(0, len(completions), _ENCODE_ROWS):
        for encoded in encode_completions(tokenizer, completions[start : start + _ENCODE_ROWS], **options):
            window.append(encoded)
            tokens += len(encoded.ids)
            if tokens >= window_tokens:
                yield window
                window, tokens = [], 0
    if window:
        yield window


@torch.inference_mode()
def _score_window(
    model: RewardModel,
    window: Sequence[EncodedCompletion],
    goal: torch.Tensor | None,
    batch_tokens: int,
    bar: _TokenBar,
    first: int,
) -> list[ScoredCompletion]:
    scored: list[ScoredCompletion] = [ScoredCompletion(None, None, None, 0, True)] * len(window)
    fitting = [i for i, one in enumerate(window) if one.ids]
    bar.add(len(window) - len(fitting), 0)
    for batch in token_batches([len(window[i].ids) for i in fitting], batch_tokens):
        members = [fitting[position] for position in batch]
        ids, mask = pad_right([window[i].ids for i in members], model.config.pad_token_id, model.device)
        out = model(ids, mask)
        values = out.values.float().cpu()
        similarities = None if goal is None else goal_similarity(out.hidden_states, goal).cpu()
        for row, i in enumerate(members):
            end = len(window[i].ids)
            response = slice(end - window[i].num_actions, end)
            if not torch.isfinite(values[row, response]).all():
                raise ValueError(
                    f"completion {first + i}: the reward model gives a reward that is not finite; check its dtype"
                )
            partial = _numbers(values[row, response])
            scored[i] = ScoredCompletion(
                reward=partial[-1],
                partial_rewards=partial,
                cosine_sim=None if similarities is None else _numbers(similarities[row, response]),
                num_actions=window[i].num_actions,
                truncated=window[i].truncated,
            )
        bar.add(len(members), int(mask.sum()))
    return scored


def _numbers(values: torch.Tensor) -> list[float]:
    """Python floats with the shortest digits that give back the float32 values: half the file size."""
    return [float(str(value)) for value in values.numpy()]


def _resume(path: Path, settings: dict[str, Any], completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """Rows already in the file, whose broken last line is cut off; an empty list and a settings file for a new one."""
    settings_path = path.with_name(path.stem + ".settings.json")
    if not path.is_file() or path.stat().st_size == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(settings_path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return []
    earlier = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else None
    if earlier != settings:
        changed = [name for name in settings if (earlier or {}).get(name) != settings[name]]
        raise ValueError(
            f"{path} was scored with other settings ({', '.join(changed)} differ: {earlier} against {settings}); "
            "remove it or choose another --save_dir"
        )
    _cut_partial_line(path)
    rows = [row for _, row in read_jsonl(path)]
    if len(rows) > len(completions):
        raise ValueError(f"{path} holds {len(rows)} rows for {len(completions)} completions; remove it to score anew")
    for number, (row, completion) in enumerate(zip(rows, completions, strict=False)):
        wanted = completion_to_row(completion)
        if any(row.get(key) != wanted.get(key) for key in ("question", "generated_solution", "sample")):
            raise ValueError(f"{path}: row {number} belongs to another completion; remove the file to score anew")
    # Scores stay, labels and answers are those of now: they may have been corrected since.
    scored_keys = [field.name for field in dataclasses.fields(ScoredCompletion)]
    current = [
        completion_to_row(completion) | {key: row[key] for key in scored_keys}
        for row, completion in zip(rows, completions, strict=False)
    ]
    if current != rows:
        write_jsonl(path, current)
        rows = current
    if rows:
        logger.info("%s: %d of %d completions are scored already", path, len(rows), len(completions))
    return rows


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8", errors="replace", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _cut_partial_line(path: Path) -> None:
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        position = size
        while position > 0:
            start = max(position - 65536, 0)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            position = start
        file.truncate(0)
