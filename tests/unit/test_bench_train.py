"""The benchmark of training measures what train_rm does, on the tokens that it names."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.runs import ROOT, arguments, write_pairs
from tests.tiny import save_tiny_causal_lm, tiny_tokenizer


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("bench_train", "train_peer", "train_tasks"):
        sys.modules.pop(name, None)


def test_a_measured_run_counts_pairs_tokens_and_losses(tmp_path):
    from bench_train import train_ours

    model, pairs = save_tiny_causal_lm(tmp_path / "lm"), write_pairs(tmp_path / "pairs.jsonl", 20)
    flags = arguments(model, pairs, tmp_path / "out", max_epochs=1, eval_fraction=0, train_batch_size=8)
    found = train_ours({"threads": 1, "warmup": 1, "epochs": 1, "flags": flags})
    assert found["steps"] == 3 and found["pairs"] == 12  # 8 + 8 + 4, without the first step
    logged = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().split("\n") if line]
    assert found["losses"] == pytest.approx(logged, abs=1e-6)
    tokenizer = tiny_tokenizer()
    rows = [json.loads(line) for line in pairs.read_text().split("\n") if line]
    # input_template plain: question and a line end; each response with EOS
    prompt = sum(len(tokenizer.tokenize(row["question"] + "\n")) for row in rows)
    responses = sum(len(tokenizer.tokenize(row[key])) + 1 for row in rows for key in ("correct", "incorrect"))
    assert found["tokens"] == 2 * prompt + responses
    assert found["seconds"] > 0 and found["cpu_seconds"] > 0 and found["memory"] > 50


def test_operations_of_training_by_hand():
    from train_tasks import training_flops

    config = SimpleNamespace(
        hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    # Weights of a layer: queries and output 2 * 4 * 4, keys and values 2 * 4 * 2, three of 4 * 6: 120; two layers 240.
    # A row of 10 tokens: 6 * 240 * 10 + 6 * 2 * 4 * 100 for attention.
    assert training_flops(config, [10, 10]) == 2 * (14400 + 4800)


def test_generated_pairs_have_the_lengths_asked_for():
    from train_tasks import generated_rows

    tokenizer = tiny_tokenizer()
    rows = generated_rows(tokenizer, 30, length=100, prompt_share=0.4)
    assert len(rows) == 30
    assert all(len(tokenizer.tokenize(row["prompt"])) == 40 for row in rows)
    lengths = [len(tokenizer.tokenize(row[key])) for row in rows for key in ("chosen", "rejected")]
    assert min(lengths) >= 45 and max(lengths) <= 75 and sum(lengths) / 60 == pytest.approx(60, abs=4)
