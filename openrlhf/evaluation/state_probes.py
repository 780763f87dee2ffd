"""What hidden states tell about the outcome of a response, place by place: probes, separation and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf.evaluation.bootstrap import (
    Interval,
    QuestionDraws,
    draw_questions,
    percentile_interval,
    question_sums,
    ratio_intervals,
)
from openrlhf.evaluation.linear_probes import ROUNDING, held_out_scores
from openrlhf.evaluation.metrics import auroc_intervals, paired_auroc_difference
from openrlhf.evaluation.place_states import PERCENTS, PlaceStates


def won_pairs(labels: np.ndarray, scores: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a correct and a wrong response to one question in which the correct one scores higher.

    Args:
        labels: (N,) bool.
        scores: (N, P).
        columns: (N,) question of each row, 0 to Q - 1.
    Returns:
        (Q, P) won pairs, a tie counting one half, and (Q, P) pairs, which is 0 for a question of one class.
    """
    won = np.zeros((columns.max() + 1, scores.shape[1]))
    pairs = np.zeros_like(won)
    order = np.argsort(columns, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(columns[order])) + 1):
        correct, wrong = scores[rows[labels[rows]]], scores[rows[~labels[rows]]]
        gaps = correct[:, None] - wrong[None]
        won[columns[rows[0]]] = (gaps > 0).sum((0, 1)) + (gaps == 0).sum((0, 1)) / 2
        pairs[columns[rows[0]]] = len(correct) * len(wrong)
    return won, pairs


def d_prime_intervals(
    labels: np.ndarray, scores: np.ndarray, columns: np.ndarray, draws: QuestionDraws
) -> list[Interval]:
    """Distance of the class means in standard deviations: (m_c - m_w) / sqrt((s_c^2 + s_w^2) / 2).

    Args:
        labels: (N,) bool, correct (c) or wrong (w).
        scores: (N, P).
        columns: (N,) question of each row.
    Returns:
        P intervals, positive where correct responses score higher; undefined with fewer than two responses of a class
        or without any spread within the classes. Variances have the denominator n - 1.
    """
    centred = scores - scores.mean(0)  # sums of squares lose no digits then
    least = (ROUNDING * np.abs(scores).max()) ** 2
    parts = [
        own[:, None] * power for own in (labels, ~labels) for power in (np.ones_like(centred), centred, centred**2)
    ]
    (values,) = _d_prime([part.sum(0, keepdims=True) for part in parts], least)
    drawn = _d_prime([question_sums(draws, columns, part) for part in parts], least)
    return [
        percentile_interval(None if np.isnan(value) else value, column)
        for value, column in zip(values, drawn.T, strict=True)
    ]


def _d_prime(sums: Sequence[np.ndarray], least: float) -> np.ndarray:
    """(n, P) from count, sum and sum of squares of the correct, then of the wrong ones, (n, P) each; NaN: undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means, variances = [], []
        for count, total, squares in (sums[:3], sums[3:]):
            means.append(total / count)
            variances.append((squares - total * means[-1]) / (count - 1))
        spread = (variances[0] + variances[1]) / 2
        return np.where(spread > least, (means[0] - means[1]) / np.sqrt(spread), np.nan)


def mean_cosine(labels: np.ndarray, states: np.ndarray, columns: np.ndarray, draws: QuestionDraws) -> Interval:
    """Cosine between the mean state of correct and of wrong responses; undefined where a class is empty.

    Args:
        labels: (N,) bool.
        states: (N, H).
        columns: (N,) question of each row.
    """
    parts = [own[:, None] * states.astype(np.float64) for own in (labels, ~labels)]
    (value,) = _cosines(*(part.sum(0, keepdims=True) for part in parts))
    drawn = _cosines(*(question_sums(draws, columns, part) for part in parts))
    return percentile_interval(None if np.isnan(value) else value, drawn)


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n,) cosines of the rows of two (n, H); NaN with a zero vector."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def effective_rank(states: np.ndarray) -> float | None:
    """Participation ratio of the covariance's eigenvalues: (sum of l)^2 / sum of l^2.

    Args:
        states: (N, H).
    Returns:
        Between 1 (all states on a line) and min(N - 1, H) (the same spread in all directions); None without spread.
    Source: Gao and Ganguli 2015.
    """
    centred = states.astype(np.float64)
    centred -= centred.mean(0)
    # Both products have the covariance's eigenvalues (times N); their sums are a trace and a squared Frobenius norm.
    product = centred.T @ centred if centred.shape[0] > centred.shape[1] else centred @ centred.T
    total, squares = np.trace(product), (product**2).sum()
    scale = len(states) * (ROUNDING * np.abs(states).max()) ** 2
    return float(total**2 / squares) if total > scale else None


def state_figures(
    own: PlaceStates,
    fit: PlaceStates | None = None,
    goal: np.ndarray | None = None,
    *,
    percents: Sequence[float] = PERCENTS,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Every figure of the states at P places; undefined ones are None, an interval is [value, low, high], 95%.

    Args:
        own: N responses that are judged.
        fit, goal, seed: as for `held_out_scores`.
        percents: the places, for the keys.
        bootstrap: draws of questions.
    Returns:
        `rows`, `questions`, `correct` (a share).
        `auroc`, `auroc_within_questions`: by score ("probe", "reward", "goal_similarity"), intervals by percent.
        `probe_minus`: by "reward" and "goal_similarity", [difference of AUROC, low, high, p] by percent.
        `d_prime` (of the goal similarity) and `effective_rank`: by percent; `mean_cosine` of the last states.
        `trajectories`: by "goal_similarity" and "reward", means of "correct" and "wrong" by percent.
    Raises:
        ValueError: as `held_out_scores`.
    """
    scores = held_out_scores(own, fit, goal, seed, progress)
    names = [f"{percent:g}" for percent in percents]
    labels, questions = own.labels, own.questions
    draws = draw_questions(questions, bootstrap, seed)
    columns = draws.columns(questions)

    def by_place(intervals: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
        return {name: list(one) for name, one in zip(names, intervals, strict=True)}

    ranked = [
        auroc_intervals(labels, {key: one[:, place] for key, one in scores.items()}, questions, draws)
        for place in range(len(names))
    ]
    within = {key: won_pairs(labels, one, columns) for key, one in scores.items()}
    every = np.arange(len(draws.numbers))  # the rows of won_pairs are questions
    read_outs = ("reward", "goal_similarity")
    return {
        "rows": len(own),
        "questions": len(draws.numbers),
        "correct": float(labels.mean()),
        "auroc": {key: by_place([one[key] for one in ranked]) for key in scores},
        "auroc_within_questions": {key: by_place(ratio_intervals(draws, every, *two)) for key, two in within.items()},
        "probe_minus": {
            key: by_place(
                [
                    paired_auroc_difference(labels, a, b, questions, bootstrap, seed)
                    for a, b in zip(scores["probe"].T, scores[key].T, strict=True)
                ]
            )
            for key in read_outs
        },
        "d_prime": by_place(d_prime_intervals(labels, scores["goal_similarity"], columns, draws)),
        "mean_cosine": list(mean_cosine(labels, own.states[:, -1], columns, draws)),
        "effective_rank": {name: effective_rank(own.states[:, place]) for place, name in enumerate(names)},
        "trajectories": {
            key: {
                word: by_place(
                    ratio_intervals(
                        draws, columns, scores[key] * mask[:, None], np.ones_like(scores[key]) * mask[:, None]
                    )
                )
                for word, mask in (("correct", labels), ("wrong", ~labels))
            }
            for key in read_outs
        },
    }
