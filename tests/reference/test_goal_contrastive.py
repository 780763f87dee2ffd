"""The contrastive term against slow loops, and its behaviour at the edges."""

import math

import pytest
import torch

from openrlhf.models.goal_contrastive import cosine, goal_contrastive_loss
from openrlhf.models.goal_sampling import StateDraws, draw_states, percentile_index, sample_positions

HIDDEN = 5


def make_batch(lengths, prompt=2, dtype=torch.float64, seed=0):
    """States and response mask of 2B rows; ``lengths`` are response tokens, chosen rows first."""
    width = prompt + max(lengths)
    states = torch.randn(len(lengths), width, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, prompt : prompt + length] = True
    return states, mask


def slow_cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b)))


def slow_position(draw, low, high):
    return min(low + int(math.floor(draw * (high - low + 1))), high)


def slow_loss(states, mask, draws, strategy, reduction, temperature, source_p, goal_p):
    """The formulas of docs/losses.md, one number at a time."""
    pairs = states.shape[0] // 2
    rows = [[states[r, t].tolist() for t in range(states.shape[1]) if mask[r, t]] for r in range(2 * pairs)]
    positive, negative = [], []
    for b in range(pairs):
        chosen, rejected = rows[b], rows[pairs + b]
        first_source, first_goal = (math.ceil(round(p * (len(chosen) - 1), 6)) for p in (source_p, goal_p))
        first_negative = math.ceil(round(goal_p * (len(rejected) - 1), 6))
        sources, goals = [], []
        for u, v in zip(draws.source[b].tolist(), draws.goal[b].tolist(), strict=True):
            source = slow_position(u, first_source, len(chosen) - 1)
            goal = slow_position(v, max(first_goal, source), len(chosen) - 1)
            assert goal >= source
            sources.append(chosen[source])
            goals.append(chosen[goal])
        negative_sources, negatives = [], []
        for u, v in zip(draws.negative_source[b].tolist(), draws.negative[b].tolist(), strict=True):
            negative_sources.append(chosen[slow_position(u, first_source, len(chosen) - 1)])
            negatives.append(rejected[slow_position(v, first_negative, len(rejected) - 1)])
        if strategy == "cosine_avg":
            goals = [[sum(column) / len(goals) for column in zip(*goals, strict=True)]]
            negatives = [[sum(column) / len(negatives) for column in zip(*negatives, strict=True)]]
        if reduction == "pair" and strategy == "cosine":
            positive.append([slow_cosine(a, b) / temperature for a, b in zip(sources, goals, strict=True)])
            negative.append([slow_cosine(a, b) / temperature for a, b in zip(negative_sources, negatives, strict=True)])
        else:
            positive.append([slow_cosine(a, b) / temperature for a in sources for b in goals])
            negative.append([slow_cosine(a, b) / temperature for a in negative_sources for b in negatives])

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    if reduction == "original":
        every_positive = [sigmoid(x) for row in positive for x in row]
        every_negative = [sigmoid(x) for row in negative for x in row]
        mean_negative = sum(every_negative) / len(every_negative)
        return -math.log(sum(every_positive) / len(every_positive)) - math.log(1 - mean_negative)
    total = 0.0
    for pos, neg in zip(positive, negative, strict=True):
        total += sum(-math.log(sigmoid(x)) for x in pos) / len(pos)
        total += sum(-math.log(1 - sigmoid(x)) for x in neg) / len(neg)
    return total / pairs


@pytest.mark.parametrize("percentiles", [(0.0, 0.0), (0.5, 0.9), (0.3, 0.1), (1.0, 1.0)])
@pytest.mark.parametrize("reduction", ["pair", "original"])
@pytest.mark.parametrize("strategy", ["cosine", "cosine_avg"])
def test_loss_equals_the_slow_loop(strategy, reduction, percentiles):
    states, mask = make_batch([7, 1, 4, 5, 6, 2])
    draws = draw_states(3, 6, 4, torch.Generator().manual_seed(1))
    loss = goal_contrastive_loss(
        states,
        mask,
        draws,
        strategy=strategy,
        reduction=reduction,
        temperature=0.7,
        source_state_percentile=percentiles[0],
        goal_state_percentile=percentiles[1],
    ).loss
    assert loss.item() == pytest.approx(
        slow_loss(states, mask, draws, strategy, reduction, 0.7, *percentiles), abs=1e-9
    )


