"""Figures of a scored set and the table that shows them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from openrlhf.evaluation.plots import plot_quickstart
from openrlhf.evaluation.summary import format_table, summarise_rows
from openrlhf.evaluation.tables import CSV_COLUMNS, figure_rows, format_comparisons


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
    values = {percent: found[0] for percent, found in summary["prefix_auroc"]["reward"].items()}
    assert values == {"25": 0.0, "50": 0.0, "75": 0.5, "100": 0.5}
    assert summary["prefix_auroc"]["goal_similarity"]["50"] == [0.0, 0.0, 0.0]
    assert summary["prefix_auroc"]["reward"]["100"] == summary["auroc"]["reward"]
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
    assert "set: 1 rows without reward (the prompt leaves no room), 1 rows without label, " in format_table(
        {"set": summary}
    )


def test_vanilla_rows_have_reward_figures_only():
    rows = [one | {"cosine_sim": None} for one in rows_with_goal()]
    summary = summarise_rows(rows, threshold=0.2, bootstrap=50)
    assert list(summary["auroc"]) == list(summary["prefix_auroc"]) == ["reward"]
    assert summary["filtered_vote"] is None and summary["equal_accuracy"] is None
    assert summary["vote"]["accuracy"] == 0.5  # ties by reward: a right (2 > 1), b wrong (0.5 < 1.5)


def test_one_completion_a_question_gives_no_vote():
    summary = summarise_rows(rows_with_goal()[::2], bootstrap=50)
    for key in ("accuracy", "accuracy_by_n", "vote", "filtered_vote", "equal_accuracy", "tradeoff"):
        assert summary[key] is None
    assert "Accuracy per question" not in format_table({"greedy": summary})


def test_empty_set_has_counts_only():
    summary = summarise_rows([])
    assert summary["rows"] == 0 and summary["correct"] is None
    assert summary["auroc"]["reward"] == [None, None, None]


def test_two_problems_with_the_same_text_do_not_make_a_vote():
    rows = [row(f"q{k}", 0, k % 2 == 0, [1.0 * k]) for k in range(9)] + [row("q0", 0, False, [3.0])]
    assert summarise_rows(rows, bootstrap=20)["accuracy"] is None
    # several completions in 4 of 9 questions are too few, in 5 enough
    more = [row(f"q{k}", 1, False, [3.0]) for k in range(1, 5)]
    assert summarise_rows([*rows, *more[:3]], bootstrap=20)["accuracy"] is None
    assert summarise_rows([*rows, *more], bootstrap=20)["accuracy"] is not None


def test_rows_without_goal_similarity_are_left_out_of_goal_figures_only():
    without = [one | {"question": f"no {one['question']}", "cosine_sim": None} for one in rows_with_goal()]
    summary = summarise_rows(rows_with_goal() + without, threshold=0.0, bootstrap=50)
    alone = summarise_rows(rows_with_goal(), threshold=0.0, bootstrap=50)
    assert (summary["rows"], summary["without_goal"]) == (8, 4)
    for score in ("goal_similarity", "goal_similarity_mean"):
        assert summary["auroc"][score][0] == alone["auroc"][score][0]
    assert summary["filtered_vote"] == alone["filtered_vote"]
    assert summary["vote"]["questions"] == 4 and summary["filtered_vote"]["questions"] == 2
    assert summary["accuracy"]["best of n, goal similarity"][0] == alone["accuracy"]["best of n, goal similarity"][0]
    assert "4 rows without goal similarity" in format_table({"set": summary})
    vanilla = summarise_rows(without, bootstrap=50)
    assert vanilla["without_goal"] == 4 and "without goal" not in format_table({"set": vanilla})


def test_questions_that_cannot_be_judged_do_not_stop_the_others():
    unjudged = row("c", 0, None, [1.0], [0.5], expected_answer=None)
    summary = summarise_rows([*rows_with_goal(), unjudged], bootstrap=50)
    assert (summary["unjudged"], summary["vote"]["questions"]) == (1, 2)
    assert "1 questions without vote" in format_table({"set": summary})


def test_duplicates_are_counted_and_kept():
    rows = [one | {"generated_solution": one["question"]} for one in rows_with_goal()]
    summary = summarise_rows([*rows, rows[0]], bootstrap=50)
    assert (summary["duplicates"], summary["rows"], summary["vote"]["completions"]) == (1, 5, 5)


def test_arrays_and_lists_give_equal_figures():
    generator = np.random.default_rng(0)
    lists = []
    for k in range(60):
        length = int(generator.integers(2, 9))
        values = [round(float(value), 7) for value in generator.normal(0, 0.3, 2 * length)]
        lists.append(row(f"q{k // 4}", k % 4, bool(generator.integers(0, 2)), values[:length], values[length:]))
    arrays = [one | {key: np.array(one[key], np.float32) for key in ("partial_rewards", "cosine_sim")} for one in lists]
    options = {"threshold": 0.1, "bootstrap": 50, "percentiles": (10, 33.3)}
    assert summarise_rows(lists, **options) == summarise_rows(arrays, **options)


def test_validation_rows_set_the_threshold():
    test = rows_with_goal()
    others = [one | {"question": f"v{one['question']}"} for one in test]
    summary = summarise_rows(test, validation=others, bootstrap=50)
    assert summary["equal_accuracy"]["validation"]["questions"] == summary["equal_accuracy"]["test"]["questions"] == 2
    with pytest.raises(ValueError, match="2 questions are in both sets"):
        summarise_rows(test, validation=test, bootstrap=50)


def test_equal_accuracy_reports_saving_difference_and_paired_test():
    rows = []
    for k in range(20):
        rows += [row(f"q{k}", sample, True, [1.0] * 6, [0.9] * 6) for sample in range(2)]
        rows += [row(f"q{k}", 2, False, [0.0] * 6, [0.9, -0.5, 0.1, 0.1, 0.1, 0.1])]
    equal = summarise_rows(rows, bootstrap=50)["equal_accuracy"]
    assert equal["saving"] == pytest.approx([4 / 18] * 3)  # the wrong one stops after 2 of 6 tokens, in each question
    assert equal["accuracy_difference"] == [0.0, 0.0, 0.0]
    assert (equal["better"], equal["worse"], equal["p_value"]) == (0, 0, 1.0)


def test_everything_fits_into_json_and_csv():
    with_steps = [
        one | {"first_error_step": 1, "generated_solution": "a\nb", "token_ends": [1, 3]} for one in rows_with_goal()
    ]
    summary = summarise_rows(with_steps, threshold=0.0, bootstrap=50)
    json.dumps(summary, allow_nan=False)
    results = {"models": {"m": {"sets": {"s": summary, "empty": summarise_rows([])}}}, "comparisons": []}
    lines = list(figure_rows(results))
    assert all(set(line) == set(CSV_COLUMNS) for line in lines)
    assert all(line[key] is None or isinstance(line[key], int | float) for line in lines for key in CSV_COLUMNS[4:])
    found = {(line["figure"], line["name"]): line["value"] for line in lines if line["set"] == "s"}
    assert found["auroc", "reward"] == 0.5 and found["prefix_auroc", "reward, 25%"] == 0.0
    assert found["accuracy_by_n", "any correct, n=1"] == 0.5 and found["count", "rows"] == 4
    assert found["calibration", "brier"] == summary["calibration"]["brier"][0]
    assert found["step_level", "chance"] == 0.5 and found["tradeoff", "accuracy, no filter"] == 1.0
    assert len({(line["set"], line["figure"], line["name"]) for line in lines}) == len(lines)
    table = format_table(results["models"]["m"]["sets"])
    for title in ("AUROC at", "AUROC after", "Accuracy per", "at the given", "some thresholds", "Calib", "First wrong"):
        assert title in table
    assert max(map(len, table.split("\n"))) <= 120


def test_comparisons_are_tabled_with_what_has_no_partner():
    record = {"set": "s", "score": "reward", "rows": 4, "difference": 0.1, "low": -0.1, "high": 0.2, "p_value": 0.5}
    table = format_comparisons([record | {"a": "x", "b": "y", "unmatched": 2, "left_out": 1}])
    assert table.split("\n")[3].split() == "s reward: x minus y +0.100 [-0.100, +0.200] 0.500 4 3".split()
    undefined = record | {"a": "x", "b": "x", "difference": None, "low": None, "high": None, "p_value": None}
    assert format_comparisons([undefined]).split("\n")[3].split() == "s x: reward - - 4 0".split()
    assert format_comparisons([]) == ""


def test_quickstart_plot_is_written(tmp_path):
    results = {
        "prefix_auroc": {"vanilla": {25: 0.5, 100: 0.8}, "undefined": {"25": None, "100": None}},
        "filter_tradeoff": {"contrastive": [(0.0, 0.7), (0.2, 0.71), (0.1, 0.7)], "none": []},
    }
    path = plot_quickstart(results, tmp_path / "made" / "plot.png")
    assert path.read_bytes().startswith(b"\x89PNG")
