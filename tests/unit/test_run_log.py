"""metrics.jsonl, manifest.json, seeds, and trackers that must not stop a run."""

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from openrlhf.utils import run_log
from openrlhf.utils.manifest import git_state, hide_secrets
from openrlhf.utils.run_log import RunLog, seed_everything, update_manifest, write_manifest


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_time(row):
    return {name: value for name, value in row.items() if name != "time"}


def test_numbers_of_every_kind_become_plain_json_numbers(tmp_path):
    with RunLog(tmp_path, "train_rm", {}) as log:
        log.log(
            3,
            {
                # 1.01 in bfloat16 (8 bits of mantissa) is 1 + 1/128 = 1.0078125
                "bf16": torch.tensor(1.01, dtype=torch.bfloat16, requires_grad=True),
                "one_element": torch.tensor([2]),
                "numpy": np.float32(0.5),
                "nan": float("nan"),
                "nan_tensor": torch.tensor(float("nan")),
                "infinite": float("inf"),
                "none": None,
                "count": 7,
            },
            prefix="eval",
        )
    (row,) = lines(tmp_path)
    assert row.pop("time") > 1.7e9  # seconds since 1970
    assert row == {
        "step": 3,
        "split": "eval",
        "bf16": 1.0078125,
        "one_element": 2,
        "numpy": 0.5,
        "nan": None,
        "nan_tensor": None,
        "infinite": None,
        "none": None,
        "count": 7,
    }
    assert isinstance(row["bf16"], float)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": torch.zeros(2)}, r"'loss'.*shape \(2,\)"),
        ({"loss": "0.5"}, "'loss'.*str"),
        ({"step": 1.0}, "step"),
    ],
)
def test_what_is_not_a_number_is_refused_and_nothing_is_written(tmp_path, metrics, message):
    log = RunLog(tmp_path, "train_rm", {})
    with pytest.raises(ValueError, match=message):
        log.log(1, metrics)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_resume_keeps_each_step_once_and_drops_an_unfinished_line(tmp_path):
    log = RunLog(tmp_path, "train_rm", {})
    for step in range(1, 7):
        log.log(step, {"loss": step / 10})
        if step % 2 == 0:
            log.log(step, {"loss": step}, prefix="eval")
    with open(tmp_path / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 2, "lo')  # the crash came in the middle of a line
    resumed = RunLog(tmp_path, "train_rm", {}, resume_step=4)
    for step in (5, 6):
        resumed.log(step, {"loss": step / 10})
    assert [(row["split"], row["step"]) for row in lines(tmp_path)] == [
        ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4), ("train", 5), ("train", 6),
    ]  # fmt: skip


def test_a_fresh_run_sets_old_metrics_aside(tmp_path):
    for loss in (1.0, 2.0):
        with RunLog(tmp_path, "train_rm", {}) as log:
            log.log(1, {"loss": loss})
    assert [row["loss"] for row in lines(tmp_path)] == [2.0]
    assert json.loads((tmp_path / "metrics.previous.jsonl").read_text())["loss"] == 1.0


def test_only_the_process_of_global_rank_0_writes_and_opens_a_tracker(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(run_log, "_start_wandb", lambda *args: opened.append(args))
    for node in range(2):
        for local_rank in range(4):
            rank = 4 * node + local_rank
            log = RunLog(tmp_path / str(rank), "train_rm", {}, is_main=rank == 0, use_wandb="offline")
            log.log(1, {"loss": 1.0})
            assert log.progress(10).disable == (rank != 0)
            log.close()
    assert len(opened) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


class BrokenTracker:
    """Fails in every call and counts them."""

    def __init__(self):
        self.calls = 0

    def __getattr__(self, name):
        def fail(*args, **kwargs):
            self.calls += 1
            raise ConnectionError("network is gone")

        return fail


def test_an_error_starts_on_a_line_of_its_own(tmp_path, capsys):
    with pytest.raises(ValueError), RunLog(tmp_path, "train_rm", {}) as log:
        log.progress(10).update(3)
        raise ValueError("stop")
    assert capsys.readouterr().err.endswith("\n")


def test_a_tracker_that_fails_later_warns_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    wandb, board = BrokenTracker(), BrokenTracker()
    monkeypatch.setattr(run_log, "_start_wandb", lambda *args: wandb)
    monkeypatch.setattr(run_log, "_start_tensorboard", lambda *args: board)
    with caplog.at_level(logging.WARNING), RunLog(tmp_path, "x", {}, use_wandb="k", tensorboard_dir=tmp_path) as log:
        for step in range(1, 4):
            log.log(step, {"loss": 1.0})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]
    assert (wandb.calls, board.calls) == (1, 1)
    assert len(caplog.records) == 2


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        RunLog(tmp_path, "x", {}, use_wandb="true")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        RunLog(tmp_path, "x", {}, tensorboard_dir=tmp_path / "board")


