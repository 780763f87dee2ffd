"""train_ppo_ray: its flags, what each process is told, and errors before Ray starts."""

import sys

import pytest

from openrlhf.cli.parser import parse_config
from openrlhf.cli.train_ppo_ray import (
    PPORayConfig,
    process_environments,
    start_ray,
    validate_ray,
    without_effect,
)

DATA = ["--pretrain", "pocket", "--prompt_data", "pocket"]


def config_of(*flags: str) -> PPORayConfig:
    return parse_config(PPORayConfig, [*DATA, *flags])


def test_two_nodes_of_two_processes_on_cpus():
    ranks = process_environments(2, 2, "node-a", 4711, gpus=False)
    assert [one["RANK"] for one in ranks] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in ranks] == ["0", "1", "0", "1"]
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "4711"}
    assert all(shared.items() <= one.items() for one in ranks)


def test_each_process_sees_its_gpu_as_number_0():
    assert [one["LOCAL_RANK"] for one in process_environments(1, 3, "a", 1, gpus=True)] == ["0", "0", "0"]


def test_one_process_is_no_group():
    assert process_environments(1, 1, "a", 1, gpus=False) == [{}]


def test_openrlhf_placement_is_accepted_in_both_spellings_and_told():
    flat = ["--ref_num_nodes", "1", "--reward_num_gpus_per_node", "2", "--colocate_actor_ref", "--actor_num_nodes", "2"]
    dotted = [
        "--ref.num_nodes",
        "1",
        "--reward.num_gpus_per_node",
        "2",
        "--colocate_actor_ref",
        "--actor.num_nodes",
        "2",
    ]
    config = config_of(*flat)
    assert config == config_of(*dotted)
    validate_ray(config)
    assert config.actor_num_nodes == 2
    assert without_effect(config) == ["colocate_actor_ref", "ref_num_nodes", "reward_num_gpus_per_node"]
    assert without_effect(config_of()) == []


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--actor_num_nodes", "0"], "--actor_num_nodes must be at least 1, got 0"),
        (["--actor_num_gpus_per_node", "-1"], "--actor_num_gpus_per_node must be at least 1, got -1"),
        (["--rollout_batch_size", "0"], "rollout_batch_size"),
    ],
)
def test_wrong_settings_end_before_ray_starts(flags, words):
    with pytest.raises(ValueError, match=words):
        validate_ray(config_of(*flags))


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "ray\[default\]==2.60.0"'):
        start_ray(1)
