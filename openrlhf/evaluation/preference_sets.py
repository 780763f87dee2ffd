"""Preference sets for evaluation: rows of all common formats as prompts with chosen and rejected responses."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from openrlhf.datasets.adapters import (
    FORMATS,
    PreferenceOptions,
    as_text_or_messages,
    resolve_options,
    row_to_example,
)
from openrlhf.datasets.files import FILE_SUFFIXES
from openrlhf.datasets.jsonl import OnBadRow
from openrlhf.datasets.sources import load_rows
from openrlhf.datasets.templates import render_chat_prompt, render_question
from openrlhf.evaluation.rewardbench import is_ties, parse_ties_id

logger = logging.getLogger(__name__)

REWARDBENCH_2 = "rewardbench_2"
EVALUATION_FORMATS: tuple[str, ...] = (*FORMATS, REWARDBENCH_2)
DEFAULT_SPLIT = "test"
# The formats of plain prompts and answers, in which an empty answer can be scored.
_TEXT_FORMATS = ("prompt_chosen_rejected", "question_correct_incorrect")


@dataclass(frozen=True)
class PreferenceItem:
    """One prompt with its responses, the chosen ones first."""

    prompt: str  # rendered, as the model reads it
    responses: tuple[str, ...]
    num_chosen: int  # of the responses; at least one is chosen and one is rejected
    subset: str | None
    id: str | None
    row: int  # position in the source, from 0

    def __post_init__(self) -> None:
        if not 0 < self.num_chosen < len(self.responses):
            raise ValueError(
                f"expected at least one chosen and one rejected response, got {self.num_chosen} chosen of "
                f"{len(self.responses)}"
            )


@dataclass(frozen=True)
class PreferenceSet:
    """All usable rows of one source."""

    name: str  # of the files written for it
    source: str
    format: str  # a name of EVALUATION_FORMATS
    items: list[PreferenceItem]
    left_out: dict[str, int]  # rows that are not in `items`, by reason


@dataclass(frozen=True)
class ReadingOptions:
    """How rows become items. Keys left None are the format's own."""

    template: str | None = None  # prompt template of the checkpoint; None: the format's default
    apply_chat_template: bool = False
    format: str | None = None  # a name of EVALUATION_FORMATS; None: told from the columns
    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    subset_key: str = "subset"  # column that names the subset of a row, where there is one
    on_bad_row: OnBadRow = "error"  # a row that cannot be read raises, or is left out and counted ("skip")
    max_samples: int | None = None
    seed: int = 0  # of the draw of max_samples

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in EVALUATION_FORMATS:
            raise ValueError(f"dataset_format: expected one of {sorted(EVALUATION_FORMATS)}, got {self.format!r}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples: expected at least 1, got {self.max_samples}")


def read_preference_set(source: str, tokenizer: Any, options: ReadingOptions, name: str | None = None) -> PreferenceSet:
    """Read, check and render all rows of one source.

    Args:
        source: what `load_rows` reads (a file, a folder, a hub id), with `:SPLIT` behind it for another split than
            "test".
        tokenizer: for its chat template.
        name: of the set; None: made from the source.
    Raises:
        ValueError: the source or its columns do not fit, a bad row (named), or no row is left (with the counts).
    """
    spec, split = split_source(source)
    rows = load_rows(spec, split, on_bad_row=options.on_bad_row).with_format(None)
    try:
        if options.subset_key not in ("subset", *rows.column_names):  # "subset" itself is optional
            raise ValueError(f"no column {options.subset_key!r} (--subset_key), got {rows.column_names}")
        format, read = _reader(rows, tokenizer, options)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    positions = np.arange(len(rows))
    if options.max_samples is not None and options.max_samples < len(rows):
        drawn = np.random.default_rng(options.seed).permutation(len(rows))
        positions = np.sort(drawn[: options.max_samples])
    items: list[PreferenceItem] = []
    left_out: Counter[str] = Counter()
    ties_seen: set[tuple[str, int]] = set()
    for position, row in zip(positions.tolist(), rows.select(positions), strict=True):
        try:
            found = read(row)
            if isinstance(found, str):
                left_out[found] += 1
                continue
            item = PreferenceItem(*found, _text(row.get(options.subset_key)), _text(row.get("id")), position)
            if format == REWARDBENCH_2 and is_ties(item.subset):
                _check_ties_id(item.id, ties_seen)
        except ValueError as error:
            if options.on_bad_row == "error":
                raise ValueError(
                    f"{source}: row {position} (from 0): {error}. Correct the row, or pass --on_bad_row skip"
                ) from error
            left_out["bad_row"] += 1
            continue
        items.append(item)
    report = ", ".join(f"{reason} {count}" for reason, count in left_out.items())
    if not items:
        raise ValueError(f"{source}: no row is left of {len(positions)} ({report}); check --dataset_format")
    if left_out:
        logger.warning("%s: %d of %d rows left out: %s", source, left_out.total(), len(positions), report)
    return PreferenceSet(name or source_name(source), source, format, items, dict(left_out))


def detect_evaluation_format(column_names: Sequence[str], first_row: Mapping[str, Any]) -> str | None:
    """REWARDBENCH_2 for columns of lists of texts; None leaves the choice to the adapters of preference pairs."""
    if {"prompt", "chosen", "rejected"} <= set(column_names):
        answers = [as_text_or_messages(first_row.get(key)) for key in ("chosen", "rejected")]
        if all(isinstance(answer, list) and all(isinstance(one, str) for one in answer) for answer in answers):
            return REWARDBENCH_2
    return None


