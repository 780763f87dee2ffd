"""Linear probes on hidden states: fitted on some questions, judged on others, one for each place of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from openrlhf.evaluation.goal_state import goal_similarities
from openrlhf.evaluation.metrics import auroc
from openrlhf.evaluation.place_states import PlaceStates

FOLDS = 5
INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)  # C of the regression, strongest penalty first
INNER_FOLDS = 3  # among which C is chosen
ROUNDING = 1e-7  # spread of scores, as a share of the largest, that float32 cannot tell from none


def question_folds(
    labels: Sequence[bool], questions: Sequence[str], folds: int = FOLDS, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows to fit on, rows held out) for every fold; every row is held out once, never one of a question fitted on.

    Args:
        labels, questions: (N,) True for a correct response, and its question.
        seed: deals the questions.
    Raises:
        ValueError: fewer questions than folds, or only correct or only wrong responses to fit on.
    """
    labels, found = np.asarray(labels, bool), len(set(questions))
    if found < folds:
        raise ValueError(f"expected at least {folds} questions for {folds} folds, got {found}; pass more completions")
    columns = _numbered(questions)
    dealt = list(GroupKFold(folds, shuffle=True, random_state=seed).split(columns, groups=columns))
    for number, (fit, _) in enumerate(dealt, start=1):
        _check_both(labels[fit], f"the completions outside of fold {number} of {folds}")
    _check_both(labels, "the completions")
    return dealt


def check_probe_data(
    fit_labels: Sequence[bool], fit_questions: Sequence[str], labels: Sequence[bool], questions: Sequence[str]
) -> None:
    """Refuse data to fit on that shares questions with the responses that are judged, has few, or lacks a class.

    Raises:
        ValueError: names what is wrong.
    """
    shared = sorted(set(fit_questions) & set(questions))
    if shared:
        raise ValueError(
            f"{len(shared)} questions are in the probe data and in the completions, first {shared[0]!r:.80}: a probe "
            "is judged on other questions than it is fitted on; leave them out of one, or pass no probe data"
        )
    found = len(set(fit_questions))
    if found < INNER_FOLDS:
        raise ValueError(f"expected at least {INNER_FOLDS} questions in the probe data, got {found}; pass more of it")
    _check_both(np.asarray(fit_labels, bool), "the completions of the probe data")
    _check_both(np.asarray(labels, bool), "the completions")


def probe_scores(
    fit_states: np.ndarray, fit_labels: np.ndarray, fit_questions: np.ndarray, states: np.ndarray, seed: int = 0
) -> np.ndarray:
    """How likely a correct outcome is, by logistic regression on standardised states.

    Scores of several probes can be pooled: both classes weigh alike in each, so that their shares move no score, and
    the scores have unit spread. C is the one of `INVERSE_PENALTIES` with the highest mean AUROC over folds of the
    questions fitted on.

    Args:
        fit_states, states: (N, H) and (M, H) float; mean and scale are those of fit_states.
        fit_labels: (N,) bool, both values.
        fit_questions: (N,) numbers, at least INNER_FOLDS different ones.
        seed: deals the questions.
    Returns:
        (M,) float64 log-odds divided by their standard deviation.
    """
    scaler = StandardScaler().fit(fit_states.astype(np.float64))
    fit_states = scaler.transform(fit_states.astype(np.float64))
    penalty = _choose_penalty(fit_states, fit_labels, fit_questions, seed)
    probe = _regression(penalty).fit(fit_states, fit_labels)
    scores = probe.decision_function(scaler.transform(states.astype(np.float64)))
    spread = scores.std()
    return scores / spread if spread > ROUNDING * np.abs(scores).max() else np.zeros_like(scores)


def _choose_penalty(states: np.ndarray, labels: np.ndarray, questions: np.ndarray, seed: int) -> float:
    """C with the highest mean AUROC on questions not fitted on; the strongest penalty where there is no AUROC."""
    totals = np.zeros(len(INVERSE_PENALTIES))
    for fit, held in GroupKFold(INNER_FOLDS, shuffle=True, random_state=seed).split(states, groups=questions):
        if len(set(labels[fit])) < 2 or len(set(labels[held])) < 2:
            continue
        probe = _regression(INVERSE_PENALTIES[0], warm_start=True, tol=1e-3)
        for number, penalty in enumerate(INVERSE_PENALTIES):
            probe.set_params(C=penalty).fit(states[fit], labels[fit])
            totals[number] += auroc(labels[held], probe.decision_function(states[held]))
    return INVERSE_PENALTIES[int(np.argmax(totals))]


def _regression(penalty: float, **settings: Any) -> LogisticRegression:
    return LogisticRegression(C=penalty, class_weight="balanced", max_iter=2000, **settings)


def held_out_scores(
    own: PlaceStates, fit: PlaceStates | None, goal: np.ndarray | None, seed: int = 0, progress: bool = False
) -> dict[str, np.ndarray]:
    """Scores of responses by what was learned from responses to other questions.

    Args:
        own: N responses to score.
        fit: responses to fit on; None: the other folds of `own`.
        goal: (1, H) goal state; None: the mean last state of the correct responses fitted on.
        seed: deals the folds.
    Returns:
        (N, P) each, higher = more likely correct: "probe", "reward" the value head, "goal_similarity" cosine.
    Raises:
        ValueError: as `question_folds`, or as `check_probe_data` with `fit`.
    """
    if fit is None:
        source, splits = own, question_folds(own.labels, own.questions, seed=seed)
    else:
        check_probe_data(fit.labels, fit.questions, own.labels, own.questions)
        source, splits = fit, [(np.arange(len(fit)), np.arange(len(own)))]
    questions = _numbered(source.questions)
    places = own.values.shape[1]
    probed, similar = np.empty((2, len(own), places))
    with tqdm(total=len(splits) * places, desc="probes", unit="probe", disable=not progress) as bar:
        for fitted, held in splits:
            correct = fitted[source.labels[fitted]]
            vector = source.states[correct, -1].mean(0, dtype=np.float64)[None] if goal is None else goal
            goals = torch.from_numpy(vector.astype(np.float32))
            for place in range(places):
                states = own.states[held, place]
                probed[held, place] = probe_scores(
                    source.states[fitted, place], source.labels[fitted], questions[fitted], states, seed
                )
                similar[held, place] = goal_similarities(torch.from_numpy(states), goals)[:, 0].numpy()
                bar.update()
    return {"probe": probed, "reward": own.values.astype(np.float64), "goal_similarity": similar}


def _numbered(questions: Sequence[str]) -> np.ndarray:
    """(N,) a number for each question."""
    return np.unique(np.asarray(questions, object), return_inverse=True)[1]


def _check_both(labels: np.ndarray, where: str) -> None:
    if not 0 < labels.sum() < len(labels):
        word = "correct" if labels.any() else "wrong"
        raise ValueError(
            f"{where} are all {word} ({len(labels)} of them): expected correct and wrong ones; pass more completions"
        )
