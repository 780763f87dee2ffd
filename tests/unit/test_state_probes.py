"""State probes: planted directions, folds that share no question, figures against numbers by hand and slow loops."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from openrlhf.datasets.completions import Completion
from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.linear_probes import check_probe_data, held_out_scores, probe_scores, question_folds
from openrlhf.evaluation.metrics import auroc, prefix_index
from openrlhf.evaluation.place_states import PlaceStates, read_places
from openrlhf.evaluation.probe_report import plot_probes, probe_tables
from openrlhf.evaluation.state_probes import (
    d_prime_intervals,
    effective_rank,
    mean_cosine,
    state_figures,
    won_pairs,
)
from tests.tiny import tiny_reward_model, tiny_tokenizer

PERCENTS = (25, 50, 75, 100)


def planted(questions=60, each=10, seed=0, shift=3.0, start=2, prefix="q") -> PlaceStates:
    """States of 8 dimensions; those of correct ones lie `shift` along one that changes from place `start` of 4 on."""
    generator = np.random.default_rng(seed)
    count = questions * each
    labels = generator.random(count) < 0.4
    states = generator.normal(size=(count, 4, 8))
    for place in range(start, 4):
        states[:, place, place] += shift * labels
    names = tuple(f"{prefix}{row // each}" for row in range(count))
    values = generator.normal(size=(count, 4))
    return PlaceStates(states.astype(np.float32), values.astype(np.float32), labels, names)


def test_a_probe_finds_a_planted_direction_where_it_is_and_chance_before():
    figures = state_figures(planted(), percents=PERCENTS, bootstrap=50)
    found = [figures["auroc"]["probe"][f"{percent}"][0] for percent in PERCENTS]
    # Two normals 3 apart: Phi(3 / sqrt(2)) = 0.983, a little less for what is learned from 480 rows.
    assert all(0.96 < one < 0.99 for one in found[2:])
    # 600 rows: the standard error of a chance AUROC is 0.024.
    assert all(abs(one - 0.5) < 0.07 for one in found[:2])
    assert all(abs(one[0] - 0.5) < 0.07 for one in figures["auroc"]["reward"].values())
    within = figures["auroc_within_questions"]["probe"]
    assert within["100"][0] > 0.95 and abs(within["25"][0] - 0.5) < 0.08
    gap = figures["probe_minus"]["reward"]
    assert gap["100"][1] > 0.3 and gap["25"][1] < 0 < gap["25"][2]
    # The goal is the mean last state of correct ones: it points along the direction of the last place alone.
    assert figures["d_prime"]["100"][1] > 1.5 and abs(figures["d_prime"]["75"][0]) < 0.3


def test_folds_hold_every_row_once_and_never_a_question_that_is_fitted_on():
    data = planted(questions=23, each=3)
    folds = question_folds(data.labels, data.questions, seed=4)
    assert len(folds) == 5
    assert sorted(row for _, held in folds for row in held) == list(range(69))
    for fit, held in folds:
        assert not {data.questions[row] for row in fit} & {data.questions[row] for row in held}
        assert len(fit) + len(held) == 69
    other = question_folds(data.labels, data.questions, seed=5)
    assert any(a[1].tolist() != b[1].tolist() for a, b in zip(folds, other, strict=True))


def test_what_only_names_the_question_gives_a_probe_nothing():
    """States that are all alike within a question, and labels too: rows dealt without their question would score 1."""
    generator = np.random.default_rng(0)
    labels = np.repeat(generator.random(60) < 0.5, 10)
    states = np.repeat(generator.normal(size=(60, 1, 40)), 10, axis=0).astype(np.float32)
    data = PlaceStates(states, states[:, :, 0], labels, tuple(f"q{row // 10}" for row in range(600)))
    assert auroc(labels, held_out_scores(data, None, None)["probe"][:, 0]) < 0.7


def test_the_penalty_suits_the_states():
    """The outcome is the small difference of two states that rise and fall together: a strong penalty misses it."""
    generator = np.random.default_rng(0)
    labels, common = generator.random(900) < 0.5, generator.normal(size=900)
    noise = generator.normal(size=(900, 2)) * 0.01
    states = common[:, None] + noise + 0.04 * labels[:, None] * np.array([1, -1])
    questions = np.arange(900) // 3
    found = probe_scores(states[:600], labels[:600], questions[:600], states[600:])
    # The difference is 0.08 against noise of 0.014; C = 1e-4 alone gives 0.54, C = 0.1 nearly 1.
    assert auroc(labels[600:], found) > 0.9
    assert found.std() == pytest.approx(1)


def test_folds_that_cannot_be_fitted_are_refused():
    with pytest.raises(ValueError, match="at least 5 questions for 5 folds, got 4"):
        question_folds([True, False] * 4, ["a", "b", "c", "d"] * 2)
    questions = [f"q{row // 2}" for row in range(10)]
    with pytest.raises(ValueError, match=r"outside of fold \d of 5 are all wrong \(8 of them\)"):
        question_folds([True] + [False] * 9, questions)
    with pytest.raises(ValueError, match="are all correct"):
        question_folds([True] * 10, questions)


def test_probe_data_is_fitted_on_alone():
    own, fit = planted(seed=1), planted(seed=2, prefix="other")
    scores = held_out_scores(own, fit, None)
    assert auroc(own.labels, scores["probe"][:, 3]) > 0.95
    upside_down = PlaceStates(fit.states, fit.values, ~fit.labels, fit.questions)
    assert auroc(own.labels, held_out_scores(own, upside_down, None)["probe"][:, 3]) < 0.05
    goal = fit.states[fit.labels, -1].mean(0)
    np.testing.assert_allclose(scores["goal_similarity"], cosines(own.states, goal), atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "questions", "message"),
    [
        ([True, False, True], ["a", "b", "c"], "1 questions are in the probe data and in the completions, first 'b'"),
        ([False, False, False], ["a", "c", "e"], "completions of the probe data are all wrong"),
        ([True, False, True], ["a", "c", "c"], "at least 3 questions in the probe data, got 2"),
    ],
)
def test_probe_data_that_does_not_fit_is_refused(labels, questions, message):
    with pytest.raises(ValueError, match=message):
        check_probe_data(labels, questions, [True, False], ["b", "d"])
    with pytest.raises(ValueError, match="the completions are all correct"):
        check_probe_data([True, False, True], ["a", "c", "e"], [True, True], ["b", "d"])


def cosines(states: np.ndarray, goal: np.ndarray) -> np.ndarray:
    return states @ goal / np.linalg.norm(states, axis=-1) / np.linalg.norm(goal)


def test_goal_of_the_other_folds_or_the_one_given():
    data = planted(questions=12, each=4)
    found = held_out_scores(data, None, None, seed=3)["goal_similarity"]
    for fit, held in question_folds(data.labels, data.questions, seed=3):
        goal = np.mean([data.states[row, -1] for row in fit if data.labels[row]], axis=0)
        np.testing.assert_allclose(found[held], cosines(data.states[held], goal), atol=1e-5)
    given = np.arange(8, dtype=np.float32)[None]
    found = held_out_scores(data, None, given)["goal_similarity"]
    np.testing.assert_allclose(found, cosines(data.states, given[0]), atol=1e-5)


@pytest.mark.parametrize("width", [2, 9])  # fewer and more dimensions than the 4 states
def test_effective_rank_of_known_matrices(width):
    states = np.zeros((4, width), np.float32)
    states[:, :2] = [[3, 0], [-3, 0], [0, 1], [0, -1]]  # variances 9 : 1 in two directions: (9 + 1)^2 / (81 + 1)
    assert effective_rank(states) == pytest.approx(100 / 82)
    assert effective_rank(states + 5) == pytest.approx(100 / 82)  # the mean does not count
    states[:, :2] = [[1, 1], [-1, -1], [2, 2], [-2, -2]]  # a line
    assert effective_rank(states) == pytest.approx(1)
    states[:, :2] = [[1, 1], [-1, 1], [1, -1], [-1, -1]]  # alike in two directions
    assert effective_rank(states) == pytest.approx(2)
    assert effective_rank(np.full((4, width), 0.1, np.float32)) is None


def test_effective_rank_is_that_of_the_eigenvalues():
    states = np.random.default_rng(0).normal(size=(50, 7)) * np.arange(1, 8)
    eigenvalues = np.linalg.eigvalsh(np.cov(states.T))
    assert effective_rank(states) == pytest.approx(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())


def test_d_prime_by_hand():
    labels = np.array([True, True, False, False, False])
    scores = np.array([[1, 7, 0.1], [3, 5, 0.1], [0, 7, 0.1], [2, 6, 0.1], [1, 5, 0.1]])
    columns = np.arange(5)
    first, second, none = d_prime_intervals(labels, scores, columns, draw_questions(columns, 20))
    assert first.value == pytest.approx((2 - 1) / np.sqrt((2 + 1) / 2))  # variances 2 of (1, 3), 1 of (0, 2, 1)
    assert second.value == pytest.approx(0)  # both means are 6
    assert none == (None, None, None)  # no spread
    (alone,) = d_prime_intervals(labels[1:], scores[1:, :1], columns[1:], draw_questions(columns, 20))
    assert alone.value is None  # the variance of one response is undefined


def test_intervals_over_questions_against_a_loop_over_drawn_rows():
    data = planted(questions=9, each=4, seed=5)
    draws = draw_questions(data.questions, 30, seed=2)
    columns = draws.columns(data.questions)
    scores = data.values[:, :1].astype(float)
    looped = []
    for weights in draws.weights:
        rows = [row for row in range(36) for _ in range(weights[columns[row]])]
        correct, wrong = (scores[[row for row in rows if data.labels[row] == want], 0] for want in (True, False))
        spread = np.sqrt((np.var(correct, ddof=1) + np.var(wrong, ddof=1)) / 2)
        means = [np.mean([data.states[row, -1] for row in rows if data.labels[row] == want], 0) for want in (1, 0)]
        looped.append(((correct.mean() - wrong.mean()) / spread, cosines(*means)))
    expected = np.percentile(looped, [2.5, 97.5], axis=0)
    (distance,) = d_prime_intervals(data.labels, scores, columns, draws)
    np.testing.assert_allclose(distance[1:], expected[:, 0], atol=1e-9)
    cosine = mean_cosine(data.labels, data.states[:, -1], columns, draws)
    np.testing.assert_allclose(cosine[1:], expected[:, 1], atol=1e-6)


def test_mean_cosine_by_hand():
    states = np.array([[2, 0], [0, 2], [3, 0], [5, 0]], np.float32)  # means (1, 1) and (4, 0): 45 degrees
    labels, columns = np.array([True, True, False, False]), np.arange(4)
    draws = draw_questions(columns, 10)
    assert mean_cosine(labels, states, columns, draws).value == pytest.approx(np.sqrt(0.5))
    assert mean_cosine(np.ones(4, bool), states, columns, draws) == (None, None, None)


def test_won_pairs_against_a_loop():
    generator = np.random.default_rng(1)
    labels, columns = generator.random(40) < 0.5, generator.integers(0, 7, 40)
    columns[:7] = np.arange(7)
    scores = generator.integers(0, 4, (40, 2)).astype(float)  # many ties
    won, pairs = won_pairs(labels, scores, columns)
    for question in range(7):
        for place in range(2):
            compared = [
                float(scores[a, place] > scores[b, place]) + 0.5 * (scores[a, place] == scores[b, place])
                for a in range(40)
                for b in range(40)
                if columns[a] == columns[b] == question and labels[a] and not labels[b]
            ]
            assert (won[question, place], pairs[question, place]) == (sum(compared), len(compared))


def test_trajectories_are_means_of_a_class():
    data = planted(questions=10, each=5)
    figures = state_figures(data, percents=PERCENTS, bootstrap=20)
    for word, rows in (("correct", data.labels), ("wrong", ~data.labels)):
        for place, percent in enumerate(PERCENTS):
            value, low, high = figures["trajectories"]["reward"][word][f"{percent}"]
            assert value == pytest.approx(data.values[rows, place].mean(), abs=1e-6) and low < value < high
    assert (figures["rows"], figures["questions"], figures["correct"]) == (50, 10, data.labels.mean())
    assert figures == state_figures(data, percents=PERCENTS, bootstrap=20)


def test_tables_and_plots_show_what_is_undefined(tmp_path):
    data = planted(questions=10, each=5)
    still = PlaceStates(np.ones_like(data.states), data.values, data.labels, data.questions)
    figures = state_figures(still, percents=PERCENTS, bootstrap=20)
    assert figures["effective_rank"]["25"] is None and figures["d_prime"]["25"] == [None, None, None]
    assert all(one[0] == 0.5 for one in figures["auroc"]["probe"].values())
    json.dumps(figures, allow_nan=False)
    details = {
        "model": {"name": "one"},
        "files": ["set/all/output"],
        "left_out": {"without label": 3, "whose prompt leaves no room": 0},
        "fitted_on": {"folds": 5, "seed": 0},
        "goal_state": {"source": "other folds", "digest": None},
    }
    text = probe_tables({**figures, **details})
    assert "50 completions of 10 questions" in text and "Left out: 3 without label." in text
    assert "| 25% | - | - |" in text.split("## Separation")[1]
    assert "correct completions of the other folds" in text
    tables = [line.count("|") for line in text.split("\n") if line.startswith("|")]
    assert len(tables) == 5 * 6  # head, rule and four places
    for results in ({"one": figures}, {"one": figures, "two_$x$": figures}):
        assert plot_probes(results, tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_states_are_read_where_prefix_scores_reads_them(family):
    tokenizer, model = tiny_tokenizer(), tiny_reward_model(family)
    texts = ["the answer is good", "the answer is good", "bad", "", "no " * 60]
    completions = [Completion(f"what is {i % 2} ?", text, is_correct=i % 2 == 0) for i, text in enumerate(texts)]
    completions.insert(2, Completion("what is " * 40, "good", is_correct=True))  # leaves no room
    options = {"template": "plain", "max_len": 40, "progress": False}
    found = read_places(model, tokenizer, completions, percents=PERCENTS, batch_tokens=64, **options)
    assert found.states.dtype == np.float32 and len(found) == 5
    assert found.questions == tuple(f"what is {i % 2} ?" for i in range(5))
    assert found.labels.tolist() == [True, False, True, False, True]
    for row, text in enumerate(texts):
        prompt = tokenizer(f"{found.questions[row]}\n", add_special_tokens=False)["input_ids"]
        response = tokenizer(text, add_special_tokens=False)["input_ids"][: 39 - len(prompt)] + [2]
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            out = model(ids, torch.ones_like(ids).bool())
        for place, percent in enumerate(PERCENTS):
            token = len(prompt) + prefix_index(len(response), percent)
            np.testing.assert_allclose(found.states[row, place], out.hidden_states[0, token], atol=1e-5)
            assert found.values[row, place] == pytest.approx(out.values[0, token].item(), abs=1e-5)


def test_states_that_are_not_finite_are_refused():
    tokenizer, model = tiny_tokenizer(), tiny_reward_model()
    with torch.no_grad():
        model.network.score.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="completion 0: a state or value is not finite"):
        read_places(
            model, tokenizer, [Completion("q", "good", is_correct=True)], template="plain", max_len=40, progress=False
        )


def test_records_of_other_sizes_are_refused():
    data = planted(questions=2, each=2)
    with pytest.raises(ValueError, match=re.escape("labels (3,) and 4 questions")):
        PlaceStates(data.states, data.values, data.labels[1:], data.questions)
