"""Rollouts: places of prompts, rewards and masks, and log-probabilities against a plain loop over rows."""

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.datasets.prompts import PromptData, PromptOptions, prepare_prompts
from openrlhf.models.generation import PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.rewards.adapting import as_reward_source
from openrlhf.rewards.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.rewards.source import RewardResult
from openrlhf.trainer.rollout import Rollout, Sampling, base_seed, episode_rollout, sample_rollout
from openrlhf.trainer.rollout_logprobs import with_logprobs
from tests.tiny import tiny_config, tiny_reward_model, tiny_tokenizer

SAMPLING = Sampling(temperature=0.7, max_new_tokens=6, max_len=40)


@pytest.fixture(scope="module")
def policy():
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(tiny_config("llama", len(tokenizer))), tokenizer)


@pytest.fixture(scope="module")
def prompts(policy):
    return PromptData.of(
        ["how many", "what is the answer of this question", "buy", "sell good apples"],
        policy.tokenizer,
        labels=["a", "b", "c", "d"],
        columns={"weight": [1, 2, 3, 4]},
    )


def rollout_of(policy, prompts, reward, indices=(2, 0), **options):
    return sample_rollout(
        policy, prompts, indices, as_reward_source(reward), SAMPLING, samples_per_prompt=2, seed=5, **options
    )


def test_samples_of_a_prompt_stand_together_with_their_columns(policy, prompts):
    seen = {}

    def reward(queries, prompts, labels, weight, step, **_):
        seen.update(queries=queries, prompts=prompts, labels=labels, weight=weight, step=step)
        return [1.0, None, 3.0, 4.0]

    rollout = rollout_of(policy, prompts, reward, first_group=7, step=9)
    assert seen["labels"] == ["c", "c", "a", "a"] and seen["weight"] == [3, 3, 1, 1] and seen["step"] == 9
    assert seen["prompts"] == ["buy", "buy", "how many", "how many"]
    assert rollout.group.tolist() == [7, 7, 8, 8]
    assert rollout.reward.isnan().tolist() == [False, True, False, False] and rollout.reward[2] == 3
    for row in range(4):
        start = len(prompts.ids[[2, 2, 0, 0][row]])
        end = int(rollout.lengths[row])
        assert rollout.input_ids[row, :start].tolist() == prompts.ids[[2, 2, 0, 0][row]]
        assert rollout.action_mask[row].nonzero().flatten().tolist() == list(range(start, end))
        assert seen["queries"][row].startswith(seen["prompts"][row])
    assert rollout.samples[1]["reward"] is None


def test_the_same_seed_draws_the_same_in_any_batch(policy, prompts):
    def reward(queries):
        return [0.0] * len(queries)

    one = rollout_of(policy, prompts, reward)
    few = sample_rollout(
        policy, prompts, (2, 0), as_reward_source(reward), Sampling(0.7, 1.0, 6, batch_tokens=1),
        samples_per_prompt=2, seed=5,
    )  # fmt: skip
    assert torch.equal(one.input_ids, few.input_ids)
    assert len({tuple(row) for row in one.input_ids[:2].tolist()}) == 2  # samples of one prompt differ
    assert base_seed(1, 2) != base_seed(1, 3) != base_seed(1, 2, stream=1)


