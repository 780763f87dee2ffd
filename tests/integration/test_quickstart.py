"""The quickstart and the scoring commands on the embedded task, in small."""

import json

import pytest

from openrlhf.cli import eval_rm, get_representation, quickstart

SMALL = ["--max_pairs", "60", "--train_batch_size", "20", "--max_epochs", "1", "--eval_samples", "4"]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A finished small quickstart of two seeds; its samples are cached beside it."""
    folder = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENRLHF_CACHE", str(folder / "cache"))
        quickstart.main(["--output", str(folder / "out"), "--seeds", "0,1", "--eval_questions", "12", *SMALL])
        yield folder / "out"


@pytest.mark.slow
def test_table_plot_and_checkpoints_are_written(output):
    report = (output / "report.md").read_text()
    for words in ("vanilla reward", "contrastive reward", "goal similarity", "in distribution", "out of distribution"):
        assert words in report
    assert "tokens saved" in report and "seed 0, 1" in report
    results = json.loads((output / "results.json").read_text())
    for seed in ("0", "1"):
        test = results[seed]["test"]
        assert test["completions"] == 48  # 12 questions x 4 samples
        assert 0.2 < test["correct"] < 0.9  # the policy solves about 55%
        assert all(0 <= value[0] <= 1 for value in test["auroc"].values())
        assert set(test["prefix_auroc"]["vanilla reward"]) == {"25", "50", "75", "100"}
        assert (output / f"seed-{seed}" / "contrastive" / "model.safetensors").is_file()
    assert (output / "report.png").read_bytes()[:4] == b"\x89PNG"
    html = (output / "report.html").read_text()
    assert "contrastive, seed 1" in html and "vanilla, seed 0" in html and "\\boxed" in html
    assert json.loads((output / "manifest.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_second_run_keeps_the_models_and_takes_other_sizes(output, caplog):
    before = (output / "seed-0" / "contrastive" / "model.safetensors").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        quickstart.main(["--output", str(output), "--eval_questions", "8", *SMALL])
    assert caplog.text.count("already trained") == 2
    assert (output / "seed-0" / "contrastive" / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((output / "results.json").read_text())["0"]["test"]["completions"] == 32


@pytest.mark.slow
def test_goal_state_and_scores_from_the_commands_equal_the_quickstart_s(output, tmp_path):
    model = output / "seed-0" / "contrastive"
    words = ["--dataset", "pocket", "--reward_model", str(model), "--save_dir", str(tmp_path / "goal")]
    get_representation.main([*words, "--max_samples", "60", "--seed", "0"])
    ours = json.loads((tmp_path / "goal" / "goal_state.json").read_text())
    theirs = json.loads((output / "seed-0" / "goals" / "contrastive" / "goal_state.json").read_text())
    assert ours["count"] == theirs["count"] == 60
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-4)  # other batches, same states

    scores = output / "seed-0" / "scores" / "contrastive"
    rows = [json.loads(line) for line in next(scores.glob("test-8x4-*.jsonl")).read_text().split("\n") if line]
    plain = [{key: row[key] for key in ("question", "generated_solution", "expected_answer", "sample")} for row in rows]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    words = ["--completions_data_path", str(tmp_path / "completions.jsonl"), "--reward_model_path", str(model)]
    eval_rm.main([*words, "--goal_state_path", str(tmp_path / "goal"), "--save_dir", str(tmp_path / "scores")])
    file = next((tmp_path / "scores").rglob("all/*.jsonl"))
    again = [json.loads(line) for line in file.read_text().split("\n") if line]
    assert [row["reward"] for row in again] == pytest.approx([row["reward"] for row in rows], abs=1e-5)
    assert [row["cosine_sim"][-1] for row in again] == pytest.approx([row["cosine_sim"][-1] for row in rows], abs=1e-4)
    assert [row["is_correct"] for row in again] == [row["is_correct"] for row in rows]  # graded anew
