"""Scored rows read back: checks with file and line, sets, settings, and memory."""

from __future__ import annotations

import gzip
import json
import sys

import numpy as np
import pytest

from openrlhf.cli import metrics
from openrlhf.evaluation.scored_rows import read_scored_rows, read_scored_sets, scored_files


def scored(k=0, **more):
    return {
        "question": f"q{k}",
        "generated_solution": f"s{k}",
        "expected_answer": "5",
        "predicted_answer": "5",
        "is_correct": True,
        "sample": k,
        "reward": 0.5,
        "partial_rewards": [0.1, 0.5],
        "cosine_sim": [0.2, 0.3],
        "num_actions": 2,
        "truncated": False,
        "token_ends": [2, 2],
    } | more


def write(path, rows, settings=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if settings is not None:
        (path.parent / f"{path.stem}.settings.json").write_text(json.dumps(settings))
    return path


def test_lists_become_small_arrays_and_nothing_else_changes(tmp_path):
    row = scored(1, model="m", steps=["a", "b"])
    (read,) = read_scored_rows(write(tmp_path / "a.jsonl", [row]))
    for key, kind in (("partial_rewards", np.float32), ("cosine_sim", np.float32), ("token_ends", np.int32)):
        assert read[key].dtype == kind
        np.testing.assert_allclose(read[key], row[key], rtol=1e-7)
    assert {key: value for key, value in read.items() if not isinstance(value, np.ndarray)} == {
        key: value for key, value in row.items() if key not in ("partial_rewards", "cosine_sim", "token_ends")
    }


def test_old_and_missing_fields(tmp_path):
    row = scored(cosine_sim=None)
    for key in ("question", "generated_solution", "expected_answer", "token_ends"):
        del row[key]
    row |= {"problem": "p", "generation": "g", "answer": 5, "is_correct": "false"}
    unscored = scored(reward=None, partial_rewards=None, cosine_sim=None, num_actions=0, token_ends=None)
    first, second = read_scored_rows(write(tmp_path / "a.jsonl", [row, unscored]))
    assert (first["question"], first["generated_solution"], first["expected_answer"]) == ("p", "g", "5")
    assert first["is_correct"] is False and first["cosine_sim"] is None and "token_ends" not in first
    assert second["reward"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": float("nan")}, "finite number or null in 'reward', got nan"),
        ({"reward": "high"}, "in 'reward', got 'high'"),
        ({"partial_rewards": [0.1, float("nan")]}, "finite numbers in 'partial_rewards', got nan at token 1"),
        ({"cosine_sim": [float("inf"), 0.1]}, "finite numbers in 'cosine_sim', got inf at token 0"),
        ({"cosine_sim": [0.1]}, r"2 values \(num_actions\) in 'cosine_sim'"),
        ({"cosine_sim": ["x", "y"]}, "list of numbers in 'cosine_sim'"),
        ({"token_ends": [1, 2, 3]}, "'token_ends'"),
        ({"token_ends": [2, 1]}, "'token_ends' that rise"),
        ({"token_ends": [1, 99]}, "the length of the solution"),
        ({"token_ends": [0.5, 1]}, "'token_ends' .not whole"),
        ({"cosine_sim": [0.1, -1.5]}, "cosines in .* got -1.5 at token 1"),
        ({"reward": 10**400}, "finite number or null in 'reward'"),
        ({"sample": "first"}, "sample: expected a whole number, got 'first'"),
        ({"sample": [1]}, "sample: expected a whole number"),
        ({"first_error_step": "2"}, "first_error_step: expected a whole number or null, got '2'"),
        ({"first_error_step": float("nan")}, "first_error_step: expected a whole number"),
        ({"first_error_step": 1, "steps": [3]}, "steps: expected a list of text"),
        ({"num_actions": None}, "'num_actions', got None"),
        ({"partial_rewards": None}, "'partial_rewards' beside 'reward'"),
        ({"is_correct": "maybe"}, "is_correct: expected true, false or null"),
        ({"generated_solution": None}, "needs text under"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, change, message):
    path = write(tmp_path / "a.jsonl", [scored(0), scored(1, **change)])
    with pytest.raises(ValueError, match=message) as error:
        list(read_scored_rows(path))
    assert str(error.value).startswith(f"{path}:2: ")


def test_rows_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a.jsonl:1: expected a row scored by eval_rm"):
        list(read_scored_rows(write(tmp_path / "a.jsonl", [{"question": "q", "generated_solution": "s"}])))


def test_last_line_cut_off_says_what_to_do(tmp_path):
    path = write(tmp_path / "a.jsonl", [scored(0), scored(1)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not valid JSON.*run eval_rm again"):
        list(read_scored_rows(path))


def test_line_separators_in_text_and_empty_files(tmp_path):
    write(tmp_path / "all" / "a.jsonl", [])
    path = tmp_path / "all" / "b.jsonl"
    path.write_text(json.dumps(scored(generated_solution="a\u2028b"), ensure_ascii=False) + "\n", encoding="utf-8")
    (row,) = read_scored_sets(tmp_path)["all"]
    assert row["generated_solution"] == "a\u2028b"
    assert read_scored_sets(tmp_path / "all" / "a.jsonl") == {"a": []}


def test_sets_are_folders_and_can_be_chosen(tmp_path):
    for place in ("gsm8k/greedy/output-greedy", "gsm8k/all/output-rs0", "gsm8k/all/output-rs1", "svamp/all/output-rs0"):
        write(tmp_path / f"{place}.jsonl", [scored()])
    packed = tmp_path / "zip" / "all" / "x.jsonl.gz"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(gzip.compress((json.dumps(scored()) + "\n").encode()))
    sets = read_scored_sets(tmp_path)
    assert {name: len(rows) for name, rows in sets.items()} == {
        "gsm8k/all": 2,
        "gsm8k/greedy": 1,
        "svamp/all": 1,
        "zip/all": 1,
    }
    assert list(scored_files(tmp_path, ["gsm8k/all", "svamp"])) == ["gsm8k/all", "svamp/all"]
    with pytest.raises(ValueError, match="no set 'gsm' .*found gsm8k/all, gsm8k/greedy"):
        scored_files(tmp_path, ["svamp", "gsm"])
    with pytest.raises(ValueError, match="found no .jsonl file"):
        scored_files(tmp_path / "nowhere")


def test_files_in_the_folder_itself_are_a_set_with_a_name(tmp_path):
    write(tmp_path / "a.jsonl", [scored()])
    assert list(scored_files(tmp_path)) == ["all files"]
    assert list(scored_files(tmp_path, ["all files"])) == ["all files"]


def test_summary_names_the_files_that_count(tmp_path):
    write(tmp_path / "new" / "all" / "a.jsonl", [scored()])
    write(tmp_path / "old" / "all" / "a.jsonl", [scored()])
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({"files": ["new/all/a.jsonl"]}))
    assert list(read_scored_sets(tmp_path)) == ["new/all"]
    summary.write_text(json.dumps({"files": ["new/all/a.jsonl", "new/all/b.jsonl"]}))
    with pytest.raises(ValueError, match=r"names 1 files that are not there, first .*b\.jsonl"):
        read_scored_sets(tmp_path)
    summary.write_text('{"files": [')
    with pytest.raises(ValueError, match=r"summary\.json: not valid JSON"):
        read_scored_sets(tmp_path)


def test_files_of_one_set_must_be_scored_alike(tmp_path):
    same = {"checkpoint": "x", "goal_state": None, "dtype": "torch.float32", "template": "plain", "max_len": 9}
    write(tmp_path / "all" / "a.jsonl", [scored()], same)
    write(tmp_path / "all" / "b.jsonl", [scored()], same)
    write(tmp_path / "all" / "c.jsonl", [scored()])  # no settings: nothing to compare
    write(tmp_path / "other" / "d.jsonl", [scored()], same | {"checkpoint": "y"})  # another set
    assert len(read_scored_sets(tmp_path)["all"]) == 3
    write(tmp_path / "all" / "d.jsonl", [scored()], same | {"checkpoint": "y"})
    with pytest.raises(
        ValueError, match=r"set all: .*a\.jsonl and .*d\.jsonl were scored differently \(checkpoint 'x'"
    ):
        read_scored_sets(tmp_path)


def test_a_row_of_150_tokens_takes_about_3_kilobytes(tmp_path):
    rows = [
        scored(
            k,
            question="What is it? " * 20,
            generated_solution=f"{k} " * 200,
            num_actions=150,
            partial_rewards=[0.123 + k] * 150,
            cosine_sim=[0.1 + k / 1e6] * 150,
            token_ends=list(range(150)),
        )
        for k in range(5)
    ]
    read = list(read_scored_rows(write(tmp_path / "a.jsonl", rows)))
    own = [
        sum(map(sys.getsizeof, (value for key, value in row.items() if key != "question"))) + sys.getsizeof(row)
        for row in read
    ]
    assert max(own) < 4500  # 3 lists of 150 Python floats alone take 14,000
    assert read[0]["question"] is read[4]["question"]  # one copy of a text that comes again
    assert next(iter(read[0])) is next(iter(read[4]))
    assert list(read[0])[-1] is list(read[4])[-1]


def test_reader_can_be_imported_from_the_command_too():
    assert metrics.read_scored_sets is read_scored_sets
