"""Tokenised preference pairs: special tokens, truncation, formats, batches."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from openrlhf.datasets.adapters import resolve_options
from openrlhf.datasets.hh import hh_messages, parse_hh
from openrlhf.datasets.jsonl import write_jsonl
from openrlhf.datasets.preference import (
    PreferenceOptions,
    build_pair,
    detect_format,
    encode_prompt,
    encode_response,
    prepare_preferences,
    row_to_example,
)
from openrlhf.datasets.sources import load_rows
from tests.tiny import tiny_tokenizer

EOS = 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def prepare(rows, tokenizer=None, **options):
    return prepare_preferences(
        datasets.Dataset.from_list(rows), tokenizer or tiny_tokenizer(), PreferenceOptions(**options)
    )


def metaspace_tokenizer(style):
    """Llama-2-like vocabulary in which a text's first word gets a dummy space."""
    words = ["▁the", "the", "▁good", "good", "▁", "\n", ":", "a"]
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    backend = Tokenizer(models.Unigram([(token, -float(i == 3)) for token, i in vocab.items()], unk_id=3))
    if style == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ), vocab


# ---- special tokens (B03)


@pytest.mark.parametrize("template_has_bos", [False, True])
@pytest.mark.parametrize("tokenizer_adds_bos", [False, True])
def test_bos_count_is_the_larger_of_template_and_tokenizer(template_has_bos, tokenizer_adds_bos):
    tokenizer = tiny_tokenizer(add_bos=tokenizer_adds_bos)
    ids = encode_prompt(tokenizer, ("<s>" if template_has_bos else "") + "the answer")
    assert ids.count(tokenizer.bos_token_id) == max(template_has_bos, tokenizer_adds_bos)
    assert ids[0] == tokenizer.bos_token_id or not (template_has_bos or tokenizer_adds_bos)


@pytest.mark.parametrize("tokenizer_adds_bos", [False, True])
def test_chat_template_that_writes_bos(tokenizer_adds_bos):
    tokenizer = tiny_tokenizer(add_bos=tokenizer_adds_bos)
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    row = {"prompt": "the question", "chosen": "good", "rejected": "bad"}
    ids = prepare([row], tokenizer, apply_chat_template=True)[0].prompt_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_literal_bos_text_inside_a_message_is_kept():
    tokenizer = tiny_tokenizer(add_bos=True)
    ids = encode_prompt(tokenizer, "what is <s> the answer")
    assert tokenizer.decode(ids[1:]) == "what is <s> the answer"
    assert tokenizer.decode(encode_response(tokenizer, "it is <s> good")) == "it is <s> good</s>"


def test_eos_that_a_tokenizer_adds_does_not_end_the_prompt():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", EOS)]
    )
    ids = encode_prompt(tokenizer, "the answer")
    assert ids[0] == 1 and EOS not in ids
    assert encode_response(tokenizer, "the answer").count(1) == 0


@pytest.mark.parametrize("text", ["the answer", "the answer</s>", "the answer</s></s>", ""])
def test_response_ends_in_exactly_one_eos(text):
    tokenizer = tiny_tokenizer()
    ids = encode_response(tokenizer, text)
    assert tokenizer.decode(ids) == text.replace("</s>", "") + "</s>"
    assert ids.count(EOS) == 1


@pytest.mark.parametrize("style", ["always", "first", "normalizer"])
def test_response_gets_no_dummy_leading_space(style):
    tokenizer, vocab = metaspace_tokenizer(style)
    assert tokenizer("the")["input_ids"] == [vocab["▁the"]]  # what tokenising it as a text of its own gives
    assert encode_response(tokenizer, "the") == [vocab["the"], EOS]
    assert encode_response(tokenizer, " the") == [vocab["▁the"], EOS]
    assert encode_prompt(tokenizer, "the") == [vocab["▁the"]]


def test_apart_equals_jointly_where_no_token_straddles_the_boundary():
    tokenizer = tiny_tokenizer(add_bos=True)
    prompt, response = "what is the answer\n", "the answer is 42"
    joint = tokenizer(prompt + response)["input_ids"]
    assert encode_prompt(tokenizer, prompt) + encode_response(tokenizer, response) == [*joint, EOS]


