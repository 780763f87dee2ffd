"""generate.py on tiny models, from questions to files that eval_rm, metrics and the report read; killed and resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from decoding import generate
from decoding.config import DecodingConfig
from decoding.output import OutputFolder
from openrlhf.cli import eval_rm, metrics
from openrlhf.cli.common import resolve_pocket_model
from openrlhf.cli.parser import parse_config
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.models.policy import Policy
from openrlhf.models.pretrained import checkpoint_fingerprint, load_tokenizer, save_reward_model
from tests.tiny import save_tiny_causal_lm, tiny_reward_model, tiny_tokenizer

METHODS = "greedy sample majority weighted weighted_goal best_of_n best_of_n_goal beam filtered_vote".split()
SMALL = "--max_tokens 10 --beam_size 2 --n_samples 2 --step_boundary tokens:4 --pool_samples 3 --check_every 4".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A policy, a reward model, two goal states of it and one of another model, and a file of questions."""
    folder = tmp_path_factory.mktemp("decoding")
    save_tiny_causal_lm(folder / "lm")
    settings = {"template": "plain", "max_len": 128, "apply_chat_template": False}
    for name, seed in (("rm", 0), ("other", 1)):
        (folder / name).mkdir()
        save_reward_model(folder / name, tiny_reward_model(seed=seed), tiny_tokenizer(), settings=settings)
    random = np.random.default_rng(0)
    for name, owner in (("goal", "rm"), ("goal2", "rm"), ("foreign", "other")):
        vector = random.normal(size=(1, 32)).astype(np.float32)
        fingerprint = checkpoint_fingerprint(folder / owner)
        GoalState(vector, 1, 1.0, "plain", False, 128, fingerprint, "data").save(folder / name)
    rows = [{"question": f"how many apples is {k} ?", "expected_answer": str(k)} for k in range(6)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def words(world, out, *more, goals=("goal",), data=("--dt_name", "custom")):
    models = ["--model_name", world / "lm", "--reward_model_path", world / "rm"]
    models += ["--goal_state_path", *(world / goal for goal in goals)] if goals else []
    files = ["--input_file", world / "q.jsonl", "--output_dir", out]
    return [str(word) for word in [*data, *files, *models, *SMALL, *more]]


def run(world, out, *more, **settings):
    return generate.run(parse_config(DecodingConfig, words(world, out, *more, **settings)))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_of(out):
    """Rows without times and scores, which other batches round differently; traces come in any order."""
    free = {"seconds", "reward_seconds", "score", "reward", "partial_rewards", "cosine_sim"}
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.jsonl") if path.name != "traces.jsonl")
    return {name: [{k: v for k, v in row.items() if k not in free} for row in lines(out / name)] for name in files}


def assert_same(found, expected):
    """Equal rows, and scores equal up to rounding."""
    assert rows_of(found) == rows_of(expected)
    for name in rows_of(expected):
        for ours, theirs in zip(lines(found / name), lines(expected / name), strict=True):
            for key in {"score", "partial_rewards", "cosine_sim"} & set(theirs):
                np.testing.assert_allclose(np.array(ours[key], float), np.array(theirs[key], float), atol=1e-4)


@pytest.fixture(scope="module")
def whole(world):
    """A folder with all methods and two seeds."""
    out = world / "whole"
    more = ["--methods", *METHODS, "--threshold", "-1", "--seeds", "0", "1", "--trace", "--report", out / "r.html"]
    table = run(world, out, *map(str, more))
    return out, table


def test_every_method_answers_every_question_with_every_seed(whole):
    out, table = whole
    answers = lines(out / "answers.jsonl")
    runs = {(row["method"], row["seed"]) for row in answers}
    assert runs == {(method, seed) for method in METHODS for seed in (0, 1)} - {("greedy", 1)}
    assert all(
        sorted(row["index"] for row in answers if (row["method"], row["seed"]) == one) == list(range(6)) for one in runs
    )
    assert [line.split()[0] for line in table.splitlines()[2:-1]] == METHODS
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["command"], manifest["status"], manifest["questions"]) == ("generate", "finished", 6)
    samples = lines(out / "sample" / "output-seed0.jsonl")
    assert [(row["index"], row["sample"]) for row in samples] == [(k, s) for k in range(6) for s in range(3)]
    for row in answers:
        if row["method"] == "sample":
            drawn = [one["policy_tokens"] for one in samples if one["index"] == row["index"] and row["seed"] == 0]
            assert row["is_correct"] is None and (row["seed"] or row["policy_tokens"] == sum(drawn))


