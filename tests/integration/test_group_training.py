"""Training on labelled responses: a prompt with several of them is one example."""

import json
import math

import pytest
import torch

from openrlhf.cli import train_rm
from openrlhf.cli.parser import parse_config
from openrlhf.models.goal_sampling import draw_states
from openrlhf.models.pretrained import load_reward_model, load_tokenizer
from openrlhf.trainer.config import TrainRMConfig
from openrlhf.trainer.plan import TrainingPlan, cut_by_tokens, step_generator
from openrlhf.trainer.reward_trainer import RewardTrainer
from tests.integration.test_engines import launch
from tests.runs import arguments, curve, largest_difference, train, weights, write_pairs

SETTINGS = {"responses_per_prompt": 4, "train_batch_size": 6, "micro_train_batch_size": 2}


@pytest.fixture(scope="module")
def solutions(tmp_path_factory):
    """24 questions of 1 to 3 correct and 1 to 3 wrong solutions each, of different lengths."""
    rows = []
    for i in range(24):
        for kind, count in (("good", 1 + i % 3), ("bad", 1 + i // 3 % 3)):
            texts = [f"{'the answer is ' * (1 + (i + k) % 3)}{kind} {k}" for k in range(count)]
            rows += [
                {"question": f"what is {i}", "generated_solution": text, "is_correct": kind == "good"} for text in texts
            ]
    path = tmp_path_factory.mktemp("data") / "solutions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first_losses(start, data, out, **changes) -> tuple[float, float]:
    """Preference and contrastive loss of the first update: loops over all pairs of single-row forward passes."""
    config = parse_config(TrainRMConfig, arguments(start, data, out, **changes))
    examples, _ = train_rm.load_pairs(config, load_tokenizer(start))
    plan = TrainingPlan(len(examples), 1, config.train_batch_size, config.micro_train_batch_size, seed=config.seed)
    groups = [examples[int(i)] for i in plan.indices(0)]
    model = load_reward_model(start, allow_missing_head=True, seed=config.seed).eval()

    @torch.no_grad()
    def forward(prompt, response):
        out = model(torch.tensor([prompt + response]), torch.ones(1, len(prompt) + len(response), dtype=torch.bool))
        return out.reward.item(), out.hidden_states[0, len(prompt) :]  # states of the response alone

    pairs = sum(len(group.correct) * len(group.wrong) for group in groups)
    draws = draw_states(pairs, config.sim_samples, config.unsim_samples, step_generator(config.seed, 0))
    preference, contrast, place = [], [], 0
    for group in groups:
        correct, wrong = ([forward(group.prompt_ids, ids) for ids in side] for side in (group.correct, group.wrong))
        terms, goal_terms = [], []
        for reward, states in correct:
            for wrong_reward, wrong_states in wrong:
                terms.append(math.log1p(math.exp(wrong_reward - reward)))
                goal_terms.append(goal_loss(states, wrong_states, draws, place))
                place += 1
        preference.append(sum(terms) / len(terms))
        contrast.append(sum(goal_terms) / len(goal_terms))
    return sum(preference) / len(groups), sum(contrast) / len(groups)


def goal_loss(states, wrong_states, draws, pair) -> float:
    """The contrastive loss of one pair: sources anywhere, goals from the source on, negatives anywhere."""
    length, wrong_length = len(states), len(wrong_states)
    positive, negative = [], []
    for source_draw, goal_draw in zip(draws.source[pair], draws.goal[pair], strict=True):
        source = int(source_draw * length)
        goal = source + int(goal_draw * (length - source))
        positive.append(torch.cosine_similarity(states[source], states[goal], dim=0).item())
    for source_draw, other_draw in zip(draws.negative_source[pair], draws.negative[pair], strict=True):
        source, other = int(source_draw * length), int(other_draw * wrong_length)
        negative.append(torch.cosine_similarity(states[source], wrong_states[other], dim=0).item())
    pull = sum(math.log1p(math.exp(-value)) for value in positive) / len(positive)
    return pull + sum(math.log1p(math.exp(value)) for value in negative) / len(negative)


@pytest.mark.parametrize("prefix_sharing", ["on", "off"])
@pytest.mark.parametrize(
    "changes", [{}, {"reward_model_strategy": "vanilla"}, {"micro_train_batch_size": 6}, {"batch_tokens": 200}]
)
def test_first_loss_is_that_of_all_pairs_by_hand(changes, prefix_sharing, start, solutions, tmp_path):
    changes = SETTINGS | changes | {"prefix_sharing": prefix_sharing}
    train(start, solutions, tmp_path / "out", max_epochs=1, **changes)
    line = curve(tmp_path / "out")[1]
    preference, contrast = first_losses(start, solutions, tmp_path / "hand", **changes)
    assert line["preference_loss"] == pytest.approx(preference, abs=1e-5)
    if "reward_model_strategy" in changes:
        assert line["loss"] == line["preference_loss"] and "contrastive_loss" not in line
    else:
        assert line["contrastive_loss"] == pytest.approx(contrast, abs=1e-5)
        assert line["loss"] == pytest.approx(preference + 0.5 * contrast, abs=1e-5)


def test_prompts_are_counted_and_kept_apart_from_held_out_ones(start, solutions, tmp_path, capsys):
    out = tmp_path / "out"
    figures = train(start, solutions, out, max_epochs=6, **SETTINGS)
    manifest = json.loads((out / "manifest.json").read_text())
    examples = manifest["data"]["counts"]["examples"]
    assert manifest["total_steps"] == math.ceil(examples * 6 / 6)
    assert figures["accuracy"] == 1.0 and figures["preference_loss"] < curve(out)[1]["preference_loss"]
    config = parse_config(TrainRMConfig, arguments(start, solutions, out, **SETTINGS))
    trained, held_out = train_rm.load_pairs(config, load_tokenizer(start))
    assert len(trained) == examples and figures["pairs"] == held_out.pair_counts.sum() > len(held_out)
    assert not trained.prompt_hashes() & held_out.prompt_hashes()
    capsys.readouterr()
    train(start, solutions, tmp_path / "dry", dry_run=True, **SETTINGS)
    shown = capsys.readouterr().out
    assert f"{examples} training examples" in shown and "[correct: " in shown and "[wrong: " in shown


def test_prompts_computed_once_give_the_run_of_separate_rows(start, solutions, tmp_path):
    for choice in ("on", "off"):
        train(start, solutions, tmp_path / choice, prefix_sharing=choice, **SETTINGS)
    for split in ("train", "eval"):
        shared, separate = curve(tmp_path / "on", split), curve(tmp_path / "off", split)
        assert sorted(shared) == sorted(separate)
        for step, line in separate.items():
            names = [name for name in ("loss", "preference_loss", "contrastive_loss", "accuracy") if name in line]
            assert {name: shared[step][name] for name in names} == pytest.approx(
                {name: line[name] for name in names}, abs=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize("stage,batching", [(2, {"batch_tokens": 150}), (3, {})])
def test_two_processes_train_on_groups(stage, batching, start, solutions, tmp_path):
    settings = SETTINGS | {"micro_train_batch_size": 1}
    train(start, solutions, tmp_path / "local", prefix_sharing="off", **settings)
    flags = arguments(
        start, solutions, tmp_path / "two", prefix_sharing="on", zero_stage=stage, **(settings | batching)
    )
    code, output = launch(flags)
    assert code == 0, output[-3000:]
    for split in ("train", "eval"):
        one, two = curve(tmp_path / "local", split), curve(tmp_path / "two", split)
        assert sorted(one) == sorted(two)
        for step, line in one.items():
            assert two[step]["loss"] == pytest.approx(line["loss"], abs=1e-4), (split, step)


def test_padded_rows_stay_within_a_bound_on_tokens(start, solutions, tmp_path):
    config = parse_config(TrainRMConfig, arguments(start, solutions, tmp_path, **SETTINGS))
    data, _ = train_rm.load_pairs(config, load_tokenizer(start))
    tokens, padded = RewardTrainer(None, data, TrainingPlan(1, 1, 1, 1), 0, None)._tokens(data)
    batches = cut_by_tokens(tokens, 240, padded)
    assert len(set(data.row_counts)) > 1 and max(map(len, batches)) > 1
    assert all(len(places) == 1 or data.collate(places, 0).input_ids.numel() <= 240 for places in batches)


def test_evaluation_rows_may_be_pairs(start, solutions, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    figures = train(start, solutions, tmp_path / "out", max_epochs=1, eval_dataset=pairs, **SETTINGS)
    assert figures["pairs"] == 12


def test_resume_equals_the_unbroken_run(start, solutions, tmp_path, monkeypatch):
    class Stop(Exception):
        """Stands for a killed process."""

    real_step = RewardTrainer.train_step

    def step_or_stop(self, step):
        if step == 5:
            raise Stop
        return real_step(self, step)

    train(start, solutions, tmp_path / "whole", **SETTINGS)
    monkeypatch.setattr(RewardTrainer, "train_step", step_or_stop)
    with pytest.raises(Stop):
        train(start, solutions, tmp_path / "broken", save_steps=2, **SETTINGS)
    monkeypatch.undo()
    train(start, solutions, tmp_path / "broken", save_steps=2, load_checkpoint=True, **SETTINGS)
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "broken")) == 0.0
    whole, resumed = curve(tmp_path / "whole"), curve(tmp_path / "broken")
    assert sorted(whole) == sorted(resumed) and all(whole[k]["loss"] == resumed[k]["loss"] for k in whole)


def test_other_data_and_other_groups_are_refused(start, solutions, tmp_path):
    with pytest.raises(ValueError, match="train_rm --responses_per_prompt"):
        train(start, solutions, tmp_path / "out")
    with pytest.raises(ValueError, match="--responses_per_prompt needs labelled responses"):
        train(start, write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "out", **SETTINGS)
    with pytest.raises(ValueError, match="evaluation rows are the training rows"):
        train(start, solutions, tmp_path / "out", eval_dataset=solutions, **SETTINGS)
    assert not (tmp_path / "out").exists()
    train(start, solutions, tmp_path / "out", max_epochs=1, save_steps=2, **SETTINGS)
    with pytest.raises(ValueError, match="responses_per_prompt: 4 then, 5 now"):
        changes = SETTINGS | {"responses_per_prompt": 5}
        train(start, solutions, tmp_path / "out", max_epochs=1, save_steps=2, load_checkpoint=True, **changes)


def test_an_error_of_evaluation_rows_says_so(start, solutions, tmp_path):
    one_sided = [{"question": f"q {i}", "generated_solution": "yes", "is_correct": True} for i in range(3)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one_sided))
    with pytest.raises(
        ValueError, match="^evaluation rows: no prompt has both .*questions_without_wrong 3.*max_samples"
    ):
        train(start, solutions, tmp_path / "out", eval_dataset=tmp_path / "eval.jsonl", **SETTINGS)
