"""First wrong steps: where steps end in tokens, the rules, and rows that cannot be judged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.step_level import first_fall, largest_drop, lowest_step, step_ends, step_level, stepped_row


def row(first_error=2, goal=(0.5, 0.4, 0.1, 0.3, 0.3), question="q", **more):
    # tokens: "one" "\ntwo" "\nthr" "ee" EOS; steps end behind tokens 0, 1 and 3
    return {
        "question": question,
        "generated_solution": "one\ntwo\nthree",
        "first_error_step": first_error,
        "token_ends": [3, 7, 11, 13, 13],
        "partial_rewards": [2.0, 1.0, 0.0, 3.0, -9.0],
        "cosine_sim": None if goal is None else list(goal),
        "reward": -9.0,
    } | more


def judged(*rows):
    return step_level(rows, draw_questions([one["question"] for one in rows], 20))


def test_steps_end_where_their_text_ends():
    assert step_ends("one\ntwo\n\n  three \n") == [3, 7, 16]
    assert step_ends("a b a", ["a", "a"]) == [1, 5]
    assert step_ends("a b", ["b", "a"]) is None  # not in this order
    assert step_ends("a b", ["a", " "]) is None
    assert step_ends("\n \n") is None


def test_values_are_those_of_the_token_that_ends_the_step_not_of_eos():
    found = stepped_row(row())
    assert found.values["reward"].tolist() == [2.0, 1.0, 3.0]
    assert found.values["goal similarity"] == pytest.approx([0.5, 0.4, 0.3])
    assert (found.first_error, found.before["reward"]) == (1, 2.0)
    # a token that reaches into the next step is the last one of the step it ends
    wide = stepped_row(row(token_ends=[2, 9, 11, 13, 13]))
    assert wide.values["reward"].tolist() == [1.0, 1.0, 3.0]


def test_rules():
    values = np.array([3.0, 1.0, 0.5, 2.0])
    assert (lowest_step(values, 3.5), largest_drop(values, 3.5), first_fall(values, 3.5)) == (2, 1, 0)
    assert (largest_drop(values, 9.0), first_fall(values, 3.0)) == (0, 1)
    assert first_fall(np.array([1.0, 2.0]), 1.0) is None
    assert lowest_step(np.array([1.0, 1.0]), 0.0) == 0  # the earlier of equal ones


def test_figures_by_hand():
    found = judged(row(2, question="a"), row(3, question="b"))
    # goal at the steps 0.5 0.4 0.3: lowest is step 3, falls are 0, -0.1, -0.1; reward 2 1 3: lowest and first fall 2
    assert found["accuracy"]["lowest goal similarity"][0] == 0.5
    assert found["accuracy"]["first fall of goal similarity"][0] == 0.5
    assert found["accuracy"]["lowest reward"][0] == found["accuracy"]["largest drop of reward"][0] == 0.5
    assert found["within_one"]["lowest reward"][0] == 1.0
    assert found["chance"][0] == pytest.approx(1 / 3)
    assert found["chance_within_one"][0] == pytest.approx((1.0 + 2 / 3) / 2)  # steps 1-3 of error 2, 2-3 of error 3
    # position: right steps are 1 of row a, 1 and 2 of row b; wrong ones 2, 3 and 3: pairs 9, lost none, tied one (2, 2)
    assert found["auroc"]["position"][0] == pytest.approx(8.5 / 9)
    (lowest, *_) = found["differences"]
    assert (lowest["rule"], lowest["better"], lowest["worse"], lowest["p_value"]) == ("lowest", 1, 1, 1.0)


def test_rows_that_cannot_be_judged_are_counted_by_reason():
    found = judged(
        row(),
        row(None),
        row(0),
        row(-1),
        row(reward=None, partial_rewards=None),
        row(token_ends=None),
        row(steps=["one", "absent"]),
        row(4),
        row(3, token_ends=[3, 5, 7, 7, 7]),
    )
    assert found["rows"] == 1
    assert found["left_out"] == {
        "without error": 3,
        "without reward": 1,
        "without token_ends": 1,
        "steps not found in the solution": 1,
        "first_error_step beyond the steps": 1,
        "first wrong step cut off": 1,
    }
    nothing = judged(row(None))
    assert nothing["rows"] == 0 and nothing["accuracy"] == {} and nothing["chance"] == [None, None, None]
    assert step_level([{"question": "q", "reward": 1.0}], draw_questions(["q"])) is None


def test_steps_that_were_cut_off_are_no_candidates():
    found = judged(row(2, token_ends=[3, 5, 7, 7, 7]))  # only "one" and "two" were read
    assert (found["rows"], found["steps"], found["cut_off"]) == (1, 2, 1)
    assert found["chance"][0] == 0.5
    assert judged(row())["cut_off"] == 0


def test_rows_without_goal_similarity_are_judged_by_reward_only():
    found = judged(row(2, goal=None, question="a"), row(3, question="b"))
    assert found["accuracy"]["lowest goal similarity"][0] == 1.0  # row b alone
    assert found["accuracy"]["lowest reward"][0] == 0.5
    assert found["differences"][0]["better"] == 1 and found["differences"][0]["worse"] == 0
    vanilla = judged(row(goal=None))
    assert list(vanilla["accuracy"]) == ["lowest reward", "largest drop of reward", "first fall of reward"]
    assert vanilla["differences"] == [] and list(vanilla["auroc"]) == ["reward", "position"]


@pytest.mark.parametrize("bad", ["2", True, 1.5, float("nan")])
def test_bad_step_numbers_name_their_row(bad):
    with pytest.raises(ValueError, match="row 1: expected a whole number"):
        judged(row(), row(bad))


def test_falling_offsets_are_refused():
    with pytest.raises(ValueError, match="row 0: expected one rising offset"):
        judged(row(token_ends=[3, 7, 6, 13, 13]))


def test_steps_of_real_rows_are_found_in_their_joined_text(shared_data):
    with open(shared_data / "step_level" / "mr_gsm8k.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 412
    scored = []
    for one in rows:
        text = "\n".join(one["steps"])
        ends = [*range(4, len(text), 4), len(text), len(text)]  # a token of four characters each, then EOS
        # a score that is lowest from the last character of the first wrong step on: what a perfect model would give
        wrong_from = len("\n".join(one["steps"][: one["first_error_step"]]))
        values = [1.0 if end < wrong_from else -float(end <= wrong_from + 4) for end in ends]
        scored.append(
            one | {"generated_solution": text, "token_ends": ends, "partial_rewards": values, "reward": values[-1]}
        )
    found = step_level(scored, draw_questions([one["question"] for one in scored], 100))
    assert (found["rows"], found["left_out"], found["steps"]) == (412, {}, sum(len(one["steps"]) for one in rows))
    assert found["accuracy"]["first fall of reward"][0] == found["accuracy"]["lowest reward"][0] == 1.0
    assert found["chance"][0] == pytest.approx(np.mean([1 / len(one["steps"]) for one in rows]))
