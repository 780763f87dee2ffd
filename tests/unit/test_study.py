"""Studies: declaration, cells and their identities, dealing, statistics, tables."""

import dataclasses
import json
import math
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from openrlhf.cli import study as study_command
from openrlhf.cli import study_cell, study_workers
from openrlhf.cli.study_data import choose_questions
from openrlhf.cli.study_file import parse_study, read_flags, read_study
from openrlhf.cli.study_plan import CELL_FILE, cell_identity, cell_line, plan_cells, read_finished, recorded_flags
from openrlhf.evaluation import study_plots
from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.metrics import auroc
from openrlhf.evaluation.step_level import step_level
from openrlhf.evaluation.study_plots import overview_blocks, overview_sets
from openrlhf.evaluation.study_scores import (
    STEP_RULES,
    goal_trajectory,
    measure_draws,
    measure_values,
    score_arrays,
    vote_figures,
)
from openrlhf.evaluation.study_statistics import paired_by_seed, t_interval, two_level_interval
from openrlhf.evaluation.study_summary import FinishedCell, summarise_study
from openrlhf.evaluation.study_tables import format_study, write_tables
from openrlhf.evaluation.summary import PREFIX_PERCENTS
from openrlhf.evaluation.threshold_choice import split_questions, threshold_at_equal_accuracy

ROOT = Path(__file__).resolve().parents[2]


def declared(**changes) -> dict:
    """A small valid study."""
    return {
        "name": "small",
        "about": "two variants",
        "baseline": "vanilla",
        "common": {"max_epochs": 2, "train_batch_size": 16},
        "tasks": {"pocket-2": {"kind": "pocket", "questions": 30, "flags": {"max_len": 200}}},
        "variants": {"vanilla": {}, "cosine": {"reward_model_strategy": "contrastive", "max_epochs": 1}},
        "seeds": [0, 1],
    } | changes


def pocket(**changes) -> dict:
    return {"one": {"kind": "pocket"} | changes}


def responses(**changes) -> dict:
    return {"one": {"kind": "responses", "pretrain": "pocket", "train": "{data}/t.jsonl", "eval": {"v": "e"}} | changes}


def preferences(**changes) -> dict:
    return {"one": {"kind": "preferences", "pretrain": "pocket", "train": "t"} | changes}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sedes": [1]}, "study: unknown key 'sedes'; did you mean 'seeds'?"),
        ({"seeds": [1, 1]}, "seeds: expected a list of different whole numbers"),
        ({"seeds": [0.5]}, "seeds: expected a whole number of at least 0, got 0.5"),
        ({"seeds": [True]}, "seeds: expected a whole number"),
        ({"baseline": "plain"}, r"baseline: expected one of the variants \['vanilla', 'cosine'\], got 'plain'"),
        ({"baseline": ["vanilla"]}, r"baseline: expected text, got \['vanilla'\]"),
        ({"name": "a/b"}, "name: a name may hold letters"),
        ({"name": {}}, "name: expected text, got {}"),
        ({"tasks": {}}, "tasks: expected a JSON object with at least one name"),
        ({"tasks": {"one": {"kind": "maths"}}}, r"tasks.one.kind: expected one of .*, got 'maths'"),
        ({"tasks": {"one": {"kind": []}}}, r"tasks.one.kind: expected one of .*, got \[\]"),
        ({"tasks": pocket(leve=2)}, "tasks.one: unknown key 'leve'; did you mean 'level'?"),
        ({"tasks": pocket(level=9)}, r"tasks.one.level: expected one of \[1, 2, 3"),
        ({"tasks": pocket(questions=0)}, "tasks.one.questions: expected a whole number of at least 1, got 0"),
        ({"tasks": pocket(questions=None)}, "tasks.one.questions: expected a whole number"),
        ({"tasks": {"one": {"kind": "responses", "pretrain": "m", "eval": {"v": "e"}}}}, "expected the key 'train'"),
        ({"tasks": responses(eval={})}, "tasks.one.eval: expected a JSON object with at least one name"),
        ({"tasks": responses(eval={"steps": "x"})}, "tasks.one.eval.steps: the name is kept"),
        ({"tasks": preferences(eval_fraction=1)}, "one.eval_fraction: expected a share above 0 and below 1, got 1"),
        ({"tasks": preferences(flags={"eval_fraction": 0.1})}, "'eval_fraction' is a key of the task itself"),
        ({"tasks": preferences(flags={"responses_per_prompt": 4})}, "responses_per_prompt is for labelled responses"),
        ({"tasks": preferences(flags={"max_samples": 40})}, "max_samples would cut the held-out pairs too"),
        ({"common": {"learning_rat": 1}}, "common: unknown flag of train_rm 'learning_rat'; did you mean"),
        ({"common": {"seed": 1}}, "common: 'seed' is set by the study itself"),
        ({"common": {"max_epochs": 1.5}}, "common.max_epochs: .*invalid int value: '1.5'"),
        ({"common": {"max_epochs": [1, 2]}}, "common.max_epochs: no value of this flag"),
        ({"common": {"target_modules": ["q_proj", "--seed=3"]}}, "common.target_modules: no value of this flag"),
        ({"common": {"dataset_split": "test"}}, "common: 'dataset_split' is set by the study itself"),
        ({"common": {"on_long": "cut"}}, "common.on_long: .*invalid choice: 'cut'"),
        ({"variants": {"vanilla": {"bf16": "maybe"}}}, "variants.vanilla.bf16: .*expected true or false"),
        ({"variants": {"vanilla": {"loss": "hinge"}}}, "'pocket-2' with variant 'vanilla': --loss: expected one"),
        ({"variants": {"vanilla": {"responses_per_prompt": 1}}}, "--responses_per_prompt must be at least 2"),
    ],
)  # fmt: skip
def test_a_study_that_cannot_run_is_refused_by_place(changes, told, capsys):
    with pytest.raises(ValueError, match=told):
        parse_study(declared(**changes))
    assert capsys.readouterr().err == ""  # no usage of train_rm's hundred flags


