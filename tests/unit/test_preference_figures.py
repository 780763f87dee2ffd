"""Figures of scored preference sets against plain loops and numbers by hand, and the command's files and tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binomtest

from openrlhf.cli.eval_preferences import (
    _unique_names,
    compare_preference_folders,
    evaluate_preferences,
    read_preference_sets,
)
from openrlhf.cli.reward_checkpoint import RewardCheckpoint
from openrlhf.datasets.jsonl import read_jsonl, write_jsonl
from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.preference_figures import LENGTH_BINS, compare_preferences, summarise_preferences
from openrlhf.evaluation.preference_table import format_preferences
from openrlhf.evaluation.rewardbench import SECTIONS
from tests.tiny import tiny_reward_model, tiny_tokenizer


def row(rewards, num_chosen=1, lengths=None, prompt="p", subset=None, goal=None, number=0, **more):
    return {
        "row": number,
        "id": None,
        "subset": subset,
        "prompt": prompt,
        "responses": [f"{prompt} {number} {k}" for k in range(len(rewards))],
        "num_chosen": num_chosen,
        "rewards": rewards,
        "goal_similarity": goal,
        "lengths": lengths or [1] * len(rewards),
        "truncated": [False] * len(rewards),
    } | more


def random_rows(count: int = 60, seed: int = 0, goal: bool = True) -> list[dict]:
    """Rows of 20 prompts with one or two chosen and one to three rejected responses, with ties and equal lengths."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        chosen, rejected = int(generator.integers(1, 3)), int(generator.integers(1, 4))
        size = chosen + rejected
        rows.append(
            row(
                (generator.integers(0, 5, size) / 2).tolist(),
                chosen,
                generator.integers(1, 90, size).tolist() if number % 3 else [9] * size,
                f"prompt {number % 20}",
                f"s{number % 2}",
                (generator.integers(-3, 4, size) / 8).tolist() if goal else None,
                number,
            )
        )
    return rows


def pairs_of(rows, key):
    """(prompt, chosen minus rejected score, chosen minus rejected length) of every pair."""
    return [
        (one["prompt"], one[key][i] - one[key][j], one["lengths"][i] - one["lengths"][j])
        for one in rows
        for i in range(one["num_chosen"])
        for j in range(one["num_chosen"], len(one["responses"]))
    ]


def loop_interval(values, counted, prompts, all_prompts, n, seed):
    """Share of `values` among `counted` pairs with its percentile interval, draw by draw."""
    if not sum(counted):
        return [None, None, None]
    weights = draw_questions(all_prompts, n, seed)
    draws = []
    for draw in weights.weights.tolist():
        above = below = 0.0
        for value, count, prompt in zip(values, counted, prompts, strict=True):
            times = draw[weights.numbers[prompt]]
            above += times * value * count
            below += times * count
        if below:
            draws.append(above / below)
    value = sum(v * c for v, c in zip(values, counted, strict=True)) / sum(counted)
    return [value, np.percentile(draws, 2.5), np.percentile(draws, 97.5)]


