"""The goal filter, its token count, the trade-off curve and the choice of a threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from openrlhf.evaluation.ballots import make_ballots
from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.filtering import filter_by_goal, filter_tradeoff, tradeoff_points, vote_with_filter
from openrlhf.evaluation.threshold_choice import split_questions, threshold_at_equal_accuracy


def row(question, answer, expected="5", cosine_sim=(0.5, 0.5), reward=0.0):
    return {
        "question": question,
        "predicted_answer": answer,
        "expected_answer": expected,
        "cosine_sim": list(cosine_sim),
        "num_actions": len(cosine_sim),
        "reward": reward,
    }


def test_filter_stops_at_the_first_token_below():
    similarities = [0.1, 0.8, 0.3, 0.2, 0.9]
    assert filter_by_goal(similarities, 0.25) == (False, 1)  # token 0 is 0.1
    assert filter_by_goal(similarities, 0.25, warmup_tokens=1) == (False, 4)  # token 3 is 0.2
    assert filter_by_goal(similarities, 0.3, warmup_tokens=1) == (False, 4)  # 0.3 is not below 0.3
    assert filter_by_goal(similarities, 0.25, warmup_tokens=4) == (True, 5)
    assert filter_by_goal(similarities, 0.25, warmup_tokens=9) == (True, 5)
    assert filter_by_goal(similarities, None) == (True, 5)


def test_filter_equals_a_slow_loop():
    generator = np.random.default_rng(0)
    for _ in range(200):
        values = generator.integers(-4, 5, generator.integers(1, 9)) / 4
        threshold, warmup = float(generator.integers(-4, 5) / 4), int(generator.integers(0, 10))
        wanted = (True, len(values))
        for t in range(warmup, len(values)):
            if values[t] < threshold:
                wanted = (False, t + 1)
                break
        assert filter_by_goal(values.tolist(), threshold, warmup) == wanted


@pytest.mark.parametrize(("threshold", "warmup"), [(math.nan, 0), (1.5, 0), (0.1, -1)])
def test_filter_refuses_impossible_settings(threshold, warmup):
    with pytest.raises(ValueError):
        filter_by_goal([0.1], threshold, warmup)


def test_filter_refuses_no_tokens_and_nan():
    with pytest.raises(ValueError, match="at least one"):
        filter_by_goal([], 0.1)
    with pytest.raises(ValueError, match="finite"):
        filter_by_goal([math.nan], 0.1)


def test_filtered_vote_counts_accuracy_tokens_and_fallbacks():
    low, high = (0.9, 0.1, 0.9, 0.9), (0.9, 0.9)
    rows = [
        # question a: unfiltered 4 wins 2 to 1 (wrong); the two wrong ones stop at token 1, 2 of 4 tokens used each
        row("a", "4", cosine_sim=low),
        row("a", "4", cosine_sim=low),
        row("a", "5", cosine_sim=high),
        # question b: everything is dropped -> fallback, vote 5 is right, all 8 tokens are needed
        row("b", "5", cosine_sim=low),
        row("b", "5", cosine_sim=low),
        # question c: nobody answers
        row("c", None, cosine_sim=high),
    ]
    report = vote_with_filter(rows, 0.5)
    assert report.unfiltered_accuracy == pytest.approx(1 / 3)  # b
    assert report.accuracy == pytest.approx(2 / 3)  # a, b
    assert (report.questions, report.completions, report.fallbacks, report.unanswered) == (3, 6, 1, 1)
    # tokens: a 4+4+2, b 4+4, c 2 = 20; used: a 2+2+2, b 8, c 2 = 16
    assert report.tokens_saved == pytest.approx(1 - 16 / 20)
    assert report.dropped == pytest.approx(4 / 6)
    unfiltered = vote_with_filter(rows, None)
    assert (unfiltered.accuracy, unfiltered.tokens_saved, unfiltered.dropped) == (pytest.approx(1 / 3), 0.0, 0.0)


def test_tie_scores_come_from_goal_similarity_then_reward():
    tied = [row("a", "4", cosine_sim=(0.9, 0.2), reward=9.0), row("a", "5", cosine_sim=(0.1, 0.3), reward=1.0)]
    assert vote_with_filter(tied, None).accuracy == 1.0  # last similarity 0.3 > 0.2
    assert vote_with_filter([{**one, "cosine_sim": None} for one in tied], None).accuracy == 0.0  # reward 9 > 1


def test_label_is_used_where_no_expected_answer_is():
    labelled = [{**row("a", "4", expected=None), "is_correct": True}]
    assert vote_with_filter(labelled, None).accuracy == 1.0
    with pytest.raises(ValueError, match="row 0: expected 'expected_answer' or 'is_correct'"):
        vote_with_filter([row("a", "4", expected=None)], None)


def test_vote_refuses_rows_that_cannot_be_filtered():
    with pytest.raises(ValueError, match="row 0: .*cosine_sim"):
        vote_with_filter([{**row("a", "4"), "cosine_sim": None}], 0.1)
    with pytest.raises(ValueError, match="got none"):
        vote_with_filter([], None)


def test_threshold_is_chosen_on_validation_and_reported_on_test():
    def question(name, wrong_low, right_low):
        # one wrong answer of 10 tokens that dips to wrong_low at token 0, two right ones that dip at token 8
        return [row(name, "4", cosine_sim=[wrong_low] + [0.9] * 9)] + [
            row(name, "5", cosine_sim=[0.9] * 8 + [right_low, 0.9]) for _ in range(2)
        ]

    validation = question("v1", 0.1, 0.6) + question("v2", 0.2, 0.7)
    test = question("t1", 0.15, 0.05) + question("t2", 0.3, 0.8)
    chosen = threshold_at_equal_accuracy(validation, test)
    # Validation: above 0.6 the right ones of v1 drop too -> fallback, no saving there. Just above 0.2 both wrong ones
    # stop after one token: 18 of 60 saved. That is the best.
    assert chosen.threshold == pytest.approx(0.2)
    assert chosen.validation.tokens_saved == pytest.approx(18 / 60)
    # Test at 0.2: t1 loses everything (fallback), t2 keeps everything.
    assert (chosen.test.fallbacks, chosen.test.tokens_saved) == (1, 0.0)


def test_tradeoff_starts_unfiltered_and_each_threshold_drops_more():
    rows = [row(f"q{k % 2}", "5", cosine_sim=(0.9, low, 0.9)) for k, low in enumerate((0.1, 0.2, 0.3, 0.4))]
    reports = filter_tradeoff(rows)
    assert [report.threshold for report in reports] == [None, *[pytest.approx(low) for low in (0.1, 0.2, 0.3, 0.4)]]
    assert [report.dropped for report in reports] == [0, 0.25, 0.5, 0.75, 1.0]
    # q0 has 0.1 and 0.3, q1 has 0.2 and 0.4; one of 12 tokens saved for each dropped one, none for a lost question
    assert [report.tokens_saved for report in reports] == pytest.approx([0, 1 / 12, 2 / 12, 1 / 12, 0])
    assert [report.fallbacks for report in reports] == [0, 0, 0, 1, 2]


def test_threshold_never_costs_validation_accuracy():
    # The right answers dip lowest: any filter turns the vote wrong.
    rows = [
        row("v", "5", cosine_sim=(0.1, 0.9)),
        row("v", "5", cosine_sim=(0.1, 0.9)),
        row("v", "4", cosine_sim=(0.5, 0.9)),
    ]
    chosen = threshold_at_equal_accuracy(rows, [{**one, "question": "t"} for one in rows])
    assert chosen.threshold is None
    assert chosen.validation.tokens_saved == 0.0


def test_shared_question_is_refused():
    with pytest.raises(ValueError, match="1 questions are in both"):
        threshold_at_equal_accuracy([row("a", "4")], [row("a", "5")])


def test_split_is_by_question_and_stable():
    rows = [row(f"q{number % 50}", "5") for number in range(200)]
    first, second = split_questions(rows, 0.5, seed=1)
    assert len(first) + len(second) == 200
    assert not {one["question"] for one in first} & {one["question"] for one in second}
    assert split_questions(rows[::-1], 0.5, seed=1)[0] == first[::-1]
    assert split_questions(rows, 1.0)[1] == []


def test_rows_as_float32_arrays_give_the_same_report():
    generator = np.random.default_rng(0)
    lists = [row(f"q{k % 9}", str(k % 3 + 4), cosine_sim=generator.normal(0, 0.4, 7).round(3)) for k in range(45)]
    arrays = [one | {"cosine_sim": np.array(one["cosine_sim"], np.float32)} for one in lists]
    threshold = float(lists[3]["cosine_sim"][2])  # as typed: in float32 it is the value itself, not below it
    assert vote_with_filter(lists, threshold) == vote_with_filter(arrays, threshold)
    assert filter_tradeoff(lists) == filter_tradeoff(arrays)
    assert filter_by_goal([0.7, 0.7], 0.7) == filter_by_goal(np.array([0.7, 0.7], np.float32), 0.7) == (True, 2)


def test_tradeoff_points_tell_right_from_wrong_completions():
    rows = [
        row("a", "5", cosine_sim=(0.5, 0.1)),  # right, dropped above 0.1
        row("a", "5", cosine_sim=(0.5, 0.4)),  # right
        row("b", "4", cosine_sim=(0.5, 0.2)),  # wrong, dropped above 0.2
    ]
    points = tradeoff_points(make_ballots(rows), draw_questions(["a", "b"], 50))
    assert [point["correct_kept"] for point in points] == [1.0, 0.5, 0.5, 0.0]
    assert [point["wrong_dropped"] for point in points] == [0.0, 0.0, 1.0, 1.0]
    assert [point["fallbacks"] for point in points] == [0, 0, 1, 2]
    assert points[0]["threshold"] is None and points[0]["accuracy"][0] == 0.5
    only_right = tradeoff_points(make_ballots(rows[:2]), draw_questions(["a"], 50))
    assert only_right[1]["wrong_dropped"] is None  # there is no wrong completion
    assert only_right[1]["accuracy"] == [1.0, None, None]  # one question: no interval


def test_paired_test_counts_questions_gained_and_lost():
    def question(name, wrong_dips, votes_wrong):
        # the wrong answers stop at token 0 when they dip; the right one never does
        wrong = [row(name, "4", cosine_sim=[0.1 if wrong_dips else 0.9] + [0.9] * 9) for _ in range(votes_wrong)]
        return [*wrong, row(name, "5", cosine_sim=[0.8] * 10)]

    validation = question("v", True, 1)
    # t0..t5: two wrong votes against one right one, filtered away; t6: nothing dips, stays wrong
    test = [one for k in range(6) for one in question(f"t{k}", True, 2)] + question("t6", False, 2)
    found = threshold_at_equal_accuracy(validation, test, bootstrap=200)
    assert (found.better, found.worse) == (6, 0)
    assert found.p_value == pytest.approx(2 / 2**6)
    assert found.accuracy_difference.value == pytest.approx(6 / 7)
    assert 0 < found.accuracy_difference.low <= 6 / 7 <= found.accuracy_difference.high <= 1
    # 12 wrong completions stop after 1 of 10 tokens, of 21 completions
    assert found.saving.value == pytest.approx(12 * 9 / 210)
    assert found.saving.value == found.test.tokens_saved