def test_files_that_are_no_studies_are_refused(tmp_path):
    file = tmp_path / "study.json"
    with pytest.raises(ValueError, match="cannot read"):
        read_study(file)
    file.write_text('{"seeds": [1], "seeds": [2]}')
    with pytest.raises(ValueError, match="'seeds' is there twice"):
        read_study(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="no study"):
        read_study(file)
    file.write_text(json.dumps(declared(tasks=responses())))
    with pytest.raises(ValueError, match=r"tasks.one.train: no such file: nowhere/t.jsonl"):
        plan_cells(read_study(file), "nowhere")


def test_every_study_of_the_examples_can_be_read():
    files = sorted((ROOT / "examples" / "studies").glob("*.json"))
    assert files
    for file in files:
        assert read_study(file).seeds


def test_flags_of_a_variant_override_those_of_its_task_and_these_the_common_ones():
    study = parse_study(declared(tasks=pocket(flags={"train_batch_size": 8, "max_epochs": 9, "max_len": 100})))
    vanilla, cosine = (study.config("one", variant, 3) for variant in ("vanilla", "cosine"))
    assert (vanilla.max_epochs, vanilla.train_batch_size, vanilla.max_len, vanilla.seed) == (9, 8, 100, 3)
    assert (cosine.max_epochs, cosine.train_batch_size, cosine.contrastive) == (1, 8, True)
    assert (vanilla.input_template, vanilla.eval_fraction, vanilla.pretrain) == ("pocket", 0.0, "pocket")
    groups = parse_study(declared(tasks=responses(flags={"responses_per_prompt": 4}))).config("one", "vanilla", 0)
    assert groups.strip_calculator  # the pairs of other variants are made of stripped responses


def test_flags_are_read_as_the_command_line_reads_them():
    flags = {
        "learning_rate": 1e-4,
        "bf16": True,
        "target_modules": ["q", "v"],
        "adam_betas": [0.9, 0.99],
        "max_samples": None,
    }
    assert read_flags("common", flags) == flags


def test_cells_are_ordered_by_seed_and_share_identities_across_studies():
    study = parse_study(declared())
    cells = plan_cells(study, "")
    assert [cell.name for cell in cells] == [
        f"pocket-2/{variant}/seed-{seed}" for seed in (0, 1) for variant in ("vanilla", "cosine")
    ]
    assert len({cell.identity for cell in cells}) == 4
    tasks = declared()["tasks"] | {"harder": {"kind": "pocket", "level": 3}}
    several = plan_cells(parse_study(declared(tasks=tasks)), "")
    assert [(cell.seed, cell.task) for cell in several[::2]] == [
        (0, "pocket-2"), (0, "harder"), (1, "pocket-2"), (1, "harder")
    ]  # fmt: skip
    other = declared(
        name="other",
        common={},
        tasks={
            "renamed": {
                "kind": "pocket",
                "questions": 30,
                "level": 2,
                "flags": {"max_len": 200, "train_batch_size": 16},
            }
        },
        variants={"plain": {"max_epochs": 2, "contrastive_loss_beta": 0.5}},  # a default that is spelt out
        baseline="plain",
        seeds=[1],
    )
    (same,) = plan_cells(parse_study(other), "elsewhere")
    assert same.identity == cells[2].identity
    for change in ({"questions": 31}, {"pairs_per_question": 3}, {"eval_samples": 4}, {"flags": {"max_len": 201}}):
        task = {"kind": "pocket", "questions": 30, "flags": {"max_len": 200}} | change
        assert plan_cells(parse_study(declared(tasks={"pocket-2": task})), "")[0].identity != cells[0].identity


