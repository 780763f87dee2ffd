"""Grade completions and compare with their labels: ``python -m openrlhf.cli.grade --input FILE``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.completions import Completion, completion_to_row, read_completions, write_jsonl
from openrlhf.evaluation.agreement import Grade, count_agreement, find_label_key, grade_rows, read_label
from openrlhf.trainer.config import flag
from openrlhf.utils.checkpoint import atomic_write_text, ensure_writable

SUFFIXES = (".jsonl", ".jsonl.gz")
COLUMNS = {
    "rows": "rows",
    "correct": "correct",
    "without_answer": "no answer",
    "compared": "compared",
    "both_correct": "both right",
    "both_wrong": "both wrong",
    "ours_only": "ours only",
    "theirs_only": "theirs only",
    "agreement": "agreement",
}


@dataclass(frozen=True)
class GradeConfig:
    """Grade completions by their expected answers and count the agreement with labels they carry."""

    input: list[str] | None = flag(None, "Files of completions, or folders of .jsonl and .jsonl.gz files")
    compare_key: str | None = flag(
        None, "Column of labels to compare with (default: is_correct_origin where a file has it, else is_correct)"
    )
    extract: bool = flag(False, "Find the answer in the solution even where the row has a predicted answer")
    percent: Literal["strict", "lenient"] = flag(
        "strict", "Whether `60%` equals 0.6 alone, or 60 too (lenient: for GSM8K and its like)"
    )
    output: str | None = flag(
        None, "File (of one input) or folder for the rows, with predicted_answer and is_correct where they had none"
    )
    regrade: bool = flag(False, "Written rows get our grade and answer in place of the label they have")
    show: int = flag(20, "Disagreements to print for each file")
    json: str | None = flag(None, "File for all figures and every disagreement")


def run(config: GradeConfig) -> dict[str, Any]:
    """Print counts and disagreements of every file; returns {file: figures, with `compare_key` and `disagreements`}."""
    if not config.input:
        raise ValueError("pass --input with files or folders of completions")
    if config.show < 0:
        raise ValueError(f"--show {config.show}: expected 0 or more")
    files = _input_files(config.input)
    targets = _output_files(files, config.output)
    if config.regrade and not targets:
        raise ValueError("--regrade changes the rows that are written: pass --output too")
    results, table = {}, []
    sets = [
        (file, *_read(file, config.compare_key)) for file in files
    ]  # every file is sound before the first is graded
    for target in [*targets, *([Path(config.json)] if config.json else [])]:
        if target.is_dir():
            raise ValueError(f"{target} is a folder; name a file")
        ensure_writable(target.parent, inside=True)
    with tqdm(total=sum(len(rows) for _, rows, _, _ in sets), desc="grading", unit="row", disable=None) as bar:
        for number, (file, completions, key, labels) in enumerate(sets):
            grades = []
            for grade in grade_rows(completions, extract=config.extract, percent=config.percent):
                grades.append(grade)
                bar.update()
            figures = {"compare_key": key, **count_agreement(grades, labels)}
            results[str(file)] = {**figures, "disagreements": _disagreements(completions, grades, labels)}
            table.append([_short(file, files), *(_cell(figures[name]) for name in COLUMNS), key or "-"])
            if targets:
                rows = _graded_rows(completions, grades, config.regrade)
                write_jsonl(targets[number], [completion_to_row(row) for row in rows])
    print(_format([["file", *COLUMNS.values(), "label"], *table]))
    for file, result in results.items():
        _print_disagreements(_short(Path(file), files), result["disagreements"], config.show)
    if config.json:
        atomic_write_text(config.json, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return results


def _input_files(names: Sequence[str]) -> list[Path]:
    files = []
    for path in map(Path, names):
        inside = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: expected {' or '.join(SUFFIXES)} files in this folder, found none")
        files += inside
    return list(dict.fromkeys(files))


def _output_files(files: Sequence[Path], output: str | None) -> list[Path]:
    if output is None:
        return []
    if output.endswith(SUFFIXES):
        if len(files) > 1:
            raise ValueError(f"--output {output}: a file holds the rows of one input, got {len(files)}; name a folder")
        targets = [Path(output)]
    else:
        targets = [Path(output) / _short(file, files) for file in files]
    for file, target in zip(files, targets, strict=True):
        if target.resolve() == file.resolve():
            raise ValueError(f"--output {output}: this would overwrite the input {file}; name another place")
    return targets


def _read(file: Path, wanted: str | None) -> tuple[list[Completion], str | None, list[bool | None]]:
    """Completions of a file, the column of their labels, and the labels."""
    completions = read_completions(file)
    if not completions:
        raise ValueError(f"{file}: no completions in this file")
    if all(one.expected_answer is None for one in completions):
        columns = sorted({key for one in completions for key in one.extra})
        raise ValueError(
            f"{file}: no row has an expected answer; expected a column expected_answer or answer beside {columns}"
        )
    try:
        key = find_label_key(completions, wanted)
        labels = [None if key is None else read_label(one, key) for one in completions]
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return completions, key, labels


def _graded_rows(completions: Sequence[Completion], grades: Sequence[Grade], regrade: bool) -> list[Completion]:
    """Completions with our label where they have none, or everywhere with `regrade`."""
    rows = []
    for one, grade in zip(completions, grades, strict=True):
        ours = grade.correct is not None and (regrade or one.is_correct is None)
        rows.append(
            replace(
                one,
                predicted_answer=grade.answer if ours or one.predicted_answer is None else one.predicted_answer,
                is_correct=grade.correct if ours else one.is_correct,
            )
        )
    return rows


def _disagreements(
    completions: Sequence[Completion], grades: Sequence[Grade], labels: Sequence[bool | None]
) -> list[dict[str, Any]]:
    return [
        {
            "row": number,
            "question": one.question,
            "expected_answer": one.expected_answer,
            "answer": grade.answer,
            "ours": grade.correct,
            "theirs": label,
        }
        for number, (one, grade, label) in enumerate(zip(completions, grades, labels, strict=True), start=1)
        if None not in (grade.correct, label) and grade.correct != label
    ]


def _print_disagreements(name: str, disagreements: Sequence[dict[str, Any]], show: int) -> None:
    if not disagreements or not show:
        return
    print(f"\n{name}: {len(disagreements)} disagreement{'s'[: len(disagreements) != 1]}")
    for one in disagreements[:show]:
        side = "ours right, theirs wrong" if one["ours"] else "ours wrong, theirs right"
        expected, answer = (_cut(one[key], 60) for key in ("expected_answer", "answer"))
        print(f"  row {one['row']}, {side}: expected {expected}, answer {answer} | {_cut(one['question'], 60)}")
    if len(disagreements) > show:
        print(f"  and {len(disagreements) - show} more (--show, --json)")


def _cut(text: str | None, length: int) -> str:
    line = "none" if text is None else " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _short(file: Path, files: Sequence[Path]) -> str:
    """The name of a file, with as many folders as tell it from the other inputs."""
    return os.path.relpath(file, os.path.commonpath([one.parent for one in files]))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _format(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line) for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(GradeConfig, argv)) and None)


if __name__ == "__main__":
    main()
