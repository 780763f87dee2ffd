"""DeepSpeed with two CPU processes against one plain process."""

import socket

import pytest
import torch

from openrlhf.models.pretrained import load_reward_model
from openrlhf.trainer.engine import LocalEngine, OptimizerSettings, under_launcher
from tests.runs import arguments, command, curve, largest_difference, train, weights


@pytest.fixture(scope="module")
def local(start, pairs, tmp_path_factory):
    """The curve to compare with: 70 training pairs, two epochs, batches of 8, so 18 steps and a short last one."""
    out = tmp_path_factory.mktemp("local") / "model"
    train(start, pairs, out, micro_train_batch_size=2)
    return out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(words: list[str]) -> tuple[int, str]:
    """Run examples/train_rm.py under the deepspeed launcher with two processes."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    process = command(*launcher, "examples/train_rm.py", *words, stdout=-1, stderr=-2)
    output, _ = process.communicate(timeout=280)
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_give_the_curve_and_the_model_of_one(stage, start, pairs, local, tmp_path):
    out = tmp_path / "model"
    code, output = launch(arguments(start, pairs, out, micro_train_batch_size=2, zero_stage=stage))
    assert code == 0, output[-3000:]
    for split in ("train", "eval"):
        one, two = curve(local, split), curve(out, split)
        assert sorted(one) == sorted(two)
        for step, line in one.items():
            for name in ("loss", "preference_loss", "contrastive_loss", "accuracy", "learning_rate"):
                if name in line:
                    assert two[step][name] == pytest.approx(line[name], abs=1e-4), (step, name)
            if split == "train":  # a difference of gradients, not a mean of losses: compared relative to its size
                assert two[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
    assert len(curve(out)) == 18
    # Adam divides near-zero gradients by their own size, so that rounding of sums shows in the weights.
    assert largest_difference(weights(local), weights(out)) < 1e-3
    ids = torch.tensor([[5, 6, 7, 2]])
    with torch.no_grad():
        one, two = (load_reward_model(folder).eval()(ids, torch.ones_like(ids)).reward for folder in (local, out))
    assert (one - two).abs().item() < 1e-4


@pytest.mark.slow
def test_two_processes_resume_exactly_and_refuse_another_number(start, pairs, tmp_path):
    settings = {"micro_train_batch_size": 2, "zero_stage": 2, "save_steps": 4, "max_epochs": 1}
    code, output = launch(arguments(start, pairs, tmp_path / "whole", **settings))
    assert code == 0, output[-3000:]
    # The run ended at step 9: a run with the same flags goes on from its checkpoint of step 8.
    resumed = tmp_path / "resumed"
    flags = arguments(
        start, pairs, resumed, **settings, ckpt_path=str(tmp_path / "whole-checkpoints"), load_checkpoint=True
    )
    code, output = launch(flags)
    assert code == 0, output[-3000:]
    assert "resumed from" in output and sorted(curve(resumed)) == [9]
    assert curve(resumed)[9]["loss"] == curve(tmp_path / "whole")[9]["loss"]
    assert largest_difference(weights(tmp_path / "whole"), weights(resumed)) == 0.0
    with pytest.raises(ValueError, match="zero_stage: 2 then, None now"):
        train(start, pairs, tmp_path / "one", **{**settings, "zero_stage": None}, load_checkpoint=True,
              ckpt_path=str(tmp_path / "whole-checkpoints"))  # fmt: skip


@pytest.mark.slow
def test_an_error_ends_all_processes_with_one_line(start, tmp_path):
    rows = "".join(f'{{"accepted": "a {i}", "rejected": "b"}}\n' for i in range(20))
    (tmp_path / "bad.jsonl").write_text(rows)
    code, output = launch(arguments(start, tmp_path / "bad.jsonl", tmp_path / "out", zero_stage=2))
    assert code != 0
    assert "accepted" in output
    assert not (tmp_path / "out").exists()


def test_launchers_are_recognised():
    assert not under_launcher({})
    assert not under_launcher({"SLURM_NTASKS": "1"})
    assert under_launcher({"RANK": "0", "WORLD_SIZE": "1"})
    assert not under_launcher({"SLURM_NTASKS": "8"})  # the shell of an allocation: nothing was launched
    assert under_launcher({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"})


def test_local_engine_clips_and_schedules():
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    engine = LocalEngine(device="cpu")
    engine.prepare(layer, OptimizerSettings(0.1, (0.9, 0.95), 0.0, 1.0, "cosine_with_min_lr", 1, 0.1, 4))
    rates = []
    for _ in range(4):
        engine.backward(engine.model(torch.tensor([[3.0, 4.0]])).sum())
        result = engine.step()
        assert result.grad_norm == pytest.approx(5.0)  # gradient (3, 4)
        rates.append(result.learning_rate)
    assert rates[0] == 0.0 and rates[1] == pytest.approx(0.1)  # one step of warm-up, then the peak
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)  # the schedule ends at its floor
    assert layer.weight.grad is None
