"""The metrics command: from scored files to tables, JSON and CSV, and its errors."""

from __future__ import annotations

import csv
import json
import re
import sys
import types

import numpy as np
import pytest

from openrlhf.cli import metrics
from tests.unit.test_scored_rows import scored, write


def model(folder, seed=0, goal=True, questions=8, prefix="q"):
    """A folder as eval_rm writes it: a sampled benchmark, and a greedy one where everything is right."""
    generator = np.random.default_rng(seed)
    for sample in range(3):
        rows = []
        for k in range(questions):
            right = bool((k + sample) % 2)
            values = (generator.normal(size=6) + right).round(3).tolist()
            rows.append(
                scored(
                    question=f"{prefix}{k}",
                    sample=sample,
                    predicted_answer="5" if right else "4",
                    is_correct=right,
                    reward=values[2],
                    partial_rewards=values[:3],
                    cosine_sim=[value / 9 for value in values[3:]] if goal else None,
                    num_actions=3,
                    token_ends=None,
                )
            )
        write(folder / "gsm8k" / "all" / f"output-rs{sample}.jsonl", rows)
    write(folder / "svamp" / "greedy" / "output-greedy.jsonl", [scored(k) for k in range(3)])
    summary = {"model": {"name": folder.name}, "files": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def run(*words):
    metrics.main([str(word) for word in ("--bootstrap", 30, *words)])


def test_tables_json_and_csv(tmp_path, capsys):
    path = model(tmp_path / "rm")
    run("--scored_path", path, "--filter_threshold", "0.0", "--json", tmp_path / "m.json", "--csv", tmp_path / "m.csv")
    printed = capsys.readouterr().out
    assert "gsm8k/all     24" in printed and "Largest saving at no loss" in printed
    results = json.loads((tmp_path / "m.json").read_text())
    found = results["models"]["rm"]
    assert found["path"] == str(path) and found["model"] == {"name": "rm", "goal_state": None}
    assert list(found["sets"]) == ["gsm8k/all", "svamp/greedy"]
    assert found["sets"]["svamp/greedy"]["auroc"]["reward"] == [None, None, None]  # one class, the others stay
    assert re.search(r"svamp/greedy  3     3          1.000    -", printed)
    assert found["sets"]["gsm8k/all"]["auroc"]["reward"][0] is not None
    (within,) = [one for one in results["comparisons"] if one["set"] == "gsm8k/all"]
    assert (within["a"], within["b"], within["score"]) == ("rm", "rm", "goal_similarity minus reward")
    with open(tmp_path / "m.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    (line,) = [
        one for one in lines if (one["set"], one["figure"], one["name"]) == ("gsm8k/all", "prefix_auroc", "reward, 25%")
    ]
    assert [float(line[key]) for key in ("value", "low", "high")] == found["sets"]["gsm8k/all"]["prefix_auroc"][
        "reward"
    ]["25"]
    (undefined,) = [
        one for one in lines if (one["set"], one["figure"]) == ("svamp/greedy", "auroc") and one["name"] == "reward"
    ]
    assert undefined["value"] == ""


def test_output_is_another_name_of_json(tmp_path):
    run("--scored_path", model(tmp_path / "rm"), "--output", tmp_path / "new" / "m.json", "--benchmarks", "gsm8k")
    results = json.loads((tmp_path / "new" / "m.json").read_text())
    assert list(results["models"]["rm"]["sets"]) == ["gsm8k/all"]


def test_models_of_the_same_name_and_a_folder_of_models(tmp_path, capsys):
    model(tmp_path / "a" / "rm"), model(tmp_path / "b" / "rm", seed=1, goal=False), model(tmp_path / "b" / "other", 2)
    run("--scored_path", tmp_path / "a" / "rm", tmp_path / "b", "--json", tmp_path / "m.json")
    results = json.loads((tmp_path / "m.json").read_text())
    assert list(results["models"]) == ["a/rm", "other", "b/rm"]
    pairs = [(one["a"], one["b"], one["score"]) for one in results["comparisons"] if one["set"] == "gsm8k/all"]
    assert pairs == [
        ("a/rm", "a/rm", "goal_similarity minus reward"),
        ("other", "other", "goal_similarity minus reward"),
        ("a/rm", "other", "reward"),
        ("a/rm", "other", "goal_similarity"),
        ("a/rm", "b/rm", "reward"),
        ("other", "b/rm", "reward"),
    ]
    assert "reward: a/rm minus other" in capsys.readouterr().out


def test_nothing_in_common_is_said(tmp_path, capsys):
    model(tmp_path / "a"), write(tmp_path / "b" / "x" / "all" / "f.jsonl", [scored(0), scored(1, is_correct=False)])
    run("--scored_path", tmp_path / "a", tmp_path / "b")
    assert "no set in common" in capsys.readouterr().out


def test_single_files_and_percentiles(tmp_path):
    path = model(tmp_path / "rm") / "gsm8k" / "all" / "output-rs0.jsonl"
    run("--scored_path", path, "--percentiles", "10", "12.5", "--json", tmp_path / "m.json")
    found = json.loads((tmp_path / "m.json").read_text())["models"]["output-rs0"]["sets"]["output-rs0"]
    assert list(found["prefix_auroc"]["reward"]) == ["10", "12.5"]
    assert found["accuracy"] is None


def test_threshold_is_chosen_on_the_validation_files(tmp_path):
    path, other = model(tmp_path / "rm"), model(tmp_path / "validation" / "rm", seed=5, questions=12, prefix="v")
    words = ["--scored_path", path, "--benchmarks", "gsm8k", "--json", tmp_path / "m.json"]
    run(*words, "--validation_path", other)
    equal = json.loads((tmp_path / "m.json").read_text())["models"]["rm"]["sets"]["gsm8k/all"]["equal_accuracy"]
    assert (equal["validation"]["questions"], equal["test"]["questions"]) == (12, 8)
    run(*words)
    equal = json.loads((tmp_path / "m.json").read_text())["models"]["rm"]["sets"]["gsm8k/all"]["equal_accuracy"]
    assert equal["validation"]["questions"] + equal["test"]["questions"] == 8


def test_report_and_figures_get_rows_and_results(tmp_path, monkeypatch):
    calls = []
    module = types.ModuleType("openrlhf.evaluation.report")
    module.write_report = lambda path, results, scored, **_: calls.append(("report", path, results, scored))
    module.save_figures = lambda folder, results, scored: calls.append(("figures", folder, results, scored))
    monkeypatch.setitem(sys.modules, "openrlhf.evaluation.report", module)
    path = model(tmp_path / "rm")
    run("--scored_path", path, "--report", tmp_path / "r.html", "--figures", tmp_path / "plots")
    assert [call[:2] for call in calls] == [
        ("report", str(tmp_path / "r.html")),
        ("figures", str(tmp_path / "plots")),
    ]
    for *_, results, rows in calls:
        assert len(rows["rm"]["gsm8k/all"]) == 24 and "gsm8k/all" in results["models"]["rm"]["sets"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "new", "--csv", "new"], "--csv: .*new is already the file of --output"),
        (["--json", "rm/summary.json"], "--output: .*summary.json holds scores that are read here"),
        (["--report", "rm/svamp/greedy/output-greedy.jsonl"], "--report: .* holds scores"),
    ],
)
def test_scores_and_outputs_are_not_written_over(tmp_path, words, message, capsys, monkeypatch):
    before = (model(tmp_path / "rm") / "summary.json").read_bytes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run("--scored_path", "rm", *words)
    assert re.search(message, capsys.readouterr().err)
    assert (tmp_path / "rm" / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter_threshold", "7"], r"threshold in \[-1, 1\]"),
        (["--warmup_tokens", "-1"], "warmup_tokens of 0 or more"),
        (["--percentiles", "0"], r"percentage in \(0, 100\]"),
        (["--bootstrap", "0"], "--bootstrap: expected 1 or more"),
        (["--csv", "."], "--csv: expected the name of a file"),
        (["--validation_path", "nowhere"], "nowhere: expected a file or folder"),
        (["--benchmarks", "absent"], "no set 'absent' .*found gsm8k/all, svamp/greedy"),
        (["--scored_path", "nowhere"], "nowhere: expected a file or folder"),
    ],
)
def test_mistakes_end_before_a_row_is_read(tmp_path, words, message, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError("a file was read")

    monkeypatch.setattr("openrlhf.evaluation.scored_rows.read_jsonl", refuse)
    with pytest.raises(SystemExit) as end:
        run("--scored_path", model(tmp_path / "rm"), *words)
    assert end.value.code == 1
    (error,) = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error:")]
    assert re.search(message, error)


def test_paths_that_do_not_fit_each_other(tmp_path, capsys):
    path, other = model(tmp_path / "rm"), model(tmp_path / "other")
    for words, message in (
        (["--scored_path", path, path], "is given twice"),
        (["--scored_path", path, other, "--validation_path", other], "expected one a --scored_path"),
        (["--scored_path", path, "--validation_path", other], "questions are in both sets"),
    ):
        with pytest.raises(SystemExit):
            run(*words)
        assert message in capsys.readouterr().err


def test_validation_files_without_the_set(tmp_path, capsys):
    path, other = model(tmp_path / "rm"), model(tmp_path / "validation" / "rm", prefix="v")
    (other / "gsm8k").rename(other / "renamed")
    with pytest.raises(SystemExit):
        run("--scored_path", path, "--validation_path", other)
    assert "no set 'gsm8k/all', found renamed/all, svamp/greedy" in capsys.readouterr().err
