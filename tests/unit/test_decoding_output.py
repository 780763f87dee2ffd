"""The output folder: rows that other commands read, and files that a killed run leaves."""

from __future__ import annotations

import json

import pytest

from decoding.output import OutputFolder
from decoding.records import Answered, Decoded, Question
from openrlhf.datasets.completions import read_completions
from openrlhf.evaluation.scored_rows import read_scored_rows

QUESTIONS = [Question(k, f"what is {k} ?", f"what is {k} ?\n", None, str(k), {"id": f"q{k}"}) for k in range(4)]
SETTINGS = {"temperature": 1.0, "max_tokens": 8}


def grade(question, text):
    return (text or None), text == question.expected_answer


def answered(k, method="majority", seed=0, texts=None, **more):
    scores = {"reward": -0.5, "partial_rewards": [0.25, -0.5], "cosine_sim": [0.5, 0.75]}
    texts = [str(k)] if texts is None else texts
    responses = [Decoded(text, (5, 6, 2), True, 1.5, sample, **scores) for sample, text in enumerate(texts)]
    counted = {"policy_tokens": 3 * len(texts), "reward_tokens": 2 * len(texts), "seconds": 0.5} | more
    return Answered(QUESTIONS[k], method, seed, responses, texts[0], texts[0] == str(k), **counted)


def opened(folder, method="majority", seed=0, settings=SETTINGS, questions=QUESTIONS, resume=True):
    output = OutputFolder(folder, grade)
    return output, output.open(method, seed, settings, questions, resume)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_and_answers(tmp_path):
    output, done = opened(tmp_path)
    assert done == set()
    output.write(answered(2, details={"threshold": 0.25}, trace=[{"step": 1, "candidates": []}]))
    (row,) = lines(tmp_path / "majority" / "output-seed0.jsonl")
    assert row == {
        "question": "what is 2 ?", "generated_solution": "2", "expected_answer": "2", "predicted_answer": "2",
        "is_correct": True, "sample": 0, "id": "q2", "index": 2, "seed": 0, "method": "majority", "policy_tokens": 3,
        "num_actions": 2, "finished": True, "score": 1.5, "reward": -0.5, "partial_rewards": [0.25, -0.5],
        "cosine_sim": [0.5, 0.75],
    }  # fmt: skip
    (line,) = lines(tmp_path / "answers.jsonl")
    assert line == {
        "index": 2, "question": "what is 2 ?", "method": "majority", "seed": 0, "answer": "2", "expected_answer": "2",
        "is_correct": True, "policy_tokens": 3, "reward_tokens": 2, "seconds": 0.5, "threshold": 0.25,
    }  # fmt: skip
    assert [row["trace"] for row in output.traces()] == [[{"step": 1, "candidates": []}]]
    assert json.loads((tmp_path / "majority" / "output-seed0.settings.json").read_text()) == SETTINGS


def test_rows_are_completions_and_scored_rows(tmp_path):
    output, _ = opened(tmp_path)
    output.write(answered(0, texts=["0", "9"]))
    stopped = Decoded("1", (5,), False, None, 0, None, [0.25], [0.5])
    output.write(Answered(QUESTIONS[1], "majority", 0, [stopped]))
    file = output.responses_file("majority", 0)
    assert [(one.sample, one.is_correct) for one in read_completions(file)] == [(0, True), (1, False), (0, True)]
    assert [row["reward"] for row in read_scored_rows(file)] == [-0.5, -0.5, None]


def test_similarities_with_several_goals_stand_under_another_key(tmp_path):
    output, _ = opened(tmp_path)
    two = Decoded("0", (5, 6), True, 1.0, 0, -0.5, [0.25, -0.5], [[0.5, 0.1], [0.75, 0.2]])
    output.write(Answered(QUESTIONS[0], "majority", 0, [two]))
    (row,) = lines(output.responses_file("majority", 0))
    assert row["goal_similarities"] == [[0.5, 0.1], [0.75, 0.2]] and "cosine_sim" not in row
    assert len(list(read_scored_rows(output.responses_file("majority", 0)))) == 1


