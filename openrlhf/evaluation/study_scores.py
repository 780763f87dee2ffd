"""What a study keeps of a scored set: arrays from which every figure can be made again, and the figures of one model.

A set is of one of three kinds. "completions": labelled completions of questions, judged by AUROC. "pairs": responses
of preference pairs, chosen and rejected in turn, judged by pair accuracy. "steps": wrong solutions of which the first
wrong step is known, judged by how often a rule names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from openrlhf.evaluation.ballots import make_ballots
from openrlhf.evaluation.bootstrap import QuestionDraws, draw_questions, question_sums
from openrlhf.evaluation.metrics import auroc, auroc_draws, pair_accuracy, prefix_index
from openrlhf.evaluation.paired import SCORES
from openrlhf.evaluation.selection import selection_accuracies
from openrlhf.evaluation.step_level import KEYS, RULES, step_level, stepped_row
from openrlhf.evaluation.summary import PREFIX_PERCENTS, judged_rows
from openrlhf.evaluation.threshold_choice import split_questions, threshold_at_equal_accuracy

Rows = Sequence[Mapping[str, Any]]
Kind = Literal["completions", "pairs", "steps"]
Arrays = Mapping[str, np.ndarray]

TRAJECTORY_PERCENTS = tuple(range(5, 101, 5))
STEP_RULES = tuple(f"{words} {score}" for words in RULES for score in KEYS)
SELECTIONS = ("mean of samples", "majority vote", "best of n, reward", "best of n, goal similarity", "any correct")
VOTE_SCORES = ("goal_similarity", "reward")


def score_arrays(rows: Rows, kind: Kind) -> dict[str, np.ndarray]:
    """The numbers of N scored completions that figures of a set are made of.

    Args:
        rows: with `question`, `is_correct`, `num_actions`, `partial_rewards` and `cosine_sim`; of kind "pairs" the
            chosen and the rejected response of each pair in turn.
    Returns:
        `question` (N,) int32 numbers in order of appearance, `label` (N,) int8 with -1 for none, `tokens` (N,) int32
        of the response, `reward` and `goal_similarity` (N, 4) float32 after 25, 50, 75 and 100% of it, NaN where a row
        has none. Of kind "steps" also `hit` (N, R) float32: whether each rule of STEP_RULES names the first wrong step,
        NaN where the row or its score cannot be judged.
    """
    numbers: dict[str, int] = {}
    question = [numbers.setdefault(row["question"], len(numbers)) for row in rows]
    label = [-1 if row.get("is_correct") is None else int(row["is_correct"]) for row in rows]
    arrays = {
        "question": np.array(question, np.int32),
        "label": np.array(label, np.int8),
        "tokens": np.array([row["num_actions"] for row in rows], np.int32),
    }
    for name, key in SCORES.items():
        arrays[name] = _at_percents(rows, key, PREFIX_PERCENTS).astype(np.float32)
    if kind == "steps":
        arrays["hit"] = np.stack([_step_hits(row, number) for number, row in enumerate(rows)])
    return arrays


def measure_names(kind: Kind) -> list[str]:
    """Names of what sets of a kind are judged by: "reward@100", "goal_similarity@25", ..., or rules."""
    return list(STEP_RULES) if kind == "steps" else [f"{score}@{p}" for score in SCORES for p in PREFIX_PERCENTS]


def measure_values(arrays: Arrays, kind: Kind) -> dict[str, float | None]:
    """Every measure of a set over all its rows that have the score; None where it is undefined."""
    values: dict[str, float | None] = {}
    for name in measure_names(kind):
        scores, rows = _usable(arrays, kind, name)
        if kind == "steps":
            values[name] = float(scores.mean()) if len(scores) else None
        elif kind == "pairs":
            values[name] = pair_accuracy(scores[0::2], scores[1::2])[0]
        else:
            values[name] = auroc(arrays["label"][rows], scores)
    return values


def measure_draws(arrays: Arrays, kind: Kind, name: str, draws: QuestionDraws) -> np.ndarray:
    """(n,) one measure on each draw of questions; NaN where it is undefined.

    Args:
        draws: of the question numbers of `arrays`.
    """
    scores, rows = _usable(arrays, kind, name)
    if kind == "completions":
        return auroc_draws(arrays["label"][rows], scores, arrays["question"][rows].tolist(), draws)
    hits = scores if kind == "steps" else (scores[0::2] > scores[1::2]).astype(float)
    columns = draws.columns(arrays["question"][rows if kind == "steps" else rows[0::2]].tolist())
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = question_sums(draws, columns, np.stack([hits, np.ones_like(hits)], axis=1))
        return sums[:, 0] / sums[:, 1]


def step_figures(rows: Rows) -> dict[str, Any]:
    """`step_level` of the rows without its intervals: how many are judged, and what a random step would reach."""
    return step_level(rows, draw_questions([row["question"] for row in rows], 0))


def goal_trajectory(rows: Rows) -> dict[str, Any]:
    """Mean goal similarity of correct and of wrong completions along the response.

    Returns:
        `percents`; `correct` and `wrong`: a mean for each, None where there is no such completion; `counts` by class.
    """
    usable = [row for row in rows if row.get("cosine_sim") is not None and row.get("is_correct") is not None]
    values = _at_percents(usable, "cosine_sim", TRAJECTORY_PERCENTS)
    truth = np.array([bool(row["is_correct"]) for row in usable], bool)
    parts = {"correct": values[truth], "wrong": values[~truth]}
    means = {name: part.mean(axis=0).tolist() if len(part) else None for name, part in parts.items()}
    return {"percents": list(TRAJECTORY_PERCENTS), **means, "counts": {name: len(part) for name, part in parts.items()}}


def vote_figures(rows: Rows, validation: Rows | None = None, seed: int = 0) -> dict[str, Any] | None:
    """What several completions of a question are worth, with all of them, and what filters save.

    Args:
        rows: scored completions with goal similarities.
        validation: completions of other questions to choose the filters' thresholds on; None: two halves of the
            questions are each judged with the threshold chosen on the other one.
        seed: of the halves, and of fewer completions drawn.
    Returns:
        Accuracies by name of SELECTIONS, `questions`, and `filtered_vote` by score of VOTE_SCORES (see
        `filtered_vote`); None unless half of the questions have several completions.
    """
    usable = [row for row in judged_rows(rows)[0] if row.get("reward") is not None]
    counts = Counter(row["question"] for row in usable)
    if not counts or 2 * sum(count > 1 for count in counts.values()) < len(counts):
        return None
    accuracies = selection_accuracies(make_ballots(usable), SELECTIONS, seed=seed)
    figures: dict[str, Any] = {name: float(values[:, -1].mean()) for name, values in accuracies.items()}
    figures["questions"] = len(counts)
    others = None
    if validation is not None:
        others = [row for row in judged_rows(validation)[0] if row.get("reward") is not None]
    figures["filtered_vote"] = {
        score: filtered_vote(
            *(part if part is None else [_filtered_by(score, row) for row in part] for part in (usable, others)),
            seed=seed,
        )
        for score in VOTE_SCORES
    }
    return figures


def filtered_vote(rows: Rows, validation: Rows | None, seed: int = 0) -> dict[str, Any] | None:
    """The filter that saves most tokens at no loss of accuracy where it was chosen, on the questions it was not.

    Args: as `vote_figures`; the filter reads `cosine_sim`.
    Returns:
        `thresholds` (None: nothing is filtered), `accuracy`, `unfiltered_accuracy`, `tokens_saved` (share), and
        `fewer_samples`, accuracy of the vote of fewer completions that cost as many tokens. With halves these are
        means over their questions, savings over their tokens. None when a half is empty.
    """
    if validation is None:
        first, second = split_questions(rows, seed=seed)
        parts = [(first, second), (second, first)]
    else:
        parts = [(validation, rows)]
    if not all(chosen_on and judged_on for chosen_on, judged_on in parts):
        return None
    found = [threshold_at_equal_accuracy(*part, bootstrap=0, seed=seed) for part in parts]
    questions = [one.test.questions for one in found]
    tokens = [sum(row["num_actions"] for row in judged_on) for _, judged_on in parts]
    return {
        "thresholds": [one.threshold for one in found],
        "accuracy": float(np.average([one.test.accuracy for one in found], weights=questions)),
        "unfiltered_accuracy": float(np.average([one.test.unfiltered_accuracy for one in found], weights=questions)),
        "tokens_saved": float(np.average([one.test.tokens_saved for one in found], weights=tokens)),
        "fewer_samples": float(np.average([one.fewer_samples for one in found], weights=questions)),
    }


def _filtered_by(score: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row as the goal filter reads it; rewards x become x / (1 + |x|), of the same order."""
    if score == "goal_similarity":
        return row
    rewards = np.asarray(row["partial_rewards"], np.float64)
    return {**row, "cosine_sim": (rewards / (1 + np.abs(rewards))).astype(np.float32)}


