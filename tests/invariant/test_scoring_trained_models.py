"""The invariances of scoring on trained networks: the pocket policy, and SmolLM2-135M where it was fetched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf.cli.common import POCKET_POLICY
from openrlhf.datasets.completions import Completion
from openrlhf.datasets.pocket import generate_problems
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.scoring import encode_completions, score_encoded
from openrlhf.models.pretrained import load_reward_model, load_tokenizer

SMALL_LM = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("folder", [POCKET_POLICY, SMALL_LM], ids=["pocket", "SmolLM2-135M"])
def test_batches_order_and_shared_prompts_do_not_change_a_score(folder):
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder.name} is absent; fetch it with build_scripts/get_small_lm.sh")
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(folder, allow_missing_head=True, pad_token_id=tokenizer.pad_token_id).eval()
    with torch.no_grad():  # a fresh head is tiny; rewards of about 1
        model.network.score.weight.mul_(model.hidden_size / 50)
    problems = generate_problems("test", 3, 0)
    texts = [
        Completion(problem.question, other.solution, sample=i)
        for problem in problems
        for i, other in enumerate(generate_problems("test", 4, 1))
    ]
    vector = np.random.default_rng(0).normal(size=(1, model.hidden_size)).astype(np.float32)
    goal = GoalState(vector, 1, 1.0, "plain", False, 256, "c", "d")
    encoded = encode_completions(tokenizer, texts, template="plain", apply_chat_template=False, max_len=256)
    wanted = []
    for one in encoded:
        with torch.no_grad():
            out = model(torch.tensor([one.ids]), torch.ones(1, len(one.ids), dtype=torch.bool))
        states = out.hidden_states[0, -one.num_actions :]
        cosines = torch.nn.functional.cosine_similarity(states, torch.from_numpy(vector), dim=-1)
        wanted.append((out.values[0, -one.num_actions :].tolist(), cosines.tolist()))
    assert max(abs(reward) for values, _ in wanted for reward in values) > 0.01
    order = np.random.default_rng(1).permutation(len(texts))
    for share in (True, False):
        for batch_tokens in (150, 4096):
            scored = score_encoded(
                model, [encoded[i] for i in order], goal=goal, batch_tokens=batch_tokens, share_prompts=share,
                progress=False,
            )  # fmt: skip
            for i, one in zip(order, scored, strict=True):
                assert one.partial_rewards == pytest.approx(wanted[i][0], abs=1e-5)
                assert one.cosine_sim == pytest.approx(wanted[i][1], abs=1e-5)
