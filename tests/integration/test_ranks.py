"""Several processes share an evaluation: goal states and scores are those of one process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from openrlhf.cli import eval_rm, get_representation
from openrlhf.models.pretrained import save_reward_model
from tests.runs import command, write_pairs
from tests.tiny import tiny_reward_model, tiny_tokenizer


def launch(processes: int, *words: object) -> None:
    """Start a program of the checkout in several processes, as torchrun does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    process = command(*launcher, *map(str, words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output


@pytest.mark.slow
def test_two_processes_give_the_goal_state_and_scores_of_one(tmp_path: Path):
    tmp = tmp_path
    pairs = write_pairs(tmp / "pairs.jsonl")
    (tmp / "rm").mkdir()
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model("llama", tokenizer)
    save_reward_model(tmp / "rm", model, tokenizer, settings={"template": "plain", "max_len": 100})
    (tmp / "data" / "sums").mkdir(parents=True)
    for sample in range(2):
        rows = [
            {"question": f"what is {k} ?", "expected_answer": "7", "generated_solution": f"the answer is {sample} {k}"}
            for k in range(20)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp / "data" / "sums" / f"output-rs{sample}.jsonl").write_text(lines)

    goal = ["--dataset", pairs, "--reward_model", tmp / "rm", "--batch_tokens", "200", "--save_dir"]
    score = ["--completions_data_path", tmp / "data", "--reward_model_path", tmp / "rm", "--bootstrap", "10"]
    score += ["--batch_tokens", "300", "--goal_state_path", tmp / "goal-1", "--save_dir"]
    get_representation.main(list(map(str, [*goal, tmp / "goal-1"])))
    launch(2, "examples/get_representation.py", *goal, tmp / "goal-2")
    one, two = (np.load(tmp / f"goal-{count}" / "goal_state.npy") for count in (1, 2))
    np.testing.assert_allclose(one, two, atol=1e-6)

    eval_rm.main(list(map(str, [*score, tmp / "scores-1"])))
    launch(2, "examples/eval_rm.py", *score, tmp / "scores-2")
    for name in ("output-rs0.jsonl", "output-rs1.jsonl"):
        files = [tmp / f"scores-{count}" / "rm" / "sums" / "all" / name for count in (1, 2)]
        first, second = ([json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in files)
        assert [row["question"] for row in first] == [row["question"] for row in second]
        for a, b in zip(first, second, strict=True):
            assert a["partial_rewards"] == pytest.approx(b["partial_rewards"], abs=1e-5)
            assert a["cosine_sim"] == pytest.approx(b["cosine_sim"], abs=1e-5)
    one, two = (json.loads((tmp / f"scores-{count}" / "rm" / "summary.json").read_text()) for count in (1, 2))
    assert one["sets"]["sums/all"]["rows"] == two["sets"]["sums/all"]["rows"] == 40