def test_identity_follows_the_content_of_data_files_and_not_their_place(tmp_path):
    def first(folder: str, train: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "t.jsonl").write_text(train)
        (tmp_path / folder / "e").write_text("eval")
        study = parse_study(declared(tasks=responses(eval={"v": "{data}/e"})))
        return plan_cells(study, str(tmp_path / folder))[0].identity

    assert first("a", "rows") == first("b", "rows") != first("c", "other rows")


def test_a_cell_counts_as_finished_only_with_the_flags_it_recorded(tmp_path):
    cell = plan_cells(parse_study(declared()), "")[0]
    assert read_finished(cell, tmp_path) is None
    folder = cell.folder(tmp_path)
    folder.mkdir(parents=True)
    record = {"status": "finished", "flags": recorded_flags(cell.config)}
    (folder / CELL_FILE).write_text(json.dumps(record))
    assert read_finished(cell, tmp_path) == record
    del record["flags"]["l2"]  # run before the flag existed
    (folder / CELL_FILE).write_text(json.dumps(record))
    assert read_finished(cell, tmp_path) == record
    record["flags"]["max_norm"] = 5.0  # another default then
    (folder / CELL_FILE).write_text(json.dumps(record))
    assert read_finished(cell, tmp_path) is None


def test_a_cell_that_another_study_has_finished_is_not_run_again(tmp_path, monkeypatch):
    cell = plan_cells(parse_study(declared()), "")[0]
    write_finished(cell, tmp_path)
    monkeypatch.setattr(study_cell.train_rm, "run", lambda config: pytest.fail("trained again"))
    assert study_cell.run_cell(cell, tmp_path, "other") == read_finished(cell, tmp_path)


@pytest.mark.parametrize(("label", "found"), [(None, "no label"), (True, "correct ones"), (False, "wrong ones")])
def test_a_set_that_judges_nothing_is_refused_before_the_training(tmp_path, monkeypatch, label, found):
    row = {"question": "What is 1 + 1?", "generated_solution": "2", "predicted_answer": "2"}
    rows = [row | {"is_correct": True}, row | {"generated_solution": "3", "is_correct": False}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "e.jsonl").write_text(json.dumps(row if label is None else row | {"is_correct": label}) + "\n")
    cell = plan_cells(parse_study(declared(tasks=responses(eval={"v": "{data}/e.jsonl"}))), str(tmp_path))[0]
    monkeypatch.setattr(study_cell.train_rm, "run", lambda config: pytest.fail("trained first"))
    with pytest.raises(ValueError, match=f"e.jsonl: expected correct and wrong completions, .* found {found}"):
        study_cell.run_cell(cell, tmp_path / "out", "small")
    assert not [path for path in (tmp_path / "out" / "cells").iterdir() if path.is_dir()]


def test_the_pattern_of_a_line_names_its_cell_alone():
    variants = {"vanilla": {}, "a+b-0.1": {"l2": 0.1}, "aab-0.1": {"l2": 0.2}, "aab-001": {"l2": 0.3}}
    cells = plan_cells(parse_study(declared(variants=variants)), "")
    for cell in cells:
        line = cell_line(cell, {"flags": {}, "sets": {}, "inputs": {"train": "/data/of/one/machine/train.jsonl"}})
        only = line["only"]
        assert line["inputs"] == {"train": "train.jsonl"}
        assert [one.name for one in cells if re.search(only, one.name)] == [cell.name]


