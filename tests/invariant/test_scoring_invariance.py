"""A score is a property of its text: batch size, order, padding, shared prompts and processes do not change it."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import threading

import numpy as np
import pytest
import torch

from openrlhf.datasets.completions import Completion
from openrlhf.evaluation.goal_state import GoalState, QuestionGoals, compute_goal_state
from openrlhf.evaluation.scored_files import ScoringJob, score_jobs
from openrlhf.evaluation.scoring import Scorer, encode_completions, score_encoded
from openrlhf.models.packing_support import probe
from openrlhf.models.prompt_cache import compute_prompts
from openrlhf.models.reward_model import RewardModel, initialise_head
from tests.tiny import FAMILIES, tiny_config, tiny_reward_model, tiny_tokenizer

WORDS = ["the", "answer", "is", "apples", "good", "bad", "plus", "7", "31"]
ENCODE = {"template": "plain", "apply_chat_template": False, "max_len": 110}


def completions(questions: int = 5, samples: int = 6) -> list[Completion]:
    """Several solutions a question, of different lengths, two of them equal; questions of different lengths."""
    generator = np.random.default_rng(1)
    texts = []
    for question in range(questions):
        for sample in range(samples):
            words = " ".join(generator.choice(WORDS, generator.integers(1, 18)))
            texts.append(Completion("what is 4 plus " * (question % 3 + 1) + str(question), words, sample=sample))
        texts[-1] = dataclasses.replace(texts[-2], sample=samples - 1)
    return texts


def goal(hidden: int = 32) -> GoalState:
    vector = np.random.default_rng(2).normal(size=(1, hidden)).astype(np.float32)
    return GoalState(vector, 3, 1.0, "plain", False, 120, "c", "d")


def alone(model: RewardModel, tokenizer, texts: list[Completion]) -> list[tuple[list[float], list[float]]]:
    """Values and goal similarities of every text by a forward pass of its own, without padding."""
    found = []
    for one in encode_completions(tokenizer, texts, **ENCODE):
        with torch.no_grad():
            out = model(torch.tensor([one.ids]), torch.ones(1, len(one.ids), dtype=torch.bool))
        states = out.hidden_states[0, -one.num_actions :]
        cosines = torch.nn.functional.cosine_similarity(states, torch.from_numpy(goal().vector), dim=-1)
        found.append((out.values[0, -one.num_actions :].tolist(), cosines.tolist()))
    return found


def assert_same(scored, wanted) -> None:
    for one, (values, cosines) in zip(scored, wanted, strict=True):
        assert one.partial_rewards == pytest.approx(values, abs=1e-5)
        assert one.cosine_sim == pytest.approx(cosines, abs=1e-5)
        assert one.reward == one.partial_rewards[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_batches_and_order_do_not_change_a_score(family):
    tokenizer = tiny_tokenizer(add_bos=True)
    model, texts = tiny_reward_model(family, tokenizer), completions()
    wanted = alone(model, tokenizer, texts)
    assert probe(model, model, torch.float32, model.device) is None
    for share in (True, False):
        for batch_tokens in (1, 150, 100_000):
            encoded = encode_completions(tokenizer, texts, **ENCODE)
            scored = score_encoded(
                model, encoded, goal=goal(), batch_tokens=batch_tokens, share_prompts=share, progress=False
            )
            assert_same(scored, wanted)
    order = np.random.default_rng(3).permutation(len(texts))
    shuffled = encode_completions(tokenizer, [texts[i] for i in order], **ENCODE)
    assert_same(score_encoded(model, shuffled, goal=goal(), progress=False), [wanted[i] for i in order])


@pytest.mark.parametrize("window", [8, 24])  # narrower than the probe's rows, and wider than some rows alone
def test_rows_longer_than_a_window_are_scored_whole(window, caplog):
    from transformers import AutoModelForSequenceClassification

    tokenizer = tiny_tokenizer()
    config = tiny_config("mistral")
    config.sliding_window, config.num_labels = window, 1
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config)
    initialise_head(network.score, 32, 0)
    model, texts = RewardModel(network).eval(), completions()
    wanted = alone(model, tokenizer, texts)
    config = copy.deepcopy(config)
    config.sliding_window = None
    with torch.no_grad():  # the window matters at these lengths
        unlimited = AutoModelForSequenceClassification.from_config(config)
        unlimited.load_state_dict(network.state_dict())
        others = alone(RewardModel(unlimited).eval(), tokenizer, texts)
    assert (
        max(abs(a - b) for (x, _), (y, _) in zip(wanted, others, strict=True) for a, b in zip(x, y, strict=True)) > 1e-4
    )
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    longer = len({tuple(one.ids) for one in encoded if len(one) > window})
    assert 0 < longer < len(encoded) or window == 8
    with caplog.at_level(logging.INFO):
        assert_same(score_encoded(model, encoded, goal=goal(), progress=False), wanted)
    told = "share nothing" if window == 8 else f"{longer} of"
    assert told in caplog.text
    behind_cached_prompts = score_encoded(model, encoded, goal=goal(), batch_tokens=1, progress=False)
    assert_same(behind_cached_prompts, wanted)


COMMON = {
    "vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32, "head_dim": 8,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 256, "num_labels": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
STATE_SPACE = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8}
ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0}
ARCHITECTURES = {  # model type, its settings, and whether its rows can be packed
    "windows in some layers": ("gemma3_text", WINDOWS, True),
    "window and soft cap": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 8}, True),
    "experts": ("mixtral", EXPERTS, True),
    "linear attention in some layers": ("qwen3_next", EXPERTS | LINEAR, False),
    "state space in some layers": ("jamba", STATE_SPACE, False),
    "positions by length": ("phi3", {"original_max_position_embeddings": 20, "rope_parameters": ROPE}, True),
}


def build(model_type: str, settings: dict) -> RewardModel:
    """A random network whose attention is far from uniform."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **COMMON | settings))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return RewardModel(network.float()).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unusual_architectures_are_scored_as_each_row_alone(name):
    tokenizer, texts = tiny_tokenizer(), completions()
    model_type, settings, packable = ARCHITECTURES[name]
    model = build(model_type, settings)
    wanted = alone(model, tokenizer, texts)
    assert (probe(model, model, torch.float32, model.device) is None) == packable
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    for batch_tokens in (150, 100_000):
        assert_same(score_encoded(model, encoded, goal=goal(), batch_tokens=batch_tokens, progress=False), wanted)


