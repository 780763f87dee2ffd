"""Reward models as sources: scores, texts of another tokenizer, and goal shaping that keeps the best policy."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrlhf.datasets.tokenize import encode_prompt, encode_response
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.models.pretrained import SETTINGS_KEY
from openrlhf.rewards.model import RewardModelSource, TextScorer, map_potentials, potential_shaping
from openrlhf.rewards.source import RewardRequest
from tests.tiny import tiny_reward_model, tiny_tokenizer

PROMPTS = ["what is the answer of apples?\n", "how many apples\n"]
TEXTS = ["the answer is good", "no", "she 🎉 buys apples", "how many"]


def goal_state(hidden=32):
    vector = np.random.default_rng(3).normal(size=(1, hidden)).astype(np.float32)
    return GoalState(vector, 3, 1.0, "plain", False, 120, "c", "d")


def request_of(tokenizer, with_eos=True, **fields):
    """Two samples each of two prompts."""
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    responses = [encode_response(tokenizer, text)[: None if with_eos else -1] for text in TEXTS]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    return RewardRequest.from_tokens(tokenizer, prompts, prompt_ids, responses, group_size=2, **fields)


def byte_tokenizer():
    """Another tokenizer: one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def source_of(tokenizer=None, **settings):
    tokenizer = tokenizer or tiny_tokenizer(add_bos=True)
    return RewardModelSource(tiny_reward_model("gpt2", tokenizer), tokenizer, max_len=120, **settings)


def alone(source, prompt, text):
    """Reward and states of prompt and response by themselves, through the model only."""
    tokenizer = source.texts.tokenizer
    prompt_ids, response_ids = encode_prompt(tokenizer, prompt), encode_response(tokenizer, text)
    ids = torch.tensor([prompt_ids + response_ids])
    with torch.no_grad():
        out = source.texts.scorer.model(ids, torch.ones_like(ids, dtype=torch.bool))
    return out.reward.item(), out.hidden_states[0, len(prompt_ids) - 1 :]  # from the last token of the prompt on


# ---- rewards


def test_rewards_equal_those_of_each_text_alone():
    source = source_of()
    request = request_of(source.texts.tokenizer)
    result = source.score(request)
    expected = [alone(source, prompt, text)[0] for prompt, text in zip(request.prompts, TEXTS, strict=True)]
    assert result.rewards == pytest.approx(expected, abs=1e-5) and result.dense is None
    assert result.extra_logs == {"truncated": 0.0}


def test_responses_cut_at_the_limit_are_read_at_eos_all_the_same():
    source = source_of()
    tokenizer = source.texts.tokenizer
    whole, cut = (source.score(request_of(tokenizer, with_eos)).rewards for with_eos in (True, False))
    assert cut.tolist() == whole.tolist()


def test_a_prompt_that_leaves_no_room_is_not_scored():
    source = source_of()
    request = request_of(source.texts.tokenizer)
    source.texts.max_len = len(request.prompt_ids[0]) + 1  # the second prompt is shorter
    result = source.score(request)
    assert np.isnan(result.rewards).tolist() == [True, True, False, False]
    assert result.metrics()["unscored"] == 0.5 and result.extra_logs["truncated"] >= 0.5


def test_prompts_are_rendered_by_the_template_of_the_reward_model():
    source = source_of(template="plain")
    tokenizer = source.texts.tokenizer
    request = request_of(tokenizer, inputs=["is it?", "is it?", [{"role": "user", "content": "is it?"}], "is it?"])
    expected = [alone(source, "is it?\n", text)[0] for text in TEXTS]
    assert source.score(request).rewards == pytest.approx(expected, abs=1e-5)
    as_given = source.score(request_of(tokenizer)).rewards
    assert as_given != pytest.approx(expected, abs=1e-3)


def test_conversations_are_rendered_by_the_chat_template():
    source = source_of(template="{}", apply_chat_template=True)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    request = request_of(source.texts.tokenizer, inputs=[chat] * 4)
    prompt = "<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n<|assistant|>\n"
    assert source.score(request).rewards[1] == pytest.approx(alone(source, prompt, TEXTS[1])[0], abs=1e-5)


def test_conversations_go_as_they_are_to_a_model_of_single_questions(caplog):
    source = source_of(template="plain")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    request = request_of(source.texts.tokenizer, inputs=[chat] * 4)
    with caplog.at_level(logging.INFO):
        rewards = source.score(request).rewards
    assert rewards[0] == pytest.approx(alone(source, PROMPTS[0], TEXTS[0])[0], abs=1e-5)
    assert caplog.text.count("as the policy reads them") == 1


