"""Training of a policy by rewards: with and without a critic, in every form of reward, resumed, and refused."""

import json
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from openrlhf.cli import train_ppo
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.prompts import PromptData
from openrlhf.datasets.sft import SFTData
from openrlhf.rewards.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.trainer.engine import OptimizerSettings
from openrlhf.trainer.ppo_config import PPOConfig
from openrlhf.trainer.ppo_models import make_trainer
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.ppo_trainer import PPOTrainer
from tests.runs import curve, largest_difference, ppo_words, weights
from tests.tiny import tiny_config, tiny_reward_model, tiny_tokenizer

TOKENS = 12
FAST = OptimizerSettings(1e-2, (0.9, 0.95), 0.0, 1.0, "constant", 0, 0.0, 1)
TEXTS = [f"how many apples does she buy {word} {n}" for word in ("good", "bad") for n in range(8)]


def stopping_model(share: float = 0.3):
    """A random language model that ends a response at each token with about this probability."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", len(tokenizer)))
    head = nn.Linear(32, len(tokenizer), bias=True)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[tokenizer.eos_token_id] = math.log(share / (1 - share) * (len(tokenizer) - 1))
    model.lm_head = head
    return model, tokenizer


def settings(**changes) -> PPOSettings:
    base = {
        "estimator": "rloo",
        "samples_per_prompt": 4,
        "rollout_batch_size": 16,
        "train_batch_size": 32,
        "micro_train_batch_size": 16,
        "max_new_tokens": TOKENS,
        "episodes": 8,
        "kl_coef": 0.0,
        "seed": 1,
    }
    return PPOSettings(**{**base, **changes})


def length_reward(prompts, completions, completion_ids, **kwargs):
    """TRL's signature: a longer response is better."""
    return [len(ids) / TOKENS for ids in completion_ids]


class LengthModule(nn.Module):
    """The same from the tokens, prompt included."""

    def forward(self, input_ids, attention_mask):
        return attention_mask.sum(1).float() / TOKENS


def train(trainer: PPOTrainer, steps: int | None = None) -> list[dict]:
    figures = []
    while not trainer.done and (steps is None or len(figures) < steps):
        figures.append(trainer.train_step(len(figures)))
    return figures


@pytest.mark.parametrize(
    ("estimator", "reward", "with_value_model"),
    [
        ("gae", length_reward, False),
        ("gae", LengthModule(), True),
        ("rloo", LengthModule(), False),
        ("group_norm", length_reward, False),
        ("reinforce", length_reward, False),
    ],
)
def test_a_length_reward_trains_longer_responses(estimator, reward, with_value_model):
    model, tokenizer = stopping_model()
    value_model = tiny_reward_model(tokenizer=tokenizer) if with_value_model else None
    trainer = make_trainer(
        model, tokenizer, TEXTS, reward, settings(estimator=estimator), value_model=value_model, optimizer=FAST,
        critic_optimizer=FAST, held_out=TEXTS[:4],
    )  # fmt: skip
    figures = train(trainer)
    first, last = (figures[place]["response_length"] for place in (0, -1))
    assert first < 5 and last > 8
    assert trainer.evaluate()["response_length"] > 8
    assert ("value_loss" in figures[0]) == (estimator == "gae")


def test_the_first_update_sees_the_probabilities_of_the_rollout():
    model, tokenizer = stopping_model()
    trainer = make_trainer(
        model, tokenizer, TEXTS, length_reward, settings(train_batch_size=64, temperature=0.7), optimizer=FAST
    )
    figures = trainer.train_step(0)
    assert figures["ratio"] == pytest.approx(1, abs=1e-5) and figures["approx_kl"] < 1e-9
    assert figures["clip_fraction"] == 0 and figures["grad_norm"] > 0