def test_greedy_is_the_policys_own_greedy_decoding(world, whole):
    rows = lines(whole[0] / "greedy" / "output-seed0.jsonl")
    prompts = [f"<|user|>\n{row['question']}</s>\n<|assistant|>\n" for row in rows]
    expected = Policy.from_pretrained(world / "lm").generate(prompts, temperature=0, max_new_tokens=10)
    assert [row["generated_solution"] for row in rows] == [text for (text,) in expected]


def test_live_voting_without_an_effect_draws_the_samples_of_the_plain_vote(whole):
    """At threshold -1 nothing can be stopped, since a cosine is never below it."""
    out, _ = whole
    for seed in (0, 1):
        plain, live = (lines(out / name / f"output-seed{seed}.jsonl") for name in ("sample", "filtered_vote"))
        assert [row["generated_solution"] for row in plain] == [row["generated_solution"] for row in live]
    written = lines(out / "answers.jsonl")
    assert {row["threshold"] for row in written if row["method"] == "filtered_vote"} == {-1.0}
    answers = {(row["method"], row["seed"], row["index"]): row["answer"] for row in written}
    voted = {key[1:]: answer for key, answer in answers.items() if key[0] == "majority"}
    assert voted == {key[1:]: answer for key, answer in answers.items() if key[0] == "filtered_vote"}


def test_eval_rm_and_metrics_read_the_responses(world, tmp_path, capsys):
    """The pocket policy with a random reward model of its tokenizer; eval_rm finds the scores that were written."""
    tokenizer = load_tokenizer(resolve_pocket_model("pocket"))
    settings = {"template": "pocket", "max_len": 128, "apply_chat_template": False}
    (tmp_path / "rm").mkdir()
    save_reward_model(tmp_path / "rm", tiny_reward_model(tokenizer=tokenizer), tokenizer, settings=settings)
    fingerprint = checkpoint_fingerprint(tmp_path / "rm")
    GoalState(np.ones((1, 32), np.float32), 1, 1.0, "pocket", False, 128, fingerprint, "data").save(tmp_path / "goal")
    models = ["--reward_model_path", tmp_path / "rm", "--goal_state_path", tmp_path / "goal"]
    argv = ["--input_file", "test:4", *models, "--methods", "greedy", "sample", "best_of_n", "beam", "filtered_vote"]
    argv += ["--threshold", "-1", "--max_tokens", "60", "--beam_size", "2", "--n_samples", "2", "--seeds", "0", "1"]
    generate.main([str(word) for word in [*argv, "--output_dir", tmp_path / "out"]])
    argv = ["--completions_data_path", tmp_path / "out", "--save_dir", tmp_path / "scores", "--bootstrap", "10"]
    eval_rm.main([str(word) for word in [*argv, *models]])
    files = sorted((tmp_path / "out").glob("*/output-*.jsonl"))
    assert len(files) == 9  # four methods with two seeds, and greedy
    for file in files:
        scored = lines(tmp_path / "scores" / "rm" / file.parent.name / "all" / file.name)
        for ours, theirs in zip(lines(file), scored, strict=True):
            np.testing.assert_allclose(ours["partial_rewards"], theirs["partial_rewards"], atol=1e-5)
            np.testing.assert_allclose(ours["cosine_sim"], theirs["cosine_sim"], atol=1e-5)
            assert ours["is_correct"] == theirs["is_correct"]
    capsys.readouterr()
    metrics.main(["--scored_path", str(tmp_path / "out" / "sample"), "--bootstrap", "10"])
    assert "majority vote" in capsys.readouterr().out


def test_the_comparison_reads_the_folder(whole):
    from decoding.comparison_files import read_comparison

    comparison = read_comparison({"": whole[0]})
    assert [one.method for one in comparison.methods if one.method == "beam"] and len(comparison.questions) == 6


