"""Goal states: means that no batch, process or stop changes, their files, and the cosine to them."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch

from openrlhf.evaluation.batching import token_batches
from openrlhf.evaluation.goal_accumulator import (
    EncodedResponse,
    GoalSums,
    accumulate_states,
    load_sums,
    mean_pairwise_cosine,
    save_sums,
)
from openrlhf.evaluation.goal_state import (
    GoalState,
    QuestionGoals,
    compute_goal_state,
    goal_of_sums,
    goal_similarity,
    last_state,
    load_goal,
    question_goals_of_sums,
)
from tests.tiny import tiny_reward_model

RECORDED = ("template", "apply_chat_template", "max_len", "checkpoint", "dataset")
DETAILS = dict(zip(RECORDED, ("plain", False, 64, "c", "d"), strict=True))
GOAL = GoalState(np.array([[3.0, 4.0]], dtype=np.float32), 7, 5.5, "nemo", False, 64, "aaaa", "rows.jsonl")


def sequences(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [[*generator.integers(3, 300, generator.integers(1, 40)).tolist(), 2] for _ in range(count)]


def goal_of(model, texts, batch_tokens: int, **more) -> GoalState:
    return compute_goal_state(
        model,
        iter(texts),
        batch_tokens=batch_tokens,
        template="plain",
        max_len=64,
        checkpoint="c",
        dataset="d",
        progress=False,
        **more,
    )


def single_states(model, texts) -> np.ndarray:
    """(N, H) float64 last states, each from a forward pass of its own."""
    with torch.no_grad():
        rows = [
            model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)).hidden_states[0, -1] for ids in texts
        ]
    return torch.stack(rows).double().numpy()


def sums_of(model, responses, goals: int = 1, start: GoalSums | None = None, **more) -> GoalSums:
    """The last sums over responses, from `start` on."""
    sums = start or GoalSums.zeros(goals, model.hidden_size)
    options = {"batch_tokens": 64, "progress": False} | more
    return list(accumulate_states(model, iter(responses[sums.position :]), sums, **options))[-1]


class ThreadRanks:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, values: list, barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(values)
        self.values, self.barrier = values, barrier

    def gather_objects(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


def run_ranks(world_size: int, work) -> list:
    """Results, or errors, of work(ranks) in every rank."""
    values, barrier, results = [None] * world_size, threading.Barrier(world_size, timeout=60), [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, values, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_goal_state_is_the_mean_of_single_last_states():
    model, texts = tiny_reward_model(), sequences(9)
    states = single_states(model, texts)
    goal = goal_of(model, texts, 100)
    assert goal.vector.shape == (1, 32)
    assert (goal.count, goal.dtype) == (9, "float32")
    np.testing.assert_allclose(goal.vector[0], states.mean(0), atol=1e-6)
    norms = [np.sqrt(sum(x * x for x in state)) for state in states]
    assert goal.mean_norm == pytest.approx(sum(norms) / 9, abs=1e-5)
    cosines = [states[i] @ states[j] / norms[i] / norms[j] for i in range(9) for j in range(9) if i != j]
    assert goal.mean_pairwise_cosine == pytest.approx(sum(cosines) / 72, abs=1e-6)
    assert goal_of(model, texts[:1], 100).mean_pairwise_cosine is None


def test_goal_state_does_not_depend_on_the_batch_size(monkeypatch):
    model, texts = tiny_reward_model("gpt2"), sequences(25)
    monkeypatch.setattr("openrlhf.evaluation.batching.WINDOW_BATCHES", 2)  # several windows as well
    vectors = [goal_of(model, texts, batch_tokens).vector for batch_tokens in (1, 64, 10_000)]
    vectors.append(goal_of(model, texts[::-1], 64).vector)
    for other in vectors[1:]:
        np.testing.assert_allclose(other, vectors[0], atol=1e-6)


def test_mean_pairwise_cosine_equals_the_double_loop():
    states = np.random.default_rng(3).normal(size=(40, 7)) + 0.5
    total = 0.0
    for i in range(40):
        for j in range(40):
            if i != j:
                total += states[i] @ states[j] / (np.linalg.norm(states[i]) * np.linalg.norm(states[j]))
    units = states / np.linalg.norm(states, axis=1, keepdims=True)
    assert mean_pairwise_cosine(units.sum(0), 40) == pytest.approx(total / (40 * 39), abs=1e-12)
    # (1,0), (0,1), (-1,0): cosines 0, -1, 0
    assert mean_pairwise_cosine(np.array([0.0, 1.0]), 3) == pytest.approx(-1 / 3, abs=1e-15)
    assert mean_pairwise_cosine(np.array([1.0, 0.0]), 1) is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_goal_state_does_not_depend_on_the_number_of_processes(world_size, monkeypatch):
    monkeypatch.setattr("openrlhf.evaluation.batching.WINDOW_BATCHES", 2)
    model, texts = tiny_reward_model(), sequences(30)
    alone = goal_of(model, texts, 64)
    goals = run_ranks(world_size, lambda ranks: goal_of(model, texts, 64, ranks=ranks))
    for goal in goals:  # every process has the whole result
        assert goal.count == 30
        np.testing.assert_array_equal(goal.vector, goals[0].vector)
        np.testing.assert_allclose(goal.vector, alone.vector, atol=1e-6)
        assert goal.mean_pairwise_cosine == pytest.approx(alone.mean_pairwise_cosine, abs=1e-6)


def test_batches_are_dealt_to_the_processes():
    model, rows = tiny_reward_model(), []
    forward = model.forward

    def count(ids, mask):
        rows.append(len(ids))
        return forward(ids, mask)

    model.forward = count
    run_ranks(2, lambda ranks: goal_of(model, sequences(30), 64, ranks=ranks))
    assert sum(rows) == 30  # nothing is computed twice


def test_a_stopped_sum_goes_on_to_the_same_result(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.evaluation.batching.WINDOW_BATCHES", 2)
    model, responses = tiny_reward_model(), [EncodedResponse(ids) for ids in sequences(30)]
    whole = sums_of(model, responses)
    start = GoalSums.zeros(1, model.hidden_size)
    for window, sums in enumerate(accumulate_states(model, iter(responses), start, batch_tokens=64, progress=False)):
        save_sums(tmp_path / "sums.npz", sums, {"dataset": "d"})
        if window == 1:
            break  # killed here
    identity, found = load_sums(tmp_path / "sums.npz")
    assert identity == {"dataset": "d"} and 0 < found.position < 30 and start.counts[0] == 0
    again = sums_of(model, responses, start=found)
    for field in dataclasses.fields(GoalSums):  # the same windows: equal to the last bit
        np.testing.assert_array_equal(getattr(again, field.name), getattr(whole, field.name))
    other_batches = sums_of(model, responses, start=found, batch_tokens=500)
    np.testing.assert_allclose(other_batches.vectors, whole.vectors, atol=1e-5)
    assert load_sums(tmp_path / "absent.npz") is None
    (tmp_path / "sums.npz").write_bytes(b"broken")
    with pytest.raises(ValueError, match="remove the file"):
        load_sums(tmp_path / "sums.npz")


def test_several_goals_in_one_pass_equal_separate_passes():
    model, texts = tiny_reward_model(), sequences(20)
    members = [tuple(goal for goal in range(3) if (i + 1) % (goal + 2) == 0) for i in range(20)]  # every 2nd, 3rd, 4th
    responses = [EncodedResponse(ids, goals) for ids, goals in zip(texts, members, strict=True) if goals]
    sums = sums_of(model, responses, goals=3)
    assert sums.position == len(responses) == 13  # 4, 8, ... are among the even ones and count once
    for goal in range(3):
        alone = goal_of(model, texts[goal + 1 :: goal + 2], 64)
        together = goal_of_sums(sums, goal, **{name: getattr(alone, name) for name in RECORDED})
        assert together.count == alone.count == 20 // (goal + 2)
        np.testing.assert_allclose(together.vector, alone.vector, atol=1e-6)
        assert together.mean_pairwise_cosine == pytest.approx(alone.mean_pairwise_cosine, abs=1e-6)


def test_responses_that_are_cut_or_do_not_fit_are_counted_in_their_goals():
    model, texts = tiny_reward_model(), sequences(4)
    responses = [
        EncodedResponse(texts[0], (0,), truncated=True),
        EncodedResponse(texts[1], (0, 1)),
        EncodedResponse([], (1,), truncated=True),
        EncodedResponse([], (2,), truncated=True),
    ]
    for sums in [sums_of(model, responses, goals=3), *run_ranks(2, lambda r: sums_of(model, responses, 3, ranks=r))]:
        assert sums.counts.tolist() == [2, 1, 0]
        assert sums.truncated.tolist() == [1, 0, 0]
        assert sums.unfit.tolist() == [0, 1, 1]
    assert goal_of_sums(sums, 1, **DETAILS).counts == {"truncated": 0, "prompt_too_long": 1}
    with pytest.raises(ValueError, match="of 1 none fits behind its prompt"):
        goal_of_sums(sums, 2, **DETAILS)


def test_a_broken_state_is_named_and_ends_all_processes():
    model, texts = tiny_reward_model(), sequences(12)
    forward = model.forward

    def poisoned(ids, mask):
        out = forward(ids, mask)
        row = (ids[:, : len(texts[7])] == torch.tensor(texts[7])).all(1) if ids.shape[1] >= len(texts[7]) else []
        out.hidden_states[row] = torch.nan
        return out

    model.forward = poisoned
    with pytest.raises(ValueError, match="response 7: its hidden state is zero or not finite"):
        goal_of(model, texts, 64)
    errors = run_ranks(2, lambda ranks: goal_of(model, texts, 64, ranks=ranks))
    assert ["response 7" in str(error) for error in errors] == [True, True]


def test_goals_per_question_are_the_means_of_their_responses():
    model, texts = tiny_reward_model(), sequences(6)
    states = single_states(model, texts)
    goals = (1, 0, 1, 0, 0)  # of the first five; the sixth does not fit
    responses = [EncodedResponse(ids, (goal,)) for ids, goal in zip(texts, goals, strict=False)]
    responses.append(EncodedResponse([], (2,), truncated=True))
    found = question_goals_of_sums(sums_of(model, responses, goals=3), ["a?", "b?", "c?"], **DETAILS)
    np.testing.assert_allclose(found.vectors[0], (states[1] + states[3] + states[4]) / 3, atol=1e-6)
    np.testing.assert_allclose(found.vectors[1], (states[0] + states[2]) / 2, atol=1e-6)
    assert (found.questions, found.question_counts, found.count) == (("a?", "b?"), (3, 2), 5)
    assert found.counts == {"truncated": 0, "prompt_too_long": 1, "questions_without_goal": 1}
    norms = np.linalg.norm(states, axis=1)
    cosine = {(i, j): states[i] @ states[j] / norms[i] / norms[j] for i in range(6) for j in range(6)}
    first = (cosine[1, 3] + cosine[1, 4] + cosine[3, 4]) / 3
    assert found.mean_pairwise_cosine == pytest.approx((first + cosine[0, 2]) / 2, abs=1e-6)
    assert found.goal_of("b?").shape == (1, 32) and found.goal_of("c?") is None
    np.testing.assert_array_equal(found.goal_of("b?")[0], found.vectors[1])


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
    array_path, json_path = GOAL.save(tmp_path / "humour")
    with pytest.raises(ValueError, match="name one of .*humour"):
        GoalState.load(tmp_path)
    assert GoalState.load(json_path).count == GOAL.count
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


def test_goals_per_question_survive_their_files(tmp_path):
    questions = ("what is\u2028 1 + 1?", "a\nb", "ä")
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    goals = QuestionGoals(vectors, questions, (1, 2, 3), 5.5, "nemo", False, 64, "aaaa", "rows.jsonl")
    array_path, json_path = goals.save(tmp_path)
    details = json.loads(json_path.read_text())
    assert (details["count"], details["questions"], details["hidden_size"]) == (6, 3, 2)
    for path in (array_path, tmp_path):
        loaded = load_goal(path)
        np.testing.assert_array_equal(loaded.vectors, vectors)
        assert dataclasses.replace(loaded, vectors=vectors) == goals
        assert loaded.index == {questions[0]: 0, "a\nb": 1, "ä": 2} and loaded.digest == goals.digest
    assert isinstance(QuestionGoals.load(tmp_path), QuestionGoals)
    with pytest.raises(ValueError, match="found goals per question"):
        GoalState.load(tmp_path)
    with pytest.raises(ValueError, match="aaaa.*bbbb"):
        goals.check("bbbb")
    lines = (tmp_path / "goal_questions.jsonl").read_text(encoding="utf-8").replace("ä", "a")
    (tmp_path / "goal_questions.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match="do not belong together"):
        load_goal(tmp_path)
    (tmp_path / "goal_questions.jsonl").unlink()
    with pytest.raises(ValueError, match="cannot read"):
        load_goal(tmp_path)
    GOAL.save(tmp_path)
    assert isinstance(load_goal(tmp_path), GoalState)
    with pytest.raises(ValueError, match="found one goal state"):
        QuestionGoals.load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"questions": ("a", "a")},
        {"question_counts": (1, 0)},
        {"questions": ("a",)},
        {"vectors": np.array([[np.inf, 0], [0, 0]], dtype=np.float32)},
        {"vectors": np.zeros((0, 2), dtype=np.float32)},
    ],
)
def test_goals_per_question_that_do_not_fit_are_refused(changes):
    goals = QuestionGoals(np.ones((2, 2), np.float32), ("a", "b"), (1, 2), 1.0, "nemo", False, 64, "c", "d")
    with pytest.raises(ValueError, match="expected|not finite"):
        dataclasses.replace(goals, **changes)


def test_a_file_of_an_earlier_version_still_loads(tmp_path):
    array_path, json_path = GOAL.save(tmp_path)
    earlier = "count mean_norm template apply_chat_template max_len checkpoint dataset hidden_size norm digest".split()
    details = json.loads(json_path.read_text())
    json_path.write_text(json.dumps({name: details[name] for name in earlier}))
    loaded = load_goal(array_path)
    assert (loaded.count, loaded.checkpoint_name, loaded.mean_pairwise_cosine) == (7, None, None)


def test_goal_of_another_checkpoint_is_refused_with_both_names():
    GOAL.check("aaaa")
    GOAL.check("aaaa", "some/model", 2)
    with pytest.raises(ValueError, match="aaaa.*bbbb"):
        GOAL.check("bbbb")
    named = dataclasses.replace(GOAL, checkpoint_name="ckpt/first")
    with pytest.raises(ValueError, match=r"ckpt/first \(aaaa\).*ckpt/second \(bbbb\); run get_representation"):
        named.check("bbbb", "ckpt/second")
    with pytest.raises(ValueError, match=r"ckpt/first \(aaaa\) of hidden size 2.*\(bbbb\) of hidden size 64"):
        named.check("bbbb", "ckpt/second", 64)
    with pytest.raises(ValueError, match="hidden size 2.*hidden size 64"):
        named.check("aaaa", hidden_size=64)


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
