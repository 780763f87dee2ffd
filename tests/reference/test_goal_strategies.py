"""Strategies beyond the paper's, and where their states are drawn, against slow loops."""

import math

import pytest
import torch

from openrlhf.models.goal_contrastive import CONTRASTIVE_STRATEGIES, goal_contrastive_loss
from openrlhf.models.goal_sampling import (
    StateDraws,
    draw_states,
    first_difference,
    geometric_position,
    sample_positions,
)
from openrlhf.trainer.config import FORWARD_PASS_STRATEGIES
from tests.reference.test_goal_contrastive import HIDDEN, make_batch, slow_cosine

LENGTHS = [6, 3, 4, 5, 2, 7]  # three pairs, chosen first
PROMPT = torch.tensor([7, 8, 7])  # the first and the third pair have one prompt


def drawn(batch, draws, values=None, **places):
    """States (and values) of every pair as lists: source, goal, negative source, negative; and the last chosen one."""
    states, mask = batch
    pairs = len(states) // 2
    lengths = mask.sum(1)
    positions = sample_positions(lengths[:pairs], lengths[pairs:], draws, **places)
    found = []
    for b in range(pairs):
        rows = (b, b, b, pairs + b)
        own = [
            [(states[row][mask[row]][p].tolist(), None if values is None else values[row][mask[row]][p].item())
             for p in position[b].tolist()]
            for row, position in zip(rows, positions, strict=True)
        ]  # fmt: skip
        found.append([*own, states[b][mask[b]][-1].tolist()])
    return found


def softplus(x):
    return math.log1p(math.exp(x))


def slow_infonce(pairs, temperature, prompt=None):
    total = 0.0
    for b, (source, goal, _, negative, _) in enumerate(pairs):
        for i, (state, _) in enumerate(source):
            others = [x for x, _ in negative]
            if prompt is not None:
                others += [pairs[c][1][0][0] for c in range(len(pairs)) if prompt[c] != prompt[b]]
            right = math.exp(slow_cosine(state, goal[i][0]) / temperature)
            wrong = sum(math.exp(slow_cosine(state, x) / temperature) for x in others)
            total -= math.log(right / (right + wrong)) / len(source)
    return total / len(pairs)


def slow_goal_margin(pairs, temperature):
    goal = [sum(column) / len(pairs) for column in zip(*(pair[4] for pair in pairs), strict=True)]
    means = []
    for source, _, _, negative, _ in pairs:
        gaps = [slow_cosine(a, goal) - slow_cosine(b, goal) for a, _ in source for b, _ in negative]
        means.append(sum(softplus(-gap / temperature) for gap in gaps) / len(gaps))
    return sum(means) / len(means)


def slow_value(pairs, temperature):
    means = []
    for source, _, _, negative, _ in pairs:
        gaps = [a - b for _, a in source for _, b in negative]
        means.append(sum(softplus(-gap / temperature) for gap in gaps) / len(gaps))
    return sum(means) / len(means)


