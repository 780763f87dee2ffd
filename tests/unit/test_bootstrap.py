"""Draws of whole questions and the intervals made of them."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf.evaluation import bootstrap
from openrlhf.evaluation.bootstrap import draw_questions, percentile_interval, ratio_intervals, two_sided_p
from openrlhf.evaluation.metrics import auroc_interval, auroc_intervals


def test_every_draw_takes_as_many_questions_as_there_are():
    draws = draw_questions(list("aabbbc"), n=200, seed=1)
    assert draws.weights.shape == (200, 3) and (draws.weights.sum(axis=1) == 3).all()
    assert draws.columns(list("cab")).tolist() == [2, 0, 1]
    assert (draws.weights == draw_questions(list("abc"), n=200, seed=1).weights).all()
    assert abs(draws.weights.mean() - 1) < 1e-12
    assert draw_questions(["a", "a"]).weights.shape == (0, 1)
    assert draw_questions([]).weights.shape == (0, 0)


def test_ratio_of_sums_by_hand():
    draws = draw_questions(["a", "b"], n=400)
    # a: 1 of 2, b: 3 of 3; draws aa 0.5, ab 0.8, bb 1, each end with probability 1/4
    (found,) = ratio_intervals(draws, draws.columns(["a", "b"]), np.array([1, 3]), np.array([2, 3]))
    assert found == (0.8, 0.5, 1.0)
    (mean,) = ratio_intervals(draws, draws.columns(["a", "b", "b"]), np.array([1, 0, 0]))
    assert mean.value == pytest.approx(1 / 3) and (mean.low, mean.high) == (0.0, 1.0)


def test_undefined_ratios_and_single_questions():
    draws = draw_questions(["a", "b"], n=50)
    columns = draws.columns(["a", "b"])
    assert ratio_intervals(draws, columns, np.array([0, 0]), np.array([0, 0])) == [(None, None, None)]
    # only question a counts: a value without bounds
    assert ratio_intervals(draws, columns, np.array([1, 0]), np.array([2, 0])) == [(0.5, None, None)]
    assert ratio_intervals(draws, columns[:0], np.empty(0)) == [(None, None, None)]


def test_blocks_of_draws_change_nothing(monkeypatch):
    generator = np.random.default_rng(0)
    questions = generator.integers(0, 9, 70).tolist()
    labels, scores = generator.integers(0, 2, 70), generator.integers(0, 6, 70).astype(float)
    draws = draw_questions(questions, n=60)
    columns = draws.columns(questions)
    whole = auroc_interval(labels, scores, questions, 60), ratio_intervals(draws, columns, scores)
    monkeypatch.setattr(bootstrap, "BLOCK_NUMBERS", 20)
    monkeypatch.setattr("openrlhf.evaluation.metrics.BLOCK_NUMBERS", 100)
    assert (auroc_interval(labels, scores, questions, 60), ratio_intervals(draws, columns, scores)) == whole


def test_shared_draws_equal_own_draws_on_the_same_questions():
    generator = np.random.default_rng(0)
    questions = [f"q{k // 3}" for k in range(60)]
    labels = generator.integers(0, 2, 60)
    scores = {"one": generator.normal(size=60), "two": generator.normal(size=60)}
    draws = draw_questions(questions, 80, seed=4)
    found = auroc_intervals(labels, scores, questions, draws)
    assert found == {name: auroc_interval(labels, values, questions, 80, 4) for name, values in scores.items()}
    # rows of one question only: no bounds, though the draws hold twenty
    assert auroc_intervals([1, 0], {"x": [2.0, 1.0]}, ["q3", "q3"], draws) == {"x": (1.0, None, None)}


def test_percentiles_and_p_values():
    assert percentile_interval(0.5, np.array([np.nan, 0.2, np.nan, 0.4])) == pytest.approx((0.5, 0.205, 0.395))
    assert percentile_interval(0.5, np.array([0.2])) == (0.5, None, None)
    assert percentile_interval(None, np.array([0.2, 0.3])) == (None, None, None)
    assert two_sided_p(np.array([0.1, 0.2, -0.1, np.nan])) == 1.0  # 2 * (1 + 1) / 4
    assert two_sided_p(np.full(99, 0.3)) == pytest.approx(0.02)
    assert two_sided_p(np.array([np.nan, 1.0])) is None
