"""AUROC, its intervals, prefix scores and pair accuracy against hand-computed numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from openrlhf.evaluation.metrics import (
    auroc,
    auroc_interval,
    pair_accuracy,
    paired_auroc_difference,
    prefix_index,
    prefix_scores,
)


def test_auroc_counts_won_pairs():
    # pairs (correct, wrong): .9>.6 .9>.1 .4<.6 .4>.1 -> 3 of 4
    assert auroc([1, 1, 0, 0], [0.9, 0.4, 0.6, 0.1]) == 0.75
    # .9>.5 .9>.1 .5=.5 (half) .5>.1 -> 3.5 of 4
    assert auroc([1, 0, 1, 0], [0.9, 0.5, 0.5, 0.1]) == 0.875
    assert auroc([True, False, True, False], [-7, -7, -7, -7]) == 0.5


def test_auroc_does_not_depend_on_row_order_or_on_a_rising_transform():
    rows = [(1, 0.9), (0, 0.5), (1, 0.5), (0, 0.1)]
    assert {auroc(*zip(*order, strict=True)) for order in itertools.permutations(rows)} == {0.875}
    labels, scores = zip(*rows, strict=True)
    assert auroc(labels, [math.exp(score) for score in scores]) == 0.875


def test_auroc_equals_scikit_learn_with_ties():
    generator = np.random.default_rng(0)
    labels, scores = generator.integers(0, 2, 500), generator.integers(0, 30, 500) / 7
    assert auroc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_one_class_is_undefined():
    assert auroc([1, 1, 1], [0.1, 0.2, 0.3]) is None
    assert auroc([], []) is None
    assert auroc_interval([0, 0], [0.1, 0.2], ["a", "b"]) == (None, None, None)
    assert paired_auroc_difference([1, 1], [1, 2], [2, 1], ["a", "b"]) == (None, None, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_score_that_is_not_finite_names_its_row(bad):
    with pytest.raises(ValueError, match="row 2"):
        auroc([1, 0, 1], [0.1, 0.2, bad])


def test_bad_labels_and_lengths_are_refused():
    with pytest.raises(ValueError, match="3 labels and 2 scores"):
        auroc([1, 0, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match="row 1: expected a label"):
        auroc([1, None], [0.1, 0.2])
    with pytest.raises(ValueError, match="1 groups and 2 rows"):
        auroc_interval([1, 0], [0.1, 0.2], ["a"])


def test_interval_draws_whole_questions():
    # Two questions: in each the correct row beats the wrong one and across questions too, so every draw gives 1.
    assert auroc_interval([1, 0, 1, 0], [0.9, 0.1, 0.8, 0.2], list("aabb")) == (1.0, 1.0, 1.0)
    # Question a: correct above wrong (1 of 1). Question b: wrong above correct, and b's correct row is lowest.
    # Draws: aa -> 1, bb -> 0, ab -> pairs a-a 1, a-b 1, b-a 0, b-b 0 = 0.5. Each side has probability 1/4.
    value, low, high = auroc_interval([1, 0, 1, 0], [4, 2, 1, 3], list("aabb"), n=400)
    assert (value, low, high) == (0.5, 0.0, 1.0)


def test_interval_of_one_question_has_no_bounds():
    assert auroc_interval([1, 0], [0.9, 0.1], ["a", "a"]) == (1.0, None, None)


def test_interval_covers_the_truth_and_is_reproducible():
    # Scores N(1,1) against N(0,1): AUROC = Phi(1/sqrt(2)) = 0.7602.
    covered = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        labels = generator.integers(0, 2, 200)
        scores = generator.normal(size=200) + labels
        interval = auroc_interval(labels, scores, range(200), n=200, seed=1)
        assert interval == auroc_interval(labels, scores, range(200), n=200, seed=1)
        covered += interval.low <= 0.7602 <= interval.high
    assert covered >= 33  # 38 expected; below 33 has probability under 1%


def test_copying_every_completion_does_not_narrow_the_interval():
    # Ten copies of each row inside its question carry no information: an interval over rows would shrink.
    generator = np.random.default_rng(3)
    labels, scores = generator.integers(0, 2, 60), generator.normal(size=60)
    single = auroc_interval(labels, scores, range(60), seed=5)
    copied = auroc_interval(np.repeat(labels, 10), np.repeat(scores, 10), np.repeat(np.arange(60), 10), seed=5)
    assert copied == pytest.approx(single, abs=1e-12)


def test_paired_difference_of_equal_and_of_opposite_scores():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 80)
    noise = generator.normal(size=80)
    same = paired_auroc_difference(labels, noise, noise, range(80))
    assert same == (0.0, 0.0, 0.0, 1.0)
    better = paired_auroc_difference(labels, labels + 0.1 * noise, noise, range(80))
    assert better.difference == pytest.approx(auroc(labels, labels + 0.1 * noise) - auroc(labels, noise))
    assert better.low > 0
    assert better.p_value == pytest.approx(2 / 1001)  # no draw at or below 0


@pytest.mark.parametrize(
    ("length", "percent", "index"),
    # ceil(p/100 * n) - 1: 0.25*8 = 2 -> 1; 0.25*9 = 2.25 -> 2; never below 0
    [(8, 25, 1), (9, 25, 2), (1, 25, 0), (3, 100, 2), (5, 50, 2), (1000, 0.1, 0), (7, 100 / 7 * 3, 2)],
)
def test_prefix_index(length, percent, index):
    assert prefix_index(length, percent) == index


def test_prefix_scores_read_the_named_list():
    rows = [{"num_actions": 4, "partial_rewards": [1, 2, 3, 4]}, {"num_actions": 1, "partial_rewards": [9]}]
    assert prefix_scores(rows, "partial_rewards", 50) == [2.0, 9.0]
    assert prefix_scores(rows, "partial_rewards", 100) == [4.0, 9.0]
    with pytest.raises(ValueError, match="row 0: expected keys 'cosine_sim'"):
        prefix_scores(rows, "cosine_sim", 50)
    with pytest.raises(ValueError, match="row 0: expected 3 values"):
        prefix_scores([{"num_actions": 3, "partial_rewards": [1]}], "partial_rewards", 50)
    for percent in (0, 101):
        with pytest.raises(ValueError, match=r"\(0, 100\]"):
            prefix_index(5, percent)


def test_a_tie_is_not_a_win():
    accuracy, ties = pair_accuracy([1, 2, 0], [0, 2, 1])
    assert accuracy == pytest.approx(1 / 3)
    assert ties == 1
    assert pair_accuracy([], []) == (None, 0)
    with pytest.raises(ValueError, match="row 1"):
        pair_accuracy([1, math.nan], [0, 0])
