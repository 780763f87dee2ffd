"""Pairs that share a row give the loss, the gradients and the rewards of separate rows."""

import logging

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from openrlhf.datasets.preference import PreferenceBatch
from openrlhf.models.goal_contrastive import draw_states
from openrlhf.models.losses import bradley_terry_loss
from openrlhf.models.packed import attention_bias, pack_pairs, visible_tokens
from openrlhf.models.reward_model import RewardModel
from openrlhf.trainer.engine import LocalEngine
from openrlhf.trainer.prefix_sharing import probe, settings_that_forbid, window_of, work_saved
from openrlhf.trainer.reward_trainer import ContrastiveSettings, RewardTrainer
from tests.integration.test_engines import launch
from tests.runs import arguments, curve, largest_difference, train, weights, write_pairs
from tests.tiny import FAMILIES, save_tiny_causal_lm, tiny_config, tiny_reward_model

CONTRASTIVE = ContrastiveSettings(beta=0.5, sim_samples=5, unsim_samples=4)


def random_pairs(seed: int = 0) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected) ids: random lengths, no prompt, responses that begin alike or contain one another."""
    generator = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return generator.integers(3, 320, n).tolist()

    pairs = [(ids(generator.integers(1, 14)), ids(generator.integers(1, 16)), ids(generator.integers(1, 16)))
             for _ in range(4)]  # fmt: skip
    start = ids(6)
    return [
        *pairs,
        ([], ids(7), ids(4)),
        (ids(3), start, start + ids(5)),  # chosen is a prefix of rejected
        (ids(5), start + ids(4), start + ids(2)),
        (ids(2), [5, *start, 6], [7, *start, 8]),  # alike again behind a difference
        ([], start + ids(3), start),  # rejected is a prefix of chosen, nothing before them
    ]


def batch_of(pairs) -> PreferenceBatch:
    rows = [prompt + response for side in (1, 2) for prompt, response in ((pair[0], pair[side]) for pair in pairs)]
    shape = len(rows), max(map(len, rows))
    ids, mask, response = torch.zeros(shape, dtype=torch.long), *torch.zeros(2, *shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
        response[i, len(pairs[i % len(pairs)][0]) : len(row)] = True
    chosen, rejected = torch.arange(len(rows)).chunk(2)
    return PreferenceBatch(
        ids, mask, response, chosen, rejected, torch.ones(len(pairs)), margin=None, index=torch.arange(len(pairs))
    )


def losses_and_gradients(model: RewardModel, batch: PreferenceBatch, share: bool, autocast: bool = False):
    """(loss, rewards, gradients by name) of one backward pass of the trainer."""
    engine = LocalEngine(bf16=autocast, device="cpu")
    engine.model = model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # GPT-2; load_reward_model switches it off
            module.p = 0.0
    trainer = RewardTrainer(
        engine, None, None, 0, bradley_terry_loss, CONTRASTIVE, center_coef=0.1, prefix_sharing=share
    )
    draws = draw_states(len(batch.chosen), 5, 4, torch.Generator().manual_seed(3))
    with engine.autocast():
        loss, _, rewards = trainer._losses(batch, draws)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), rewards, gradients


def largest_relative(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, relative to the largest entry of the whole gradient."""
    assert one.keys() == two.keys() and len(one) > 5
    size = max(gradient.abs().max() for gradient in one.values())
    return max(((one[name] - two[name]).abs().max() / size).item() for name in one)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_rewards_are_those_of_separate_rows(family, checkpointing, dtype, tolerance, monkeypatch):
    if dtype == torch.float64:  # norms and rotary positions of transformers work in float32 whatever the weights are
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = tiny_reward_model(family).to(dtype)
    if checkpointing:
        model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for seed in range(2):
        batch = batch_of(random_pairs(seed))
        loss, rewards, gradients = losses_and_gradients(model, batch, share=False)
        packed_loss, packed_rewards, packed_gradients = losses_and_gradients(model, batch, share=True)
        assert (packed_loss - loss).abs() <= tolerance * loss.abs()
        assert (packed_rewards - rewards).abs().max() <= tolerance * rewards.abs().max()
        assert largest_relative(gradients, packed_gradients) <= tolerance


def test_every_state_and_value_is_found_again():
    model, batch = tiny_reward_model("qwen3").double(), batch_of(random_pairs())
    packed = pack_pairs(batch.input_ids, batch.attention_mask)
    with torch.no_grad():
        separate = model(batch.input_ids, batch.attention_mask)
        shared = model(batch.input_ids, batch.attention_mask, packed)
    real = batch.attention_mask
    assert shared.hidden_states.shape == separate.hidden_states.shape
    assert (shared.hidden_states - separate.hidden_states)[real].abs().max() < 1e-12
    assert (shared.values - separate.values)[real].abs().max() < 1e-12