def test_goal_state_keeps_rows_on_either_side_of_a_change_of_positions_apart():
    tokenizer, texts = tiny_tokenizer(), completions()
    model_type, settings, _ = ARCHITECTURES["positions by length"]
    model = build(model_type, settings)
    assert model.switch_length == 20
    rows = [one.ids for one in encode_completions(tokenizer, texts, **ENCODE)]
    assert min(map(len, rows)) <= 20 < max(map(len, rows))
    options = {"template": "plain", "max_len": 110, "checkpoint": "c", "dataset": "d", "progress": False}
    together, single = (compute_goal_state(model, rows, batch_tokens=n, **options).vector for n in (100_000, 1))
    np.testing.assert_allclose(together, single, atol=1e-5)


def test_shared_beginnings_and_equal_rows_are_computed_once():
    tokenizer = tiny_tokenizer()
    model, texts = tiny_reward_model("llama", tokenizer), completions(questions=4, samples=10)
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    scorer, seen = Scorer(model), []
    base = model.network.base_model
    base.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True)
    scorer.score(encoded)
    beginnings = {tuple(one.ids[:end]) for one in encoded for end in range(1, len(one) + 1)}
    assert seen == [len(beginnings)]
    assert len(beginnings) < sum(map(len, encoded)) - 9 * sum(map(len, {tuple(one.prompt_ids) for one in encoded}))