def test_normalisation_uses_what_the_checkpoint_records():
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model(tokenizer=tokenizer)
    with pytest.raises(ValueError, match="records no mean and std"):
        TextScorer(model, tokenizer, 120, normalize=True)
    setattr(model.config, SETTINGS_KEY, {"reward_mean": 3.0, "reward_std": 2.0})
    raw, normalised = (TextScorer(model, tokenizer, 120, normalize=asked) for asked in (False, True))
    encoded = raw.encode(PROMPTS, TEXTS[:2])
    expected = (raw.rewards(raw.score(encoded)) - 3) / 2
    assert normalised.rewards(normalised.score(encoded)) == pytest.approx(expected, abs=1e-6)


# ---- shaping


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_discounted_sum_of_shaping_is_the_start_potential(gamma):
    potentials = np.random.default_rng(0).normal(size=7)
    dense = potential_shaping(potentials, gamma, 0.5)
    assert sum(gamma**t * reward for t, reward in enumerate(dense)) == pytest.approx(-0.5 * potentials[0], abs=1e-6)
    assert dense.dtype == np.float32 and potential_shaping(potentials[:0], gamma, 0.5).shape == (0,)


def test_shaping_by_hand():
    # 2 * (0.5 * 0.4 - 0.2), 2 * (0.5 * -0.6 - 0.4), 2 * (0 + 0.6)
    assert potential_shaping(np.array([0.2, 0.4, -0.6]), 0.5, 2.0) == pytest.approx([0.0, -1.4, 1.2])


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_the_best_policy_stays_the_best(gamma):
    """Tabular problem: texts of up to three tokens of {a, b, end}, random end rewards and potentials of prefixes."""
    generator = np.random.default_rng(5)
    prefixes = [text for length in range(3) for text in itertools.product("ab", repeat=length)]
    texts = [(*prefix, "end") for prefix in prefixes] + list(itertools.product("ab", repeat=3))
    ends = {text: generator.normal() for text in texts}
    moved = 0
    for _ in range(20):
        phi = {prefix: generator.normal() for prefix in prefixes}

        def returns(text, coef, phi=phi, last=0.0):
            """Discounted return; `last` is a wrong potential at the end, for comparison."""
            dense = potential_shaping(np.array([phi[text[:t]] for t in range(len(text))]), gamma, coef)
            dense[-1] += coef * gamma * last * phi[text[: len(text) - 1]]
            return sum(gamma**t * reward for t, reward in enumerate(dense)) + gamma ** (len(text) - 1) * ends[text]

        def best(prefix, coef, last=0.0, returns=returns):
            """Best action of every state that the best policy reaches from a prefix, by trying all texts."""
            reachable = [text for text in texts if text[: len(prefix)] == prefix and len(text) > len(prefix)]
            return max(reachable, key=lambda text: returns(text, coef, last=last))[len(prefix)]

        for prefix in prefixes:
            assert best(prefix, coef=3.0) == best(prefix, coef=0.0)
            moved += best(prefix, coef=3.0, last=1.0) != best(prefix, coef=0.0)
        differences = [returns(text, 3.0) - returns(text, 0.0) for text in texts]
        assert differences == pytest.approx([-3.0 * phi[()]] * len(texts), abs=1e-5)
    assert moved > 10  # so the test would see a potential that is not 0 at the end


def test_shaping_of_a_response_by_its_states():
    source = source_of(goal=goal_state(), shaping_coef=0.5, gamma=0.9)
    request = request_of(source.texts.tokenizer)
    result = source.score(request)
    plain = source_of().score(request)
    assert result.rewards == pytest.approx(plain.rewards, abs=1e-5)  # the shaping comes beside the reward
    vector = torch.from_numpy(goal_state().vector)
    for prompt, text, ids, dense in zip(request.prompts, TEXTS, request.response_ids, result.dense, strict=True):
        states = alone(source, prompt, text)[1]  # of the prompt's end, then of every token, EOS last
        phi = torch.nn.functional.cosine_similarity(states, vector, dim=-1).tolist()
        assert len(phi) == len(ids) + 1 and len(dense) == len(ids)
        phi[-1] = 0.0
        expected = [0.5 * (0.9 * phi[t + 1] - phi[t]) for t in range(len(ids))]
        assert dense == pytest.approx(expected, abs=1e-5)


def test_the_sum_of_shaping_is_the_same_for_all_samples_of_a_prompt():
    source = source_of(goal=goal_state(), shaping_coef=2.0)
    sums = [dense.sum() for dense in source.score(request_of(source.texts.tokenizer)).dense]
    assert sums[0] == pytest.approx(sums[1], abs=1e-5) and sums[2] == pytest.approx(sums[3], abs=1e-5)
    assert abs(sums[0] - sums[2]) > 1e-3