@pytest.mark.parametrize("strategy", ["infonce", "infonce_batch", "goal_margin", "value"])
def test_loss_equals_the_slow_loop(strategy):
    batch = make_batch(LENGTHS)
    values = torch.randn(batch[1].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    draws = draw_states(3, 4, 5, torch.Generator().manual_seed(1))
    pairs = drawn(batch, draws, values)
    expected = {
        "infonce": lambda: slow_infonce(pairs, 0.3),
        "infonce_batch": lambda: slow_infonce(pairs, 0.3, PROMPT.tolist()),
        "goal_margin": lambda: slow_goal_margin(pairs, 0.3),
        "value": lambda: slow_value(pairs, 0.3),
    }[strategy]()
    found = goal_contrastive_loss(*batch, draws, values=values, prompt=PROMPT, strategy=strategy, temperature=0.3)
    assert found.loss.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("strategy", sorted(CONTRASTIVE_STRATEGIES))
def test_gradient_against_finite_differences(strategy):
    states, mask = make_batch([3, 2, 4, 1])
    draws = draw_states(2, 2, 3, torch.Generator().manual_seed(2))
    head = torch.randn(HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ends = torch.zeros(mask.shape, dtype=torch.bool)
    ends[[0, 1], [4, 3]] = strategy == "goal_margin"  # its goal is a constant: the ends it is made of must not move
    start = states.clone()
    states.requires_grad_()

    def loss(x):
        x = torch.where(ends.unsqueeze(2), start, x)
        return goal_contrastive_loss(x, mask, draws, values=x @ head, strategy=strategy, temperature=0.5).loss

    assert torch.autograd.gradcheck(loss, (states,))


@pytest.mark.parametrize("strategy", sorted(CONTRASTIVE_STRATEGIES))
def test_separated_states_cost_less(strategy):
    """Chosen states alike and rejected ones opposite: less than the reverse order of what is near and far."""
    mask = torch.ones(4, 3, dtype=torch.bool)
    draws = draw_states(2, 4, 4, torch.Generator().manual_seed(0))
    right, up = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    values = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 3)

    def loss(rejected, values):
        states = torch.stack([right, right, rejected, rejected])[:, None].expand(4, 3, 2)
        return goal_contrastive_loss(states, mask, draws, values=values, prompt=torch.zeros(2), strategy=strategy).loss

    assert loss(-right, values) < loss(right, -values)
    if strategy != "value":
        assert loss(-right, values) < loss(up, values) < loss(right, values)


@pytest.mark.parametrize("strategy", sorted(set(CONTRASTIVE_STRATEGIES) - set(FORWARD_PASS_STRATEGIES)))
def test_loss_does_not_depend_on_how_the_batch_is_split(strategy):
    states, mask = make_batch([5, 3, 4, 2, 6, 1, 3, 4])
    values = states[:, :, 0]
    draws = draw_states(4, 5, 5, torch.Generator().manual_seed(6))
    whole = goal_contrastive_loss(states, mask, draws, values=values, strategy=strategy).loss
    halves = []
    for rows in ([0, 1], [2, 3]):
        both = rows + [r + 4 for r in rows]
        part = draws.select(torch.tensor(rows))
        options = {"values": values[both], "strategy": strategy}
        halves.append(goal_contrastive_loss(states[both], mask[both], part, **options).loss)
    assert whole.item() == pytest.approx(sum(halves).item() / 2, abs=1e-12)


@pytest.mark.parametrize("strategy", ["infonce_batch", "goal_margin"])
def test_a_pair_without_tokens_is_no_negative_and_no_goal(strategy):
    states, mask = make_batch([4, 5, 3, 3, 4, 3])
    draws = draw_states(3, 4, 4, torch.Generator().manual_seed(1))
    mask[1] = False  # the second chosen response is empty
    two = [0, 2, 3, 5]
    alone = goal_contrastive_loss(states[two], mask[two], draws.select(torch.tensor([0, 2])), strategy=strategy)
    found = goal_contrastive_loss(states, mask, draws, strategy=strategy)
    assert found.loss.item() == pytest.approx(alone.loss.item() * 2 / 3, abs=1e-12)
    assert found.metrics["contrastive_skipped"] == 1


def test_first_difference_counts_equal_tokens_of_the_responses():
    ids = torch.tensor([
        [9, 1, 2, 3, 4, 0], [9, 9, 5, 5, 0, 0], [9, 9, 9, 7, 7, 7],
        [9, 1, 2, 8, 4, 0], [9, 9, 5, 5, 6, 0], [9, 9, 9, 6, 7, 7],
    ])  # fmt: skip
    mask = torch.tensor([
        [0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1],
        [0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1],
    ]).bool()  # fmt: skip
    chosen, rejected = torch.arange(3), torch.arange(3, 6)
    assert first_difference(ids, mask, chosen, rejected).tolist() == [2, 2, 0]
    assert first_difference(ids, mask, chosen, chosen).tolist() == [4, 2, 3]  # all of it
    padded = torch.cat([torch.full((6, 2), 3), ids], 1), torch.cat([torch.zeros(6, 2, dtype=torch.bool), mask], 1)
    assert first_difference(*padded, chosen, rejected).tolist() == [2, 2, 0]


@pytest.mark.parametrize("start", ["diverge", "goals_diverge"])
def test_shared_tokens_are_not_drawn(start):
    """States before the first difference get no gradient; of goals_diverge only sources may have one."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]])
    states = torch.randn(2, 6, HIDDEN, requires_grad=True, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 6, dtype=torch.bool)
    draws = draw_states(1, 50, 50, torch.Generator().manual_seed(0))
    goal_contrastive_loss(states, mask, draws, input_ids=ids, start=start).loss.backward()
    touched = states.grad.abs().sum(2) > 0
    assert touched[1].tolist() == [False] * 3 + [True] * 3
    assert touched[0].tolist() == [start == "goals_diverge"] * 3 + [True] * 3
    with pytest.raises(ValueError, match="input_ids"):
        goal_contrastive_loss(states, mask, draws, start=start)


def test_a_response_that_ends_before_the_difference_gives_its_last_token():
    lengths = torch.tensor([2])
    draws = StateDraws(*(torch.tensor([[0.0, 0.99]]) for _ in range(4)))
    found = sample_positions(lengths, torch.tensor([5]), draws, first_source=torch.tensor([2]), first_goal=2)
    assert [x.tolist() for x in found] == [[[1, 1]], [[1, 1]], [[1, 1]], [[2, 4]]]


def test_geometric_goals_follow_their_law():
    draw = (torch.arange(100_000) + 0.5) / 100_000
    found = geometric_position(draw, torch.tensor(3), torch.tensor(7), 0.5)
    share = torch.bincount(found - 3) / 100_000
    assert share.tolist() == pytest.approx([w / 31 for w in (16, 8, 4, 2, 1)], abs=1e-4)
    assert geometric_position(torch.tensor(1 - 1e-7), torch.tensor(3), torch.tensor(3), 0.9) == 3


def test_last_goals_are_the_ends():
    lengths, others = torch.tensor([4, 1]), torch.tensor([2, 6])
    draws = draw_states(2, 3, 2, torch.Generator().manual_seed(0))
    source, goal, _, negative = sample_positions(lengths, others, draws, goal_sampling="last")
    assert goal.tolist() == [[3] * 3, [0] * 3] and negative.tolist() == [[1] * 2, [5] * 2]
    assert (source <= goal).all()


def test_stopped_goals_get_no_gradient():
    states, mask = make_batch([4, 4])
    states.requires_grad_()
    ends = StateDraws(*(torch.tensor([[x]]) for x in (0.0, 0.999, 0.0, 0.5)))
    goal_contrastive_loss(states, mask, ends, strategy="infonce", goal_stop_gradient=True).loss.backward()
    touched = states.grad.abs().sum(2) > 0
    assert touched.nonzero().tolist() == [[0, 2]]  # the source, behind a prompt of two tokens


def test_unknown_settings_are_refused():
    batch = make_batch([2, 2])
    draws = draw_states(1, 1, 1, torch.Generator())
    for options, message in [
        ({"start": "divergence"}, "goals_diverge"),
        ({"goal_sampling": "far"}, "geometric"),
        ({"goal_discount": 1.0}, "goal_discount"),
        ({"strategy": "infonce", "reduction": "original"}, "belongs to cosine"),
        ({"strategy": "value"}, "give those of the head"),
    ]:
        with pytest.raises(ValueError, match=message):
            goal_contrastive_loss(*batch, draws, **options)


@pytest.mark.parametrize(
    ("strategy", "reduction"),
    [*((strategy, "pair") for strategy in CONTRASTIVE_STRATEGIES), ("cosine", "original"), ("cosine_avg", "original")],
)
def test_bfloat16_states_are_compared_in_float32(strategy, reduction):
    """Neither autocast nor the dtype of the states rounds a product, a mean or a score."""
    generator = torch.Generator().manual_seed(8)
    states = (2 + torch.randn(6, 9, 32, generator=generator)).bfloat16()
    mask = torch.ones(6, 9, dtype=torch.bool)
    draws = draw_states(3, 4, 5, generator)
    settings = {"values": states[:, :, 0].float(), "strategy": strategy, "reduction": reduction, "temperature": 0.1}
    expected = goal_contrastive_loss(states.double(), mask, draws, **settings).loss.item()
    assert goal_contrastive_loss(states, mask, draws, **settings).loss.item() == pytest.approx(expected, rel=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = goal_contrastive_loss(states.float(), mask, draws, **settings).loss
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected, rel=1e-5)