def test_an_update_does_not_depend_on_micro_batches():
    after = []
    for size in (64, 5):
        model, tokenizer = stopping_model()
        changes = {"train_batch_size": 64, "micro_train_batch_size": size, "estimator": "gae", "entropy_coef": 0.1}
        changes |= {"kl_coef": 0.1, "kl_in_loss": True, "kl_kind": "k3"}
        trainer = make_trainer(model, tokenizer, TEXTS, length_reward, settings(**changes), optimizer=FAST)
        figures = trainer.train_step(0)
        after.append([figures[name] for name in ("policy_loss", "entropy_loss", "grad_norm", "value_loss")])
    # The policy loss is a mean of whitened advantages, 0 but for rounding.
    assert after[0] == pytest.approx(after[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("micro_batch_size", [3, 16])
def test_texts_add_their_mean_cross_entropy_to_the_step_of_the_policy(micro_batch_size):
    texts = SFTData([[5, 6, 7 + n] for n in range(20)], [[30 + n] * (n % 4) + [2] for n in range(20)], {}, "")
    gradients, logged = [], []
    for coef in (0.0, 0.7):
        model, tokenizer = stopping_model()
        changes = {"train_batch_size": 16, "micro_train_batch_size": micro_batch_size, "ptx_coef": coef}
        trainer = make_trainer(
            model, tokenizer, TEXTS, length_reward, settings(**changes), texts=texts if coef else None
        )
        rollout = trainer.collect()
        sums = defaultdict(float)
        kept = {}
        trainer.updates = 3  # the fourth batch of texts
        step = trainer.actor.step
        trainer.actor.step = lambda: (kept.update({n: p.grad.clone() for n, p in model.named_parameters()}), step())[1]  # noqa: B023
        trainer.update_policy(rollout, trainer.estimate(rollout)[0], torch.arange(16), sums)
        gradients.append(kept)
        logged.append(sums)
    model, _ = stopping_model()
    order = [np.random.default_rng([1, epoch]).permutation(20) for epoch in range(4)]  # seed 1, 4 passes
    total, count = 0.0, 0
    for row in np.concatenate(order)[3 * 16 : 4 * 16]:
        ids = [5, 6, 7 + row] + [30 + row] * (row % 4) + [2]
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(3, len(ids)):
            total, count = total - table[place - 1, ids[place]], count + 1
    loss = total / count
    (0.7 * loss).backward()
    assert logged[1]["ptx_loss"] == pytest.approx(loss.item(), abs=1e-5) and "ptx_loss" not in logged[0]
    assert logged[1]["policy_loss"] == pytest.approx(logged[0]["policy_loss"], abs=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[1][name], gradients[0][name] + parameter.grad, atol=1e-5), name


def test_no_reference_without_kl_and_a_frozen_one_with_it():
    model, tokenizer = stopping_model()
    assert make_trainer(model, tokenizer, TEXTS, length_reward, settings()).reference is None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(model, tokenizer, TEXTS, length_reward, settings(kl_coef=0.05), optimizer=FAST)
    figures = train(trainer, 2)
    assert figures[0]["kl"] == pytest.approx(0, abs=1e-6) and figures[1]["kl"] > 1e-4
    assert largest_difference(trainer.reference.state_dict(), before) == 0
    assert largest_difference(model.state_dict(), before) > 0


def test_a_large_kl_penalty_holds_the_policy():
    lengths = []
    for coef in (0.0, 20.0):
        model, tokenizer = stopping_model()
        trainer = make_trainer(model, tokenizer, TEXTS, length_reward, settings(kl_coef=coef), optimizer=FAST)
        lengths.append(train(trainer)[-1]["response_length"])
    assert lengths[1] < 6 < 8 < lengths[0]


def test_unscored_and_equal_groups_teach_nothing():
    model, tokenizer = stopping_model()

    def reward(queries, prompts, labels):
        return [None if "bad" in prompt else 1.0 for prompt in prompts]

    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(model, tokenizer, TEXTS, reward, settings(), optimizer=FAST)
    figures = trainer.train_step(0)
    assert figures["unscored_share"] == 0.5 and figures["equal_group_share"] == 1 and figures["learning_share"] == 0
    assert figures["reward"] == 1 and "policy_loss" not in figures
    assert largest_difference(model.state_dict(), before) == 0

    def only_good(queries, prompts, labels, completion_ids=None, responses=None, **_):
        return [None if "bad" in one else float(len(text)) for one, text in zip(prompts, responses, strict=True)]

    trainer = make_trainer(model, tokenizer, TEXTS, only_good, settings(), optimizer=FAST)
    rollout = trainer.collect()
    advantages, _ = trainer.estimate(rollout)
    scored = ~rollout.reward.isnan()
    assert not advantages.loss_mask[~scored].any() and advantages.loss_mask[scored].any()


def test_dynamic_filtering_fills_the_rollout_with_other_prompts():
    model, tokenizer = stopping_model()

    def reward(queries, prompts, labels):
        seen = {}
        place = [seen.setdefault(prompt, []).append(0) or len(seen[prompt]) for prompt in prompts]
        return [0.0 if "bad" in prompt else float(i % 2) for prompt, i in zip(prompts, place, strict=True)]

    changes = {"filter_range": (0.0, 1.0), "rollout_batch_size": 4, "train_batch_size": 16, "episodes": 1}
    trainer = make_trainer(model, tokenizer, TEXTS, reward, settings(**changes), optimizer=FAST)
    figures, kept = [], []
    while not trainer.done:
        rollout = trainer.collect()
        kept.append([] if rollout is None else sorted({sample["prompt"] for sample in rollout.samples}))
    assert [len(one) for one in kept[:2]] == [4, 4] and not any(kept[2:])
    assert sorted(sum(kept, [])) == sorted(text for text in TEXTS if "good" in text)

    trainer = make_trainer(model, tokenizer, TEXTS * 6, lambda queries: [1.0] * len(queries), settings(**changes))
    with pytest.raises(RuntimeError, match="none of 80 prompts passed dynamic filtering"):
        trainer.train_step(0)
    assert figures == []


def test_the_actor_is_frozen_while_the_critic_warms_up():
    model, tokenizer = stopping_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(
        model, tokenizer, TEXTS, length_reward, settings(estimator="gae", freezing_actor_steps=5), optimizer=FAST,
        critic_optimizer=FAST,
    )  # fmt: skip
    figures = train(trainer, 5)
    assert all("policy_loss" not in one and "value_loss" in one for one in figures)
    assert largest_difference(model.state_dict(), before) == 0
    assert figures[4]["squared_error"] < 0.5 * figures[0]["squared_error"]
    assert "policy_loss" in trainer.train_step(5) and largest_difference(model.state_dict(), before) > 0


class AskAgain(AgentInstanceBase):
    """Two actions; both are paid by their length."""

    def __init__(self):
        self.turns = 0

    def step(self, states):
        self.turns += 1
        reward = len(states["action_text"]) / 40
        return {"rewards": reward, "environment_feedback": " more", "done": self.turns == 2}


def test_an_agent_trains_the_policy():
    model, tokenizer = stopping_model()
    trainer = make_trainer(
        model, tokenizer, TEXTS, MultiTurnAgentExecutor(AskAgain), settings(train_batch_size=64, max_len=60),
        optimizer=FAST, held_out=PromptData.of(TEXTS[:4], tokenizer),
    )  # fmt: skip
    figures = train(trainer)
    assert figures[0]["ratio"] == pytest.approx(1, abs=1e-5) and figures[0]["turns"] == 2
    assert figures[-1]["reward"] > figures[0]["reward"] + 0.1
    assert trainer.evaluate()["reward"] > figures[0]["reward"]


def test_settings_and_models_that_do_not_fit_are_refused():
    model, tokenizer = stopping_model()
    critic = tiny_reward_model(tokenizer=tokenizer)
    with pytest.raises(ValueError, match="'rloo' uses no value model"):
        make_trainer(model, tokenizer, TEXTS, length_reward, settings(), value_model=critic)
    with pytest.raises(ValueError, match="16 prompts are fewer than one rollout of 17"):
        make_trainer(model, tokenizer, TEXTS, length_reward, settings(rollout_batch_size=17))
    with pytest.raises(ValueError, match="more than the 64 responses of a rollout"):
        settings(train_batch_size=65)
    with pytest.raises(ValueError, match="k1 in the loss"):
        settings(kl_coef=0.1, kl_in_loss=True)


REWARD_FILE = """
def reward_func(queries, prompts, labels, responses, **kwargs):
    return {"rewards": [len(text) / 40 for text in responses], "extra_logs": {"hits": [1.0] * len(queries)}}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Prompts with labels, and a file with a reward."""
    folder = tmp_path_factory.mktemp("rl")
    rows = [{"question": text, "answer": str(i)} for i, text in enumerate(TEXTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD_FILE)
    return folder


def flags(start, files, out, **changes) -> list[str]:
    values = {
        "pretrain": start,
        "prompt_data": files / "prompts.jsonl",
        "remote_rm_url": files / "reward.py",
        "save_path": out,
        "input_template": "plain",
        "advantage_estimator": "gae",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "generate_max_len": 8,
        "num_episodes": 1,
        "actor_learning_rate": 1e-3,
        "eval_fraction": 0.26,
        "seed": 3,
    } | changes
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", *str(value).split()]
    return words


def run(start, files, out, **changes):
    return train_ppo.run(parse_config(PPOConfig, flags(start, files, out, **changes)))


def numbers(folder, split="train"):
    """Logged metrics without times."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("seconds", "time"))}
        for line in curve(folder, split).values()
    ]


def test_a_resumed_run_equals_an_unbroken_one(start, files, tmp_path, monkeypatch):
    changes = {"num_episodes": 2, "save_steps": 2, "kl_target": 0.05, "init_kl_coef": 0.1}
    changes |= {"pretrain_data": files / "prompts.jsonl"}
    figures = run(start, files, tmp_path / "whole", **changes)
    assert set(figures) >= {"reward", "score", "response_length"}
    step = PPOTrainer.train_step

    def broken(self, place):
        if place == 3:
            raise RuntimeError("power cut")
        return step(self, place)

    monkeypatch.setattr(PPOTrainer, "train_step", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        run(start, files, tmp_path / "cut", **changes)
    assert "failed: RuntimeError · 3 rollouts" in (tmp_path / "cut" / "report.html").read_text()
    monkeypatch.setattr(PPOTrainer, "train_step", step)
    run(start, files, tmp_path / "cut", load_checkpoint=True, **changes)
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "cut")) == 0
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "cut") and len(numbers(tmp_path / "cut")) == 6
    assert numbers(tmp_path / "whole", "eval") == numbers(tmp_path / "cut", "eval")
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("whole", "cut")]
    assert samples[0] == samples[1] and [json.loads(line)["step"] for line in samples[1].split("\n")[:-1]].count(3) > 1
    assert "finished · 6 rollouts" in (tmp_path / "cut" / "report.html").read_text()
    assert {line["kl_coef"] for line in numbers(tmp_path / "cut")} != {0.1}  # the controller moved, and came back
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="gamma: 1.0 then, 0.9 now"):
        run(start, files, tmp_path / "cut", load_checkpoint=True, gamma=0.9, **changes)


def test_the_critic_starts_from_the_reward_model(start, files, tmp_path):
    from openrlhf.models.pretrained import save_reward_model

    tokenizer = tiny_tokenizer()
    (tmp_path / "rm").mkdir()
    save_reward_model(tmp_path / "rm", tiny_reward_model(tokenizer=tokenizer), tokenizer)
    changes = {"remote_rm_url": None, "reward_pretrain": tmp_path / "rm", "reward_template": "plain"}
    config = parse_config(PPOConfig, flags(start, files, tmp_path / "out", **changes))
    critic = train_ppo.load_critic(config, tokenizer)
    assert torch.equal(critic.network.score.weight, tiny_reward_model(tokenizer=tokenizer).network.score.weight)
    figures = train_ppo.run(config)
    assert math.isfinite(figures["reward"])


def test_no_report_is_written_where_it_is_switched_off(start, files, tmp_path):
    run(start, files, tmp_path / "out", no_report=True, label_key="answer", advantage_estimator="rloo")
    assert not (tmp_path / "out" / "report.html").exists()
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    # The prompt that asks for label n is TEXTS[n], and each has a line at the start and at the end.
    assert all(line["prompt"].strip() == TEXTS[int(line["label"])] for line in lines)
    assert [line["place"] for line in lines] == [*range(len(lines) // 2)] * 2


def test_dry_run_rewards_shows_one_call_and_stops(start, files, tmp_path, capsys):
    run(start, files, tmp_path / "out", dry_run_rewards=3, label_key="answer")
    told = capsys.readouterr().out
    assert "one call for 4 samples" in told and told.count("query (str):") == 4  # groups of 2 are kept whole
    for part in ("prompt (str):", "label (str):", "reward:", "rewards: shape (4,), float32", "hits: 1"):
        assert part in told
    assert not (tmp_path / "out").exists()


def test_dry_run_shows_the_settings(start, files, tmp_path, capsys):
    run(start, files, tmp_path / "out", dry_run=True)
    told = capsys.readouterr().out
    assert '"advantage_estimator": "gae"' in told and "[prompt]\nhow many apples" in told
    assert not (tmp_path / "out").exists()


def test_pocket_without_evaluation(tmp_path):
    config = parse_config(PPOConfig, ppo_words(tmp_path / "out", eval_fraction=0))
    assert train_ppo.load_prompts(config, train_ppo.training_tokenizer(config))[1] is None
    config = parse_config(PPOConfig, ppo_words(tmp_path / "out", eval_fraction=0.02))
    assert len(train_ppo.load_prompts(config, train_ppo.training_tokenizer(config))[1]) == 500


def test_several_rewards_are_weighted_and_logged_apart(start, files, tmp_path):
    changes = {"remote_rm_url": f"{files / 'reward.py'},rule", "reward_weights": "1 2", "label_key": "answer"}
    run(start, files, tmp_path / "out", advantage_estimator="rloo", init_kl_coef=0, **changes)
    line = numbers(tmp_path / "out")[0]
    assert any("rule/mean" in name for name in line) and any("reward/hits" in name for name in line)


def test_warnings_are_told_with_what_to_try(start, files, tmp_path, caplog):
    (tmp_path / "same.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")
    changes = {"remote_rm_url": tmp_path / "same.py", "num_episodes": 2, "eval_fraction": 0.26, "init_kl_coef": 0}
    with caplog.at_level("WARNING"):
        run(start, files, tmp_path / "out", advantage_estimator="rloo", **changes)
    assert "Nothing to learn from: in 100% of the prompts all responses score the same." in caplog.text
    assert "To try: use --dynamic_filtering" in caplog.text
    assert [(line["step"], line["equal_rewards"]) for line in curve(tmp_path / "out", "warning").values()] == [(5, 1)]


def test_a_model_that_the_run_reads_is_not_replaced(start, files, tmp_path):
    with pytest.raises(ValueError, match="which this run reads"):
        run(start, files, tmp_path / "critic", critic_pretrain=tmp_path / "critic")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_estimator": "rlo"}, "did you mean 'rloo'"),
        ({"advantage_estimator": "group_norm", "n_samples_per_prompt": 1}, "compares responses to one prompt"),
        ({"advantage_estimator": "rloo", "freezing_actor_steps": 2}, "warms up a critic"),
        ({"advantage_estimator": "rloo", "critic_pretrain": "x"}, "has no critic"),
        ({"train_batch_size": 64}, "more than the 8 responses of a rollout"),
        ({"kl_target": 0.1, "init_kl_coef": 0}, "starting coefficient above 0"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"reward_clip_range": "1 1"}, "lower one first"),
        ({"reward_clip_range": "1"}, "takes two numbers"),
        ({"reward_weights": "1 2"}, "expected 1 numbers, one a source"),
        ({"generate_max_len": 4096}, "leaves no prompt"),
        ({"goal_state_path": "x"}, "goal shaping needs"),
        ({"normalize_reward": True}, "needs a reward model"),
        ({"agent_func_path": "x.py"}, "an agent gives rewards of its own"),
        ({"zero_stage": 3}, "sampling needs them whole"),
        ({"ptx_coef": 0.1}, "name that too"),
        ({"pretrain_data": "pocket", "max_samples": 3, "eval_fraction": 0, "rollout_batch_size": 3}, "3 texts"),
        ({"pretrain_data": "x", "ptx_coef": 0}, "has no effect"),
        ({"prompt_data": None}, "--prompt_data is required"),
        ({"lora_rank": 4}, "trains all weights"),
        ({"use_kl_loss": True}, "k1 in the loss"),
        ({"remote_rm_url": "nowhere.py"}, "found no file"),
        ({"remote_rm_url": "rule"}, "--label_key"),
        ({"label_key": "gold"}, "expected a column 'gold'"),
        ({"prompt_max_len": 2}, "no prompt is left"),
        ({"rollout_batch_size": 100}, "fewer than one rollout of 100"),
    ],
)
def test_bad_settings_end_in_one_clear_error(start, files, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(start, files, tmp_path / "out", **changes)


def test_a_rollout_must_hold_a_prompt_for_each_process(start, files, tmp_path):
    config = parse_config(PPOConfig, flags(start, files, tmp_path / "out"))
    with pytest.raises(ValueError, match="--rollout_batch_size 4 leaves some of 5 processes without a prompt"):
        train_ppo._run(config, SimpleNamespace(world_size=5))


def test_flags_have_the_spellings_of_openrlhf():
    words = "--actor.model_name_or_path m --data.prompt_dataset d --reward.remote_url r --rollout.batch_size 7"
    words += " --actor.adam.lr 0.1 --critic.adam.lr 0.2 --algo.advantage.estimator rloo --algo.kl.init_coef 0"
    words += " --rollout.n_samples_per_prompt 3 --rollout.max_new_tokens 9 --algo.dynamic_filtering_enable"
    words += " --algo.dynamic_filtering_range 0.1 0.9 --actor.eps_clip_low_high 0.2 0.3 --critic.freezing_steps 4"
    config = parse_config(PPOConfig, words.split())
    assert (config.pretrain, config.dataset, config.remote_rm_url, config.rollout_batch_size) == ("m", "d", "r", 7)
    assert (config.learning_rate, config.critic_learning_rate, config.init_kl_coef) == (0.1, 0.2, 0.0)
    assert (config.n_samples_per_prompt, config.generate_max_len, config.dynamic_filtering) == (3, 9, True)
    assert config.dynamic_filtering_reward_range == [0.1, 0.9] and config.eps_clip_low_high == [0.2, 0.3]
    assert config.freezing_actor_steps == 4 and config.advantage_estimator == "rloo"
    flat = parse_config(PPOConfig, ["--actor_learning_rate", "0.5", "--prompt_data", "p", "--lambd", "0.9"])
    assert (flat.learning_rate, flat.dataset, flat.lambd) == (0.5, "p", 0.9)
