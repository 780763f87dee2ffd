"""Comparison of models on the completions that both have scored."""

from __future__ import annotations

import pytest

from openrlhf.evaluation.metrics import paired_auroc_difference
from openrlhf.evaluation.paired import compare_all, compare_models, compare_scores, match_completions, mcnemar_p


def rows(rewards, goals=None, labels=None, samples=None):
    return [
        {
            "question": f"q{k // 2}",
            "generated_solution": f"s{k}",
            "sample": samples[k] if samples else k % 2,
            "is_correct": labels[k] if labels else k % 2 == 0,
            "reward": reward,
            "partial_rewards": None if reward is None else [0.0, reward],
            "cosine_sim": None if goals is None else [0.0, goals[k]],
            "num_actions": 2,
        }
        for k, reward in enumerate(rewards)
    ]


def test_models_are_compared_row_by_row_in_any_order():
    first, second = rows([3.0, 1.0, 2.0, 0.0]), rows([1.0, 3.0, 2.0, 0.0])
    (found,) = compare_models(first, second[::-1], bootstrap=50)
    wanted = paired_auroc_difference([1, 0, 1, 0], [3, 1, 2, 0], [1, 3, 2, 0], ["q0", "q0", "q1", "q1"], 50)
    assert (found["difference"], found["low"], found["high"], found["p_value"]) == wanted
    assert (found["score"], found["rows"], found["unmatched"], found["left_out"]) == ("reward", 4, 0, 0)
    assert found["difference"] == 1.0 - 0.5  # all four pairs against 2>0, 1>0 of four


def test_unmatched_rows_and_contradicting_labels_are_counted():
    first = rows([3.0, 1.0, 2.0, 0.0, 5.0, None])
    second = rows([1.0, 3.0, 2.0, 0.0], labels=[True, True, None, False])
    (found,) = compare_models(first, second, bootstrap=20)
    # rows 4 and 5 have no partner; row 1 is wrong here and right there; row 2 takes the label that exists
    assert (found["rows"], found["unmatched"], found["left_out"]) == (3, 2, 1)


def test_copies_of_a_completion_are_matched_in_order():
    first = rows([1.0, 2.0]) + rows([3.0])
    second = rows([10.0, 20.0]) + rows([30.0])
    pairs, unmatched = match_completions(first, second)
    assert [(a["reward"], b["reward"]) for a, b in pairs] == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    assert unmatched == 0
    assert match_completions(first, second[:2])[1] == 1


def test_goal_similarity_is_compared_where_both_have_it():
    with_goal, without = rows([3.0, 1.0, 2.0, 0.0], goals=[0.1, 0.2, 0.3, 0.4]), rows([0.0, 1.0, 2.0, 3.0])
    assert [one["score"] for one in compare_models(with_goal, with_goal, 20)] == ["reward", "goal_similarity"]
    assert [one["score"] for one in compare_models(with_goal, without, 20)] == ["reward"]
    within = compare_scores(with_goal, 20)
    # goal: .1>? of pairs (.1,.2) (.1,.4) (.3,.2) (.3,.4): one won = 0.25; reward: 3>1 3>0 2>1 2>0 = 1
    assert within["difference"] == -0.75
    assert compare_scores(without, 20) is None


def test_every_pair_of_three_models_is_compared_on_common_sets():
    one = rows([3.0, 1.0, 2.0, 0.0])
    scored = {"a": {"x": one, "y": one}, "b": {"x": one}, "c": {"x": one, "z": one}}
    found = compare_all(scored, 20)
    assert [(r["a"], r["b"], r["set"]) for r in found] == [("a", "b", "x"), ("a", "c", "x"), ("b", "c", "x")]
    assert all(r["difference"] == 0.0 and r["p_value"] == 1.0 for r in found)


def test_nothing_in_common_is_undefined_not_an_error():
    (found,) = compare_models(rows([1.0, 2.0]), [one | {"question": "other"} for one in rows([1.0, 2.0])])
    assert (found["rows"], found["difference"], found["p_value"], found["unmatched"]) == (0, None, None, 4)


def test_mcnemar_by_hand():
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 0) == pytest.approx(2 / 32)
    assert mcnemar_p(1, 3) == pytest.approx(2 * (1 + 4) / 16)
    assert mcnemar_p(3, 3) == 1.0
    with pytest.raises(ValueError, match="0 or more"):
        mcnemar_p(-1, 2)
