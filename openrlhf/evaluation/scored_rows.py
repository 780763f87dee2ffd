"""Rows that eval_rm has scored, read back checked and small enough that hundreds of thousands fit in memory."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.datasets.completions import completion_to_row, read_jsonl, row_to_completion

# Per-token keys of a row and what their values are kept as: 4 bytes a token instead of 32 as Python numbers.
PER_TOKEN = {"partial_rewards": np.float32, "cosine_sim": np.float32, "token_ends": np.int32}
# What scores depend on, besides the completion: files of one set must have been scored alike.
SETTINGS = ("checkpoint", "goal_state", "dtype", "template", "apply_chat_template", "max_len")
TOP_SET = "all files"  # set of the files that lie in no folder of their own
COSINE_TOLERANCE = 1e-3  # of rounding in low precision
CUT_OFF_HINT = "if it was cut off, run eval_rm again with the same flags: it goes on after the last whole line"

Rows = list[dict[str, Any]]


def read_scored_sets(path: str | Path, benchmarks: Sequence[str] | None = None) -> dict[str, Rows]:
    """Scored rows by set: the folder they lie in, relative to `path` ("all files": `path` itself), or a file's name.

    Args:
        path: a folder that eval_rm wrote (SAVE_DIR/MODEL), or one file of it. Where `summary.json` names the files of
            the last call, others beside them are not read.
        benchmarks: sets to read, as BENCHMARK/KIND or as BENCHMARK for all its kinds; None: all.
    Raises:
        ValueError: nothing there, no such benchmark, files of one set that were scored with different settings, or what
            `read_scored_rows` raises.
    """
    sets = scored_files(path, benchmarks)
    for name, files in sets.items():
        check_settings(name, files)
    texts: dict[str, str] = {}
    return {name: [row for file in files for row in read_scored_rows(file, texts)] for name, files in sets.items()}


def read_scored_rows(path: str | Path, texts: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of one file, in order, with the newest field names and per-token lists as numpy arrays (see `PER_TOKEN`).

    Args:
        texts: every text seen so far by itself; questions and answers that come again share one copy.
    Raises:
        ValueError: an unreadable line, a row that eval_rm has not scored, a score that is not a finite number, or lists
            of another length than `num_actions`; with file and line.
    """
    texts = {} if texts is None else texts
    for line, row in read_jsonl(path, hint=CUT_OFF_HINT):
        try:
            yield checked_row(row, texts)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from error


def scored_files(path: str | Path, benchmarks: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """Files of each set of `read_scored_sets`, in order; nothing but summary.json is read."""
    path = Path(path)
    if path.is_file():
        sets = {path.name.split(".jsonl")[0]: [path]}
    else:
        found = sorted(file for pattern in ("*.jsonl", "*.jsonl.gz") for file in path.rglob(pattern))
        found = [file for file in found if file.relative_to(path).parts[0] != "preferences"]  # rows of other kind
        named = (read_summary(path) or {}).get("files")
        files = [path / name for name in named] if named else found
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise ValueError(
                f"{path / 'summary.json'} names {len(missing)} files that are not there, first {missing[0]}; "
                "run eval_rm again, or remove summary.json to read the files that exist"
            )
        if not files and (path / "preferences" / "summary.json").is_file():
            raise ValueError(
                f"{path} holds scored preference sets and no completions; their figures are in "
                f"{path / 'preferences' / 'summary.json'}, and eval_rm --preferences prints them again"
            )
        if not files:
            raise ValueError(f"{path}: expected a file or folder of rows scored by eval_rm, found no .jsonl file")
        sets = {}
        for file in files:
            inside = file.parent.relative_to(path).as_posix()
            sets.setdefault(TOP_SET if inside == "." else inside, []).append(file)
    if benchmarks is None:
        return sets
    absent = [name for name in benchmarks if not any(_belongs(set_name, name) for set_name in sets)]
    if absent:
        raise ValueError(f"{path}: no set {absent[0]!r} (--benchmarks); found {', '.join(sets)}")
    return {set_name: files for set_name, files in sets.items() if any(_belongs(set_name, b) for b in benchmarks)}


def read_summary(path: str | Path) -> dict[str, Any] | None:
    """What eval_rm wrote into the folder's summary.json; None where there is none."""
    file = Path(path) / "summary.json"
    if not file.is_file():
        return None
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}); run eval_rm again or remove the file") from error
    return summary if isinstance(summary, dict) else None