def test_traces_and_the_report_end_in_the_answer(whole):
    from decoding.trace_report import answer_path

    out, _ = whole
    traces = lines(out / "traces.jsonl")
    assert len(traces) == 2 * 2 * 6  # beam and filtered_vote, two seeds, six questions
    for row in traces:
        if row["method"] != "beam":
            continue
        texts = {one["id"]: one["text"] for step in row["trace"] for one in step["candidates"]}
        path = "".join(texts[number] for number in answer_path(row["trace"]))
        # A step of a random policy may end within a character.
        assert path.replace("\ufffd", "") == row["response"].replace("\ufffd", "")
    assert "24 of 24 searches shown" in (out / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("writes", [1, 8, 20])
def test_a_killed_run_goes_on_where_it_was(world, whole, tmp_path, monkeypatch, writes):
    more = ["--methods", *METHODS, "--threshold", "-1", "--seeds", "0", "1", "--trace"]
    write, before = OutputFolder.write, writes

    def until_killed(self, answered):
        nonlocal writes
        writes -= 1
        if writes < 0:
            raise KeyboardInterrupt
        write(self, answered)

    monkeypatch.setattr(OutputFolder, "write", until_killed)
    with pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "out", *more)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["status"] == "failed: KeyboardInterrupt"
    with open(tmp_path / "out" / "greedy" / "output-seed0.jsonl", "a", encoding="utf-8") as file:
        file.write('{"question": "how ma')  # the last line of a process that was shot
    answered = []
    monkeypatch.setattr(OutputFolder, "write", lambda self, one: (answered.append(one), write(self, one)))
    run(world, tmp_path / "out", *more, "--resume")
    assert len(answered) == len(lines(whole[0] / "answers.jsonl")) - before  # what was there is not done again
    assert_same(tmp_path / "out", whole[0])


