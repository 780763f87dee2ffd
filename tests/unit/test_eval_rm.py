"""The scoring commands from files to tables: get_representation, eval_rm, metrics."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from openrlhf.cli import eval_rm, get_representation, metrics
from openrlhf.cli.completion_files import find_completions
from openrlhf.evaluation.scoring import Scorer
from openrlhf.models.pretrained import save_reward_model
from openrlhf.utils.atomic import hold_lock
from tests.tiny import tiny_reward_model, tiny_tokenizer


def checkpoint(folder, seed=0, **settings):
    folder.mkdir(parents=True)
    recorded = {"template": "plain", "max_len": 100, "apply_chat_template": False} | settings
    save_reward_model(folder, tiny_reward_model(seed=seed), tiny_tokenizer(), settings=recorded)
    return folder


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def completion(question, text, **more):
    return {"question": f"what is {question} ?", "expected_answer": "7", "generated_solution": text} | more


@pytest.fixture
def world(tmp_path):
    """A checkpoint, preference rows, and two benchmarks: one greedy and sampled, one greedy only."""
    write(
        tmp_path / "pairs.jsonl",
        [{"question": f"what is {k} ?", "correct": f"the answer is 7 {k}", "incorrect": f"bad {k}"} for k in range(8)],
    )
    for sample in range(3):
        rows = [completion(k, rf"so \boxed{{{7 if (k + sample) % 2 else 8}}}") for k in range(6)]
        write(tmp_path / "data" / "gsm8k" / f"output-rs{sample}.jsonl", rows)
    write(tmp_path / "data" / "gsm8k" / "output-greedy.jsonl", [completion(k, f"it is {6 + k % 2}") for k in range(6)])
    write(tmp_path / "data" / "svamp" / "output-greedy.jsonl", [completion(1, "7", is_correct=True)])
    checkpoint(tmp_path / "rm")
    return tmp_path


def goal_of(world, **flags):
    words = [
        "--dataset",
        f"{world / 'pairs.jsonl'}",
        "--reward_model",
        f"{world / 'rm'}",
        "--save_dir",
        f"{world / 'goal'}",
    ]
    get_representation.main(words + [str(word) for pair in flags.items() for word in (f"--{pair[0]}", pair[1])])
    return np.load(world / "goal" / "goal_state.npy"), json.loads((world / "goal" / "goal_state.json").read_text())


def evaluate(world, *more):
    words = ["--completions_data_path", str(world / "data"), "--reward_model_path", str(world / "rm")]
    eval_rm.main([*words, "--save_dir", str(world / "out"), "--bootstrap", "20", *more])
    return json.loads((world / "out" / "rm" / "summary.json").read_text())


def scored(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_goal_state_command_averages_the_chosen_responses(world, capsys):
    vector, details = goal_of(world)
    tokenizer, model = tiny_tokenizer(), tiny_reward_model()
    states = []
    for k in range(8):
        text = [
            tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in (f"what is {k} ?\n", f"the answer is 7 {k}")
        ]
        ids = torch.tensor([text[0] + text[1] + [2]])
        with torch.no_grad():
            states.append(model(ids, torch.ones_like(ids).bool()).hidden_states[0, -1])
    assert vector.shape == (1, 32)
    np.testing.assert_allclose(vector[0], torch.stack(states).mean(0), atol=1e-5)
    assert (details["count"], details["template"], details["max_len"]) == (8, "plain", 100)
    again, _ = goal_of(world, batch_tokens=1)
    np.testing.assert_allclose(again, vector, atol=1e-6)
    assert json.loads((world / "goal" / "manifest.json").read_text())["status"] == "finished"


def test_original_spellings_are_accepted(world):
    words = ["--dataset-path", world / "pairs.jsonl", "--reward-model-path", world / "rm", "--save-dir", world / "goal"]
    get_representation.main([str(word) for word in words])
    assert (world / "goal" / "goal_state.npy").is_file()


def test_benchmarks_are_scored_graded_and_tabled(world, capsys):
    goal_of(world)
    words = ["--goal_state_path", str(world / "goal"), "--filter_threshold", "0.0", "--benchmarks", "gsm8k", "svamp"]
    summary = evaluate(world, *words)
    assert list(summary["sets"]) == ["gsm8k/greedy", "gsm8k/all", "svamp/greedy"]
    everything = summary["sets"]["gsm8k/all"]
    assert (everything["rows"], everything["questions"], everything["correct"]) == (18, 6, 0.5)
    assert everything["filtered_vote"]["threshold"] == 0.0
    assert summary["sets"]["svamp/greedy"]["auroc"]["reward"] == [None, None, None]  # one class, the others stay
    folder = world / "out" / "rm" / "gsm8k"
    assert sorted(p.name for p in (folder / "all").glob("*.jsonl")) == [
        "output-rs0.jsonl",
        "output-rs1.jsonl",
        "output-rs2.jsonl",
    ]
    (greedy,) = (folder / "greedy").glob("*.jsonl")
    rows = scored(greedy)
    assert [row["question"] for row in rows] == [f"what is {k} ?" for k in range(6)]
    assert [row["is_correct"] for row in rows] == [False, True] * 3  # 6 and 7 in turn, expected 7
    assert all(len(row["partial_rewards"]) == len(row["cosine_sim"]) == row["num_actions"] for row in rows)
    assert [row["sample"] for k in range(3) for row in scored(folder / "all" / f"output-rs{k}.jsonl")] == [0] * 6 + [
        1
    ] * 6 + [2] * 6
    table = capsys.readouterr().out
    assert "gsm8k/all" in table and "AUROC goal similarity" in table and "75%" in table

    metrics.main(
        [
            "--scored_path",
            str(world / "out" / "rm"),
            "--filter_threshold",
            "0.0",
            "--bootstrap",
            "20",
            "--output",
            str(world / "m.json"),
        ]
    )
    again = json.loads((world / "m.json").read_text())["models"]["rm"]["sets"]
    assert again == summary["sets"]


def test_vanilla_needs_no_goal_state(world, capsys):
    summary = evaluate(world, "--vanilla", "--filter_threshold", "0.0")
    assert list(summary["sets"]["gsm8k/all"]["auroc"]) == ["reward"]
    assert "AUROC goal" not in capsys.readouterr().out


def test_two_scored_folders_are_compared_row_by_row(world, capsys):
    evaluate(world, "--vanilla")
    checkpoint(world / "other" / "rm", seed=1)
    words = ["--completions_data_path", str(world / "data"), "--reward_model_path", str(world / "other" / "rm")]
    eval_rm.main([*words, "--save_dir", str(world / "out2"), "--vanilla"])
    capsys.readouterr()
    metrics.main(["--scored_path", str(world / "out" / "rm"), str(world / "out2" / "rm"), "--bootstrap", "20"])
    lines = capsys.readouterr().out.split("minus")[0:]
    assert any("gsm8k/all" in line for line in lines[1:])


def test_single_file_is_evaluated(world):
    words = ["--reward_model_path", str(world / "rm"), "--save_dir", str(world / "out"), "--vanilla"]
    eval_rm.main(["--completions_data_path", str(world / "data" / "svamp" / "output-greedy.jsonl"), *words])
    assert (world / "out" / "rm" / "output-greedy" / "greedy" / "output-greedy.jsonl").is_file()


def test_other_files_of_a_folder_are_sets_of_their_own(world):
    write(world / "data" / "more" / "model-a.jsonl", [completion(1, "so 7"), completion(2, "so 8")])
    write(world / "data" / "more" / "model-b.jsonl", [completion(1, "so 7"), completion(1, "so 9")])
    files = find_completions(str(world / "data"), ["more"])
    assert [(file.benchmark, file.kind) for file in files] == [("more/model-a", "greedy"), ("more/model-b", "all")]
    summary = evaluate(world, "--vanilla", "--benchmarks", "more")
    assert list(summary["sets"]) == ["more/model-a/greedy", "more/model-b/all"]


def test_empty_file_is_refused(world):
    write(world / "data" / "more" / "output-greedy.jsonl", [])
    with pytest.raises(ValueError, match="more/output-greedy.jsonl: expected completions, the file holds none"):
        find_completions(str(world / "data"), ["more"])


def test_several_models_in_one_call(world):
    checkpoint(world / "other" / "second", seed=1)
    models = ["--reward_model_path", str(world / "rm"), str(world / "other" / "second")]
    summary = evaluate(world, "--vanilla", *models)
    second = json.loads((world / "out" / "second" / "summary.json").read_text())
    assert second["model"]["name"] == "second" and second["sets"].keys() == summary["sets"].keys()
    assert second["sets"]["gsm8k/all"]["auroc"] != summary["sets"]["gsm8k/all"]["auroc"]


def test_models_of_one_name_or_without_their_goal_states_are_refused(world, capsys, monkeypatch):
    goal_of(world)
    refuse_loading(monkeypatch)
    checkpoint(world / "other" / "rm", seed=1)
    models = ["--reward_model_path", str(world / "rm"), str(world / "other" / "rm")]
    for words, message in [
        (["--vanilla"], "two models are called rm"),
        (["--goal_state_path", str(world / "goal")], "one for each of the 2"),
    ]:
        with pytest.raises(SystemExit):
            evaluate(world, *models, *words)
        assert message in capsys.readouterr().err


def test_goals_per_question_score_only_their_questions(world, caplog):
    goal_of(world, per_question="true")
    evaluate(world, "--goal_state_path", str(world / "goal"), "--benchmarks", "gsm8k")
    rows = scored(world / "out" / "rm" / "gsm8k" / "greedy" / "output-greedy.jsonl")
    assert all(row["cosine_sim"] is not None for row in rows)  # pairs.jsonl holds questions 0 to 7
    write(world / "data" / "more" / "output-greedy.jsonl", [completion(1, "so 7"), completion(99, "so 7")])
    evaluate(world, "--goal_state_path", str(world / "goal"), "--benchmarks", "more")
    rows = scored(world / "out" / "rm" / "more" / "greedy" / "output-greedy.jsonl")
    assert [row["cosine_sim"] is None for row in rows] == [False, True]
    assert "1 completions are of questions without a goal" in caplog.text


def test_very_long_and_empty_solutions_are_scored_and_marked(world):
    rows = [completion(1, "7 " * 20_000), completion(2, ""), completion(3, "so 7"), completion("9 " * 200, "so 7")]
    write(world / "data" / "long" / "output-greedy.jsonl", rows)
    summary = evaluate(world, "--vanilla", "--benchmarks", "long")
    rows = scored(world / "out" / "rm" / "long" / "greedy" / "output-greedy.jsonl")
    assert [row["truncated"] for row in rows] == [True, False, False, True]
    assert [row["num_actions"] > 0 for row in rows] == [True, True, True, False]
    assert rows[1]["num_actions"] == 1 and rows[1]["token_ends"] == [0]  # EOS alone
    assert rows[3]["reward"] is None
    counts = summary["sets"]["long/greedy"]
    assert (counts["rows"], counts["truncated"], counts["without_reward"]) == (4, 2, 1)


def test_rows_of_steps_are_joined_to_a_solution(world):
    row = {"question": "q", "steps": ["Step 1: a", "Step 2: b"], "first_error_step": 2, "solution_correct": False}
    write(world / "data" / "steps" / "output-greedy.jsonl", [row])
    evaluate(world, "--vanilla", "--benchmarks", "steps")
    (found,) = scored(world / "out" / "rm" / "steps" / "greedy" / "output-greedy.jsonl")
    assert found["generated_solution"] == "Step 1: a\nStep 2: b" and found["is_correct"] is False
    assert found["first_error_step"] == 2


def test_greedy_file_is_not_among_the_samples(world):
    files = find_completions(str(world / "data"), ["gsm8k"])
    assert [(file.kind, file.name) for file in files] == [
        ("greedy", "output-greedy"),
        *[("all", f"output-rs{k}") for k in range(3)],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--benchmarks", "absent"], "absent: expected output-greedy.jsonl"),
        (["--goal_state_path", "nowhere"], "--vanilla scores without a goal state"),
        (["--filter_threshold", "7"], r"threshold in \[-1, 1\]"),
        (["--batch_tokens", "0"], "--batch_tokens"),
        (["--completions_data_path", "nowhere"], "nowhere, found nothing"),
        (["--reward_model_path", "./nowhere"], "expected a reward model checkpoint at ./nowhere"),
    ],
)
def test_mistakes_end_with_one_clear_error_before_the_model_loads(world, words, message, capsys, monkeypatch):
    refuse_loading(monkeypatch)
    with pytest.raises(SystemExit) as end:
        evaluate(world, "--vanilla", *words)
    assert end.value.code == 1
    (error,) = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error:")]
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--percentiles", "50", "150"], r"percentage in \(0, 100\], got 150"),
        (["--max_samples", "3"], "--max_samples goes with --preferences"),
        (["--benchmarks", "../data/gsm8k"], "--benchmarks: expected folders or files under"),
        (["--benchmarks", "."], "--benchmarks: expected folders or files under"),
        (["--benchmarks", "gsm8k", "gsm8k/"], "there twice"),
    ],
)
def test_mistakes_of_names_and_late_settings_are_found_early(world, words, message, capsys, monkeypatch):
    refuse_loading(monkeypatch)
    with pytest.raises(SystemExit):
        evaluate(world, "--vanilla", *words)
    assert re.search(message, capsys.readouterr().err)


def test_absolute_benchmark_writes_nothing_into_the_data(world, capsys):
    before = sorted((world / "data").rglob("*"))
    with pytest.raises(SystemExit):
        evaluate(world, "--vanilla", "--benchmarks", str(world / "data" / "gsm8k"))
    assert "--benchmarks: expected folders or files under" in capsys.readouterr().err
    assert sorted((world / "data").rglob("*")) == before


def test_folder_of_one_benchmark_is_read_and_hidden_ones_are_not(world, caplog):
    names = [(file.benchmark, file.kind, file.name) for file in find_completions(str(world / "data"), ["gsm8k"])]
    assert [(one.benchmark, one.kind, one.name) for one in find_completions(str(world / "data" / "gsm8k"))] == names
    (world / "data" / "gsm8k").rename(world / "data" / ".checkpoints")
    write(world / "data" / "beside.jsonl", [completion(1, "7")])
    assert {file.benchmark for file in find_completions(str(world / "data"))} == {"svamp"}
    assert "only folders are read, not beside.jsonl" in caplog.text


def test_model_named_by_a_detour_writes_into_its_own_folder(world):
    assert evaluate(world, "--vanilla", "--reward_model_path", f"{world / 'rm'}/.")
    assert not (world / "out" / "gsm8k").exists() and (world / "out" / "rm" / "gsm8k").is_dir()


def test_two_runs_into_one_folder_are_refused(world, capsys):
    with hold_lock(world / "out" / "rm"), pytest.raises(SystemExit):
        evaluate(world, "--vanilla")
    assert "another run" in capsys.readouterr().err
    assert not list((world / "out").rglob("*.jsonl"))


def test_files_added_later_keep_what_is_scored(world):
    evaluate(world, "--vanilla", "--benchmarks", "gsm8k")
    rows = [completion(k, "it is 7", sample=4) for k in range(6)]
    for sample in (3, 4):  # their sample numbers clash, so that all are counted anew
        write(world / "data" / "gsm8k" / f"output-rs{sample}.jsonl", rows)
    write(world / "data" / "gsm8k" / "output-rs-1.jsonl", rows)  # comes first
    evaluate(world, "--vanilla", "--benchmarks", "gsm8k")
    folder = world / "out" / "rm" / "gsm8k" / "all"
    samples = [json.loads(line)["sample"] for path in folder.glob("*.jsonl") for line in path.open()]
    assert sorted(samples) == sorted(list(range(6)) * 6)


def test_numbers_that_json_lacks_do_not_end_scoring(world):
    path = world / "data" / "svamp" / "output-greedy.jsonl"
    path.write_text(json.dumps(completion(1, "7", logprob=float("nan"), more=[{"x": float("inf")}])) + "\n")
    evaluate(world, "--vanilla", "--benchmarks", "svamp")
    (row,) = map(json.loads, (world / "out" / "rm" / "svamp" / "greedy" / "output-greedy.jsonl").open())
    assert row["logprob"] is None and row["more"] == [{"x": None}] and row["reward"] is not None


def test_dynamic_positions_beyond_their_length_are_refused(world, capsys):
    config = json.loads((world / "rm" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config["max_position_embeddings"] = 60
    (world / "rm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        evaluate(world, "--vanilla")
    assert "pass --max_len 60" in capsys.readouterr().err
    evaluate(world, "--vanilla", "--max_len", "60")


def test_bad_line_and_foreign_goal_are_found_before_the_model_loads(world, capsys, monkeypatch):
    goal_of(world)
    refuse_loading(monkeypatch)
    with open(world / "data" / "svamp" / "output-greedy.jsonl", "a") as file:
        file.write('{"question": "cut')
    with pytest.raises(SystemExit):
        evaluate(world, "--vanilla")
    assert "output-greedy.jsonl:2: not valid JSON" in capsys.readouterr().err
    checkpoint(world / "new" / "rm", seed=1)
    with pytest.raises(SystemExit):
        evaluate(world, "--goal_state_path", str(world / "goal"), "--reward_model_path", str(world / "new" / "rm"))
    assert "run get_representation with this reward model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate(world, "--goal_state_path", str(world / "goal"), "--input_template", "nemo")
    assert "made with template 'plain'" in capsys.readouterr().err


def test_checkpoint_without_template_asks_for_one(world, capsys):
    checkpoint(world / "bare" / "rm", template=None)
    with pytest.raises(SystemExit):
        evaluate(world, "--vanilla", "--reward_model_path", str(world / "bare" / "rm"))
    assert "pass --input_template" in capsys.readouterr().err
    assert evaluate(world, "--vanilla", "--reward_model_path", str(world / "bare" / "rm"), "--input_template", "plain")


def test_metrics_refuses_rows_that_are_not_scored(world, capsys):
    with pytest.raises(SystemExit):
        metrics.main(["--scored_path", str(world / "data" / "svamp")])
    assert "output-greedy.jsonl:1: expected a row scored by eval_rm" in capsys.readouterr().err


def prefer(world, *more):
    words = ["--preferences", str(world / "pairs.jsonl"), "--reward_model_path", str(world / "rm")]
    eval_rm.main([*words, "--save_dir", str(world / "out"), "--bootstrap", "20", *more])
    return json.loads((world / "out" / "rm" / "summary.json").read_text())


def test_completions_and_preferences_of_one_model_keep_each_others_figures(world, capsys):
    preferences = prefer(world)["preferences"]
    assert list(preferences["sets"]) == ["pairs"]
    with pytest.raises(SystemExit):
        metrics.main(["--scored_path", str(world / "out" / "rm")])
    assert "holds scored preference sets and no completions" in capsys.readouterr().err
    goal_of(world)
    completions = evaluate(world, "--goal_state_path", str(world / "goal"))
    assert completions["preferences"] == preferences and completions["goal_state"]
    after = prefer(world)  # without a goal state, as its own rows say
    assert {name: after[name] for name in ("files", "sets", "goal_state")} == {
        name: completions[name] for name in ("files", "sets", "goal_state")
    }
    assert after["preferences"]["goal_state"] is None
    metrics.main(["--scored_path", str(world / "out" / "rm"), "--bootstrap", "20", "--json", str(world / "m.json")])
    figures = json.loads((world / "m.json").read_text())["models"]["rm"]
    assert figures["sets"] == completions["sets"] and figures["model"]["goal_state"] == completions["goal_state"]
    (world / "out" / "rm" / "summary.json").write_text("{")
    assert prefer(world)["files"] == []  # metrics reads all files then


def test_figures_of_another_model_in_the_folder_are_not_kept(world):
    evaluate(world, "--vanilla")
    checkpoint(world / "other" / "rm", seed=1)
    summary = prefer(world, "--reward_model_path", str(world / "other" / "rm"))
    assert (summary["files"], summary["sets"]) == ([], {})


def test_preferences_of_two_models_are_compared_in_a_file(world):
    checkpoint(world / "other" / "second", seed=1)
    prefer(world, "--reward_model_path", str(world / "rm"), str(world / "other" / "second"))
    (record,) = json.loads((world / "out" / "preference_comparisons.json").read_text())
    assert (record["a_label"], record["b_label"], record["set"], record["pairs"]) == ("rm", "second", "pairs", 8)
    accuracy = {
        name: json.loads((world / "out" / name / "summary.json").read_text())["preferences"]["sets"]["pairs"]
        for name in ("rm", "second")
    }
    a, b = (accuracy[name]["accuracy"]["reward"][0] for name in ("rm", "second"))
    assert record["difference"] == pytest.approx(a - b, abs=1e-12)


def test_sharing_of_prompts_and_goals_per_question_reach_the_preferences(world, monkeypatch, caplog):
    asked = []

    def scorer(*arguments, **options):
        asked.append((*arguments, options))
        return Scorer(*arguments, **options)

    monkeypatch.setattr("openrlhf.cli.eval_preferences.Scorer", scorer)
    goal_of(world, per_question="true")
    prefer(world, "--goal_state_path", str(world / "goal"), "--share_prompts", "off")
    assert asked[0][-2:] == (False, {"last_only": True})
    assert "goals of single questions do not fit preference sets" in caplog.text
    assert prefer(world)["preferences"]["goal_state"] is None and asked[1][-2] is True


def refuse_loading(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("openrlhf.cli.reward_checkpoint.load_reward_model", refuse)


def test_a_failed_run_says_so_in_its_manifest(world, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("broken off")

    monkeypatch.setattr("openrlhf.evaluation.scored_files.score_jobs", fail)
    with pytest.raises(SystemExit):
        evaluate(world, "--vanilla")
    assert "error: broken off" in capsys.readouterr().err
    assert json.loads((world / "out" / "rm" / "manifest.json").read_text())["status"] == "failed: RuntimeError"
