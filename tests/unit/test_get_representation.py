"""The goal state command: its inputs, its resume, and its errors."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import threading

import numpy as np
import pytest
import torch

from openrlhf.cli import get_representation
from openrlhf.cli.reward_checkpoint import RewardCheckpoint
from openrlhf.datasets.attributes import attribute_columns, rated_at_least
from openrlhf.evaluation import goal_accumulator
from openrlhf.evaluation.goal_state import GoalState, QuestionGoals, load_goal
from openrlhf.models.pretrained import checkpoint_fingerprint, save_reward_model
from tests.tiny import tiny_reward_model, tiny_tokenizer
from tests.unit.test_goal_state import run_ranks

RATINGS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "rm"
    folder.mkdir()
    settings = {"template": "plain", "max_len": 100, "apply_chat_template": False}
    save_reward_model(folder, tiny_reward_model(), tiny_tokenizer(), settings=settings)
    return folder


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rated_rows(count: int = 12) -> list[dict]:
    """Row k: helpfulness k % 5, correctness k % 3 + 2, coherence 4, complexity 1, verbosity k % 2 + 2."""
    return [
        {"prompt": f"what is {k} ?", "response": f"the answer is {k}"}
        | dict(zip(RATINGS, (k % 5, k % 3 + 2, 4, 1, k % 2 + 2), strict=True))
        for k in range(count)
    ]


def make(model_folder, dataset, folder, *more) -> list:
    """Run the command as its main function would."""
    words = ["--dataset", dataset, "--reward_model", model_folder, "--save_dir", folder, *more]
    config = get_representation.parse_config(get_representation.RepresentationConfig, [str(word) for word in words])
    return get_representation.run(config)


def state_of(question: str, response: str, max_len: int = 100) -> np.ndarray:
    """(H,) last state of one response, from ids put together here."""
    encode = tiny_tokenizer()
    prompt = encode(f"{question}\n", add_special_tokens=False)["input_ids"]
    ids = (prompt + encode(response, add_special_tokens=False)["input_ids"])[: max_len - 1] + [2]
    with torch.no_grad():
        ids = torch.tensor([ids])
        return tiny_reward_model()(ids, torch.ones_like(ids).bool()).hidden_states[0, -1].numpy()


def mean_state(pairs) -> np.ndarray:
    return np.mean([state_of(*pair) for pair in pairs], axis=0)


def fail(capsys, words) -> str:
    """The error line of the command."""
    with pytest.raises(SystemExit) as end:
        get_representation.main([str(word) for word in words])
    assert end.value.code == 1
    (error,) = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error:")]
    return error


def refuse_loading(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("openrlhf.cli.reward_checkpoint.load_reward_model", refuse)


def test_attributes_are_made_in_one_pass_and_equal_separate_runs(model_folder, tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "rated.jsonl", rated_rows())
    read = []
    load = RewardCheckpoint.load

    def counting_load(self, *arguments):
        model, tokenizer = load(self, *arguments)
        forward = model.forward
        model.forward = lambda ids, mask: (read.append(len(ids)), forward(ids, mask))[1]
        return model, tokenizer

    monkeypatch.setattr(RewardCheckpoint, "load", counting_load)
    names = ["helpfulness", "correctness", "all_categories_good"]
    together = make(model_folder, data, tmp_path / "g", "--attribute", *names, "--min_value", 3)
    wanted = {
        "helpfulness": [k for k in range(12) if k % 5 >= 3],
        "correctness": [k for k in range(12) if k % 3 >= 1],
    }
    wanted["all_categories_good"] = [k for k in wanted["helpfulness"] if k in wanted["correctness"]]
    assert sum(read) == len(set(wanted["helpfulness"]) | set(wanted["correctness"]))  # each response once
    assert "goal state 'helpfulness' of 4 chosen responses, shape [1, 32]" in capsys.readouterr().out
    for goal, name in zip(together, names, strict=True):
        expected = mean_state((f"what is {k} ?", f"the answer is {k}") for k in wanted[name])
        np.testing.assert_allclose(goal.vector[0], expected, atol=1e-6)
        loaded = load_goal(tmp_path / "g" / name)
        assert (loaded.count, loaded.attribute, loaded.min_value) == (len(wanted[name]), name, 3.0)
        assert loaded.counts["read"] == 12 and loaded.counts["below_min_value"] == 12 - len(wanted[name])
        more = names[:2] if name == "all_categories_good" else []
        (alone, *_) = make(model_folder, data, tmp_path / f"alone-{name}", "--attribute", name, *more)
        np.testing.assert_allclose(alone.vector, goal.vector, atol=1e-6)
        assert alone.dataset_fingerprint == goal.dataset_fingerprint
    assert together[2].columns == ["helpfulness", "correctness"]


def test_all_categories_good_alone_takes_every_helpsteer_column(model_folder, tmp_path):
    data = write(tmp_path / "rated.jsonl", rated_rows())
    (goal,) = make(model_folder, data, tmp_path / "g", "--attribute", "all_categories_good", "--min_value", 1)
    assert goal.columns == list(RATINGS) and goal.count == sum(k % 5 >= 1 for k in range(12))
    assert attribute_columns(["all_categories_good"], ["prompt", "verbosity"]) == {"all_categories_good": ["verbosity"]}


def test_rated_rows_may_be_text_and_have_other_columns_and_gaps(model_folder, tmp_path):
    rows = [
        ("q1", "good one", "3"),
        ("q2", "bad one", "2.5"),
        ("q3", "", "4"),
        ("q4", "no rating", ""),
        ("q5", "x", "4.0"),
    ]
    with open(tmp_path / "rated.csv", "w", newline="") as file:
        csv.writer(file).writerows([("ask", "text", "quality"), *rows])
    (goal,) = make(
        model_folder, tmp_path / "rated.csv", tmp_path / "g", "--attribute", "quality",
        "--prompt_key", "ask", "--response_key", "text",
    )  # fmt: skip
    np.testing.assert_allclose(goal.vector[0], mean_state([("q1", "good one"), ("q5", "x")]), atol=1e-6)
    assert {key: goal.counts[key] for key in ("read", "below_min_value", "missing_or_empty")} == {
        "read": 5, "below_min_value": 2, "missing_or_empty": 1,
    }  # fmt: skip


def test_message_prompts_of_rated_rows_need_the_chat_template(model_folder, tmp_path, capsys):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "response": "yes", "quality": 4}]
    data = write(tmp_path / "rated.jsonl", rows)
    words = ["--dataset", data, "--reward_model", model_folder, "--save_dir", tmp_path / "g", "--attribute", "quality"]
    assert re.search("row 0: .*--apply_chat_template", fail(capsys, words))
    (goal,) = make(model_folder, data, tmp_path / "g", "--attribute", "quality", "--apply_chat_template")
    assert goal.count == 1 and goal.apply_chat_template


COMPLETIONS = [
    {"question": "q1", "generated_solution": "the answer is 1", "is_correct": True},
    {"question": "q2", "generated_solution": "the answer is 2", "is_correct": False},
    {"question": "q1", "generated_solution": "good answer", "is_correct": True},
    {"question": "q3", "generated_solution": "she has 3", "is_correct": True, "model": "m"},
    {"question": "q3", "generated_solution": "maybe", "is_correct": None},
    {"question": "q4", "generated_solution": " ", "is_correct": True},
    {"question": "q4", "generated_solution": "yes " * 200, "is_correct": True},
    {"question": "yes " * 200, "generated_solution": "no room", "is_correct": True},
]


def test_correct_completions_are_the_chosen_responses(model_folder, tmp_path, capsys):
    data = write(tmp_path / "completions.jsonl", COMPLETIONS)
    (goal,) = make(model_folder, data, tmp_path / "g")
    kept = [("q1", "the answer is 1"), ("q1", "good answer"), ("q3", "she has 3"), ("q4", "yes " * 200)]
    np.testing.assert_allclose(goal.vector[0], mean_state(kept), atol=1e-6)
    assert goal.counts == {
        "truncated": 1, "prompt_too_long": 1, "read": 8, "wrong": 1, "without_label": 1, "empty_response": 1,
    }  # fmt: skip
    assert "truncated 1, prompt_too_long 1, read 8, wrong 1" in capsys.readouterr().out


def test_old_field_names_and_folders_without_the_greedy_file(model_folder, tmp_path):
    old = [{"problem": "q1", "generation": "the answer is 1", "is_correct": True}]
    write(tmp_path / "gsm8k" / "output-rs0.jsonl", old)
    write(tmp_path / "gsm8k" / "output-rs1.jsonl", [COMPLETIONS[3]])
    write(tmp_path / "gsm8k" / "output-greedy.jsonl", [COMPLETIONS[2]])
    (goal,) = make(model_folder, tmp_path / "gsm8k", tmp_path / "g")
    expected = mean_state([("q1", "the answer is 1"), ("q3", "she has 3")])
    np.testing.assert_allclose(goal.vector[0], expected, atol=1e-6)


def test_goals_per_question_of_completions_and_of_pairs(model_folder, tmp_path, capsys):
    data = write(tmp_path / "completions.jsonl", COMPLETIONS)
    (goals,) = make(model_folder, data, tmp_path / "g", "--per_question")
    assert isinstance(load_goal(tmp_path / "g"), QuestionGoals)
    assert goals.questions == ("q1", "q3", "q4") and goals.question_counts == (2, 1, 1)
    np.testing.assert_allclose(
        goals.goal_of("q1")[0], mean_state([("q1", "the answer is 1"), ("q1", "good answer")]), atol=1e-6
    )
    np.testing.assert_allclose(goals.goal_of("q3")[0], state_of("q3", "she has 3"), atol=1e-6)
    assert goals.counts["questions_without_goal"] == 1  # the question that leaves no room
    assert "goals of 3 questions from 4 chosen responses, shape [3, 32]" in capsys.readouterr().out

    pairs = [
        {"question": "q1", "correct": "good", "incorrect": "bad"},
        {"question": "q2", "correct": "yes", "incorrect": "no"},
        {"question": "q1", "correct": "plus", "incorrect": "bad"},
        {"question": "q5", "correct": "same", "incorrect": "same"},
    ]
    (goals,) = make(model_folder, write(tmp_path / "pairs.jsonl", pairs), tmp_path / "p", "--per_question")
    assert goals.questions == ("q1", "q2") and goals.counts["identical"] == 1
    np.testing.assert_allclose(goals.goal_of("q1")[0], mean_state([("q1", "good"), ("q1", "plus")]), atol=1e-6)


def test_a_killed_run_goes_on_with_what_it_has_summed(model_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("openrlhf.evaluation.batching.WINDOW_BATCHES", 1)
    data = write(tmp_path / "rated.jsonl", rated_rows(40))
    names = ["--attribute", "helpfulness", "correctness", "--batch_tokens", "32"]
    whole = make(model_folder, data, tmp_path / "whole", *names)
    save, windows = goal_accumulator.save_sums, []

    def stop_after_three(path, sums, identity):
        save(path, sums, identity)
        windows.append(sums.position)
        if len(windows) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(goal_accumulator, "save_sums", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        make(model_folder, data, tmp_path / "g", *names)
    assert not list((tmp_path / "g").glob("*/goal_state.npy"))
    with caplog.at_level("INFO"):
        again = make(model_folder, data, tmp_path / "g", *names)
    assert f"going on after {windows[2]} of" in caplog.text and windows[3] > windows[2]
    for one, other in zip(again, whole, strict=True):
        np.testing.assert_array_equal(one.vector, other.vector)
        assert one.counts == other.counts and one.mean_pairwise_cosine == other.mean_pairwise_cosine
    assert not (tmp_path / "g" / "goal_state.partial.npz").exists()


def test_a_run_killed_while_it_writes_its_goal_states_goes_on(model_folder, tmp_path, monkeypatch):
    data = write(tmp_path / "rated.jsonl", rated_rows())
    names = ["--attribute", "helpfulness", "correctness"]
    written = []
    save = GoalState.save

    def save_one(self, folder):
        if written:
            raise KeyboardInterrupt
        written.append(folder)
        return save(self, folder)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GoalState, "save", save_one)
        make(model_folder, data, tmp_path / "g", *names)
    assert [goal.count for goal in make(model_folder, data, tmp_path / "g", *names)] == [4, 8]


def test_unfinished_sums_of_other_inputs_are_refused(model_folder, tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "completions.jsonl", COMPLETIONS)
    words = ["--dataset", data, "--reward_model", model_folder, "--save_dir", tmp_path / "g"]

    def stop(*_):
        raise ValueError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(get_representation, "_save", stop)
        fail(capsys, words)
    for more, named in [
        (["--max_len", "50"], "max_len 100 against 50"),
        (["--input_template", "nemo"], "template 'plain' against 'nemo'"),
        (["--max_samples", "5"], "dataset_fingerprint"),
        (["--bf16"], "dtype 'float32' against 'bfloat16'"),
        (["--per_question"], "per_question False against True"),
    ]:
        error = fail(capsys, [*words, *more])
        assert "unfinished sums, of other inputs" in error and named in error and "--overwrite" in error
    (goal,) = make(model_folder, data, tmp_path / "g", "--max_len", 50, "--overwrite")
    assert goal.max_len == 50


def test_a_finished_goal_state_is_kept_or_refused_unless_overwritten(model_folder, tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "rated.jsonl", rated_rows())
    (first,) = make(model_folder, data, tmp_path / "g", "--attribute", "helpfulness")
    with monkeypatch.context() as patch:
        refuse_loading(patch)
        (again,) = make(model_folder, data, tmp_path / "g", "--attribute", "helpfulness")
        assert again.digest == first.digest and "was there already" in capsys.readouterr().out
        words = ["--dataset", data, "--reward_model", model_folder, "--save_dir", tmp_path / "g"]
        error = fail(capsys, [*words, "--attribute", "helpfulness", "--min_value", "4"])
        assert "is there already, of other inputs (min_value 3.0 against 4.0)" in error
    both = make(model_folder, data, tmp_path / "g", "--attribute", "helpfulness", "correctness")  # one more: it alone
    assert [goal.count for goal in both] == [4, 8]
    expected = mean_state((f"what is {k} ?", f"the answer is {k}") for k in range(12) if k % 3 >= 1)
    np.testing.assert_allclose(both[1].vector[0], expected, atol=1e-6)
    (new,) = make(model_folder, data, tmp_path / "g", "--attribute", "helpfulness", "--min_value", 4, "--overwrite")
    assert new.count == 2
    assert new.checkpoint == checkpoint_fingerprint(model_folder) and new.checkpoint_name == str(model_folder)


def make_with_ranks(monkeypatch, world_size: int, *arguments) -> list:
    """Results, or errors, of the command in several ranks."""
    here = {}
    monkeypatch.setattr("openrlhf.cli.common.start_ranks", lambda: contextlib.nullcontext(here[threading.get_ident()]))

    def work(ranks):
        here[threading.get_ident()] = ranks
        return make(*arguments)

    return run_ranks(world_size, work)


@pytest.mark.parametrize("more", [["--attribute", "helpfulness", "correctness"], []])
def test_two_processes_give_what_one_gives(model_folder, tmp_path, monkeypatch, more):
    monkeypatch.setattr("openrlhf.evaluation.batching.WINDOW_BATCHES", 1)
    pairs = [{"question": f"q{k}", "correct": f"the answer is {k}", "incorrect": "bad"} for k in range(20)]
    data = write(tmp_path / "data.jsonl", rated_rows(20) if more else pairs)
    alone = make(model_folder, data, tmp_path / "one", *more, "--batch_tokens", 32)
    words = [model_folder, data, tmp_path / "two", *more, "--batch_tokens", 32]
    for results in make_with_ranks(monkeypatch, 2, *words):
        for one, other in zip(results, alone, strict=True):
            np.testing.assert_allclose(one.vector, other.vector, atol=1e-6)
            assert one.counts == other.counts


def test_an_error_of_the_main_process_ends_the_others(model_folder, tmp_path, monkeypatch):
    data = write(tmp_path / "data.jsonl", [{"question": "q", "generated_solution": "x"}])
    first, second = make_with_ranks(monkeypatch, 2, model_folder, data, tmp_path / "g")
    assert "without the column is_correct" in str(first)
    assert str(second).startswith("stopped by the main process: completions without")


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ("rated", ["--attribute", "humour"], r"--attribute humour: no such column; the columns are \['prompt', "),
        ("rated", ["--attribute", "helpfulness", "helpfulness"], "different names"),
        ("rated", ["--attribute", "complexity"], "none of 12 rows is at or above --min_value 3 .*complexity: 1 in 12"),
        ("rated", ["--attribute", "all_categories_good"], "none of 12 rows .*helpfulness: 0 in 3, 1 in 3.*complexity"),
        ("rated", ["--attribute", "helpfulness", "--prompt_key", "ask"], "columns 'ask' and 'response'.*missing"),
        ("rated", [], "name what makes them good with --attribute"),
        ("rated", ["--min_value", "2"], "--min_value goes with --attribute"),
        ("rated", ["--attribute", "helpfulness", "--per_question"], "exclude each other"),
        ("rated", ["--attribute", "helpfulness", "--min_value", "nan"], "--min_value: expected a number"),
        ("unlabelled", [], r"completions without the column is_correct \(got \['question', 'generated_solution'\]\)"),
        ("wrong", [], r"at least one chosen response .* got none of 1 \(wrong 1\)"),
        ("bad label", [], "row 0: is_correct: expected true, false or null, got 'perhaps'"),
        ("word", ["--attribute", "quality"], "row 1: expected a number under 'quality', got 'good'"),
        ("hh", ["--per_question"], "the format hh has no column of questions"),
        ("rated", ["--batch_tokens", "0", "--attribute", "helpfulness"], "--batch_tokens"),
        ("hh", ["--max_len", "0"], "--max_len: expected 1 or more, got 0"),
        ("hh", ["--input_template", "plain", "--apply_chat_template"], "exclude each other"),
        ("rated", ["--attribute", ".."], "no folder of --save_dir"),
    ],
)
def test_mistakes_end_with_one_clear_error_before_the_model_loads(
    model_folder, tmp_path, monkeypatch, capsys, rows, words, message
):
    refuse_loading(monkeypatch)
    data = {
        "rated": rated_rows(),
        "unlabelled": [{"question": "q", "generated_solution": "x"}],
        "wrong": [COMPLETIONS[1]],
        "bad label": [{"question": "q", "generated_solution": "x", "is_correct": "perhaps"}],
        "word": [{"prompt": "q", "response": "x", "quality": value} for value in ("3", "good")],
        "hh": [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}],
    }
    file = write(tmp_path / "data.jsonl", data[rows])
    given = ["--dataset", file, "--reward_model", model_folder, "--save_dir", tmp_path / "g", *words]
    assert re.search(message, fail(capsys, given))
    assert not list(tmp_path.rglob("goal_state*"))


def test_a_goal_of_which_nothing_fits_is_named_after_the_others_are_kept(model_folder, tmp_path, capsys):
    rows = [
        {"prompt": "q1", "response": "short", "good": 4, "other": 0},
        {"prompt": "yes " * 200, "response": "no room", "good": 0, "other": 4},
    ]
    data = write(tmp_path / "rated.jsonl", rows)
    words = ["--dataset", data, "--reward_model", model_folder, "--save_dir", tmp_path / "g"]
    assert "other: expected at least one" in (error := fail(capsys, [*words, "--attribute", "other", "good"]))
    assert "of 1 none fits behind its prompt" in error
    assert load_goal(tmp_path / "g" / "good").count == 1 and not (tmp_path / "g" / "other").exists()
    assert json.loads((tmp_path / "g" / "manifest.json").read_text())["status"] == "failed"


def test_rated_at_least_equals_a_loop():
    generator = np.random.default_rng(0)
    ratings = {name: generator.integers(0, 5, 50).astype(float) for name in RATINGS}
    ratings["verbosity"][::7] = np.nan
    for columns in (["helpfulness"], list(RATINGS[:2]), ["verbosity", "coherence"]):
        expected = [all(ratings[name][row] >= 2 for name in columns) for row in range(50)]
        assert rated_at_least(ratings, "x", columns, 2).tolist() == expected


def test_real_solutions_give_a_goal_per_question(shared_data, model_folder, tmp_path):
    file = shared_data / "gsm8k_solutions" / "validation.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    (goals,) = make(model_folder, file, tmp_path / "g", "--per_question", "--max_len", 128)
    fitting = set(goals.questions)
    correct = [row for row in rows if row["is_correct"]]
    assert fitting <= {row["question"] for row in correct} and goals.counts["read"] == len(rows) == 500
    assert goals.count + goals.counts["prompt_too_long"] == len(correct) == 158  # 0.316 of 500
