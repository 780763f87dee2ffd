"""The probe_states command on tiny random models, from completions to files, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.cli import eval_rm, get_representation, probe_states
from openrlhf.cli.parser import parse_config
from openrlhf.evaluation.metrics import auroc, prefix_scores
from openrlhf.models.pretrained import save_reward_model
from tests.tiny import tiny_reward_model, tiny_tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def completion(question, sample, **more):
    text = "the answer is good" if (question + sample) % 2 else "no bad bad"
    row = {"question": f"what is {question} ?", "generated_solution": f"{text} {sample}", "sample": sample}
    return row | {"is_correct": bool((question + sample) % 2)} | more


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two checkpoints, completions of 12 questions, of which one has no label, and completions of 8 others."""
    folder = tmp_path_factory.mktemp("probes")
    for seed, name in enumerate(("first", "second")):
        (folder / name).mkdir()
        settings = {"template": "plain", "max_len": 60, "apply_chat_template": False}
        save_reward_model(folder / name, tiny_reward_model(seed=seed), tiny_tokenizer(), settings=settings)
    rows = [completion(question, sample) for question in range(12) for sample in range(4)]
    write(folder / "data.jsonl", [*rows, completion(0, 9, is_correct=None)])
    others = [completion(question, sample) for question in range(20, 28) for sample in range(4)]
    write(folder / "others.jsonl", others)
    return folder


def words(world, out, models=("first",), **flags):
    given = ["--reward_model_path", *(world / name for name in models), "--save_dir", world / out]
    flags = {"completions_data_path": world / "data.jsonl", "bootstrap": 20} | flags
    return [str(word) for word in given] + [str(word) for pair in flags.items() for word in (f"--{pair[0]}", pair[1])]


def probe(world, *arguments, **flags):
    return probe_states.run(parse_config(probe_states.ProbeConfig, words(world, *arguments, **flags)))


def test_figures_of_a_model_agree_with_eval_rm_and_are_written(world, capsys):
    figures = probe(world, "one")["first"]
    assert json.loads((world / "one" / "probes.json").read_text()) == figures
    assert (figures["rows"], figures["questions"], figures["left_out"]["without label"]) == (48, 12, 1)
    assert (figures["goal_state"]["source"], figures["fitted_on"]) == ("other folds", {"folds": 5, "seed": 0})
    # Every token of the two texts tells them apart but the first ones; a probe over states has to see it at the end.
    assert figures["auroc"]["probe"]["100"][0] > 0.9
    printed = capsys.readouterr().out
    assert (world / "one" / "probes.md").read_text() in printed and "| 70% |" in printed
    assert (world / "one" / "probes.png").stat().st_size > 10_000
    assert json.loads((world / "one" / "manifest.json").read_text())["status"] == "finished"
    eval_rm.main(
        ["--completions_data_path", str(world / "data.jsonl"), "--reward_model_path", str(world / "first")]
        + ["--save_dir", str(world / "scores"), "--vanilla", "--bootstrap", "2"]
    )
    (scored,) = (world / "scores").rglob("all/data.jsonl")
    rows = [json.loads(line) for line in scored.read_text().split("\n")[:-1]]
    rows = [row for row in rows if row["is_correct"] is not None]
    labels = [row["is_correct"] for row in rows]
    for percent in range(10, 101, 10):
        expected = auroc(labels, prefix_scores(rows, "partial_rewards", percent))
        assert figures["auroc"]["reward"][f"{percent}"][0] == pytest.approx(expected, abs=1e-3)  # rounding breaks ties


def test_several_models_a_goal_state_each_and_probe_data(world):
    pairs = [{"question": f"what is {k} ?", "correct": f"the answer is {k}", "incorrect": "bad"} for k in range(4)]
    write(world / "pairs.jsonl", pairs)
    goals = []
    for name in ("first", "second"):
        goals.append(str(world / f"{name}-goal"))
        get_representation.main(
            ["--dataset", str(world / "pairs.jsonl"), "--reward_model", str(world / name), "--save_dir", goals[-1]]
        )
    arguments = words(world, "two", ("first", "second"), probe_data_path=world / "others.jsonl", max_samples=30)
    config = parse_config(probe_states.ProbeConfig, [*arguments, "--goal_state_path", *goals])
    results = probe_states.run(config)
    assert results["first"]["auroc"] != results["second"]["auroc"]
    for name, goal in zip(("first", "second"), goals, strict=True):
        figures = json.loads((world / "two" / name / "probes.json").read_text())
        assert figures == results[name] and (figures["rows"], figures["fitted_on"]["rows"]) == (30, 30)
        digest = json.loads((Path(goal) / "goal_state.json").read_text())["digest"]
        assert figures["goal_state"] == {"source": "given", "digest": digest}
        assert (world / "two" / name / "probes.png").is_file()
    assert (world / "two" / "comparison.png").stat().st_size > 10_000
    alone = probe(world, "alone", probe_data_path=world / "others.jsonl")["first"]
    assert alone["goal_state"]["source"] == "probe data" and alone["fitted_on"]["rows"] == 32


def test_mistakes_end_with_one_clear_error_before_a_model_loads(world, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("openrlhf.cli.reward_checkpoint.load_reward_model", refuse)
    rows = [completion(question, sample) for question in range(6) for sample in range(2)]
    unlabelled = write(tmp_path / "unlabelled.jsonl", [row | {"is_correct": None} for row in rows])
    correct = write(tmp_path / "correct.jsonl", [row | {"is_correct": True} for row in rows])
    few = write(tmp_path / "few.jsonl", rows[:6])
    once = write(tmp_path / "once.jsonl", [row | {"is_correct": i == 0} for i, row in enumerate(rows)])
    for flags, message in [
        ({"completions_data_path": unlabelled}, "none of 12 has one"),
        ({"completions_data_path": correct}, "are all correct"),
        ({"completions_data_path": few}, "at least 5 questions for 5 folds, got 3"),
        ({"completions_data_path": once}, "of 5 are all wrong"),
        ({"completions_data_path": tmp_path / "none.jsonl"}, "none.jsonl, found nothing"),
        ({"probe_data_path": tmp_path / "none.jsonl"}, "--probe_data_path: expected completions at"),
        ({"probe_data_path": world / "data.jsonl"}, "12 questions are in the probe data and in the completions"),
        ({"probe_data_path": correct}, "questions are in the probe data"),
        ({"reward_model_path": "./nowhere"}, "expected a reward model checkpoint at ./nowhere"),
        ({"goal_state_path": tmp_path}, "expected a goal state at"),
        ({"max_samples": 0}, "--max_samples: expected 1 or more"),
    ]:
        with pytest.raises(SystemExit) as end:
            probe_states.main(words(world, "bad", **flags))
        assert end.value.code == 1
        (error,) = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error:")]
        assert message in error
