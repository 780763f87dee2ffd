"""Drawing tokens with log-probabilities: the distribution, the random numbers of a row, limits and stops."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from openrlhf.models.policy import Policy, _split_rows
from openrlhf.models.prompt_cache import CacheUnsupported
from openrlhf.models.sampling import SamplingParams, draw_tokens, spread_seeds
from tests.tiny import save_tiny_causal_lm


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return Policy.from_pretrained(save_tiny_causal_lm(tmp_path_factory.mktemp("policy")))


def draw(logits, uniforms, temperature=1.0, top_p=1.0):
    n = len(uniforms)
    rows = torch.tensor(logits).expand(n, -1)
    return draw_tokens(
        rows, torch.tensor(uniforms, dtype=torch.float64), torch.full((n,), temperature), torch.full((n,), top_p)
    )


def test_a_uniform_number_picks_the_token_by_hand():
    """Probabilities 0.1, 0.6, 0.3 with borders 0.1 and 0.7."""
    logits = torch.tensor([0.1, 0.6, 0.3]).log().tolist()
    tokens, logprobs = draw(logits, [0.0, 0.0999, 0.1001, 0.6999, 0.7001, 0.999999999])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.1, 0.1, 0.6, 0.6, 0.3, 0.3], abs=1e-6)


def test_top_p_cuts_the_tail_and_leaves_the_log_probabilities():
    """top_p 0.7: 0.6 does not reach it, 0.6 + 0.3 does; so 1 and 2 are drawn from, with 2/3 and 1/3."""
    logits = torch.tensor([0.1, 0.6, 0.3]).log().tolist()
    tokens, logprobs = draw(logits, [0.0, 0.66, 0.67, 0.99], top_p=0.7)
    assert tokens.tolist() == [1, 1, 2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.6, 0.6, 0.3, 0.3], abs=1e-6)
    assert draw(logits, [0.0, 0.99], top_p=1e-6)[0].tolist() == [1, 1]  # the most likely one always stays


def test_temperature_by_hand():
    """At temperature 0.5 the probabilities 0.2 and 0.8 become 0.04 / 0.68 and 0.64 / 0.68; at 0 the larger is taken."""
    logits = torch.tensor([0.2, 0.8]).log().tolist()
    tokens, logprobs = draw(logits, [0.058, 0.06], temperature=0.5)
    assert tokens.tolist() == [0, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.04 / 0.68, 0.64 / 0.68], abs=1e-6)
    tokens, logprobs = draw(logits, [0.0, 0.1], temperature=0.0)
    assert tokens.tolist() == [1, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.8, 0.8], abs=1e-6)


def test_a_token_without_probability_is_never_drawn():
    tokens, _ = draw([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")], [0.0, 0.5, 0.5000001, 1 - 2**-53])
    assert tokens.tolist() == [1, 3, 3, 3]


def test_logits_that_are_no_distribution_are_refused():
    with pytest.raises(ValueError, match=r"rows \[0, 1\]"):
        draw([0.0, float("nan")], [0.5, 0.5])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probabilities_equal_a_plain_forward_pass(policy: Policy, temperature: float):
    """Reference: each prompt with its response alone, no cache, no padding; logits over the temperature."""
    prompts = [[5, 6, 7, 8, 9], [20], [30, 31]]
    params = [SamplingParams(temperature=temperature, max_tokens=n, seed=n) for n in (4, 9, 6)]
    for prompt, response in zip(prompts, policy.sample(prompts, params), strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / (temperature or 1.0)).log_softmax(-1)[range(len(response.ids)), response.ids]
        assert response.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_row_draws_the_same_alone_and_in_any_batch(policy: Policy):
    prompts = [[5, 6, 7, 8, 9], [20], [30, 31], [40] * 7]
    params = spread_seeds(SamplingParams(max_tokens=8, seed=3, top_p=0.9), 4)
    together = policy.sample(prompts, params)
    alone = [policy.sample([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    in_twos = policy.sample(prompts, params, batch_tokens=30)
    backwards = policy.sample(prompts[::-1], params[::-1])[::-1]
    for others in (alone, in_twos, backwards):
        assert [response.ids for response in others] == [response.ids for response in together]
    assert len({tuple(response.ids) for response in together}) == 4


def test_generate_draws_the_same_where_no_keys_and_values_can_be_kept(policy: Policy, monkeypatch):
    prompts = [[5, 6, 7]] * 3 + [[20], [30, 31]]
    params = spread_seeds(SamplingParams(max_tokens=9, seed=3, top_p=0.9), 5)
    params[1].max_tokens, params[3].stop = 2, [policy.tokenizer.decode([t]) for t in (40, 50)]
    kept = policy.sample(prompts, params)

    def unsupported(network):
        raise CacheUnsupported("it keeps none")

    monkeypatch.setattr("openrlhf.models.policy.KeyValues", unsupported)
    for one, other in zip(kept, policy.sample(prompts, params), strict=True):
        assert (one.ids, one.ended) == (other.ids, other.ended)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_rows_that_are_over_leave_the_passes(policy: Policy):
    """Tokens that reach the output layer: both rows once, then the longer one alone, six times more."""
    rows = []
    hook = policy.model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    try:
        sampled = policy.sample([[5, 6], [5, 6]], [SamplingParams(max_tokens=n, seed=1) for n in (7, 1)])
    finally:
        hook.remove()
    assert [len(one.ids) for one in sampled] == [7, 1] and rows == [2, 1, 1, 1, 1, 1, 1]


def test_copies_with_spread_seeds_differ_and_come_back(policy: Policy):
    params = spread_seeds(SamplingParams(max_tokens=6, seed=1), 8)
    first = policy.sample([[5, 6]] * 8, params)
    assert len({tuple(response.ids) for response in first}) == 8
    assert first == policy.sample([[5, 6]] * 8, params)
    other = policy.sample([[5, 6]] * 8, spread_seeds(SamplingParams(max_tokens=6, seed=2), 8))
    assert not {tuple(response.ids) for response in first} & {tuple(response.ids) for response in other}
    assert all(one.seed < 2**53 for one in params)


def test_the_turns_of_one_sample_use_other_numbers(policy: Policy):
    """The prompt's length goes into the stream: the same seed with one more token does not repeat the draws."""
    sampled = policy.sample([[5] * n for n in range(1, 21)], [SamplingParams(max_tokens=1, seed=0)] * 20)
    assert len({response.ids[0] for response in sampled}) > 15


