"""What generate.py wrote into its folders, read back checked: every method's answers to the same questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decoding.voting import FILTERED
from openrlhf.datasets.jsonl import read_jsonl
from openrlhf.evaluation.ballots import Ballot, can_be_judged, make_ballots

ANSWERS_FILE = "answers.jsonl"
COSTS = ("policy_tokens", "reward_tokens", "seconds")
NEEDED = ("index", "question", "method", "seed", "answer", "is_correct", *COSTS)
NEEDED_OF = {
    FILTERED: ("threshold", "warmup_tokens", "check_every", "samples", "stopped", "dropped", "decided", "fallback")
}
DETERMINISTIC = ("greedy",)  # one seed stands for all
HINT = "if the run was cut off, call generate.py again with the same flags and --resume"

QuestionKey = tuple[int, str]  # line in the input file and text
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class MethodRun:
    """What one method of one folder did: S seeds (rows) of Q questions (columns)."""

    run: str  # label of the folder
    method: str
    seeds: list[int]  # S, rising; one for a deterministic method
    right: np.ndarray  # (S, Q) float64, 1 = right; for samples the share of right ones
    costs: dict[str, np.ndarray]  # by name of COSTS, (S, Q) float64
    rows: list[Rows]  # S lists of Q lines of answers.jsonl

    @property
    def name(self) -> str:
        """Folder and method."""
        return f"{self.run}/{self.method}" if self.run else self.method


@dataclass(frozen=True)
class SamplePools:
    """The pools of one folder: S seeds of Q questions."""

    seeds: list[int]
    ballots: list[list[Ballot]]  # S lists of Q
    tokens: np.ndarray  # (S, Q) float64, policy tokens of all samples
    sizes: np.ndarray  # (S, Q) int64, K of each


@dataclass(frozen=True)
class Comparison:
    """Folders that answer the same questions with the same seeds."""

    questions: list[QuestionKey]  # Q that can be judged
    left_out: int  # questions that some method's answer cannot be judged on
    methods: list[MethodRun]
    pools: dict[str, SamplePools]  # by label of the folder, where it has samples


def read_comparison(folders: Mapping[str, str | Path]) -> Comparison:
    """Read the folders of several runs.

    Args:
        folders: by label; the label may be empty for a single folder.
    Raises:
        ValueError: a folder without answers, an unusable line, a method that lacks a question or a seed that others
            have, folders with different questions, or samples that are missing or belong to other questions.
    """
    answers = {label: _read_answers(Path(folder)) for label, folder in folders.items()}
    runs = [(label, method, by_seed) for label, methods in answers.items() for method, by_seed in methods.items()]
    questions = _shared_questions(runs)
    _check_seeds(runs)
    pool_rows = {label: _read_pools(Path(folder), answers[label], questions) for label, folder in folders.items()}
    unjudged = _unjudged(runs, pool_rows)
    kept = [key for key in questions if key not in unjudged]
    if not kept:
        raise ValueError("no question can be judged: the input had no expected answers, so there is no accuracy")
    pools = {label: _make_pools(by_seed, kept) for label, by_seed in pool_rows.items() if by_seed}
    methods = [_method_run(label, method, by_seed, kept, pools.get(label)) for label, method, by_seed in runs]
    return Comparison(kept, len(unjudged), methods, pools)


def _read_answers(folder: Path) -> dict[str, dict[int, dict[QuestionKey, dict[str, Any]]]]:
    """Lines by method, seed and question."""
    file = folder / ANSWERS_FILE
    if not file.is_file():
        raise ValueError(f"{folder}: expected a folder written by generate.py, found no {ANSWERS_FILE} there")
    methods: dict[str, dict[int, dict[QuestionKey, dict[str, Any]]]] = {}
    for line, row in read_jsonl(file, hint=HINT):
        try:
            _check_answer(row)
            found = methods.setdefault(row["method"], {}).setdefault(row["seed"], {})
            key = row["index"], row["question"]
            if key in found:
                raise ValueError(f"question {key[0]} is answered a second time by {row['method']}, seed {row['seed']}")
            found[key] = row
        except ValueError as error:
            raise ValueError(f"{file}:{line}: {error}") from error
    if not methods:
        raise ValueError(f"{file}: expected answers, found an empty file; {HINT}")
    return methods


def _check_answer(row: Mapping[str, Any]) -> None:
    missing = [key for key in (*NEEDED, *NEEDED_OF.get(row.get("method"), ())) if key not in row]
    if missing:
        raise ValueError(f"expected key {missing[0]!r}, got keys {list(row)}")
    for key in ("index", "seed"):
        if isinstance(row[key], bool) or not isinstance(row[key], int):
            raise ValueError(f"expected a whole number in {key!r}, got {row[key]!r:.80}")
    for key in ("question", "method"):
        if not isinstance(row[key], str):
            raise ValueError(f"expected text in {key!r}, got {row[key]!r:.80}")
    if row["is_correct"] is not None and not isinstance(row["is_correct"], bool):
        raise ValueError(f"expected true, false or null in 'is_correct', got {row['is_correct']!r:.80}")
    for key in COSTS:
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"expected a number of 0 or more in {key!r}, got {value!r:.80}")


def _shared_questions(runs: Sequence[tuple[str, str, Mapping]]) -> list[QuestionKey]:
    """The questions that all have, in the order of the first.

    Raises:
        ValueError: one lacks a question that another has.
    """
    first_label, first_method, first = runs[0]
    questions = list(next(iter(first.values())))
    for label, method, by_seed in runs:
        for seed, found in by_seed.items():
            differ = sorted(set(questions) ^ set(found))
            if differ:
                index, text = differ[0]
                whole, part = ("lacks", "has") if differ[0] in questions else ("has", "lacks")
                raise ValueError(
                    f"{_name(label, method)}, seed {seed}, {whole} {len(differ)} questions differently than "
                    f"{_name(first_label, first_method)}: it {whole} question {index} ({text!r:.60}) and the other "
                    f"{part} it; compare runs on the same questions; {HINT}"
                )
    return questions


def _check_seeds(runs: Sequence[tuple[str, str, Mapping]]) -> None:
    drawn = [
        (label, method, sorted(by_seed))
        for label, method, by_seed in runs
        if method not in DETERMINISTIC or len(by_seed) > 1
    ]
    for label, method, seeds in drawn[1:]:
        if seeds != drawn[0][2]:
            raise ValueError(
                f"{_name(*drawn[0][:2])} has the seeds {drawn[0][2]} and {_name(label, method)} {seeds}; a paired "
                f"comparison needs the same ones; {HINT}"
            )


def _read_pools(folder: Path, answers: Mapping, questions: Sequence[QuestionKey]) -> dict[int, dict]:
    """Rows of the samples by seed and question; empty without the method `sample`."""
    pools: dict[int, dict[QuestionKey, Rows]] = {}
    for seed in answers.get("sample", {}):
        file = folder / "sample" / f"output-seed{seed}.jsonl"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; the samples are needed for their accuracy and for smaller pools")
        by_question: dict[QuestionKey, Rows] = {key: [] for key in questions}
        for line, row in read_jsonl(file, hint=HINT):
            key = row.get("index"), row.get("question")
            if key not in by_question or not isinstance(row.get("policy_tokens"), int):
                raise ValueError(
                    f"{file}:{line}: expected 'policy_tokens' and the 'index' and 'question' of an answered question, "
                    f"got {key[0]!r} and {key[1]!r:.60}"
                )
            if row.get("sample") in [other.get("sample") for other in by_question[key]]:
                raise ValueError(f"{file}:{line}: sample {row.get('sample')} of question {key[0]} is there twice")
            by_question[key].append(row)
        empty = [key for key, rows in by_question.items() if not rows]
        if empty:
            raise ValueError(f"{file}: {len(empty)} questions have no sample, first question {empty[0][0]}; {HINT}")
        pools[seed] = by_question
    return pools


def _unjudged(runs: Sequence[tuple[str, str, Mapping]], pools: Mapping[str, Mapping]) -> set[QuestionKey]:
    """Questions on which some answer or sample is neither right nor wrong."""
    answers = {
        key
        for _, method, by_seed in runs
        for found in (by_seed.values() if method != "sample" else ())
        for key, row in found.items()
        if row["is_correct"] is None
    }
    samples = {
        key
        for by_seed in pools.values()
        for found in by_seed.values()
        for key, rows in found.items()
        if not all(map(can_be_judged, rows))
    }
    return answers | samples


def _make_pools(by_seed: Mapping[int, Mapping[QuestionKey, Rows]], questions: Sequence[QuestionKey]) -> SamplePools:
    seeds = sorted(by_seed)
    groups = [[by_seed[seed][key] for key in questions] for seed in seeds]
    return SamplePools(
        seeds=seeds,
        ballots=[[make_ballots(rows)[0] for rows in of_seed] for of_seed in groups],
        tokens=np.array([[sum(row["policy_tokens"] for row in rows) for rows in one] for one in groups], np.float64),
        sizes=np.array([[len(rows) for rows in one] for one in groups], np.int64),
    )


def _method_run(
    label: str, method: str, by_seed: Mapping, questions: Sequence[QuestionKey], pools: SamplePools | None
) -> MethodRun:
    seeds = sorted(by_seed)
    rows = [[by_seed[seed][key] for key in questions] for seed in seeds]
    costs = {name: np.array([[row[name] for row in one] for one in rows], np.float64) for name in COSTS}
    if method == "sample":  # its lines tell of the whole pool
        right = np.array([[ballot.labels.mean() for ballot in one] for one in pools.ballots])
        costs = {name: values / pools.sizes for name, values in costs.items()}
    else:
        right = np.array([[row["is_correct"] for row in one] for one in rows], np.float64)
    return MethodRun(label, method, seeds, right, costs, rows)


def _name(label: str, method: str) -> str:
    return f"{label}/{method}" if label else method