def test_eager_attention_and_other_checkpointing_agree():
    torch.manual_seed(0)
    config = tiny_config("qwen3")
    config.num_labels = 1
    model = RewardModel(AutoModelForSequenceClassification.from_config(config, attn_implementation="eager"))
    model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.network.enable_input_require_grads()
    batch = batch_of(random_pairs())
    loss, rewards, gradients = losses_and_gradients(model, batch, share=False)
    packed_loss, packed_rewards, packed_gradients = losses_and_gradients(model, batch, share=True)
    assert (packed_loss - loss).abs() <= 1e-5 * loss
    assert (packed_rewards - rewards).abs().max() <= 1e-5 * rewards.abs().max()
    assert largest_relative(gradients, packed_gradients) <= 1e-5


def test_bf16_autocast_differs_by_rounding_only():
    model, batch = tiny_reward_model("llama"), batch_of(random_pairs())
    loss, rewards, gradients = losses_and_gradients(model, batch, share=False, autocast=True)
    packed_loss, packed_rewards, packed_gradients = losses_and_gradients(model, batch, share=True, autocast=True)
    assert (packed_loss - loss).abs() <= 2e-2 * loss
    assert (packed_rewards - rewards).abs().max() <= 2e-2 * rewards.abs().max()
    assert largest_relative(gradients, packed_gradients) <= 5e-2