def test_unscored_rows_have_no_scores(tmp_path):
    output, _ = opened(tmp_path, "greedy")
    output.write(Answered(QUESTIONS[0], "greedy", 0, [Decoded("0", (5, 2), True)]))
    (row,) = lines(output.responses_file("greedy", 0))
    assert not {"reward", "partial_rewards", "cosine_sim"} & set(row) and row["num_actions"] == 2


def test_what_a_kill_leaves_is_cut_and_done_again(tmp_path):
    output, _ = opened(tmp_path)
    for k in (0, 1):
        output.write(answered(k, texts=["0", "9"]))
    file = output.responses_file("majority", 0)
    whole = file.read_bytes()
    file.write_bytes(whole + whole.split(b"\n")[0].replace(b'"index": 0', b'"index": 2') + b'\n{"question": "ha')
    with open(tmp_path / "answers.jsonl", "ab") as handle:
        handle.write(b'{"index": 3, "ques')
    again, done = opened(tmp_path)
    assert done == {0, 1} and file.read_bytes() == whole  # question 2 has rows and no answer, 3 half an answer
    for k in (3, 2):
        again.write(answered(k))
    again.finish()
    assert [row["index"] for row in lines(file)] == [0, 0, 1, 1, 2, 3]  # in order, whatever was done first
    assert [row["index"] for row in lines(tmp_path / "answers.jsonl")] == [0, 1, 2, 3]


def test_an_answer_whose_rows_are_gone_is_not_done(tmp_path):
    output, _ = opened(tmp_path)
    output.open("sample", 0, SETTINGS, QUESTIONS, True)
    output.write(answered(0))
    output.write(answered(0, "sample"))
    output.responses_file("majority", 0).unlink()
    again, done = opened(tmp_path)
    assert done == set()
    assert [line["method"] for line in lines(tmp_path / "answers.jsonl")] == ["sample"]


def test_answers_of_an_earlier_call_need_resume(tmp_path):
    output, _ = opened(tmp_path)
    output.write(answered(0))
    with pytest.raises(ValueError, match="majority/output-seed0.jsonl holds answers .* --resume, or choose another"):
        opened(tmp_path, resume=False)
    assert opened(tmp_path, "beam", resume=False)[1] == set()  # another method
    assert opened(tmp_path, seed=1, resume=False)[1] == set()


def test_other_settings_are_refused_by_name(tmp_path):
    output, _ = opened(tmp_path)
    output.write(answered(0))
    before = output.responses_file("majority", 0).read_bytes()
    with pytest.raises(ValueError, match=r"\(temperature differ: temperature 1.0 against 0.5\).*--output_dir"):
        opened(tmp_path, settings={"temperature": 0.5, "max_tokens": 8})
    assert output.responses_file("majority", 0).read_bytes() == before


def test_another_question_under_a_number_is_refused(tmp_path):
    output, _ = opened(tmp_path)
    output.write(answered(0))
    other = [Question(0, "what is x ?", "p", None, "0")]
    with pytest.raises(ValueError, match="question 0 is another one than in the input"):
        opened(tmp_path, questions=other)
    assert opened(tmp_path, questions=QUESTIONS[1:])[1] == {0}  # another part of the same questions


def test_the_table_counts_samples_one_by_one(tmp_path):
    output, _ = opened(tmp_path, "sample")
    for k in (0, 1):
        # right: both samples of question 0, one of two of question 1 -> 3 of 4; 6 policy tokens a pool of 2 -> 3.0
        one = answered(k, "sample", texts=["0", "0"] if k == 0 else ["1", "9"])
        output.write(Answered(**{**vars(one), "is_correct": None, "answer": None}))
    output.open("beam", 0, SETTINGS, QUESTIONS, True)
    output.write(answered(0, "beam", texts=["9"]))
    output.write(answered(1, "beam", seconds=1.5))
    table = output.table(["sample", "beam", "absent"]).splitlines()
    assert table[2].split() == ["sample", "1", "2", "75.0%", "3.0", "2.0", "0.250"]
    assert table[3].split() == ["beam", "1", "2", "50.0%", "3.0", "2.0", "1.000"]
    assert len(table) == 5  # head, line, two methods, note


def test_a_line_that_is_no_answer_is_named(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"index": 0}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"answers.jsonl:1: no answer, its keys are \['index'\]"):
        OutputFolder(tmp_path, grade)