@pytest.mark.parametrize("reduction", ["pair", "original"])
@pytest.mark.parametrize("strategy", ["cosine", "cosine_avg"])
def test_gradient_against_finite_differences(strategy, reduction):
    states, mask = make_batch([3, 2, 4, 1])
    draws = draw_states(2, 2, 3, torch.Generator().manual_seed(2))
    states.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: goal_contrastive_loss(x, mask, draws, strategy=strategy, reduction=reduction).loss, (states,)
    )


@pytest.mark.parametrize("reduction", ["pair", "original"])
def test_signs_positive_pulls_together_negative_pushes_apart(reduction):
    """Perfect separation costs least: flipping the sign of either term makes one of the comparisons fail."""
    right, up = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    mask = torch.ones(2, 1, dtype=torch.bool)
    draws = draw_states(1, 1, 1, torch.Generator().manual_seed(0))

    def loss(chosen, rejected):
        return goal_contrastive_loss(torch.stack([chosen, rejected])[:, None], mask, draws, reduction=reduction).loss

    # One token: the positive cosine is 1. Negative cosine -1: 2 ln(1 + e^-1) = 0.626523; 0: ln(1 + e^-1) + ln 2.
    assert loss(right, -right).item() == pytest.approx(0.626523, abs=1e-5)
    assert loss(right, up).item() == pytest.approx(0.313262 + math.log(2), abs=1e-5)
    assert loss(right, -right) < loss(right, up) < loss(right, right)

    # Two tokens, source first and goal last: opposite states must cost more than equal ones.
    two = torch.ones(2, 2, dtype=torch.bool)
    ends = StateDraws(*(torch.tensor([[x]]) for x in (0.0, 0.999, 0.0, 0.0)))

    def two_token_loss(goal):
        states = torch.stack([torch.stack([right, goal]), torch.stack([up, up])])
        return goal_contrastive_loss(states, two, ends, reduction=reduction).loss

    assert two_token_loss(right) < two_token_loss(up) < two_token_loss(-right)


@pytest.mark.parametrize("reduction", ["pair", "original"])
def test_zero_states_have_finite_loss_and_gradient(reduction):
    states = torch.zeros(2, 3, HIDDEN, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss = goal_contrastive_loss(states, mask, draw_states(1, 4, 4, torch.Generator()), reduction=reduction).loss
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(2), abs=1e-6)  # every similarity is 0
    assert torch.isfinite(states.grad).all()
    assert cosine(torch.zeros(HIDDEN), torch.ones(HIDDEN)).item() == 0.0


@pytest.mark.parametrize("reduction", ["pair", "original"])
def test_pair_without_negatives_is_skipped_and_counted(reduction):
    states, mask = make_batch([3, 0], dtype=torch.float32)
    states.requires_grad_()
    out = goal_contrastive_loss(states, mask, draw_states(1, 4, 4, torch.Generator()), reduction=reduction)
    out.loss.backward()  # still differentiable
    assert out.loss.item() == 0.0
    assert out.metrics["contrastive_skipped"].item() == 1
    assert torch.isfinite(states.grad).all()


