"""The embedded task: problems, splits and the check of a solution."""

from __future__ import annotations

import re

import pytest

from openrlhf.datasets.pocket import LEVELS, SLIPS, SPLITS, check_solution, generate_problems, split_allows

RIGHT_SPLITS = [split for split in SPLITS if split != "sft"]  # whose solutions have no slips


def evaluate_line(line: str) -> tuple[int, int]:
    """Left side, worked out here, and right side of an equation `a op b = c`."""
    left, operator, right, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", line).groups()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operator], int(result)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", RIGHT_SPLITS)
def test_solutions_are_right(split: str, level: int) -> None:
    for problem in generate_problems(split, 200, level=level):
        *equations, box = problem.solution.split("\n")
        worked_out = [evaluate_line(line) for line in equations]
        assert all(value == result for value, result in worked_out), problem
        assert box == f"\\boxed{{{problem.answer}}}"
        assert worked_out[-1][0] == int(problem.answer)
        assert len(equations) == problem.steps
        assert check_solution(problem.solution, problem.answer)


@pytest.mark.parametrize("level", LEVELS)
def test_solution_uses_the_numbers_of_the_story(level: int) -> None:
    """Every number of the question is used once; every other operand is an earlier result."""
    for problem in generate_problems("train", 200, seed=3, level=level):
        story = sorted(re.findall(r"\d+", problem.question), key=int)
        free, results = list(story), []
        for line in problem.solution.split("\n")[:-1]:
            left, _, right, _, result = line.split(" ")
            for operand in (left, right):
                if operand in results:
                    results.remove(operand)
                else:
                    free.remove(operand)  # ValueError when the number is in neither place
            results.append(result)
        assert free + results == [problem.answer]  # nothing of the story is left unused


def test_careless_solutions_slip_at_the_stated_rate() -> None:
    """Problems of two plain events are right when neither event slips: chance (1 - sum of SLIPS)^2 = 0.58.

    Slips that would be noticed (a count outside the level's range) are not made, and some change nothing, so the share
    of right solutions lies higher, but below the chance that one given event has no slip, 0.76. The standard error over
    more than 500 problems is at most sqrt(0.25 / 500) = 0.022; three of them are allowed on each side.
    """
    problems = [p for p in generate_problems("sft", 6000) if p.steps == 2 and len(re.findall(r"\d+", p.question)) == 3]
    assert len(problems) > 500
    share = sum(check_solution(p.solution, p.answer) for p in problems) / len(problems)
    no_slip = 1 - sum(SLIPS.values())
    assert no_slip**2 - 0.067 < share < no_slip + 0.067
    assert all(re.fullmatch(r"(\d+ [-+*] \d+ = \d+\n)+\\boxed\{\d+\}", p.solution) for p in problems)


def test_careless_solutions_keep_the_right_answer() -> None:
    """The answer of an sft problem is what its story gives, also where its solution slips."""
    events = {"finds": 1, "gets": 1, "orders": 1, "earns": 1, "picks": 1, "loses": -1, "gives": -1, "sells": -1,
              "returns": -1, "spends": -1, "pays": -1, "eats": -1, "drops": -1}  # fmt: skip
    checked = 0
    for problem in generate_problems("sft", 2000):
        start, *sentences, _ = problem.question.split(". ")
        if any(len(re.findall(r"\d+", sentence)) != 1 for sentence in sentences):
            continue  # packs: their verbs mean other things
        count = int(re.search(r"\d+", start)[0])
        for sentence in sentences:
            count += events[sentence.split(" ")[1]] * int(re.search(r"\d+", sentence)[0])
        assert str(count) == problem.answer
        checked += 1
    assert checked > 200


@pytest.mark.parametrize("level", LEVELS)
def test_step_counts_and_number_sizes(level: int) -> None:
    settings = LEVELS[level]
    for split in SPLITS:
        low = settings.ood_steps[0] if split == "ood" else settings.steps[0]
        high = settings.ood_steps[1] if split in ("ood", "sft") else settings.steps[1]
        problems = generate_problems(split, 600, level=level)
        assert {problem.steps for problem in problems} == set(range(low, high + 1))
        numbers = [int(n) for p in problems for n in re.findall(r"\d+", p.question + " " + p.solution)]
        assert 0 <= min(numbers) and max(numbers) <= settings.max_count
    assert settings.ood_steps[0] > settings.steps[1]  # more steps than the reward model's training


def test_splits_never_share_a_question() -> None:
    """Level 1 has the fewest questions, so that shared ones would show; every seed is held apart alike."""
    seen = {
        split: {p.question for seed in range(2) for p in generate_problems(split, 600, seed=seed, level=1)}
        for split in SPLITS
    }
    for first in SPLITS:
        for second in SPLITS:
            assert first == second or not seen[first] & seen[second]
    assert all(split_allows(split, question) for split in SPLITS for question in seen[split])


def test_every_question_belongs_to_exactly_one_split() -> None:
    questions = [p.question for split in SPLITS for p in generate_problems(split, 50)]
    assert all(sum(split_allows(split, question) for split in SPLITS) == 1 for question in questions)


def test_seeded_distinct_and_prefix_stable() -> None:
    first = generate_problems("train", 300, seed=5)
    assert first == generate_problems("train", 300, seed=5)
    assert first[:40] == generate_problems("train", 40, seed=5)
    assert first != generate_problems("train", 300, seed=6)
    assert len({problem.question for problem in first}) == 300


def test_many_stories_and_operations() -> None:
    problems = generate_problems("train", 500)
    text = "\n".join(problem.solution for problem in problems)
    assert all(text.count(f" {operator} ") > 100 for operator in "+-*")
    shapes = {re.sub(r"\d+", "#", problem.question) for problem in problems}
    assert len(shapes) > 300  # the wording varies, not only the numbers


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("1 + 2 = 3\n\\boxed{3}", "3", True),
        ("\\boxed{4}", "3", False),
        ("\\boxed{3} no, \\boxed{4}", "4", True),  # the last complete box counts
        ("\\boxed{3} no, \\boxed{4}", "3", False),
        ("\\boxed{3} and \\boxed{4", "3", True),  # an unfinished box is no box
        ("\\boxed{ 3 }", "3", True),
        ("\\boxed{03}", "3", True),  # same integer
        ("\\boxed{3.0}", "3", False),
        ("\\boxed{}", "3", False),
        ("the answer is 3", "3", False),
        ("", "3", False),
        ("\\boxed{-3}", "3", False),
    ],
)
def test_check_solution(text: str, answer: str, expected: bool) -> None:
    assert check_solution(text, answer) is expected


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown pocket split 'dev'"):
        generate_problems("dev", 3)
    with pytest.raises(ValueError, match="unknown pocket level 99"):
        generate_problems("train", 3, level=99)
    with pytest.raises(ValueError, match="n must be 0 or more, got -1"):
        generate_problems("train", -1)
    assert generate_problems("test", 0) == []
