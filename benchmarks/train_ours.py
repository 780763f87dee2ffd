"""One measured training run by train_rm's own path; started by bench_train.py.

Reads settings as JSON from the command line and prints figures as JSON, those of train_peer.py and more.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from measuring import forget_peak, now, peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Timed:
    """A trainer whose steps are timed."""

    def __init__(self, trainer, total: int) -> None:
        self.trainer, self.total = trainer, total
        self.marks: list[tuple[float, float]] = []
        self.sums: list = []
        self.memory = 0.0

    def __getattr__(self, name: str):
        return getattr(self.trainer, name)

    def train_step(self, step: int):
        if not self.marks:
            self.marks.append(now())
        result = self.trainer.train_step(step)
        self.sums.append(result[0])
        self.marks.append(now())
        if len(self.sums) == self.total:
            self.memory = peak_memory()
        return result


def run_timed(flags: list[str]) -> Timed:
    """Run train_rm with these flags; the clock of its trainer."""
    from openrlhf.cli import train_rm
    from openrlhf.cli.parser import parse_config
    from openrlhf.trainer import loop
    from openrlhf.trainer.config import TrainRMConfig

    run_training, timed = loop.run_training, []

    def measured(engine, trainer, plan, *others):
        timed.append(Timed(trainer, plan.total_steps))
        return run_training(engine, timed[0], plan, *others)

    loop.run_training = measured  # train_rm imports it when it runs
    try:
        train_rm.run(parse_config(TrainRMConfig, flags))
    finally:
        loop.run_training = run_training
    return timed[0]


def train(settings: dict) -> dict:
    """Warm up by a training of its own, then measure one.

    Args:
        settings: flags of train_rm, warmup (its flags for the training before; None: none), threads, epochs, profile
            (take one more step under the profiler).
    Returns:
        As train_peer.train, and the loss of every step as losses. pairs and tokens are those of all pairs of the
        examples, each row whole, however they were computed.
    """
    import torch
    from train_tasks import pair_ids

    from openrlhf.trainer.reward_trainer import SUMS

    torch.set_num_threads(settings["threads"])
    if settings["warmup"]:
        run_timed(settings["warmup"])
        forget_peak()
    clock = run_timed(settings["flags"])
    sums = [dict(zip(SUMS, one.tolist(), strict=True)) for one in clock.sums]
    losses = [one["loss"] / one["pairs"] for one in sums]
    pairs = [pair for i in range(len(clock.trainer.data)) for pair in pair_ids(clock.trainer.data[i])]
    figures = {
        "seconds": clock.marks[-1][0] - clock.marks[0][0],
        "cpu_seconds": clock.marks[-1][1] - clock.marks[0][1],
        "pairs": len(pairs) * settings["epochs"],
        "tokens": sum(len(row) for pair in pairs for row in pair) * settings["epochs"],
        "memory": clock.memory,
        "loss": statistics.fmean(losses),
        "losses": losses,
        "steps": len(sums),
    }
    if settings["profile"]:
        from train_profile import profile_step

        plan = clock.trainer.plan
        step = plan.examples * plan.epochs // plan.batch_size - 1  # the last whole one
        clock.trainer.updates.steps = step + 1  # nothing is prepared beyond it meanwhile
        unprofiled = clock.marks[step + 1][0] - clock.marks[step][0]
        figures["profile"] = profile_step(clock.trainer, step) | {"unprofiled_seconds": unprofiled}
    return figures


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