def _at_percents(rows: Rows, key: str, percents: Sequence[float]) -> np.ndarray:
    """(N, P) float64 per-token values after each share of the response; NaN for a row without them."""
    values = np.full((len(rows), len(percents)), np.nan)
    for number, row in enumerate(rows):
        if row.get(key) is not None:
            values[number] = [row[key][prefix_index(row["num_actions"], percent)] for percent in percents]
    return values


def _step_hits(row: Mapping[str, Any], number: int) -> np.ndarray:
    """(R,) float32 1 where the rule of STEP_RULES names the first wrong step, 0 where not, NaN where not judged."""
    found = stepped_row(row, number)
    if isinstance(found, str):
        return np.full(len(STEP_RULES), np.nan, np.float32)
    hits = [
        float(rule(found.values[score], found.before[score]) == found.first_error) if score in found.values else np.nan
        for rule in RULES.values()
        for score in KEYS
    ]
    return np.array(hits, np.float32)


def _usable(arrays: Arrays, kind: Kind, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values of a measure where they exist, and the rows they are of; of pairs, where both responses have one."""
    if kind == "steps":
        values = arrays["hit"][:, STEP_RULES.index(name)]
    else:
        score, percent = name.split("@")
        values = arrays[score][:, PREFIX_PERCENTS.index(int(percent))]
    kept = ~np.isnan(values)
    if kind == "pairs":
        kept = np.repeat(kept[0::2] & kept[1::2], 2)
    elif kind == "completions":
        kept &= arrays["label"] >= 0
    rows = np.flatnonzero(kept)
    return values[rows].astype(np.float64), rows
