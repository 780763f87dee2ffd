"""PPO with two processes under DeepSpeed against one plain process: rollouts, metrics, weights, resume and errors.

The file is also the program that the two processes run: tests.integration.test_ppo_ranks FOLDER.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from openrlhf.cli import train_ppo
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.sft import SFTData
from openrlhf.trainer.engine import LocalEngine, make_engine
from openrlhf.trainer.ppo_config import PPOConfig
from openrlhf.trainer.ppo_models import make_trainer
from openrlhf.trainer.ppo_trainer import PPOTrainer
from tests.integration.test_ppo import FAST, TEXTS, flags, length_reward, numbers, settings, stopping_model
from tests.runs import command, curve, largest_difference, weights
from tests.tiny import save_tiny_causal_lm

STEPS = 3
# 7 prompts of 3 responses are 4 and 3 prompts for two; updates of 10, 10 and 1 rows leave one of them without a row.
SIZES = {"samples_per_prompt": 3, "rollout_batch_size": 7, "train_batch_size": 10, "micro_train_batch_size": 2}
SIZES |= {"micro_rollout_batch_size": 4}
CASES = {  # ZeRO stage, settings
    "gae": (2, {"estimator": "gae", "kl_coef": 0.1, "kl_target": 0.01, "entropy_coef": 0.01, "max_epochs": 2}),
    "group_norm": (1, {"estimator": "group_norm", "kl_coef": 0.1, "kl_in_loss": True, "kl_kind": "k3", "ptx_coef": 0.5,
                       "filter_range": (0.0, 5.0)}),
    "gspo": (0, {"ratio": "sequence", "reduction": "sequence"}),
}  # fmt: skip


REWARD_FILE = """
import os

def reward_func(queries, prompts, labels, responses, step, **kwargs):
    if os.environ.get("RANK") == "1" and step >= int(os.environ.get("FAIL_AT", 100)):
        raise ZeroDivisionError("no reward today")
    return [len(text) / 40 for text in responses]
