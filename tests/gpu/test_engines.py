"""ZeRO-2 and ZeRO-3 on one GPU against one plain process on the same GPU."""

from __future__ import annotations

import socket

import pytest

from tests.runs import arguments, command, curve, largest_difference, train, weights, write_pairs
from tests.tiny import save_tiny_causal_lm


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """(language model, pairs): 35 training pairs of the 42, so 9 steps of 8 with a short last one."""
    folder = tmp_path_factory.mktemp("task")
    return save_tiny_causal_lm(folder / "lm"), write_pairs(folder / "pairs.jsonl", 42)


@pytest.fixture(scope="module")
def local(task, tmp_path_factory):
    """Folder of the plain run to compare with."""
    out = tmp_path_factory.mktemp("local") / "model"
    train(*task, out)
    return out


def launch(words: list[str]) -> tuple[int, str]:
    """Run examples/train_rm.py under the deepspeed launcher on one GPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", port]
    process = command(
        *launcher, "examples/train_rm.py", *words, environment={"DS_ACCELERATOR": "cuda"}, stdout=-1, stderr=-2
    )
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_gives_the_curve_and_the_model_of_one_process(stage, task, local, tmp_path):
    out = tmp_path / "model"
    code, output = launch(arguments(*task, out, zero_stage=stage))
    assert code == 0, output[-3000:]
    one, two = curve(local), curve(out)
    assert sorted(one) == sorted(two) and len(one) > 5
    for step, line in one.items():
        for name in ("loss", "preference_loss", "contrastive_loss"):
            assert two[step][name] == pytest.approx(line[name], abs=1e-4), (step, name)
        assert two[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
    # Adam divides near-zero gradients by their own size, so that rounding of sums shows in the weights.
    assert largest_difference(weights(local), weights(out)) < 1e-3


@pytest.mark.parametrize("stage", [None, 2])
def test_bfloat16_follows_the_curve_of_float32(stage, task, local, tmp_path):
    out = tmp_path / "model"
    if stage is None:
        train(*task, out, bf16=True)
    else:
        code, output = launch(arguments(*task, out, zero_stage=stage, bf16=True))
        assert code == 0, output[-3000:]
    one, two = curve(local), curve(out)
    # Two states of 8 bits are compared; the curve falls by several tenths.
    assert [two[step]["loss"] for step in one] == pytest.approx([line["loss"] for line in one.values()], abs=0.05)
