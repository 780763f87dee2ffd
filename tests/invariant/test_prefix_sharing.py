"""Packed rows, with and without shared tokens, give the loss, the gradients and the rewards of padded rows."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openrlhf.datasets.preference import PreferenceBatch
from openrlhf.models import reward_model
from openrlhf.models.goal_sampling import draw_states
from openrlhf.models.losses import bradley_terry_loss
from openrlhf.models.packed import pack_rows
from openrlhf.models.packed_attention import attention_for, base_attention
from openrlhf.models.packing_support import forbids_packing, longest_packed, probe, window_of
from openrlhf.models.reward_model import RewardModel
from openrlhf.trainer.engine import LocalEngine
from openrlhf.trainer.plan import TrainingPlan
from openrlhf.trainer.prefix_sharing import forbids_sharing
from openrlhf.trainer.reward_trainer import ContrastiveSettings, MicroBatch, RewardTrainer
from tests.integration.test_engines import launch
from tests.runs import arguments, curve, largest_difference, train, weights
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


def padded(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (R, S) and mask of rows of token ids."""
    shape = len(rows), max(map(len, rows))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask


def batch_of(pairs) -> PreferenceBatch:
    rows = [prompt + response for side in (1, 2) for prompt, response in ((pair[0], pair[side]) for pair in pairs)]
    ids, mask = padded(rows)
    starts = torch.tensor([len(pair[0]) for pair in pairs] * 2)
    response = mask & (torch.arange(ids.shape[1]) >= starts.unsqueeze(1))
    chosen, rejected = torch.arange(len(rows)).chunk(2)
    return PreferenceBatch(
        ids, mask, response, chosen, rejected, torch.ones(len(pairs)), margin=None, index=torch.arange(len(pairs))
    )


def random_groups(seed: int = 0) -> PreferenceBatch:
    """All pairs of correct and wrong responses of four prompts, each response one row; and one row more."""
    generator = np.random.default_rng(seed)
    rows, starts, chosen, rejected, weight = [], [], [], [], []
    template = generator.integers(3, 320, 3).tolist()  # prompts begin alike too
    for correct, wrong in ((3, 2), (1, 1), (1, 4), (2, 1)):
        prompt = template + generator.integers(3, 320, generator.integers(0, 9)).tolist()
        alike = generator.integers(3, 320, 4).tolist()
        first = len(rows)
        for _ in range(correct + wrong):
            begin = alike[: generator.integers(0, 5)]
            rows.append(prompt + begin + generator.integers(3, 320, generator.integers(1, 12)).tolist())
            starts.append(len(prompt))
        for i in range(correct):
            for j in range(wrong):
                chosen.append(first + i)
                rejected.append(first + correct + j)
                weight.append(1 / (correct * wrong))
    ids, mask = padded(rows)
    response = mask & (torch.arange(ids.shape[1]) >= torch.tensor(starts).unsqueeze(1))
    pairs = torch.tensor(chosen), torch.tensor(rejected), torch.tensor(weight)
    return PreferenceBatch(ids, mask, response, *pairs, margin=None, index=torch.arange(4))


def separate(batch: PreferenceBatch) -> PreferenceBatch:
    """The same pairs, every response of every pair a row of its own."""
    rows = torch.cat([batch.chosen, batch.rejected])
    chosen, rejected = torch.arange(len(rows)).chunk(2)
    parts = (x[rows] for x in (batch.input_ids, batch.attention_mask, batch.response_mask))
    return PreferenceBatch(*parts, chosen, rejected, batch.weight, margin=None, index=batch.index)


def losses_and_gradients(
    model: RewardModel, batch: PreferenceBatch, share: bool | None, autocast: bool = False, contrastive=CONTRASTIVE
):
    """(loss, rewards of the pairs, gradients by name) of one backward pass of the trainer; share None: padded rows."""
    engine = LocalEngine(bf16=autocast, device="cpu")
    engine.model = model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # GPT-2; load_reward_model switches it off
            module.p = 0.0
    packed = None if share is None else model.pack(batch.input_ids, batch.attention_mask, share)
    plan = TrainingPlan(examples=1, epochs=1, batch_size=1, micro_batch_size=1)
    trainer = RewardTrainer(engine, None, plan, 0, bradley_terry_loss, contrastive, center_coef=0.1)
    draws = draw_states(len(batch.chosen), 5, 4, torch.Generator().manual_seed(3))
    with engine.autocast():
        loss, _, rewards = trainer._losses(MicroBatch(batch, draws, packed), contrastive.beta)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), torch.cat(batch.split(rewards)), gradients