@pytest.mark.parametrize("value", [None, "", "false", "None"])
def test_wandb_is_off_by_default(tmp_path, monkeypatch, value):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with RunLog(tmp_path, "x", {}, use_wandb=value) as log:
        log.log(1, {"loss": 1.0})
    assert len(lines(tmp_path)) == 1


WANDB_RUN = """
import sys
from openrlhf.utils.atomic import atomic_dir
from openrlhf.utils.run_log import RUN_FILES, RunLog
run_dir, resume_step = sys.argv[1], int(sys.argv[2]) if sys.argv[2] else None
with RunLog(run_dir, "x", {"a": 1}, use_wandb="offline", wandb_project="p", resume_step=resume_step) as log:
    log.log(1 if resume_step is None else 2, {"loss": 1.0, "nan": float("nan")})
    with atomic_dir(run_dir, carry=RUN_FILES) as folder:  # as when the model is saved into the folder of its run
        (folder / "config.json").write_text("{}")
    log.log(3, {"after_saving": 1.0})
"""


def test_wandb_offline_writes_a_run_and_resumes_it(tmp_path):
    pytest.importorskip("wandb")
    ids = []
    for resume_step in ("", "1"):
        command = [sys.executable, "-c", WANDB_RUN, str(tmp_path / "run"), resume_step]  # wandb writes the rest at exit
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=os.environ | {"WANDB_SILENT": "true"})
        ids.append(json.loads((tmp_path / "run" / "wandb_run.json").read_text())["id"])
    assert ids[0] == ids[1]
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    for file in files:
        assert b"train/loss" in file.read_bytes() and b"train/after_saving" in file.read_bytes()
    assert len(files) == 2
    assert [row["step"] for row in lines(tmp_path / "run")] == [1, 2, 3]


def test_tensorboard_holds_the_numbers_under_split_and_name(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    with RunLog(tmp_path, "x", {}, tensorboard_dir=board) as log:
        log.log(1, {"loss": 0.5})
        log.log(2, {"loss": 0.25})
    events = EventAccumulator(str(board))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


@dataclass(frozen=True)
class Settings:
    seed: int = 3
    learning_rate: float = 9e-6
    use_wandb: str = "0123secret"
    pad_token: str = "<pad>"


def test_manifest_tells_how_to_repeat_the_run_and_hides_keys(tmp_path):
    argv = ["train_rm.py", "--use_wandb", "0123secret", "--note", "two words", "--use_wandb=0123secret"]
    path = write_manifest(tmp_path / "run", "train_rm", Settings(), {"data": {"train": "f00"}}, argv=argv)
    text = path.read_text()
    manifest = json.loads(text)
    assert "0123secret" not in text
    assert manifest["command_line"] == "train_rm.py --use_wandb '<hidden>' --note 'two words' '--use_wandb=<hidden>'"
    assert manifest["config"] == {
        "seed": 3, "learning_rate": 9e-6, "use_wandb": "<hidden>", "pad_token": "<pad>",
    }  # fmt: skip
    assert (manifest["seed"], manifest["data"], manifest["status"]) == (3, {"train": "f00"}, "running")
    assert manifest["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["hardware"]["cpu_cores"] >= 1
    with pytest.raises(ValueError, match="packages"):
        write_manifest(tmp_path / "run", "train_rm", {}, {"packages": {}})


def test_manifest_records_the_end_and_remembers_earlier_runs(tmp_path):
    with pytest.raises(ZeroDivisionError), RunLog(tmp_path, "x", {}):
        write_manifest(tmp_path, "x", {"seed": 1})
        raise ZeroDivisionError
    with RunLog(tmp_path, "x", {}, resume_step=0):
        write_manifest(tmp_path, "x", {"seed": 2})
        update_manifest(tmp_path, {"accuracy": 0.75})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["seed"], manifest["status"], manifest["accuracy"]) == (2, "finished", 0.75)
    assert manifest["end_time"] >= manifest["start_time"]
    (earlier,) = manifest["earlier_runs"]
    assert (earlier["seed"], earlier["status"]) == (1, "failed: ZeroDivisionError")


def test_a_broken_manifest_is_written_anew(tmp_path):
    (tmp_path / "manifest.json").write_text('{"command": "x", ')
    write_manifest(tmp_path, "x", {})
    assert json.loads((tmp_path / "manifest.json").read_text())["command"] == "x"


def test_settings_that_are_no_keys_are_shown():
    shown = {"use_wandb": "offline", "pad_token": "<pad>", "max_new_tokens": "8", "secret_sauce": "x", "use_wandb_2": 1}
    assert hide_secrets(shown) == shown
    assert hide_secrets({"a": {"rm_api_key": "k", "hf_token": "t", "auth_token": None}}) == {
        "a": {"rm_api_key": "<hidden>", "hf_token": "<hidden>", "auth_token": None}
    }


def test_git_state_sees_an_edit(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_the_seed_fixes_python_numpy_and_torch():
    draws = []
    for _ in range(2):
        seed_everything(11)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]
    seed_everything(12)
    assert random.random() != draws[0][0]


def test_full_determinism_is_asked_of_torch(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        seed_everything(0, full_determinism=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
