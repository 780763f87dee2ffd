"""Preference pairs from labelled solutions."""

from __future__ import annotations

from collections import Counter

import datasets
import pytest

from openrlhf.datasets.pairing import build_pairs, normalise_question, remove_calculator


def solution(question, text, is_correct, **more):
    return {"question": question, "generated_solution": text, "is_correct": is_correct, **more}


def solutions(question, correct, wrong):
    texts = [(f"right {i}", True) for i in range(correct)] + [(f"wrong {i}", False) for i in range(wrong)]
    return [solution(question, f"{question} {text}", label) for text, label in texts]


@pytest.mark.parametrize(
    ("correct", "wrong", "limit", "expected"),
    [(2, 3, 4, 4), (2, 3, 100, 6), (1, 1, 4, 1), (0, 3, 4, 0), (3, 0, 4, 0), (4, 6, 24, 24), (6, 4, 23, 23)],
)
def test_pairs_of_one_question(correct, wrong, limit, expected):
    pairs, counts = build_pairs(solutions("q", correct, wrong), limit, seed=0)
    assert len(pairs) == counts["pairs"] == expected
    assert len({(p["correct"], p["incorrect"]) for p in pairs}) == expected
    assert all("right" in p["correct"] and "wrong" in p["incorrect"] and p["question"] == "q" for p in pairs)


@pytest.mark.parametrize(("correct", "wrong", "limit"), [(2, 5, 4), (4, 4, 8), (3, 6, 9), (10, 10, 7)])
def test_solutions_are_used_evenly(correct, wrong, limit):
    pairs, _ = build_pairs(solutions("q", correct, wrong), limit, seed=0)
    for side, size in (("correct", correct), ("incorrect", wrong)):
        used = Counter(pair[side] for pair in pairs)
        # limit uses over `size` solutions: each one limit // size times, some once more
        assert set(used.values()) | ({0} if len(used) < size else set()) <= {limit // size, -(-limit // size)}


def test_seed_and_other_questions():
    rows = solutions("q", 5, 5) + solutions("r", 5, 5)
    first, same, other = (build_pairs(rows, 3, seed)[0] for seed in (0, 0, 1))
    assert first == same != other
    alone = build_pairs(solutions("r", 5, 5), 3, 0)[0]
    assert first[3:] == alone
    assert [pair["question"] for pair in first] == ["q"] * 3 + ["r"] * 3


def test_duplicates_and_conflicts_are_left_out():
    rows = [
        solution("q", "A", True),
        solution("q", "A ", True),  # the same but for white space
        solution(" q", "B", False),  # the same question but for white space
        solution("q", "C", True),
        solution("q", "C", False),  # labelled both ways
    ]
    pairs, counts = build_pairs(rows, 10, 0)
    assert pairs == [{"question": "q", "correct": "A", "incorrect": "B"}]
    assert counts == {"read": 5, "duplicate": 1, "conflicting": 1, "questions": 1, "questions_paired": 1, "pairs": 1}


def test_unusable_rows_are_counted_by_reason():
    rows = [
        solution("q", "A", True, predicted_answer="1"),
        solution("q", "B", False, predicted_answer="2"),
        solution("q", "C", False, predicted_answer=None),
        solution("q", "D", False, predicted_answer="3", parsed=False),
        solution("q", "E", None, predicted_answer="3"),
        solution("q", "  ", False, predicted_answer="3"),
        solution("only correct", "F", True, predicted_answer="3"),
        solution("only wrong", "G", False, predicted_answer="3"),
    ]
    pairs, counts = build_pairs(rows, 10, 0)
    assert [pair["incorrect"] for pair in pairs] == ["B"]
    expected = {
        "read": 8,
        "unparsed": 2,
        "unlabelled": 1,
        "empty": 1,
        "questions": 3,
        "questions_without_correct": 1,
        "questions_without_wrong": 1,
        "questions_paired": 1,
        "pairs": 1,
    }
    assert counts == expected
    pairs, _ = build_pairs(rows, 10, 0, include_unparsed=True)
    assert sorted(pair["incorrect"] for pair in pairs) == ["B", "C", "D"]


def test_questions_that_are_alike_are_not_paired():
    for a, b in (("f'(2)?", "f''(2)?"), ("5²", "52"), (".5", "5"), ("X", "x")):
        pairs, counts = build_pairs([solution(a, "A", True), solution(b, "B", False)], 4, 0)
        assert pairs == [] and counts["questions"] == 2
        excluded = build_pairs([solution(a, "A", True), solution(b, "B", False)], 4, 0, exclude_questions=[a.upper()])
        assert excluded[1]["contaminated"] >= 1


def test_null_answer_of_a_correct_solution_is_not_unparsed():
    labelled = datasets.Dataset.from_list(
        [solution("q", "A", True, predicted_answer=None), solution("q", "B", False, predicted_answer="2")]
        + [solution("q", "C", False, predicted_answer=None)]
    )
    pairs, counts = build_pairs(labelled, 9, 0)
    assert pairs == [{"question": "q", "correct": "A", "incorrect": "B"}] and counts["unparsed"] == 1


@pytest.mark.parametrize("no", [False, "False", "false ", "0", 0])
def test_mark_of_unparsed_solutions_is_read_from_text_too(no):
    rows = [solution("q", "A", True, parsed="True"), solution("q", "B", False, parsed=None)]
    pairs, counts = build_pairs([*rows, solution("q", "C", False, parsed=no)], 9, 0)
    assert [pair["incorrect"] for pair in pairs] == ["B"] and counts["unparsed"] == 1


def test_test_questions_are_left_out_in_any_spelling():
    rows = solutions("What is  “1.5 + 2”?", 1, 1) + solutions("What is 15 + 2?", 1, 1)
    pairs, counts = build_pairs(rows, 1, 0, exclude_questions=['what is "1.5 + 2"'])
    assert [pair["question"] for pair in pairs] == ["What is 15 + 2?"]
    assert counts["contaminated"] == 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("How many?", "how  many"),
        ("Joan found 70 seashells on the beach . She", "Joan found 70 seashells on the beach. she"),
        ("Janet’s ducks", "Janet's ducks"),
        ("a\u00a0b\u2028c", "a b c"),
        ("３ − 2", "3 - 2"),
        ("He has 5.", "He has 5"),
    ],
)
def test_spellings_of_one_question(a, b):
    assert normalise_question(a) == normalise_question(b)


