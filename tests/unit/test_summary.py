"""Figures of a scored set and the table that shows them."""

from __future__ import annotations

import json

import pytest

from openrlhf.evaluation.plots import plot_quickstart
from openrlhf.evaluation.summary import format_table, summarise_rows


def row(question, sample, correct, rewards, similarities=None, answer="5", **more):
    return {
        "question": question,
        "sample": sample,
        "is_correct": correct,
        "expected_answer": "5",
        "predicted_answer": answer if correct else "4",
        "reward": rewards[-1],
        "partial_rewards": rewards,
        "cosine_sim": similarities,
        "num_actions": len(rewards),
        "truncated": False,
    } | more


def rows_with_goal():
    return [
        row("a", 0, True, [0.0, 2.0], [0.1, 0.9]),
        row("a", 1, False, [1.0, 1.0], [0.9, 0.2]),
        row("b", 0, True, [0.0, 0.5], [0.1, 0.8]),
        row("b", 1, False, [1.0, 1.5], [0.9, 0.1]),
    ]


def test_figures_of_a_set():
    summary = summarise_rows(rows_with_goal(), threshold=0.0, bootstrap=50)
    assert (summary["rows"], summary["questions"], summary["correct"]) == (4, 2, 0.5)
    # last rewards: correct 2.0, 0.5; wrong 1.0, 1.5: 2 of 4 pairs won. Last similarities separate fully.
    assert summary["auroc"]["reward"][0] == 0.5
    assert summary["auroc"]["goal_similarity"] == [1.0, 1.0, 1.0]
    # means: correct 0.5, 0.45; wrong 0.55, 0.5: one tie of 0.5 with 0.5 -> 0.5 of 4 pairs
    assert summary["auroc"]["goal_similarity_mean"][0] == pytest.approx(0.125)
    # first token: correct 0, wrong 1 -> 0; goal: correct 0.1, wrong 0.9 -> 0
    assert summary["prefix_auroc"]["reward"] == {"25": 0.0, "50": 0.0, "75": 0.5, "100": 0.5}
    assert summary["prefix_auroc"]["goal_similarity"]["50"] == 0.0
    # one vote each: the tie goes to the higher last similarity, which is the correct one in both
    assert summary["vote"]["accuracy"] == 1.0
    assert summary["filtered_vote"]["tokens_saved"] == 0.0
    json.dumps(summary, allow_nan=False)


def test_one_class_is_reported_as_undefined_beside_other_sets():
    right = [row(f"q{k}", 0, True, [1.0]) for k in range(3)]
    table = format_table({"easy": summarise_rows(right), "mixed": summarise_rows(rows_with_goal(), bootstrap=50)})
    easy, mixed = (line for line in table.split("\n")[3:5])
    assert easy.split() == ["easy", "3", "3", "1.000", "-", "-", "-"]
    assert mixed.split()[:5] == ["mixed", "4", "2", "0.500", "0.500"]


def test_rows_without_reward_or_label_are_counted_not_dropped_silently():
    unscored = row("c", 0, True, [1.0], reward=None, partial_rewards=None, num_actions=0, truncated=True)
    unlabelled = row("d", 0, True, [1.0], [0.5], is_correct=None)
    summary = summarise_rows([*rows_with_goal(), unscored, unlabelled], bootstrap=50)
    assert (summary["rows"], summary["without_reward"], summary["without_label"], summary["truncated"]) == (6, 1, 1, 1)
    assert summary["auroc"]["reward"][0] == 0.5  # as without the two
    assert "set: 1 rows without reward, 1 rows without label, 1 rows truncated" in format_table({"set": summary})


def test_vanilla_rows_have_reward_figures_only():
    rows = [one | {"cosine_sim": None} for one in rows_with_goal()]
    summary = summarise_rows(rows, threshold=0.2, bootstrap=50)
    assert list(summary["auroc"]) == list(summary["prefix_auroc"]) == ["reward"]
    assert summary["filtered_vote"] is None and summary["equal_accuracy"] is None
    assert summary["vote"]["accuracy"] == 0.5  # ties by reward: a right (2 > 1), b wrong (0.5 < 1.5)


def test_one_completion_a_question_gives_no_vote():
    summary = summarise_rows(rows_with_goal()[::2], bootstrap=50)
    assert summary["vote"] is None
    assert "Majority vote" not in format_table({"greedy": summary})


def test_empty_set_has_counts_only():
    summary = summarise_rows([])
    assert summary["rows"] == 0 and summary["correct"] is None
    assert summary["auroc"]["reward"] == [None, None, None]


def test_quickstart_plot_is_written(tmp_path):
    results = {
        "prefix_auroc": {"vanilla": {25: 0.5, 100: 0.8}, "undefined": {"25": None, "100": None}},
        "filter_tradeoff": {"contrastive": [(0.0, 0.7), (0.2, 0.71), (0.1, 0.7)], "none": []},
    }
    path = plot_quickstart(results, tmp_path / "made" / "plot.png")
    assert path.read_bytes().startswith(b"\x89PNG")
