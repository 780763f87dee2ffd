"""Scores of growing responses equal those of one pass over each whole text, whatever was forked, dropped or changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from decoding.scoring import PrefixScorer, RowText, TokenScores, same_tokenizer
from openrlhf.datasets.tokenize import encode_prompt, encode_response
from openrlhf.models.reward_model import RewardModel, initialise_head
from tests.tiny import FAMILIES, tiny_config, tiny_reward_model, tiny_tokenizer

GOALS = [np.random.default_rng(seed).normal(size=(1, 32)).astype(np.float32) for seed in (1, 2)]
PROMPTS = ["what is 4 plus 3", "how many apples does she sell to the good question", "yes", "what is 4 plus 3"]


def windowed_model() -> RewardModel:
    config = tiny_config("mistral")
    config.sliding_window, config.num_labels = 6, 1
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config)
    initialise_head(network.score, 32, 0)
    return RewardModel(network).eval()


def number_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges digits of a number, so that another digit changes the last token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    corpus = [" ".join(str(rng.randrange(1000)) for _ in range(30)) for _ in range(100)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def alone(model: RewardModel, prompt: list[int], response: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Values and similarities of one response by a pass of its own."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        out = model(ids, torch.ones_like(ids))
    states = out.hidden_states[0, len(prompt) :]
    similar = [torch.nn.functional.cosine_similarity(states, torch.from_numpy(goal), dim=-1) for goal in GOALS]
    return out.values[0, len(prompt) :].numpy(), torch.stack(similar, dim=1).numpy()


def merge(before: TokenScores | None, new: TokenScores) -> TokenScores:
    """What a reader holds who keeps the scores before `start` and takes the new ones."""
    if before is None:
        assert new.start == 0
        return new
    assert new.start <= len(before.values)
    return TokenScores(
        0,
        np.concatenate([before.values[: new.start], new.values]),
        np.concatenate([before.similarities[: new.start], new.similarities]),
    )


@pytest.mark.parametrize("name", [*FAMILIES, "mistral with a window"])
def test_random_growth_equals_a_pass_over_each_whole_response(name):
    tokenizer = tiny_tokenizer(add_bos=True)
    model = windowed_model() if name not in FAMILIES else tiny_reward_model(name, tokenizer)
    rng = random.Random(3)
    scorer = PrefixScorer(model, tokenizer, GOALS, PROMPTS, same_tokens=True)
    rows = [(encode_prompt(tokenizer, prompt), [], False) for prompt in PROMPTS]
    held: list[TokenScores | None] = [None] * len(rows)
    compared = 0
    for step in range(12):
        named = sorted(rng.sample(range(len(rows)), rng.randrange(1, len(rows) + 1))) if step % 3 else None
        for row in named if named is not None else range(len(rows)):
            prompt, ids, over = rows[row]
            if not over and len(ids) < 60:
                ids = ids + [rng.randrange(3, 320) for _ in range(rng.choice([0, 1, 3, 8]))]
                rows[row] = prompt, ids, rng.random() < 0.15
        chosen = range(len(rows)) if named is None else named
        texts = [
            RowText(rows[row][1], tokenizer.decode(rows[row][1], skip_special_tokens=True), rows[row][2])
            for row in chosen
        ]
        for row, new in zip(chosen, scorer.extend(texts, named), strict=True):
            prompt, ids, over = rows[row]
            held[row] = merge(held[row], new)
            values, similarities = alone(model, prompt, ids + [2] * over)
            np.testing.assert_allclose(held[row].values, values, atol=1e-5)
            np.testing.assert_allclose(held[row].similarities, similarities, atol=1e-5)
            np.testing.assert_array_equal(scorer.scores(row).values, held[row].values)
            compared += len(values)
        if step % 2:
            picked = [rng.randrange(len(rows)) for _ in range(rng.randrange(2, 7))]
            scorer.select(picked)
            rows, held = [rows[row] for row in picked], [held[row] for row in picked]
        if step == 6:
            scorer.add(PROMPTS[:2])
            rows += [(encode_prompt(tokenizer, prompt), [], False) for prompt in PROMPTS[:2]]
            held += [None, None]
    assert compared > 100


def test_other_tokens_than_the_policys_give_what_the_whole_text_gives():
    """A policy that writes digit by digit, a reward model that merges digits: new text changes the last old token."""
    policy, tokenizer = tiny_tokenizer(), number_tokenizer()
    assert not same_tokenizer(policy, tokenizer)
    model = tiny_reward_model("llama", tokenizer)
    texts = ["731 plus 12 is 743. 555", "the 12 apples\nand 347 999 yes", "9", "12\u00e9 \U0001f642 88"]
    drawn = [policy(text).input_ids for text in texts]
    scorer = PrefixScorer(model, tokenizer, GOALS, PROMPTS, same_tokens=False)
    assert scorer.prompt_tokens == sum(len(encode_prompt(tokenizer, prompt)) for prompt in set(PROMPTS))
    prompts = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    held: list[TokenScores | None] = [None] * 4
    changed, count, whole = 0, 0, 0
    for end in range(1, max(map(len, drawn)) + 1):
        rows = []
        for text, ids in zip(texts, drawn, strict=True):
            over = end >= len(ids)
            rows.append(RowText(ids[:end], text if over else policy.decode(ids[:end]), over))
        before = [0 if one is None else len(one.values) for one in held]
        for i, (row, new) in enumerate(zip(rows, scorer.extend(rows), strict=True)):
            held[i] = merge(held[i], new)
            response = encode_response(tokenizer, row.text)
            response = response if row.over else response[:-1]
            values, similarities = alone(model, prompts[i], response)
            np.testing.assert_allclose(held[i].values, values, atol=1e-5)
            np.testing.assert_allclose(held[i].similarities, similarities, atol=1e-5)
            np.testing.assert_array_equal(scorer.scores(i).values, held[i].values)
            np.testing.assert_array_equal(scorer.scores(i).similarities, held[i].similarities)
            changed += new.start < before[i]
            count += len(new.values)
            whole += len(response)
    final = sum(len(encode_response(tokenizer, text)) for text in texts)
    assert changed >= 8 and scorer.reward_tokens == count
    assert count <= 2 * final < whole / 4  # at most a token or two is computed again for each new one


def test_a_merged_number_is_computed_again_and_nothing_before_it():
    tokenizer = number_tokenizer()
    short, long = next(
        (f"5 plus {number}", f"5 plus {number}{digit}") for number in range(10, 100) for digit in range(10)
        if len(encode_response(tokenizer, f" {number}{digit}")) == 2 == len(encode_response(tokenizer, f" {number}"))
    )  # fmt: skip
    first, second = encode_response(tokenizer, short)[:-1], encode_response(tokenizer, long)[:-1]
    kept = len(first) - 1
    assert first[:kept] == second[:kept] and first[kept] != second[kept]
    scorer = PrefixScorer(tiny_reward_model("llama", tokenizer), tokenizer, [], ["yes"], same_tokens=False)
    scorer.extend([RowText([], short, False)])
    (new,) = scorer.extend([RowText([], long, False)])
    assert new.start == kept and len(new.values) == len(second) - kept
    assert scorer.reward_tokens == len(first) + len(second) - kept
    assert new.similarities.shape == (len(new.values), 0)


@pytest.mark.parametrize("same_tokens", [True, False])
def test_a_response_that_is_over_ends_in_one_eos(same_tokens):
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model("llama", tokenizer)
    ids = tokenizer("the answer is 4").input_ids
    wanted = alone(model, encode_prompt(tokenizer, "yes"), encode_response(tokenizer, "the answer is 4"))
    for ending in ([], [2], [2, 2], [1]):  # without, with the same, and with another end token of the policy
        scorer = PrefixScorer(model, tokenizer, GOALS, ["yes"], same_tokens)
        half = tokenizer.decode(ids[:3])
        scorer.extend([RowText(ids[:3], half, False)])
        whole = RowText(ids + ending, "the answer is 4", True)
        (new,) = scorer.extend([whole])
        assert new.start == 3 and len(scorer.scores(0).values) == len(ids) + 1
        np.testing.assert_allclose(scorer.scores(0).values, wanted[0], atol=1e-5)
        np.testing.assert_allclose(scorer.scores(0).similarities, wanted[1], atol=1e-5)
        (again,) = scorer.extend([whole])
        assert again.start == len(ids) + 1 and not len(again.values)
        assert scorer.reward_tokens == len(ids) + 1
    empty = PrefixScorer(model, tokenizer, GOALS, ["yes"], same_tokens)
    (nothing,) = empty.extend([RowText([], "", False)])
    assert nothing.values.shape == (0,) and nothing.similarities.shape == (0, 2)
    (eos,) = empty.extend([RowText([2], "", True)])
    np.testing.assert_allclose(eos.values, alone(model, encode_prompt(tokenizer, "yes"), [2])[0], atol=1e-5)


def test_a_response_cut_at_a_stop_is_scored_as_its_text():
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model("llama", tokenizer)
    ids = tokenizer("good apples").input_ids
    scorer = PrefixScorer(model, tokenizer, GOALS, ["yes"], same_tokens=True)
    scorer.extend([RowText(ids[:1], tokenizer.decode(ids[:1]), False)])
    scorer.extend([RowText(ids, "good a", True)])  # the stop "pp" lies within a token
    wanted = alone(model, encode_prompt(tokenizer, "yes"), encode_response(tokenizer, "good a"))
    np.testing.assert_allclose(scorer.scores(0).values, wanted[0], atol=1e-5)


def test_vocabularies_tell_whether_tokens_are_the_same():
    tokenizer, larger = tiny_tokenizer(), tiny_tokenizer(add_bos=True)
    assert same_tokenizer(tokenizer, tokenizer) and same_tokenizer(tokenizer, larger)
    larger.add_special_tokens({"additional_special_tokens": ["<more>"]})
    assert same_tokenizer(tokenizer, larger) and not same_tokenizer(larger, tokenizer)
    assert not same_tokenizer(tokenizer, number_tokenizer())


def test_bad_input_is_told_before_anything_is_computed():
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model("llama", tokenizer)
    with pytest.raises(ValueError, match=r"shape \(1, 32\).*got \(1, 16\).*get_representation"):
        PrefixScorer(model, tokenizer, [np.zeros((1, 16), np.float32)], PROMPTS, True)
    scorer = PrefixScorer(model, tokenizer, GOALS, PROMPTS[:2], True)
    computed = scorer.prompt_tokens
    with pytest.raises(ValueError, match="prompt 3 has 128 tokens, and the reward model reads 128 .*longer context"):
        scorer.add([[5], [6] * 128])
    with pytest.raises(
        ValueError, match="prompt with response 1 has 1[0-9]* tokens, and the reward model reads 128: draw fewer"
    ):
        scorer.extend([RowText([5], "", False), RowText([5] * 120, "", False)])
    with pytest.raises(ValueError, match="each of 2 different rows, got 1"):
        scorer.extend([RowText([5], "", False)])
    with pytest.raises(ValueError, match="2 different rows"):
        scorer.extend([RowText([5], "", False)] * 2, [0, 0])
    assert len(scorer) == 2 and (scorer.prompt_tokens, scorer.reward_tokens) == (computed, 0)
