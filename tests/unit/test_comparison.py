"""Decoding methods compared: equal tokens, intervals over seeds and questions, and folders that do not fit together."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest

from decoding.compare import main
from decoding.comparison import at_equal_tokens, compare_methods, spread_of_ratio
from decoding.comparison_files import read_comparison
from openrlhf.evaluation.ballots import make_ballots
from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.selection import vote_by_count
from tests.unit.test_startup import ROOT, run_programs


def answer_row(index, method, seed=0, right=True, policy=10, reward=0, seconds=1.0, **details):
    return {
        "index": index,
        "question": f"question {index}",
        "method": method,
        "seed": seed,
        "answer": "5" if right else "4",
        "is_correct": right,
        "policy_tokens": policy,
        "reward_tokens": reward,
        "seconds": seconds,
        **details,
    }


def sample_row(index, number, answer, tokens=10, cosine_sim=None, reward=None):
    row = {
        "index": index,
        "question": f"question {index}",
        "generated_solution": f"{number}",
        "expected_answer": "5",
        "predicted_answer": answer,
        "is_correct": answer == "5",
        "sample": number,
        "policy_tokens": tokens,
        "num_actions": tokens if cosine_sim is None else len(cosine_sim),
    }
    scores = {"cosine_sim": cosine_sim, "reward": reward}
    return row | {key: value for key, value in scores.items() if value is not None}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_folder(folder, answers, pools=None):
    write_lines(folder / "answers.jsonl", answers)
    for seed, rows in (pools or {}).items():
        write_lines(folder / "sample" / f"output-seed{seed}.jsonl", rows)
    return folder


def vote(answers, tokens=10, **scores):
    """Rows of question 0 with these answers."""
    return [sample_row(0, number, answer, tokens, **scores) for number, answer in enumerate(answers)]


# One seed


def test_mean_and_interval_of_one_seed_are_those_of_a_slow_loop():
    right = np.array([[1.0, 0.0, 1.0, 1.0, 0.0]])
    found = spread_of_ratio(right, bootstrap=200, seed=3)
    draws = draw_questions(range(5), 200, 3)
    means = [sum(count * value for count, value in zip(draw, right[0], strict=True)) / 5 for draw in draws.weights]
    assert found.over_both == found.over_questions == pytest.approx((0.6, *np.percentile(means, [2.5, 97.5])))
    assert found.over_seeds == (pytest.approx(0.6), None, None) and found.by_seed == [pytest.approx(0.6)]


def test_intervals_over_seeds():
    """Two seeds at 1/2 and 1: mean 3/4, s = sqrt(1/8), half width t(0.975, 1) s / sqrt 2 = 12.7062 / 4."""
    found = spread_of_ratio(np.array([[1.0, 0.0], [1.0, 1.0]]), bootstrap=400)
    assert found.over_seeds == pytest.approx((0.75, 0.75 - 3.17655, 0.75 + 3.17655), abs=1e-4)
    assert found.over_questions.value == 0.75
    # A draw of questions (a, a), (a, b), (b, b) gives means over the two seeds of 1, 3/4 and 1/2.
    assert (found.over_questions.low, found.over_questions.high) == (0.5, 1.0)
    # With seeds drawn too it may be seed 0 twice and question b twice: 0.
    assert (found.over_both.low, found.over_both.high) == (0.0, 1.0)


def test_a_ratio_weighs_questions_by_their_tokens():
    found = spread_of_ratio(np.array([[5.0, 0.0]]), np.array([[10.0, 30.0]]))
    assert found.over_both.value == pytest.approx(5 / 40)


def at_tokens(pools, tokens, spent, figure="majority vote"):
    """`at_equal_tokens` of one seed: pools are rows by question, tokens and spent are numbers by question."""
    by_count = vote_by_count([make_ballots(rows)[0] for rows in pools], name=figure)
    return at_equal_tokens([by_count], np.array([tokens]), np.array([spent]))


def test_a_baseline_spends_as_many_tokens_as_the_method():
    """Samples 5, 5, 4, 4 with 5 right. One sample: 1/2. Two of them: right in 1 of 6 pairs, a tie goes to 4."""
    pools = [vote(["5", "5", "4", "4"])]
    for spent, wanted, samples in ((10, 1 / 2, 1.0), (20, 1 / 6, 2.0), (15, (1 / 2 + 1 / 6) / 2, 1.5), (40, 0.0, 4.0)):
        equal = at_tokens(pools, [40], [spent])
        assert equal.right[0, 0] == pytest.approx(wanted) and equal.samples == samples and equal.within
    less, more = at_tokens(pools, [40], [9]), at_tokens(pools, [40], [80])
    assert less.samples == 0.9 and not less.within and less.right[0, 0] == pytest.approx(1 / 2)
    assert more.samples == 8.0 and not more.within and more.right[0, 0] == 0.0


def test_equal_tokens_hold_over_all_questions_together():
    """Pools of 40 and 80 tokens, 4 samples each; a method with 50 and 10 spends half: two samples of each question."""
    other = [dict(row, question="other") for row in vote(["5", "5", "5", "4"])]
    equal = at_tokens([vote(["5", "5", "4", "4"]), other], [40, 80], [50, 10])
    assert equal.samples == 2.0 and equal.within
    # Second question: pairs (5, 5) 3 of 6; a tie of 5 and 4 goes to 4.
    assert equal.right[0] == pytest.approx([1 / 6, 3 / 6])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_best_of_n_and_weighted_votes_at_equal_tokens_equal_all_subsets(n):
    rows = [
        sample_row(0, i, answer, reward=reward)
        for i, (answer, reward) in enumerate([("5", 1), ("4", 3), ("4", -2), ("5", 0)])
    ]
    best, weighted = [], []
    for chosen in combinations(rows, n):
        best.append(max(chosen, key=lambda row: row["reward"])["is_correct"])
        weights = {"5": 0.0, "4": 0.0}
        for row in chosen:
            weights[row["predicted_answer"]] += 1 / (1 + np.exp(-row["reward"]))
        weighted.append(weights["5"] > weights["4"])
    for figure, wanted in (("best of n, reward", best), ("weighted vote, reward", weighted)):
        equal = at_tokens([rows], [40], [10 * n], figure)
        assert equal.right[0, 0] == pytest.approx(np.mean(wanted))


# Folders


@pytest.fixture
def folder(tmp_path):
    """Two questions, seeds 0 and 1; pools of 4 samples of 10 tokens."""
    answers = [answer_row(i, "greedy", right=i == 0, policy=8) for i in range(2)]
    pools = {}
    for seed in range(2):
        pools[seed] = vote(["5", "5", "4", "4"], cosine_sim=[0.5] * 10)
        # Question 1: three right ones of which one falls below 0.3 at its second token, and a wrong one at its fourth.
        low = [[0.5] * 10, [0.5] * 10, [0.5, 0.1] + [0.5] * 8, [0.5] * 3 + [0.2] + [0.5] * 6]
        pools[seed] += [sample_row(1, n, answer, cosine_sim=low[n]) for n, answer in enumerate("5554")]
        for i in range(2):
            answers += [
                answer_row(i, "sample", seed, right=None, policy=40, reward=40),
                answer_row(i, "majority", seed, right=i == 1, policy=40, reward=40, seconds=2.0, reward_seconds=0.8),
                answer_row(i, "beam", seed, right=i == seed, policy=20, reward=60),
            ]
        filtered = {"samples": 4, "threshold": 0.3, "warmup_tokens": 0, "check_every": 8, "decided": 0}
        kept, cut = {"stopped": 0, "dropped": 0}, {"stopped": 2, "dropped": 2}
        answers.append(answer_row(0, "filtered_vote", seed, False, 40, 40, 2.0, **filtered, **kept, fallback=True))
        answers.append(answer_row(1, "filtered_vote", seed, True, 36, 36, 1.0, **filtered, **cut, fallback=False))
    return write_folder(tmp_path / "run", answers, pools)


def records(result):
    return {one["method"]: one for one in result["methods"]}


def test_every_method_of_a_folder_is_compared_at_its_own_tokens(folder):
    result = compare_methods(read_comparison({"": folder}), bootstrap=50)
    assert (result["questions"], result["left_out"], result["seeds"]) == (2, 0, [0, 1])
    found = records(result)
    accuracy = {name: one["accuracy"]["value"] for name, one in found.items()}
    # Samples: question 0 two of four, question 1 three of four.
    assert accuracy == pytest.approx(
        {"greedy": 0.5, "sample": 5 / 8, "majority": 0.5, "beam": 0.5, "filtered_vote": 0.5}
    )
    tokens = {name: (one["policy_tokens"], one["reward_tokens"], one["seconds"]) for name, one in found.items()}
    assert tokens["sample"] == (10, 10, 0.25) and tokens["majority"] == (40, 40, 2) and tokens["beam"] == (20, 60, 1)
    assert found["majority"]["against"] is None
    # Beam: 20 tokens are two samples. Ties go to the higher mean similarity: of equal ones in question 0 to 4, so 1/6
    # there; in question 1 the last similarities are all 0.5: 3/6. Its own answers: one of two.
    beam = found["beam"]["against"]
    assert (beam["baseline"], beam["equal_tokens"], beam["samples"], beam["within"]) == ("majority", True, 2.0, True)
    assert beam["accuracy"]["value"] == pytest.approx((1 / 6 + 3 / 6) / 2)
    assert beam["difference"]["value"] == pytest.approx(0.5 - 1 / 3)
    # Greedy, of one seed, stands for both; 8 tokens are less than one sample.
    greedy = found["greedy"]["against"]
    assert greedy["within"] is False and greedy["samples"] == pytest.approx(0.8)
    assert greedy["difference"]["by_seed"] == pytest.approx([0.5 - 5 / 8] * 2)
    assert found["sample"]["against"]["difference"]["value"] == pytest.approx(0.0)
    assert found["beam"]["curve"] is None
    curve = {
        point["samples"]: (point["policy_tokens"], point["accuracy"]["value"]) for point in found["majority"]["curve"]
    }
    assert curve == {1: (10, pytest.approx(5 / 8)), 2: (20, pytest.approx(1 / 3)), 4: (40, 0.5)}


def test_a_difference_is_paired_question_by_question(folder):
    """Beam minus greedy, which has no pool: seed 0 agrees everywhere, seed 1 loses question 0 and wins question 1."""
    found = records(compare_methods(read_comparison({"": folder}), "greedy", bootstrap=300))["beam"]["against"]
    assert (found["equal_tokens"], found["samples"]) == (False, None)
    assert found["difference"]["by_seed"] == [0.0, 0.0]
    # Mean over seeds by question: -1/2 and +1/2; a draw of one question twice gives either.
    assert found["difference"]["over_questions"] == [-0.5, 0.5]


def test_live_filtering_stands_beside_what_is_found_after_the_fact(folder):
    found = records(compare_methods(read_comparison({"": folder}), bootstrap=50))["filtered_vote"]["filter"]
    assert (found["threshold"], found["check_every"], found["fallbacks"]) == (0.3, 8, 0.5)
    assert (found["stopped"], found["dropped"], found["decided"]) == (2 / 8, 2 / 8, 0)
    assert found["tokens_saved"]["value"] == pytest.approx(4 / 80)
    assert found["seconds_saved"]["value"] == pytest.approx(1 / 4)  # 2 + 1 s in place of 2 + 2
    assert found["seconds_saved_unscored"]["value"] == pytest.approx(-0.6 / 2.4)  # in place of 1.2 + 1.2
    assert found["difference"]["value"] == 0
    # After the fact the two dropped samples use 2 and 4 of their 10 tokens: 14 of 80 are saved.
    assert found["after_the_fact"]["tokens_saved"]["value"] == pytest.approx(14 / 80)
    assert found["after_the_fact"]["difference"]["value"] == 0


def test_questions_that_were_filtered_differently_are_refused(folder):
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    lines[-1]["threshold"] = 0.4
    write_lines(folder / "answers.jsonl", lines)
    with pytest.raises(ValueError, match="filtered_vote: filtered with .*0.3.*question 1 differently"):
        compare_methods(read_comparison({"": folder}), bootstrap=20)


def test_folders_are_compared_by_label_with_the_baseline_of_their_own_or_the_only_one(folder, tmp_path):
    rows = [answer_row(i, "beam", seed, right=True, policy=40) for i in range(2) for seed in range(2)]
    other = write_folder(tmp_path / "other", rows)
    result = compare_methods(read_comparison({"a": folder, "b": other}), bootstrap=20)
    last = result["methods"][-1]
    assert (last["run"], last["method"], last["against"]["baseline"]) == ("b", "beam", "a/majority")
    assert last["against"]["samples"] == 4.0 and last["against"]["difference"]["value"] == pytest.approx(0.5)
    named = compare_methods(read_comparison({"a": folder, "b": other}), "b/beam", bootstrap=20)
    assert {one["against"]["baseline"] for one in named["methods"][:-1]} == {"b/beam"}
    third = write_folder(tmp_path / "third", [dict(row, method="greedy") for row in rows])
    with pytest.raises(ValueError, match="baseline 'beam' for c/greedy: 2 folders have it; pass one of a/beam, b/beam"):
        compare_methods(read_comparison({"a": folder, "b": other, "c": third}), "beam", bootstrap=20)
    with pytest.raises(ValueError, match="no such method"):
        compare_methods(read_comparison({"a": folder, "b": other}), "nothing", bootstrap=20)


def test_questions_that_cannot_be_judged_are_left_out(tmp_path):
    rows = [answer_row(i, "beam", right=None if i == 1 else True) for i in range(3)]
    comparison = read_comparison({"": write_folder(tmp_path / "a", rows)})
    assert [index for index, _ in comparison.questions] == [0, 2] and comparison.left_out == 1
    samples = [sample_row(i, 0, "5") | ({"expected_answer": None, "is_correct": None} if i else {}) for i in range(3)]
    lines = [answer_row(i, "sample", right=None) for i in range(3)]
    comparison = read_comparison({"": write_folder(tmp_path / "c", lines, {0: samples})})
    assert [index for index, _ in comparison.questions] == [0]
    with pytest.raises(ValueError, match="no question can be judged"):
        read_comparison({"": write_folder(tmp_path / "b", [answer_row(0, "beam", right=None)])})


def test_folders_that_do_not_fit_together_are_refused(folder, tmp_path):
    def read(answers, pools=None):
        return read_comparison({"a": folder, "b": write_folder(tmp_path / "b", answers, pools)})

    both = [answer_row(i, "beam", seed) for i in range(2) for seed in range(2)]
    with pytest.raises(ValueError, match=r"b/beam, seed 1, lacks .* question 1 .*--resume"):
        read(both[:3])
    with pytest.raises(ValueError, match="b/beam, seed 0, has .* question 7"):
        read([*both, answer_row(7, "beam")])
    with pytest.raises(ValueError, match=r"seeds \[0, 1\] and b/beam \[0\]"):
        read([answer_row(i, "beam") for i in range(2)])
    with pytest.raises(ValueError, match=r"answers.jsonl:5: question 0 is answered a second time by beam, seed 0"):
        read([*both, both[0]])
    with pytest.raises(ValueError, match="output-seed0.jsonl: no such file"):
        read([answer_row(i, "sample", seed, None) for i in range(2) for seed in range(2)])
    samples = [answer_row(i, "sample", seed, None) for i in range(2) for seed in range(2)]
    with pytest.raises(ValueError, match="output-seed0.jsonl:2: sample 0 of question 0 is there twice"):
        read(samples, {seed: vote(["5"]) * 2 for seed in range(2)})
    with pytest.raises(ValueError, match="output-seed0.jsonl:1: expected .* of an answered question"):
        read(samples, {seed: [sample_row(5, 0, "5")] for seed in range(2)})
    with pytest.raises(ValueError, match=r"seeds \[0, 1\] and b/greedy \[0, 2\]"):
        read([answer_row(i, "greedy", seed) for i in range(2) for seed in (0, 2)])
    pools = {seed: vote(["5"]) for seed in range(2)}
    with pytest.raises(ValueError, match="1 questions have no sample, first question 1"):
        read(samples, pools)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policy_tokens": -1}, "0 or more in 'policy_tokens'"),
        ({"seconds": None}, "0 or more in 'seconds'"),
        ({"is_correct": 1}, "true, false or null"),
        ({"seed": "0"}, "whole number in 'seed'"),
        ({"method": None}, "text in 'method'"),
        ({"method": "filtered_vote"}, "expected key 'threshold'"),
    ],
)
def test_unusable_lines_are_named(tmp_path, change, told):
    rows = [answer_row(0, "beam"), answer_row(1, "beam") | change]
    with pytest.raises(ValueError, match=rf"answers.jsonl:2: .*{told}"):
        read_comparison({"": write_folder(tmp_path, rows)})


def test_missing_keys_and_empty_folders_are_named(tmp_path):
    row = answer_row(0, "beam")
    del row["seconds"]
    with pytest.raises(ValueError, match="answers.jsonl:1: expected key 'seconds'"):
        read_comparison({"": write_folder(tmp_path / "a", [row])})
    with pytest.raises(ValueError, match="found an empty file"):
        read_comparison({"": write_folder(tmp_path / "b", [])})
    with pytest.raises(ValueError, match="expected a folder written by generate.py"):
        read_comparison({"": tmp_path / "nowhere"})


# The command


def test_the_command_writes_tables_and_a_plot(folder, tmp_path, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "plot")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    main([str(folder), "--bootstrap", "50", *words])
    result = json.loads(files["json"].read_text())
    assert result["folders"] == {"": str(folder)} and result["baseline"] == "majority"
    text = files["markdown"].read_text()
    assert text in capsys.readouterr().out
    assert "| beam | majority | 2.0 | 33.3 " in text and "| greedy | majority | 0.8 * | 62.5 " in text
    assert "| filtered_vote | 0.3000 | 8 | 25.0% | 0.0% | 50.0% | 5.0 [" in text and "17.5 [" in text
    assert files["plot"].read_bytes()[:4] == b"\x89PNG"


def test_help_and_refusals_of_the_command_import_no_heavy_package():
    command = str(ROOT / "decoding" / "compare.py")
    result = run_programs([command, "--help"], [command, "a", "--no_such_flag"], [command])
    assert result["heavy"] == [] and [code for code, _ in result["told"]] == [0, 2, 1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "pass the folders"),
        (["a", "b", "--labels", "x"], "expected one for each of 2 folders"),
        (["a", "b", "--labels", "x", "x"], "expected different names"),
        (["x/a", "y/a"], "expected different names"),
        (["a", "./a"], "given twice"),
        (["a", "--bootstrap", "0"], "--bootstrap: expected 1 or more"),
        (["a", "--plot", "/"], "is a folder"),
        (["nowhere"], "nowhere: expected a folder written by generate.py"),
    ],
)
def test_the_command_refuses_what_cannot_work(words, told, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 1 and told in capsys.readouterr().err
