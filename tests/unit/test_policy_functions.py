"""Log-probabilities, entropy and KL estimates of tokens: by hand, in slices, with masked NaN, in expectation."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openrlhf.models.functional import approx_kl, entropy_from_logits, logprobs_from_logits, masked_mean


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def case(dtype=torch.float64):
    """Logits (3, 5, 7), ids and a mask with gaps."""
    ids = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1, 0, 0, 0]]).bool()
    return draw(3, 5, 7, dtype=dtype) * 3, ids, mask


def slow(logits, ids, mask, temperature):
    """Log-probability and entropy at every counted token, one softmax at a time."""
    logprobs, entropies = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        for column in range(1, mask.shape[1]):
            if mask[row, column]:
                weights = [math.exp(x / temperature) for x in logits[row, column - 1].tolist()]
                shares = [weight / sum(weights) for weight in weights]
                logprobs[row, column] = math.log(shares[ids[row, column]])
                entropies[row, column] = -sum(share * math.log(share) for share in shares)
    return logprobs, entropies


@pytest.mark.parametrize("chunk_floats", [1, 15, 10_000])  # one token, two tokens, everything at once
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_against_a_loop(temperature, chunk_floats):
    logits, ids, mask = case()
    logprobs, entropies = slow(logits, ids, mask, temperature)
    got = logprobs_from_logits(logits, ids, mask, temperature, chunk_floats)
    assert torch.allclose(got, logprobs, atol=1e-12, rtol=0)
    assert torch.allclose(entropy_from_logits(logits, mask, temperature, chunk_floats), entropies, atol=1e-12, rtol=0)
    everything = logprobs_from_logits(logits, ids, temperature=temperature)
    assert torch.allclose(everything[mask], logprobs[mask]) and (everything[:, 0] == 0).all()


@pytest.mark.parametrize("chunk_floats", [15, 10_000])
def test_gradients_of_logprobs_and_entropy_against_finite_differences(chunk_floats):
    logits, ids, mask = case()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logprobs_from_logits(x, ids, mask, 0.7, chunk_floats), (logits,))
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, mask, 0.7, chunk_floats), (logits,))


@pytest.mark.parametrize("function", ["logprobs", "entropy"])
def test_masked_logits_never_matter(function):
    def compute(logits):
        leaf = logits.clone().requires_grad_()
        if function == "logprobs":
            values = logprobs_from_logits(leaf, ids, mask)
        else:
            values = entropy_from_logits(leaf, mask)
        values.square().sum().backward()
        return values, leaf.grad

    logits, ids, mask = case()
    broken = logits.clone()
    broken[:, :-1][~mask[:, 1:]] = torch.nan  # the logits at t are those of token t + 1
    broken[:, -1] = torch.inf
    for clean, dirty in zip(compute(logits), compute(broken), strict=True):
        assert torch.equal(clean, dirty)


def test_what_the_last_logits_predict_never_matters():
    """They belong to a token behind the end; here without a mask, which would say so."""
    logits, ids, _ = case()
    logits[:, -1] = torch.nan
    logits.requires_grad_()
    (logprobs_from_logits(logits, ids).sum() + entropy_from_logits(logits).sum()).backward()
    assert (logits.grad[:, -1] == 0).all() and logits.grad.isfinite().all()


def test_bfloat16_logits_are_reduced_in_float32():
    # 1000 equal logits: log-probability -ln 1000 = -6.907755, which bfloat16 would round to -6.90625
    logits = torch.zeros(1, 2, 1000, dtype=torch.bfloat16)
    logprobs = logprobs_from_logits(logits, torch.zeros(1, 2, dtype=torch.int64))
    assert logprobs.dtype == torch.float32
    assert logprobs[0, 1].item() == pytest.approx(-6.907755, abs=1e-5)
    assert entropy_from_logits(logits)[0, 1].item() == pytest.approx(6.907755, abs=1e-5)


def test_a_token_that_cannot_be_drawn_adds_no_entropy_and_no_nan():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy[0, 1].item() == pytest.approx(math.log(2), abs=1e-6)
    assert logits.grad.isfinite().all()


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("function", ["logprobs", "entropy"])
def test_no_float32_copy_of_all_logits_is_made(function):
    logits = torch.randn(4, 32, 100).bfloat16().requires_grad_()  # 12,800 numbers in slices of 8 tokens of 100
    ids = torch.zeros(4, 32, dtype=torch.int64)
    kept_for_backward = []

    def keep(tensor):
        kept_for_backward.append(tensor.numel() if tensor.dtype == torch.float32 else 0)
        return tensor

    with LargestFloat32() as seen:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if function == "logprobs":
                values = logprobs_from_logits(logits, ids, chunk_floats=800)
            else:
                values = entropy_from_logits(logits, chunk_floats=800)
        values.sum().backward()
    assert 0 < seen.elements <= 800
    assert sum(kept_for_backward) <= 4 * 32  # per token, never per token and vocabulary entry
    assert logits.grad.dtype == torch.bfloat16


def test_bad_arguments_of_logprobs():
    logits, ids, mask = case()
    with pytest.raises(ValueError, match="temperature above 0, got 0"):
        logprobs_from_logits(logits, ids, mask, temperature=0)
    with pytest.raises(ValueError, match=r"shape \(3, 5\), got \(3, 4\)"):
        logprobs_from_logits(logits, ids[:, 1:], mask)
    with pytest.raises(ValueError, match=r"bool mask \(3, 5\), got torch.int64"):
        entropy_from_logits(logits, mask.long())


# Bug case B17: huggingface/trl#235, #925; OpenRLHF/OpenRLHF#525


def test_kl_estimates_by_hand():
    """d = 0.5, -1, 0: k1 mean -1/6; k2 (0.125 + 0.5) / 3; k3 (e^-0.5 - 0.5 + e - 2 + 0) / 3."""
    policy, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    k1, k2, k3 = (approx_kl(policy, reference, kind) for kind in ("k1", "k2", "k3"))
    assert k1.mean().item() == pytest.approx(-0.166667, abs=1e-6)
    assert k2.mean().item() == pytest.approx(0.208333, abs=1e-6)
    assert k3.mean().item() == pytest.approx(0.274937, abs=1e-6)
    assert (k3 >= 0).all()


def test_k3_of_a_far_token_is_finite():
    assert torch.tensor(100.0).exp().isinf()
    policy = torch.tensor([-100.0], requires_grad=True)
    value = approx_kl(policy, torch.zeros(1), "k3")
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(20) - 21, rel=1e-6)  # cut at 20 nats
    assert policy.grad.isfinite().all()


def test_k3_keeps_its_digits_near_zero():
    # d = 1e-3: d^2 / 2 - d^3 / 6 = 4.998334e-7; exp(-d) - 1 + d in float32 has no correct digit there
    value = approx_kl(torch.tensor([1e-3]), torch.zeros(1), "k3").item()
    assert value == pytest.approx(4.998334e-7, rel=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_masked_positions_have_no_kl(kind):
    mask = torch.tensor([[True, False, True, False]])
    policy = torch.tensor([[-1.0, torch.nan, -2.0, -torch.inf]], requires_grad=True)
    reference = torch.tensor([[-1.5, 0.0, -1.0, -torch.inf]])
    value = approx_kl(policy, reference, kind, mask)
    masked_mean(value, mask).backward()
    assert torch.equal(value[~mask], torch.zeros(2))
    assert torch.equal(policy.grad[~mask], torch.zeros(2)) and policy.grad[mask].isfinite().all()


def test_an_unknown_kl_estimate_is_no_other_one():
    with pytest.raises(ValueError, match="one of k1, k2, k3, got 'k4'"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="one shape"):
        approx_kl(torch.zeros(2), torch.zeros(1))


def expected_kl(logits, reference, kind):
    """The estimate averaged over all tokens with the policy's probabilities, the draw without a gradient."""
    logprobs = logits.log_softmax(0)
    return (logprobs.exp().detach() * approx_kl(logprobs, reference, kind)).sum()


def test_k1_and_k3_are_unbiased():
    logits, reference = draw(6, seed=3), draw(6, seed=4).log_softmax(0)
    true = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    assert torch.allclose(expected_kl(logits, reference, "k1"), true)
    assert torch.allclose(expected_kl(logits, reference, "k3"), true)
    assert not torch.allclose(expected_kl(logits, reference, "k2"), true, rtol=0.01)


def test_what_each_estimate_pulls_towards_as_a_loss():
    """k1 nothing; k2 the gradient of KL(policy || reference); k3 that of KL(reference || policy)."""
    logits, reference = draw(6, seed=3).requires_grad_(), draw(6, seed=4).log_softmax(0)

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    forward = gradient((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum())
    backward = gradient((reference.exp() * (reference - logits.log_softmax(0))).sum())
    assert torch.allclose(gradient(expected_kl(logits, reference, "k1")), torch.zeros(6, dtype=torch.float64))
    assert torch.allclose(gradient(expected_kl(logits, reference, "k2")), forward)
    assert torch.allclose(gradient(expected_kl(logits, reference, "k3")), backward)
    assert not torch.allclose(forward, backward, rtol=0.1)
