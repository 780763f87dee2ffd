"""The data_setup command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import datasets
import pytest

from openrlhf.cli.data_setup import DataSetupConfig, main, run
from openrlhf.datasets.completions import read_completions, read_jsonl, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(path):
    return [row for _, row in read_jsonl(path)]


@pytest.fixture
def solutions(tmp_path):
    rows = [
        {"question": q, "generated_solution": f"{q} <<1>>{k}", "is_correct": k % 2 == 0, "predicted_answer": "1"}
        for q in ("one", "two", "three")
        for k in range(4)
    ]
    write_jsonl(tmp_path / "solutions.jsonl", rows)
    return str(tmp_path / "solutions.jsonl")


def test_command_writes_pairs_and_a_summary(tmp_path, solutions, capsys):
    write_jsonl(tmp_path / "test1.jsonl", [{"question": "Two?"}])
    write_jsonl(tmp_path / "test2.jsonl.gz", [{"problem": "four"}])
    output = tmp_path / "out" / "pairs.jsonl"
    main(
        ["--solutions", solutions, "--output", str(output), "--pairs_per_question", "3", "--seed", "1"]
        + ["--decontaminate", str(tmp_path / "test1.jsonl"), str(tmp_path / "test2.jsonl.gz")]
        + ["--strip_calculator", "--include_unparsed", "false"]
    )
    pairs = rows_of(output)
    assert [pair["question"] for pair in pairs] == ["one"] * 3 + ["three"] * 3
    assert all(list(pair) == ["question", "correct", "incorrect"] for pair in pairs)
    assert {pair["correct"] for pair in pairs} <= {"one 0", "one 2", "three 0", "three 2"}
    printed = " ".join(capsys.readouterr().out.split())
    for line in ("test questions 2", "read 12", "contaminated 4", "questions paired 2", "pairs 6"):
        assert line in printed


def test_same_seed_same_bytes(tmp_path, solutions):
    outputs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for output in outputs:
        run(DataSetupConfig(solutions=solutions, output=output, pairs_per_question=2))
    assert Path(outputs[0]).read_bytes() == Path(outputs[1]).read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "nothing to do"),
        ({"solutions": "s.jsonl"}, "--solutions and --output"),
        ({"generations": ["a=b.jsonl"]}, "--generations and --generations_dir"),
        ({"generations": ["b.jsonl"], "generations_dir": "d"}, "BENCHMARK=SOURCE"),
        ({"generations": ["a/other=b.jsonl"], "generations_dir": "d"}, "BENCHMARK=SOURCE"),
        ({"solutions": "s.jsonl", "output": "pairs.txt"}, "'pairs.txt'"),
        ({"solutions": "s.jsonl", "output": "p.jsonl", "on_bad_row": "drop"}, "'drop'"),
        ({"solutions": "s.jsonl", "output": "s3://bucket/p.jsonl"}, "--output: expected a local path.*s3://bucket"),
        (
            {"generations": ["a=b.jsonl"], "generations_dir": "s3://bucket/d"},
            "--generations_dir: expected a local path",
        ),
        ({"solutions": "missing.jsonl", "output": "p.jsonl"}, "no such file"),
    ],
)
def test_bad_flags_are_explained(flags, message):
    with pytest.raises(ValueError, match=message):
        run(DataSetupConfig(**flags))


def test_failing_command_prints_one_line_and_writes_nothing(tmp_path, capsys):
    source, output = tmp_path / "s.jsonl", tmp_path / "p.jsonl"
    write_jsonl(source, [{"question": "q", "generated_solution": "s", "is_correct": True}])
    with pytest.raises(SystemExit) as stop:
        main(["--solutions", str(source), "--output", str(output)])
    error = capsys.readouterr().err
    assert stop.value.code == 1 and not output.exists()
    assert error.count("\n") == 1 and "no pairs from 1 solutions" in error


def test_output_never_overwrites_a_source(tmp_path, solutions, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    write_jsonl(folder / "train.jsonl", rows_of(solutions))
    write_jsonl(folder / "test.jsonl", [{"question": "four"}])
    (tmp_path / "link.jsonl").symlink_to(solutions)
    before = {path: path.read_bytes() for path in (Path(solutions), *folder.iterdir())}
    for flags in (
        {"solutions": solutions, "output": "folder/../solutions.jsonl"},
        {"solutions": f"{folder},{solutions}", "output": "link.jsonl"},
        {"solutions": str(folder), "output": "folder/train.jsonl"},
        {"solutions": solutions, "output": "folder/test.jsonl", "decontaminate": ["folder/test.jsonl"]},
        {"solutions": solutions, "output": "folder/test.jsonl", "decontaminate": ["folder"]},
    ):
        with pytest.raises(ValueError, match="--output .* would be overwritten"):
            run(DataSetupConfig(**flags))
    assert {path: path.read_bytes() for path in before} == before
    run(DataSetupConfig(solutions=str(folder), output="folder/pairs.jsonl"))


def test_unreadable_test_question_is_skipped_on_demand(tmp_path, solutions):
    (tmp_path / "t.jsonl").write_text('{broken\n{"question": "two"}\n')
    flags = {"solutions": solutions, "output": str(tmp_path / "p.jsonl"), "decontaminate": [str(tmp_path / "t.jsonl")]}
    with pytest.raises(ValueError, match=r"t\.jsonl:1: .*--on_bad_row skip"):
        run(DataSetupConfig(**flags))
    assert run(DataSetupConfig(**flags, on_bad_row="skip"))["contaminated"] == 4


def test_decontamination_needs_questions(tmp_path, solutions):
    write_jsonl(tmp_path / "t.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match=r"question, problem or prompt, got \['text'\]"):
        run(DataSetupConfig(solutions=solutions, output="p.jsonl", decontaminate=[str(tmp_path / "t.jsonl")]))


def test_generations_are_laid_out_by_benchmark(tmp_path):
    source, greedy, target = tmp_path / "s.jsonl", tmp_path / "g.jsonl", tmp_path / "out"
    write_jsonl(source, [{"problem": q, "generation": f"{q}{k}", "is_correct": True} for k in range(2) for q in "ab"])
    write_jsonl(greedy, [{"question": q, "generated_solution": f"{q} greedy"} for q in "ab"])
    entries = [f"gsm8k={source}", f"gsm8k/greedy={greedy}"]
    run(DataSetupConfig(generations=entries, generations_dir=str(target)))
    folder = target / "gsm8k"
    assert sorted(path.name for path in folder.iterdir()) == [
        "output-greedy.jsonl",
        "output-rs0.jsonl",
        "output-rs1.jsonl",
    ]
    assert [(row["question"], row["generated_solution"]) for row in rows_of(folder / "output-rs1.jsonl")] == [
        ("a", "a1"),
        ("b", "b1"),
    ]
    assert [c.sample for c in read_completions(folder)] == [0, 0, 1, 1]
    assert [row["generated_solution"] for row in rows_of(folder / "output-greedy.jsonl")] == ["a greedy", "b greedy"]
    # the layout itself is a source, and a second run of the same is no error
    run(DataSetupConfig(generations=[f"copy={folder},gsm8k={source}"], generations_dir=str(target)))
    for path in folder.iterdir():
        assert (target / "copy" / path.name).read_text() == path.read_text()


def test_own_sample_numbers_are_kept(tmp_path):
    rows = [
        {"question": "a", "generated_solution": "a4", "sample": 4},
        {"question": "b", "generated_solution": "b0", "sample": 0},
        {"question": "b", "generated_solution": "b4", "sample": 4},
    ]
    write_jsonl(tmp_path / "s.jsonl", rows)
    run(DataSetupConfig(generations=[f"x={tmp_path / 's.jsonl'}"], generations_dir=str(tmp_path)))
    assert [row["generated_solution"] for row in rows_of(tmp_path / "x" / "output-rs4.jsonl")] == ["a4", "b4"]
    write_jsonl(tmp_path / "fewer.jsonl", rows[1:2])
    with pytest.raises(ValueError, match="output-rs4.jsonl.*remove"):
        run(DataSetupConfig(generations=[f"x={tmp_path / 'fewer.jsonl'}"], generations_dir=str(tmp_path)))


def test_two_greedy_completions_of_one_question_are_refused(tmp_path):
    write_jsonl(tmp_path / "g.jsonl", [{"question": "a", "generated_solution": str(k)} for k in range(2)])
    with pytest.raises(ValueError, match="several of 'a'"):
        run(DataSetupConfig(generations=[f"x/greedy={tmp_path / 'g.jsonl'}"], generations_dir=str(tmp_path / "o")))


def test_script_works_from_any_folder_and_under_slurm(tmp_path):
    """The script is copied beside a stand-in for the installed command, which writes down its arguments."""
    project, log = tmp_path / "project", tmp_path / "log"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / "run_scripts").mkdir()
    script = project / "run_scripts" / "data_setup.sh"
    script.write_text((ROOT / "run_scripts" / "data_setup.sh").read_text())
    for path, text in (
        (project / ".venv" / "bin" / "data_setup", f'printf "%s\\n" data_setup "$@" >> {log}\n'),
        (tmp_path / "srun", f'printf "%s\\n" srun >> {log}\nexec "$@"\n'),
    ):
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for arguments, expected in (
        (["--seed", "1 2"], ["data_setup", "--seed", "1 2"]),
        (["slurm", "--seed", "1"], ["srun", "data_setup", "--seed", "1"]),
    ):
        log.write_text("")
        subprocess.run(["bash", str(script), *arguments], check=True, cwd=tmp_path, env=environment, timeout=60)
        assert log.read_text().splitlines() == expected
    log.write_text("")
    subprocess.run(["bash", str(script)], check=True, cwd=tmp_path, env=environment, timeout=60)
    assert log.read_text().splitlines()[:3] == ["data_setup", "--solutions", "nvidia/OpenMathInstruct-1"]


def test_real_solutions_become_pairs(shared_data, tmp_path, capsys):
    folder = shared_data / "gsm8k_solutions"
    output = tmp_path / "pairs.jsonl"
    counts = run(
        DataSetupConfig(
            solutions=str(folder / "train.jsonl"),
            output=str(output),
            decontaminate=[str(folder / "validation.jsonl")],
            strip_calculator=True,
        )
    )
    assert counts["read"] == 3808 and counts["unparsed"] == 7 and counts["test_questions"] == 125
    pairs = rows_of(output)
    held_out = {row["question"] for row in rows_of(folder / "validation.jsonl")}
    assert len(pairs) == counts["pairs"] > 1500 and not held_out & {pair["question"] for pair in pairs}
    assert "<<" not in json.dumps(pairs)
