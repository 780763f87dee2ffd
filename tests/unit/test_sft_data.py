"""Prompts with answers."""

from __future__ import annotations

import datasets
import pytest
import torch

from openrlhf.datasets.jsonl import write_jsonl
from openrlhf.datasets.sft import SFTOptions, prepare_sft
from openrlhf.datasets.sources import load_rows
from tests.tiny import tiny_tokenizer

USER = {"role": "user", "content": "what is"}
ASSISTANT = {"role": "assistant", "content": "the answer"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def prepare(tmp_path, rows, **options):
    write_jsonl(tmp_path / "a.jsonl", rows)
    return prepare_sft(load_rows(str(tmp_path / "a.jsonl")), tiny_tokenizer(), SFTOptions(**options))


@pytest.mark.parametrize("options", [{}, {"input_template": "plain"}, {"apply_chat_template": True}])
def test_null_in_text_rows_is_dropped_and_counted(tmp_path, options):
    rows = [
        {"question": None, "answer": "a"},
        {"question": "q", "answer": "a"},
        {"question": "q", "answer": None},
        {"question": "q", "answer": ""},
    ]
    data = prepare(tmp_path, rows, **options)
    assert data.counts == {"read": 4, "empty_answer": 1, "kept": 1, "missing_value": 2}
    assert "[answer]\na</s>" in data.example_text(0, tiny_tokenizer())


def test_null_in_message_rows_is_dropped_and_counted(tmp_path):
    rows = [
        {"question": None, "answer": "the answer"},
        {"question": [USER], "answer": None},
        {"question": [USER], "answer": "the answer"},
        {"question": [USER, ASSISTANT], "answer": None},
    ]
    data = prepare(tmp_path, rows)
    assert data.counts == {"read": 4, "kept": 2, "missing_value": 2}
    assert data.example_text(0, tiny_tokenizer()) == data.example_text(1, tiny_tokenizer())


def test_a_missing_column_is_told_with_the_flag_that_names_it():
    rows = datasets.Dataset.from_list([{"text": "a"}])
    with pytest.raises(ValueError, match=r"expected a column 'nope', got \['text'\]; pass --input_key"):
        prepare_sft(rows, tiny_tokenizer(), SFTOptions(input_key="nope"))
    told = r"expected a column 'nope' in --pretrain_data, got \['text'\]; pass --pretrain_input_key"
    with pytest.raises(ValueError, match=told):
        prepare_sft(rows, tiny_tokenizer(), SFTOptions(input_key="nope"), whole_texts=True)
    with pytest.raises(ValueError, match=r"with answers \(gold\) in --pretrain_data, .*; pass --output_key"):
        prepare_sft(rows, tiny_tokenizer(), SFTOptions(input_key="text", output_key="gold"), whole_texts=True)


def test_text_and_message_lists_in_one_column_are_both_rendered(tmp_path):
    parts = [{"type": "text", "text": "the "}, "answer"]
    rows = [
        {"question": "what is", "answer": "the answer"},
        {"question": [USER], "answer": "the answer"},
        {"question": [USER, {**ASSISTANT, "content": parts}], "answer": None},
        {"question": [USER, ASSISTANT], "answer": None},
    ]
    data = prepare(tmp_path, rows, apply_chat_template=True)
    assert len({data.example_text(i, tiny_tokenizer()) for i in range(4)}) == 1
    for bad in ({"question": "q", "answer": ["a"]}, {"question": ["a"], "answer": "a"}):
        with pytest.raises(ValueError, match="row 1: column .*expected text"):
            prepare(tmp_path, [rows[0], bad])
    with pytest.raises(ValueError, match="row 1: column 'question' holds text here"):
        prepare(tmp_path, [{"question": [USER, ASSISTANT]}, {"question": "q"}])


def test_texts_without_answers_are_learned_whole_where_asked_for(tmp_path):
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "the answer is"}, {"text": None}, {"text": "good"}])
    rows, options = load_rows(str(tmp_path / "texts.jsonl")), SFTOptions(input_key="text")
    with pytest.raises(ValueError, match="pass --output_key"):
        prepare_sft(rows, tiny_tokenizer(), options)
    for tokenizer in (tiny_tokenizer(), tiny_tokenizer(add_bos=True)):
        data = prepare_sft(rows, tokenizer, options, whole_texts=True)
        ids = tokenizer("the answer is")["input_ids"] + [tokenizer.eos_token_id]
        batch = data.collate([0], 0)
        assert batch.input_ids[0].tolist() == ids and data.counts["missing_value"] == 1
        assert batch.response_mask[0].tolist() == [False] + [True] * (len(ids) - 1)  # nothing predicts the first token
        assert data.response_lengths[0] == len(ids) - 1
    with_answers = prepare(tmp_path, [{"question": "what is", "answer": "good"}])
    write_jsonl(tmp_path / "a.jsonl", [{"question": "what is", "answer": "good"}])
    same = prepare_sft(load_rows(str(tmp_path / "a.jsonl")), tiny_tokenizer(), SFTOptions(), whole_texts=True)
    assert torch.equal(same.collate([0], 0).response_mask, with_answers.collate([0], 0).response_mask)
