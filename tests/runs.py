"""Small training runs shared by tests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from openrlhf.cli import train_ppo, train_rm
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.config import TrainRMConfig

ROOT = Path(__file__).resolve().parents[1]


def write_pairs(path: Path, count: int = 48, seed: int = 0) -> Path:
    """Separable pairs of different lengths: the chosen answer says good, the rejected one bad."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        total = rng.randint(2, 99)
        answer = "the answer is " * rng.randint(1, 3)
        rows.append(
            {"question": f"what is {i} plus {total}", "correct": f"{answer}good", "incorrect": f"{answer}bad {total}"}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model: Path, data: Path, out: Path, **changes) -> list[str]:
    """Flags of a short contrastive run; a value of None drops a flag, True makes a switch."""
    flags = {
        "pretrain": model,
        "dataset": data,
        "save_path": out,
        "reward_model_strategy": "contrastive",
        "input_template": "plain",
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_epochs": 2,
        "eval_fraction": 0.1666,
        "seed": 1,
    } | changes
    words = []
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def train(model: Path, data: Path, out: Path, **changes) -> dict[str, float]:
    """Train in this process; returns the last evaluation."""
    return train_rm.run(parse_config(TrainRMConfig, arguments(model, data, out, **changes)))


def command(*words: str, environment: dict[str, str] | None = None, **kwargs) -> subprocess.Popen:
    """Start a program of the checkout in its own process."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        **(environment or {}),
    }
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.Popen([sys.executable, *words], env=env, cwd=ROOT, text=True, **kwargs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by name."""
    return load_file(folder / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two sets of tensors with the same names."""
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


def curve(folder: Path, split: str = "train") -> dict[int, dict[str, float]]:
    """Lines of metrics.jsonl of one split by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n") if line]
    return {line["step"]: line for line in lines if line["split"] == split}


def ppo_words(out: Path, *more: object, **changes) -> list[str]:
    """Flags of two tiny rollouts of the pocket policy on pocket; a value of None drops a flag, True makes a switch."""
    flags = {
        "pretrain": "pocket",
        "prompt_data": "pocket",
        "save_path": out,
        "max_samples": 8,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "generate_max_len": 32,
        "init_kl_coef": 0,
        "advantage_estimator": "rloo",
        "eval_fraction": 0,
    } | changes
    words = []
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", *str(value).split()]
    return words + [str(word) for word in more]


def run_ppo(words: list[str], capsys) -> tuple[int, str, str]:
    """Run train_ppo as its command does, in this process: exit code, what it printed, and its errors and log."""
    capsys.readouterr()
    code = 0
    try:
        train_ppo.main(words)
    except SystemExit as stop:
        code = stop.code
    out, errors = capsys.readouterr()
    return code, out, errors
