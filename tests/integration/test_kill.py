"""Runs that are killed: what is left is whole, and the resumed run ends as the unbroken one."""

import random
import signal
import time

import pytest

from openrlhf.utils.checkpoint import latest_checkpoint, list_checkpoints
from tests.runs import (
    arguments,
    command,
    curve,
    largest_difference,
    ppo_words,
    run_ppo,
    train,
    weights,
    write_pairs,
)
from tests.tiny import save_tiny_causal_lm

SETTINGS = {"max_epochs": 8, "save_steps": 1, "max_ckpt_num": 2}
STEPS = 40  # 40 training pairs x 8 epochs / 8


def start_run(model, data, out):
    words = arguments(model, data, out, **SETTINGS, load_checkpoint=True)
    return command("-m", "openrlhf.cli.train_rm", *words, stdout=-3, stderr=-3)


def wait_until(condition, process, limit=120.0):
    """Wait for the condition; fails when the process ends or nothing happens."""
    end = time.monotonic() + limit
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def newest_step(folder) -> int:
    newest = latest_checkpoint(folder)
    return -1 if newest is None else int(newest.name.split("-")[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_five_times_and_once_while_saving(tmp_path):
    model = save_tiny_causal_lm(tmp_path / "lm")
    data = write_pairs(tmp_path / "pairs.jsonl")
    train(model, data, tmp_path / "whole", **SETTINGS)
    out, checkpoints = tmp_path / "killed", tmp_path / "killed-checkpoints"

    rng = random.Random(0)
    targets = sorted(rng.sample(range(2, STEPS - 2), 5))
    for number, target in enumerate(targets):
        process = start_run(model, data, out)
        wait_until(lambda step=target: newest_step(checkpoints) >= step, process)
        if number == 2:  # while a checkpoint is being written: its temporary folder exists
            wait_until(lambda: any(p.name.startswith(".") for p in checkpoints.iterdir()), process)
        else:
            time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        complete = list_checkpoints(checkpoints)
        assert complete and all((folder / "complete.json").is_file() for folder in complete)
        assert not (out / "model.safetensors").exists()

    process = start_run(model, data, out)
    assert process.wait(timeout=240) == 0
    assert largest_difference(weights(tmp_path / "whole"), weights(out)) == 0.0
    whole, resumed = curve(tmp_path / "whole"), curve(out)
    assert sorted(resumed) == list(range(1, STEPS + 1))
    assert all(whole[step]["loss"] == resumed[step]["loss"] for step in whole)
    assert not [p for p in checkpoints.iterdir() if p.name.startswith(".")]  # leftovers of dead runs are gone


@pytest.mark.slow
def test_reinforcement_learning_that_is_killed_goes_on(tmp_path, capsys):
    """With a critic, a reference and a moving KL coefficient: everything that a checkpoint has to hold."""
    settings = {
        "advantage_estimator": "gae",
        "critic_learning_rate": 1e-3,
        "actor_learning_rate": 1e-3,
        "init_kl_coef": 0.1,
        "kl_target": 0.05,
        "max_samples": 48,
        "save_steps": 2,
    }
    assert run_ppo(ppo_words(tmp_path / "whole", **settings, ckpt_path=tmp_path / "other"), capsys)[0] == 0
    words = ppo_words(tmp_path / "killed", **settings)
    process = command("-m", "openrlhf.cli.train_ppo", *words, stdout=-3, stderr=-3)
    wait_until(lambda: newest_step(tmp_path / "killed-checkpoints") >= 4, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    assert run_ppo([*words, "--load_checkpoint"], capsys)[0] == 0
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "killed")) == 0
    curves = [curve(tmp_path / name) for name in ("whole", "killed")]
    assert list(curves[0]) == list(curves[1]) == list(range(1, 13))
    for name in ("reward", "kl", "kl_coef", "policy_loss", "value_loss", "explained_variance"):
        assert [line.get(name) for line in curves[0].values()] == [line.get(name) for line in curves[1].values()]