def test_negatives_come_from_the_pair_itself():
    """Two pairs of one prompt: what one pair's rejected row holds does not touch the other pair."""
    states, mask = make_batch([4, 4, 4, 4])
    draws = draw_states(2, 4, 4, torch.Generator().manual_seed(3))
    first = goal_contrastive_loss(states[[0, 2]], mask[[0, 2]], draws.select(torch.tensor([0]))).loss
    changed = states.clone()
    changed[3] += 10
    both_before = goal_contrastive_loss(states, mask, draws).loss
    second_after = goal_contrastive_loss(changed[[1, 3]], mask[[1, 3]], draws.select(torch.tensor([1]))).loss
    assert goal_contrastive_loss(changed, mask, draws).loss.item() == pytest.approx(
        (first + second_after).item() / 2, abs=1e-9
    )
    assert both_before.item() != pytest.approx(goal_contrastive_loss(changed, mask, draws).loss.item(), abs=1e-3)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_positions_stay_inside_the_response(length, fraction):
    lengths = torch.full((200,), length)
    draws = draw_states(200, 3, 3, torch.Generator().manual_seed(4))
    for draw in (
        draws,
        StateDraws(*(torch.zeros(200, 3) for _ in range(4))),
        StateDraws(*(torch.full((200, 3), 1 - 1e-7) for _ in range(4))),
    ):
        source, goal, negative_source, negative = sample_positions(lengths, lengths, draw, fraction, fraction)
        for position in (source, goal, negative_source, negative):
            assert position.min() >= math.ceil(fraction * (length - 1))
            assert position.max() <= length - 1
        assert (goal >= source).all()


def test_percentile_index_is_the_first_place_at_or_after_the_percentile():
    lengths = torch.tensor([1, 2, 5, 31])
    assert percentile_index(lengths, 0.0).tolist() == [0, 0, 0, 0]
    assert percentile_index(lengths, 1.0).tolist() == [0, 1, 4, 30]
    assert percentile_index(lengths, 0.1).tolist() == [0, 1, 1, 3]  # 0.1 * 30 is 3, not 4
    assert percentile_index(lengths, 0.9).tolist() == [0, 1, 4, 27]


def test_every_position_is_drawn_equally_often():
    draws = draw_states(4000, 1, 1, torch.Generator().manual_seed(5))
    source, *_ = sample_positions(torch.full((4000,), 4), torch.full((4000,), 4), draws)
    share = torch.bincount(source.flatten(), minlength=4) / 4000
    # standard error sqrt(0.25 * 0.75 / 4000) = 0.007: four of them
    assert (share - 0.25).abs().max() < 0.03


def test_loss_does_not_depend_on_how_the_batch_is_split():
    states, mask = make_batch([5, 3, 4, 2, 6, 1, 3, 4])
    draws = draw_states(4, 5, 5, torch.Generator().manual_seed(6))
    whole = goal_contrastive_loss(states, mask, draws).loss
    halves = []
    for rows in ([0, 1], [2, 3]):
        both = rows + [r + 4 for r in rows]
        halves.append(goal_contrastive_loss(states[both], mask[both], draws.select(torch.tensor(rows))).loss)
    assert whole.item() == pytest.approx(sum(halves).item() / 2, abs=1e-12)


def test_pad_side_and_amount_do_not_matter():
    states, mask = make_batch([5, 3, 4, 2])
    draws = draw_states(2, 5, 5, torch.Generator().manual_seed(7))
    plain = goal_contrastive_loss(states, mask, draws).loss
    junk = torch.full((4, 3, HIDDEN), float("1e6"), dtype=states.dtype)
    off = torch.zeros(4, 3, dtype=torch.bool)
    left = goal_contrastive_loss(torch.cat([junk, states], 1), torch.cat([off, mask], 1), draws).loss
    right = goal_contrastive_loss(torch.cat([states, junk], 1), torch.cat([mask, off], 1), draws).loss
    assert plain.item() == pytest.approx(left.item(), abs=1e-12)
    assert plain.item() == pytest.approx(right.item(), abs=1e-12)


def test_unknown_names_and_temperature_are_refused():
    states, mask = make_batch([2, 2])
    draws = draw_states(1, 1, 1, torch.Generator())
    with pytest.raises(ValueError, match="cosine_avg"):
        goal_contrastive_loss(states, mask, draws, strategy="cosin")
    with pytest.raises(ValueError, match="original"):
        goal_contrastive_loss(states, mask, draws, reduction="mean")
    with pytest.raises(ValueError, match="temperature"):
        goal_contrastive_loss(states, mask, draws, temperature=0.0)
