"""Completion records and JSON lines."""

from __future__ import annotations

import gzip
import json

import datasets
import pytest

from openrlhf.datasets.completions import (
    Completion,
    completion_to_row,
    group_by_question,
    read_completions,
    read_jsonl,
    row_to_completion,
    sample_files,
    write_jsonl,
)
from openrlhf.datasets.sources import load_rows

ROW = {
    "question": "1+1?",
    "generated_solution": "It is\u20282",
    "expected_answer": "2",
    "predicted_answer": None,
    "is_correct": False,
    "sample": 3,
    "model": "m",
}


def test_row_survives_both_ways():
    completion = row_to_completion(ROW)
    assert completion == Completion("1+1?", "It is\u20282", "2", None, False, 3, {"model": "m"})
    assert completion_to_row(completion) == ROW


def test_old_field_names():
    old = {"problem": "q", "generation": "s", "answer": 5, "predicted_answer": 4.5, "is_correct": "False"}
    assert row_to_completion(old) == Completion("q", "s", "5", "4.5", False)
    both = row_to_completion({"question": "q", "generated_solution": "s", "expected_answer": "1", "answer": "long"})
    assert both.expected_answer == "1" and both.extra == {"answer": "long"}
    filled = row_to_completion({"question": None, "problem": "q", "generated_solution": "s"})
    assert filled.question == "q" and filled.is_correct is None and filled.extra == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"generated_solution or generation.*\['question'\]"),
        ({"question": "q", "generated_solution": 3}, "needs text.*got str and int"),
        ({"question": "q", "generated_solution": "s", "sample": [1]}, r"sample: expected a whole number, got \[1\]"),
        ({"question": "q", "generated_solution": "s", "sample": 1.5}, "sample: expected a whole number"),
        ({"question": "q", "generated_solution": "s", "sample": "a"}, "sample: expected a whole number"),
        ({"question": "q", "generated_solution": "s", "is_correct": "maybe"}, "'maybe'"),
    ],
)
def test_rows_that_are_no_completion(row, message):
    with pytest.raises(ValueError, match=message):
        row_to_completion(row)


@pytest.mark.parametrize(("label", "wanted"), [(1.0, True), (0.0, False), (1, True), ("False", False), (None, None)])
def test_labels_as_tables_write_them(label, wanted):
    row = {"question": "q", "generated_solution": "s", "is_correct": label, "sample": "2"}
    assert (row_to_completion(row).is_correct, row_to_completion(row).sample) == (wanted, 2)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_write_then_read(tmp_path, name):
    path = tmp_path / "new" / name
    rows = [ROW, {**ROW, "generated_solution": "x" * 100_000 + "\ufffd\u00a0\x85"}]
    assert write_jsonl(path, iter(rows)) == 2
    assert list(read_jsonl(path)) == [(1, rows[0]), (2, rows[1])]
    assert [completion_to_row(c) for c in read_completions(path)] == rows
    first = path.read_bytes()
    write_jsonl(path, rows)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == [name]


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [ROW])

    def rows():
        yield {"question": "new"}
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_jsonl(path, rows())
    assert list(read_jsonl(path)) == [(1, ROW)]
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_bad_lines_are_named_by_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW) + "\n{broken\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not valid JSON"):
        read_completions(path)
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({"question": "q"}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: a completion needs"):
        read_completions(path)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"[1]\n"))
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz:1: expected a JSON object, got list"):
        list(read_jsonl(tmp_path / "b.jsonl.gz"))
    skipped = []
    assert list(read_jsonl(tmp_path / "b.jsonl.gz", "skip", skipped)) == [] and len(skipped) == 1
    with pytest.raises(ValueError, match="no such file"):
        read_completions(tmp_path / "missing.jsonl")


def test_hint_at_a_flag_is_the_callers(tmp_path):
    (tmp_path / "a.jsonl").write_text("{broken\n")
    (tmp_path / "a.csv").write_text("question,generated_solution\nq\n")
    for name in ("a.jsonl", "a.csv"):
        with pytest.raises(ValueError, match=name) as error:
            read_completions(tmp_path / name)
        assert "on_bad_row" not in str(error.value)
    with pytest.raises(ValueError, match=r"Correct the line, or pass --skip$"):
        list(read_jsonl(tmp_path / "a.jsonl", hint="pass --skip"))


def test_parquet_completions(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [ROW, {**ROW, "sample": None}, {"question": "q", "is_correct": True}]
    datasets.Dataset.from_list(rows[:2]).to_parquet(tmp_path / "a.parquet")
    completions = read_completions(tmp_path / "a.parquet")
    assert completion_to_row(completions[0]) == ROW and completions[1].sample == 1
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet:3: a completion needs"):
        read_completions(tmp_path / "b.parquet")


def test_solution_that_is_a_list_is_refused_beside_text(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "a.jsonl", [ROW, {**ROW, "generated_solution": ["a"]}])
    rows = load_rows(str(tmp_path / "a.jsonl"))
    assert row_to_completion(rows[0]).generated_solution == ROW["generated_solution"]
    with pytest.raises(ValueError, match="a completion needs text"):
        row_to_completion(rows[1])


def test_samples_are_numbered_within_their_question(tmp_path):
    rows = [{"question": q, "generated_solution": str(i)} for i, q in enumerate("abaab")]
    write_jsonl(tmp_path / "a.jsonl", rows)
    completions = read_completions(tmp_path / "a.jsonl")
    assert [c.sample for c in completions] == [0, 0, 1, 2, 1]
    assert group_by_question(completions) == {"a": [0, 2, 3], "b": [1, 4]}


def test_folder_of_samples_is_read_in_number_order_without_the_greedy_file(tmp_path):
    for name in ("rs10", "rs2", "rs0", "greedy"):
        write_jsonl(tmp_path / f"output-{name}.jsonl", [{"question": "q", "generated_solution": name}])
    write_jsonl(tmp_path / "metrics.jsonl", [{"a": 1}])
    assert [path.name for path in sample_files(tmp_path)] == [
        "output-rs0.jsonl",
        "output-rs2.jsonl",
        "output-rs10.jsonl",
    ]
    completions = read_completions(tmp_path)
    assert [(c.generated_solution, c.sample) for c in completions] == [("rs0", 0), ("rs2", 1), ("rs10", 2)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no output-\*\.jsonl"):
        read_completions(tmp_path / "empty")


def test_real_generations_are_readable(shared_data):
    completions = read_completions(shared_data / "generations" / "math" / "nemo-skills-fixture-3-samples.jsonl")
    assert len(completions) == 150 and sum(c.predicted_answer is None for c in completions) == 26
    assert sum(c.is_correct for c in completions) == 108  # 0.720 of 150
    pool = read_completions(shared_data / "gsm8k_pool" / "validation.jsonl.gz")
    assert len(group_by_question(pool)) == 125 and max(c.sample for c in pool) == 22
