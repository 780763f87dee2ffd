"""Labels for completions that come without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from openrlhf.datasets.completions import Completion
from openrlhf.rewards.grading import extract_answer, grade_answer


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
