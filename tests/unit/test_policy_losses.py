"""Losses of policy and critic: by hand, against slow loops, finite differences, masked NaN, split batches."""

import math

import pytest
import torch

from openrlhf.models.policy_losses import (
    count_units,
    entropy_loss,
    explained_variance,
    kl_loss,
    ppo_policy_loss,
    ppo_value_loss,
    reduce_tokens,
)

REDUCTIONS = [("token", None), ("sequence", None), ("constant", 6.0)]
POLICY_SETTINGS = [
    {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": dual_clip, "reduction": reduction, "normaliser": normaliser}
    for dual_clip in (None, 1.5)
    for reduction, normaliser in REDUCTIONS
] + [{"ratio": "sequence", "reduction": "sequence", "dual_clip": 1.5}]


def draw(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 6, dtype=torch.float64, generator=generator)


# Gaps, different lengths, and a row without a token.
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()


def slow_reduce(values, reduction, normaliser):
    """values: one list of tokens per response that has any."""
    if reduction == "token":
        return sum(map(sum, values)) / sum(map(len, values))
    if reduction == "sequence":
        return sum(sum(row) / len(row) for row in values) / len(values)
    return sum(map(sum, values)) / (len(values) * normaliser)


def slow_policy_loss(logprobs, old, advantages, eps_low=0.2, eps_high=0.2, dual_clip=None, reduction="token",
                     normaliser=None, ratio="token"):  # fmt: skip
    """The formulas of docs/rl.md one token at a time; loss and number of clipped and floored tokens."""
    losses, clipped, floored = [], 0, 0
    for row in range(len(MASK)):
        columns = [t for t in range(MASK.shape[1]) if MASK[row, t]]
        log_ratios = [float(logprobs[row, t] - old[row, t]) for t in columns]
        if ratio == "sequence" and columns:
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        tokens = []
        for column, log_ratio in zip(columns, log_ratios, strict=True):
            r, a = math.exp(log_ratio), float(advantages[row, column])
            plain, cut = r * a, min(max(r, 1 - eps_low), 1 + eps_high) * a
            objective = min(plain, cut)
            clipped += cut < plain
            if dual_clip is not None and a < 0 and objective < dual_clip * a:
                objective = dual_clip * a
                floored += 1
            tokens.append(-objective)
        if tokens:
            losses.append(tokens)
    return slow_reduce(losses, reduction, normaliser), clipped, floored


@pytest.mark.parametrize("settings", POLICY_SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_against_a_loop(settings, seed):
    logprobs, old, advantages = draw(seed, 0.5), draw(seed + 10, 0.5), draw(seed + 20)
    got = ppo_policy_loss(logprobs, old, advantages, MASK, **settings)
    loss, clipped, floored = slow_policy_loss(logprobs, old, advantages, **settings)
    assert got.loss.item() == pytest.approx(loss, abs=1e-12)
    assert (got.metrics["clipped"], got.metrics["dual_clipped"]) == (clipped, floored)
    assert got.metrics["tokens"] == 9


@pytest.mark.parametrize("settings", POLICY_SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_policy_gradient_against_finite_differences(settings, seed):
    logprobs, old, advantages = draw(seed, 0.5).requires_grad_(), draw(seed + 10, 0.5), draw(seed + 20)
    assert torch.autograd.gradcheck(
        lambda x: ppo_policy_loss(x, old, advantages, MASK, **settings).loss, (logprobs,), eps=1e-7, atol=1e-6
    )


def test_clipping_by_hand():
    """Ratio 1.5: a good token stops at 1.2 (no gradient), a bad one does not; ratio 0.5 the other way round."""
    logprobs = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    got = ppo_policy_loss(logprobs, torch.zeros(1, 4), advantages, mask)
    got.loss.backward()
    assert got.loss.item() == pytest.approx(-(1.2 * 2 - 1.5 * 2 + 0.5 * 2 - 0.8 * 2) / 4)
    assert torch.allclose(logprobs.grad, torch.tensor([[0.0, 1.5 * 2, -0.5 * 2, 0.0]], dtype=torch.float64) / 4)
    assert got.metrics["clipped"] == 2 and got.metrics["ratio"].item() == pytest.approx(4.0)
    # (r - 1) - log r: 0.5 - 0.405465 and -0.5 + 0.693147, twice each
    assert got.metrics["approx_kl"].item() == pytest.approx(2 * (0.094535 + 0.193147), abs=1e-5)


def test_dual_clip_by_hand():
    """A bad token with ratio 5: loss 5 |A| without, 3 |A| and no gradient with a dual clip of 3."""
    logprobs = torch.full((1, 1), math.log(5.0), requires_grad=True)
    arguments = (logprobs, torch.zeros(1, 1), torch.full((1, 1), -2.0), torch.ones(1, 1, dtype=torch.bool))
    assert ppo_policy_loss(*arguments).loss.item() == pytest.approx(10.0, abs=1e-5)
    got = ppo_policy_loss(*arguments, dual_clip=3.0)
    got.loss.backward()
    assert got.loss.item() == pytest.approx(6.0) and got.metrics["dual_clipped"] == 1
    assert logprobs.grad.item() == 0.0


def test_at_the_old_policy_the_gradient_is_that_of_reinforce():
    logprobs, advantages = draw(0, 0.5).requires_grad_(), draw(1)
    ppo_policy_loss(logprobs, logprobs.detach(), advantages, MASK).loss.backward()
    assert torch.allclose(logprobs.grad, -advantages.masked_fill(~MASK, 0.0) / 9)


def test_a_far_ratio_is_finite():
    logprobs = torch.tensor([[-1.0, -200.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    got = ppo_policy_loss(logprobs, torch.tensor([[-200.0, -1.0]]), torch.tensor([[-1.0, 1.0]]), mask)
    got.loss.backward()
    assert got.loss.isfinite() and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in got.metrics.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("reduction", "normaliser"), REDUCTIONS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss_against_a_loop_and_finite_differences(clip, reduction, normaliser, seed):
    values, old, returns = draw(seed).requires_grad_(), draw(seed + 10), draw(seed + 20)
    losses, clipped, squared = [], 0, 0.0
    for row in range(len(MASK)):
        tokens = []
        for t in range(MASK.shape[1]):
            if MASK[row, t]:
                v, o, r = (float(x[row, t].detach()) for x in (values, old, returns))
                error = (v - r) ** 2
                near = error if clip is None else (min(max(v, o - clip), o + clip) - r) ** 2
                tokens.append(max(error, near) / 2)
                clipped += near > error
                squared += error
        if tokens:
            losses.append(tokens)
    arguments = (old, returns, MASK, clip, reduction, normaliser)
    got = ppo_value_loss(values, *arguments)
    assert got.loss.item() == pytest.approx(slow_reduce(losses, reduction, normaliser), abs=1e-12)
    assert got.metrics["value_clipped"] == clipped
    assert got.metrics["squared_error"].item() == pytest.approx(squared, rel=1e-5)
    assert torch.autograd.gradcheck(lambda x: ppo_value_loss(x, *arguments).loss, (values,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(("reduction", "normaliser"), REDUCTIONS)
def test_kl_and_entropy_losses(reduction, normaliser):
    logprobs, reference = draw(0).requires_grad_(), draw(1)
    for kind, of in (
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
    ):
        rows = [
            [of(float((logprobs[row, t] - reference[row, t]).detach())) for t in range(6) if MASK[row, t]]
            for row in range(3)
        ]
        got = kl_loss(logprobs, reference, MASK, kind, reduction, normaliser)
        assert got.loss.item() == pytest.approx(slow_reduce(rows, reduction, normaliser), abs=1e-12)
        assert got.metrics["kl"].item() == pytest.approx(sum(map(sum, rows)), rel=1e-5)
        check = (reference, MASK, kind, reduction, normaliser)
        assert torch.autograd.gradcheck(lambda x, check=check: kl_loss(x, *check).loss, (logprobs,))
    rows = [[float(logprobs[row, t].detach()) for t in range(6) if MASK[row, t]] for row in range(3)]
    got = entropy_loss(logprobs, MASK, reduction, normaliser)
    assert got.loss.item() == pytest.approx(-slow_reduce(rows, reduction, normaliser), abs=1e-12)
    assert got.metrics["entropy"].item() == pytest.approx(sum(map(sum, rows)), rel=1e-5)


def test_explained_variance_by_hand():
    """Returns 1, 3, 5 (variance 8/3); errors 0, 1, 0 (variance 2/9): 1 - 1/12."""
    returns, values = torch.tensor([[1.0, 3.0, 5.0, 9.0]]), torch.tensor([[1.0, 2.0, 5.0, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(1 - 1 / 12)
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask).item() == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(values, torch.ones(1, 4), mask).isnan()


def all_losses(first, second, third, mask):
    """Every loss with its differentiable argument first."""
    yield from (ppo_policy_loss(first, second, third, mask, **settings) for settings in POLICY_SETTINGS)
    for reduction, normaliser in REDUCTIONS:
        yield ppo_value_loss(first, second, third, mask, 0.5, reduction, normaliser)
        yield entropy_loss(first, mask, reduction, normaliser)
        yield from (kl_loss(first, second, mask, kind, reduction, normaliser) for kind in ("k1", "k2", "k3"))


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_masked_positions_never_matter(fill):
    tensors = [draw(0), draw(1), draw(2)]
    clean = tensors[0].clone().requires_grad_()
    dirty = tensors[0].masked_fill(~MASK, fill).requires_grad_()
    others = [tensor.masked_fill(~MASK, fill) for tensor in tensors[1:]]
    pairs = zip(all_losses(clean, *tensors[1:], MASK), all_losses(dirty, *others, MASK), strict=True)
    for one, other in pairs:
        assert torch.equal(one.loss, other.loss)
        gradients = torch.autograd.grad(one.loss, clean)[0], torch.autograd.grad(other.loss, dirty)[0]
        assert torch.equal(*gradients)
        assert gradients[0].abs().sum() > 0
        assert all(torch.equal(one.metrics[name], other.metrics[name]) for name in one.metrics)


def test_no_token_at_all_is_a_loss_of_zero():
    values = torch.full((4, 6), math.nan, requires_grad=True)
    for output in all_losses(values, values.detach(), values.detach(), torch.zeros_like(MASK)):
        assert output.loss.item() == 0.0
        assert torch.equal(torch.autograd.grad(output.loss, values)[0], torch.zeros(4, 6))


@pytest.mark.parametrize(("reduction", "normaliser"), REDUCTIONS)
def test_micro_batches_weighed_by_their_units_give_the_whole(reduction, normaliser):
    """Rows 0, then 1 to 3, the last without a token: losses, gradients and metrics add up."""
    tensors = draw(0, 0.5).requires_grad_(), draw(1, 0.5), draw(2)
    settings = {"reduction": reduction, "normaliser": normaliser}
    whole = ppo_policy_loss(*tensors, MASK, **settings)
    units = count_units(MASK, reduction)
    assert units == (9 if reduction == "token" else 3)
    loss, metrics = 0.0, dict.fromkeys(whole.metrics, 0.0)
    for rows in (slice(0, 1), slice(1, 4)):
        part = ppo_policy_loss(*(tensor[rows] for tensor in tensors), MASK[rows], **settings)
        loss = loss + part.loss * count_units(MASK[rows], reduction) / units
        metrics = {name: metrics[name] + value.item() for name, value in part.metrics.items()}
    assert loss.item() == pytest.approx(whole.loss.item(), abs=1e-12)
    gradients = [torch.autograd.grad(x, tensors[0])[0] for x in (loss, whole.loss)]
    assert torch.allclose(*gradients)
    assert metrics == pytest.approx({name: value.item() for name, value in whole.metrics.items()}, rel=1e-5)


def test_the_constant_reduction_has_no_length_bias():
    """Two responses of advantage 1, one of 1 and one of 5 tokens: every token has the same gradient."""
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()

    def per_token(reduction, normaliser=None):
        logprobs = torch.zeros(2, 5, requires_grad=True)
        ones = torch.ones(2, 5)
        ppo_policy_loss(
            logprobs, torch.zeros(2, 5), ones, mask, reduction=reduction, normaliser=normaliser
        ).loss.backward()
        return -logprobs.grad[0, 0].item(), -logprobs.grad[1, 0].item()

    assert per_token("sequence") == pytest.approx((1 / 2, 1 / 10))
    assert per_token("token") == pytest.approx((1 / 6, 1 / 6))
    assert per_token("constant", 5.0) == pytest.approx((1 / 10, 1 / 10))


def test_low_precision_is_reduced_in_float32():
    """300 tokens of 1 + 2^-7 in bfloat16: their mean has digits that a bfloat16 sum would lose."""
    values = torch.full((1, 300), 1.0078125, dtype=torch.bfloat16)
    mask = torch.ones(1, 300, dtype=torch.bool)
    output = entropy_loss(values, mask)
    assert output.loss.dtype == torch.float32 and output.loss.item() == pytest.approx(-1.0078125, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduction": "mean"}, "one of token, sequence, constant, got 'mean'"),
        ({"reduction": "constant"}, "needs a normaliser above 0"),
        ({"reduction": "constant", "normaliser": 0.0}, "needs a normaliser above 0"),
        ({"normaliser": 10.0}, "no effect on reduction 'token'"),
        ({"ratio": "gspo"}, "one of token, sequence, got 'gspo'"),
        ({"ratio": "sequence"}, "needs reduction 'sequence', got 'token'"),
        ({"dual_clip": 1.0}, "above 1 .* got 1.0"),
        ({"eps_low": 0.0}, "eps_low must lie in"),
        ({"eps_high": -0.1}, "eps_high above 0"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        ppo_policy_loss(draw(0), draw(1), draw(2), MASK, **settings)


def test_shapes_and_masks_are_checked():
    with pytest.raises(ValueError, match="expected advantages and a bool mask"):
        ppo_policy_loss(draw(0), draw(1), torch.zeros(4), MASK)
    with pytest.raises(ValueError, match="log-probabilities and a bool mask of one shape"):
        ppo_policy_loss(draw(0)[:, :5], draw(1), draw(2), MASK)
    with pytest.raises(ValueError, match="bool mask"):
        ppo_value_loss(draw(0), draw(1), draw(2), MASK.long())
    with pytest.raises(ValueError, match="value clip must be above 0"):
        ppo_value_loss(draw(0), draw(1), draw(2), MASK, clip=0.0)
    with pytest.raises(ValueError, match="one of token"):
        reduce_tokens(draw(0), MASK, "none")
