"""Vote policies."""

from __future__ import annotations

import itertools

import pytest

from openrlhf.evaluation import filtering, threshold_choice, voting
from openrlhf.evaluation.voting import majority_vote


def test_equal_answers_vote_together():
    vote = majority_vote(["0.25", r"\frac{1}{4}", "7", "25%"])
    assert (vote.answer, vote.votes, vote.tied, vote.fallback) == ("0.25", 3, 1, False)
    # an expression is one answer however it is written: needs more than equal text
    assert majority_vote(["x+1", "1+x", "x", "2"]).votes == 2


def test_missing_answers_do_not_vote():
    assert majority_vote([None, None, None, "4", ""]).answer == "4"
    vote = majority_vote([None, None])
    assert (vote.answer, vote.votes) == (None, 0)


def test_tie_goes_to_the_higher_mean_score():
    answers, scores = ["3", "3", "8", "8"], [0.9, 0.1, 0.6, 0.5]  # means 0.5 and 0.55
    vote = majority_vote(answers, scores=scores)
    assert (vote.answer, vote.votes, vote.tied) == ("8", 2, 2)
    # only kept completions count: without the 0.1 the vote is 1 to 2
    assert majority_vote(answers, keep=[True, False, True, True], scores=scores).answer == "8"
    # one kept each: 0.9 against 0.6
    assert majority_vote(answers, keep=[True, False, True, False], scores=scores).answer == "3"


def test_tie_without_scores_goes_to_the_text_that_sorts_first_in_any_order():
    winners = {majority_vote(order).answer for order in itertools.permutations(["9", "10", "x"])}
    assert winners == {"10"}  # text order: "10" < "9" < "x"


def test_original_tie_rule_favours_the_correct_answer():
    answers = ["3", "8"]
    assert majority_vote(answers, scores=[1.0, 0.0], tie_rule="original", expected="8.0").answer == "8"
    assert majority_vote(answers, tie_rule="original", expected="4").answer == "3"
    with pytest.raises(ValueError, match="expected answer"):
        majority_vote(answers, tie_rule="original")
    with pytest.raises(ValueError, match="tie_rule"):
        majority_vote(answers, tie_rule="coin")


def test_nothing_kept_falls_back_to_the_unfiltered_vote():
    vote = majority_vote(["3", "3", "8"], keep=[False, False, False])
    assert (vote.answer, vote.fallback) == ("3", True)
    # a kept completion without an answer is nothing kept
    assert majority_vote(["3", None], keep=[False, True]).fallback


def test_vote_checks_lengths():
    with pytest.raises(ValueError, match="keep, got 1 for 2"):
        majority_vote(["1", "2"], keep=[True])
    with pytest.raises(ValueError, match="scores, got 3 for 2"):
        majority_vote(["1", "2"], scores=[1, 2, 3])


def test_filter_functions_can_be_imported_from_voting_too():
    assert voting.filter_by_goal is filtering.filter_by_goal
    assert voting.threshold_at_equal_accuracy is threshold_choice.threshold_at_equal_accuracy