@pytest.mark.parametrize(
    ("a", "b"), [("1.5", "15"), ("3+2", "3-2"), ("2:30", "230"), ("1 2", "12"), ("x = 2", "x = 3")]
)
def test_different_questions(a, b):
    assert normalise_question(a) != normalise_question(b)


def test_calculator_annotations():
    text = "16 - 3 = <<16-3=13>>13 and 2 > 1 << 3\nso <<13*2=26>>26"
    assert remove_calculator(text) == "16 - 3 = 13 and 2 > 1 << 3\nso 26"
    rows = [solution("q", "1+1=<<1+1=2>>2", True), solution("q", "1+1=2", True), solution("q", "<<9>>3", False)]
    pairs, counts = build_pairs(rows, 9, 0, strip_calculator=True)
    assert pairs == [{"question": "q", "correct": "1+1=2", "incorrect": "3"}] and counts["duplicate"] == 1


def test_rows_of_a_data_set():
    rows = solutions("q", 2, 2)
    assert build_pairs(datasets.Dataset.from_list(rows), 2, 0) == build_pairs(rows, 2, 0)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="pairs_per_question"):
        build_pairs([], 0, 0)
    with pytest.raises(ValueError, match="row 1: a completion needs"):
        build_pairs([solution("q", "a", True), {"question": "q"}], 1, 0)


def test_real_solutions(shared_data):
    from openrlhf.datasets.completions import completion_to_row, read_completions

    rows = [completion_to_row(c) for c in read_completions(shared_data / "gsm8k_pool" / "validation.jsonl.gz")]
    pairs, counts = build_pairs(rows, 4, 0)
    # of the pool's 125 questions 102 have both kinds (its README); 19 rows are not parsed
    assert counts["unparsed"] == 19 and counts["questions_paired"] == 102 and len(pairs) == 4 * 102
