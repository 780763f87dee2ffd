"""The attribute task: its rule, its data, its table, and one small run."""

import json

import pytest

from decoding.attribute_steering import (
    SteeringConfig,
    extra_equations,
    format_table,
    pair_by_length,
    rate_solutions,
    run,
    summarise,
)
from decoding.records import Answered, Decoded, Question
from openrlhf.datasets.completions import Completion
from openrlhf.datasets.pocket import PocketProblem

FULL = "4 * 8 = 32\n17 + 32 = 49\n49 - 9 = 40\n\\boxed{40}"
SHORT = "4 * 8 = 32\n17 + 32 = 49\n\\boxed{49}"


def test_rule_counts_lines_with_an_equation():
    assert extra_equations(FULL, 3) == 0
    assert extra_equations(SHORT, 3) == -1
    assert extra_equations("", 2) == -2
    assert extra_equations("1 + 1 = 2 = 2", 1) == 0  # a line counts once


def test_solutions_are_rated_and_paired_within_their_question():
    texts = {"q": [FULL, SHORT, SHORT, FULL + " "], "r": [FULL, FULL]}
    completions = [Completion(question, text, "40") for question, found in texts.items() for text in found]
    rated = rate_solutions(completions, {"q": 3, "r": 3})
    assert [row["short"] for row in rated] == [0, 1, 1, 0, 0, 0]
    assert all(row["short"] + row["full"] == 1 for row in rated)
    # "q" has one short and two full texts, so one pair; "r" has no short one
    assert pair_by_length(rated) == [{"prompt": "q", "chosen": SHORT, "rejected": FULL}]
    other = {"prompt": "q", "response": "1 = 1", "short": 1, "full": 0}
    assert len(pair_by_length([*rated, other])) == 2
    assert len(pair_by_length([*rated, other], most=1)) == 1


def _answer(question: str, text: str, seed: int = 0) -> Answered:
    asked = Question(0, question, question, question, "40")
    return Answered(asked, "guided", seed, [Decoded(text, (1,), True)], policy_tokens=10)


def test_summary_by_hand():
    problems = [PocketProblem("q", FULL, "40", 3), PocketProblem("r", FULL, "40", 3)]
    answers = {
        "control": [_answer("q", FULL), _answer("r", FULL)],
        "towards short": [_answer("q", SHORT), _answer("r", FULL)],
        "away from short": [_answer("q", FULL), _answer("r", FULL + "\n40 + 0 = 40")],
    }
    told = summarise(answers, problems, bootstrap=200)["directions"]
    assert told["control"]["extra_equations"] == [0, 0, 0] and told["control"]["accuracy"][0] == 1
    # one of two responses lacks an equation: mean -0.5, half of them short, half of them right (49 is not 40)
    towards = told["towards short"]
    assert [towards[name][0] for name in ("extra_equations", "short", "accuracy", "difference")] == [
        -0.5,
        0.5,
        0.5,
        -0.5,
    ]
    assert towards["difference"][1:] == [-1, 0]  # two questions: both draws the same, or one of each
    assert told["away from short"]["difference"][0] == 0.5
    table = format_table({"directions": told})
    assert "| towards short | -0.500 [-1.000, +0.000] | -0.500 [-1.000, +0.000] | 50.0%" in table


def test_directions_must_answer_the_same_questions():
    problems = [PocketProblem("q", FULL, "40", 3), PocketProblem("r", FULL, "40", 3)]
    answers = {"control": [_answer("q", FULL)], "towards short": [_answer("r", FULL)]}
    with pytest.raises(ValueError, match="towards short: expected the questions and seeds of the control"):
        summarise(answers, problems, bootstrap=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"questions": 0}, "--questions"), ({"conf_ratio": 1.5}, "--conf_ratio"), ({"seeds": [1, 1]}, "--seeds")],
)
def test_bad_flags_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SteeringConfig(**changes).validate()


def test_small_run_steers_both_ways(tmp_path, capsys):
    config = SteeringConfig(
        save_dir=str(tmp_path / "steering"), questions=24, train_questions=250, seeds=[0], max_epochs=6, bootstrap=100
    )
    told = run(config)["directions"]
    assert told["towards short"]["short"][0] > told["control"]["short"][0] > told["away from short"]["short"][0]
    assert json.loads((tmp_path / "steering/steering.json").read_text())["questions"] == 24
    assert "towards short" in capsys.readouterr().out
    again = run(config)["directions"]  # the model is there: only decoding is repeated, with the same draws
    assert again == told
