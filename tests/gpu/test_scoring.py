"""Scoring with shared prompts on a GPU: the scores of whole rows, and those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf.datasets.completions import Completion
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.scoring import encode_completions, score_encoded
from tests.tiny import tiny_reward_model, tiny_tokenizer

WORDS = ["the", "answer", "is", "apples", "good", "bad", "plus", "7", "31"]


def scored(device: str, share: bool, family: str, last_only: bool = False):
    """Thirty completions of five questions of different lengths, scored with a goal state."""
    tokenizer = tiny_tokenizer()
    generator = np.random.default_rng(1)
    completions = [
        Completion("what is 4 plus " * (q % 3 + 1) + str(q), " ".join(generator.choice(WORDS, 1 + (5 * q + s) % 17)))
        for q in range(5)
        for s in range(6)
    ]
    vector = np.random.default_rng(2).normal(size=(1, 32)).astype(np.float32)
    encoded = encode_completions(tokenizer, completions, template="plain", apply_chat_template=False, max_len=110)
    return score_encoded(
        tiny_reward_model(family, tokenizer).to(device),
        encoded,
        goal=GoalState(vector, 3, 1.0, "plain", False, 120, "c", "d"),
        batch_tokens=256,
        share_prompts=share,
        last_only=last_only,
        progress=False,
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_shared_prompts_on_a_gpu_change_no_score(family):
    wanted = scored("cpu", False, family)
    for share in (False, True):
        for one, reference in zip(scored("cuda", share, family), wanted, strict=True):
            # float32 on both sides, sums in another order
            assert one.partial_rewards == pytest.approx(reference.partial_rewards, abs=1e-4)
            assert one.cosine_sim == pytest.approx(reference.cosine_sim, abs=1e-4)
    for one, reference in zip(scored("cuda", True, family, last_only=True), wanted, strict=True):
        assert one.partial_rewards == pytest.approx(reference.partial_rewards[-1:], abs=1e-4)
        assert one.cosine_sim == pytest.approx(reference.cosine_sim[-1:], abs=1e-4)