def test_tokenizer_without_eos_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="EOS"):
        encode_response(tokenizer, "a")


# ---- truncation (B02)


def test_pair_that_differs_past_the_limit_only_is_dropped():
    pair, reason = build_pair([11, 12], [21, 22, 23, 24, 25], [21, 22, 23, 24, 26], EOS, 6)
    assert (pair, reason) == (None, "identical_after_truncation")


def test_long_response_is_cut_and_ends_in_eos():
    pair, reason = build_pair([11, 12], [21, 22, 23, 24, 25], [31, 22], EOS, 6)
    assert reason == "truncated"
    assert pair.prompt_ids + pair.chosen_ids == [11, 12, 21, 22, 23, 2]
    assert pair.prompt_ids + pair.rejected_ids == [11, 12, 31, 22, 2]


@pytest.mark.parametrize("has_eos", [False, True])
def test_every_small_pair_keeps_the_four_conditions(has_eos):
    max_len, end = 6, [EOS] if has_eos else []
    reasons = Counter()
    for prompt_len, chosen_len, rejected_len in itertools.product(range(8), range(6), range(6)):
        prompt = list(range(10, 10 + prompt_len))
        chosen, rejected = list(range(20, 20 + chosen_len)), list(range(30, 30 + rejected_len))
        pair, reason = build_pair(prompt, chosen + end, rejected + end, EOS, max_len)
        reasons[reason] += 1
        if pair is None:
            continue
        assert pair.prompt_ids == prompt
        for ids, full in ((pair.chosen_ids, chosen), (pair.rejected_ids, rejected)):
            assert len(prompt) + len(ids) <= max_len
            assert ids[-1] == EOS and ids.count(EOS) == 1
            assert len(ids) >= 2
            assert ids[:-1] == full[: max_len - prompt_len - 1]
        assert pair.chosen_ids != pair.rejected_ids
    # of 8 * 36 triples: an empty response in 8 * 11; else a prompt of 5, 6 or 7 leaves no room, 3 * 25
    assert reasons["empty_response"] == 88 and reasons["prompt_too_long"] == 75
    # room is 5 - prompt_len: both responses fit in room^2 of 25, for prompts 0..4: 25+16+9+4+1
    assert reasons["kept"] == 55 and reasons["truncated"] == 125 - 55


def test_identical_responses_and_eos_do_not_hide_each_other():
    assert build_pair([1], [5, 6], [5, 6, EOS], EOS, 8) == (None, "identical")
    pair, _ = build_pair([1], [5, 6, EOS], [7, EOS], EOS, 8)
    assert (pair.chosen_ids, pair.rejected_ids) == ([5, 6, EOS], [7, EOS])


def test_other_ways_with_long_pairs():
    assert build_pair([1], [5, 6, 7], [8], EOS, 4, on_long="drop") == (None, "too_long")
    with pytest.raises(ValueError, match="5 tokens.*max_len is 4"):
        build_pair([1], [5, 6, 7], [8], EOS, 4, on_long="error")
    assert build_pair([1], [5, 6], [8], EOS, 4, on_long="error")[1] == "kept"
    with pytest.raises(ValueError, match="'cut'"):
        build_pair([1], [5], [8], EOS, 4, on_long="cut")


# ---- HH dialogues (B04)