def assert_equal_training(model, batch, other, share, tolerance, autocast=False, contrastive=CONTRASTIVE):
    """Training on ``other`` with packed rows is training on ``batch`` with padded ones."""
    options = autocast, contrastive
    loss, rewards, gradients = losses_and_gradients(model, batch, None, *options)
    packed_loss, packed_rewards, packed_gradients = losses_and_gradients(model, other, share, *options)
    assert (packed_loss - loss).abs() <= tolerance * loss.abs()
    assert (packed_rewards - rewards).abs().max() <= tolerance * rewards.abs().max()
    assert largest_relative(gradients, packed_gradients) <= tolerance


def largest_relative(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, relative to the largest entry of the whole gradient."""
    assert one.keys() == two.keys() and len(one) > 5
    size = max(gradient.abs().max() for gradient in one.values())
    return max(((one[name] - two[name]).abs().max() / size).item() for name in one)


@pytest.mark.parametrize("strategy", ["cosine_avg", "infonce", "value"])
def test_other_strategies_train_alike_on_packed_groups(strategy):
    batch = random_groups()
    contrastive = replace(CONTRASTIVE, strategy=strategy, start="diverge", temperature=0.3)
    assert_equal_training(tiny_reward_model("llama"), separate(batch), batch, True, 1e-5, contrastive=contrastive)


@pytest.mark.parametrize("slack", [0, 1 << 19])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_rewards_are_those_of_padded_rows(
    family, checkpointing, dtype, tolerance, slack, monkeypatch
):
    if dtype == torch.float64:  # norms and rotary positions of transformers work in float32 whatever the weights are
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(reward_model, "PACKING_SLACK", {False: slack})
    model = tiny_reward_model(family).to(dtype)
    if checkpointing:
        model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pairs, groups = batch_of(random_pairs()), random_groups()
    for share in (True, False):
        assert_equal_training(model, pairs, pairs, share, tolerance)
        assert_equal_training(model, separate(groups), groups, share, tolerance)
    assert_equal_training(model, groups, groups, True, tolerance)
    assert_equal_training(model, separate(groups), separate(groups), True, tolerance)  # equal rows are one


def test_every_state_and_value_is_found_again():
    model, batch = tiny_reward_model("qwen3").double(), random_groups()
    for share in (True, False):
        packed = model.pack(batch.input_ids, batch.attention_mask, share)
        with torch.no_grad():
            rows = model(batch.input_ids, batch.attention_mask)
            found = model(batch.input_ids, batch.attention_mask, packed)
        real = batch.attention_mask
        assert found.hidden_states.shape == rows.hidden_states.shape
        assert (found.hidden_states - rows.hidden_states)[real].abs().max() < 1e-12
        assert (found.values - rows.values)[real].abs().max() < 1e-12
        assert len(packed.input_ids) < real.sum() if share else len(packed.input_ids) == real.sum()


def test_eager_attention_and_other_checkpointing_agree():
    torch.manual_seed(0)
    config = tiny_config("qwen3")
    config.num_labels = 1
    model = RewardModel(AutoModelForSequenceClassification.from_config(config, attn_implementation="eager"))
    model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.network.enable_input_require_grads()
    for batch in (batch_of(random_pairs()), random_groups()):
        assert_equal_training(model, batch, batch, True, 1e-5)


def test_attention_without_masks_asks_with_whole_rows(monkeypatch):
    """What flash-attention gets: no mask, whole rows; here sdpa under another name."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "maskless", ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "maskless", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model, batch = tiny_reward_model("llama"), random_groups()
    model.config._attn_implementation = "maskless"
    packed = model.pack(batch.input_ids, batch.attention_mask)
    assert all(rows.visible is None for rows in packed.attention)
    assert_equal_training(model, batch, batch, True, 1e-5)


def test_bf16_autocast_differs_by_rounding_only():
    model, batch = tiny_reward_model("llama"), batch_of(random_pairs())
    loss, rewards, gradients = losses_and_gradients(model, batch, None, autocast=True)
    packed_loss, packed_rewards, packed_gradients = losses_and_gradients(model, batch, True, autocast=True)
    assert (packed_loss - loss).abs() <= 2e-2 * loss
    assert (packed_rewards - rewards).abs().max() <= 2e-2 * rewards.abs().max()
    assert largest_relative(gradients, packed_gradients) <= 5e-2


def test_load_balancing_loss_counts_every_token_of_rows_that_share_nothing():
    model, batch = tiny_reward_model("mixtral"), batch_of(random_pairs())
    model.with_aux_loss = True
    with torch.no_grad():
        rows = model(batch.input_ids, batch.attention_mask)
        packed = model(
            batch.input_ids, batch.attention_mask, model.pack(batch.input_ids, batch.attention_mask, share=False)
        )
    assert rows.aux_loss > 0 and packed.aux_loss == pytest.approx(rows.aux_loss.item(), rel=1e-5)


def test_packed_rows_by_hand():
    """7 8 5 6, 7 8 5 9 4 and 7 8 9: the tree 7 8 (5 (6, 9 4), 9); numbers follow the order of the tokens."""
    ids, mask = padded([[7, 8, 5, 9, 4], [7, 8, 9], [7, 8, 5, 6]])
    packed = pack_rows(ids, mask)
    assert packed.input_ids.tolist() == [7, 8, 5, 6, 9, 4, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 2]
    assert packed.places.tolist() == [[0, 1, 2, 4, 5], [0, 1, 6, 0, 0], [0, 1, 2, 3, 0]]
    # The first row of the tree asks as a whole; 9 4 and 9 ask alone and see what is before them.
    sizes = [(rows.rows, rows.queries, rows.keys) for rows in packed.attention]
    assert sizes == [(1, 4, 4), (1, 2, 5), (1, 1, 3)]
    assert packed.queries.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert packed.keys.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 6]
    assert packed.attention[0].visible is None
    assert packed.attention[1].visible.int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]
    assert packed.answers.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_calls_hold_rows_of_like_length():
    """Lengths 4, 4, 3, 1 that share nothing: 4 4 3 waste 4 * 4 - 3 * 3 = 7 pairs, 4 4 3 1 waste 7 + 15 = 22."""
    ids, mask = padded([[1, 2, 3, 4], [9], [5, 6, 7, 8], [6, 5, 4]])
    for slack, sizes in ((0, [2, 1, 1]), (6, [2, 1, 1]), (7, [3, 1]), (8, [3, 1]), (21, [3, 1]), (22, [4])):
        assert [rows.rows for rows in pack_rows(ids, mask, slack=slack).attention] == sizes, slack


