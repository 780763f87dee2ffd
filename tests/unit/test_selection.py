"""Best-of-n, any correct and votes with n of the completions."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf.evaluation.ballots import count_votes, make_ballots
from openrlhf.evaluation.selection import (
    accuracy_at_share,
    any_correct,
    best_of_n,
    selection_accuracies,
    sigmoid,
    subset_sizes,
    vote_by_count,
)


def row(question, answer, reward=0.0, goal=0.0, **more):
    return {
        "question": question,
        "predicted_answer": answer,
        "expected_answer": "5",
        "reward": reward,
        "cosine_sim": [goal],
        "num_actions": 1,
    } | more


def accuracy(rows, name, **options):
    return selection_accuracies(make_ballots(rows), [name], **options)[name][:, -1].mean()


def test_best_of_n_shares_a_tie():
    labels, scores = np.array([True, False, False]), np.array([2.0, 2.0, 1.0])
    assert best_of_n(labels, scores, 3) == 0.5  # two best, one right
    # pairs: {0,1} tie 0.5, {0,2} right 1, {1,2} wrong 0
    assert best_of_n(labels, scores, 2) == pytest.approx(0.5)
    assert best_of_n(labels, scores, 1) == pytest.approx(1 / 3)


def test_fewer_completions_are_the_mean_of_the_counts_around_the_share():
    # Four completions, three right: one is right with 3/4; of the 6 pairs, 3 are 5-5 and 3 are 5-4 ties, which the text
    # gives to "4"; of the 4 triples, one is 5-5-5 and three are 5-5-4; all four: right.
    (by_count,) = vote_by_count(make_ballots([row("a", "5"), row("a", "5"), row("a", "5"), row("a", "4")]))
    assert by_count == pytest.approx([3 / 4, 1 / 2, 1, 1])
    assert accuracy_at_share([by_count], 1.0) == pytest.approx([1])
    assert accuracy_at_share([by_count], 0.5) == pytest.approx([1 / 2])
    assert accuracy_at_share([by_count], 0.4) == pytest.approx([0.4 * 3 / 4 + 0.6 * 1 / 2])  # 1.6 completions
    assert accuracy_at_share([by_count], 0.1) == pytest.approx([3 / 4])  # at least one


def test_any_correct_counts_subsets():
    assert any_correct(1, 4, 2) == pytest.approx(3 / 6)  # 3 of the 6 pairs hold the right one
    assert any_correct(2, 4, 3) == 1.0
    assert any_correct(0, 4, 4) == 0.0


def test_missing_answers_never_vote_but_may_be_the_best():
    rows = [row("a", None, reward=9.0), row("a", "5", reward=1.0), row("a", None, reward=2.0)]
    assert accuracy(rows, "majority vote") == accuracy(rows, "weighted vote, reward") == 1.0
    assert accuracy(rows, "best of n, reward") == 0.0
    assert accuracy([row("a", None), row("a", None)], "majority vote") == 0.0


def test_a_confident_minority_wins_the_weighted_vote():
    rows = [row("a", "5", reward=4.0, goal=0.9), row("a", "4", reward=-4.0, goal=-0.9)]
    rows += [row("a", "4", reward=-4.0, goal=-0.9)]
    assert accuracy(rows, "majority vote") == 0.0
    assert accuracy(rows, "weighted vote, reward") == 1.0  # 0.98 against 2 * 0.018
    assert accuracy(rows, "weighted vote, goal similarity") == 1.0  # 0.95 against 2 * 0.05


def test_equal_weights_are_a_tie_in_any_order_of_the_rows():
    # 0.1 + 0.2 + 0.3 differs in the last bit from 0.3 + 0.2 + 0.1: still a tie, which the text decides ("4" < "5")
    weights = np.array([0.1, 0.2, 0.3, 0.3, 0.2, 0.1])
    groups = np.array([0, 0, 0, 1, 1, 1])
    found = count_votes(groups, 2, np.ones((1, 6), bool), weights=weights)
    assert (found.winner[0], found.tied[0]) == (0, 2)
    # very small weights are compared among themselves
    assert count_votes(groups, 2, np.ones((1, 6), bool), weights=groups * 1e-20 + 1e-20).winner[0] == 1


def test_original_tie_rule_favours_the_right_answer():
    rows = [row("a", "4", reward=2.0, goal=0.9), row("a", "5", reward=1.0)]
    assert accuracy(rows, "majority vote") == 0.0
    assert accuracy(rows, "majority vote", tie_rule="original") == 1.0


def test_few_completions_take_part_with_all_they_have():
    rows = [row("a", "5"), *[row("b", "5" if k == 0 else "4") for k in range(5)]]
    ballots = make_ballots(rows)
    assert subset_sizes(ballots) == [1, 2, 4, 5]
    found = selection_accuracies(ballots, ["any correct"])["any correct"]
    assert found[0].tolist() == [1.0] * 4
    assert found[1].tolist() == pytest.approx([1 / 5, 2 / 5, 4 / 5, 1.0])


def test_labels_of_completions_come_before_their_answers():
    rows = [row("a", "5", is_correct=False), row("a", "4", is_correct=None)]
    assert make_ballots(rows)[0].labels.tolist() == [False, False]
    assert accuracy(rows, "mean of samples") == 0.0
    assert accuracy([row("a", None, is_correct=True), row("a", "4")], "mean of samples") == 0.5


def test_a_missing_score_is_an_error_that_names_the_figure():
    with pytest.raises(ValueError, match="best of n, goal similarity: a completion of 'a' lacks"):
        accuracy([row("a", "5", cosine_sim=None), row("a", "4")], "best of n, goal similarity")


def test_drawn_subsets_are_reproducible():
    generator = np.random.default_rng(0)
    rows = [row("a", str(generator.integers(3, 7)), reward=float(generator.normal())) for _ in range(30)]
    ballots = make_ballots(rows)
    first, again = (selection_accuracies(ballots, seed=3)["majority vote"] for _ in range(2))
    assert first.tolist() == again.tolist()


def test_sigmoid_of_extreme_rewards():
    assert sigmoid(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0.0, 0.5, 1.0]
    assert sigmoid(np.array([-40.0]))[0] == pytest.approx(4.248354255291589e-18, rel=1e-12)
