"""RewardBench scores by hand; build_scripts/check_rewardbench.sh compares them with the package."""

from __future__ import annotations

import math

import numpy as np
import pytest

from openrlhf.evaluation.rewardbench import (
    SECTIONS,
    SUBSETS_2,
    TiesItem,
    best_of_credit,
    is_rewardbench_1,
    is_ties,
    parse_ties_id,
    rewardbench_1_scores,
    rewardbench_2_scores,
    ties_score,
)


def test_sections_are_weighted_by_prompts_and_math_counts_like_code():
    accuracy = {name: 0.0 for section in SECTIONS.values() for name in section}
    accuracy |= {"math-prm": 1.0, "mt-bench-easy": 1.0, "alpacaeval-hard": 0.5}
    scores = rewardbench_1_scores(accuracy)
    assert scores["sections"] == {
        "Chat": pytest.approx((28 + 0.5 * 95) / 358, abs=1e-15),  # 100 + 95 + 95 + 28 + 40 = 358
        "Chat Hard": 0.0,
        "Safety": 0.0,
        "Reasoning": 0.5,  # 984 = 6 * 164
    }
    assert scores["overall"] == pytest.approx((75.5 / 358 + 0.5) / 4, abs=1e-15)
    assert scores["missing"] == {}


def test_missing_subsets_are_named_and_an_empty_section_is_undefined():
    scores = rewardbench_1_scores({"math-prm": 0.5, "hep-cpp": 1.0, "unknown": 1.0})
    assert scores["sections"]["Reasoning"] == pytest.approx((984 * 0.5 + 164) / 1148, abs=1e-15)
    assert scores["sections"]["Chat"] is None and scores["overall"] is None
    assert scores["missing"]["Reasoning"] == ["hep-go", "hep-java", "hep-js", "hep-python", "hep-rust"]
    assert scores["missing"]["Chat"] == list(SECTIONS["Chat"])


def test_sets_are_told_by_their_subsets():
    assert is_rewardbench_1([None, "other", "donotanswer"])
    assert not is_rewardbench_1(["Natural", "Math", None])
    assert is_ties("Ties") and is_ties("ties") and not is_ties(None) and not is_ties("Math")


@pytest.mark.parametrize(
    ("rewards", "credit"),
    [
        ([3, 1, 2, 0], 1),
        ([1, 3, 2, 0], 0),
        ([3, 3, 1, 3], 1 / 3),
        ([2, 2, 2, 2], 1 / 4),
        ([1, 2, 2, 0], 0),  # the others tie above it
        ([-0.5, -1, -1, -1], 1),
    ],
)
def test_best_of_four_shares_the_credit_among_those_that_tie(rewards, credit):
    assert best_of_credit(rewards) == credit


def test_credit_with_two_correct_answers_is_their_share_at_the_top():
    assert best_of_credit([3, 3, 3, 1], 2) == 2 / 3
    assert best_of_credit([1, 3, 2, 0], 2) == 1


def test_ties_score_by_hand():
    items = [
        # ref 0: gap 1, accurate. tied 0: spread 0.5, gap 1, accurate; close = 1 > 0.5; tanh(1 / 0.5 - 1) = tanh(1)
        TiesItem("ref", 0, [1.0, 0.0], 1),
        TiesItem("tied", 0, [2.0, 1.5, 0.5], 2),
        # ref 1: gap 0.25. tied 1: spread 0.5, gap 1: close = 0.25, not above the spread; tanh(0.5 - 1)
        TiesItem("ref", 1, [0.25, 0.0, -1.0], 1),
        TiesItem("tied", 1, [2.0, 1.5, 0.5], 2),
        # ref 2: a tie is not accurate. tied 2: gap -1, spread 0: equal rewards give no last term
        TiesItem("ref", 2, [1.0, 1.0], 1),
        TiesItem("tied", 2, [1.0, 1.0, 2.0], 2),
        TiesItem("tied", 3, [1.0, 2.0, 0.0], 2),  # no ref: counts in the accuracy of tied alone
    ]
    found = ties_score(reversed(items))
    assert found["ref_accuracy"] == 2 / 3 and found["tied_accuracy"] == 3 / 4
    assert (found["ref"], found["tied"], found["both"]) == (3, 4, 3)
    expected = 0.3 * 3 / 4 + 0.3 * 2 / 3 + 0.2 * 2 / 3 + 0.2 * 1 / 3 + 0.01 * (math.tanh(1) + math.tanh(-0.5)) / 2
    assert found["score"] == pytest.approx(expected, abs=1e-15)


