"""The grade command: counts, disagreements, written rows, bad input; and its agreement with real labels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.cli.grade import GradeConfig, main, run
from openrlhf.datasets.completions import Completion, read_completions, write_jsonl
from openrlhf.evaluation.agreement import Grade, count_agreement, find_label_key, grade_rows, read_label

ROOT = Path(__file__).resolve().parents[2]


def row(solution="so 5", expected="5", predicted=None, **extra):
    return {
        "question": "How many?",
        "generated_solution": solution,
        "expected_answer": expected,
        "predicted_answer": predicted,
        **extra,
    }


def written(path, *rows):
    write_jsonl(path, rows)
    return str(path)


ROWS = [
    row(predicted="5", is_correct_origin=True),  # both right
    row(predicted="6", is_correct_origin=False),  # both wrong
    row(predicted="5.0", is_correct_origin=False),  # ours only
    row(predicted="7", is_correct_origin=True),  # theirs only
    row(predicted="5", is_correct_origin=None),  # not compared
    row(predicted=None, is_correct=False, is_correct_origin=False),  # labelled without an answer: none is searched for
]


def test_counts_of_a_small_file_by_hand(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", *ROWS)
    result = run(GradeConfig(input=[path], json=str(tmp_path / "figures.json")))[path]
    counts = {key: value for key, value in result.items() if key != "disagreements"}
    assert counts == {
        "compare_key": "is_correct_origin",
        "rows": 6,
        "graded": 6,
        "correct": 3,
        "without_answer": 1,
        "compared": 5,
        "both_correct": 1,
        "both_wrong": 2,
        "ours_only": 1,
        "theirs_only": 1,
        "agreement": 3 / 5,
    }
    assert [(one["row"], one["answer"], one["ours"]) for one in result["disagreements"]] == [
        (3, "5.0", True),
        (4, "7", False),
    ]
    assert json.loads((tmp_path / "figures.json").read_text())[path] == result
    printed = capsys.readouterr().out
    assert "row 3, ours right, theirs wrong: expected 5, answer 5.0 | How many?" in printed
    assert "0.6000" in printed


def test_counts_agree_with_a_slow_loop():
    grades = [Grade("1", value) for value in (True, False, None) * 6]
    labels = [True, True, False, True, None, None] * 3
    both = [(g.correct, label) for g, label in zip(grades, labels, strict=True) if None not in (g.correct, label)]
    counts = count_agreement(grades, labels)
    assert counts["compared"] == len(both)
    for name, pair in {
        "both_correct": (1, 1),
        "both_wrong": (0, 0),
        "ours_only": (1, 0),
        "theirs_only": (0, 1),
    }.items():
        assert counts[name] == sum(1 for one in both if one == pair)
    assert counts["agreement"] == sum(1 for ours, theirs in both if ours is theirs) / len(both)
    assert count_agreement([Grade("1", True)], [None])["agreement"] is None


def test_answers_come_from_the_row_or_from_the_solution():
    def answers(*rows, extract=False):
        completions = [Completion("q", "so 5", "5", predicted, label) for predicted, label in rows]
        return [grade.answer for grade in grade_rows(completions, extract=extract)]

    assert answers((None, None), (None, False)) == ["5", "5"]  # no row of the file has an answer
    assert answers(("6", None), (None, None), (None, False)) == ["6", "5", None]
    assert answers(("6", None), (None, False), extract=True) == ["5", "5"]


def test_compared_column_is_the_origins_where_it_has_a_value():
    origin = Completion("q", "s", "5", is_correct=True, extra={"is_correct_origin": False, "judge": "1"})
    no_origin = Completion("q", "s", "5", is_correct=True, extra={"is_correct_origin": None})
    assert find_label_key([no_origin, origin]) == "is_correct_origin"
    assert find_label_key([no_origin]) == "is_correct"
    assert find_label_key([origin], "judge") == "judge" and read_label(origin, "judge") is True
    assert find_label_key([Completion("q", "s", "5")]) is None


def test_written_rows_keep_their_labels_unless_regraded(tmp_path):
    path = written(
        tmp_path / "in" / "rows.jsonl",
        row(predicted="5", is_correct=False, model="m"),
        row("so 5", predicted=None, is_correct=None),
        row("no number", expected="7", predicted=None, is_correct=None),
        row(expected=None, predicted="5", is_correct=None),
    )
    run(GradeConfig(input=[path], output=str(tmp_path / "kept.jsonl.gz")))
    kept = read_completions(tmp_path / "kept.jsonl.gz")
    assert [(one.predicted_answer, one.is_correct) for one in kept] == [
        ("5", False),
        ("5", True),
        (None, False),
        ("5", None),
    ]
    assert kept[0].extra == {"model": "m"}
    run(GradeConfig(input=[path], output=str(tmp_path / "new"), regrade=True))
    assert [one.is_correct for one in read_completions(tmp_path / "new" / "rows.jsonl")] == [True, True, False, None]


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path):
    for name in ("a", "b"):
        written(tmp_path / "in" / name / "x.jsonl", row(predicted="5"))
    run(GradeConfig(input=[str(tmp_path / "in")], output=str(tmp_path / "out")))
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.jsonl")) == [
        "a/x.jsonl",
        "b/x.jsonl",
    ]


def test_lenient_percent_is_passed_on(tmp_path):
    path = written(tmp_path / "rows.jsonl", row(predicted="60%", expected="60"))
    assert run(GradeConfig(input=[path]))[path]["correct"] == 0
    assert run(GradeConfig(input=[path], percent="lenient"))[path]["correct"] == 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([row(predicted="5")], {"compare_key": "judge"}, "no row has a label under 'judge'; columns with values: none"),
        ([row(predicted="5", judge="maybe")], {"compare_key": "judge"}, "judge: expected true, false or null"),
        ([row(expected=None, predicted=None)], {}, "no row has an expected answer"),
        ([{"question": "q"}], {}, "rows.jsonl:1: a completion needs text under question"),
        ([], {}, "no completions in this file"),
        ([row()], {"output": "rows.jsonl"}, "would overwrite the input"),
        ([row()], {"regrade": True}, "pass --output too"),
        ([row()], {"show": -1}, "--show -1"),
        ([row()], {"input": ["absent.jsonl"]}, "no such file"),
        ([row()], {"input": []}, "pass --input"),
        ([row()], {"input": ["rows.jsonl", "rows2.jsonl"], "output": "one.jsonl"}, "name a folder"),
        ([row()], {"json": "."}, "is a folder; name a file"),
        ([row()], {"json": "rows.jsonl/figures.json"}, "cannot save to .*rows.jsonl"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, monkeypatch, rows, options, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.jsonl", *rows)
    written(tmp_path / "rows2.jsonl", *rows)
    with pytest.raises(ValueError, match=message):
        run(GradeConfig(**{"input": ["rows.jsonl"], **options}))
    assert not (tmp_path / "one.jsonl").exists()


def test_the_script_runs_and_names_a_mistake_in_one_line(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", row(predicted="5", is_correct=True))
    command = [sys.executable, str(ROOT / "examples" / "grade.py"), "--input", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "1.0000" in done.stdout
    with pytest.raises(SystemExit) as stop:
        main(["--input", path, "--compare_key", "x"])
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.startswith("error: ") and "'x'" in error.splitlines()[0]


# Disagreements with the labels of real files, each looked at and explained in docs/grading.md: file -> (with the
# predicted answer, with the answer found in the solution). Other files have none; codex-pot holds programs only.
DISAGREEMENTS = {
    "generations/gsm8k/code-davinci-002.jsonl": (0, 9),
    "generations/gsm8k/gpt-3.5-turbo.jsonl": (0, 10),
    "generations/gsm8k/text-davinci-002.jsonl": (0, 8),
    "generations/gsm8k/tora-code-34b-v1.0.jsonl.gz": (0, 11),
    "generations/math/nemo-skills-fixture-3-samples.jsonl": (1, 7),
    "generations/math/qwen-math-example-8-samples.jsonl.gz": (1, 1),
    "generations/svamp/codex-pot.jsonl": (0, 832),
    "generations/svamp/mathcoder-l-7b.jsonl.gz": (0, 1),
    "gsm8k_pool/train.jsonl.gz": (54, 57),
}
PERCENT_ONLY = ("gpt-3.5-turbo.jsonl", "text-davinci-002.jsonl", "tora-code-34b-v1.0.jsonl.gz")
LENIENT = {
    **{name: counts for name, counts in DISAGREEMENTS.items() if not name.endswith(PERCENT_ONLY)},
    "generations/gsm8k/code-davinci-002.jsonl": (0, 1),
    "gsm8k_pool/train.jsonl.gz": (0, 3),
}


@pytest.mark.parametrize(
    ("extract", "percent", "expected"),
    [(False, "strict", DISAGREEMENTS), (True, "strict", DISAGREEMENTS), (True, "lenient", LENIENT)],
)
def test_grades_agree_with_real_labels_but_for_explained_rows(shared_data, extract, percent, expected, capsys):
    folders = [str(shared_data / name) for name in ("generations", "gsm8k_solutions", "gsm8k_pool")]
    results = run(GradeConfig(input=folders, extract=extract, percent=percent, show=0))
    assert len(results) == 18 and sum(one["rows"] for one in results.values()) == 42066
    for path, one in results.items():
        name = Path(path).relative_to(shared_data).as_posix()
        assert len(one["disagreements"]) == expected.get(name, (0, 0))[extract], name
        assert one["compared"] == one["rows"]