def test_long_prompts_are_computed_once_and_not_in_every_pack():
    tokenizer = tiny_tokenizer()
    model, texts = tiny_reward_model("llama", tokenizer), completions(questions=3, samples=10)
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    prompts = {tuple(one.prompt_ids) for one in encoded}
    limit = 4 * sorted(map(len, prompts))[1]  # one prompt is longer than a quarter of it
    long = max(prompts, key=len)
    scorer, seen = Scorer(model, goal(), batch_tokens=limit), []
    base = model.network.base_model
    base.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    assert_same(scorer.score(encoded), alone(model, tokenizer, texts))
    seen = seen[: -len(encoded)]  # without those of alone()
    begins = [row[: len(long)].tolist() == list(long) for ids in seen for row in ids if len(row) >= len(long)]
    assert begins.count(True) == 1 and [ids.tolist() for ids in seen].count([list(long)]) == 1


def test_each_question_is_compared_with_its_own_goal():
    tokenizer = tiny_tokenizer()
    model, texts = tiny_reward_model("llama", tokenizer), completions(questions=4, samples=3)
    questions = list(dict.fromkeys(one.question for one in texts))[1:]  # the first has no goal
    vectors = np.random.default_rng(5).normal(size=(3, 32)).astype(np.float32)
    goals = QuestionGoals(vectors, tuple(questions), (1, 1, 1), 1.0, "plain", False, 110, "c", "d")
    encoded = encode_completions(tokenizer, texts, **ENCODE)
    asked = [one.question for one in texts]
    for batch_tokens in (1, 60, 100_000):
        scored = score_encoded(
            model, encoded, goal=goals, questions=asked, batch_tokens=batch_tokens, progress=False
        )  # fmt: skip
        for one, found in zip(encoded, scored, strict=True):
            with torch.no_grad():
                states = model(torch.tensor([one.ids]), torch.ones(1, len(one))).hidden_states[0, -one.num_actions :]
            question = texts[encoded.index(one)].question
            if question not in questions:
                assert found.cosine_sim is None
                continue
            vector = torch.from_numpy(vectors[questions.index(question)])
            wanted = torch.nn.functional.cosine_similarity(states, vector, dim=-1)
            assert found.cosine_sim == pytest.approx(wanted.tolist(), abs=1e-5)


class Thread(threading.Thread):
    """One of several processes of an evaluation, played by a thread."""

    def __init__(self, rank: int, world: list, barrier: threading.Barrier, work):
        super().__init__()
        self.rank, self.world_size, self.world, self.barrier, self.work = rank, len(world), world, barrier, work

    def run(self) -> None:
        self.result = self.work(self)

    def gather_objects(self, value):
        self.gathered = [*getattr(self, "gathered", []), value]
        self.world[self.rank] = value
        self.barrier.wait()
        values = list(self.world)
        self.barrier.wait()
        return values


