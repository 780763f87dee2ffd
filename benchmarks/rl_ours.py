"""One measured run of reinforcement learning by train_ppo's own path; started by bench_rl.py.

Reads settings as JSON from the command line and prints figures as JSON, those of rl_peer.py and more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from measuring import forget_peak, now, peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Clock:
    """Times of the steps of one run, and what they gave."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.figures: list[dict[str, float]] = []
        self.memory = 0.0
        self.prompt_tokens = 0


def run_timed(flags: list[str]) -> Clock:
    """Run train_ppo with these flags; the clock of its steps."""
    from openrlhf.cli import train_ppo
    from openrlhf.cli.parser import parse_config
    from openrlhf.trainer.ppo_config import PPOConfig
    from openrlhf.trainer.ppo_trainer import PPOTrainer

    clock, step = Clock(), PPOTrainer.train_step

    def measured(trainer: PPOTrainer, place: int) -> dict[str, float]:
        if not clock.marks:
            clock.marks.append(now())
            clock.prompt_tokens = sum(map(len, trainer.prompts.ids)) * trainer.settings.samples_per_prompt
        figures = step(trainer, place)
        clock.marks.append(now())
        clock.figures.append(figures)
        if trainer.done:
            clock.memory = peak_memory()
        return figures

    PPOTrainer.train_step = measured
    try:
        train_ppo.run(parse_config(PPOConfig, flags))
    finally:
        PPOTrainer.train_step = step
    return clock


def train(settings: dict) -> dict:
    """Warm up by a run of its own, then measure one.

    Args:
        settings: flags of train_ppo, warmup (its flags for the run before), threads.
    Returns:
        As rl_peer.train, and the share of the responses in the loss as learning_share.
    """
    import torch

    torch.set_num_threads(settings["threads"])
    run_timed(settings["warmup"])
    forget_peak()
    clock = run_timed(settings["flags"])
    samples = sum(one["responses"] for one in clock.figures)
    parts = ("sampling", "reward", "logprobs", "training")
    return {
        "seconds": clock.marks[-1][0] - clock.marks[0][0],
        "cpu_seconds": clock.marks[-1][1] - clock.marks[0][1],
        "samples": samples,
        "tokens": round(sum(one["responses"] * one["response_length"] for one in clock.figures)),
        "prompt_tokens": clock.prompt_tokens,
        "updates": clock.figures[-1]["updates"],
        "memory": clock.memory,
        "reward": sum(one["responses"] * one["reward"] for one in clock.figures) / samples,
        "learning_share": sum(one["responses"] * one["learning_share"] for one in clock.figures) / samples,
        "parts": {part: sum(one[f"seconds_{part}"] for one in clock.figures) for part in parts},
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
