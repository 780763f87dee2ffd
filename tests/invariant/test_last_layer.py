"""Where last tokens alone are read, the last layer computes no others and the scores stay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openrlhf.evaluation.batching import pad_right
from openrlhf.evaluation.scoring import Scorer, encode_completions, score_encoded
from openrlhf.models.last_layer import only_last_tokens
from openrlhf.models.packing_support import probe_last
from tests.invariant.test_scoring_invariance import ARCHITECTURES, ENCODE, alone, build, completions, goal
from tests.tiny import FAMILIES, tiny_reward_model, tiny_tokenizer

# Rows that share nothing, little and nearly all of their tokens, one that begins others, equal ones, single tokens.
ROWS = [[9], [5, 6, 7, 8, 9], [5, 6], [5, 6, 7, 8, 4], [5, 6, 7, 8, 4], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11], [9]]
KEEPS_ALL = {"gpt2"}  # lays its states out by the tokens that it was given


def read_last(model, rows, share=True):
    ids, mask = pad_right(rows, 0, "cpu")
    packed = model.pack(ids, mask, share=share)
    return model.read_packed(packed, model.pack_last(packed, mask.sum(1)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KEEPS_ALL])
@torch.inference_mode()
def test_states_and_values_equal_those_of_each_row_alone(family, attention):
    model = tiny_reward_model(family).double()
    model.config._attn_implementation = attention
    assert probe_last(model) is None
    outs = [model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool)) for row in ROWS]
    for rows, share in ((ROWS, True), (ROWS, False), (ROWS[:1] * 2, True)):
        states, values = read_last(model, rows, share)
        assert states.shape == (len(rows), 32) and states.dtype == torch.float64
        for found, value, out in zip(states, values, outs if rows is ROWS else outs[:1] * 2, strict=True):
            torch.testing.assert_close(found, out.hidden_states[0, -1], rtol=0, atol=1e-12)
            torch.testing.assert_close(value, out.reward[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_last_token_alone(family):
    tokenizer = tiny_tokenizer(add_bos=True)
    model, texts = tiny_reward_model(family, tokenizer), completions()
    wanted = alone(model, tokenizer, texts)
    assert (probe_last(model) is None) == (family not in KEEPS_ALL)
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    for share, batch_tokens in ((True, 1), (True, 150), (True, 100_000), (False, 150)):
        options = {"goal": goal(), "batch_tokens": batch_tokens, "share_prompts": share, "progress": False}
        for one, tokens, (values, cosines) in zip(
            score_encoded(model, encoded, last_only=True, **options), encoded, wanted, strict=True
        ):
            assert one.partial_rewards == pytest.approx(values[-1:], abs=1e-5)
            assert one.cosine_sim == pytest.approx(cosines[-1:], abs=1e-5)
            assert (one.reward, one.num_actions) == (one.partial_rewards[0], tokens.num_actions)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unusual_architectures_keep_their_rewards(name):
    tokenizer, texts = tiny_tokenizer(), completions()
    model_type, settings, packable = ARCHITECTURES[name]
    model = build(model_type, settings)
    wanted = [values[-1] for values, _ in alone(model, tokenizer, texts)]
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    assert not packable or probe_last(model) is None
    scored = score_encoded(model, encoded, batch_tokens=150, last_only=True, progress=False)
    assert [one.reward for one in scored] == pytest.approx(wanted, abs=1e-5)


def test_the_last_layer_computes_the_last_tokens_and_is_left_as_it_was():
    tokenizer = tiny_tokenizer()
    model, texts = tiny_reward_model("llama", tokenizer), completions(questions=4, samples=10)
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    tokens = len({tuple(one.ids[:end]) for one in encoded for end in range(1, len(one) + 1)})
    rows = len({tuple(one.ids) for one in encoded})
    last_only, whole = Scorer(model, last_only=True), Scorer(model)
    layers, seen = model.network.base_model.layers, []
    hooks = [layer.mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1])) for layer in layers]
    for scorer in (last_only, whole, last_only):
        scorer.score(encoded)
    assert seen == [tokens, rows, tokens, tokens, tokens, rows] and rows * 4 < tokens
    hooks.append(layers[1].mlp.register_forward_hook(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        last_only.score(encoded)
    for hook in hooks:
        hook.remove()
    assert not layers[1]._forward_pre_hooks


def test_passes_of_several_threads_read_what_they_asked_for():
    model = tiny_reward_model("llama")
    ids, mask = pad_right(ROWS, 0, "cpu")
    with torch.no_grad():
        expected = model(ids, mask)

    @torch.inference_mode()
    def differences(last: bool) -> float:
        worst = 0.0
        for _ in range(100):
            if last:
                found, wanted = read_last(model, ROWS)[1], expected.reward
            else:
                found, wanted = model(ids, mask, model.pack(ids, mask)).values[mask], expected.values[mask]
            worst = max(worst, (found - wanted).abs().max().item())
        return worst

    with ThreadPoolExecutor(3) as threads:
        assert max(threads.map(differences, [True, False, True])) < 1e-5
    packed = model.pack(ids, mask)
    with only_last_tokens(model.network, packed, model.pack_last(packed, mask.sum(1))):  # as a recomputation meets it
        assert differences(last=False) < 1e-5 and torch.equal(model(ids, mask).values, expected.values)


def test_layers_that_take_other_inputs_and_attention_without_masks_keep_all_tokens():
    model = tiny_reward_model("llama")
    model.config.num_hidden_layers = 3  # not the number of its layers
    assert "no list of 3 layers" in probe_last(model)
    model.config._attn_implementation = "flash_attention_2"
    assert "no mask" in probe_last(model)
