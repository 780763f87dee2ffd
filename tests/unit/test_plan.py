"""Counting of steps, epochs and batches."""

import numpy as np
import pytest

from openrlhf.trainer.plan import (
    TrainingPlan,
    cut_by_tokens,
    evaluation_batches,
    even_batches,
    even_slots,
    step_generator,
)


def plan(**changes) -> TrainingPlan:
    settings = {"examples": 20, "epochs": 1, "batch_size": 6, "micro_batch_size": 3, "world_size": 1, "seed": 0}
    return TrainingPlan(**{**settings, **changes})


def test_tail_is_carried_over_and_flushed_once():
    # 10 micro-batches of 1, accumulation 4, 3 epochs: 30 examples in batches of 4 -> 7 full ones and a last flush
    p = plan(examples=10, epochs=3, batch_size=4, micro_batch_size=1)
    assert p.total_steps == 8
    assert p.accumulation == 4
    assert [len(p.indices(step)) for step in range(8)] == [4] * 7 + [2]


def test_every_epoch_holds_every_example_once():
    p = plan(epochs=4)
    order = np.concatenate([p.indices(step) for step in range(p.total_steps)])
    assert len(order) == 80
    for epoch in range(4):
        assert sorted(order[epoch * 20 : (epoch + 1) * 20]) == list(range(20))
    assert (order[:20] != order[20:40]).any()  # shuffled anew


def test_order_depends_on_the_seed_alone():
    alone, ranks = plan(seed=3), plan(seed=3, world_size=2)
    for step in range(alone.total_steps):
        assert (alone.indices(step) == ranks.indices(step)).all()
    assert (plan(seed=4).indices(0) != alone.indices(0)).any()


def test_resume_after_update_4_starts_at_offset_4_of_epoch_1():
    # 20 rows in batches of 6: four updates cover 24 places, so update 4 starts at place 4 of the second epoch
    p = plan(epochs=2)
    second_epoch = np.random.default_rng([0, 1]).permutation(20)
    assert p.indices(4).tolist() == second_epoch[4:10].tolist()
    assert p.epochs_done(3) == 0 and p.epochs_done(4) == 1 and p.epochs_done(p.total_steps) == 2


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("count", [12, 7, 1])
def test_micro_batches_cover_an_update_once_over_all_ranks(world_size, count):
    p = plan(batch_size=12, micro_batch_size=3, world_size=world_size)
    lengths = np.random.default_rng(0).integers(1, 100, count)
    parts = [p.micro_batches(lengths, rank) for rank in range(world_size)]
    assert all(len(part) == p.accumulation for part in parts)
    assert sorted(np.concatenate([x for part in parts for x in part])) == list(range(count))
    assert all(len(x) <= 3 for part in parts for x in part)


def test_micro_batches_hold_similar_lengths_the_longest_first():
    p = plan(batch_size=6, micro_batch_size=3)
    long, short = p.micro_batches(np.array([9, 1, 8, 2, 7, 3]), 0)
    assert sorted(short) == [1, 3, 5] and sorted(long) == [0, 2, 4]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="fewer than one batch"):
        plan(examples=5)
    with pytest.raises(ValueError, match="multiple of --micro_train_batch_size 3"):
        plan(batch_size=10, examples=30)
    with pytest.raises(ValueError, match="2 processes"):
        plan(batch_size=9, examples=30, world_size=2)


def test_step_generator_is_a_function_of_seed_step_and_stream():
    def draw(*key):
        import torch

        return torch.rand(4, generator=step_generator(*key)).tolist()

    assert draw(1, 2) == draw(1, 2)
    others = [draw(1, 2), draw(2, 1), draw(1, 3), draw(1, 2, 1)]
    assert len({tuple(x) for x in others}) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 5, 12])
def test_evaluation_rows_count_once_over_all_ranks(world_size, rows):
    lengths = np.random.default_rng(0).integers(1, 100, rows)
    parts = [evaluation_batches(lengths, 2, rank, world_size) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1  # every process makes as many passes
    counted = [batch for part in parts for batch, counts in part if counts]
    assert sorted(np.concatenate([np.zeros(0, int), *counted])) == list(range(rows))


@pytest.mark.parametrize(("count", "size", "world_size"), [(11, 2, 2), (11, 4, 3), (1, 8, 3), (6, 6, 1)])
def test_even_batches_cover_every_row_once_in_as_many_passes(count, size, world_size):
    lengths = np.random.default_rng(0).integers(1, 100, count)
    parts = [even_batches(lengths, size, rank, world_size) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1 and max(len(batch) for part in parts for batch in part) <= size
    assert sorted(np.concatenate([batch for part in parts for batch in part])) == list(range(count))
    # In one process, rows in the order of their lengths: 9 5 7 1 in pairs are (1, 5), (7, 9).
    assert [batch.tolist() for batch in even_batches(np.array([9, 5, 7, 1]), 2, 0, 1)] == [[3, 1], [2, 0]]


def test_batches_by_tokens_count_padding():
    # sorted 1 2 4 5 9: two rows of 2 are 4 tokens, three rows of 4 would be 12; a row of 9 is longer than the budget
    batches = cut_by_tokens(np.array([9, 1, 5, 2, 4]), 8)
    assert [x.tolist() for x in batches] == [[1, 3], [4], [2], [0]]
    lengths = np.random.default_rng(0).integers(1, 300, 200)
    batches = cut_by_tokens(lengths, 512)
    assert sorted(np.concatenate(batches)) == list(range(200))
    assert all(len(x) * lengths[x].max() <= 512 for x in batches)


def test_the_largest_batches_are_halved_for_the_ranks():
    assert [x.tolist() for x in even_slots([np.arange(2), np.arange(2, 6), np.arange(6, 7)], 2)] == [
        [0, 1], [2, 3], [4, 5], [6]]  # fmt: skip
    assert [len(x) for x in even_slots([np.arange(1)], 3)] == [1, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [12, 7, 1])
def test_updates_by_tokens_cover_every_place_once(world_size, count):
    p = plan(batch_size=12, micro_batch_size=5, world_size=world_size, batch_tokens=150)
    lengths = np.random.default_rng(0).integers(1, 100, count)
    parts = [p.micro_batches(lengths, rank) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(np.concatenate([x for part in parts for x in part])) == list(range(count))
    batches = [evaluation_batches(lengths, 2, rank, world_size, 150) for rank in range(world_size)]
    assert len({len(part) for part in batches}) == 1
    assert sorted(np.concatenate([x for part in batches for x, counts in part if counts])) == list(range(count))
