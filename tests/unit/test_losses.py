"""Pairwise losses: hand-computed numbers, low precision, gradients."""

import math

import pytest
import torch

from openrlhf.models.losses import bradley_terry_loss, centering_loss, log_exp_loss, next_token_loss


def test_equal_rewards_give_ln_2():
    zeros = torch.zeros(256)
    assert bradley_terry_loss(zeros, zeros).item() == pytest.approx(math.log(2), abs=1e-6)


def test_small_margin_is_seen_in_float32():
    # ln(1 + exp(-0.001)) = 0.692647; ln 2 = 0.693147
    loss = bradley_terry_loss(torch.tensor([0.001]), torch.tensor([0.0])).item()
    assert loss == pytest.approx(0.692647, abs=1e-6)
    assert loss < math.log(2)


def test_bfloat16_rewards_are_compared_in_float32():
    # 1.0078125 is the bfloat16 after 1: gap 0.0078125, loss ln(1 + exp(-0.0078125)) = 0.689249
    chosen = torch.tensor([1.0078125], dtype=torch.bfloat16)
    loss = bradley_terry_loss(chosen, torch.ones(1, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.6892485, abs=1e-6)


@pytest.mark.parametrize("pair_loss", [bradley_terry_loss, log_exp_loss])
def test_extreme_rewards_stay_finite(pair_loss):
    chosen = torch.tensor([-200.0], requires_grad=True)
    loss = pair_loss(chosen, torch.tensor([200.0]))
    loss.backward()
    assert loss.item() == pytest.approx(400.0)
    assert chosen.grad.item() == pytest.approx(-1.0)


def test_margin_moves_the_gap():
    # gap 2 - 1.5 = 0.5: ln(1 + exp(-0.5)) = 0.474077
    loss = bradley_terry_loss(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([1.5]))
    assert loss.item() == pytest.approx(0.474077, abs=1e-6)


def test_log_exp_equals_bradley_terry():
    chosen, rejected, margin = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(log_exp_loss(chosen, rejected, margin), bradley_terry_loss(chosen, rejected, margin))


def test_centering_is_the_mean_squared_sum():
    # (1 + 2)^2 = 9 and (-1 + 1)^2 = 0: mean 4.5
    assert centering_loss(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 1.0])).item() == pytest.approx(4.5)


@pytest.mark.parametrize("pair_loss", [bradley_terry_loss, log_exp_loss])
def test_gradients_against_finite_differences(pair_loss):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = (torch.randn(7, dtype=torch.float64, generator=generator) for _ in range(3))
    chosen.requires_grad_(), rejected.requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: pair_loss(c, r, margin), (chosen, rejected))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="margin"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1))


def test_next_token_loss_counts_answer_tokens_only():
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = math.log(3)  # softmax over [1, 1, 3, 1]: token 2 has 3/6 -> ln 2 nats
    logits[0, 1] = torch.tensor([50.0, 0.0, 0.0, 0.0])  # would cost 50 nats if the masked position counted
    ids = torch.tensor([[1, 2, 1]])
    loss = next_token_loss(logits, ids, torch.tensor([[False, True, False]]))
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert next_token_loss(logits, ids, torch.zeros(1, 3, dtype=torch.bool)).item() == 0.0


def test_next_token_and_centering_gradients_against_finite_differences():
    logits = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 3]])
    mask = torch.tensor([[False, False, True, True], [False, True, True, False]])
    assert torch.autograd.gradcheck(lambda x: next_token_loss(x, ids, mask), (logits,))
    rewards = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: centering_loss(x[0], x[1]), (rewards,))
