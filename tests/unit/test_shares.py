"""Shares of work among processes that are played by one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf.trainer.engine import LocalEngine
from openrlhf.trainer.shares import gather_shares, own_part, together


class Rank:
    """One of several threads that gather as processes do."""

    def __init__(self, rank: int, world_size: int, table: list, barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self.table, self.barrier = rank, world_size, table, barrier

    def gather_objects(self, value):
        self.table[self.rank] = value
        self.barrier.wait(timeout=10)
        values = list(self.table)
        self.barrier.wait(timeout=10)
        return values


def in_ranks(world_size: int, work) -> list:
    """What each rank returns, or the error that it raises."""
    table, barrier = [None] * world_size, threading.Barrier(world_size)

    def run(rank: int):
        try:
            return work(Rank(rank, world_size, table, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_every_place_has_one_owner_in_order():
    parts = in_ranks(3, lambda rank: own_part(range(5, 13), rank))
    assert [list(part) for part in parts] == [[5, 6], [7, 8, 9], [10, 11, 12]]
    assert [list(part) for part in in_ranks(3, lambda rank: own_part(range(4, 5), rank))] == [[], [], [4]]
    assert own_part(range(3), LocalEngine()) == range(3)


def test_results_are_gathered_by_rank_and_none_is_left_out():
    found = in_ranks(3, lambda rank: gather_shares(rank, lambda: None if rank.rank == 1 else f"of {rank.rank}"))
    assert found == [["of 0", "of 2"]] * 3


def test_an_error_of_one_is_raised_in_all():
    def work(rank):
        def fails():
            if rank.rank == 1:
                raise KeyError("lost")
            return rank.rank

        return together(rank, fails)

    first, second, third = in_ranks(3, work)
    assert isinstance(second, KeyError)
    assert str(first) == str(third) == "stopped by process 1: 'lost'" and isinstance(first, RuntimeError)
    with pytest.raises(ZeroDivisionError):
        together(LocalEngine(), lambda: 1 / 0)
    assert together(LocalEngine(), lambda: 7) == 7
