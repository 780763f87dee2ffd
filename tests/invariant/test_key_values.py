"""Keys and values that grow, are copied, dropped and cut give what one pass over each whole row gives."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.models import key_values
from openrlhf.models.key_value_buffers import Buffers
from openrlhf.models.key_values import KeyValues
from openrlhf.models.prompt_cache import CacheUnsupported
from tests.tiny import FAMILIES, tiny_config

COMMON = {
    "vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32, "head_dim": 8,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
OTHERS = {
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "windows in some layers": ("gemma3_text", WINDOWS),
    "window and soft cap": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "bias by distance": ("bloom", {"n_layer": 2, "n_head": 4, "num_hidden_layers": 2}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
LINEAR = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
UNSUPPORTED = {
    "linear attention in some layers": ("qwen3_next", LINEAR),
    "state space in some layers": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "state space": ("mamba", {"state_size": 8}),
    "recurrent": ("rwkv", {"attention_hidden_size": 32}),
}


def network(name: str) -> torch.nn.Module:
    """A random backbone whose attention is far from uniform."""
    if name in FAMILIES:
        config = tiny_config(name)
    else:
        model_type, settings = {**OTHERS, **UNSUPPORTED}[name]
        config = AutoConfig.for_model(model_type, **COMMON | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).base_model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.float().eval()


def whole(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False)[0][0]


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_any_sequence_of_changes_gives_the_states_of_whole_rows(name, monkeypatch):
    monkeypatch.setattr(key_values, "PASS_TOKENS", {False: 24})  # rows are added in several passes
    monkeypatch.setattr(key_values, "LEAST_ROOM", 1)  # buffers are made anew often
    model, rng = network(name), random.Random(0)

    def draw(count):
        return [rng.randrange(3, 320) for _ in range(count)]

    cache, rows, computed = KeyValues(model), [], 0
    for _ in range(60):
        kind = rng.choice(["append", "append", "append", "select", "crop", "add"])
        if kind == "add" and len(rows) < 8:
            added = [draw(rng.choice([0, 1, 5, 12])) for _ in range(rng.randrange(1, 4))]
            added.append(list(added[0]))
            cache.add(added)
            rows += added
            computed += sum(map(len, set(map(tuple, added))))
        elif kind == "select" and rows:
            chosen = [rng.randrange(len(rows)) for _ in range(rng.randrange(0, 9))]
            cache.select(chosen)
            rows = [list(rows[row]) for row in chosen]
        elif kind == "crop":
            rows = [row[: rng.randrange(max(0, len(row) - 3), len(row) + 1)] for row in rows]
            cache.crop([len(row) for row in rows])
        elif rows:
            new = [draw(rng.choice([0, 0, 1, 1, 2, 7])) if len(row) < 100 else [] for row in rows]
            states = cache.append(new)
            rows = [row + more for row, more in zip(rows, new, strict=True)]
            computed += sum(map(len, new))
            longer = [(row, len(more)) for row, more in zip(rows, new, strict=True) if more]
            assert len(states) == len(longer)
            for found, (row, count) in zip(states, longer, strict=True):
                torch.testing.assert_close(found[:count], whole(model, row)[-count:], atol=1e-5, rtol=1e-5)
        assert cache.lengths == [len(row) for row in rows]
    assert cache.tokens == computed


def test_idle_rows_leave_the_passes_and_come_back():
    model = network("llama")
    cache, rows, seen = KeyValues(model), [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]], []
    cache.add(rows)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for token in range(20, 30):
        new = [[], [], [], [token]] if token < 29 else [[token]] * 4
        states = cache.append(new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
    assert seen == [(1, 1)] * 9 + [(4, 1)]
    for found, row in zip(states, rows, strict=True):
        torch.testing.assert_close(found[0], whole(model, row)[-1], atol=1e-5, rtol=1e-5)


def test_rows_near_the_end_of_a_table_of_positions_take_part_beside_longer_ones():
    model, rng = network("gpt2"), random.Random(0)  # 128 positions
    rows = [[rng.randrange(3, 320) for _ in range(length)] for length in (127, 100)]
    cache = KeyValues(model)
    cache.add(rows)
    new = [[5], [6] * 20]
    for found, row, more in zip(cache.append(new), rows, new, strict=True):
        wanted = whole(model, row + more)[-len(more) :]
        torch.testing.assert_close(found[: len(more)], wanted, atol=1e-5, rtol=1e-5)


def test_a_growing_row_is_copied_a_logarithmic_number_of_times(monkeypatch):
    sizes = []
    resize = Buffers.resize

    def watched(self, *arguments):
        resize(self, *arguments)
        sizes.append((self.frame.slots, self.frame.columns))

    monkeypatch.setattr(Buffers, "resize", watched)
    cache = KeyValues(network("llama"))
    cache.add([[3, 4]])
    for token in range(100):
        cache.append([[token + 3]])
    assert len(set(sizes)) <= 4 and sizes[-1][1] <= 2 * 102


def test_columns_before_all_rows_are_given_up_when_buffers_grow():
    model = network("llama")
    cache, rows, sizes = KeyValues(model), [[3, 4], [5, 6]], set()
    cache.add(rows)
    for turn in range(200):  # a row that gets fewer tokens than another moves to the right
        new = [[turn + 3], [turn + 4] * 5] if turn % 2 else [[turn + 3] * 5, [turn + 4]]
        states = cache.append(new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        sizes.add(cache._buffers.frame.columns)
    torch.testing.assert_close(states[0, 0], whole(model, rows[0])[-1], atol=1e-5, rtol=1e-5)
    assert len(sizes) <= 7  # 12 where their end stays at the right


def test_through_a_language_model_its_logits_are_given():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    cache = KeyValues(model.base_model)
    cache.add([[5, 6, 7], [8]])
    logits = cache.append([[9], [10]], through=model)
    for found, row in zip(logits, [[5, 6, 7, 9], [8, 10]], strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([row])).logits[0, -1]
        torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_without_plain_keys_and_values_are_refused(name):
    with pytest.raises(CacheUnsupported, match="keeps no plain keys and values.*choose a model"):
        KeyValues(network(name)).add([[3, 4, 5]])


def test_wrong_numbers_of_rows_and_tokens_are_refused():
    cache = KeyValues(network("llama"))
    cache.add([[3, 4, 5], [6]])
    with pytest.raises(ValueError, match="2 rows, got 1"):
        cache.append([[3]])
    with pytest.raises(ValueError, match=r"at most \[3, 1\] tokens to keep, got \[3, 2\]"):
        cache.crop([3, 2])


def test_rows_do_not_pass_a_change_of_positions():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0}
    config = AutoConfig.for_model("phi3", **COMMON, original_max_position_embeddings=20, rope_parameters=rope)
    cache = KeyValues(AutoModelForCausalLM.from_config(config).base_model.eval())
    cache.add([list(range(3, 22))])
    cache.append([[5]])
    with pytest.raises(ValueError, match="21 tokens.*beyond 20"):
        cache.append([[6]])
