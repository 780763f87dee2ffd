"""Completions of questions in the Nemo-Skills prediction schema, one JSON line each."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openrlhf.datasets.files import COLUMNAR_SUFFIXES, FILE_SUFFIXES, load_files, read_records
from openrlhf.datasets.jsonl import read_jsonl, unpack_json, write_jsonl

__all__ = [
    "GREEDY_FILE",
    "Completion",
    "are_labelled",
    "completion_to_row",
    "group_by_question",
    "read_completions",
    "read_jsonl",
    "read_truth",
    "row_to_completion",
    "sample_files",
    "write_jsonl",
]

# Names of a field, newest first; rows are written with the first.
_QUESTION = ("question", "problem")
_SOLUTION = ("generated_solution", "generation")
_EXPECTED = ("expected_answer", "answer")
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}

GREEDY_FILE = "output-greedy.jsonl"
_SAMPLE_FILE = re.compile(r"output-(?!greedy)(.+?)\.jsonl(\.gz)?$")


@dataclass(frozen=True)
class Completion:
    """One solution that a model wrote for a question."""

    question: str
    generated_solution: str
    expected_answer: str | None = None
    predicted_answer: str | None = None  # None: no answer was found in the solution
    is_correct: bool | None = None  # None: not graded
    sample: int = 0  # number of the completion among those of its question
    extra: dict[str, Any] = field(default_factory=dict)  # every other key of the row, kept when written back


def row_to_completion(row: Mapping[str, Any]) -> Completion:
    """A completion from a row with new or old field names.

    Old names: `problem` for `question`, `generation` for `generated_solution`, `answer` for `expected_answer`. Answers
    that are numbers become text. A row with `steps` (a list of text) and no solution has them, a line each, as its
    solution; `solution_correct` is then its label. NaN and infinities under other keys become None: JSON has none.

    Raises:
        ValueError: no question or no solution, an is_correct that is no truth value, a sample or first_error_step that
            is no whole number, or steps beside the latter that are no texts.
    """
    rest = dict(row)
    question, solution, expected = (_take(rest, names) for names in (_QUESTION, _SOLUTION, _EXPECTED))
    steps = rest.get("steps")
    if solution is None and isinstance(steps, list) and all(isinstance(step, str) for step in steps):
        solution = "\n".join(steps)
        rest.setdefault("is_correct", rest.get("solution_correct"))
    if not all(isinstance(unpack_json(text), str) for text in (question, solution)):
        raise ValueError(
            f"a completion needs text under {' or '.join(_QUESTION)} and under {' or '.join(_SOLUTION)}, "
            f"got {type(question).__name__} and {type(solution).__name__}, with the keys {list(row)}"
        )
    _check_steps(rest)
    predicted, sample = rest.pop("predicted_answer", None), rest.pop("sample", None)
    return Completion(
        question=question,
        generated_solution=solution,
        expected_answer=None if expected is None else str(expected),
        predicted_answer=None if predicted is None else str(predicted),
        is_correct=read_truth(rest.pop("is_correct", None), "is_correct"),
        sample=0 if sample is None else _sample_number(sample),
        extra={key: _storable(value) for key, value in rest.items()},
    )


def are_labelled(columns: Iterable[str]) -> bool:
    """Whether rows with these columns are completions that carry a label."""
    names = set(columns)
    has_label = "is_correct" in names or {"steps", "solution_correct"} <= names
    return has_label and bool(names & set(_QUESTION)) and bool(names & {*_SOLUTION, "steps"})


def _check_steps(row: Mapping[str, Any]) -> None:
    """Refuse a first wrong step that no metric could read later."""
    first, steps = row.get("first_error_step"), row.get("steps")
    if first is None:
        return
    if isinstance(first, bool) or not isinstance(first, int | float) or not first >= -1 or first % 1 != 0:
        raise ValueError(f"first_error_step: expected a whole number or null, got {first!r:.80}")
    if steps is not None and not (isinstance(steps, list) and all(isinstance(step, str) for step in steps)):
        raise ValueError(f"steps: expected a list of text beside first_error_step, got {steps!r:.80}")


def completion_to_row(completion: Completion) -> dict[str, Any]:
    """The row of a completion, new field names first, then its other keys."""
    row = {name: getattr(completion, name) for name in Completion.__dataclass_fields__ if name != "extra"}
    return {**row, **completion.extra}


def read_completions(path: str | Path) -> list[Completion]:
    """Completions of a file, or of all `output-*.jsonl` files of a benchmark's folder but the greedy one.

    Rows without a `sample` number get one: their place among the rows of the same question, over all files in order.

    Raises:
        ValueError: no such file, an unreadable line or a row that is no completion, with file and line.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder of completions")
    files = sample_files(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no output-*.jsonl files in this folder")
    seen: Counter[str] = Counter()
    completions = []
    for file in files:
        if not file.name.endswith(FILE_SUFFIXES):
            raise ValueError(f"{file}: expected a file name ending in {', '.join(FILE_SUFFIXES)}")
        for line, row in _numbered_rows(file):
            try:
                completion = row_to_completion(row)
            except ValueError as error:
                raise ValueError(f"{file}:{line}: {error}") from error
            if row.get("sample") is None:
                completion = replace(completion, sample=seen[completion.question])
            seen[completion.question] += 1
            completions.append(completion)
    return completions


def _numbered_rows(file: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    return enumerate(load_files([file]), start=1) if file.name.endswith(COLUMNAR_SUFFIXES) else read_records(file)


def sample_files(folder: Path) -> list[Path]:
    """The `output-*.jsonl` files of sampled completions in a folder, rs2 before rs10, without output-greedy."""
    found = [(match.group(1), path) for path in folder.iterdir() if (match := _SAMPLE_FILE.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (_natural(item[0]), item[1].name))]


def group_by_question(completions: Iterable[Completion]) -> dict[str, list[int]]:
    """Positions of the completions of each question, both in order of appearance."""
    groups: dict[str, list[int]] = {}
    for i, completion in enumerate(completions):
        groups.setdefault(completion.question, []).append(i)
    return groups


def _take(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Remove and return the value under the first of these names that has one; empty ones are removed too."""
    for name in names:
        if name in row and row[name] is None:
            del row[name]
    return next((row.pop(name) for name in names if name in row), None)


def read_truth(value: Any, key: str) -> bool | None:
    """A label in one of its usual spellings (true, 1, "false", 0.0, ...); None stays None.

    Args:
        key: the column, for the message.
    Raises:
        ValueError: no truth value.
    """
    if value is None or isinstance(value, bool):
        return value
    label = _LABELS.get(str(value).lower())
    if label is None:
        raise ValueError(f"{key}: expected true, false or null, got {value!r}")
    return label


def _sample_number(value: Any) -> int:
    try:
        number = int(value)
        if isinstance(value, str) or number == value:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"sample: expected a whole number, got {value!r:.80}")


def _storable(value: Any) -> Any:
    """The value with NaN and infinities, also within lists and objects, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_storable(item) for item in value]
    if isinstance(value, dict):
        return {key: _storable(item) for key, item in value.items()}
    return value


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key that compares runs of digits as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", text)]