DIALOGUE = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def test_hh_is_split_at_the_last_assistant_turn():
    assert parse_hh(DIALOGUE + " good", DIALOGUE + " goat") == (DIALOGUE, " good", " goat")
    assert hh_messages(DIALOGUE) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_hh_turn_words_inside_an_answer_are_text():
    answer = " Logs say Human: error is common.\nHuman: yes.\n\nA second paragraph.\n\nHumans err."
    assert parse_hh(DIALOGUE + answer, DIALOGUE + " goat") == (DIALOGUE, answer, " goat")


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c", DIALOGUE + " x", "last_turn_not_assistant"),
        (DIALOGUE + " x", DIALOGUE + " \n", "empty_response"),
        (DIALOGUE + " x", DIALOGUE.replace("b", "B") + " y", "prompts_differ"),
        ("\n\nHuman: a\n\nAssistant: x", DIALOGUE + " y", "prompts_differ"),
        ("\n\nHuman: a\n\nHuman: b\n\nAssistant: x", "\n\nHuman: a\n\nHuman: b\n\nAssistant: y", "misordered_turns"),
        ("\n\nAssistant: a", "\n\nAssistant: b", "misordered_turns"),
        ("\n\nHuman: \n\nAssistant: x", "\n\nHuman: \n\nAssistant: y", "empty_turn"),
        ("plain", "text", "not_a_dialogue"),
    ],
)
def test_unusable_hh_rows_get_a_reason(chosen, rejected, reason):
    assert parse_hh(chosen, rejected) == reason
    rows = [{"chosen": chosen, "rejected": rejected}, {"chosen": DIALOGUE + " good", "rejected": DIALOGUE + " goat"}]
    data = prepare(rows, format="hh")
    assert (len(data), data.counts[reason]) == (1, 1)


# ---- formats and columns (B05)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b", "score": 1}, "prompt_chosen_rejected"),
        ({"question": "q", "correct": "a", "incorrect": "b"}, "question_correct_incorrect"),
        ({"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b"}, "hh"),
        ({"chosen": [{"role": "user", "content": "q"}], "rejected": []}, "messages"),
    ],
)
def test_format_is_detected(row, expected):
    assert detect_format(list(row), row) == expected


