"""A study of the embedded task in small: two variants, two seeds, run, resumed and shared."""

import json
import shutil

import numpy as np
import pytest
import torch

from openrlhf.cli import study
from openrlhf.cli.study_cell import run_cell
from openrlhf.cli.study_file import read_study
from openrlhf.cli.study_plan import plan_cells
from openrlhf.evaluation.metrics import auroc

DECLARED = {
    "name": "small",
    "about": "two variants",
    "baseline": "vanilla",
    "common": {"train_batch_size": 20, "micro_train_batch_size": 20, "learning_rate": 4e-4, "max_len": 256},
    "tasks": {"pocket-2": {"kind": "pocket", "questions": 25, "eval_questions": 10, "eval_samples": 4}},
    "variants": {"vanilla": {}, "cosine": {"reward_model_strategy": "contrastive"}},
    "seeds": [0, 1],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with study.json and, under out, the finished study, of which a worker has run the last cell."""
    folder, threads = tmp_path_factory.mktemp("study"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENRLHF_CACHE", str(folder / "cache"))
        (folder / "study.json").write_text(json.dumps(DECLARED))
        for name in ("vanilla/seed-0", "cosine/seed-0", "vanilla/seed-1"):  # a worker of its own takes seconds to start
            run(folder, cell=f"pocket-2/{name}")
        run(folder, workers=2)
        yield folder
    torch.set_num_threads(threads)  # a cell in this process has changed it


def run(folder, file="study.json", **flags) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    study.main(["--study", str(folder / file), "--output", str(folder / "out"), *words])


def cell_times(folder) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in (folder / "out" / "cells").glob("*/cell.json")}


@pytest.mark.slow
def test_cells_hold_figures_that_their_scores_give(place):
    files = sorted((place / "out" / "cells").iterdir())
    assert len(files) == 4
    for folder in files:
        record = json.loads((folder / "cell.json").read_text())
        assert {path.name for path in folder.iterdir()} == {"cell.json", "scores.npz", "model"}
        assert {path.name for path in (folder / "model").iterdir()} == {"manifest.json", "metrics.jsonl"}
        assert record["identity"] == folder.name and record["status"] == "finished"
        assert record["flags"]["seed"] == record["seed"] and record["steps"] == -(-record["pairs"]["kept"] // 20)
        assert set(record["sets"]) == {"validation", "test", "ood"}
        scores = np.load(folder / "scores.npz")
        for name, figures in record["sets"].items():
            labels = scores[f"{name}/label"]
            assert figures["completions"] == len(labels) == 40 and len(figures["trajectory"]["percents"]) == 20
            assert np.array_equal(scores[f"{name}/question"], np.repeat(np.arange(10), 4))
            assert figures["correct"] == pytest.approx(labels.mean())
            assert figures["measures"]["reward@75"] == auroc(labels, scores[f"{name}/reward"][:, 2])
            assert figures["measures"]["goal_similarity@100"] == auroc(labels, scores[f"{name}/goal_similarity"][:, 3])
            assert figures["votes"]["mean of samples"] == pytest.approx(labels.mean())
            correct = scores[f"{name}/goal_similarity"][labels == 1, 3].mean()
            assert figures["trajectory"]["correct"][-1] == pytest.approx(float(correct), abs=1e-6)


@pytest.mark.slow
def test_variants_are_judged_on_the_same_completions_and_seeds_on_others(place):
    cells = plan_cells(read_study(place / "study.json"), "")
    scores = [np.load(cell.folder(place / "out") / "scores.npz") for cell in cells]
    assert [cell.name for cell in cells][:2] == ["pocket-2/vanilla/seed-0", "pocket-2/cosine/seed-0"]
    assert np.array_equal(scores[0]["test/tokens"], scores[1]["test/tokens"])
    assert not np.array_equal(scores[0]["test/reward"], scores[1]["test/reward"])
    assert not np.array_equal(scores[0]["test/tokens"], scores[2]["test/tokens"])


@pytest.mark.slow
def test_tables_are_written(place):
    tables = place / "out" / "tables"
    assert "4 of 4 cells are finished" in (tables / "small.md").read_text()
    summary = json.loads((tables / "small.json").read_text())
    cosine = summary["tasks"]["pocket-2"]["sets"]["ood"]["measures"]["reward@100"]["cosine"]
    assert cosine["difference"]["seeds"] == [0, 1] and cosine["difference"]["two_level"] is None
    assert (tables / "small.png").read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(line) for line in (tables / "small.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == [cell.name for cell in plan_cells(read_study(place / "study.json"), "")]
    assert lines[1]["flags"]["reward_model_strategy"] == "contrastive" and "seed" in lines[1]["flags"]
    assert "max_norm" not in lines[1]["flags"]  # at its default
    assert lines[3]["only"] == "^pocket-2/cosine/seed-1$" and lines[3]["git"]["commit"]
    values = summary["tasks"]["pocket-2"]["sets"]["ood"]["measures"]["reward@100"]["cosine"]["values"]
    assert lines[3]["sets"]["ood"]["measures"]["reward@100"] == values["1"]


@pytest.mark.slow
def test_a_second_run_repeats_nothing_and_a_removed_cell_alone_runs_again(place):
    before = cell_times(place)
    run(place)
    assert cell_times(place) == before
    other = DECLARED | {"name": "other", "variants": {"plain": {"reward_model_strategy": None}}, "baseline": "plain"}
    (place / "other.json").write_text(json.dumps(other))
    run(place, "other.json")  # the vanilla cells under another name
    assert cell_times(place) == before
    removed = plan_cells(read_study(place / "study.json"), "")[1]
    stored = np.load(removed.folder(place / "out") / "scores.npz")
    scores = {name: stored[name] for name in stored.files}
    shutil.rmtree(removed.folder(place / "out"))
    run(place)
    after = cell_times(place)
    assert {name for name in after if after[name] != before[name]} == {removed.identity}
    again = np.load(removed.folder(place / "out") / "scores.npz")
    for name, values in scores.items():
        assert np.array_equal(values, again[name], equal_nan=True), name


@pytest.mark.slow
def test_a_cell_that_fails_leaves_no_folder_and_ends_with_status_1(place, capsys):
    broken = DECLARED | {"name": "broken", "variants": {"vanilla": {}, "short": {"max_len": 4}}}
    (place / "broken.json").write_text(json.dumps(broken))
    before = cell_times(place)
    with pytest.raises(SystemExit) as stopped:
        run(place, "broken.json", only="seed-0")
    assert stopped.value.code == 1
    told = capsys.readouterr()
    assert "pocket-2/short/seed-0 failed with status 1" in told.out and "no pair is left" in told.out
    assert "1 of 1 cells failed: pocket-2/short/seed-0" in told.err
    assert cell_times(place) == before
    assert {path.name for path in (place / "out" / "cells").iterdir()} == set(before)


@pytest.mark.slow
def test_preferences_hold_out_the_same_pairs_for_every_seed(tmp_path, start, pairs):
    task = {"kind": "preferences", "pretrain": str(start), "train": str(pairs), "flags": {"input_template": "plain"}}
    file = tmp_path / "study.json"
    file.write_text(json.dumps(DECLARED | {"tasks": {"pairs": task}, "common": {"train_batch_size": 32}}))
    records, scores = [], []
    for cell in plan_cells(read_study(file), "")[::2]:  # vanilla
        records.append(run_cell(cell, tmp_path / "out", "small", keep_models=True))
        scores.append(np.load(cell.folder(tmp_path / "out") / "scores.npz"))
        assert (cell.folder(tmp_path / "out") / "model" / "model.safetensors").is_file()
    assert np.array_equal(scores[0]["held-out/tokens"], scores[1]["held-out/tokens"])
    for record, arrays in zip(records, scores, strict=True):
        figures = record["sets"]["held-out"]
        assert figures["completions"] == 2 * 21 and record["pairs"]["kept"] == 63 and figures["shared"]
        rewards = arrays["held-out/reward"][:, 3]
        assert figures["measures"]["reward@100"] == (rewards[0::2] > rewards[1::2]).mean()
        assert figures["measures"]["reward@100"] == pytest.approx(record["last_evaluation"]["accuracy"])