def test_calls_hold_no_more_keys_than_allowed():
    ids, mask = padded([[1, 2, 3, 4], [9], [5, 6, 7, 8], [6, 5, 4]])
    for keys, sizes in ((1, [1, 1, 1, 1]), (7, [1, 1, 2]), (8, [2, 2]), (12, [3, 1]), (16, [4])):
        assert [rows.rows for rows in pack_rows(ids, mask, slack=99, call_keys=keys).attention] == sizes, keys


def test_a_row_inside_another_and_an_equal_row_cost_nothing():
    ids, mask = padded([[5, 6, 7], [5, 6], [5, 6, 7], [5]])
    packed = pack_rows(ids, mask)
    assert packed.input_ids.tolist() == [5, 6, 7]
    assert packed.places.tolist() == [[0, 1, 2], [0, 1, 0], [0, 1, 2], [0, 0, 0]]
    alone = pack_rows(ids, mask, share=False)
    assert len(alone.input_ids) == 9 and alone.places.tolist() == [[0, 1, 2], [3, 4, 0], [5, 6, 7], [8, 0, 0]]


def test_left_padding_and_empty_rows_are_refused():
    mask = torch.tensor([[False, True], [True, True]])
    with pytest.raises(ValueError, match="padded on the right"):
        pack_rows(torch.ones(2, 2, dtype=torch.long), mask)
    with pytest.raises(ValueError, match="with a token each"):
        pack_rows(torch.ones(2, 2, dtype=torch.long), torch.tensor([[True, True], [False, False]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts_what_works(family):
    model = tiny_reward_model(family)
    assert probe(model, model, torch.float32, model.device) is None


def test_the_probe_finds_a_model_that_ignores_packed_rows_or_fails():
    model = tiny_reward_model()
    plain = model.network.base_model.forward
    model.network.base_model.forward = lambda packed_rows=None, **named: plain(**named)
    assert "differ" in probe(model, model, torch.float32, model.device)
    bloom = AutoConfig.for_model("bloom", vocab_size=320, hidden_size=32, n_layer=2, n_head=4, num_labels=1)
    model = RewardModel(AutoModelForSequenceClassification.from_config(bloom)).eval()
    # its positions are made of a 2-D mask
    assert "computes no packed rows (ValueError" in probe(model, model, torch.float32, model.device)


def limited_view(family: str, **settings) -> RewardModel:
    """A random model of two layers with weights large enough that attention matters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
             "intermediate_size": 64, "num_labels": 1}  # fmt: skip
    network = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **sizes | settings))
    return RewardModel(network).eval()


INDEXED = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
           "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
           "n_group": 1, "topk_group": 1, "index_topk": 24, "index_n_heads": 2, "index_head_dim": 8,
           "num_key_value_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    "family,settings", [("mistral", {"sliding_window": 24, "num_key_value_heads": 2}), ("axk2", INDEXED)]
)
def test_the_probe_sees_what_befalls_long_rows_alone(family, settings):
    """Layers that see 24 tokens; one of them looks its attention up by name, and sees all under ours."""
    model, window = limited_view(family, **settings), 24
    assert window_of(model.config) == window
    ids, mask = torch.arange(80).view(2, 40), torch.ones(2, 40, dtype=torch.bool)
    with torch.no_grad():
        before = model(ids, mask).values
    assert "differ" in probe(model, model, torch.float32, model.device, longest=window + 1)
    with torch.no_grad():
        assert torch.equal(model(ids, mask).values, before)
    assert probe(model, model, torch.float32, model.device, longest=window) is None
    with torch.no_grad():  # rows too long to be packed are as before
        assert torch.equal(model(ids, mask).values, before)


def test_the_probe_refuses_a_model_that_makes_masks_of_its_own():
    model = limited_view("doge", num_key_value_heads=2)  # its masks are learned and begin as none: equal states
    assert "makes its own mask" in probe(model, model, torch.float32, model.device)


def test_passes_of_several_threads_do_not_change_each_others_attention():
    model, batch = tiny_reward_model("llama"), batch_of(random_pairs())
    packed = model.pack(batch.input_ids, batch.attention_mask)
    with torch.no_grad():
        expected = model(batch.input_ids, batch.attention_mask).reward

    @torch.no_grad()
    def rewards(rows) -> list[torch.Tensor]:
        return [model(batch.input_ids, batch.attention_mask, rows).reward for _ in range(100)]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(rewards, [None, packed]):
            torch.testing.assert_close(torch.stack(found), expected.expand(100, -1), rtol=1e-4, atol=1e-5)


def test_packed_attention_is_set_up_once_and_leaves_calls_without_rows_alone():
    model, batch = tiny_reward_model("llama"), batch_of(random_pairs())
    with torch.no_grad():
        before = model(batch.input_ids, batch.attention_mask)
        with attention_for(model.config, packed=True):
            assert model.config._attn_implementation == "packed_sdpa" and base_attention(model.config) == "sdpa"
        assert "packed" not in model.config.to_json_string()
        after = model(batch.input_ids, batch.attention_mask)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(before.hidden_states, after.hidden_states)


def test_settings_that_forbid():
    model = tiny_reward_model("mistral")
    model.config.sliding_window = 20
    assert forbids_packing(model, 20) is None
    assert "sees 20 tokens" in forbids_packing(model, 21) and longest_packed(model) == 20
    model.config.sliding_window = None
    assert longest_packed(model) is None
    assert forbids_packing(model, 21) is None
    assert "dropout" in forbids_sharing(model, 0.1) and forbids_sharing(model, 0.0) is None
    model.with_aux_loss = True
    assert "load-balancing" in forbids_sharing(model, 0.0)
    assert window_of(tiny_config("qwen2")) is None  # has a number for a window that is switched off


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
    assert "rows without padding share prompts" in caplog.text
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
    assert "padded rows that share nothing: a layer sees 8 tokens" in caplog.text


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
    assert "rows without padding share prompts" in output
    compare_runs(tmp_path / "local", tmp_path / "two")


@pytest.mark.parametrize("packs", [True, False])
def test_an_evaluation_before_the_backward_pass_does_not_change_what_it_computes_again(packs):
    """Layers with gradient checkpointing look their attention up again in the backward pass."""
    model = tiny_reward_model("llama").train()
    model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = random_groups()
    packed = model.pack(batch.input_ids, batch.attention_mask, True)
    layouts = [packed, None] if packs else [None, packed]

    def gradients(evaluates: bool) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        reward = model(batch.input_ids, batch.attention_mask, layouts[0]).reward
        if evaluates:
            with torch.no_grad():
                model(batch.input_ids, batch.attention_mask, layouts[1])
        reward.sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert largest_relative(gradients(False), gradients(True)) == 0.0