def test_ties_score_equals_a_loop_over_pairs_of_answers():
    generator = np.random.default_rng(0)
    for _ in range(30):
        items = [
            TiesItem(kind, number, generator.integers(0, 6, correct + 4).tolist(), correct)
            for number in range(8)
            for kind, correct in (("ref", 1), ("tied", int(generator.integers(2, 5))))
        ]
        by_id = {
            (one.kind, one.number): (one.rewards[: one.num_correct], one.rewards[one.num_correct :]) for one in items
        }
        terms = []
        for number in range(8):
            right, wrong = by_id["tied", number]
            ref_right, ref_wrong = by_id["ref", number]
            gaps = [[a - b for a in x for b in y] for x, y in ((right, wrong), (ref_right, ref_wrong))]
            differences = [a - b for a in right for b in right]
            total = 0.3 * all(gap > 0 for gap in gaps[0]) + 0.3 * all(gap > 0 for gap in gaps[1])
            total += 0.2 * all(gap > difference for gap in gaps[0] for difference in differences)
            total += 0.2 * all(gap > difference for gap in gaps[0] + gaps[1] for difference in differences)
            bonus = None if max(differences) == 0 else math.tanh(min(gaps[0] + gaps[1]) / max(differences) - 1)
            terms.append((total, bonus))
        bonuses = [bonus for _, bonus in terms if bonus is not None]
        expected = sum(total for total, _ in terms) / 8 + (0.01 * sum(bonuses) / len(bonuses) if bonuses else 0)
        assert ties_score(items)["score"] == pytest.approx(expected, abs=1e-12)


def test_ties_score_is_undefined_without_a_complete_number():
    assert ties_score([])["score"] is None
    only_ref = ties_score([TiesItem("ref", 0, [1.0, 0.0], 1)])
    assert only_ref["score"] is None and only_ref["ref_accuracy"] == 1 and only_ref["tied_accuracy"] is None
    single = [TiesItem("ref", 0, [1.0, 0.0], 1), TiesItem("tied", 0, [1.0, 0.0], 1)]  # one correct answer: no spread
    assert ties_score(single)["score"] is None


def test_ties_ids():
    assert parse_ties_id("ref:12") == ("ref", 12) and parse_ties_id("tied:0") == ("tied", 0)
    for text in ("12", "ref:", "other:1", "tied:1:2", None):
        with pytest.raises(ValueError, match="expected ref:N or tied:N"):
            parse_ties_id(text)
    with pytest.raises(ValueError, match="ref:3 occurs twice"):
        ties_score([TiesItem("ref", 3, [1.0, 0.0], 1)] * 2)


def test_overall_score_of_the_second_benchmark_is_the_plain_mean_of_six():
    scores = dict(zip(SUBSETS_2, (0.1, 0.2, 0.3, 0.4, 0.5, 0.9), strict=True))
    assert rewardbench_2_scores(scores)["overall"] == pytest.approx(0.4, abs=1e-15)
    part = rewardbench_2_scores({"math": 0.5, "Ties": None, "Other": 1.0})
    assert part["overall"] is None and part["sections"]["Math"] == 0.5
    assert part["missing"] == ["Factuality", "Precise IF", "Safety", "Focus", "Ties"]