def test_packed_row_by_hand():
    """Prompt 7 8, chosen 5 6, rejected 5 9 4: the 5 is shared too. Second pair: no prompt, 3 against 4."""
    batch = batch_of([([7, 8], [5, 6], [5, 9, 4]), ([], [3], [4])])
    packed = pack_pairs(batch.input_ids, batch.attention_mask)
    assert packed.input_ids.tolist()[0] == [7, 8, 5, 6, 9, 4] and packed.input_ids.tolist()[1][:2] == [3, 4]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 3, 4], [0, 0, 0, 0, 0, 0]]
    assert packed.segment.tolist() == [[0, 0, 0, 1, 2, 2], [1, 2, 3, 3, 3, 3]]
    assert packed.places.tolist() == [[0, 1, 2, 3, 0], [6, 0, 0, 0, 0], [0, 1, 2, 4, 5], [7, 0, 0, 0, 0]]
    visible = visible_tokens(packed.segment, packed.context).int()
    assert visible[0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    assert visible[1, :3, :3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_several_pairs_in_one_row_do_not_see_each_other():
    segment = torch.tensor([[0, 1, 2, 4, 5, 6]])  # prompt, chosen, rejected of one pair, then of another
    context = torch.tensor([[0, 0, 0, 4, 4, 4]])
    alone = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    visible = visible_tokens(segment, context)
    assert torch.equal(visible[0, :3, :3], alone) and torch.equal(visible[0, 3:, 3:], alone)
    assert not visible[0, 3:, :3].any() and not visible[0, :3, 3:].any()
    bias = attention_bias(visible, "eager", torch.float32)
    assert torch.equal(bias == 0, visible.unsqueeze(1)) and bias.min() == torch.finfo(torch.float32).min


def test_left_padding_and_odd_rows_are_refused():
    mask = torch.tensor([[False, True], [True, True]])
    with pytest.raises(ValueError, match="padded on the right"):
        pack_pairs(torch.ones(2, 2, dtype=torch.long), mask)
    with pytest.raises(ValueError, match="2B rows"):
        pack_pairs(torch.ones(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.bool))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts_what_works(family):
    model = tiny_reward_model(family)
    assert probe(model, 320, torch.float32, model.device) is None


def test_the_probe_finds_a_model_that_ignores_the_mask_or_fails():
    model = tiny_reward_model()
    plain = model.network.base_model.forward
    model.network.base_model.forward = lambda **named: plain(**{**named, "attention_mask": None})
    assert "differ" in probe(model, 320, torch.float32, model.device)
    bloom = AutoConfig.for_model("bloom", vocab_size=320, hidden_size=32, n_layer=2, n_head=4, num_labels=1)
    model = RewardModel(AutoModelForSequenceClassification.from_config(bloom)).eval()
    assert probe(model, 320, torch.float32, model.device) is not None  # its positions are made of a 2-D mask


def test_settings_that_forbid_sharing():
    model = tiny_reward_model("mistral")
    model.config.sliding_window = 20
    assert settings_that_forbid(model, 20, 0.0) is None
    assert "sees 20 tokens" in settings_that_forbid(model, 21, 0.0)
    model.config.sliding_window = None
    assert "dropout" in settings_that_forbid(model, 20, 0.1)
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in settings_that_forbid(model, 20, 0.0)
    model = tiny_reward_model("llama")
    model.with_aux_loss = True
    assert "load-balancing" in settings_that_forbid(model, 20, 0.0)
    assert window_of(tiny_config("qwen2")) is None  # has a number for a window that is switched off


def test_work_saved():
    assert work_saved(np.array([[100, 0, 0]]), 1000) == pytest.approx(0.5)  # nothing but prompts
    # 12000 a token and 2 for each token seen: 30 * 12060 against two rows of 20 * 12040
    assert work_saved(np.array([[10, 10, 10]]), 1000) == pytest.approx(1 - 30 * 12060 / (40 * 12040))
    assert work_saved(np.array([[0, 1000, 1000]]), 16) < 0  # the masked half between two responses


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_tiny_causal_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 84)


def compare_runs(one, two):
    for split in ("train", "eval"):
        first, second = curve(one, split), curve(two, split)
        assert sorted(first) == sorted(second)
        for step, line in first.items():
            for name in ("loss", "preference_loss", "contrastive_loss", "positive_similarity", "accuracy"):
                assert second[step][name] == pytest.approx(line[name], abs=1e-4), (split, step, name)
    assert largest_difference(weights(one), weights(two)) < 1e-3  # Adam divides near-zero gradients by their own size


def test_whole_run_with_a_short_last_step(start, pairs, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        for sharing in ("off", "on"):
            train(start, pairs, tmp_path / sharing, prefix_sharing=sharing, max_epochs=1)
    assert "pairs share prompts" in caplog.text
    compare_runs(tmp_path / "off", tmp_path / "on")


def test_a_run_may_go_on_without_sharing(start, pairs, tmp_path):
    settings = {"save_steps": 4, "max_epochs": 1}
    train(start, pairs, tmp_path / "whole", prefix_sharing="on", **settings)
    train(start, pairs, tmp_path / "rest", prefix_sharing="off", load_checkpoint=True,
          ckpt_path=str(tmp_path / "whole-checkpoints"), **settings)  # fmt: skip
    assert sorted(curve(tmp_path / "rest")) == [9]
    assert curve(tmp_path / "rest")[9]["loss"] == pytest.approx(curve(tmp_path / "whole")[9]["loss"], abs=1e-5)


def test_micro_batches_by_tokens_change_nothing(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "pairs", prefix_sharing="off", max_epochs=1)
    for name, settings in {"plain": {"prefix_sharing": "off"}, "shared": {"prefix_sharing": "on"}}.items():
        train(start, pairs, tmp_path / name, batch_tokens=150, max_epochs=1, **settings)
        compare_runs(tmp_path / "pairs", tmp_path / name)
    with pytest.raises(ValueError, match="original depends on the micro-batches"):
        train(start, pairs, tmp_path / "no", batch_tokens=150, contrastive_reduction="original")


def test_lora_run(start, pairs, tmp_path):
    for sharing in ("off", "on"):
        train(start, pairs, tmp_path / sharing, prefix_sharing=sharing, max_epochs=1, lora_rank=4)
    for step, line in curve(tmp_path / "off").items():
        assert curve(tmp_path / "on")[step]["loss"] == pytest.approx(line["loss"], abs=1e-4)


def test_on_is_an_error_where_it_cannot_be_and_auto_says_why(tmp_path, pairs, caplog):
    model = tmp_path / "mistral"
    config = tiny_config("mistral")
    config.sliding_window = 8
    save_tiny_causal_lm(model, "mistral")
    config.architectures = ["MistralForCausalLM"]
    config.save_pretrained(model)
    with pytest.raises(ValueError, match="--prefix_sharing on.*sees 8 tokens"):
        train(model, pairs, tmp_path / "on", prefix_sharing="on")
    with caplog.at_level(logging.INFO):
        train(model, pairs, tmp_path / "auto", max_epochs=1)
    assert "pairs do not share prompts: a layer sees 8 tokens" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("stage,batching", [(2, {}), (3, {}), (2, {"batch_tokens": 150}), (3, {"batch_tokens": 150})])
def test_two_processes_share_rows(stage, batching, start, pairs, tmp_path):
    train(start, pairs, tmp_path / "local", prefix_sharing="off", micro_train_batch_size=2, max_epochs=1)
    flags = arguments(
        start, pairs, tmp_path / "two", prefix_sharing="on", micro_train_batch_size=2, max_epochs=1, zero_stage=stage,
        **batching,
    )  # fmt: skip
    code, output = launch(flags)
    assert code == 0, output[-3000:]
    assert "pairs share prompts" in output
    compare_runs(tmp_path / "local", tmp_path / "two")
