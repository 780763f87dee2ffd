"""Labelled responses of one prompt as one training example."""

from __future__ import annotations

import random

import datasets
import pytest
import torch

from openrlhf.cli import reward_data
from openrlhf.datasets.dealing import deal, fit_responses
from openrlhf.datasets.preference import PreferenceOptions, encode_prompt, encode_response, prepare_preferences
from openrlhf.datasets.response_groups import prepare_groups
from openrlhf.datasets.templates import render_prompt
from openrlhf.trainer.config import TrainRMConfig, validate
from tests.tiny import tiny_tokenizer

EOS = 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def solution(question, text, is_correct, **more):
    return {"question": question, "generated_solution": text, "is_correct": is_correct, **more}


def solutions(question, correct, wrong):
    texts = [(f"good {i}", True) for i in range(correct)] + [(f"bad {i}", False) for i in range(wrong)]
    return [solution(question, text, label) for text, label in texts]


def prepare(rows, limit=4, tokenizer=None, seed=0, max_len=64, on_long="truncate", template="plain", **settings):
    options = PreferenceOptions(input_template=template, max_len=max_len, on_long=on_long)
    return prepare_groups(
        datasets.Dataset.from_list(rows), tokenizer or tiny_tokenizer(), options, limit, seed=seed, **settings
    )


def texts(group, tokenizer=None):
    """Prompt, correct and wrong texts of an example, EOS left out."""
    decode = (tokenizer or tiny_tokenizer()).decode
    return decode(group.prompt_ids), *([decode(ids[:-1]) for ids in side] for side in (group.correct, group.wrong))


# ---- dealing


class Unshuffled(random.Random):
    """Leaves lists in order."""

    def sample(self, population, k):
        return list(population)[:k]


@pytest.mark.parametrize(
    ("correct", "wrong", "limit", "expected"),
    [
        ("ab", "x", 4, [("ab", "x")]),
        # 8 / 4: two examples; a, c, e | b, d, and the fifth dealt, e, was the first's, so x goes to the second
        ("abcde", "xyz", 4, [("ace", "y"), ("bd", "xz")]),
        ("abc", "xyz", 2, [("a", "x"), ("b", "y"), ("c", "z")]),
        ("a", "vwxyz", 3, [("a", "vw")]),  # 6 / 3 would be two, but there is one correct response
        ("abcdef", "xy", 2, [("a", "x"), ("b", "y")]),
        ("abc", "", 4, []),
        ("", "x", 4, []),
    ],
)
def test_responses_are_dealt_round(correct, wrong, limit, expected):
    examples = deal(list(correct), list(wrong), limit, Unshuffled())
    assert [tuple(map("".join, example)) for example in examples] == expected