def test_draws_follow_the_distribution(policy: Policy):
    """Share of each of the five most likely tokens within 5 standard errors of 4,000 draws."""
    with torch.no_grad():
        probabilities = policy.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].mul(5).softmax(-1)
    params = spread_seeds(SamplingParams(temperature=0.2, max_tokens=1), 4000)
    counts = Counter(response.ids[0] for response in policy.sample([[5, 6]] * 4000, params))
    for token in probabilities.topk(5).indices.tolist():
        p = float(probabilities[token])
        assert abs(counts[token] / 4000 - p) < 5 * (p * (1 - p) / 4000) ** 0.5


class Scripted(nn.Module):
    """A language model head that makes each token the only possible one in turn, the same for every row."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = list(tokens)

    def forward(self, hidden):
        token = self.tokens.pop(0) if self.tokens else 5
        return nn.functional.one_hot(torch.full(hidden.shape[:2], token), 320).float() * 1000


@pytest.fixture
def scripted(policy: Policy):
    head = policy.model.lm_head

    def say(tokens):
        policy.model.lm_head = Scripted(tokens)
        return policy

    yield say
    policy.model.lm_head = head


def test_eos_limits_and_stop_texts_of_each_row(scripted):
    """Four rows see the same tokens "w x = y EOS z"; what ends each of them is its own settings."""
    tokenizer = scripted([]).tokenizer
    w, x, equals, y = (tokenizer(text).input_ids[0] for text in ("w", "x", "=", "y"))
    script = [w, x, equals, y, tokenizer.eos_token_id, w]
    params = [
        SamplingParams(max_tokens=10, seed=0),
        SamplingParams(max_tokens=2, seed=0),
        SamplingParams(max_tokens=10, seed=0, stop=["="]),
        SamplingParams(max_tokens=10, seed=0, stop="x="),
    ]
    responses = scripted(script).sample([[7], [8, 9], [10], [11]], params)
    assert [response.ids for response in responses] == [script[:5], script[:2], script[:3], script[:3]]
    assert [response.ended for response in responses] == ["eos", "length", "stop", "stop"]


def test_settings_of_the_model_do_not_change_the_distribution(policy: Policy):
    """A penalty or a minimum length in generation_config.json would make recorded log-probabilities wrong."""
    prompts, params = [[5, 6, 5, 6]] * 4, spread_seeds(SamplingParams(max_tokens=8, seed=5), 4)
    plain = policy.sample(prompts, params)
    config = policy.model.generation_config
    before = config.repetition_penalty, config.min_new_tokens
    config.repetition_penalty, config.min_new_tokens = 5.0, 8
    try:
        assert policy.sample(prompts, params) == plain
        assert policy.model.generation_config is config
    finally:
        config.repetition_penalty, config.min_new_tokens = before


def test_a_model_in_training_stays_in_training(policy: Policy):
    policy.model.train()
    policy.sample([[5]], [SamplingParams(max_tokens=1, seed=0)])
    assert policy.model.training
    policy.model.eval()


def test_batches_are_bounded_by_their_widest_prompt_and_limit():
    """Rows of 2, 4 and 10 prompt tokens with limits 10, 1 and 1: two rows are 2 * 14 = 28 tokens, three 3 * 20."""
    assert _split_rows([0, 1, 2], [2, 4, 10], [10, 1, 1], 28) == [[0, 1], [2]]
    assert _split_rows([0, 1, 2], [2, 4, 10], [10, 1, 1], 60) == [[0, 1, 2]]
    assert _split_rows([0, 1, 2], [2, 4, 10], [10, 1, 1], 1) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.of(SamplingParams(**settings))


def test_settings_of_other_classes_are_read_and_unknown_ones_refused(policy: Policy):
    foreign = SimpleNamespace(temperature=0.5, top_p=0.9, max_tokens=3, n=1, top_k=-1, stop=["a", ""])
    assert SamplingParams.of(foreign) == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=3, stop=("a",))
    with pytest.raises(ValueError, match="top_k=20"):
        SamplingParams.of(SimpleNamespace(top_k=20))
    with pytest.raises(ValueError, match=r"rows \[1\] need max_tokens and a seed"):
        policy.sample([[5], [6]], [SamplingParams(max_tokens=1, seed=0), SamplingParams(max_tokens=1)])
    with pytest.raises(ValueError, match=r"prompts \[0\] have no token"):
        policy.sample([[]], [SamplingParams(max_tokens=1, seed=0)])
