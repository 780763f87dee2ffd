"""bfloat16 and flash-attention on a GPU against float32 without it, and the GPU against the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import is_flash_attn_2_available

from openrlhf.models import reward_model
from openrlhf.models.losses import bradley_terry_loss
from openrlhf.models.reward_model import RewardModel, initialise_head
from tests.tiny import tiny_reward_model

PAIRS, WIDTH = 8, 64


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """2B right-padded rows of 5 to 64 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 320, (2 * PAIRS, WIDTH), generator=generator)
    lengths = torch.randint(5, WIDTH + 1, (2 * PAIRS,), generator=generator)
    mask = torch.arange(WIDTH) < lengths[:, None]
    return ids, mask


def rewards_and_gradient(
    model: RewardModel, device: str, bf16: bool = False, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards (2B,) and the gradient of the Bradley-Terry loss over all weights, one vector; on the CPU."""
    model = model.to(device)
    ids, mask = batch()
    ids[PAIRS:, :40] = ids[:PAIRS, :40]  # a shared beginning, of more than half of some rows
    rows = model.pack(ids, mask) if packed else None
    ids, mask = ids.to(device), mask.to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
        reward = model(ids, mask, rows).reward
        loss = bradley_terry_loss(reward[:PAIRS], reward[PAIRS:])
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return reward.detach().cpu(), gradient.cpu()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Length of the difference against that of b."""
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_gpu_gives_the_rewards_and_gradients_of_the_cpu(family):
    on_cpu = rewards_and_gradient(tiny_reward_model(family), "cpu")
    on_gpu = rewards_and_gradient(tiny_reward_model(family), "cuda")
    # float32 with other orders of summation: 2^-24 a step, sums of up to a few thousand terms
    assert relative(on_gpu[0], on_cpu[0]) < 1e-4
    assert relative(on_gpu[1], on_cpu[1]) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_bfloat16_stays_close_to_float32(family):
    exact = rewards_and_gradient(tiny_reward_model(family), "cuda")
    rounded = rewards_and_gradient(tiny_reward_model(family), "cuda", bf16=True)
    # bfloat16 has 8 bits: each rounding is off by up to 2^-9 = 0.2%; some dozens of them in a row, of random sign
    assert relative(rounded[0], exact[0]) < 0.03
    assert relative(rounded[1], exact[1]) < 0.06
    assert rounded[0].dtype == torch.float32  # rewards are compared in float32
    assert not torch.equal(rounded[0], exact[0])  # it did compute in bfloat16


@pytest.mark.parametrize("slack", [0, 1 << 19])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_packed_rows_on_a_gpu_give_the_rewards_and_gradients_of_padded_ones(family, slack, monkeypatch):
    monkeypatch.setattr(reward_model, "PACKING_SLACK", {True: slack})
    padded = rewards_and_gradient(tiny_reward_model(family), "cuda")
    packed = rewards_and_gradient(tiny_reward_model(family), "cuda", packed=True)
    assert relative(packed[0], padded[0]) < 1e-4
    assert relative(packed[1], padded[1]) < 1e-4
    rounded = rewards_and_gradient(tiny_reward_model(family), "cuda", bf16=True, packed=True)
    assert relative(rounded[0], padded[0]) < 0.03
    assert relative(rounded[1], padded[1]) < 0.06


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is not installed: pip install -e '.[gpu]'")
def test_flash_attention_gives_the_rewards_of_sdpa(packed):
    # Heads of 32: flash-attention refuses the 8 of the tiny models.
    config = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, num_labels=1, max_position_embeddings=128,
    )  # fmt: skip
    found = {}
    for attention in ("sdpa", "flash_attention_2"):
        torch.manual_seed(0)
        network = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
        initialise_head(network.score, config.hidden_size, 0)
        rows = packed and attention == "flash_attention_2"
        found[attention] = rewards_and_gradient(RewardModel(network).eval(), "cuda", bf16=True, packed=rows)
    # Both compute in bfloat16, with other roundings.
    assert relative(found["flash_attention_2"][0], found["sdpa"][0]) < 0.03
    assert relative(found["flash_attention_2"][1], found["sdpa"][1]) < 0.06