def test_no_response_is_in_two_examples_and_few_are_left_out():
    for correct in range(8):
        for wrong in range(8):
            for limit in range(2, 7):
                sides = list(range(correct)), list(range(correct, correct + wrong))
                examples = deal(*sides, limit, random.Random(1))
                assert len(examples) == min(-(-(correct + wrong) // limit), correct, wrong)
                used = [i for example in examples for side in example for i in side]
                assert len(used) == len(set(used))
                assert all(set(c) <= set(sides[0]) and set(w) <= set(sides[1]) for c, w in examples)
                assert all(c and w and len(c) + len(w) <= limit for c, w in examples)
                # the rarer side is used up; of the other one each example holds limit - 1 at most
                assert len(used) == min(correct + wrong, limit * len(examples)) if examples else not used


# ---- fitting


def test_each_response_is_cut_by_itself_and_what_is_then_equal_is_left_out():
    # two prompt tokens of six leave three response tokens and EOS
    ids, reasons = fit_responses(
        [11, 12],
        [[5, 6], [5, 6, 7, 8], [5, 6, 7, 9], [5, 8, EOS]],
        [[3, 4, 5, 6], [5, 6, EOS], [], [3, 4, 5, 7], [5, 7]],
        EOS,
        6,
    )
    assert reasons == [
        "conflicting_tokens",  # 5 6 is also the second wrong one
        "truncated",
        "same_tokens",
        "kept",
        "truncated",
        "conflicting_tokens",
        "empty_response",
        "same_tokens",
        "kept",
    ]
    kept = [[5, 6, 7, EOS], [5, 8, EOS], [3, 4, 5, EOS], [5, 7, EOS]]
    assert [response for response in ids if response] == kept


def test_other_ways_with_long_responses():
    assert fit_responses([1], [[5, 6, 7]], [[8]], EOS, 4, on_long="drop") == ([None, [8, EOS]], ["too_long", "kept"])
    assert fit_responses([1, 2, 3], [[5]], [[8]], EOS, 4)[1] == ["prompt_too_long"] * 2
    with pytest.raises(ValueError, match="5 tokens.*max_len is 4"):
        fit_responses([1], [[8]], [[5, 6, 7]], EOS, 4, on_long="error")


def test_a_long_response_names_its_row():
    rows = [*solutions("one", 1, 1), *solutions("two", 2, 1), solution("two", "bad " * 60, False)]
    with pytest.raises(ValueError, match="row 2 and others of its question: .*max_len is 64"):
        prepare(rows, on_long="error")
    assert prepare(rows, on_long="drop").counts["too_long"] == 1
    cut = prepare(rows)
    assert cut.counts["truncated"] == 1 and cut.lengths.max() == 64
    assert all(ids[-1] == EOS and ids.count(EOS) == 1 for i in (0, 1) for ids in cut[i].correct + cut[i].wrong)


def test_a_prompt_that_loses_one_side_gives_no_example():
    same = "good " * 70
    rows = [solution("q", same + "a", True), solution("q", same + "b", False), solution("q", "bad", False)]
    rows += [*solutions("r", 1, 1)]
    data = prepare(rows)
    assert len(data) == 1 and texts(data[0])[0] == "r\n"
    assert data.counts["conflicting_tokens"] == 2 and data.counts["one_sided"] == 1
    with pytest.raises(
        ValueError, match="no prompt has both .*read 3, examples 0, .*one_sided 1, conflicting_tokens 2"
    ):
        prepare(rows[:3])


# ---- data


ROWS = [
    solution("one", "good", True, predicted_answer="1", parsed=True),
    solution("one", "good ", True, predicted_answer="1", parsed=True),  # duplicate
    solution(" one", "bad", False, predicted_answer="2", parsed=True),  # the same question
    solution("one", "yes", True, predicted_answer="1", parsed=True),
    solution("one", "yes", False, predicted_answer="1", parsed=True),  # conflicting with the row before
    solution("one", "no", False, predicted_answer=None, parsed=True),  # unparsed
    solution("one", "  ", False, predicted_answer="3", parsed=True),  # empty
    solution("one", "she", None, predicted_answer="3", parsed=True),  # unlabelled
    solution("two", "good apples", True, predicted_answer="3", parsed=True),  # of a question without a wrong one
    *[solution("three", f"good {i}", True, predicted_answer="4", parsed=True) for i in range(2)],
    *[solution("three", f"bad {i}", False, predicted_answer="5", parsed=True) for i in range(7)],
]


def test_every_row_is_used_or_counted():
    data = prepare(ROWS)
    # three: 9 responses are 3 examples of 4, but 2 correct ones make 2, of 1 correct and 3 of the 7 wrong ones each
    assert data.counts == {
        "read": 18,
        "examples": 3,
        "pairs": 1 + 3 + 3,
        "responses": 2 + 4 + 4,
        "truncated": 0,
        "duplicate": 1,
        "unparsed": 1,
        "empty": 1,
        "unlabelled": 1,
        "questions": 3,
        "questions_without_wrong": 1,
        "questions_paired": 2,
        "conflicting": 1,  # two rows
        "one_sided": 1,
        "surplus": 1,
    }
    assert texts(data[0]) == ("one\n", ["good"], ["bad"])
    assert data.pair_counts.tolist() == [1, 3, 3] and data.row_counts.tolist() == [2, 4, 4] and data.has_margin is False
    dealt = [texts(data[i]) for i in (1, 2)]
    assert sorted(text for group in dealt for text in group[1]) == ["good 0", "good 1"]
    assert len({text for group in dealt for text in group[2]}) == 6
    assert prepare(ROWS, include_unparsed=True).counts["pairs"] == 2 + 3 + 3


def test_tokens_of_examples():
    data = prepare([*solutions("one", 1, 3), *solutions("what is two", 2, 1)])
    assert len(data) == 2
    for i in range(2):
        group = data[i]
        rows = [group.prompt_ids + ids for ids in group.correct + group.wrong]
        assert data.lengths[i] == max(map(len, rows)) and data.plain_tokens[i] == sum(map(len, rows))
        assert data.row_tokens[i] == sum(map(len, rows)) - (len(rows) - 1) * len(group.prompt_ids)
    pairs = [{"question": "what is two", "correct": "good", "incorrect": "bad"}]
    plain = prepare_preferences(
        datasets.Dataset.from_list(pairs), tiny_tokenizer(), PreferenceOptions(input_template="plain")
    )
    pair = plain[0]
    sizes = len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids)
    assert plain.plain_tokens.tolist() == [2 * sizes[0] + sizes[1] + sizes[2]]
    assert plain.prompt_hashes() < data.prompt_hashes() and len(data.prompt_hashes()) == 2


def test_batch_by_hand():
    tokenizer = tiny_tokenizer(add_bos=True)
    rows = [
        solution("one", "good", True),
        solution("one", "bad", False),
        solution("one", "no", False),
        solution("what is two", "yes", True),
        solution("what is two", "the answer", True),
        solution("what is two", "bad", False),
    ]
    data = prepare(rows, tokenizer=tokenizer)
    batch = data.collate([1, 0], pad_id=0)
    by_hand = []
    for i in (1, 0):
        prompt, correct, wrong = texts(data[i], tokenizer)
        assert (set(correct), set(wrong)) == (({"good"}, {"bad", "no"}) if i == 0 else ({"yes", "the answer"}, {"bad"}))
        question = "what is two" if i else "one"
        assert prompt == "<s>" + render_prompt("plain", question)
        prompt_ids = encode_prompt(tokenizer, render_prompt("plain", question))
        by_hand += [(prompt_ids, encode_response(tokenizer, text)) for text in correct + wrong]
    width = max(len(p) + len(r) for p, r in by_hand)
    assert batch.input_ids.shape == (6, width)
    for row, (prompt, response) in enumerate(by_hand):
        padding = width - len(prompt) - len(response)
        assert batch.input_ids[row].tolist() == prompt + response + [0] * padding
        assert batch.attention_mask[row].tolist() == [True] * (len(prompt) + len(response)) + [False] * padding
        expected = [False] * len(prompt) + [True] * len(response) + [False] * padding
        assert batch.response_mask[row].tolist() == expected
    # two correct with one wrong response in rows 0 to 2, one correct with two wrong ones in rows 3 to 5
    assert batch.chosen.tolist() == [0, 1, 3, 3] and batch.rejected.tolist() == [2, 2, 4, 5]
    assert batch.weight.tolist() == [0.5] * 4 and batch.weight.dtype == torch.float32
    assert batch.index.tolist() == [1, 0] and batch.margin is None and batch.group.unique().numel() == 2


def test_pairs_of_an_example_go_by_correct_then_by_wrong_response():
    batch = prepare(solutions("q", 2, 3), limit=5).collate([0], 0)
    assert batch.chosen.tolist() == [0, 0, 0, 1, 1, 1] and batch.rejected.tolist() == [2, 3, 4, 2, 3, 4]
    assert batch.weight.tolist() == pytest.approx([1 / 6] * 6)


def test_examples_of_one_prompt_have_its_first_spelling_and_one_group():
    rows = [solution("what  is", "good 0", True), *solutions("what is", 3, 3), *solutions("of", 1, 1)]
    data = prepare(rows, limit=2)
    batch = data.collate(range(4), 0)
    assert [texts(data[i])[0] for i in range(3)] == ["what  is\n"] * 3  # the repeated "good 0" is a duplicate
    assert len(set(batch.group[:3].tolist())) == 1 and batch.group[3] != batch.group[0]


def test_dealing_depends_on_seed_and_question_alone():
    rows = solutions("q", 5, 6)
    first, same, other = (prepare(rows, seed=seed, cache=False) for seed in (0, 0, 1))
    assert [first[i] for i in range(3)] == [same[i] for i in range(3)] != [other[i] for i in range(3)]
    among = prepare(solutions("r", 3, 3) + rows)
    assert [among[2 + i] for i in range(3)] == [first[i] for i in range(3)]
    assert first.fingerprint != other.fingerprint


def test_prepared_groups_are_read_back_and_depend_on_all_settings(monkeypatch):
    first = prepare(ROWS)

    def fail(*args, **kwargs):
        raise AssertionError("prepared a second time")

    monkeypatch.setattr("openrlhf.datasets.response_groups._prepare_batch", fail)
    monkeypatch.setattr("openrlhf.datasets.response_groups.group_solutions", fail)
    again = prepare(ROWS)
    assert again.fingerprint == first.fingerprint and again.counts == first.counts
    assert [again[i] for i in range(3)] == [first[i] for i in range(3)]
    monkeypatch.undo()
    others = [
        prepare(ROWS, limit=5),
        prepare(ROWS, seed=1),
        prepare(ROWS, max_len=65),
        prepare(ROWS, template="{question}"),
        prepare(ROWS, tokenizer=tiny_tokenizer(add_bos=True)),
        prepare(ROWS, include_unparsed=True),
        prepare(ROWS, strip_calculator=True),
        prepare(ROWS[:-1]),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 9


def test_two_processes_give_the_examples_of_one():
    rows = [row for i in range(6) for row in solutions(f"{i}", 2, 2)]
    one, two = prepare(rows, cache=False), prepare(rows, cache=False, num_proc=2)
    assert one.counts == two.counts and [one[i] for i in range(6)] == [two[i] for i in range(6)]


def test_templates_and_calculator():
    rows = datasets.Dataset.from_list([solution("q", "1+1=<<1+1=2>>2", True), solution("q", "3", False)])
    data = prepare_groups(rows, tiny_tokenizer(), PreferenceOptions(), 2, seed=0, strip_calculator=True)
    assert data.options.input_template == "nemo"
    assert texts(data[0]) == (render_prompt("nemo", "q"), ["1+1=2"], ["3"])
    chat = prepare_groups(rows, tiny_tokenizer(), PreferenceOptions(apply_chat_template=True), 2, seed=0)
    assert texts(chat[0])[0] == "<|user|>\nq</s>\n<|assistant|>\n"
    assert texts(chat[0])[1] == ["1+1=<<1+1=2>>2"]


def test_old_column_names_and_solutions_as_steps():
    old = [{"problem": "q", "generation": text, "is_correct": text == "good"} for text in ("good", "bad")]
    assert texts(prepare(old)[0]) == ("q\n", ["good"], ["bad"])
    steps = [{"problem": "q", "steps": [text, "yes"], "solution_correct": text == "good"} for text in ("good", "bad")]
    assert texts(prepare(steps)[0]) == ("q\n", ["good\nyes"], ["bad\nyes"])


def test_text_of_an_example_shows_the_whole_group():
    data = prepare(solutions("q", 1, 2), tokenizer=tiny_tokenizer(add_bos=True))
    text = data.example_text(0, tiny_tokenizer())
    assert "<s>q\n" in text and all(f"{name}</s>" in text for name in ("good 0", "bad 0", "bad 1"))
    assert text.count("[correct: ") == 1 and text.count("[wrong: ") == 2


def test_rows_that_cannot_be_grouped_are_named():
    with pytest.raises(ValueError, match=r"question \(or problem\).*is_correct, got \['question', 'correct'"):
        prepare([{"question": "q", "correct": "a", "incorrect": "b"}])
    with pytest.raises(ValueError, match="row 1: is_correct: expected true, false or null"):
        prepare([solution("q", "a", "true"), solution("q", "b", "perhaps")])
    with pytest.raises(ValueError, match="responses_per_prompt: expected at least 2, got 1"):
        prepare(ROWS, limit=1)
    with pytest.raises(ValueError, match="no prompt has both .*read 3, .*questions_without_wrong 1, one_sided 3"):
        prepare(solutions("q", 3, 0))
    with pytest.raises(ValueError, match="has no rows"):
        prepare([])
    with pytest.raises(IndexError, match="example 3 of 3"):
        prepare(ROWS)[3]


@pytest.mark.parametrize("keys", [{}, {"format": "prompt_chosen_rejected"}, {"prompt_key": "question"}])
def test_labelled_responses_where_pairs_are_expected_tell_what_to_do(keys):
    with pytest.raises(ValueError, match="data_setup, or train on them with train_rm --responses_per_prompt"):
        prepare_preferences(datasets.Dataset.from_list(ROWS), tiny_tokenizer(), PreferenceOptions(**keys))


# ---- flags


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"responses_per_prompt": 1}, "--responses_per_prompt must be at least 2.*got 1"),
        ({"responses_per_prompt": 4, "margin_loss": True}, "--margin_loss"),
        (
            {"responses_per_prompt": 4, "contrastive_loss": True, "contrastive_reduction": "original"},
            "--contrastive_reduction original",
        ),
        ({"responses_per_prompt": 4, "dataset_format": "hh"}, "--dataset_format"),
        ({"responses_per_prompt": 4, "chosen_key": "a"}, "--chosen_key"),
        ({"responses_per_prompt": 4, "rejected_key": "a"}, "--rejected_key"),
        ({"responses_per_prompt": 4, "prompt_key": "a"}, "--prompt_key"),
        ({"strip_calculator": True}, "--strip_calculator.*add --responses_per_prompt"),
        ({"include_unparsed": True}, "--include_unparsed.*add --responses_per_prompt"),
    ],
)
def test_flags_that_do_not_go_together(settings, told):
    with pytest.raises(ValueError, match=told):
        validate(TrainRMConfig(pretrain="m", dataset="d", **settings))
    validate(TrainRMConfig(pretrain="m", dataset="d", responses_per_prompt=2, contrastive_loss=True))


