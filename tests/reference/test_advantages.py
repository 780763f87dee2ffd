"""Advantage estimators, reward shaping and group filters against slow loops on ragged groups and masks with gaps."""

import math
from dataclasses import replace

import pytest
import torch

from openrlhf.trainer.advantages import (
    ESTIMATORS,
    AdvantageSettings,
    RolloutRewards,
    clip_rewards,
    gae,
    overlong_penalty,
    penalise_truncated,
    shape_rewards,
    whiten,
)
from openrlhf.trainer.groups import group_figures, keep_groups

GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
NAN = math.nan


def make_rollout(seed, unscored=True, dense=True, gaps=True, equal_group=True):
    """11 responses to 4 prompts in mixed order: groups of 4, 3, 2 and 2; the last one has equal scores."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    group = torch.tensor([7, 3, 7, 9, 3, 7, 5, 9, 3, 5, 7])
    score = normal(11)
    if equal_group:
        score[group == 5] = 0.3
    if unscored:
        score[2] = NAN  # leaves three of the group of four
        score[3] = NAN  # leaves one of a group of two: nothing to compare with
    mask = torch.zeros(11, 8, dtype=torch.bool)
    for row, length in enumerate(torch.randint(1, 9, (11,), generator=generator).tolist()):
        start = int(torch.randint(0, 9 - length, (1,), generator=generator))
        mask[row, start : start + length] = True
        if gaps and length > 2:
            mask[row, start + 1] = False
    dense_rewards = normal(11, 8).masked_fill((group == 5).unsqueeze(1), 0.0) if dense else None
    return RolloutRewards(score, group, mask, normal(11, 8), 0.3, dense_rewards, normal(11, 8))


def slow_rewards(rollout, row, baseline=0.0, scale=1.0):
    """(column, reward) of each token of the policy, by the formula of docs/rl.md."""
    columns = [column for column in range(rollout.mask.shape[1]) if rollout.mask[row, column]]
    rewards = []
    for column in columns:
        reward = 0.0 if rollout.dense is None else float(rollout.dense[row, column]) / scale
        if column == columns[-1]:
            score = float(rollout.score[row])
            reward += ((0.0 if math.isnan(score) else score) - baseline) / scale
        if rollout.kl_coef:
            reward -= rollout.kl_coef * float(rollout.kl[row, column])
        rewards.append((column, reward))
    return rewards


def slow_gae(rewards, values, gamma, gae_lambda):
    """Sums of discounted one-step errors, each written out from its own token on."""
    errors = []
    for place, (column, reward) in enumerate(rewards):
        following = values[rewards[place + 1][0]] if place + 1 < len(rewards) else 0.0
        errors.append(reward + gamma * following - values[column])
    return [
        sum((gamma * gae_lambda) ** (later - place) * errors[later] for later in range(place, len(errors)))
        for place in range(len(errors))
    ]


def slow_baseline(name, rollout, row, drop_equal):
    """(baseline, scale), or None where the response takes no part."""
    dense = torch.zeros(rollout.mask.shape) if rollout.dense is None else rollout.dense
    total = [
        float(rollout.score[i]) + sum(float(dense[i, t]) for t in range(dense.shape[1]) if rollout.mask[i, t])
        for i in range(len(dense))
    ]
    if math.isnan(total[row]):
        return None
    if name in ("gae", "reinforce"):
        return 0.0, 1.0
    own = int(rollout.group[row])
    others = [total[i] for i in range(len(total)) if int(rollout.group[i]) == own and i != row]
    others = [x for x in others if not math.isnan(x)]
    if not others or (drop_equal and all(abs(x - total[row]) < 1e-9 for x in others)):
        return None
    everyone = [*others, total[row]]
    mean = sum(everyone) / len(everyone)
    if name == "rloo":
        return sum(others) / len(others), 1.0
    if name == "group_norm":
        return mean, math.sqrt(sum((x - mean) ** 2 for x in everyone) / (len(everyone) - 1)) + 1e-9
    return mean, 1.0


def slow_advantages(name, rollout, settings):
    """Advantages, returns and loss mask, one number at a time."""
    shape = rollout.mask.shape
    advantages, returns = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    values = rollout.values.tolist() if name == "gae" else [[0.0] * shape[1]] * shape[0]
    gae_lambda = settings.gae_lambda if name == "gae" else 1.0
    for row in range(shape[0]):
        baseline = slow_baseline(name, rollout, row, settings.drop_equal)
        if baseline is None:
            continue
        rewards = slow_rewards(rollout, row, *baseline)
        for (column, _), value in zip(rewards, slow_gae(rewards, values[row], settings.gamma, gae_lambda), strict=True):
            advantages[row, column] = value
            returns[row, column] = value + values[row][column]
            loss_mask[row, column] = True
    if name in ("gae", "reinforce", "reinforce_baseline"):
        counted = advantages[loss_mask].tolist()
        mean = sum(counted) / len(counted)
        std = math.sqrt(sum((x - mean) ** 2 for x in counted) / len(counted)) if settings.scale else 1.0
        advantages[loss_mask] = torch.tensor([(x - mean) / std for x in counted], dtype=torch.float64)
    return advantages, returns, loss_mask


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("variant", ["all", "no_dense", "no_gaps", "all_scored", "no_scale", "keep_equal"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_against_a_loop(name, variant, seed):
    rollout = make_rollout(
        seed, unscored=variant != "all_scored", dense=variant != "no_dense", gaps=variant != "no_gaps"
    )
    gamma, gae_lambda = {"gae": (0.9, 0.8), "reinforce": (0.9, 1.0)}.get(name, (1.0, 1.0))
    settings = AdvantageSettings(gamma, gae_lambda, variant != "no_scale", drop_equal=variant != "keep_equal")
    got = ESTIMATORS[name](rollout, settings)
    advantages, returns, loss_mask = slow_advantages(name, rollout, settings)
    assert torch.equal(got.loss_mask, loss_mask)
    assert 0 < loss_mask.sum() < rollout.mask.sum() or (variant == "all_scored" and name in ("gae", "reinforce"))
    assert torch.allclose(got.advantages, advantages, atol=1e-9, rtol=0)
    assert torch.allclose(got.returns, returns, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_positions_never_matter(name):
    rollout = make_rollout(0)
    clean = ESTIMATORS[name](rollout, AdvantageSettings())
    broken = {
        field: getattr(rollout, field).masked_fill(~rollout.mask, fill)
        for field, fill in (("kl", NAN), ("dense", NAN), ("values", math.inf))
    }
    dirty = ESTIMATORS[name](replace(rollout, **broken), AdvantageSettings())
    assert torch.equal(clean.advantages, dirty.advantages) and torch.equal(clean.returns, dirty.returns)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_of_responses_and_padding_never_matter(name):
    rollout = make_rollout(1)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))

    def moved(tensor):
        tensor = tensor[order]
        return tensor if tensor.dim() == 1 else torch.nn.functional.pad(tensor, (2, 3))

    fields = ("score", "group", "mask", "kl", "dense", "values")
    other = replace(rollout, **{field: moved(getattr(rollout, field)) for field in fields})
    expected = ESTIMATORS[name](rollout, AdvantageSettings()).advantages
    assert torch.allclose(ESTIMATORS[name](other, AdvantageSettings()).advantages, moved(expected), atol=1e-12, rtol=0)


def one_token(score, group, **more):
    """Responses of one token without KL."""
    score = torch.tensor(score)
    shape = (len(score), 1)
    return RolloutRewards(score, torch.tensor(group), torch.ones(shape, dtype=torch.bool), torch.zeros(shape), **more)


def test_group_estimators_by_hand():
    """Scores 1, 2, 6 of a prompt: mean 3, sample deviation sqrt((4 + 1 + 9) / 2) = 2.645751."""
    rollout, settings = one_token([1.0, 2.0, 6.0], [0, 0, 0]), AdvantageSettings()
    assert ESTIMATORS["rloo"](rollout, settings).advantages.flatten().tolist() == [-3.0, -1.5, 4.5]
    assert ESTIMATORS["dr_grpo"](rollout, settings).advantages.flatten().tolist() == [-2.0, -1.0, 3.0]
    expected = torch.tensor([-2.0, -1.0, 3.0])
    assert torch.allclose(ESTIMATORS["group_norm"](rollout, settings).advantages.flatten(), expected / 2.645751)
    # population deviation of -2, -1, 3: sqrt(14 / 3) = 2.160247
    whitened = ESTIMATORS["reinforce_baseline"](rollout, settings).advantages.flatten()
    assert torch.allclose(whitened, expected / 2.160247)


def test_dense_rewards_are_part_of_what_a_group_compares():
    """Steps of an agent scored as dense rewards, no end score: totals 1 and 3, rloo baselines 3 and 1."""
    dense = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    rollout = RolloutRewards(torch.zeros(2), torch.zeros(2).long(), mask, torch.zeros(2, 2), dense=dense)
    got = ESTIMATORS["rloo"](rollout, AdvantageSettings())
    assert got.advantages.tolist() == [[-2.0, -3.0], [2.0, 1.0]]
    assert got.loss_mask.all()


def test_gae_of_lambda_1_is_rewards_to_come_less_the_value_and_of_lambda_0_one_step():
    rollout = make_rollout(2)
    rewards = shape_rewards(rollout.score.nan_to_num(0.0), rollout.kl, rollout.mask, 0.0)
    to_come, _ = gae(rewards, torch.zeros_like(rewards), rollout.mask)
    advantages, returns = gae(rewards, rollout.values, rollout.mask)
    assert torch.allclose(returns, to_come)
    assert torch.allclose(advantages, (to_come - rollout.values).masked_fill(~rollout.mask, 0.0))
    row = torch.tensor([[1.0, 2.0, 4.0]])  # V; rewards 0, 0, 10: errors 2 - 1, 4 - 2, 10 - 4
    ones = torch.ones(1, 3, dtype=torch.bool)
    one_step, _ = gae(torch.tensor([[0.0, 0.0, 10.0]]), row, ones, gae_lambda=0.0)
    assert one_step.tolist() == [[1.0, 2.0, 6.0]]


def test_environment_tokens_take_no_time():
    """A response interrupted by two tokens of an environment has the advantages of the uninterrupted one."""
    rewards, values = torch.tensor([[0.5, 0.0, 2.0]]), torch.tensor([[1.0, -1.0, 3.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    columns = torch.tensor([0, 3, 4])

    def interrupted(tensor, fill):
        wide = torch.full((1, 6), fill, dtype=tensor.dtype)
        wide[:, columns] = tensor
        return wide

    plain, _ = gae(rewards, values, mask, 0.9, 0.7)
    wide, _ = gae(interrupted(rewards, NAN), interrupted(values, NAN), interrupted(mask, False), 0.9, 0.7)
    assert torch.equal(wide[:, columns], plain)
    assert torch.equal(wide[:, [1, 2, 5]], torch.zeros(1, 3))


def test_whiten_by_hand():
    # 1, 2, 6 with a masked NaN: mean 3, population deviation sqrt(14 / 3)
    values, mask = torch.tensor([1.0, NAN, 2.0, 6.0]), torch.tensor([True, False, True, True])
    assert torch.allclose(whiten(values, mask), torch.tensor([-2.0, 0.0, -1.0, 3.0]) / 2.160247)
    assert whiten(values, mask, scale=False).tolist() == [-2.0, 0.0, -1.0, 3.0]
    assert whiten(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)).abs().max() < 1e-3  # rounding stays small
    assert whiten(values, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4


# Bug case B17: huggingface/trl#3015, #3750; OpenRLHF/OpenRLHF#1335


def test_score_lands_on_the_last_token_of_the_policy():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    rewards = shape_rewards(torch.tensor([2.0, -1.0]), torch.full((2, 4), 0.1), mask, 0.5)
    assert torch.allclose(rewards, torch.tensor([[-0.05, -0.05, 1.95, 0.0], [-0.05, -0.05, -0.05, -1.05]]), atol=1e-6)


def test_no_coefficient_never_meets_an_infinite_kl():
    kl = torch.tensor([[0.1, math.inf]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert shape_rewards(torch.ones(1), kl, mask, 0.0).tolist() == [[0.0, 1.0]]
    with pytest.raises(ValueError, match=r"KL divergence of responses \[0\] is not finite"):
        shape_rewards(torch.ones(1), kl, mask, 0.5)
    kl[0, 1] = NAN
    mask[0, 1] = False
    assert shape_rewards(torch.ones(1), kl, mask, 1.0).tolist() == [[pytest.approx(0.9), 0.0]]


def test_shape_rewards_refuses():
    mask = torch.tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match=r"rows \[1\] of the mask hold no token"):
        shape_rewards(torch.ones(2), torch.zeros(2, 2), mask, 0.0)
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"score of responses \[1\] is not finite"):
        shape_rewards(torch.tensor([1.0, NAN]), torch.zeros(2, 2), mask, 0.0)
    with pytest.raises(ValueError, match=r"dense reward of responses \[0\] is not finite"):
        shape_rewards(torch.ones(2), torch.zeros(2, 2), mask, 0.0, torch.tensor([[NAN, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="coefficient must be 0 or more, got -0.1"):
        shape_rewards(torch.ones(2), torch.zeros(2, 2), mask, -0.1)
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        shape_rewards(torch.ones(3), torch.zeros(2, 2), mask, 0.1)


# Bug case B11: huggingface/trl#3079, #2737; a reward of None is NaN here


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_unscored_response_is_left_out(name):
    rollout = one_token([1.0, NAN, 3.0], [0, 0, 0], values=torch.zeros(3, 1))
    figures = group_figures(rollout.score, rollout.group)
    assert figures.mean.tolist() == [2.0] * 3 and figures.scored.tolist() == [2] * 3
    assert int((~rollout.scored).sum()) == 1
    got = ESTIMATORS[name](rollout, AdvantageSettings())
    assert got.advantages.isfinite().all() and got.returns.isfinite().all()
    assert got.loss_mask.flatten().tolist() == [True, False, True]
    without = one_token([1.0, 3.0], [0, 0], values=torch.zeros(2, 1))
    expected = ESTIMATORS[name](without, AdvantageSettings()).advantages
    assert torch.equal(got.advantages[[0, 2]], expected)
    assert got.advantages[1].item() == 0.0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_scored_trains_nothing(name):
    rollout = one_token([NAN, NAN], [0, 0], values=torch.ones(2, 1))
    got = ESTIMATORS[name](rollout, AdvantageSettings())
    assert not got.loss_mask.any()
    assert got.advantages.tolist() == [[0.0], [0.0]] == got.returns.tolist()


def test_infinite_scores_are_refused():
    with pytest.raises(ValueError, match=r"responses \[1\] are infinite"):
        one_token([1.0, math.inf, 2.0], [0, 0, 0])
    with pytest.raises(ValueError, match=r"responses \[0\] are infinite"):
        clip_rewards(torch.tensor([-math.inf]), -1.0, 1.0)


# Groups


@pytest.mark.parametrize("name", GROUPED)
def test_equal_groups_leave_the_loss_unless_kept(name):
    """Seven equal scores of 0.1 in float32 have a deviation of 8e-9 in torch, and advantages of 0.8 with it."""
    rollout = one_token([0.1] * 7 + [1.0, 2.0], [0] * 7 + [1, 1])
    got = ESTIMATORS[name](rollout, AdvantageSettings())
    assert got.loss_mask.flatten().tolist() == [False] * 7 + [True] * 2
    stays = ESTIMATORS[name](rollout, AdvantageSettings(drop_equal=False))
    assert stays.loss_mask.all()
    if name != "reinforce_baseline":  # which whitens
        assert stays.advantages[:7].abs().max() < 1e-6
    nearly = one_token([0.1, 0.1 + 1e-8, 1.0, 2.0], [0, 0, 1, 1])
    assert ESTIMATORS[name](nearly, AdvantageSettings()).loss_mask.flatten().tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_is_refused(name):
    with pytest.raises(ValueError, match=r"responses \[2\] are the only ones"):
        ESTIMATORS[name](one_token([1.0, 2.0, 3.0], [0, 0, 1]), AdvantageSettings())
    with pytest.raises(ValueError, match="no discount, got gamma=0.9"):
        ESTIMATORS[name](one_token([1.0, 2.0], [0, 0]), AdvantageSettings(gamma=0.9))


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="needs the values of a critic"):
        ESTIMATORS["gae"](one_token([1.0, 2.0], [0, 0]), AdvantageSettings())


def test_shapes_of_a_rollout_are_checked():
    with pytest.raises(ValueError, match="expected score and group"):
        RolloutRewards(torch.ones(2), torch.zeros(3), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="expected values of the mask's shape"):
        one_token([1.0, 2.0], [0, 0], values=torch.zeros(2, 2))


def test_group_figures_against_a_loop():
    generator = torch.Generator().manual_seed(5)
    group = torch.randint(0, 6, (40,), generator=generator) * 3
    scores = torch.randn(40, generator=generator)
    scores[::7] = NAN
    figures = group_figures(scores, group)
    for row in range(40):
        members = [scores[i].item() for i in range(40) if group[i] == group[row]]
        known = [x for x in members if not math.isnan(x)]
        mean = sum(known) / len(known)
        assert figures.size[row] == len(members) and figures.scored[row] == len(known) > 1
        assert figures.mean[row].item() == pytest.approx(mean)
        assert figures.total[row].item() == pytest.approx(sum(known))
        assert figures.std[row].item() == pytest.approx(
            math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
        )
        assert not figures.equal[row]
    assert group_figures(torch.tensor([NAN, 1.0]), torch.tensor([0, 1])).equal.all()


def test_keep_groups():
    """Dropped: all wrong, all right, constant inside of the range, a single score, none."""
    cases = [
        ([0.0, 1.0], True),
        ([0.0, 1.0, NAN], True),
        ([0.0, 0.0], False),
        ([1.0, 1.0], False),
        ([1.0, 1.0, NAN], False),
        ([0.5, 0.5], False),
        ([0.5, NAN], False),
        ([NAN, NAN], False),
    ]
    scores = torch.tensor([score for scores, _ in cases for score in scores])
    group = torch.tensor([place for place, (scores, _) in enumerate(cases) for _ in scores])
    expected = [kept for scores, kept in cases for _ in scores]
    assert keep_groups(scores, group).tolist() == expected
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    assert keep_groups(scores[order], group[order]).tolist() == torch.tensor(expected)[order].tolist()
    mean_half = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    assert not keep_groups(*mean_half, 0.5, 1.0).any() and not keep_groups(*mean_half, 0.0, 0.5).any()  # strictly
    assert keep_groups(*mean_half, 0.49, 0.51).all()
    with pytest.raises(ValueError, match="lower one first, got 1.0 and 0.0"):
        keep_groups(*mean_half, 1.0, 0.0)


# Whole-response scores


def test_clip_rewards():
    scores = torch.tensor([-20.0, 0.5, NAN, 11.0])
    assert torch.equal(clip_rewards(scores, -10.0, 10.0)[[0, 1, 3]], torch.tensor([-10.0, 0.5, 10.0]))
    assert clip_rewards(scores, -10.0, 10.0)[2].isnan()
    with pytest.raises(ValueError, match="reward_clip_range"):
        clip_rewards(scores, 1.0, 1.0)


def test_overlong_penalty_by_hand():
    """Limit 100, buffer 20: nothing up to 80, then 1/20 a token, 1 at 100 and beyond."""
    lengths = torch.tensor([1, 80, 81, 90, 100, 130])
    assert torch.allclose(overlong_penalty(lengths, 100, 20), torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0]))
    assert torch.allclose(overlong_penalty(lengths, 100, 20, 0.4), torch.tensor([0.0, 0.0, -0.02, -0.2, -0.4, -0.4]))
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=f"1 to 100 tokens .* got {buffer}"):
            overlong_penalty(lengths, 100, buffer)


def test_penalise_truncated_by_hand():
    score, truncated = torch.tensor([2.0, 2.0, NAN, -1.0]), torch.tensor([False, True, True, True])
    assert penalise_truncated(score, truncated, 0.25)[[0, 1, 3]].tolist() == [2.0, 0.5, -0.25]
    assert penalise_truncated(score, truncated, -0.5)[[0, 1, 3]].tolist() == [2.0, -0.5, -0.5]
    assert all(penalise_truncated(score, truncated, coef)[2].isnan() for coef in (0.0, 0.25, -0.5))
    with pytest.raises(ValueError, match="got 1.5"):
        penalise_truncated(score, truncated, 1.5)
