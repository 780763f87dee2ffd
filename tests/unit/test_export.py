"""What an exported folder says to transformers 4; build_scripts/check_transformers4.sh asks transformers 4 itself."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, LlamaTokenizer

from openrlhf.models.export import finish_export, older_keys, older_tokenizer
from openrlhf.models.pretrained import load_reward_model, save_reward_model
from openrlhf.models.reward_model import RewardModel
from tests.tiny import tiny_config, tiny_reward_model, tiny_tokenizer

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip


def save_with_rope(folder, rope, family="llama", theta=50000.0, **changes):
    """Save a random reward model with these rotary parameters; returns it and what config.json says."""
    config = tiny_config(family)
    values = {**config.to_dict(), "rope_parameters": {**rope, "rope_theta": theta}, "num_labels": 1, **changes}
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(type(config).from_dict(values))
    save_reward_model(folder, RewardModel(network).eval(), tiny_tokenizer())
    return network, json.loads((folder / "config.json").read_text())


def frequencies_of_transformers_4(config) -> list[float]:
    """Rotary frequencies, radians per position, by the rules of transformers 4.51 from its own keys alone."""
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    size, base = config["head_dim"], config["rope_theta"]
    plain = [base ** (-2 * i / size) for i in range(size // 2)]
    if scaling["rope_type"] == "linear":
        return [f / scaling["factor"] for f in plain]
    if scaling["rope_type"] == "llama3":  # long waves are slowed by the factor, short ones kept, between them mixed
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        found = []
        for f in plain:
            wave = 2 * math.pi / f
            share = (low / wave - 1) / (low / high - 1)  # 0 at the long end, 1 at the short end
            share = min(max(share, 0.0), 1.0)
            found.append((1 - share) * f / scaling["factor"] + share * f)
        return found
    if scaling["rope_type"] == "yarn":
        longest = config["max_position_embeddings"]
        original = scaling.get("original_max_position_embeddings", longest)
        factor = longest / original if "original_max_position_embeddings" in scaling else scaling["factor"]

        def dimension(turns):  # at which the wave turns that often within the original length
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
        shares = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(size // 2)]
        return [f / factor * share + f * (1 - share) for f, share in zip(plain, shares, strict=True)]
    return plain


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},  # as written by transformers before 4.43
        LLAMA3,
        YARN,  # 4.0 is 128 / 32, what 4.51 would compute
        {"rope_type": "yarn", "factor": 4.0},  # no original length: 5 uses 128 positions and the factor
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_older_keys_give_the_same_rotary_frequencies(rope, tmp_path):
    network, saved = save_with_rope(tmp_path, rope)
    expected = network.model.rotary_emb.inv_freq.double()
    found = torch.tensor(frequencies_of_transformers_4(saved), dtype=torch.float64)
    assert (found / expected - 1).abs().max() < 1e-6
    plain = torch.tensor(frequencies_of_transformers_4({"head_dim": 8, "rope_theta": 10000.0}), dtype=torch.float64)
    assert (plain / expected - 1).abs().max() > 0.1  # what 4.51 would use without the keys


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        LLAMA3,
        YARN,
        {**YARN, "attention_factor": 1.5, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 4.0},
        {**YARN, "factor": 8.0},
        {**YARN, "truncate": False},
        LONGROPE,
        {**LONGROPE, "factor": 16.0},
        {"rope_type": "proportional"},
    ],
)
def test_this_version_reads_its_own_parameters_again(rope, tmp_path):
    network, _ = save_with_rope(tmp_path, rope)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == network.config.rope_parameters
    ids, mask = torch.arange(5, 65).view(1, -1), torch.ones(1, 60)
    with torch.no_grad():
        expected = RewardModel(network)(ids, mask).reward
        assert torch.equal(load_reward_model(tmp_path).eval()(ids, mask).reward, expected)


@pytest.mark.parametrize(
    "rope",
    [
        {**YARN, "factor": 8.0},  # 4.51 would use 128 / 32
        {**YARN, "truncate": False},  # unknown to 4.51
        {**LONGROPE, "factor": 16.0},
        {"rope_type": "proportional"},
    ],
)
def test_what_older_versions_cannot_say_is_refused_there(rope, tmp_path):
    _, saved = save_with_rope(tmp_path, rope)
    assert saved["rope_scaling"] == {}  # KeyError in transformers 4


def test_longrope_with_its_own_attention_factor_can_be_said():
    rope = {**LONGROPE, "rope_theta": 1e4, "factor": 16.0, "attention_factor": 1.2}
    keys = older_keys({"model_type": "llama", "max_position_embeddings": 128, "rope_parameters": rope})
    assert keys["rope_scaling"]["attention_factor"] == 1.2 and keys["original_max_position_embeddings"] == 32


def test_phi3_gets_the_three_keys_it_accepts(tmp_path):
    _, saved = save_with_rope(tmp_path, LONGROPE, family="phi3", original_max_position_embeddings=32)
    assert sorted(saved["rope_scaling"]) == ["long_factor", "short_factor", "type"]
    assert saved["original_max_position_embeddings"] == 32


def test_default_positions_get_no_scaling_and_names_follow_the_family(tmp_path):
    _, saved = save_with_rope(tmp_path, {"rope_type": "default", "partial_rotary_factor": 0.5}, family="gpt_neox")
    assert saved["rotary_emb_base"] == 50000.0 and saved["rotary_pct"] == 0.5
    assert "rope_scaling" not in saved
    assert older_keys({"model_type": "qwen3_moe", "num_local_experts": 4}) == {"num_experts": 4}
    assert older_keys({"model_type": "gpt2"}) == {}
    by_layer = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    assert older_keys({"model_type": "gemma3_text", "rope_parameters": by_layer}) == {}


def test_a_base_left_over_from_an_earlier_export_is_replaced(tmp_path):
    _, saved = save_with_rope(tmp_path, {"rope_type": "default"})
    config = {**saved, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    finish_export(tmp_path, torch.bfloat16)
    again = json.loads((tmp_path / "config.json").read_text())
    assert again["rope_theta"] == 50000.0
    assert again["torch_dtype"] == again["dtype"] == "bfloat16"


def test_completing_a_folder_twice_changes_nothing(tmp_path):
    save_with_rope(tmp_path, {**YARN, "factor": 8.0})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    finish_export(tmp_path, torch.float32)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_every_version_reads_the_tokens_from_the_same_file(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁the", "▁t", "he", "▁the"]
    tokenizer = LlamaTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
        add_bos_token=False,
        extra_special_tokens=["<|user|>"],
    )
    save_reward_model(tmp_path, tiny_reward_model(), tokenizer)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"  # LlamaTokenizer of transformers 4 would add <s>
    assert saved["additional_special_tokens"] == ["<|user|>"] and "extra_special_tokens" not in saved
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the the", "<|user|>\nhé </s>", "  e"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again("the")["input_ids"] == [pieces.index("▁the")]
    assert again.extra_special_tokens == ["<|user|>"]


def test_a_tokenizer_without_the_file_keeps_its_class():
    config = {"tokenizer_class": "BertJapaneseTokenizer", "extra_special_tokens": {"image_token": "<image>"}}
    assert older_tokenizer(config, is_fast=False) == config
