"""Reliability bins, calibration error, Brier score and the centring shift."""

from __future__ import annotations

import math

import numpy as np
import pytest

from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.calibration import calibration, centring_shift, wilson_interval


def logit(p):
    return math.log(p / (1 - p))


def test_bins_errors_and_brier_by_hand():
    # predictions 0.25 (right 0 of 1), 0.75, 0.75 (right 1 of 2)
    rewards, labels, questions = [logit(0.25), logit(0.75), logit(0.75)], [False, True, False], ["a", "b", "b"]
    found = calibration(labels, rewards, questions, draw_questions(questions, 50))
    assert [(one["low"], one["high"], one["count"]) for one in found["bins"]] == [(0.2, 0.3, 1), (0.7, 0.8, 2)]
    assert [one["correct"] for one in found["bins"]] == [0.0, 0.5]
    assert [one["predicted"] for one in found["bins"]] == pytest.approx([0.25, 0.75])
    assert found["ece"][0] == pytest.approx((0.25 + 2 * 0.25) / 3)
    assert found["brier"][0] == pytest.approx((0.0625 + 0.0625 + 0.5625) / 3)


def test_a_shift_of_all_rewards_changes_the_raw_figures_only():
    generator = np.random.default_rng(0)
    labels, questions = generator.integers(0, 2, 60).astype(bool), list(range(60))
    rewards = generator.normal(size=60) + labels
    draws = draw_questions(questions, 50)
    one, other = calibration(labels, rewards, questions, draws), calibration(labels, rewards + 3, questions, draws)
    assert abs(one["ece"][0] - other["ece"][0]) > 0.1
    assert other["centred"]["shift"] == pytest.approx(one["centred"]["shift"] + 3)
    assert other["centred"]["brier"] == pytest.approx(one["centred"]["brier"])
    mean = np.mean([one["predicted"] * one["count"] for one in other["centred"]["bins"]]) * len(
        other["centred"]["bins"]
    )
    assert mean / 60 == pytest.approx(labels.mean())


def test_one_class_has_no_shift_and_no_rows_no_figures():
    found = calibration([True, True], [1.0, 2.0], ["a", "b"], draw_questions(["a", "b"], 20))
    assert found["centred"] is None and found["brier"][0] is not None
    assert calibration([], [], [], draw_questions([])) is None
    assert centring_shift(np.array([False]), np.array([0.3])) is None


def test_extreme_rewards_stay_in_the_outer_bins():
    found = calibration([False, True], [-1e6, 1e6], ["a", "b"], draw_questions(["a", "b"], 20))
    assert [(one["low"], one["predicted"]) for one in found["bins"]] == [(0.0, 0.0), (0.9, 1.0)]
    assert found["ece"][0] == 0.0


def test_wilson_interval():
    # 8 of 10, as in published tables: 0.4902 to 0.9433
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 5)[0] == 0.0 and wilson_interval(5, 5)[1] == 1.0