def in_ranks(count: int, work) -> list:
    world, barrier = [None] * count, threading.Barrier(count, timeout=60)
    ranks = [Thread(rank, world, barrier, work) for rank in range(count)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return [one.result for one in ranks]


def test_number_of_processes_does_not_change_files_or_scores(tmp_path):
    tokenizer = tiny_tokenizer()
    texts = completions(questions=7)
    model = tiny_reward_model("llama", tokenizer)
    wanted = alone(model, tokenizer, texts)
    for count in (1, 3):
        path = tmp_path / f"{count}.jsonl"

        def work(ranks, path=path):
            return score_jobs(
                model, tokenizer, [ScoringJob(texts, path)], **ENCODE, goal=goal(), batch_tokens=300,
                ranks=ranks, keep_rows=True, progress=False,
            )  # fmt: skip

        results = in_ranks(count, work)
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        assert all(result == [rows] for result in results)  # every process has all rows, the main one wrote them
        for row, (values, cosines) in zip(rows, wanted, strict=True):
            assert row["partial_rewards"] == pytest.approx(values, abs=1e-5)
            assert row["cosine_sim"] == pytest.approx(cosines, abs=1e-5)


def test_one_question_of_many_samples_is_shared_by_all_processes():
    tokenizer = tiny_tokenizer()
    texts = completions(questions=1, samples=20)
    model = tiny_reward_model("llama", tokenizer)
    encoded = encode_completions(tokenizer, texts, **ENCODE)

    def work(ranks):
        scored = Scorer(model, goal(), ranks=ranks).score(encoded)
        return scored, [len(value) for value in ranks.gathered]

    results = in_ranks(3, work)
    assert sorted(count for _, (count,) in results) == [6, 6, 7]  # 19 different ones
    for scored, _ in results:
        assert_same(scored, alone(model, tokenizer, texts))


def test_files_of_one_benchmark_are_scored_together_and_resume_apart(tmp_path):
    tokenizer = tiny_tokenizer()
    model = tiny_reward_model("llama", tokenizer)
    texts = completions(questions=6, samples=4)
    files = [[text for text in texts if text.sample == sample] for sample in range(4)]
    jobs = [ScoringJob(part, tmp_path / f"output-rs{i}.jsonl") for i, part in enumerate(files)]
    options = ENCODE | {"goal": goal(), "batch_tokens": 20, "progress": False}
    score_jobs(model, tokenizer, jobs, **options)
    whole = [job.out_path.read_bytes() for job in jobs]
    for part, data in zip(files, whole, strict=True):
        assert [json.loads(line)["generated_solution"] for line in data.decode().split("\n")[:-1]] == [
            text.generated_solution for text in part
        ]
    cuts = [0, len(whole[1]), len(whole[2]) // 2, whole[3].index(b"\n") + 1]
    for job, data, cut in zip(jobs, whole, cuts, strict=True):
        job.out_path.write_bytes(data[:cut])
    score_jobs(model, tokenizer, jobs, **options)
    for job, data in zip(jobs, whole, strict=True):
        old, new = (
            [json.loads(line) for line in d.decode().split("\n")[:-1]] for d in (data, job.out_path.read_bytes())
        )
        assert len(old) == len(new)
        for a, b in zip(old, new, strict=True):
            assert a["partial_rewards"] == pytest.approx(b["partial_rewards"], abs=1e-5)
            assert {**a, "partial_rewards": 0, "cosine_sim": 0, "reward": 0} == {
                **b, "partial_rewards": 0, "cosine_sim": 0, "reward": 0,
            }  # fmt: skip


def test_token_ends_spell_the_solution():
    tokenizer = tiny_tokenizer()
    texts = ["the answer is 42.", "naïve \U0001f642 ok", "", "a b\nc  d", "\u2028x"]
    encoded = encode_completions(tokenizer, [Completion("q", text) for text in texts], **ENCODE)
    for one, text in zip(encoded, texts, strict=True):
        starts = [0, *one.token_ends[:-1]]
        assert len(one.token_ends) == one.num_actions
        assert "".join(text[a:b] for a, b in zip(starts, one.token_ends, strict=True)) == text
    long = Completion("q", "7" * 200)  # one token a digit; cut to what fits, the EOS ends where the last digit does
    (one,) = encode_completions(tokenizer, [long], **ENCODE | {"max_len": 20})
    assert one.truncated and one.token_ends == [*range(1, one.num_actions), one.num_actions - 1]


def test_goal_of_another_size_is_refused_before_scoring():
    with pytest.raises(ValueError, match="hidden size 16, the reward model 32"):
        Scorer(tiny_reward_model("llama", tiny_tokenizer()), goal(16))


def test_cached_prompts_are_computed_by_the_models_own_attention_after_packed_rows():
    model, ids = tiny_reward_model("llama"), torch.tensor([[5, 6, 7], [5, 6, 8]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    names = []
    model.network.base_model.layers[0].register_forward_hook(lambda *_: names.append(model.config._attn_implementation))
    for context in (torch.inference_mode(), torch.enable_grad()):
        with context:
            model.read_packed(model.pack(ids, mask))
            compute_prompts(model, ids, mask)
    assert names == ["packed_sdpa", "sdpa"] * 2
    assert model.config._attn_implementation == "sdpa"
