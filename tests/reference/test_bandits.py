"""Bandits whose optimum is known are solved by every estimator with the functions that training uses.

A response is two tokens. The first one is the arm, which alone decides the reward; a policy is a table of logits.
"""

import pytest
import torch

from openrlhf.models.functional import approx_kl, entropy_from_logits, logprobs_from_logits
from openrlhf.models.policy_losses import entropy_loss, kl_loss, ppo_policy_loss, ppo_value_loss
from openrlhf.trainer.advantages import ESTIMATORS, AdvantageSettings, RolloutRewards

ARMS = 5
PAYS = torch.tensor([0.1, 0.3, 0.9, 0.6, 0.2])  # mean reward of each arm; the best one is 2
MASK = torch.tensor([[False, True, True]]).repeat(1024, 1)  # the prompt's token is not the policy's


def token_logprobs(table, ids):
    """(B, 3) log-probabilities of a prompt token and two response tokens, by the tables of the two places."""
    logits = torch.cat([table, table[-1:]]).expand(len(ids), -1, -1)  # what the last place predicts is not looked at
    return logprobs_from_logits(logits, ids, MASK[: len(ids)])


def sample(table, rows, generator):
    """(B, 3) ids: a prompt token and one draw from each place of the table."""
    arms = [torch.multinomial(place.softmax(0), rows, replacement=True, generator=generator) for place in table]
    return torch.stack([torch.zeros(rows, dtype=torch.int64), *arms], dim=1)


