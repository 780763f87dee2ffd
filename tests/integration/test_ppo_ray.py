"""train_ppo_ray with two processes of Ray against train_ppo in one, and an error in one of them."""

from __future__ import annotations

import json

import pytest

from openrlhf.cli import train_ppo
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.ppo_config import PPOConfig
from tests.runs import command, curve, largest_difference, ppo_words, weights

pytest.importorskip("ray", reason='Ray is optional: pip install "ray[default]==2.60.0"')

REWARD_FILE = """
def reward_func(queries, prompts, labels, responses, step, **kwargs):
    if step >= {fail_at}:
        raise ZeroDivisionError("no reward today")
    return [len(text) / 40 for text in responses]
"""


def start(words: list[str]) -> tuple[int, str]:
    """Exit code and log of train_ppo_ray."""
    process = command("examples/train_ppo_ray.py", *words, "--actor_num_gpus_per_node", "2", stdout=-1, stderr=-2)
    log, _ = process.communicate(timeout=280)
    return process.returncode, log


@pytest.mark.timeout(300)
def test_two_processes_of_ray_train_as_one_process(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD_FILE.format(fail_at=100))
    changes = {"remote_rm_url": reward, "zero_stage": 0}
    train_ppo.run(parse_config(PPOConfig, ppo_words(tmp_path / "one", remote_rm_url=reward)))
    code, log = start(ppo_words(tmp_path / "ray", **changes))
    assert code == 0, log
    one, two = curve(tmp_path / "one"), curve(tmp_path / "ray")
    assert [one[step]["reward"] for step in (1, 2)] == pytest.approx([two[step]["reward"] for step in (1, 2)])
    assert one[2]["policy_loss"] == pytest.approx(two[2]["policy_loss"], rel=1e-3, abs=1e-6)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "ray")) < 1e-5
    assert json.loads((tmp_path / "ray" / "manifest.json").read_text())["status"] == "finished"


@pytest.mark.timeout(300)
def test_an_error_in_a_process_is_the_error_of_the_command(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD_FILE.format(fail_at=1))
    code, log = start(ppo_words(tmp_path / "ray", remote_rm_url=reward, zero_stage=0))
    assert code == 1
    assert "no reward today" in log.split("error: ")[-1]