def same_rows(one, two):
    for name in ("input_ids", "attention_mask", "action_mask", "group", "reward"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_shares_of_a_rollout_are_the_rollout(policy, prompts):
    def reward(responses, **_):
        return {"rewards": [float(len(text)) for text in responses], "extra_logs": {"n": [1.0] * len(responses)}}

    whole = rollout_of(policy, prompts, reward, indices=(2, 0, 1), first_group=4)
    parts = [
        rollout_of(policy, prompts, reward, indices=(2,), first_group=4),
        rollout_of(policy, prompts, reward, indices=(0, 1), first_group=5, first_sample=2),
    ]
    joined = Rollout.join(parts, 0, at_once=True)
    same_rows(whole, joined)
    assert joined.samples == whole.samples
    assert [value for name, value in joined.logs.items() if name.endswith("/n")] == [1]
    assert joined.logs["seconds_sampling"] == max(part.logs["seconds_sampling"] for part in parts)
    filled = with_logprobs(whole, policy.model, None, None, temperature=0.7, batch_size=2)
    rows = torch.tensor([3, 1, 0]), torch.tensor([2, 5, 4])
    shares = [
        (one, with_logprobs(whole.select(one), policy.model, None, None, temperature=0.7, batch_size=3).computed)
        for one in rows
    ]
    again = whole.with_computed(shares)
    assert again.values is None and set(again.computed) == {"logprobs", "entropy"}
    for name, tensor in filled.computed.items():
        assert torch.allclose(again.computed[name], tensor, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_logprobs_entropies_and_values_equal_a_loop_over_rows(policy, prompts, batch_size):
    rollout = rollout_of(policy, prompts, lambda queries: [0.0] * len(queries), indices=(1, 2, 3))
    critic = tiny_reward_model(tokenizer=policy.tokenizer)
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(policy.model.config).eval()
    full = with_logprobs(rollout, policy.model, reference, critic, temperature=0.7, batch_size=batch_size)
    for row in range(len(full)):
        ids = full.input_ids[row, : int(full.lengths[row])]
        with torch.no_grad():
            tables = [(model(ids[None]).logits[0] / 0.7).log_softmax(-1) for model in (policy.model, reference)]
            values = critic(ids[None], torch.ones_like(ids[None])).values[0]
        for column in range(full.input_ids.shape[1]):
            expected = [0.0] * 4
            if full.action_mask[row, column]:
                before = column - 1
                ours, theirs = tables[0][before], tables[1][before]
                token = ids[column]
                expected = [ours[token], theirs[token], -(ours.exp() * ours).sum(), values[before]]
            found = [full.logprobs, full.reference_logprobs, full.entropy, full.values]
            for tensor, number in zip(found, expected, strict=True):
                assert tensor[row, column].item() == pytest.approx(float(number), abs=2e-5)


def test_dense_rewards_lie_on_the_tokens_of_the_response(policy, prompts):
    class Dense:
        name = "dense"

        def score(self, request):
            rewards = np.zeros(len(request), np.float32)
            dense = [np.arange(1, len(ids) + 1, dtype=np.float32) for ids in request.response_ids]
            return RewardResult(rewards, rewards, dense)

        def close(self):
            pass

    rollout = rollout_of(policy, prompts, Dense())
    for row in range(len(rollout)):
        kept = rollout.action_mask[row]
        assert rollout.dense[row][kept].tolist() == list(range(1, int(kept.sum()) + 1))
        assert not rollout.dense[row][~kept].any()
        assert rollout.total[row] == sum(range(1, int(kept.sum()) + 1))


class TwoTurns(AgentInstanceBase):
    """Feedback after the first action; rewards 0.25 and 2."""

    def reset(self, states):
        self.turn = 0
        return {"observation": states["observation"]}

    def step(self, states):
        self.turn += 1
        return {"rewards": [0.25, 2.0][self.turn - 1], "environment_feedback": " more", "done": self.turn == 2}


def test_episodes_keep_feedback_out_of_the_actions(policy, prompts):
    rollout = episode_rollout(
        PolicyEngine(policy), prompts, [0, 2], MultiTurnAgentExecutor(TwoTurns), SAMPLING, samples_per_prompt=2, seed=1
    )
    assert rollout.group.tolist() == [0, 0, 1, 1]
    feedback = len(policy.tokenizer(" more", add_special_tokens=False)["input_ids"])
    for row in range(4):
        mask = rollout.action_mask[row].tolist()
        start = len(prompts.ids[[0, 0, 2, 2][row]])
        assert not any(mask[:start]) and mask[start]
        first_end = next(column for column in range(start, len(mask)) if not mask[column])
        assert rollout.dense[row].nonzero().flatten().tolist() == [first_end - 1]  # the first action's last token
        assert rollout.dense[row, first_end - 1] == 0.25 and rollout.reward[row] == 2.0
        assert not any(mask[first_end : first_end + feedback]) and mask[first_end + feedback]
        assert sum(mask) == int(rollout.lengths[row]) - start - 2 * feedback  # the last feedback is no action either
    assert rollout.total.tolist() == [2.25] * 4


def test_joined_rollouts_are_the_rows_of_both(policy, prompts):
    def reward(queries):
        return [float(len(query)) for query in queries]

    first, second = (rollout_of(policy, prompts, reward, indices=one, first_group=one[0]) for one in [(1,), (2, 0)])
    joined = Rollout.join([first, second], policy.tokenizer.pad_token_id)
    assert len(joined) == 6 and joined.reward.tolist() == first.reward.tolist() + second.reward.tolist()
    again = joined.select(torch.arange(2, 6))
    assert torch.equal(again.input_ids, second.input_ids) and torch.equal(again.action_mask, second.action_mask)
    with pytest.raises(ValueError, match="without a token of the policy"):
        Rollout(**{**vars(first), "action_mask": torch.zeros_like(first.action_mask)})


def test_the_label_column_comes_under_its_own_name_too(policy):
    """As TRL's functions ask for it; the fingerprint stays that of labels and other columns."""
    rows = [{"question": None, "answer": "x", "level": 0}]
    rows += [{"question": text, "answer": label, "level": 1} for text, label in (("buy", "a"), ("sell", "b"))]
    data = prepare_prompts(datasets.Dataset.from_list(rows), policy.tokenizer, PromptOptions(label_key="answer"))
    assert data.labels == ["a", "b"] and data.columns == {"level": [1, 1], "answer": ["a", "b"]}
    plain = PromptData.of(["buy", "sell"], policy.tokenizer, labels=["a", "b"], columns={"level": [1, 1]})
    assert data.fingerprint == plain.fingerprint
    seen = []

    def reward(completions, answer, **kwargs):
        seen.append(answer)
        return [1.0] * len(completions)

    def by_default(completions, answer=None):
        return reward(completions, answer)

    def openrlhf(queries, prompts, labels, **kwargs):
        seen.append(kwargs["answer"])
        return [float(label == answer) for label, answer in zip(labels, kwargs["answer"], strict=True)]

    for function in (reward, by_default, openrlhf):
        rollout = rollout_of(policy, data, function, indices=(1, 0))
        assert seen[-1] == ["b", "b", "a", "a"] and rollout.reward.tolist() == [1, 1, 1, 1]


def test_prompts_that_do_not_fit_are_counted(policy):
    data = PromptData.of(["buy", "what is the answer of this question " * 5, ""], policy.tokenizer, max_len=10)
    assert dict(data.counts) == {"read": 3, "empty": 1, "kept": 1, "too_long": 1} and data.texts == ["buy"]
    with pytest.raises(ValueError, match="no prompt is left of 1"):
        PromptData.of(["what is the answer of this question"], policy.tokenizer, max_len=2)
    with pytest.raises(ValueError, match="expected 2 labels, one a prompt, got 1"):
        PromptData.of(["buy", "sell"], policy.tokenizer, labels=["a"])