def test_a_prompt_without_a_token_starts_at_potential_0():
    tokenizer = tiny_tokenizer(add_bos=False)
    source = source_of(tokenizer, goal=goal_state(), shaping_coef=1.0)
    ids = encode_response(tokenizer, "good")
    request = RewardRequest.from_tokens(tokenizer, [""], [[]], [ids])
    (dense,) = source.score(request).dense
    assert len(dense) == len(ids) and dense.sum() == pytest.approx(0.0, abs=1e-6) and np.abs(dense).max() > 1e-3


# ---- another tokenizer


def test_shaping_by_characters_by_hand():
    potentials = np.array([9.0, 1.0, 2.0, 3.0])  # the prompt's, then after 2, 2 and 5 characters (a token without text)
    # Before the policy's tokens the text read so far has 0, 1, 2, 4, 5 characters.
    assert map_potentials(potentials, [2, 2, 5], [1, 2, 4, 5, 5]).tolist() == [9, 9, 2, 2, 3]
    assert map_potentials(potentials, [2, 2, 5], [5]).tolist() == [9]
    assert map_potentials(potentials, [2, 2, 5], []).tolist() == []
    assert map_potentials(potentials[:1], [], [3, 6]).tolist() == [9, 9]


def test_a_policy_of_another_tokenizer_gets_the_same_rewards_and_sums(caplog):
    source = source_of(goal=goal_state(), shaping_coef=2.0)
    own, other = request_of(source.texts.tokenizer), request_of(byte_tokenizer())
    assert [len(ids) for ids in other.response_ids] == [len(text.encode()) + 1 for text in TEXTS]
    with caplog.at_level(logging.INFO):
        expected = source.score(own)
    assert "tokenised anew" not in caplog.text
    with caplog.at_level(logging.INFO):
        result, _ = source.score(other), source.score(other)
    assert caplog.text.count("4 of 4 responses have other tokens in the reward model's tokenizer") == 1
    assert "its shaping goes to the policy's tokens by characters" in caplog.text
    assert result.rewards.tolist() == expected.rewards.tolist()
    for mine, theirs, ids in zip(result.dense, expected.dense, other.response_ids, strict=True):
        assert len(mine) == len(ids) and mine.sum() == pytest.approx(theirs.sum(), abs=1e-5)
    # "no" is one token more than a byte each: the steps fall where the reward model's tokens end.
    tokens = encode_response(source.texts.tokenizer, TEXTS[0])
    changes = np.flatnonzero(np.abs(result.dense[0][:-1]) > 1e-7)
    assert 0 < len(changes) <= len(tokens) - 1


def test_tokens_that_the_tokenizer_would_not_choose_are_mapped():
    """A policy may write 'good' letter by letter: the same text in other tokens of the same tokenizer."""
    source = source_of(goal=goal_state(), shaping_coef=1.0)
    tokenizer = source.texts.tokenizer
    prompt_ids = encode_prompt(tokenizer, PROMPTS[0])
    letters = [*tokenizer.convert_tokens_to_ids(list("good")), 2]
    request = RewardRequest.from_tokens(tokenizer, PROMPTS[:1], [prompt_ids], [letters])
    whole = RewardRequest.from_tokens(tokenizer, PROMPTS[:1], [prompt_ids], [encode_response(tokenizer, "good")])
    assert request.responses == ["good"] and len(letters) == 5 != len(whole.response_ids[0])
    spelt, expected = source.score(request), source.score(whole)
    assert spelt.rewards.tolist() == expected.rewards.tolist()
    assert len(spelt.dense[0]) == 5 and spelt.dense[0].sum() == pytest.approx(expected.dense[0].sum(), abs=1e-5)


def test_a_response_that_the_reward_model_cuts_keeps_its_last_potential():
    source = source_of(goal=goal_state(), shaping_coef=1.0)
    request = request_of(source.texts.tokenizer)
    source.texts.max_len = len(request.prompt_ids[0]) + 3  # two tokens and EOS of the first response fit
    dense = source.score(request).dense[0]
    assert len(dense) == len(request.response_ids[0]) > 4
    assert dense[2:-1] == pytest.approx(0.0, abs=1e-7) and abs(dense[-1]) > 1e-3


def test_shaping_needs_the_tokens_of_the_policy():
    source = source_of(goal=goal_state(), shaping_coef=1.0)
    text = RewardRequest(["a b"], ["a "], ["b"])
    with pytest.raises(ValueError, match="needs the policy's tokens"):
        source.score(text)
    with pytest.raises(ValueError, match="no token_ends to map its shaping; make it with RewardRequest.from_tokens"):
        source.score(RewardRequest(["a b"], ["a "], ["b"], response_ids=[[300, 301, 302]]))


def test_a_goal_of_another_model_is_refused():
    with pytest.raises(ValueError, match="hidden size 8, the reward model 32"):
        source_of(goal=goal_state(8), shaping_coef=1.0)
