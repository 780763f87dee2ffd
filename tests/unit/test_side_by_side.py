"""Work of torch in several threads: order, errors, and what it leaves behind; attention names under threads."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from openrlhf.models.packed_attention import attention_for
from openrlhf.utils.side_by_side import map_side_by_side


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_are_in_order_and_the_number_of_threads_is_put_back(threads):
    def work(number):
        time.sleep(0.02 * (number % 3 == 0))  # some take longer than those behind them
        return number, torch.get_num_threads(), threading.get_ident()

    results = list(map_side_by_side(work, range(12)))
    assert [number for number, _, _ in results] == list(range(12))
    workers = min(threads, 4)
    assert {count for _, count, _ in results} == {threads // workers}
    assert len({thread for _, _, thread in results}) <= workers
    assert torch.get_num_threads() == threads


def test_items_are_taken_as_they_are_needed(threads):
    taken = []
    results = map_side_by_side(lambda number: number, (taken.append(n) or n for n in range(100)))
    assert next(results) == 0
    assert len(taken) <= 1 + min(threads, 4)
    results.close()
    assert torch.get_num_threads() == threads


def test_an_error_comes_at_its_place_and_ends_the_rest(threads):
    done = []

    def work(number):
        if number == 5:
            raise ValueError("the fifth")
        done.append(number)
        return number

    results = map_side_by_side(work, range(1000))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the fifth"):
        next(results)
    assert len(done) < 20 and torch.get_num_threads() == threads


def test_two_threads_work_at_the_same_time():
    before, both = torch.get_num_threads(), threading.Barrier(2, timeout=30)
    torch.set_num_threads(2)
    try:
        assert sorted(map_side_by_side(lambda _: both.wait(), range(2))) == [0, 1]  # one alone would wait for ever
    finally:
        torch.set_num_threads(before)


def test_passes_of_one_name_go_side_by_side_and_others_wait():
    config = SimpleNamespace(_attn_implementation="sdpa")
    both, told = threading.Barrier(2, timeout=30), []

    @torch.no_grad()
    def packed_pass():
        with attention_for(config, packed=True):
            both.wait()  # both are inside
            told.append(config._attn_implementation)
            both.wait()
            time.sleep(0.05)
            told.append(config._attn_implementation)

    @torch.no_grad()
    def plain_pass():
        with attention_for(config, packed=False):
            told.append(config._attn_implementation)

    passes = [threading.Thread(target=packed_pass) for _ in range(2)]
    for one in passes:
        one.start()
    while len(told) < 2:
        time.sleep(0.001)
    plain = threading.Thread(target=plain_pass)
    plain.start()
    for one in [*passes, plain]:
        one.join(timeout=30)
    assert told == ["packed_sdpa"] * 4 + ["sdpa"]
    assert config._attn_implementation == "sdpa"


def test_a_pass_with_gradients_leaves_its_name_and_one_between_puts_it_back():
    config = SimpleNamespace(_attn_implementation="sdpa")
    with attention_for(config, packed=True):
        pass
    assert config._attn_implementation == "packed_sdpa"  # for the backward pass
    with torch.no_grad(), attention_for(config, packed=False):
        assert config._attn_implementation == "sdpa"
        with attention_for(config, packed=True):
            assert config._attn_implementation == "packed_sdpa"
        assert config._attn_implementation == "sdpa"
    assert config._attn_implementation == "packed_sdpa"
