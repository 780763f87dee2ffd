"""Grade completions and count how far the grades agree with labels that the rows carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.datasets.completions import Completion, read_truth
from openrlhf.rewards.grading import PercentRule, extract_answer, grade_answer

LABEL_KEYS = ("is_correct_origin", "is_correct")  # the first that a file has is compared with


@dataclass(frozen=True)
class Grade:
    """The verdict on one completion."""

    answer: str | None  # the answer that was graded; None: there is none
    correct: bool | None  # None: the completion has no expected answer


def grade_rows(
    completions: Sequence[Completion], *, extract: bool = False, percent: PercentRule = "strict"
) -> Iterator[Grade]:
    """Grade completions one by one, whether or not they have a label.

    The answer is the predicted one. It is taken from the solution with `extract`, where no completion has a predicted
    answer, and where the predicted answer and the label are both null; a labelled row with a null answer has none.
    """
    extract = extract or all(one.predicted_answer is None for one in completions)
    for one in completions:
        answer = one.predicted_answer
        if extract or (answer is None and one.is_correct is None):
            answer = extract_answer(one.generated_solution)
        known = one.expected_answer is not None
        yield Grade(answer, grade_answer(answer, one.expected_answer, percent=percent) if known else None)


def find_label_key(completions: Sequence[Completion], wanted: str | None = None) -> str | None:
    """The column to compare with: `wanted`, else the first of LABEL_KEYS that has a value; None without any.

    Raises:
        ValueError: no completion has a value under `wanted`.
    """
    for key in LABEL_KEYS if wanted is None else (wanted,):
        if any(_raw_label(one, key) is not None for one in completions):
            return key
    if wanted is None:
        return None
    columns = {key for one in completions for key in ("is_correct", *one.extra) if _raw_label(one, key) is not None}
    named = ", ".join(sorted(columns)) or "none"
    raise ValueError(f"no row has a label under {wanted!r}; columns with values: {named}")


def read_label(completion: Completion, key: str) -> bool | None:
    """The label of a completion under a column; None where it has none.

    Raises:
        ValueError: the value is no truth value.
    """
    return read_truth(_raw_label(completion, key), key)


def count_agreement(grades: Iterable[Grade], labels: Iterable[bool | None]) -> dict[str, Any]:
    """Counts of a file of grades and the labels beside them.

    Returns:
        rows, graded, correct, without_answer (graded rows that have none), compared (graded rows with a label),
        both_correct, both_wrong, ours_only, theirs_only (correct by the grade or by the label alone), and agreement
        (share of the compared; None without any).
    """
    pairs = [(grade, label) for grade, label in zip(grades, labels, strict=True)]
    graded = [grade for grade, _ in pairs if grade.correct is not None]
    compared = [(grade.correct, label) for grade, label in pairs if grade.correct is not None and label is not None]
    return {
        "rows": len(pairs),
        "graded": len(graded),
        "correct": sum(grade.correct for grade in graded),
        "without_answer": sum(not (grade.answer or "").strip() for grade in graded),
        "compared": len(compared),
        "both_correct": compared.count((True, True)),
        "both_wrong": compared.count((False, False)),
        "ours_only": compared.count((True, False)),
        "theirs_only": compared.count((False, True)),
        "agreement": sum(ours == theirs for ours, theirs in compared) / len(compared) if compared else None,
    }


def _raw_label(completion: Completion, key: str) -> Any:
    return completion.is_correct if key == "is_correct" else completion.extra.get(key)