def test_a_new_flag_at_its_default_changes_no_identity():
    cell = plan_cells(parse_study(declared()), "")[0]
    newer = dataclasses.make_dataclass("Newer", [("brand_new", float, 0.5)], bases=(type(cell.config),), frozen=True)
    inputs = {"pretrain": "x"}
    same, other = (newer(**vars(cell.config), brand_new=value) for value in (0.5, 0.6))
    assert cell_identity(cell.declared, same, inputs) == cell_identity(cell.declared, cell.config, inputs)
    assert cell_identity(cell.declared, other, inputs) != cell_identity(cell.declared, cell.config, inputs)


def test_questions_of_a_learning_curve_are_nested():
    rows = [{"question": f"q {i // 2}", "k": i} for i in range(40)]
    few, many = (choose_questions(rows, count, seed=3) for count in (5, 9))
    assert len(few) == 10 and len(many) == 18 and all(row in many for row in few)
    assert [row["k"] for row in many] == sorted(row["k"] for row in many)
    assert choose_questions(rows, 5, seed=4) != few
    with pytest.raises(ValueError, match="expected at most 20"):
        choose_questions(rows, 21, seed=0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--study is required"),
        (["--study", "x", "--workers", "0"], "--workers must be at least 1"),
        (["--study", "x", "--max_minutes", "0"], "--max_minutes must be above 0"),
        (["--study", "x", "--only", "("], "is no regular expression"),
        (["--study", "x", "--list", "--tables_only"], "exclude each other"),
        (["--study", "STUDY", "--only", "nothing"], "none of the 4 cells has such a name"),
        (["--study", "STUDY", "--cell", "pocket-2/vanilla"], "none of the 4 cells has such a name"),
    ],
)
def test_bad_flags_are_refused(words, told, tmp_path, capsys):
    file = tmp_path / "s.json"
    file.write_text(json.dumps(declared()))
    with pytest.raises(SystemExit) as stopped:
        study_command.main([str(file) if word == "STUDY" else word for word in words])
    assert stopped.value.code == 1
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def write_finished(cell, output: Path) -> None:
    folder = cell.folder(output)
    folder.mkdir(parents=True)
    (folder / CELL_FILE).write_text(json.dumps({"status": "finished", "flags": recorded_flags(cell.config)}))


