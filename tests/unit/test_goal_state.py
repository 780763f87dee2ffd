"""Goal state: the mean over responses whatever the batches, its files, and the cosine to it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from openrlhf.evaluation.batching import token_batches
from openrlhf.evaluation.goal_state import GoalState, compute_goal_state, goal_similarity, last_state
from tests.tiny import tiny_reward_model

GOAL = GoalState(np.array([[3.0, 4.0]], dtype=np.float32), 7, 5.5, "nemo", False, 64, "aaaa", "rows.jsonl")


def sequences(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [[*generator.integers(3, 300, generator.integers(1, 40)).tolist(), 2] for _ in range(count)]


def goal_of(model, texts, batch_tokens: int) -> GoalState:
    return compute_goal_state(
        model,
        iter(texts),
        batch_tokens=batch_tokens,
        template="plain",
        max_len=64,
        checkpoint="c",
        dataset="d",
        progress=False,
    )


def test_goal_state_is_the_mean_of_single_last_states():
    model, texts = tiny_reward_model(), sequences(9)
    with torch.no_grad():
        states = [
            model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)).hidden_states[0, -1] for ids in texts
        ]
    goal = goal_of(model, texts, 100)
    assert goal.vector.shape == (1, 32)
    assert goal.count == 9
    np.testing.assert_allclose(goal.vector[0], torch.stack(states).mean(0), atol=1e-6)
    assert goal.mean_norm == pytest.approx(float(torch.stack(states).norm(dim=-1).mean()), abs=1e-5)


def test_goal_state_does_not_depend_on_the_batch_size(monkeypatch):
    model, texts = tiny_reward_model("gpt2"), sequences(25)
    monkeypatch.setattr("openrlhf.evaluation.batching.WINDOW_BATCHES", 2)  # several windows as well
    vectors = [goal_of(model, texts, batch_tokens).vector for batch_tokens in (1, 64, 10_000)]
    for other in vectors[1:]:
        np.testing.assert_allclose(other, vectors[0], atol=1e-6)


def test_goal_state_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one chosen response"):
        goal_of(tiny_reward_model(), [], 100)


def test_last_state_reads_the_last_real_token_on_either_side():
    states = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    assert last_state(states, mask).tolist() == [[2, 3], [10, 11]]
    with pytest.raises(ValueError):
        last_state(states, torch.zeros(2, 3, dtype=torch.bool))


def test_similarity_is_the_cosine_and_zero_for_a_zero_state():
    # (3,4) against (3,4), (-3,-4), (4,-3), 0, and (1,0): 3/5
    states = torch.tensor([[[3, 4], [-6, -8], [4, -3], [0, 0], [1, 0]]], dtype=torch.float32)
    torch.testing.assert_close(goal_similarity(states, torch.tensor([[3.0, 4.0]])), torch.tensor([[1, -1, 0, 0, 0.6]]))
    assert goal_similarity(states, torch.zeros(1, 2)).tolist() == [[0, 0, 0, 0, 0]]
    assert goal_similarity(states.bfloat16(), torch.tensor([3.0, 4.0])).dtype == torch.float32
    with pytest.raises(ValueError, match="hidden size 2, got 3"):
        goal_similarity(states, torch.ones(1, 3))


def test_save_and_load_give_the_same_goal(tmp_path):
    array_path, json_path = GOAL.save(tmp_path / "made" / "here")
    assert np.load(array_path).shape == (1, 2)
    details = json.loads(json_path.read_text())
    assert (details["count"], details["hidden_size"], details["norm"]) == (7, 2, 5.0)
    for path in (array_path, array_path.parent):
        loaded = GoalState.load(path)
        np.testing.assert_array_equal(loaded.vector, GOAL.vector)
        assert dataclasses.replace(loaded, vector=GOAL.vector) == GOAL


def test_broken_goal_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="found no file"):
        GoalState.load(tmp_path / "none.npy")
    array_path, json_path = GOAL.save(tmp_path)
    np.save(array_path, GOAL.vector * 2)
    with pytest.raises(ValueError, match="do not belong together"):
        GoalState.load(tmp_path)
    np.save(array_path, GOAL.vector[0])
    with pytest.raises(ValueError, match=r"shape \(1, H\)"):
        GoalState.load(tmp_path)
    array_path.write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot read"):
        GoalState.load(tmp_path)
    json_path.unlink()
    with pytest.raises(ValueError, match="goal_state.json"):
        GoalState.load(tmp_path)


def test_goal_of_another_checkpoint_is_refused_with_both_names():
    GOAL.check("aaaa")
    with pytest.raises(ValueError, match="aaaa.*bbbb"):
        GOAL.check("bbbb")


def test_goal_state_must_be_finite():
    with pytest.raises(ValueError, match="not finite"):
        dataclasses.replace(GOAL, vector=np.array([[np.nan, 1]], dtype=np.float32))


def test_batches_hold_each_sequence_once_and_respect_the_limit():
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    batches = token_batches(lengths, 120)
    assert sorted(position for batch in batches for position in batch) == list(range(200))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 120 for batch in batches)
    assert token_batches([5, 300, 7], 120) == [[1], [2, 0]]  # one that is too long goes alone
    assert token_batches([], 10) == []
    with pytest.raises(ValueError):
        token_batches([1], 0)
