"""Preference sets: every row format, rendering as in training, scoring that resumes, figures against plain loops."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from openrlhf.datasets.jsonl import write_jsonl
from openrlhf.datasets.preference import PreferenceOptions, prepare_preferences
from openrlhf.evaluation import preference_scoring
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.preference_scoring import encode_items, score_preferences
from openrlhf.evaluation.preference_sets import (
    PreferenceItem,
    ReadingOptions,
    read_preference_set,
    source_name,
    split_source,
)
from openrlhf.evaluation.scoring import ScoredCompletion, Scorer
from openrlhf.utils.ranks import OneProcess
from tests.tiny import tiny_reward_model, tiny_tokenizer

PLAIN = ReadingOptions(template="plain")
CHAT = ReadingOptions(template="{}", apply_chat_template=True)
HH = "\n\nHuman: what is good\n\nAssistant: yes\n\nHuman: and bad"
ROWS_2 = [
    {"id": "7", "prompt": "what", "chosen": ["yes"], "rejected": ["no", "bad", ""], "subset": "Math", "num_correct": 1},
    {"id": "ref:0", "prompt": "buy", "chosen": ["one"], "rejected": ["two", "six"], "subset": "Ties", "num_correct": 1},
    {"id": "tied:0", "prompt": "sell", "chosen": ["a", "b"], "rejected": ["c"], "subset": "Ties", "num_correct": 2},
]


def read(tmp_path: Path, rows: list[dict], options: ReadingOptions = PLAIN, name: str = "rows.jsonl"):
    write_jsonl(tmp_path / name, rows)
    return read_preference_set(str(tmp_path / name), tiny_tokenizer(), options)


class FakeScorer:
    """Rewards by a rule on the token ids; remembers what it was asked."""

    def __init__(self, rule=lambda one: float(sum(one.response_ids) % 7), window_tokens: int = 40):
        self.rule, self.window_tokens, self.ranks = rule, window_tokens, OneProcess()
        self.seen: list = []

    def score(self, encoded, questions, name_of, bar):
        assert questions is None
        self.seen.append(list(encoded))
        scored = []
        for one in encoded:
            if not one.response_ids:
                scored.append(ScoredCompletion(None, None, None, 0, True))
                continue
            values = np.zeros(one.num_actions, np.float32)
            values[-1] = self.rule(one)
            scored.append(ScoredCompletion(float(values[-1]), values, -values, one.num_actions, one.truncated))
        return scored


# Reading


def test_rewardbench_1_rows(tmp_path):
    row = {"prompt": "what is 1", "chosen": "good", "rejected": "bad", "subset": "hep-cpp", "id": 3}
    found = read(tmp_path, [row, row | {"rejected": "", "id": 4}])
    assert found.name == "rows" and found.format == "prompt_chosen_rejected" and found.left_out == {}
    # An empty answer is scored, as the package does it.
    assert found.items == [
        PreferenceItem("what is 1\n", ("good", "bad"), 1, "hep-cpp", "3", 0),
        PreferenceItem("what is 1\n", ("good", ""), 1, "hep-cpp", "4", 1),
    ]


def test_message_lists(tmp_path):
    user, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "good"), ("assistant", "bad"))
    )
    with_prompt = {"prompt": [user], "chosen": [user, good], "rejected": [bad], "subset": "s"}
    expected = PreferenceItem("<|user|>\nhi</s>\n<|assistant|>\n", ("good", "bad"), 1, "s", None, 0)
    assert read(tmp_path, [with_prompt], CHAT).items == [expected]
    without = {"chosen": [user, good], "rejected": [user, bad], "subset": "s"}
    assert read(tmp_path, [without], CHAT, "other.jsonl").items == [expected]
    with pytest.raises(ValueError, match="rows.jsonl: .*--apply_chat_template"):
        read(tmp_path, [with_prompt])


def test_rewardbench_2_rows(tmp_path):
    found = read(tmp_path, ROWS_2)
    assert found.format == "rewardbench_2"
    assert [item.responses for item in found.items] == [
        ("yes", "no", "bad", ""),
        ("one", "two", "six"),
        ("a", "b", "c"),
    ]
    assert [item.num_chosen for item in found.items] == [1, 1, 2]
    assert [item.id for item in found.items] == ["7", "ref:0", "tied:0"]
    assert [item.prompt for item in found.items] == ["what\n", "buy\n", "sell\n"]
    assert read(tmp_path, ROWS_2[:1], CHAT, "chat.jsonl").items[0].prompt == "<|user|>\nwhat</s>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": []}, "column 'rejected': expected at least one text, got an empty list"),
        ({"chosen": []}, "column 'chosen': expected at least one text"),
        ({"chosen": None}, "column 'chosen': expected a list of texts, got null"),
        ({"chosen": ["a", None]}, "column 'chosen': expected a list of texts, got a list with null, str"),
        ({"prompt": None}, "column 'prompt': expected text or a list of messages with a role, got null"),
        ({"num_correct": 2}, "column 'num_correct' says 2, the lists hold 1"),
        ({"id": "0", "subset": "Ties"}, "id: expected ref:N or tied:N in the subset Ties, got '0'"),
        ({"id": "ref:0", "subset": "Ties"}, "id ref:0 occurs twice in the subset Ties"),
    ],
)
def test_bad_rows_of_rewardbench_2_stop_or_are_counted(tmp_path, change, message):
    rows = [*ROWS_2, ROWS_2[0] | change]
    with pytest.raises(ValueError, match=r"rows.jsonl: row 3 \(from 0\): " + message):
        read(tmp_path, rows)
    found = read(tmp_path, rows, dataclasses.replace(PLAIN, on_bad_row="skip"))
    assert len(found.items) == 3 and found.left_out == {"bad_row": 1}


def test_hh_dialogues_and_rows_left_out(tmp_path):
    pair = {"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant: bad"}
    bad = [
        pair | {"rejected": "\n\nHuman: other\n\nAssistant: bad"},
        pair | {"rejected": f"{HH}\n\nAssistant: "},
        pair | {"chosen": None},
    ]
    found = read(tmp_path, [pair, *bad], ReadingOptions(template="{}"))
    assert found.format == "hh"
    assert found.items == [PreferenceItem(f"{HH}\n\nAssistant:", (" good", " bad"), 1, None, None, 0)]
    assert found.left_out == {"prompts_differ": 1, "empty_response": 1, "missing_value": 1}
    with pytest.raises(ValueError, match="no row is left of 3"):
        read(tmp_path, bad, ReadingOptions(template="{}"), "bad.jsonl")


def test_the_format_and_the_columns_can_be_named(tmp_path):
    rows = [{"question": "q", "correct": "a", "incorrect": "b"}]
    assert read(tmp_path, rows).format == "question_correct_incorrect"
    other = [{"q": "what", "good": ["a"], "bad": ["b", "c"], "part": "x"}]
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad", "subset_key": "part"}
    (item,) = read(tmp_path, other, dataclasses.replace(PLAIN, **keys), "keys.jsonl").items
    assert item == PreferenceItem("what\n", ("a", "b", "c"), 1, "x", None, 0)
    with pytest.raises(ValueError, match="needs the columns .*missing"):
        read(tmp_path, rows, dataclasses.replace(PLAIN, format="rewardbench_2"))
    with pytest.raises(ValueError, match="rows.jsonl: a data set with the columns .* fits no known format"):
        read(tmp_path, [{"a": "b"}])
    with pytest.raises(ValueError, match="dataset_format: expected one of"):
        ReadingOptions(format="other")


def test_a_named_subset_column_must_be_there(tmp_path):
    rows = [{"prompt": "buy", "chosen": "one", "rejected": "two", "kind": "a"}]
    found = read(tmp_path, rows, dataclasses.replace(PLAIN, subset_key="kind"))
    assert found.items[0].subset == "a"
    with pytest.raises(ValueError, match=r"rows.jsonl: no column 'sort' \(--subset_key\), got .*'kind'"):
        read(tmp_path, rows, dataclasses.replace(PLAIN, subset_key="sort"))


def test_sources_with_splits(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    saved = datasets.DatasetDict({"filtered": datasets.Dataset.from_list(rows)})
    saved.save_to_disk(tmp_path / "bench")
    assert len(read_preference_set(f"{tmp_path}/bench:filtered", tiny_tokenizer(), PLAIN).items) == 1
    with pytest.raises(ValueError, match=r"no split 'test', it has \['filtered'\]"):
        read_preference_set(f"{tmp_path}/bench", tiny_tokenizer(), PLAIN)
    assert split_source("allenai/reward-bench:filtered") == ("allenai/reward-bench", "filtered")
    assert split_source("allenai/reward-bench-2") == ("allenai/reward-bench-2", "test")
    names = {"a/hh.dev.jsonl.gz": "hh.dev", "x/y:filtered": "y-filtered", "x/y@z": "y@z", "dir/": "dir"}
    assert {source: source_name(source) for source in names} == names


def test_max_samples_keeps_order_and_row_numbers(tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(20)]
    items = read(tmp_path, rows, dataclasses.replace(PLAIN, max_samples=5, seed=1)).items
    assert [item.prompt for item in items] == [f"q{item.row}\n" for item in items]
    assert len(items) == 5 and [item.row for item in items] == sorted({item.row for item in items})


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        [{"question": "what is 1", "correct": "good", "incorrect": "bad " * 40}],
        [{"prompt": "what is 1", "chosen": " good", "rejected": "bad</s>"}],
        [{"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant: bad"}],
    ],
)
def test_token_ids_equal_those_of_training(tmp_path, rows, chat):
    tokenizer = tiny_tokenizer(add_bos=True)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ReadingOptions(template="nemo", apply_chat_template=chat)
    found = read_preference_set(str(tmp_path / "rows.jsonl"), tokenizer, options)
    trained = prepare_preferences(
        datasets.Dataset.from_list(rows),
        tokenizer,
        PreferenceOptions(input_template=None if chat else "nemo", apply_chat_template=chat, max_len=300),
        cache=False,
    )
    ((encoded, _),) = encode_items(tokenizer, found.items, 300)
    assert [one.prompt_ids for one in encoded] == [trained[0].prompt_ids] * 2
    assert [one.response_ids for one in encoded] == [trained[0].chosen_ids, trained[0].rejected_ids]


# Scoring


def items(count: int) -> list[PreferenceItem]:
    words = ["the answer", "is apples", "7 good", "bad 31", "plus"]
    return [
        PreferenceItem(
            f"what is {i % 4}\n", (words[i % 5], words[(i * 2 + 1) % 5] + "!", words[3]), 1, f"s{i % 2}", str(i), i
        )
        for i in range(count)
    ]


def test_rewards_equal_those_of_each_text_alone():
    tokenizer = tiny_tokenizer(add_bos=True)
    model = tiny_reward_model("llama", tokenizer)
    vector = np.random.default_rng(2).normal(size=(1, 32)).astype(np.float32)
    scorer = Scorer(model, GoalState(vector, 3, 1.0, "plain", False, 120, "c", "d"), 200)
    rows = score_preferences(items(6), tokenizer, scorer, max_len=100, progress=False)
    for row, item in zip(rows, items(6), strict=True):
        assert row["responses"] == list(item.responses) and row["num_chosen"] == 1 and row["subset"] == item.subset
        assert row["truncated"] == [False] * 3
        for k, response in enumerate(row["responses"]):
            prompt = [1, *tokenizer(item.prompt, add_special_tokens=False)["input_ids"]]
            ids = [*tokenizer(response, add_special_tokens=False)["input_ids"], 2]
            with torch.no_grad():
                out = model(torch.tensor([prompt + ids]), torch.ones(1, len(prompt + ids), dtype=torch.bool))
            cosine = torch.nn.functional.cosine_similarity(out.hidden_states[0, -1], torch.from_numpy(vector)[0], dim=0)
            assert row["rewards"][k] == pytest.approx(out.reward.item(), abs=1e-5)
            assert row["goal_similarity"][k] == pytest.approx(cosine.item(), abs=1e-5)
            assert row["lengths"][k] == len(ids)


def test_the_last_goal_similarity_is_kept_and_responses_of_a_prompt_stay_together():
    scorer = FakeScorer()
    rows = score_preferences(items(9), tiny_tokenizer(), scorer, max_len=100, progress=False)
    assert len(scorer.seen) > 1
    for window in scorer.seen:
        assert len(window) % 3 == 0
        for start in range(0, len(window), 3):
            assert len({tuple(one.prompt_ids) for one in window[start : start + 3]}) == 1
    for row in rows:
        assert row["goal_similarity"] == [-reward for reward in row["rewards"]]


def test_long_responses_are_cut_and_a_long_prompt_gives_no_reward():
    tokenizer = tiny_tokenizer()
    tokens = len(tokenizer("12345\n")["input_ids"])  # digits are single tokens
    short = PreferenceItem("12345\n", ("5" * 30, "7"), 1, None, None, 0)
    long = PreferenceItem("9" * 50, ("1", "2"), 1, None, None, 1)
    rows = score_preferences([short, long], tokenizer, FakeScorer(), max_len=tokens + 10, progress=False)
    assert rows[0]["lengths"] == [31, 2] and rows[0]["truncated"] == [True, False]
    assert rows[1]["rewards"] == [None, None] and rows[1]["truncated"] == [True, True]


def test_killed_scoring_goes_on_where_it_stopped(tmp_path):
    path, tokenizer = tmp_path / "set.jsonl", tiny_tokenizer()
    settings = {"checkpoint": "c", "max_len": 100}

    def run(scorer):
        return score_preferences(
            items(12), tokenizer, scorer, max_len=100, out_path=path, settings=settings, progress=False
        )

    rows = run(FakeScorer())
    data = path.read_bytes()
    assert [json.loads(line) for line in data.decode().splitlines()] == rows
    starts = [0] + [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    # inside line 5, just before its newline, after it, inside the first line, the whole file
    for cut, done in [(starts[5] + 9, 5), (starts[6] - 1, 5), (starts[6], 6), (4, 0), (len(data), 12)]:
        path.write_bytes(data[:cut])
        scorer = FakeScorer()
        assert run(scorer) == rows
        assert sum(len(window) for window in scorer.seen) == 3 * (12 - done)
        assert path.read_bytes() == data


def test_rows_are_written_window_by_window(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(preference_scoring, "append_jsonl", lambda path, rows: written.append(len(rows)))
    scorer = FakeScorer()
    score_preferences(items(12), tiny_tokenizer(), scorer, max_len=100, out_path=tmp_path / "a.jsonl", progress=False)
    assert written == [len(window) // 3 for window in scorer.seen] and len(written) > 1


def test_a_file_of_other_rows_or_settings_is_refused(tmp_path):
    path, tokenizer = tmp_path / "set.jsonl", tiny_tokenizer()

    def run(these, settings):
        return score_preferences(
            these, tokenizer, FakeScorer(), max_len=100, out_path=path, settings=settings, progress=False
        )

    run(items(4), {"checkpoint": "a"})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(checkpoint differ"):
        run(items(4), {"checkpoint": "b"})
    with pytest.raises(ValueError, match="row 0 belongs to another set"):
        run(items(5)[1:], {"checkpoint": "a"})
    with pytest.raises(ValueError, match="4 rows for 3"):
        run(items(3), {"checkpoint": "a"})
    assert path.read_bytes() == before


def test_a_reward_that_is_not_finite_names_the_row():
    model = tiny_reward_model()
    with torch.no_grad():
        model.network.score.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="row 0: .*not finite"):
        score_preferences(items(1), tiny_tokenizer(), Scorer(model, None, 200), max_len=100, progress=False)


# Real data


def test_every_real_row_is_read_or_counted(shared_data):
    tokenizer = tiny_tokenizer()
    hh = read_preference_set(str(shared_data / "hh_harmless_dev.jsonl.gz"), tokenizer, ReadingOptions(template="{}"))
    # Counted with parse_hh over the raw file: 1135 rows.
    assert hh.format == "hh" and hh.name == "hh_harmless_dev"
    assert len(hh.items) == 1128 and hh.left_out == {"misordered_turns": 5, "empty_response": 2}
    llmbar = read_preference_set(str(shared_data / "preferences" / "llmbar.jsonl"), tokenizer, CHAT)
    counts = {
        subset: sum(item.subset == subset for item in llmbar.items) for subset in {i.subset for i in llmbar.items}
    }
    assert counts == {
        "Natural": 100,
        "Adversarial/Neighbor": 134,
        "Adversarial/GPTInst": 92,
        "Adversarial/GPTOut": 47,
        "Adversarial/Manual": 46,
    }
    assert llmbar.left_out == {}
    model = tiny_reward_model("llama", tokenizer)
    rows = score_preferences(hh.items[:3], tokenizer, Scorer(model, None, 4096), max_len=1024, progress=False)
    assert all(reward is not None for row in rows for reward in row["rewards"])