def train(name, pays, steps, rows, prompts, noise, reference=None, kl_coef=0.0, kind=None, rate=0.05, scale=True):
    """Probabilities of the arms after PPO with two updates a rollout; ``kind``: KL as a loss of this kind."""
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(2, ARMS, requires_grad=True)
    critic = torch.zeros(3, requires_grad=True)  # the value of each column
    optimizer = torch.optim.Adam([table, critic], lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps * 2)
    reference = torch.zeros(2, ARMS) if reference is None else reference
    mask, group = MASK[:rows], torch.arange(rows) % prompts
    settings = AdvantageSettings(scale=scale)
    average = torch.zeros(ARMS)
    for step in range(steps):
        ids = sample(table.detach(), rows, generator)
        score = pays[ids[:, 1]] + noise * torch.randn(rows, generator=generator)
        with torch.no_grad():
            old, fixed = token_logprobs(table, ids), token_logprobs(reference, ids)
        old_values = critic.detach().expand(rows, -1)
        rollout = RolloutRewards(
            score, group, mask, approx_kl(old, fixed, "k1", mask), 0.0 if kind else kl_coef, values=old_values
        )
        got = ESTIMATORS[name](rollout, settings)
        for _ in range(2):
            logprobs = token_logprobs(table, ids)
            loss = ppo_policy_loss(logprobs, old, got.advantages, got.loss_mask).loss
            if kind:
                loss = loss + kl_coef * kl_loss(logprobs, fixed, got.loss_mask, kind).loss
            value = ppo_value_loss(critic.expand(rows, -1), old_values, got.returns, got.loss_mask, 0.5).loss
            optimizer.zero_grad()
            (loss + value).backward()
            optimizer.step()
            schedule.step()
        if step >= steps * 3 // 4:
            average += table.detach()[0].softmax(0) / (steps - steps * 3 // 4)
    return average


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_best_arm_is_found(name):
    shares = train(name, PAYS, steps=200, rows=64, prompts=8, noise=0.3)
    assert shares[2] > 0.9


REFERENCE = torch.tensor([[0.8, 0.0, -0.5, 0.3, 0.0], [0.0, 0.5, 0.0, -0.5, 0.0]])


def tilted(pays, temperature):
    """The optimum of expected reward - temperature * KL(policy || reference): reference * exp(reward / temperature)."""
    return (REFERENCE[0].log_softmax(0) + pays / temperature).softmax(0)


@pytest.mark.parametrize("name", ["gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo"])
def test_kl_in_the_reward_gives_the_tilted_distribution(name):
    """Where the mean of a group holds the response itself, its score counts (n - 1)/n, the KL penalty whole."""
    rows, prompts, temperature = 1024, 256, 0.3
    own_share = 1 - prompts / rows if name in ("reinforce_baseline", "dr_grpo") else 1.0
    expected = {share: tilted(PAYS * share, temperature) for share in (0.75, 1.0)}
    assert (expected[0.75] - expected[1.0]).abs().max() > 0.06  # the two would be told apart
    shares = train(name, PAYS, 120, rows, prompts, 0.3, REFERENCE, temperature)
    assert (shares - expected[own_share]).abs().max() < 0.02


def test_kl_in_the_reward_beside_a_normalised_score():
    """group_norm divides the score by its deviation d under the policy, the KL penalty not: the optimum is that of the
    temperature times d, at the d that it has itself, found here by iteration. Groups of 512 know d well."""
    temperature, noise, expected = 2.0, 0.2, torch.full((ARMS,), 1 / ARMS)
    for _ in range(200):
        mean = (expected * PAYS).sum()
        deviation = ((expected * (PAYS - mean).square()).sum() + noise**2).sqrt()
        expected = (expected + tilted(PAYS, temperature * deviation)) / 2
    shares = train("group_norm", PAYS, 120, 1024, 2, noise, REFERENCE, temperature)
    assert (shares - expected).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_in_the_loss(kind):
    """k2 has the same optimum as KL in the reward. k3 pulls by KL(reference || policy): at its optimum
    policy * (reward - expected reward) = temperature * (policy - reference), so policy = temperature * reference /
    (temperature + expected reward - reward), solved for the expected reward by bisection."""
    temperature = 0.5
    reference = REFERENCE[0].softmax(0)
    if kind == "k2":
        expected = tilted(PAYS, temperature)
    else:
        low, high = float(PAYS.max()) - temperature + 1e-6, 10.0
        for _ in range(100):
            middle = (low + high) / 2
            too_much = (temperature * reference / (temperature + middle - PAYS)).sum() > 1
            low, high = (middle, high) if too_much else (low, middle)
        expected = temperature * reference / (temperature + low - PAYS)
        assert (expected - tilted(PAYS, temperature)).abs().max() > 0.03
    shares = train("rloo", PAYS, 120, 1024, 256, 0.3, REFERENCE, temperature, kind)
    assert (shares - expected).abs().max() < 0.015


def test_k1_as_a_loss_holds_nothing():
    """The policy ends at the best arm, as without any KL term: its gradient is noise around zero."""
    shares = train("rloo", PAYS, 200, 256, 32, 0.3, REFERENCE, 0.5, "k1")
    assert shares[2] > 0.9 > tilted(PAYS, 0.5).max()


def test_entropy_bonus_gives_the_softmax_of_the_rewards():
    """Expected reward + c * entropy is greatest at softmax(reward / c); here exactly, over all arms at once."""
    table = torch.zeros(1, ARMS, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.05)
    ids, mask = torch.arange(ARMS).repeat(2, 1).T.contiguous(), torch.tensor([[False, True]]).repeat(ARMS, 1)
    for _ in range(150):
        logits = torch.stack([table, table], dim=1).expand(ARMS, 2, ARMS)
        logprobs = logprobs_from_logits(logits, ids, mask)
        old = logprobs.detach()
        weight = old.exp() * ARMS * (PAYS - (old[:, 1].exp() * PAYS).sum()).unsqueeze(1)  # what a draw would weigh
        loss = ppo_policy_loss(logprobs, old, weight, mask).loss
        bonus = entropy_loss(entropy_from_logits(logits, mask), mask).loss
        optimizer.zero_grad()
        (loss + 0.25 * bonus).backward()
        optimizer.step()
    assert torch.allclose(table.detach()[0].softmax(0), (PAYS / 0.25).softmax(0), atol=1e-3)