def check_settings(name: str, files: Sequence[Path]) -> None:
    """Refuse files of one set whose NAME.settings.json say that they were scored differently; absent ones are passed.

    Raises:
        ValueError: names two files and what differs.
    """
    first: tuple[Path, Mapping[str, Any]] | None = None
    for file in files:
        settings_file = file.with_name(file.name.split(".jsonl")[0] + ".settings.json")
        if not settings_file.is_file():
            continue
        settings = json.loads(settings_file.read_text(encoding="utf-8"))
        if first is None:
            first = file, settings
        differ = [key for key in SETTINGS if settings.get(key) != first[1].get(key)]
        if differ:
            told = ", ".join(f"{key} {first[1].get(key)!r} and {settings.get(key)!r}" for key in differ)
            raise ValueError(
                f"set {name}: {first[0]} and {file} were scored differently ({told}); "
                "score them with one model and one goal state, or pass the files one by one"
            )


def _belongs(set_name: str, benchmark: str) -> bool:
    benchmark = benchmark.rstrip("/")
    return set_name == benchmark or set_name.startswith(benchmark + "/")


def checked_row(row: Mapping[str, Any], texts: dict[str, str] | None = None) -> dict[str, Any]:
    """A row as `read_scored_rows` gives it; raises ValueError for what cannot be used."""
    texts = {} if texts is None else texts
    if "reward" not in row or not ("question" in row or "problem" in row):
        raise ValueError(f"expected a row scored by eval_rm (question, reward), got keys {list(row)}")
    checked = completion_to_row(row_to_completion(row))
    checked |= {key: row[key] for key in ("reward", *PER_TOKEN) if key in row}  # a NaN there must not become null
    for key, value in checked.items():
        if isinstance(value, str) and key != "generated_solution":
            checked[key] = texts.setdefault(value, value)
    checked = {sys.intern(key): value for key, value in checked.items()}  # JSON makes new keys for every line
    length = checked.get("num_actions")
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise ValueError(f"expected a whole number of tokens in 'num_actions', got {length!r}; run eval_rm again")
    for key, kind in PER_TOKEN.items():
        if checked.get(key) is not None:
            checked[key] = _per_token(checked[key], key, kind, length)
    reward = checked["reward"]
    if reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not _is_finite(reward):
            raise ValueError(f"expected a finite number or null in 'reward', got {reward!r:.80}")
        if checked.get("partial_rewards") is None or length == 0:
            raise ValueError("expected 'partial_rewards' beside 'reward'; run eval_rm again")
    _check_similarities(checked.get("cosine_sim"))
    _check_token_ends(checked.get("token_ends"), len(checked["generated_solution"]))
    return checked


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _check_similarities(values: np.ndarray | None) -> None:
    if values is not None and len(values) and np.abs(values).max() > 1 + COSINE_TOLERANCE:
        place = int(np.abs(values).argmax())
        raise ValueError(f"expected cosines in [-1, 1] in 'cosine_sim', got {values[place]} at token {place}")


def _check_token_ends(ends: np.ndarray | None, letters: int) -> None:
    if ends is not None and len(ends) and ((np.diff(ends) < 0).any() or ends[0] < 0 or ends[-1] > letters):
        raise ValueError(
            f"expected 'token_ends' that rise from 0 up to {letters}, the length of the solution; run eval_rm again"
        )


def _per_token(values: Any, key: str, kind: type, length: int) -> np.ndarray:
    try:
        array = np.array(values, dtype=kind)
        if kind is np.int32 and (array != np.array(values)).any():
            raise ValueError("not whole")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected a list of numbers in {key!r} ({error})") from error
    if array.shape != (length,):
        raise ValueError(f"expected {length} values (num_actions) in {key!r}, got shape {array.shape}")
    if kind is np.float32 and not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"expected finite numbers in {key!r}, got {values[place]} at token {place}; score it again")
    return array
