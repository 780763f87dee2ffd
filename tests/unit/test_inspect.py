"""A look at one response: what is printed with and without colours, the page, and bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from openrlhf.cli import inspect_response
from openrlhf.cli.inspect_response import describe, read_row
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.models.pretrained import checkpoint_fingerprint, save_reward_model
from tests.tiny import tiny_reward_model, tiny_tokenizer

ROW = {
    "question": "what is 3 + 4 ?",
    "generated_solution": "it\nis 8",
    "expected_answer": "7",
    "predicted_answer": "8",
    "is_correct": False,
    "sample": 0,
    "reward": -1.0,
    "partial_rewards": [0.5, 0.25, 0.0, -1.0],
    "cosine_sim": [0.9, 0.1, -0.2, 0.3],
    "num_actions": 4,
    "truncated": False,
    "token_ends": [2, 5, 7, 7],
}


@pytest.fixture
def models(tmp_path):
    """A reward model and a goal state of it."""
    settings = {"template": "plain", "max_len": 100, "apply_chat_template": False}
    save_reward_model(tmp_path / "rm", tiny_reward_model(), tiny_tokenizer(), settings=settings)
    vector = np.ones((1, 32), np.float32)
    fingerprint = checkpoint_fingerprint(tmp_path / "rm")
    GoalState(vector, 1, 1.0, "plain", False, 100, fingerprint, "data").save(tmp_path / "goal")
    return tmp_path


def inspect(capsys, *words):
    inspect_response.main([str(word) for word in words])
    return capsys.readouterr().out


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_response_is_scored_and_printed(models, capsys):
    words = ["--reward_model_path", models / "rm", "--goal_state_path", models / "goal"]
    words += ["--prompt", "what is 7 ?", "--response", "the answer is 7", "--filter_threshold", "1"]
    text = inspect(capsys, *words, "--html", models / "new" / "one.html")
    tokens = re.findall(r"^ +\d+ +-?\d\.\d{3} +-?\d+\.\d{3}  '(.*)'", text, re.MULTILINE)
    assert "".join(tokens) == "the answer is 7"
    assert "\x1b" not in text  # not a terminal
    assert "stopped at token 1" in text  # every cosine is below 1
    page = (models / "new" / "one.html").read_text(encoding="utf-8")
    assert "the answer is 7" in page
    assert f"html: {models / 'new' / 'one.html'}" in text


def test_without_a_goal_state_rewards_are_shown(models, capsys):
    words = ["--reward_model_path", models / "rm", "--prompt", "q", "--response", "good"]
    text = inspect(capsys, *words, "--color", "always")
    assert "goal similarity" not in text
    assert "lowest reward" in text
    assert "\x1b[38;" in text


def test_a_scored_row_needs_no_model(tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [ROW | {"question": "other"}, ROW])
    text = inspect(capsys, "--file", file, "--row", 2, "--filter_threshold", 0.0)
    assert "rows.jsonl, line 2 · reward -1.000 · goal similarity 0.300 at the end" in text
    assert "answer: wrong, predicted 8, expected 7" in text
    # The lowest similarity, -0.2, is the first below 0: token 3 of 4, so a quarter is saved.
    assert "lowest goal similarity -0.200 at token 3 of 4: ' 8'" in text
    assert "filter at 0: stopped at token 3, 25% of it saved" in text
    assert "    3           -0.200            0.000  ' 8'  <- stopped here" in text


def test_the_row_is_scored_anew_with_a_model(models, capsys):
    file = write(models / "rows.jsonl", [ROW])
    text = inspect(capsys, "--file", file, "--reward_model_path", models / "rm")
    assert "model rm" in text
    assert "reward -1.000" not in text
    assert "goal similarity" not in text  # those of the file belong to another model


def test_a_scored_row_is_checked(tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [ROW | {"cosine_sim": [0.9, 0.1]}])
    with pytest.raises(SystemExit):
        inspect(capsys, "--file", file)
    assert "rows.jsonl:1: expected 4 values (num_actions) in 'cosine_sim'" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error():
    code = (
        "from openrlhf.cli.common import run_command\n"
        "run_command(lambda: [print('line') for _ in range(10**5)] and None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""


def test_colours_only_where_they_are_wanted(monkeypatch, tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [ROW])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "48;2;" in inspect(capsys, "--file", file)
    monkeypatch.setenv("COLORTERM", "")
    assert "48;5;" in inspect(capsys, "--file", file)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in inspect(capsys, "--file", file)


def test_rows_that_lack_something_are_still_shown():
    old = {key: value for key, value in ROW.items() if key != "token_ends"}
    assert "no token_ends" in describe(old, "m")
    assert "it\nis 8" in describe(old, "m", color=True)
    unscored = ROW | {"reward": None, "partial_rewards": None, "cosine_sim": None, "num_actions": 0}
    assert "not scored" in describe(unscored, "m")
    assert "was cut" in describe(ROW | {"truncated": True}, "m")
    assert "not applied, the row has no goal similarity" in describe(ROW | {"cosine_sim": None}, "m", threshold=0.0)
    assert "    4            0.300           -1.000  (end)" in describe(ROW, "m")
    lists = {key: np.array(ROW[key], np.float32) for key in ("partial_rewards", "cosine_sim")}
    assert describe(ROW | lists, "m", threshold=0.0) == describe(ROW, "m", threshold=0.0)
    assert "\x1b[2J" not in describe(ROW | {"question": "\x1b[2J"}, "\x1b[2J")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--prompt and --response"),
        (["--prompt", "q"], "--prompt and --response"),
        (["--prompt", "q", "--response", "r"], "--reward_model_path"),
        (["--prompt", "q", "--response", "r", "--file", "rows.jsonl"], "not both"),
        (["--file", "absent.jsonl"], "found no file"),
        (["--file", "rows.jsonl", "--row", "0"], "count from 1"),
        (["--file", "rows.jsonl", "--row", "3"], "no row on line 3"),
        (["--file", "rows.jsonl", "--row", "2"], "not scored yet"),
        (["--file", "rows.jsonl", "--goal_state_path", "g"], "needs --reward_model_path"),
        (["--file", "rows.jsonl", "--filter_threshold", "7"], "threshold in"),
        (["--file", "rows.jsonl", "--html", "."], "is a folder"),
    ],
)
def test_bad_input_is_one_clear_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [ROW, {"question": "q", "generated_solution": "s"}])
    with pytest.raises(SystemExit) as error:
        inspect_response.main(words)
    assert message in str(error.value) + capsys.readouterr().err


def test_goal_state_of_another_model_is_refused(models, capsys):
    save_reward_model(
        models / "other",
        tiny_reward_model(seed=1),
        tiny_tokenizer(),
        settings={"template": "plain", "max_len": 100, "apply_chat_template": False},
    )
    words = ["--goal_state_path", models / "goal", "--prompt", "q", "--response", "r"]
    with pytest.raises(SystemExit) as error:
        inspect(capsys, "--reward_model_path", models / "other", *words)
    assert "goal state" in str(error.value) + capsys.readouterr().err


def test_rows_are_counted_from_one(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"problem": f"q{k}", "generation": "s"} for k in range(3)])
    assert read_row(str(file), 2)["question"] == "q1"  # old field names too
    with pytest.raises(ValueError, match="no row on line 4"):
        read_row(str(file), 4)