def test_list_names_finished_cells_and_dealing_takes_each_identity_once(tmp_path, capsys, monkeypatch):
    file = tmp_path / "s.json"
    variants = {"vanilla": {}, "same": {"contrastive_loss_beta": 0.5}, "cosine": {"contrastive_loss": True}}
    file.write_text(json.dumps(declared(variants=variants)))
    cells = plan_cells(read_study(file), "")
    output = tmp_path / "out"
    write_finished(cells[3], output)  # vanilla of seed 1, and with it "same"
    study_command.main(["--study", str(file), "--output", str(output), "--list", "--only", "seed-1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["finished", "finished", "to"]

    dealt = {}
    monkeypatch.setattr(
        study_workers, "deal_cells", lambda cells, words, **rest: dealt.update(cells=cells, **rest) or []
    )
    monkeypatch.setattr(study_command, "_write_tables", lambda *_: {})
    study_command.main(["--study", str(file), "--output", str(output), "--max_minutes", "2"])
    assert [cell.name for cell in dealt["cells"]] == [
        "pocket-2/vanilla/seed-0", "pocket-2/cosine/seed-0", "pocket-2/cosine/seed-1"
    ]  # fmt: skip
    assert dealt["finished"] == 1 and dealt["max_seconds"] == 120
    assert dealt["threads"] == 1 and dealt["workers"] == study_command.default_workers(1)
    assert study_command.default_workers(1) >= study_command.default_workers(10_000) == 1
    assert json.loads((output / "studies" / "small.json").read_text())["name"] == "small"


@dataclasses.dataclass(frozen=True)
class NamedCell:
    """What dealing needs of a cell."""

    name: str

    @property
    def identity(self) -> str:
        return self.name


def run_lines(monkeypatch, lines: dict[str, str]):
    """Make workers run these lines of Python in place of the study command."""
    start = study_workers.subprocess.Popen
    monkeypatch.setattr(
        study_workers.subprocess,
        "Popen",
        lambda command, **rest: start([sys.executable, "-S", "-c", lines[command[-1]]], **rest),
    )


def test_a_failed_cell_is_told_with_its_log_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    lines = {
        "a": "print('fine')",
        "b": "import sys; print('line\\n' * 20 + 'the reason'); sys.exit(3)",
        "c": "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['PYTHONSAFEPATH'])",
    }
    run_lines(monkeypatch, lines)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    done = []
    failed = study_workers.deal_cells(
        [NamedCell(name) for name in lines], [], logs=tmp_path, workers=2, on_finished=lambda: done.append(1)
    )
    assert failed == ["b"] and len(done) == 2
    told = capsys.readouterr().out
    assert "b failed with status 3" in told and "the reason" in told and told.count("line") == 14
    assert (tmp_path / "c.log").read_text() == "1 1\n"


def test_no_cell_is_started_after_the_time(tmp_path, monkeypatch, capsys):
    run_lines(monkeypatch, dict.fromkeys("abc", "import time; time.sleep(0.5)"))
    cells = [NamedCell(name) for name in "abc"]
    assert study_workers.deal_cells(cells, [], logs=tmp_path, workers=1, max_seconds=0.3) == []
    assert "time is up: 2 cells are not started" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]


def test_a_stop_ends_the_workers(tmp_path, monkeypatch):
    run_lines(monkeypatch, dict.fromkeys("ab", "import time; time.sleep(60)"))
    started = []
    start = study_workers._start
    monkeypatch.setattr(study_workers, "_start", lambda *all: started.append(start(*all)) or started[-1])

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(study_workers, "time", clock)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        study_workers.deal_cells([NamedCell("a"), NamedCell("b")], [], logs=tmp_path, workers=2)
    assert time.monotonic() - began < 5
    assert [worker.process.returncode for worker in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_t_interval_equals_scipy_and_a_hand_computed_one():
    values = [0.02, 0.05, 0.03, 0.06]
    mean, low, high = t_interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((0.04, expected.low, expected.high))
    # of 1 and 3: mean 2, s = sqrt(2), half width 12.7062 * sqrt(2) / sqrt(2)
    assert t_interval([1, 3]) == pytest.approx((2, 2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert t_interval([0.5]) == (0.5, None, None)
    assert t_interval([]) == (None, None, None)


def test_two_level_interval_against_a_slow_loop():
    generator = np.random.default_rng(1)
    values, drawn = generator.normal(size=3), generator.normal(size=(3, 50))
    seeds = np.random.default_rng(7).integers(0, 3, (3, 50))
    means = [sum(drawn[seeds[k, d], d] for k in range(3)) / 3 for d in range(50)]
    expected = (values.mean(), *np.percentile(means, [2.5, 97.5]))
    assert two_level_interval(values, drawn, 7) == pytest.approx(expected)
    assert two_level_interval(values[:1], drawn[:1]) == (pytest.approx(values[0]), None, None)
    assert two_level_interval([], np.zeros((0, 5))) == (None, None, None)
    with pytest.raises(ValueError, match="one row of draws a seed"):
        two_level_interval(values, drawn[:2])


def test_two_level_interval_widens_with_either_level():
    """Independent normals: variance of the mean is that of questions, shared by the seeds, plus that of seeds / S."""
    generator = np.random.default_rng(0)
    seeds, questions = 40, generator.normal(size=20_000)
    offsets = generator.normal(size=seeds)
    low, high = two_level_interval(offsets, offsets[:, None] + questions)[1:]
    expected = 2 * 1.96 * math.sqrt(1 + offsets.var() / seeds)  # 1: the questions do not average out over seeds
    assert high - low == pytest.approx(expected, rel=0.02)  # percentiles of 20,000 draws


def test_differences_are_paired_by_seed():
    paired = paired_by_seed({0: 0.5, 2: 0.75, 3: None, 4: 0.5}, {2: 0.5, 0: 0.25, 3: 0.5, 9: 0.5})
    assert paired == {0: 0.25, 2: 0.25}


def scored_rows(count: int = 40, seed: int = 0, questions: int = 10) -> list[dict]:
    """Random scored completions with votable answers."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(generator.integers(1, 12))
        correct = bool(generator.random() < 0.5)
        rewards = generator.normal(size=length).astype(np.float32).astype(float).tolist()
        rows.append(
            {
                "question": f"question {i % questions}",
                "is_correct": correct,
                "expected_answer": "7",
                "predicted_answer": "7" if correct else str(int(generator.integers(8, 12))),
                "num_actions": length,
                "reward": rewards[-1],
                "partial_rewards": rewards,
                "cosine_sim": np.tanh(generator.normal(size=length)).astype(np.float32).astype(float).tolist(),
            }
        )
    return rows


def value_at(row: dict, key: str, percent: float) -> float:
    return row[key][math.ceil(percent * row["num_actions"] / 100) - 1]


def test_measures_of_completions_are_aurocs_of_the_stored_numbers():
    rows = scored_rows()
    rows[3]["is_correct"] = None
    rows[5] |= {"reward": None, "partial_rewards": None, "cosine_sim": None}
    arrays = score_arrays(rows, "completions")
    values = measure_values(arrays, "completions")
    usable = [row for i, row in enumerate(rows) if i not in (3, 5)]
    labels = [row["is_correct"] for row in usable]
    for name, key in (("reward", "partial_rewards"), ("goal_similarity", "cosine_sim")):
        for percent in (25, 50, 75, 100):
            expected = auroc(labels, [value_at(row, key, percent) for row in usable])
            assert values[f"{name}@{percent}"] == pytest.approx(expected)
    draws = draw_questions(arrays["question"].tolist(), 5, 0)
    drawn = measure_draws(arrays, "completions", "reward@50", draws)
    for d, weights in enumerate(draws.weights):
        repeated = [row for row in usable for _ in range(weights[int(row["question"].split()[1])])]
        expected = auroc(
            [row["is_correct"] for row in repeated], [value_at(row, "partial_rewards", 50) for row in repeated]
        )
        assert drawn[d] == pytest.approx(expected)


def test_measures_of_pairs_are_shares_of_won_pairs():
    def row(question: str, chosen: bool, reward: float) -> dict:
        scores = {"partial_rewards": [0.0, reward], "cosine_sim": [0.1, 0.1]}
        return {"question": question, "is_correct": chosen, "num_actions": 2, **scores}

    rewards = [("p", 1, 0), ("q", 0, 1), ("q", 2, 1), ("r", 1, 1)]  # won, lost, won, tied
    rows = [row(q, k == 0, pair[k]) for q, *pair in rewards for k in (0, 1)]
    arrays = score_arrays(rows, "pairs")
    values = measure_values(arrays, "pairs")
    assert values["reward@100"] == 0.5 and values["reward@50"] == 0.0 and values["goal_similarity@100"] == 0.0
    draws = draw_questions(range(3), 20, 0)
    drawn = measure_draws(arrays, "pairs", "reward@100", draws)
    for d, (p, q, r) in enumerate(draws.weights.astype(int)):
        assert drawn[d] == pytest.approx((p + q) / (p + 2 * q + r))  # q has two pairs of which one is won


def test_measures_of_steps_are_those_of_step_level():
    rows = []
    for i, row in enumerate(scored_rows(30, seed=4)):
        lines = [f"step {k}" for k in range(row["num_actions"])]
        text = "\n".join(lines)
        ends = [len("\n".join(lines[: k + 1])) for k in range(len(lines))]
        rows.append(row | {"generated_solution": text, "token_ends": ends, "first_error_step": i % (len(lines) + 1)})
    arrays = score_arrays(rows, "steps")
    questions = draw_questions([row["question"] for row in rows], 8, 0)
    expected = step_level(rows, questions)["accuracy"]
    values = measure_values(arrays, "steps")
    assert set(values) == set(expected) == set(STEP_RULES)
    for rule, (value, low, high) in expected.items():
        assert values[rule] == pytest.approx(value)
        drawn = measure_draws(arrays, "steps", rule, draw_questions(arrays["question"].tolist(), 8, 0))
        assert np.percentile(drawn, [2.5, 97.5]) == pytest.approx([low, high])


def test_trajectories_are_means_along_the_response():
    rows = [
        {"is_correct": True, "num_actions": 20, "cosine_sim": [k / 20 for k in range(20)]},
        {"is_correct": True, "num_actions": 1, "cosine_sim": [0.5]},
        {"is_correct": None, "num_actions": 1, "cosine_sim": [0.9]},
    ]
    found = goal_trajectory(rows)
    assert found["percents"][0] == 5 and found["percents"][-1] == 100 and len(found["percents"]) == 20
    assert found["correct"] == pytest.approx([(k / 20 + 0.5) / 2 for k in range(20)])
    assert found["wrong"] is None and found["counts"] == {"correct": 2, "wrong": 0}


def test_votes_are_judged_with_thresholds_of_other_questions():
    rows = scored_rows(240, questions=30, seed=2)
    figures = vote_figures(rows)
    first, second = split_questions(rows)
    parts = [threshold_at_equal_accuracy(a, b).test for a, b in ((first, second), (second, first))]
    filtered = figures["filtered_vote"]["goal_similarity"]
    right = sum(part.accuracy * part.questions for part in parts)
    assert filtered["accuracy"] == pytest.approx(right / 30)
    saved = sum(
        part.tokens_saved * sum(row["num_actions"] for row in side)
        for part, side in zip(parts, (second, first), strict=True)
    )
    assert filtered["tokens_saved"] == pytest.approx(saved / sum(row["num_actions"] for row in rows))
    best = 0
    for question in {row["question"] for row in rows}:
        own = [row for row in rows if row["question"] == question]
        best += max(own, key=lambda row: row["reward"])["is_correct"]
    assert figures["best of n, reward"] == pytest.approx(best / 30)
    assert figures["majority vote"] == pytest.approx(filtered["unfiltered_accuracy"])
    others = [row | {"question": row["question"] + "?"} for row in scored_rows(240, questions=30, seed=5)]
    (threshold,) = vote_figures(rows, others)["filtered_vote"]["goal_similarity"]["thresholds"]
    assert threshold == threshold_at_equal_accuracy(others, rows).threshold
    assert vote_figures(scored_rows(10, questions=10)) is None


def test_the_reward_filter_drops_by_order_of_rewards_alone():
    rows = scored_rows(240, questions=30, seed=2)
    larger = [
        row | {"reward": 50 * row["reward"], "partial_rewards": [50 * value for value in row["partial_rewards"]]}
        for row in rows
    ]
    a, b = (vote_figures(part)["filtered_vote"]["reward"] for part in (rows, larger))
    assert a["tokens_saved"] == pytest.approx(b["tokens_saved"]) and a["tokens_saved"] > 0


def finished(folder: Path, variant: str, seed: int, shift: float, shared: bool) -> FinishedCell:
    """A finished cell of the task "one" whose rewards of correct completions are higher by `shift`."""
    rows = [
        row | {"partial_rewards": [value + shift * row["is_correct"] for value in row["partial_rewards"]]}
        for row in scored_rows(60, seed=0 if shared else seed)
    ]
    noise = np.random.default_rng(100 + seed)
    rows = [row | {"partial_rewards": [v + 0.1 * noise.normal() for v in row["partial_rewards"]]} for row in rows]
    arrays = score_arrays(rows, "completions")
    name = folder / f"{variant}-{seed}-{shared}.npz"
    np.savez(name, **{f"test/{key}": part for key, part in arrays.items()})
    figures = {
        "kind": "completions", "shared": shared, "completions": 60, "correct": 0.5, "votes": None,
        "measures": measure_values(arrays, "completions"), "trajectory": goal_trajectory(rows),
    }  # fmt: skip
    record = {
        "identity": name.stem, "steps": 4, "pairs": {"kept": 9}, "seconds": {"training": 1, "scoring": 2},
        "sets": {"test": figures},
    }  # fmt: skip
    return FinishedCell("one", variant, seed, record, name)


@pytest.mark.parametrize("shared", [False, True])
def test_tables_compare_with_the_baseline_on_common_seeds(tmp_path, shared):
    shifts = {"better": 1.0, "vanilla": 0.0}
    cells = [
        finished(tmp_path, variant, seed, shift, shared) for variant, shift in shifts.items() for seed in (0, 1, 2)
    ]
    cells.append(finished(tmp_path, "better", 7, 1.0, shared))
    summary = summarise_study(cells, "vanilla", ["vanilla", "better", "not run yet"])
    measure = summary["tasks"]["one"]["sets"]["test"]["measures"]["reward@100"]
    assert list(measure) == ["vanilla", "better"]
    values = {
        variant: {
            cell.seed: cell.record["sets"]["test"]["measures"]["reward@100"]
            for cell in cells
            if cell.variant == variant
        }
        for variant in shifts
    }
    better = measure["better"]
    assert better["mean"] == pytest.approx(np.mean(list(values["better"].values())))
    assert better["sd"] == pytest.approx(np.std(list(values["better"].values()), ddof=1))
    differences = [values["better"][seed] - values["vanilla"][seed] for seed in (0, 1, 2)]
    assert better["difference"]["seeds"] == [0, 1, 2]
    assert better["difference"]["mean"] == pytest.approx(np.mean(differences))
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert better["difference"]["t"] == pytest.approx([expected.low, expected.high])
    assert (better["difference"]["two_level"] is not None) == shared
    assert better["difference"]["interval"] == better["difference"]["two_level" if shared else "t"]
    low, high = better["difference"]["interval"]
    assert low < np.mean(differences) < high
    assert measure["vanilla"]["difference"] is None
    goal = summary["tasks"]["one"]["sets"]["test"]["measures"]["goal_similarity@25"]["better"]
    rewards = {cell.seed: cell.record["sets"]["test"]["measures"]["reward@25"] for cell in cells[3:6]}  # of vanilla
    assert goal["from_reward"]["values"] == pytest.approx([goal["values"][str(s)] - rewards[s] for s in (0, 1, 2)])
    assert better["from_reward"] is None
    votes = summary["tasks"]["one"]["sets"]["test"]["votes"]
    assert votes == {"vanilla": None, "better": None}

    summary = {"study": "s", "about": "", "cells": {"finished": 7, "declared": 9}, **summary}
    write_tables(summary, tmp_path / "tables", "s")
    assert (tmp_path / "tables" / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "tables" / "s-overview.png").read_bytes()[:4] == b"\x89PNG"
    ((name, rows),) = overview_blocks(overview_sets(summary), ["vanilla", "better"])
    goal_difference = summary["tasks"]["one"]["sets"]["test"]["measures"]["goal_similarity@100"]["better"]["difference"]
    assert name == "one: test" and rows == [
        (1, False, [better["difference"]["mean"], low, high]),
        (1, True, [goal_difference["mean"], *goal_difference["interval"]]),
    ]
    assert json.loads((tmp_path / "tables" / "s.json").read_text()) == json.loads(json.dumps(summary))
    text = (tmp_path / "tables" / "s.md").read_text()
    row = next(line for line in text.split("\n") if line.startswith("| better | 4 |"))
    assert f"{np.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]" in row
    told = f"| better | goal similarity minus the baseline's reward | {goal['from_reward']['mean']:+.3f} ["
    assert told in text
    assert f"intervals over {'seeds and questions' if shared else 'seeds'}" in text


def test_a_variant_that_only_a_later_task_has_finished_is_drawn(tmp_path):
    cells = [finished(tmp_path, variant, 0, 0.0, False) for variant in ("vanilla", "other")]
    cells = [cells[0], *(dataclasses.replace(cell, task="two") for cell in cells)]
    summary = summarise_study(cells, "vanilla", ["vanilla", "other"])
    summary = {"study": "s", "about": "", "cells": {"finished": 3, "declared": 4}, **summary}
    write_tables(summary, tmp_path / "tables", "s")
    assert (tmp_path / "tables" / "s-overview.png").is_file()


def test_sets_of_other_completions_are_not_compared(tmp_path):
    cells = [finished(tmp_path, variant, seed, 0.0, True) for variant in ("vanilla", "shorter") for seed in (0, 1)]
    cells[2].record["sets"]["test"]["completions"] = 58  # seed 0 of "shorter" left out a pair

    def differences():
        figures = summarise_study(cells, "vanilla", ["vanilla", "shorter"])["tasks"]["one"]["sets"]["test"]
        return [figures["measures"]["goal_similarity@100"]["shorter"][key] for key in ("difference", "from_reward")]

    assert [one["seeds"] for one in differences()] == [[1], [1]]
    cells[3].record["sets"]["test"]["questions"] = 9
    assert differences() == [None, None]


def test_curves_of_many_variants_can_be_told_apart():
    curve = {f"variant {number}": {"mean": 0.5} for number in range(30)}
    measures = {f"{score}@{percent}": curve for score in ("reward", "goal_similarity") for percent in PREFIX_PERCENTS}
    axes = Figure().subplots()
    study_plots._draw_prefixes(axes, {"kind": "pairs", "measures": measures})
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines]
    assert len(looks) == 61 and len(set(looks)) == 61  # and the line of chance


def test_tables_of_one_class_and_of_nothing_can_be_written(tmp_path):
    cells = [finished(tmp_path, variant, 0, 0.0, True) for variant in ("vanilla", "other")]
    for cell in cells:
        figures = cell.record["sets"]["test"]
        figures["measures"] = dict.fromkeys(figures["measures"])  # undefined: no wrong completion
    summary = {"study": "s", "about": "a", "cells": {"finished": 2, "declared": 2}}
    write_tables(summary | summarise_study(cells, "vanilla", ["vanilla", "other"]), tmp_path / "tables", "s")
    assert re.search(r"\| other \| 1 \| n/a \| n/a \|  \|", (tmp_path / "tables" / "s.md").read_text())
    assert "0 of 0 cells" in format_study(
        summary | {"cells": {"finished": 0, "declared": 0}} | summarise_study([], "vanilla", ["vanilla"])
    )