def test_wrong_columns_are_named_before_anything_is_tokenised():
    rows = [{"accepted": "a", "rejected": "b"}]
    for options in ({}, {"chosen_key": "chosen"}, {"format": "hh"}):
        with pytest.raises(ValueError) as error:
            prepare(rows, tokenizer=object(), **options)
        assert "chosen" in str(error.value) and "accepted" in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"chosen": "a", "rejected": "b"}], "--prompt_key"),
        (
            [{"prompt": "q", "chosen": "a", "rejected": "b", "question": "q", "correct": "a", "incorrect": "b"}],
            "fits .* and",
        ),
        ([{"prompt": "q", "chosen": 1, "rejected": 2}], "column 'chosen': expected text"),
        ([{"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": []}], "--apply_chat_template"),
        ([{"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}], "row 0: margin.*'much'"),
    ],
)
def test_data_that_fits_no_format_is_explained(rows, message):
    with pytest.raises(ValueError, match=message):
        prepare(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "hhh"}, "'hhh'"),
        ({"on_long": "cut"}, "'cut'"),
        ({"max_len": 1}, "at least 2"),
        ({"input_template": "nemoo"}, "nemoo"),
        ({"input_template": "nemo", "apply_chat_template": True}, "exclude each other"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PreferenceOptions(**options)


def test_prompt_column_and_full_conversation_give_equal_ids():
    full = [{"chosen": DIALOGUE + " good", "rejected": DIALOGUE + " bad"}]
    apart = [{"prompt": DIALOGUE, "chosen": " good", "rejected": " bad"}]
    assert prepare(full)[0] == prepare(apart)[0]


def test_all_layouts_of_messages_give_equal_ids():
    turns = [{"role": "user", "content": "what is the answer"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
    layouts = [
        {"chosen": turns + good, "rejected": turns + bad},
        {"prompt": turns, "chosen": good, "rejected": bad},
        {"prompt": turns, "chosen": turns + good, "rejected": turns + bad},
        {"prompt": turns[0]["content"], "chosen": turns + good, "rejected": turns + bad},
        {"prompt": turns[0]["content"], "chosen": good, "rejected": bad},
        {"prompt": turns[0]["content"], "chosen": "good", "rejected": "bad"},
        {
            "chosen": "\n\nHuman: what is the answer\n\nAssistant: good",
            "rejected": "\n\nHuman: what is the answer\n\nAssistant: bad",
        },
    ]
    pairs = [prepare([row], apply_chat_template=True)[0] for row in layouts]
    assert tiny_tokenizer().decode(pairs[0].prompt_ids) == "<|user|>\nwhat is the answer</s>\n<|assistant|>\n"
    assert all(pair == pairs[0] for pair in pairs)


def test_unusable_message_rows_are_counted():
    user = {"role": "user", "content": "q"}
    other = {"role": "user", "content": "other"}
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    rows = [
        {"chosen": [user, good], "rejected": [user, bad]},
        {"chosen": [user, good], "rejected": [other, bad]},
        {"chosen": [user], "rejected": [user]},
        {"chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, {"role": "assistant", "content": " "}]},
        {"chosen": [user, good], "rejected": None},
    ]
    counts = prepare(rows, apply_chat_template=True).counts
    assert counts == {
        "read": 6,
        "kept": 1,
        "truncated": 0,
        "empty_response": 1,
        "missing_value": 1,
        "prompts_differ": 1,
        "empty_turn": 1,
        "last_turn_not_assistant": 1,
    }


def test_templates_are_applied_as_documented():
    def prompt(row, **options):
        resolved = resolve_options(list(row), row, PreferenceOptions(**options))
        return row_to_example(row, resolved.format, resolved).prompt

    math = {"question": "1+1", "correct": "2", "incorrect": "3"}
    assert prompt(math).startswith("System:\n") and prompt(math).endswith("User:\n1+1\n\nAssistant:\n")
    assert prompt(math, input_template="plain") == "1+1\n"
    custom = {"q": "1+1", "good": "2", "poor": "3"}
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "poor"}
    assert prompt(custom, **keys) == "1+1"
    assert prompt(custom, **keys, input_template="Q {} A") == "Q 1+1 A"
    hh = {"chosen": DIALOGUE + " good", "rejected": DIALOGUE + " bad"}
    assert prompt(hh) == DIALOGUE
    assert prompt(hh, input_template="<{question}>") == f"<{DIALOGUE}>"


def test_text_and_message_lists_in_one_column_are_both_rendered(tmp_path):
    question, tokenizer = [{"role": "user", "content": "what is"}], tiny_tokenizer()
    good, parts = "the answer", [{"type": "text", "text": "the "}, "answer"]
    rows = [
        {"prompt": "what is", "chosen": good, "rejected": "no"},
        {"prompt": question, "chosen": good, "rejected": "no"},
        {"prompt": question, "chosen": [{"role": "assistant", "content": good}], "rejected": "no"},
        {"prompt": question, "chosen": [{"role": "assistant", "content": parts}], "rejected": "no"},
        {"prompt": [{"role": "user", "content": ["what", " is"]}], "chosen": good, "rejected": "no"},
    ]
    for ordered in (rows, rows[::-1]):
        write_jsonl(tmp_path / "a.jsonl", ordered)
        data = prepare_preferences(
            load_rows(str(tmp_path / "a.jsonl")), tokenizer, PreferenceOptions(apply_chat_template=True)
        )
        assert len(data) == 5 and all(data[i] == data[0] for i in range(5))
        assert data[0].chosen_ids == encode_response(tokenizer, good)
    write_jsonl(tmp_path / "b.jsonl", [*rows[:2], {"prompt": '[{"role": "user"}]', "chosen": "a", "rejected": "b"}])
    with pytest.raises(ValueError, match="row 1: column 'prompt': message lists.*--apply_chat_template"):
        prepare_preferences(load_rows(str(tmp_path / "b.jsonl")), tokenizer, PreferenceOptions())
    write_jsonl(tmp_path / "c.jsonl", [rows[0], {**rows[0], "chosen": ["a"]}])
    with pytest.raises(ValueError, match="row 1: column 'chosen': expected text or a list of messages"):
        prepare_preferences(load_rows(str(tmp_path / "c.jsonl")), tokenizer, PreferenceOptions())


def test_text_beside_whole_conversations_is_counted(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [messages[0], {"role": "assistant", "content": "c"}]
    rows = [{"chosen": messages, "rejected": other}, {"chosen": "b", "rejected": "c"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = PreferenceOptions(apply_chat_template=True)
    data = prepare_preferences(load_rows(str(tmp_path / "a.jsonl")), tiny_tokenizer(), options)
    assert data.counts == {"read": 2, "kept": 1, "truncated": 0, "empty_turn": 1}


def test_text_that_looks_like_messages_stays_text(tmp_path):
    text = '[{"role": "user", "content": "a"}]'
    rows = [{"prompt": text, "chosen": "a", "rejected": "b"}, {"prompt": [{"role": "user", "content": text}]}]
    write_jsonl(tmp_path / "a.jsonl", [rows[0], {**rows[0], **rows[1]}])
    options = PreferenceOptions(apply_chat_template=True)
    data = prepare_preferences(load_rows(str(tmp_path / "a.jsonl")), tiny_tokenizer(), options)
    assert data[0] == data[1] and text in data.example_text(0, tiny_tokenizer())


def test_message_lists_beside_dialogues_are_refused(tmp_path):
    dialogue = "\n\nHuman: a\n\nAssistant: "
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"chosen": dialogue + "b", "rejected": dialogue + "c"}, {"chosen": messages, "rejected": dialogue}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = PreferenceOptions(apply_chat_template=True)
    with pytest.raises(ValueError, match="row 1: column 'chosen' holds message lists"):
        prepare_preferences(load_rows(str(tmp_path / "a.jsonl")), tiny_tokenizer(), options)


# ---- prepared data and batches

ROWS = [
    {"question": "one", "correct": "the answer is 1", "incorrect": "no", "margin": 0.5},
    {"question": "two", "correct": "good", "incorrect": "good", "margin": 1.0},
    {"question": "one", "correct": "yes", "incorrect": "bad bad bad", "margin": None},
    {"question": "two", "correct": "1\u20282", "incorrect": "x" * 500, "margin": 2.0},
    {"question": "two", "correct": None, "incorrect": "x", "margin": 2.0},
]


def test_counts_lengths_and_pairs():
    tokenizer = tiny_tokenizer()
    data = prepare(ROWS, tokenizer, input_template="plain", max_len=40)
    assert data.counts == {"read": 5, "kept": 3, "truncated": 1, "identical": 1, "missing_value": 1}
    assert len(data) == 3
    assert (data.options.format, data.options.input_template) == ("question_correct_incorrect", "plain")
    assert prepare(ROWS).options.input_template == "nemo"
    pair = data[2]
    assert tokenizer.decode(pair.prompt_ids) == "two\n"
    assert tokenizer.decode(pair.chosen_ids) == "1\u20282</s>"
    assert pair.margin == 2.0
    assert len(pair.prompt_ids) + len(pair.rejected_ids) == 40
    longest = [len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in (data[0], data[1], data[2])]
    assert data.lengths.tolist() == longest
    assert data.lengths.dtype == np.int64
    with pytest.raises(IndexError):
        data[3]


def test_batch_is_right_padded_chosen_first():
    tokenizer = tiny_tokenizer(add_bos=True)
    data = prepare(ROWS, tokenizer, input_template="plain", max_len=40)
    batch = data.collate([2, 0], pad_id=7)
    assert batch.chosen.tolist() == [0, 1] and batch.rejected.tolist() == [2, 3] and batch.weight.tolist() == [1, 1]
    assert batch.index.tolist() == [2, 0]
    assert batch.margin.tolist() == [2.0, 0.5]
    expected = [data[2].chosen_ids, data[0].chosen_ids, data[2].rejected_ids, data[0].rejected_ids]
    prompts = [data[2].prompt_ids, data[0].prompt_ids] * 2
    for i, (prompt, response) in enumerate(zip(prompts, expected, strict=True)):
        assert batch.input_ids[i][batch.attention_mask[i]].tolist() == prompt + response
        assert batch.input_ids[i][batch.response_mask[i]].tolist() == response
        assert batch.attention_mask[i].tolist() == sorted(batch.attention_mask[i].tolist(), reverse=True)
        assert set(batch.input_ids[i][~batch.attention_mask[i]].tolist()) <= {7}
    chosen, rejected = batch.split(torch.arange(4))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 1], [2, 3])
    assert data.collate([1], 0).margin.tolist() == [0.0]  # the row without a margin, in data that has some
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta" and moved.margin.device.type == "meta"


def test_pairs_of_one_prompt_share_a_group():
    data = prepare(ROWS, input_template="plain", max_len=40)
    group = data.collate([0, 1, 2], 0).group.tolist()
    assert group[0] == group[1] != group[2]


def test_no_margin_column_means_no_margin():
    rows = [{key: value for key, value in row.items() if key != "margin"} for row in ROWS]
    data = prepare(rows, input_template="plain", max_len=40)
    assert data.collate([0], 0).margin is None and data[0].margin is None and not data.has_margin


def test_nothing_left_is_an_error_with_the_counts():
    with pytest.raises(ValueError, match="read 1, kept 0, truncated 0, identical 1"):
        prepare(ROWS[1:2])
    with pytest.raises(ValueError, match="no rows"):
        prepare_preferences(datasets.Dataset.from_dict({}), tiny_tokenizer(), PreferenceOptions())


def test_error_on_long_names_the_row():
    with pytest.raises(ValueError, match="row 3: .*max_len is 40"):
        prepare(ROWS, input_template="plain", max_len=40, on_long="error")


def test_prepared_pairs_are_read_back_and_depend_on_all_inputs(monkeypatch):
    first = prepare(ROWS, input_template="plain", max_len=40)

    def fail(*args, **kwargs):
        raise AssertionError("prepared a second time")

    monkeypatch.setattr("openrlhf.datasets.preference._prepare_batch", fail)
    again = prepare(ROWS, input_template="plain", max_len=40)
    assert again.fingerprint == first.fingerprint and again.counts == first.counts and again[2] == first[2]
    monkeypatch.undo()
    others = [
        prepare(ROWS[:3], input_template="plain", max_len=40),
        prepare(ROWS, input_template="plain", max_len=41),
        prepare(ROWS, input_template="{question}", max_len=40),
        prepare(ROWS, tiny_tokenizer(add_bos=True), input_template="plain", max_len=40),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_two_processes_give_the_pairs_of_one(tmp_path):
    rows = datasets.Dataset.from_list(
        [{"question": f"{i}", "correct": f"{i}", "incorrect": f"{i % 7}"} for i in range(50)]
    )
    options = PreferenceOptions(input_template="plain")
    one = prepare_preferences(rows, tiny_tokenizer(), options, cache=False)
    two = prepare_preferences(rows, tiny_tokenizer(), options, cache=False, num_proc=2)
    assert one.counts == two.counts == {"read": 50, "kept": 43, "truncated": 0, "identical": 7}
    assert [one[i] for i in range(43)] == [two[i] for i in range(43)]


def test_text_of_an_example_shows_its_special_tokens():
    text = prepare(ROWS, tiny_tokenizer(add_bos=True), input_template="plain", max_len=40).example_text(
        0, tiny_tokenizer()
    )
    assert "<s>one\n" in text and "the answer is 1</s>" in text and "[margin] 0.5" in text


def test_huge_rows_are_cut_and_counted():
    row = {"prompt": "q", "chosen": "good " * 100_000, "rejected": "bad " * 100_000}
    data = prepare([row], max_len=64)
    assert data.counts["truncated"] == 1 and data.lengths.tolist() == [64]


def test_real_hh_rows(shared_data):
    rows = load_rows(str(shared_data / "hh_harmless_dev.jsonl.gz"))
    data = prepare_preferences(rows, tiny_tokenizer(), PreferenceOptions(max_len=100_000))
    # 5 rows have two assistant turns in a row, 2 an empty answer (counted by hand with a regular expression)
    assert data.counts == {"read": 1135, "kept": 1128, "truncated": 0, "misordered_turns": 5, "empty_response": 2}


def test_data_layer_imports_no_training_library():
    code = (
        "import sys, openrlhf.datasets.preference, openrlhf.datasets.completions, openrlhf.datasets.pairing\n"
        "assert not {'deepspeed', 'ray', 'vllm', 'wandb'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