"""


def reward(prompts, completion_ids, **_):
    """The share of the longest response; prompts that end in 3 are not scored."""
    return [
        None if prompt.endswith("3") else len(ids) / 12 for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def pretraining_texts() -> SFTData:
    """14 prompts with answers of 1 to 7 tokens."""
    return SFTData([[5, 6, 7 + n] for n in range(14)], [[20 + n] * (n % 7) + [2] for n in range(14)], {}, "")


def trainer_of(case: str, engine) -> PPOTrainer:
    changes = CASES[case][1]
    model, tokenizer = stopping_model()
    texts = pretraining_texts() if "ptx_coef" in changes else None
    optimizer = replace(FAST, learning_rate=1e-3)
    return make_trainer(
        model, tokenizer, TEXTS, reward, settings(**SIZES, **changes), optimizer=optimizer, critic_optimizer=optimizer,
        held_out=TEXTS[:5], gold=length_reward, texts=texts, engine=engine,
    )  # fmt: skip


def rollouts_of(trainer: PPOTrainer) -> list:
    """The list to which the trainer adds each rollout that it collects."""
    collect, kept = trainer.collect, []

    def keeping():
        kept.append(collect())
        return kept[-1]

    trainer.collect = keeping
    return kept


def play(case: str, engine, folder: Path | None = None) -> dict:
    """Rollouts, metrics, evaluation and weights of some steps; with a folder also of steps resumed after the first."""
    trainer = trainer_of(case, engine)
    rollouts, metrics = rollouts_of(trainer), []
    for step in range(STEPS):
        metrics.append(trainer.train_step(step))
        if folder is not None and step == 0:
            trainer.save_state(folder)
    found = {"metrics": metrics, "rollouts": rollouts, "evaluation": trainer.evaluate()}
    found |= {"policy": trainer.actor.state_dict(), "critic": trainer.critic and trainer.critic.state_dict()}
    if folder is not None:
        trainer = trainer_of(case, engine)
        trainer.load_state(folder)
        found["resumed"] = [trainer.train_step(step) for step in range(1, STEPS)]
        found["resumed_policy"] = trainer.actor.state_dict()
    return found


def main(folder: Path) -> None:
    """What each of two processes does."""
    for case, (stage, _) in CASES.items():
        engine = partial(make_engine, zero_stage=stage, micro_batch_size=2, varying_passes=True)
        ranks = engine()
        state = folder / f"{case}-state"
        if ranks.is_main and case == "gae":
            state.mkdir()
        found = play(case, engine, state if case == "gae" else None)
        torch.save(found, folder / f"{case}-{ranks.rank}.pt")
    train_ppo.run(parse_config(PPOConfig, command_flags(folder, folder / "whole")))


def command_flags(folder: Path, out: Path, **changes) -> list[str]:
    """Flags of a run of 3 rollouts, each of 2 updates."""
    changes = {"save_steps": 2, "init_kl_coef": 0.1, "pretrain_data": folder / "prompts.jsonl", **changes}
    return flags(folder / "lm", folder, out, **changes)


def launch(*words: object, environment: dict[str, str] | None = None) -> tuple[int, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*launcher, *map(str, words)]
    process = command(*words, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Path:
    """Folder with what each of two processes found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_causal_lm(folder / "lm")
    (folder / "reward.py").write_text(REWARD_FILE)
    rows = [{"question": text, "answer": str(i)} for i, text in enumerate(TEXTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = launch("-m", "tests.integration.test_ppo_ranks", folder)
    assert code == 0, output[-3000:]
    return folder


def load(folder: Path, case: str, rank: int) -> dict:
    return torch.load(folder / f"{case}-{rank}.pt", weights_only=False)


def without_seconds(line: dict) -> dict:
    return {name: value for name, value in line.items() if not name.startswith("seconds")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_rollouts_metrics_and_weights_of_one(case, played):
    one, two, other = play(case, LocalEngine), load(played, case, 0), load(played, case, 1)
    assert len(one["rollouts"]) == STEPS
    for first, second, third in zip(one["rollouts"], two["rollouts"], other["rollouts"], strict=True):
        for name in ("input_ids", "attention_mask", "action_mask", "group", "truncated"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
            assert torch.equal(getattr(second, name), getattr(third, name)), name
        assert torch.equal(first.reward.nan_to_num(-1), second.reward.nan_to_num(-1))
        assert [sample["prompt"] for sample in first.samples] == [sample["prompt"] for sample in second.samples]
        for name, tensor in first.computed.items():
            assert torch.allclose(tensor, getattr(second, name), atol=1e-4), name
    for step, (first, second, third) in enumerate(zip(one["metrics"], two["metrics"], other["metrics"], strict=True)):
        first, second = without_seconds(first), without_seconds(second)
        assert second == without_seconds(third)  # every process knows the same
        # ZeRO 0 tells no gradient norm. A first value lies on the bound of its clipping, and falls to either side.
        missing = {name for name in first if name not in second}
        assert set(second) <= set(first) and missing <= ({"grad_norm"} if case == "gspo" else set())
        names = [name for name in second if name != "value_clipped"]
        tolerance = {"rel": 1e-3, "abs": 1e-5}
        assert {n: second[n] for n in names} == {n: pytest.approx(first[n], **tolerance) for n in names}, step
    assert one["evaluation"] == pytest.approx(two["evaluation"], abs=1e-6)
    for name in ("policy", "critic") if case == "gae" else ("policy",):
        assert other[name] is None
        # Adam divides near-zero gradients by their own size, so that rounding of sums shows in the weights.
        assert largest_difference(one[name], two[name]) < 2e-4


@pytest.mark.slow
def test_two_processes_resume_exactly(played):
    found = load(played, "gae", 0)
    assert [without_seconds(line) for line in found["resumed"]] == [
        without_seconds(line) for line in found["metrics"][1:]
    ]
    assert largest_difference(found["policy"], found["resumed_policy"]) == 0


@pytest.mark.slow
def test_the_command_resumes_and_an_error_in_one_process_ends_all(played, tmp_path):
    one = train_ppo.run(parse_config(PPOConfig, command_flags(played, tmp_path / "one")))
    assert sorted(curve(played / "whole")) == [1, 2, 3]
    for first, second in zip(numbers(tmp_path / "one"), numbers(played / "whole"), strict=True):
        for name in ("reward", "kl", "policy_loss", "value_loss", "ptx_loss", "grad_norm", "response_length"):
            assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name
    last = numbers(played / "whole", "eval")[-1]
    assert {name: last[name] for name in one} == pytest.approx(one, abs=1e-6)
    assert largest_difference(weights(tmp_path / "one"), weights(played / "whole")) < 2e-4
    # Goes on from the checkpoint of step 2 to the last evaluation, where the reward of one process fails.
    out, checkpoints = tmp_path / "resumed", played / "whole-checkpoints"
    words = command_flags(played, out, load_checkpoint=True, ckpt_path=checkpoints)
    code, output = launch("examples/train_ppo.py", *words, environment={"FAIL_AT": "6"})
    assert code != 0
    assert "resumed from" in output and output.count("resumed from") == 1
    assert numbers(out) == numbers(played / "whole")[2:]
    assert "error: stopped by process 1: reward function" in output
    assert output.count("raised ZeroDivisionError: no reward today") == 2
    assert not (out / "model.safetensors").exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