def test_the_threshold_is_chosen_once_on_other_questions(world, tmp_path, monkeypatch):
    rows = [{"question": f"how many pears is {k} ?", "expected_answer": str(k)} for k in range(5)]
    (tmp_path / "v.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    more = ["--methods", "filtered_vote", "--validation_file", tmp_path / "v.jsonl", "--end", "3"]
    run(world, tmp_path / "out", *more)
    chosen = json.loads((tmp_path / "out" / "threshold.json").read_text())
    assert chosen["questions"] == 5 and chosen["completions"] == 15
    assert {row["threshold"] for row in lines(tmp_path / "out" / "answers.jsonl")} == {chosen["threshold"]}
    monkeypatch.setattr("decoding.drawing.choose_on_validation", lambda *_: pytest.fail("chosen again"))
    run(world, tmp_path / "out", *more[:-1], "4", "--resume")
    (tmp_path / "v.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match=r"\(validation_file differ"):
        run(world, tmp_path / "out", *more, "--resume")


def test_more_questions_and_methods_join_a_folder(world, whole, tmp_path):
    run(world, tmp_path, "--methods", "greedy", "sample", "--end", "3")
    run(world, tmp_path, "--methods", "greedy", "majority", "--resume")  # three more questions, one more method
    expected, found = rows_of(whole[0]), rows_of(tmp_path)
    for name in ("greedy/output-seed0.jsonl", "sample/output-seed0.jsonl", "majority/output-seed0.jsonl"):
        assert found[name] == expected[name]


def test_other_settings_are_refused_before_a_model_is_loaded(world, whole, tmp_path, monkeypatch):
    run(world, tmp_path, "--methods", "greedy", "sample", "--end", "2")
    monkeypatch.setattr("decoding.drawing.load_models", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"sample/output-seed0.jsonl .* \(temperature differ: .*--output_dir"):
        run(world, tmp_path, "--methods", "sample", "--end", "2", "--resume", "--temperature", "0.5")
    run(world, tmp_path, "--methods", "greedy", "--end", "2", "--resume", "--temperature", "0.5")  # greedy has none
    with pytest.raises(ValueError, match="holds answers of an earlier call"):
        run(world, tmp_path, "--methods", "greedy")
    with pytest.raises(ValueError, match=r"\(goal_state_path differ"):
        run(world, tmp_path, "--methods", "greedy", "--resume", goals=["goal2"])


def test_several_goals_and_a_template_of_the_policy(world, tmp_path):
    more = ["--methods", "beam", "--goal_weights", "1", "-0.5", "--input_template", "Q: {question}\nA:", "--end", "2"]
    run(world, tmp_path, *more, "--reward_weight", "0.5", "--self_eval_weight", "0.5", goals=["goal", "goal2"])
    for row in lines(tmp_path / "beam" / "output-seed0.jsonl"):
        assert np.shape(row["goal_similarities"]) == (row["num_actions"], 2)


@pytest.mark.parametrize("guidance", ["reward", "random", "none"])
def test_other_guidance(world, tmp_path, guidance):
    run(world, tmp_path, "--methods", "beam", "--guidance", guidance, "--end", "2", goals=())
    assert {row["index"] for row in lines(tmp_path / "beam" / "output-seed0.jsonl")} == {0, 1}


def test_without_a_reward_model_and_without_answers(world, tmp_path, capsys):
    (tmp_path / "h.jsonl").write_text('{"prompt": "say yes", "id": "a"}\n{"prompt": "say no", "id": "b"}\n')
    argv = ["--dt_name", "helpsteer", "--input_file", str(tmp_path / "h.jsonl"), "--model_name", str(world / "lm")]
    generate.main([*argv, "--methods", "greedy", "sample", *SMALL, "--output_dir", str(tmp_path / "out")])
    rows = lines(tmp_path / "out" / "greedy" / "output-seed0.jsonl")
    assert [row["id"] for row in rows] == ["a", "b"]
    assert {row[key] for row in rows for key in ("is_correct", "predicted_answer", "expected_answer")} == {None}
    assert "greedy  1      2          -" in capsys.readouterr().out
    eval_argv = ["--completions_data_path", tmp_path / "out", "--reward_model_path", world / "rm", "--vanilla"]
    eval_rm.main([str(word) for word in [*eval_argv, "--save_dir", tmp_path / "scores", "--bootstrap", "10"]])


def test_pocket_runs_without_a_file(world, tmp_path):
    argv = ["--input_file", "test:3", "--model_name", world / "lm", "--methods", "greedy", "--max_tokens", "4"]
    generate.main([str(word) for word in [*argv, "--output_dir", tmp_path]])
    assert len(lines(tmp_path / "greedy" / "output-seed0.jsonl")) == 3


def test_a_dry_run_shows_settings_and_prompts_and_writes_nothing(world, tmp_path, capsys):
    generate.main([*words(world, tmp_path / "out", "--methods", "beam"), "--dry_run"])
    printed = capsys.readouterr().out
    settings, _ = json.JSONDecoder().raw_decode(printed)
    assert settings["beam_size"] == 2 and settings["resolved"]["reward_model"]["template"] == "plain"
    assert "<|user|>\nhow many apples is 0 ?</s>\n<|assistant|>\n" in printed
    assert "prompt of the reward model\nhow many apples is 0 ?\n" in printed and "apples is 2 ?" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--goal_state_path", "{}/foreign"], "goal state"),
        (["--goal_state_path", "{}/absent"], "expected a goal state"),
        (["--reward_model_path", "{}/absent"], "expected a reward model checkpoint at .*absent, found no folder"),
        (["--model_name", "{}/absent"], "expected a language model at .*absent, found no folder"),
        (["--model_name", "{}/rm"], "rm is a reward model .LlamaForSequenceClassification., which cannot generate"),
        (["--input_file", "{}/absent.jsonl"], "no such file"),
        (["--question_key", "q"], r"row 0: expected text under 'q', got nothing; the row has \['question', 'expected_"),
        (["--max_tokens", "120"], "row 0: its prompt of .* reward model; pass --max_tokens [0-9]+ or less"),
        (["--start", "6"], "has 6 questions"),
        (["--methods", "filtered_vote", "--validation_file", "{}/q.jsonl"], "6 questions are in both sets"),
    ],
)
def test_bad_input_is_one_error_before_a_model_is_loaded(world, tmp_path, monkeypatch, more, told):
    monkeypatch.setattr("decoding.drawing.load_models", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=told):
        run(world, tmp_path / "out", "--methods", "beam", *(word.format(world) for word in more))


def test_a_prompt_longer_than_the_policys_context(world, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question": "x"}) + "\n" + json.dumps({"question": "1 " * 200}) + "\n")
    argv = ["--dt_name", "custom", "--input_file", file, "--model_name", world / "lm", "--methods", "greedy"]
    with pytest.raises(ValueError, match="row 1: its prompt of .* in 128 of the policy; leave it out"):
        generate.run(parse_config(DecodingConfig, [str(word) for word in [*argv, "--output_dir", tmp_path / "out"]]))
