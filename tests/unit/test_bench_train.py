"""The benchmark of training measures what train_rm does, on the tokens that it names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf.trainer.plan import TrainingPlan
from tests.runs import ROOT, arguments, weights, write_pairs
from tests.tiny import save_tiny_causal_lm, tiny_tokenizer

SIDES = ("correct", "incorrect")
MODULES = ("bench_train", "measuring", "train_ours", "train_peer", "train_profile", "train_table", "train_tasks")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_measured_run_counts_pairs_tokens_losses_and_operations(tmp_path):
    from train_ours import train
    from train_profile import KINDS

    model, pairs = save_tiny_causal_lm(tmp_path / "lm"), write_pairs(tmp_path / "pairs.jsonl", 20)
    few = write_pairs(tmp_path / "few.jsonl", 4, seed=1)
    same = {"max_epochs": 1, "eval_fraction": 0, "reward_model_strategy": "vanilla", "prefix_sharing": "off"}
    flags = arguments(model, pairs, tmp_path / "out", train_batch_size=8, micro_train_batch_size=8, **same)
    warmup = arguments(model, few, tmp_path / "warm", train_batch_size=2, micro_train_batch_size=2, **same)
    found = train({"threads": 1, "epochs": 1, "flags": flags, "warmup": warmup, "profile": True})
    assert found["steps"] == 3 and found["pairs"] == 20  # 8 + 8 + 4, none of the warm-up
    logged = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().split("\n") if line]
    assert found["losses"] == pytest.approx(logged, abs=1e-6)
    tokenizer = tiny_tokenizer()
    rows = [json.loads(line) for line in pairs.read_text().split("\n") if line]
    # input_template plain: question and a line end; each response with EOS
    prompt = sum(len(tokenizer.tokenize(row["question"] + "\n")) for row in rows)
    responses = sum(len(tokenizer.tokenize(row[key])) + 1 for row in rows for key in SIDES)
    assert found["tokens"] == 2 * prompt + responses
    assert found["seconds"] > 0 and found["cpu_seconds"] > 0 and found["memory"] > 50

    profile = found["profile"]
    assert set(profile["shares"]) == set(KINDS) and sum(profile["shares"].values()) == pytest.approx(1)
    assert all(0 < share < 1 for share in profile["shares"].values())
    assert profile["alone_flops_per_s"] > 0 and profile["unprofiled_seconds"] > 0
    # The last whole step: 8 pairs, one pass of 16 padded rows. Each weight of a layer and of the head takes
    # 2 operations a token forward and 4 backward; rotary positions add 1e-4 of that.
    last = [rows[i] for i in TrainingPlan(20, 1, 8, 8, seed=1).indices(1)]
    sequences = [[len(tokenizer.tokenize(row["question"] + "\n" + row[k])) + 1 for k in SIDES] for row in last]
    matrices = [w for name, w in weights(tmp_path / "out").items() if ".layers." in name and w.ndim == 2]
    layers = sum(w.numel() for w in matrices)
    assert profile["product_flops"] == pytest.approx(6 * (layers + 32) * 16 * max(map(max, sequences)), rel=1e-3)
    shared = sum(len(tokenizer.tokenize(row["question"] + "\n")) for row in last)
    assert profile["needed_flops"] == 6 * layers * (sum(map(sum, sequences)) - shared)


def test_operations_of_training_by_hand():
    from train_profile import product_flops
    from train_tasks import training_flops

    config = SimpleNamespace(
        hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    # Weights of a layer: queries and output 2 * 4 * 4, keys and values 2 * 4 * 2, three of 4 * 6: 120; two layers 240.
    # A row of 10 tokens: 6 * 240 * 10 + 6 * 2 * 4 * 100 for attention.
    assert training_flops(config, [10, 10]) == 2 * (14400 + 4800)
    assert product_flops((3, 4), (4, 5)) == 2 * 3 * 4 * 5
    assert product_flops((7, 3, 4), (7, 4, 5)) == 7 * 120


def test_operations_are_told_apart_by_their_own_and_their_callers_names():
    from train_profile import kind_of

    assert kind_of(["aten::mm", "aten::matmul", "aten::linear"]) == "matrix products"
    assert kind_of(["aten::bmm", "aten::_scaled_dot_product_attention_math"]) == "attention"
    assert kind_of(["aten::mul_", "Optimizer.step#AdamW.step"]) == "optimizer"
    assert kind_of(["aten::index_select"]) == kind_of(["aten::copy_", "aten::clone"]) == "copies and indexing"
    assert kind_of(["aten::silu", "autograd::engine::evaluate_function: MulBackward0"]) == "element by element"
    assert kind_of(["aten::transpose"]) == kind_of(["MulBackward0"]) == "rest"


def test_generated_pairs_have_the_lengths_asked_for():
    from train_tasks import generated_rows

    tokenizer = tiny_tokenizer()
    rows = generated_rows(tokenizer, 30, length=100, prompt_share=0.4)
    assert len(rows) == 30
    assert all(len(tokenizer.tokenize(row["prompt"])) == 40 for row in rows)
    lengths = [len(tokenizer.tokenize(row[key])) for row in rows for key in ("chosen", "rejected")]
    assert min(lengths) >= 45 and max(lengths) <= 75 and sum(lengths) / 60 == pytest.approx(60, abs=4)


def test_the_peer_gets_every_pair_of_a_group():
    from train_tasks import pair_ids

    group = SimpleNamespace(prompt_ids=[1, 5], correct=[[7, 2], [8, 2]], wrong=[[9, 2]])
    assert pair_ids(group) == [([1, 5, 7, 2], [1, 5, 9, 2]), ([1, 5, 8, 2], [1, 5, 9, 2])]
    pair = SimpleNamespace(prompt_ids=[1], chosen_ids=[3, 2], rejected_ids=[2])
    assert pair_ids(pair) == [([1, 3, 2], [1, 2])]


def test_groups_are_trained_on_with_the_pairs_that_the_peer_gets(tmp_path):
    from bench_train import parse, sizes
    from train_ours import train
    from train_tasks import prepare

    texts = [("good", True), ("good good", True), ("bad", False), ("bad bad", False), ("bad bad bad", False)]
    rows = [
        {"question": f"what is {i}", "generated_solution": text, "is_correct": label}
        for i in range(5)
        for text, label in texts
    ]
    settings = parse("--data pool --responses_per_prompt 4 --pairs 3 --peer_pairs 5 --input_template plain".split())
    task = prepare(rows, tmp_path / "data", save_tiny_causal_lm(tmp_path / "lm"), settings)
    # Of 5 responses a question makes two examples, 1 correct with 2 wrong and 1 with 1: 3 pairs. 3 of 5 questions.
    assert (task["examples"], task["pairs"]) == (6, 9)
    assert (task["peer"]["random"]["pairs"], task["peer"]["grouped"]["pairs"]) == (5, 15)  # all 15 are less than a step
    tokens = {text: len(tiny_tokenizer().tokenize(text)) + 1 for text, _ in texts}
    prompt = len(tiny_tokenizer().tokenize("what is 0\n"))
    assert task["unique_tokens"] == 3 * (2 * prompt + sum(tokens.values()))
    found = train({"threads": 1, "epochs": 1, "flags": task["flags"] + sizes(2, 1), "warmup": None, "profile": False})
    assert (found["pairs"], found["tokens"], found["steps"]) == (9, task["tokens"], 3)


def test_questions_stay_whole_and_those_of_one_kind_are_left_out():
    from train_tasks import first_rows, shuffled_questions

    rows = [{"question": q, "is_correct": label} for label in (True, False) for q in "abcd"]
    rows += [{"question": "e", "is_correct": True}] * 2
    shuffled = shuffled_questions(rows)
    order = [row["question"] for row in shuffled]
    assert sorted(order) == list("aabbccdd") and order[::2] == order[1::2]
    assert order[::2] != list("abcd")  # by random.Random(0)
    assert first_rows(shuffled, 3, by_question=True) == shuffled[:6]
    assert first_rows(shuffled, 3, by_question=False) == shuffled[:3]


def test_the_peers_updates_are_grouped_as_a_whole_epoch_is_and_spread_by_length():
    from train_tasks import grouped_updates, spread

    pairs = [([0] * (n % 40 + 1), [0]) for n in range(400)]
    updates = grouped_updates(pairs, 4)
    assert len(updates) == 100 and sorted(map(id, sum(updates, []))) == sorted(map(id, pairs))
    # Megabatches of 25 updates, each sorted: 100 of 400 rows with lengths 1 to 40, so neighbours differ by 1 or so.
    assert max(len(update[0][0]) - len(update[-1][0]) for update in updates[1:]) <= 4
    # Sorted by tokens, updates of 1, 3, 5 and 7 rows a side of 2: two of four are those at 1/4 and 3/4.
    four = [[([0] * n, [0] * n)] * 2 for n in (5, 1, 7, 3)]
    assert spread(four, 4) == four[3] + four[2]
    assert spread(four, 100) == four[1] + four[3] + four[0] + four[2]


def rows_of_results():
    ours = {"memory": 100.0, "loss": 0.5, "losses": [0.5], "runs": [1.0]}
    peer = {"memory": 200.0, "loss": 0.4, "runs": [1.0]}
    return {
        "plain, 4": {**ours, "pairs_per_s": 3.0},
        "packed, 4": {**ours, "pairs_per_s": 6.0, "loss_difference": 6e-8},
        "TRL defaults": {**peer, "pairs_per_s": 1.5},
        "TRL grouped, 4": {**peer, "pairs_per_s": 2.0},
    }


def test_ratios_compare_the_best_of_each_side():
    from bench_train import ratios

    found = ratios(rows_of_results())
    assert [number for number, _ in found] == [2.0, 4.0, 3.0]
    assert found[-1][1] == "training speed, ours (packed, 4) against TRL grouped, 4, the peer's best"


def test_the_table_shows_ratios_of_speed_and_memory():
    from train_profile import KINDS
    from train_table import details, profiles, summary

    profile = {"shares": dict.fromkeys(KINDS, 0.25), "product_flops": 4e9}
    results = rows_of_results()
    results["packed, 4"]["profile"] = profile | {"product_seconds": 2.0, "alone_flops_per_s": 3e9}
    records = {"hh_5m": {"data": {"pairs": 2, "tokens": 600}, "results": results}}
    assert summary(records).split("\n")[-1] == (
        "| hh_5m | packed, 4 | 2.00 | 4.00 | 3.00 | TRL grouped, 4 | 0.50 | 6e-08 |"
    )
    assert details(records).split("\n")[2] == (
        "| hh_5m: 2 pairs of 300 tokens | ours, packed, 4 | 6.00 (1.00 to 1.00) | 100 | 0.50000 |"
    )
    lines = profiles(records).split("\n")
    assert "| attention | 25.0% |" in lines and "| GFLOP/s of the matrix products | 2.0 |" in lines


@pytest.mark.parametrize("lost", [0, 1])
def test_quick_ends_with_a_ratio_and_tokens_must_agree(tmp_path, monkeypatch, capsys, lost):
    import bench_train

    tasks = []

    def prepare(*words):
        tasks.append(bench_train_prepare(*words))
        return tasks[0]

    def measured(words, threads, python):
        settings, task = json.loads(words[1]), tasks[0]
        is_peer = words[0].endswith("train_peer.py")
        rows = task["peer"]["grouped" if settings["in_order"] else "random"] if is_peer else task
        if is_peer:
            ids = [json.loads(line) for line in Path(settings["ids"]).read_text().splitlines()]
            assert sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in ids) == rows["tokens"]
        figures = {"pairs": rows["pairs"], "tokens": rows["tokens"] - lost, "memory": 1.0, "loss": 0.7}
        fast = settings.get("flags", [])[-1:] == ["on"]
        return figures | {"seconds": 9.0, "cpu_seconds": 1.0 if fast else 2.0} | ({} if is_peer else {"losses": [0.7]})

    bench_train_prepare = bench_train.prepare
    monkeypatch.setattr(bench_train, "prepare", prepare)
    monkeypatch.setattr(bench_train, "run_measurement", measured)
    words = f"--quick --data generated --length 40 --model pocket --peer_python {sys.executable}".split()
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *words, "--json", str(tmp_path / "found.json")])
    if lost:
        with pytest.raises(SystemExit, match=r"plain, 8: saw 32 pairs, \d+ tokens; expected \(32, "):
            bench_train.main()
        return
    bench_train.main()
    last = capsys.readouterr().out.strip().split("\n")[-1]
    assert last == "ratio 2.00 training speed, ours (packed, 8) against TRL grouped, 8, the peer's best"
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["data"]["pairs"] == 32 and record["settings"]["json"] == "found.json"
    assert set(record["results"]) == {"plain, 8", "packed, 8", "TRL grouped, 8"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "hh", "--responses_per_prompt", "8"], "wants labelled solutions"),
        (["--peer_batches", "5"], "expected parts of --peer_batch_size 32"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words, told, capsys):
    from bench_train import parse

    with pytest.raises(SystemExit):
        parse(words)
    assert told in capsys.readouterr().err