@pytest.mark.parametrize("score", ["reward", "goal_similarity"])
def test_all_figures_equal_plain_loops(score):
    rows = random_rows()
    found = summarise_preferences(rows, bootstrap=50, seed=3)
    key = {"reward": "rewards", "goal_similarity": "goal_similarity"}[score]
    pairs = pairs_of(rows, key)
    prompts, all_prompts = [prompt for prompt, _, _ in pairs], [one["prompt"] for one in rows]

    def interval(values, counted=None):
        expected = loop_interval(values, counted or [1] * len(pairs), prompts, all_prompts, 50, 3)
        return pytest.approx(expected, abs=1e-12)

    won = [float(margin > 0) for _, margin, _ in pairs]
    assert found["pairs"] == len(pairs) and found["rows"] == 60 and found["prompts"] == 20
    assert found["accuracy"][score] == interval(won)
    assert found["ties"][score] == sum(margin == 0 for _, margin, _ in pairs)
    margins = [margin for _, margin, _ in pairs]
    assert found["margin"][score]["mean"] == interval(margins)
    assert found["margin"][score]["median"] == pytest.approx(np.median(margins), abs=1e-12)
    edges, counts = (found["margin"][score]["histogram"][name] for name in ("edges", "counts"))
    assert sum(counts) == len(pairs) and len(edges) == len(counts) + 1
    assert edges[len(counts) // 2] == pytest.approx(0, abs=1e-12)
    assert sum(counts[len(counts) // 2 :]) == sum(margin >= 0 for margin in margins)

    length = found["length"]
    for name, inside in {
        "chosen_longer": lambda d: d > 0,
        "chosen_shorter": lambda d: d < 0,
        "equal": lambda d: d == 0,
    }.items():
        counted = [int(inside(difference)) for _, _, difference in pairs]
        assert length[name]["pairs"] == sum(counted) > 0
        assert length[name]["accuracy"][score] == interval(won, counted)
    assert length["longer_is_better"] == interval([float(d > 0) for _, _, d in pairs])
    agrees = [float((margin > 0 and d > 0) or (margin < 0 and d < 0)) for _, margin, d in pairs]
    assert length["prefers_longer"][score] == interval(agrees, [int(d != 0) for _, _, d in pairs])
    for (low, high), one in zip(LENGTH_BINS, length["bins"], strict=True):
        counted = [int((low is None or d >= low) and (high is None or d <= high)) for _, _, d in pairs]
        assert (one["low"], one["high"], one["pairs"]) == (low, high, sum(counted))
        assert one["accuracy"][score] == interval(won, counted)
    assert sum(one["pairs"] for one in length["bins"]) == len(pairs)

    part = [one for one in rows if one["subset"] == "s1"]
    assert found["subsets"]["s1"]["pairs"] == len(pairs_of(part, key))
    subset_won = [float(margin > 0) for _, margin, _ in pairs_of(part, key)]
    assert found["subsets"]["s1"]["accuracy"][score][0] == pytest.approx(np.mean(subset_won), abs=1e-12)
    credits = []
    for one in rows:
        top = [k for k, value in enumerate(one[key]) if value == max(one[key])]
        credits.append(sum(k < one["num_chosen"] for k in top) / len(top))
    assert found["best_of_n"][score] == pytest.approx(
        loop_interval(credits, [1] * 60, all_prompts, all_prompts, 50, 3), abs=1e-12
    )


def test_figures_by_hand():
    rows = [
        row([2.0, 1.0], lengths=[5, 3], prompt="a", number=0),  # right, chosen longer
        row([1.0, 1.0], lengths=[3, 5], prompt="b", number=1),  # a tie
        row([0.0, 3.0], lengths=[2, 40], prompt="c", number=2),  # wrong, the rejected one is longer
        row([1.0, 0.5], lengths=[4, 4], prompt="d", number=3),  # right, equal lengths
        row([None, None], prompt="e", number=4, truncated=[True, True]),
    ]
    found = summarise_preferences(rows, bootstrap=20)
    assert (found["rows"], found["pairs"], found["without_reward"], found["truncated"]) == (5, 4, 1, 2)
    assert found["accuracy"]["reward"][0] == 0.5 and found["ties"] == {"reward": 1}
    assert found["margin"]["reward"]["mean"][0] == -0.375 and found["margin"]["reward"]["median"] == 0.25
    assert found["length"]["longer_is_better"][0] == 0.25
    assert found["length"]["prefers_longer"]["reward"][0] == 2 / 3  # a and c of a, b, c
    assert found["length"]["bins"][1]["pairs"] == 1  # -38
    assert found["best_of_n"] is None and found["rewardbench"] is None and found["subsets"] == {}


def test_undefined_is_none():
    found = summarise_preferences([row([None, None])])
    assert found["pairs"] == 0 and found["accuracy"] == {"reward": [None, None, None]}
    assert found["margin"]["reward"] == {"mean": [None, None, None], "median": None, "histogram": None}
    one = summarise_preferences([row([1.0, 0.0])])
    assert one["accuracy"]["reward"] == [1.0, None, None]  # one prompt has no interval
    assert "-" in format_preferences({"x": found, "y": one})


def test_rewardbench_1_from_rows_counts_ties_as_wrong():
    rows = [
        row([1.0, 0.0], prompt="a", subset="math-prm"),
        row([1.0, 1.0], prompt="b", subset="math-prm", number=1),
        row([1.0, 0.0], prompt="c", subset="hep-cpp", number=2),
    ]
    found = summarise_preferences(rows, bootstrap=5)["rewardbench"]["reward"]
    assert found["sections"]["Reasoning"] == pytest.approx((984 * 0.5 + 164) / 1148, abs=1e-15)
    assert found["overall"] is None and found["missing"]["Chat"] == list(SECTIONS["Chat"])


def test_rewardbench_2_from_rows():
    rows = [
        row([1.0, 0.0, 0.0, 0.5], prompt="a", subset="Math"),
        row([1.0, 1.0, 0.0, 0.5], prompt="b", subset="Math", number=1),
        row([1.0, 0.0], prompt="c", subset="Ties", number=2, id="ref:0"),
        row([2.0, 1.5, 0.5], 2, prompt="d", subset="Ties", number=3, id="tied:0"),
    ]
    found = summarise_preferences(rows, bootstrap=5)
    bench = found["rewardbench"]["reward"]
    assert bench["sections"]["Math"] == 0.75 == found["subsets"]["Math"]["best_of_n"]["reward"][0]
    assert bench["sections"]["Ties"] == pytest.approx(1 + 0.01 * np.tanh(1), abs=1e-15)  # as in test_rewardbench.py
    assert bench["overall"] is None and bench["missing"] == ["Factuality", "Precise IF", "Safety", "Focus"]
    text = format_preferences({"bench": found})
    assert "RewardBench 2 subsets that are missing: Factuality" in text and "Ties 1.008" in text


def test_two_models_are_compared_on_the_same_pairs():
    a, b = random_rows(seed=0), random_rows(seed=0)
    generator = np.random.default_rng(5)
    for one in b:
        one["rewards"] = (generator.integers(0, 5, len(one["rewards"])) / 2).tolist()
        one["prompt"] = "rendered otherwise: " + one["prompt"]
        one["responses"] = [f" {text}" for text in one["responses"]]
    found = compare_preferences(a, b[:-2], bootstrap=50, seed=3)
    a_pairs, b_pairs = pairs_of(a[:-2], "rewards"), pairs_of(b[:-2], "rewards")
    won = [(x > 0, y > 0) for (_, x, _), (_, y, _) in zip(a_pairs, b_pairs, strict=True)]
    better, worse = sum(x and not y for x, y in won), sum(y and not x for x, y in won)
    assert (found["better"], found["worse"], found["pairs"], found["unmatched"]) == (better, worse, len(won), 2)
    assert found["p_value"] == pytest.approx(binomtest(better, better + worse).pvalue, abs=1e-12)
    differences = [float(x) - float(y) for x, y in won]
    prompts = [prompt for prompt, _, _ in a_pairs]
    expected = loop_interval(differences, [1] * len(won), prompts, [one["prompt"] for one in a[:-2]], 50, 3)
    assert [found["difference"], found["low"], found["high"]] == pytest.approx(expected, abs=1e-12)
    assert found["a"] - found["b"] == pytest.approx(found["difference"], abs=1e-12)
    same = compare_preferences(a, a)
    assert same["difference"] == 0 and same["p_value"] == 1 and (same["better"], same["worse"]) == (0, 0)
    nothing = compare_preferences(a, [])
    assert nothing["pairs"] == 0 and nothing["difference"] is None and nothing["p_value"] is None


# The command


def checkpoint(folder) -> RewardCheckpoint:
    tiny_tokenizer().save_pretrained(folder)
    return RewardCheckpoint("tiny", folder, "fingerprint", "plain", False, 100)


def write_sets(folder) -> list[str]:
    generator = np.random.default_rng(0)
    words = ["good", "bad", "yes", "no", "apples", "7", "31"]
    rows = [
        {
            "prompt": f"what is {i}",
            "chosen": " ".join(generator.choice(words, 4)),
            "rejected": " ".join(generator.choice(words, 3)),
            "subset": ["math-prm", "donotanswer"][i % 2],
        }
        for i in range(10)
    ]
    write_jsonl(folder / "bench.jsonl", rows)
    lists = [
        {"prompt": f"buy {i}", "chosen": ["good"], "rejected": ["bad", "no", "yes"], "subset": "Math"} for i in range(3)
    ]
    write_jsonl(folder / "two.jsonl", lists)
    return [str(folder / "bench.jsonl"), str(folder / "two.jsonl")]


def test_the_command_writes_rows_and_figures_and_goes_on(tmp_path, capsys):
    files, model = write_sets(tmp_path), tiny_reward_model()
    point = checkpoint(tmp_path / "model")
    sets = read_preference_sets(files, point)
    out = tmp_path / "out" / "tiny"

    def run(model):
        return evaluate_preferences(
            sets, point, model, tiny_tokenizer(), None, out, batch_tokens=300, bootstrap=20, progress=False
        )

    summary = run(model)
    assert json.loads((out / "preferences" / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["files"] == ["bench.jsonl", "two.jsonl"]
    assert len(list(read_jsonl(out / "preferences" / "bench.jsonl"))) == 10
    printed = capsys.readouterr().out
    assert "Accuracy on pairs" in printed and "donotanswer" in printed and "RewardBench" in printed
    again = run(model)
    assert again["sets"] == summary["sets"]
    other = tmp_path / "out" / "other"
    evaluate_preferences(
        sets, point, tiny_reward_model(seed=1), tiny_tokenizer(), None, other, bootstrap=20, progress=False
    )
    records = compare_preference_folders({"tiny": out, "other": other}, bootstrap=20)
    assert [(one["set"], one["a_label"], one["b_label"], one["score"], one["pairs"]) for one in records] == [
        ("bench", "tiny", "other", "reward", 10),
        ("two", "tiny", "other", "reward", 9),
    ]
    assert "a minus b" in capsys.readouterr().out


def test_sets_of_one_name_get_numbers():
    assert _unique_names(["a/x.jsonl", "b/x.jsonl", "x.json", "summary.jsonl"]) == ["x", "x-2", "x-3", "summary-2"]


def test_no_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="--preferences: expected at least one"):
        read_preference_sets([], checkpoint(tmp_path))
    with pytest.raises(ValueError, match="pocket: the embedded task has no preference set"):
        read_preference_sets(["pocket"], checkpoint(tmp_path))
    with pytest.raises(ValueError, match="no such file"):
        read_preference_sets([str(tmp_path / "no.jsonl")], checkpoint(tmp_path))