def test_the_embedded_task_gives_its_labelled_solutions(monkeypatch):
    from openrlhf.evaluation import sampling

    asked = []

    def completions(cache_dir, policy_path, split, n_questions, n_samples, temperature, seed, **more):
        asked.append((split, n_questions, n_samples, seed))
        texts = [("good", True), ("bad", False), ("no", False)]
        return [sampling.Completion(split, text, "1", "1" if label else "2", label) for text, label in texts]

    monkeypatch.setattr(sampling, "pocket_completions", completions)
    config = TrainRMConfig(pretrain="pocket", dataset="pocket", responses_per_prompt=4, max_samples=10, seed=5)
    train, held_out = reward_data.load_pairs(config, tiny_tokenizer())
    assert texts(train[0])[0] == render_prompt("pocket", "train") and len(train[0].wrong) == 2
    assert texts(held_out[0])[0] == render_prompt("pocket", "validation")
    assert asked == [("train", 30, 8, 5), ("validation", 30, 8, 5)]
    pairs, _ = reward_data.load_pairs(TrainRMConfig(pretrain="pocket", dataset="pocket"), tiny_tokenizer())
    assert len(pairs) == 2 and texts(train[0])[1] == [tiny_tokenizer().decode(pairs[0].chosen_ids[:-1])]
