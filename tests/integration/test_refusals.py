"""Runs that must stop early: nothing is lost, nothing wrong is saved, nothing secret is written."""

import json

import pytest
import torch

from openrlhf.cli.splits import usual_eval_split
from openrlhf.models.pretrained import load_reward_model
from openrlhf.trainer.reward_trainer import RewardTrainer
from tests.runs import train, write_pairs
from tests.tiny import save_tiny_causal_lm


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl")


def test_an_adapter_is_no_start(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "lora", lora_rank=4, max_epochs=1)
    with pytest.raises(ValueError, match="merge it with lora_combiner"):
        train(tmp_path / "lora", pairs, tmp_path / "again", lora_rank=4)
    with pytest.raises(ValueError, match="merge it with lora_combiner"):
        load_reward_model(tmp_path / "lora", value_head="linear")


def test_an_ordinary_word_is_no_pad_token(start, pairs, tmp_path):
    with pytest.raises(ValueError, match="ordinary word"):
        train(start, pairs, tmp_path / "out", pad_token="a")


def test_folders_of_others_are_not_replaced(start, pairs, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    (results / "answers.json").write_text("{}")
    with pytest.raises(ValueError, match=r"answers\.json and no manifest"):
        train(start, pairs, results)
    other = save_tiny_causal_lm(tmp_path / "other")
    with pytest.raises(ValueError, match="no manifest"):
        train(start, pairs, other)
    train(start, pairs, tmp_path / "mine", max_epochs=1)
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        train(start, pairs, tmp_path / "mine", max_epochs=1)
    (tmp_path / "mine" / "notes.txt").unlink()
    train(start, pairs, tmp_path / "mine", max_epochs=1, seed=2)  # our own earlier result may be replaced


def test_evaluation_on_the_training_rows_is_refused(start, pairs, tmp_path):
    for flags in ({"eval_split": "validation"}, {"eval_dataset": pairs}):
        with pytest.raises(ValueError, match="evaluation rows are the training rows"):
            train(start, pairs, tmp_path / "out", **flags)


def test_old_checkpoints_are_not_mixed_with_a_new_run(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "out", save_steps=2, max_epochs=1)
    with pytest.raises(ValueError, match="checkpoints of an earlier run"):
        train(start, pairs, tmp_path / "out", save_steps=2, max_epochs=1, learning_rate=0.02)


def test_a_diverged_run_stops_before_anything_is_saved(start, pairs, tmp_path, monkeypatch):
    real_step = RewardTrainer.train_step

    def poisoned(self, step):
        if step == 3:
            with torch.no_grad():
                self.engine.model.network.score.weight.fill_(float("nan"))
        return real_step(self, step)

    monkeypatch.setattr(RewardTrainer, "train_step", poisoned)
    with pytest.raises(RuntimeError, match="nan at step 4"):
        train(start, pairs, tmp_path / "out", save_steps=1, logging_steps=5)
    newest = sorted(p.name for p in (tmp_path / "out-checkpoints").iterdir())[-1]
    assert newest == "step-00000003" and not (tmp_path / "out" / "model.safetensors").exists()


def test_wandb_key_is_in_no_file(start, pairs, tmp_path, monkeypatch):
    key = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr("openrlhf.utils.run_log._start_wandb", lambda *a, **k: None)
    train(start, pairs, tmp_path / "out", max_epochs=1, use_wandb=key)
    for file in (tmp_path / "out").iterdir():
        assert key.encode() not in file.read_bytes(), file


def test_rows_beyond_a_position_table_are_refused(tmp_path):
    model = save_tiny_causal_lm(tmp_path / "gpt2", "gpt2")
    rows = [{"question": f"q {i}", "correct": "good " * (150 + i), "incorrect": "bad " * 150} for i in range(16)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="128 positions: pass --max_len 128"):
        train(model, tmp_path / "long.jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match="128 positions: pass --max_len 128"):  # and not after the first epoch
        train(model, write_pairs(tmp_path / "short.jsonl"), tmp_path / "out", eval_dataset=tmp_path / "long.jsonl")


def test_two_runs_into_one_folder_are_refused(start, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(RewardTrainer, "evaluate", lambda self: train(start, pairs, tmp_path / "out", max_epochs=1))
    with pytest.raises(ValueError, match="another run"):
        train(start, pairs, tmp_path / "out", max_epochs=1)


def test_a_full_disk_is_refused_before_training(start, pairs, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match="not enough room"):
        train(start, pairs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_resume_with_other_settings_is_refused(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "run", save_steps=2, max_epochs=1)
    with pytest.raises(ValueError, match=r"learning_rate: 0\.01 then, 0\.02 now"):
        train(start, pairs, tmp_path / "run", save_steps=2, max_epochs=1, load_checkpoint=True, learning_rate=0.02)


def test_adapter_without_head_is_refused(start, pairs, tmp_path):
    from safetensors.torch import load_file, save_file

    train(start, pairs, tmp_path / "lora", lora_rank=4, max_epochs=1)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "score" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"score\.weight.*missing"):
        load_reward_model(tmp_path / "lora")


def test_evaluation_prompts_that_are_trained_on_are_counted(start, pairs, tmp_path, caplog):
    lines = pairs.read_text().split("\n")
    (tmp_path / "eval.jsonl").write_text("\n".join(lines[:5]).replace("good", "very good") + "\n")
    with caplog.at_level("WARNING"):
        train(start, pairs, tmp_path / "out", max_epochs=1, eval_dataset=tmp_path / "eval.jsonl")
    assert "5 of 5 evaluation prompts are also among the training rows" in caplog.text


@pytest.mark.parametrize(
    "names,split",
    [
        (["train.jsonl", "val.jsonl"], "validation"),
        (["train.jsonl", "test-00000.parquet"], "test"),
        (["train.jsonl", "latest.jsonl"], "train"),
    ],
)
def test_split_to_evaluate_on_when_none_is_named(names, split, tmp_path):
    for name in names:
        (tmp_path / name).write_text("")
    assert usual_eval_split(str(tmp_path)) == split


def test_a_local_path_is_expected_to_save_to(start, pairs):
    with pytest.raises(ValueError, match="expected a local folder"):
        train(start, pairs, "s3://bucket/model")


def test_rows_beyond_the_positions_of_a_checkpoint_are_refused_in_scoring(pairs, tmp_path):
    from openrlhf.cli.reward_checkpoint import find_checkpoint

    model = save_tiny_causal_lm(tmp_path / "gpt2", "gpt2")
    train(model, pairs, tmp_path / "rm", max_epochs=1)
    found = find_checkpoint(str(tmp_path / "rm"))
    assert found.max_len == 128  # the flag's default of 512 is cut to the model's table
    with pytest.raises(ValueError, match="128 positions"):
        find_checkpoint(str(tmp_path / "rm"), max_len=200).load()
