"""The reward model: where the reward is read, padding, heads, what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from openrlhf.models.functional import last_valid_index, masked_mean, position_ids_from_mask
from openrlhf.models.pretrained import (
    checkpoint_fingerprint,
    fit_embedding,
    load_reward_model,
    load_tokenizer,
    save_reward_model,
)
from openrlhf.models.reward_model import MLPHead, RewardModel, read_settings
from tests.tiny import FAMILIES, save_tiny_causal_lm, tiny_config, tiny_reward_model, tiny_tokenizer

POSITION_CASES = [  # ids, mask, place of the last real token; 2 is both EOS and pad here
    ([5, 6, 2, 2, 2], [1, 1, 1, 0, 0], 2),
    ([5, 6, 7, 8, 2], [1, 1, 1, 1, 1], 4),
    ([5, 2, 6, 7, 2, 2], [1, 1, 1, 1, 1, 0], 4),
    ([2, 2, 5, 6, 2], [0, 0, 1, 1, 1], 4),
]


class PositionNetwork(torch.nn.Module):
    """Stub: the value at position t is t."""

    config = SimpleNamespace(_attn_implementation="sdpa")
    score = staticmethod(lambda states: states)

    @staticmethod
    def base_model(input_ids, attention_mask, position_ids, use_cache):
        states = torch.arange(input_ids.shape[1], dtype=torch.float32).expand(input_ids.shape)[..., None]
        return type("Out", (), {"last_hidden_state": states})


@pytest.mark.parametrize("ids,mask,expected", POSITION_CASES)
def test_reward_comes_from_the_last_real_token(ids, mask, expected):
    out = RewardModel(PositionNetwork())(torch.tensor([ids]), torch.tensor([mask]))
    assert out.reward.tolist() == [float(expected)]
    assert out.values[0].tolist() == [float(t) for t in range(len(ids))]


def test_positions_count_from_the_first_real_token():
    assert position_ids_from_mask(torch.tensor([[0, 0, 1, 1, 1]]))[0, 2:].tolist() == [0, 1, 2]


def test_a_row_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        last_valid_index(torch.tensor([[1, 0], [0, 0]]))


def test_masked_mean_ignores_what_is_masked():
    values = torch.tensor([[1.0, float("nan"), 3.0], [float("nan")] * 3])
    mask = torch.tensor([[True, False, True], [False] * 3])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_reward_is_the_same_alone_padded_and_in_a_batch(family):
    model = tiny_reward_model(family)
    text = [5, 6, 7]
    rows = torch.tensor([[*text, 0, 0, 0, 0], [0, 0, 0, 0, *text], [9, 8, 7, 6, 5, 4, 3], [4, 4, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 3 + [0] * 4, [0] * 4 + [1] * 3, [1] * 7, [1] * 2 + [0] * 5])
    with torch.no_grad():
        alone = model(torch.tensor([text]), torch.ones(1, 3)).reward
        batch = model(rows, mask).reward
    assert (batch[:2] - alone).abs().max() < 1e-5
    assert (batch[2] - alone).abs() > 1e-3  # the comparison can fail


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_gives_equal_scores_here_and_in_transformers(family, tmp_path):
    model, tokenizer = tiny_reward_model(family), tiny_tokenizer()
    save_reward_model(tmp_path, model, tokenizer, settings={"template": "plain", "reward_mean": 0.5})
    ids, mask = torch.tensor([[5, 6, 7, 2], [9, 2, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        expected = model(ids, mask).reward
        ours = load_reward_model(tmp_path).eval()
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
        assert (ours(ids, mask).reward - expected).abs().max() < 1e-6
        assert (theirs(input_ids=ids, attention_mask=mask).logits[:, 0] - expected).abs().max() < 1e-5
        left, left_mask = torch.tensor([[0, 0, 9, 2]]), torch.tensor([[0, 0, 1, 1]])
        positions = position_ids_from_mask(left_mask)
        padded_left = theirs(input_ids=left, attention_mask=left_mask, position_ids=positions).logits[0, 0]
        assert (padded_left - expected[1]).abs() < 1e-5
    assert read_settings(ours.config) == {"value_head": "linear", "template": "plain", "reward_mean": 0.5}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model.network).__name__]
    assert len(config["id2label"]) == 1 and AutoConfig.from_pretrained(tmp_path).num_labels == 1
    assert load_file(tmp_path / "model.safetensors")["score.weight"].shape == (1, 32)


def test_older_readers_find_rope_base_and_dtype(tmp_path):
    config = tiny_config()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    config.num_labels = 1
    model = RewardModel(AutoModelForSequenceClassification.from_config(config))
    save_reward_model(tmp_path, model, tiny_tokenizer())
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_theta"] == 500000.0 and saved["torch_dtype"] == "float32"
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 500000.0


def test_mlp_head_is_restored_and_refused_elsewhere(tmp_path):
    start = save_tiny_causal_lm(tmp_path / "lm")
    model = load_reward_model(start, value_head="mlp", allow_missing_head=True).eval()
    assert isinstance(model.network.score, MLPHead)
    save_reward_model(tmp_path, model, tiny_tokenizer())
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids, torch.ones(1, 3)).reward
        again = load_reward_model(tmp_path).eval()
        assert isinstance(again.network.score, MLPHead)
        assert (again(ids, torch.ones(1, 3)).reward - expected).abs().item() < 1e-6
    with pytest.raises(RuntimeError):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mlp head.*reset_value_head"):
        load_reward_model(tmp_path, value_head="linear")


def _edit_weights(folder, edit):
    file = folder / "model.safetensors"
    state = load_file(file)
    edit(state)
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "edit,message",
    [
        (lambda s: s.pop("score.weight"), r"score\.weight.*missing"),
        (lambda s: s.update({"score.weight": torch.zeros(1, 32)}), "all zero"),
        (lambda s: s.update({"score.weight": torch.full((1, 32), float("nan"))}), "not finite"),
        (lambda s: s.pop("model.norm.weight"), r"missing weights.*model\.norm\.weight"),
    ],
)
def test_broken_checkpoints_are_refused(edit, message, tmp_path):
    save_reward_model(tmp_path, tiny_reward_model(), tiny_tokenizer())
    _edit_weights(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        load_reward_model(tmp_path)


@pytest.mark.parametrize("shape", [(0,), (2, 32)])
def test_a_head_of_another_shape_is_refused(shape, tmp_path):
    save_reward_model(tmp_path, tiny_reward_model(), tiny_tokenizer())
    _edit_weights(tmp_path, lambda s: s.update({"score.weight": torch.ones(shape)}))
    with pytest.raises((ValueError, RuntimeError), match="score.weight|size mismatch|mismatch"):
        load_reward_model(tmp_path)


def test_saving_a_model_without_trained_head_fails(tmp_path):
    model = tiny_reward_model()
    with torch.no_grad():
        model.network.score.weight.zero_()
    with pytest.raises(ValueError, match="all zero"):
        save_reward_model(tmp_path, model, tiny_tokenizer())
    state = {k: v for k, v in tiny_reward_model().network.state_dict().items() if not k.startswith("score")}
    with pytest.raises(ValueError, match="missing"):
        save_reward_model(tmp_path, tiny_reward_model(), tiny_tokenizer(), state_dict=state)


def test_a_language_model_needs_permission_to_become_a_reward_model(tmp_path):
    start = save_tiny_causal_lm(tmp_path)
    with pytest.raises(ValueError, match="not a trained reward model"):
        load_reward_model(start)
    first, second = (load_reward_model(start, allow_missing_head=True, seed=7) for _ in range(2))
    other = load_reward_model(start, allow_missing_head=True, seed=8)
    assert torch.equal(first.network.score.weight, second.network.score.weight)
    assert not torch.equal(first.network.score.weight, other.network.score.weight)
    assert torch.isfinite(first.network.score.weight).all()


def test_two_labels_are_refused(tmp_path):
    config = tiny_config()
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="2 labels"):
        load_reward_model(tmp_path)


def test_continuing_keeps_the_head_unless_a_new_one_is_asked_for(tmp_path):
    model = tiny_reward_model()
    save_reward_model(tmp_path, model, tiny_tokenizer())
    kept = load_reward_model(tmp_path, allow_missing_head=True)
    fresh = load_reward_model(tmp_path, allow_missing_head=True, new_head=True, seed=5)
    assert torch.equal(kept.network.score.weight, model.network.score.weight)
    assert not torch.equal(fresh.network.score.weight, model.network.score.weight)


def test_dropout_is_off(tmp_path):
    config = tiny_config("gpt2")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_reward_model(tmp_path, allow_missing_head=True).train()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids, torch.ones(1, 3)).reward, model(ids, torch.ones(1, 3)).reward)


@pytest.mark.parametrize("rows,expected", [(16, 16), (12, 13)])
def test_embedding_grows_and_never_shrinks(rows, expected):
    backend = Tokenizer.from_str(
        '{"version":"1.0","model":{"type":"WordLevel","vocab":'
        + json.dumps({f"w{i}": i for i in range(11)} | {"</s>": 11})
        + ',"unk_token":"w0"},"pre_tokenizer":{"type":"WhitespaceSplit"},"added_tokens":[]}'
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert len(tokenizer) == 12
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    config = tiny_config("llama", rows)
    config.num_labels, config.pad_token_id = 1, None
    model = RewardModel(AutoModelForSequenceClassification.from_config(config))
    before = model.network.get_input_embeddings().weight[:12].detach().clone()
    fit_embedding(model, tokenizer)
    after = model.network.get_input_embeddings().weight
    assert after.shape[0] == expected
    assert torch.equal(after[:12], before)
    assert model.config.pad_token_id == tokenizer.pad_token_id == 12
    model(torch.tensor([[1, 2, 3], [4, 12, 12]]), torch.tensor([[1, 1, 1], [1, 0, 0]]))


def test_pad_token_differs_from_eos(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id not in (None, loaded.eos_token_id)
    with pytest.raises(ValueError, match="must differ from EOS"):
        load_tokenizer(tmp_path, pad_token="</s>")


def test_fingerprint_follows_the_weights(tmp_path):
    save_reward_model(tmp_path, tiny_reward_model(seed=0), tiny_tokenizer())
    first = checkpoint_fingerprint(tmp_path)
    assert first == checkpoint_fingerprint(tmp_path)
    save_reward_model(tmp_path, tiny_reward_model(seed=1), tiny_tokenizer())
    assert checkpoint_fingerprint(tmp_path) != first