def split_source(source: str) -> tuple[str, str]:
    """Source and split of `NAME` or `NAME:SPLIT`; an existing path is a name as it stands."""
    match = re.fullmatch(r"(.+):([A-Za-z]\w*)", source)
    if match is None or Path(source).expanduser().exists():
        return source, DEFAULT_SPLIT
    return match.group(1), match.group(2)


def source_name(source: str) -> str:
    """Name of a source for files: the last part of its path, without the suffix of a data file."""
    last = source.rstrip("/").rsplit("/", 1)[-1]
    for suffix in sorted(FILE_SUFFIXES, key=len, reverse=True):
        last = last.removesuffix(suffix)
    return re.sub(r"[^\w.@-]+", "-", last).strip(".-") or "preferences"


def _reader(
    rows: datasets.Dataset, tokenizer: Any, options: ReadingOptions
) -> tuple[str, Callable[[Mapping[str, Any]], tuple[str, tuple[str, ...], int] | str]]:
    """Format, and the function from a row to (prompt, responses, number chosen), or to the reason to leave it out."""
    head = rows[: min(100, len(rows))]
    first = {name: next((value for value in values if value is not None), None) for name, values in head.items()}
    keys = {"prompt": options.prompt_key, "chosen": options.chosen_key, "rejected": options.rejected_key}
    format = options.format
    if format is None:
        by_name = {name: first.get(key or name) for name, key in keys.items()}
        present = [name for name, key in keys.items() if (key or name) in rows.column_names]
        format = detect_evaluation_format(present, by_name)
    if format == REWARDBENCH_2:
        columns = [key or name for name, key in keys.items()]
        missing = [column for column in columns if column not in rows.column_names]
        if missing:
            raise ValueError(
                f"the format {REWARDBENCH_2} needs the columns {columns}, got {rows.column_names}: {missing} missing. "
                "Name the columns with --prompt_key, --chosen_key and --rejected_key"
            )
        return format, lambda row: _best_of_parts(row, columns, tokenizer, options)
    resolved = resolve_options(
        rows.column_names,
        first,
        PreferenceOptions(
            format=format,
            prompt_key=options.prompt_key,
            chosen_key=options.chosen_key,
            rejected_key=options.rejected_key,
            input_template=None if options.apply_chat_template else options.template,
            apply_chat_template=options.apply_chat_template,
        ),
    )
    return resolved.format, lambda row: _pair_parts(row, tokenizer, resolved)


def _pair_parts(
    row: Mapping[str, Any], tokenizer: Any, options: PreferenceOptions
) -> tuple[str, tuple[str, ...], int] | str:
    keys = [key for key in (options.prompt_key, options.chosen_key, options.rejected_key) if key]
    values = [as_text_or_messages(row[key]) for key in keys]
    if options.format in _TEXT_FORMATS and all(isinstance(value, str) for value in values):
        # Not left to row_to_example, which refuses empty answers: training cannot use them, evaluation can.
        prompt, chosen, rejected = values
        template, chat = options.input_template, options.apply_chat_template
        text = render_question(prompt, tokenizer, template=template, apply_chat_template=chat)
        return text, (chosen, rejected), 1
    example = row_to_example({key: row[key] for key in keys}, options.format, options, tokenizer)
    return example if isinstance(example, str) else (example.prompt, (example.chosen, example.rejected), 1)


def _best_of_parts(
    row: Mapping[str, Any], columns: Sequence[str], tokenizer: Any, options: ReadingOptions
) -> tuple[str, tuple[str, ...], int]:
    prompt, chosen, rejected = (as_text_or_messages(row[column]) for column in columns)
    for column, answers in zip(columns[1:], (chosen, rejected), strict=True):
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"column {column!r}: expected a list of texts, got {_shape(answers)}")
        if not answers:
            raise ValueError(f"column {column!r}: expected at least one text, got an empty list")
    stated = {"num_correct": len(chosen), "total_completions": len(chosen) + len(rejected)}
    for column, count in stated.items():
        if row.get(column) is not None and row[column] != count:
            raise ValueError(f"column {column!r} says {row[column]}, the lists hold {count}")
    return _render(prompt, columns[0], tokenizer, options), (*chosen, *rejected), len(chosen)


def _render(prompt: Any, column: str, tokenizer: Any, options: ReadingOptions) -> str:
    if isinstance(prompt, str):
        template, chat = options.template or "{}", options.apply_chat_template
        return render_question(prompt, tokenizer, template=template, apply_chat_template=chat)
    if not isinstance(prompt, list) or not all(isinstance(one, Mapping) and "role" in one for one in prompt):
        raise ValueError(f"column {column!r}: expected text or a list of messages with a role, got {_shape(prompt)}")
    if not options.apply_chat_template:
        raise ValueError(
            f"column {column!r}: message lists are rendered by a chat template: pass --apply_chat_template"
        )
    return render_chat_prompt(prompt, tokenizer)


def _check_ties_id(text: str | None, seen: set[tuple[str, int]]) -> None:
    key = parse_ties_id(text)
    if key in seen:
        raise ValueError(f"id {text} occurs twice in the subset Ties")
    seen.add(key)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _shape(value: Any) -> str:
    if not isinstance(value, list):
        return "null" if value is None else type(value).__name__
    return f"a list with {', '.join(sorted({'null' if one is None else type(one).__name__ for one in value}))}"
