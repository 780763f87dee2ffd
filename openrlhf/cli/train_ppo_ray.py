"""train_ppo on a Ray cluster: one Ray actor a process, which together form the group that a launcher would start."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from openrlhf.cli import train_ppo
from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.config import flag
from openrlhf.trainer.ppo_config import PPOConfig, validate_ppo

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
# A private Ray listens to this machine only (by default to the whole network) and tells nobody that it runs.
PRIVATE_RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
FAILURES = (ValueError, RuntimeError, OSError, ImportError)  # told in one line by `run_command`, here as there


@dataclass(frozen=True)
class PPORayConfig(PPOConfig):
    """Train a policy by reinforcement learning in processes that Ray places; all flags of train_ppo and these."""

    actor_num_nodes: int = flag(1, "Machines of the cluster to use", "actor.num_nodes")
    actor_num_gpus_per_node: int = flag(
        1, "Processes on each of them: one a GPU, or without GPUs one a CPU core", "actor.num_gpus_per_node"
    )
    ref_num_nodes: int | None = flag(None, "Accepted and without effect, as the rest below", "ref.num_nodes")
    ref_num_gpus_per_node: int | None = flag(None, "See above", "ref.num_gpus_per_node")
    reward_num_nodes: int | None = flag(None, "See above", "reward.num_nodes")
    reward_num_gpus_per_node: int | None = flag(None, "See above", "reward.num_gpus_per_node")
    critic_num_nodes: int | None = flag(None, "See above", "critic.num_nodes")
    critic_num_gpus_per_node: int | None = flag(None, "See above", "critic.num_gpus_per_node")
    colocate_all_models: bool = flag(False, "See above: all models of a process share its GPU", "train.colocate_all")
    colocate_actor_ref: bool = flag(False, "See above")
    colocate_critic_reward: bool = flag(False, "See above")


def validate_ray(config: PPORayConfig) -> None:
    """Raise one ValueError for settings that do not go together, before Ray starts."""
    validate_ppo(config)
    for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}")


def without_effect(config: PPORayConfig) -> list[str]:
    """Names of given flags that change nothing: each process holds policy, reference, critic and reward model."""
    own = {field.name for field in fields(PPORayConfig)} - {field.name for field in fields(PPOConfig)}
    return sorted(n for n in own if not n.startswith("actor_") and getattr(config, n) not in (None, False))


def process_environments(nodes: int, per_node: int, address: str, port: int, gpus: bool) -> list[dict[str, str]]:
    """What a launcher would set for each process, node by node; nothing for one process alone.

    Args:
        address, port: where process 0 listens.
        gpus: Ray shows each process its own GPU alone, so each one's is number 0.
    """
    if nodes * per_node == 1:
        return [{}]
    return [
        {
            "RANK": str(node * per_node + place),
            "WORLD_SIZE": str(nodes * per_node),
            "LOCAL_RANK": "0" if gpus else str(place),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for node in range(nodes)
        for place in range(per_node)
    ]


class Process:
    """One process of the training; Ray makes an actor of it."""

    def address(self) -> tuple[str, int]:
        """Where the others find this one: the address of its machine, and a free port."""
        import socket

        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, config: PPOConfig, environment: dict[str, str], folder: str) -> tuple[str, Any]:
        """Train as process `RANK` of the group.

        Args:
            folder: where relative paths start.
        Returns:
            ("finished", last evaluation), or ("failed", the message) for what a command tells in one line.
        """
        os.environ.update(environment)
        os.chdir(folder)
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
        try:
            return "finished", train_ppo.run(config)
        except FAILURES as error:
            return "failed", str(error)


def start_ray(processes: int) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS (`ray job submit` sets it), else to one of this machine's own."""
    for name, value in PRIVATE_RAY.items():
        os.environ.setdefault(name, value)  # before the import, which reads them
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            'train_ppo_ray needs Ray: pip install "ray[default]==2.60.0"; without it, '
            "`deepspeed examples/train_ppo.py` starts the same training"
        ) from error
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], runtime_env=environment)
    else:
        cores = max(processes, len(os.sched_getaffinity(0)))
        ray.init(address="local", num_cpus=cores, include_dashboard=False, runtime_env=environment)
    return ray


def run(config: PPORayConfig) -> dict[str, float]:
    """Train as configured; returns the last evaluation ({} without held-out prompts).

    Raises:
        ValueError: settings that do not go together, or too few GPUs or cores in the cluster.
        RuntimeError: a process failed; the others are ended.
    """
    validate_ray(config)
    if ignored := without_effect(config):
        logger.info("without effect, as every process holds all models: %s", ", ".join(f"--{name}" for name in ignored))
    plain = PPOConfig(**{field.name: getattr(config, field.name) for field in fields(PPOConfig)})
    nodes, per_node = config.actor_num_nodes, config.actor_num_gpus_per_node
    ray = start_ray(nodes * per_node)
    try:
        return _train_in_ray(ray, plain, nodes, per_node)
    finally:
        ray.shutdown()


def _train_in_ray(ray: Any, config: PPOConfig, nodes: int, per_node: int) -> dict[str, float]:
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU", 0) else "CPU"
    if resources.get(kind, 0) < nodes * per_node:
        raise ValueError(
            f"{nodes} x {per_node} processes need as many {kind}s, and the cluster has {resources.get(kind, 0):g}; "
            "lower --actor_num_nodes or --actor_num_gpus_per_node"
        )
    needs = {"CPU": 1, "GPU": 1} if kind == "GPU" else {"CPU": 1}
    bundles = [{name: count * per_node for name, count in needs.items()} for _ in range(nodes)]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if nodes > 1 else "STRICT_PACK")
    if not group.wait(timeout_seconds=300):
        raise ValueError(f"for 5 minutes the cluster had no {nodes} machines with {per_node} free {kind}s each")
    actors = []
    for rank in range(nodes * per_node):
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, rank // per_node)
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "scheduling_strategy": place}
        actors.append(ray.remote(Process).options(**options).remote())
    address, port = ray.get(actors[0].address.remote())
    environments = process_environments(nodes, per_node, address, port, kind == "GPU")
    waiting = [
        actor.train.remote(config, environment, os.getcwd())
        for actor, environment in zip(actors, environments, strict=True)
    ]
    running = list(waiting)
    while running:
        done, running = ray.wait(running, num_returns=1)
        status, value = ray.get(done[0])
        if status == "failed":
            raise RuntimeError(value)
    return ray.get(waiting[0])[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(PPORayConfig, argv)) and None)


if __name__ == "__main__":
    main()
