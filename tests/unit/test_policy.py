"""Sampling from a policy: padding, stopping, seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from openrlhf.models.policy import Policy, cut_after_stop, pad_left
from openrlhf.models.pretrained import save_reward_model
from tests.tiny import save_tiny_causal_lm, tiny_reward_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_causal_lm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return Policy.from_pretrained(folder)


PROMPTS = ["how many apples", "yes", "what is the answer of the question 12 plus 7"]


def test_greedy_equals_a_loop_without_padding(policy: Policy) -> None:
    """Reference: one prompt at a time, no cache, no padding, argmax of the last position."""
    prompt_ids = [policy.tokenizer(prompt).input_ids for prompt in PROMPTS]
    expected = []
    for ids in prompt_ids:
        response: list[int] = []
        while len(response) < 12 and policy.tokenizer.eos_token_id not in response:
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([ids + response])).logits
            response.append(int(logits[0, -1].argmax()))
        expected.append([response])
    assert policy.generate_ids(prompt_ids, temperature=0, max_new_tokens=12) == expected


def test_order_and_count(policy: Policy) -> None:
    responses = policy.generate_ids([[5, 6, 7, 8], [9], [5, 6]], n=3, max_new_tokens=4)
    assert [len(group) for group in responses] == [3, 3, 3]
    texts = policy.generate(PROMPTS, n=2, max_new_tokens=4)
    assert [len(group) for group in texts] == [2, 2, 2]
    assert policy.generate([], n=2) == []


def test_responses_return_to_their_own_prompt() -> None:
    """A stand-in that repeats the prompt's last token shows where each response goes, whatever the batches."""

    class Echo(nn.Module):
        generation_config = GenerationConfig()

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def generate(self, input_ids, attention_mask, max_new_tokens, **_):
            assert (attention_mask[:, -1] == 1).all()  # padding is on the left only
            return torch.cat([input_ids, input_ids[:, -1:].repeat(1, max_new_tokens)], dim=1)

    policy = Policy(Echo(), tiny_tokenizer())
    prompts = [[9] * 5 + [20], [21], [9, 22], [9] * 9 + [23], [24]]
    for batch_tokens in (1, 20, 10_000):  # one row a batch, some rows, everything at once
        responses = policy.generate_ids(prompts, n=2, max_new_tokens=2, batch_tokens=batch_tokens)
        assert responses == [[[token, token]] * 2 for token in (20, 21, 22, 23, 24)]


def test_same_seed_same_text_and_global_state_kept(policy: Policy) -> None:
    torch.manual_seed(1)
    first = policy.generate(PROMPTS, n=4, max_new_tokens=8, seed=3)
    after = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(2))  # sampling drew nothing from the global generator
    assert first == policy.generate(PROMPTS, n=4, max_new_tokens=8, seed=3)
    assert first != policy.generate(PROMPTS, n=4, max_new_tokens=8, seed=4)


def test_samples_follow_the_full_distribution(policy: Policy) -> None:
    """All 320 tokens are drawn from, not only the 50 most likely ones, which is the default of transformers.

    Of 20,000 draws the share of tokens outside the 50 most likely has a standard error of at most
    sqrt(0.25 / 20000) = 0.0035; 5 of them is 0.018.
    """
    ids = policy.tokenizer("how many").input_ids
    with torch.no_grad():
        probabilities = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
    likely = set(probabilities.topk(50).indices.tolist())
    expected = 1 - float(probabilities[list(likely)].sum())
    [responses] = policy.generate_ids([ids], n=20_000, max_new_tokens=1)
    share = sum(response[0] not in likely for response in responses) / len(responses)
    assert expected > 0.5  # a random model is nearly uniform
    assert abs(share - expected) < 0.018


def test_stops_at_eos_and_text_has_no_special_token(folder: Path) -> None:
    """A model whose logits always favour EOS answers at once; the response keeps that EOS, the text does not."""
    policy = Policy.from_pretrained(folder)
    eos = policy.tokenizer.eos_token_id

    class AlwaysEOS(nn.Module):
        def forward(self, hidden):
            return nn.functional.one_hot(torch.full(hidden.shape[:2], eos), 320).float() * 100

    policy.model.lm_head = AlwaysEOS()
    assert policy.generate_ids([[5, 6], [7]], n=2, max_new_tokens=6) == [[[eos], [eos]], [[eos], [eos]]]
    assert policy.generate(["how"], n=1, max_new_tokens=6) == [[""]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([4, 5, 2, 0, 0], [4, 5, 2]), ([2, 2], [2]), ([4, 5], [4, 5]), ([4, 7, 2], [4, 7]), ([], [])],
)
def test_cut_after_stop(ids: list[int], expected: list[int]) -> None:
    assert cut_after_stop(ids, [2, 7]) == expected


def test_pad_left() -> None:
    ids, mask = pad_left([[4, 5, 6], [7]], pad_id=0)
    assert ids.tolist() == [[4, 5, 6], [0, 0, 7]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "got n=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature must be 0 or a positive number, got -1.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": 0, "n": 2}, "pass n=1"),
        ({"top_p": 0.0}, "top_p must lie in"),
    ],
)
def test_bad_arguments(policy: Policy, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.generate(["yes"], **arguments)


def test_empty_prompt_is_named(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"prompts \[1\] have no token"):
        policy.generate_ids([[5], []])


def test_pad_equal_to_eos_is_refused(policy: Policy) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(ValueError, match="pad token other than EOS"):
        Policy(policy.model, tokenizer)


def test_a_checkpoint_without_output_layer_is_refused(tmp_path: Path) -> None:
    """A reward model has no output layer: transformers would draw a random one."""
    save_reward_model(tmp_path, tiny_reward_model(), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"no language model, weights are missing: \['lm_head.weight'\]"):
        Policy.from_pretrained(tmp_path)


def test_the_attention_asked_for_is_used(folder: Path, policy: Policy) -> None:
    eager = Policy.from_pretrained(folder, attn_implementation="eager")
    assert eager.model.config._attn_implementation == "eager"
    assert eager.generate(PROMPTS, temperature=0) == policy.generate(PROMPTS, temperature=0)
