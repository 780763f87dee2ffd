"""Sampled, graded and cached completions, and the pocket pairs made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.datasets.pocket import DEFAULT_LEVEL, SPLITS, PocketProblem, generate_problems
from openrlhf.evaluation import sampling
from openrlhf.evaluation.sampling import (
    grade_pocket,
    grade_text,
    pocket_completions,
    pocket_preferences,
    pocket_response_limit,
    sample_completions,
)
from tests.tiny import save_tiny_causal_lm


class ScriptedPolicy:
    """Answers from a table, so that the expected completions are known."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.calls = 0

    def generate(self, prompts, n, temperature, top_p, max_new_tokens, seed, batch_tokens, on_batch):
        self.calls += 1
        on_batch(len(prompts) * n)
        return [self.answers[prompt][:n] for prompt in prompts]


def test_completions_are_graded_in_order() -> None:
    problems = [PocketProblem("1 + 2?", "", "3", 1), PocketProblem("4 + 5?", "", "9", 1)]
    policy = ScriptedPolicy({"1 + 2?\n": ["\\boxed{3}", "\\boxed{4}"], "4 + 5?\n": ["it is 9", "\\boxed{9}"]})
    completions = sample_completions(policy, problems, "plain", 2, grade=grade_pocket, progress=False)
    assert [(c.question, c.sample, c.predicted_answer, c.is_correct, c.expected_answer) for c in completions] == [
        ("1 + 2?", 0, "3", True, "3"),
        ("1 + 2?", 1, "4", False, "3"),
        ("4 + 5?", 0, None, False, "9"),  # pocket wants a box
        ("4 + 5?", 1, "9", True, "9"),
    ]
    assert grade_text("it is 9", "9") == ("9", True)  # general grading also reads the last number
    assert grade_text("no idea", "9") == (None, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_causal_lm(tmp_path_factory.mktemp("policy"))


def test_pocket_completions_are_cached_by_policy_and_settings(tmp_path, folder, monkeypatch) -> None:
    calls = []
    real = sampling.sample_completions

    def counted(*args, **kwargs):
        calls.append(kwargs["seed"])
        return real(*args, **kwargs)

    monkeypatch.setattr(sampling, "sample_completions", counted)
    monkeypatch.setattr(sampling, "pocket_response_limit", lambda split, level: 4)
    first = pocket_completions(tmp_path, folder, "test", 3, 2, progress=False)
    assert first == pocket_completions(tmp_path, folder, "test", 3, 2, progress=False)
    assert len(calls) == 1 and len(first) == 6
    assert [c.question for c in first[::2]] == [p.question for p in generate_problems("test", 3)]

    pocket_completions(tmp_path, folder, "test", 3, 2, temperature=0.5, progress=False)
    pocket_completions(tmp_path, folder, "test", 3, 3, progress=False)
    pocket_completions(tmp_path, folder, "validation", 3, 2, progress=False)
    pocket_completions(tmp_path, folder, "test", 3, 2, seed=1, progress=False)
    other = save_tiny_causal_lm(tmp_path / "other", seed=5)
    pocket_completions(tmp_path, other, "test", 3, 2, progress=False)
    assert len(calls) == 6  # each of the five changes sampled anew
    assert first == pocket_completions(tmp_path / "elsewhere", folder, "test", 3, 2, progress=False)  # deterministic
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # nothing half-written is left


def test_pairs_hold_a_right_and_a_wrong_solution_of_one_question(tmp_path, monkeypatch) -> None:
    """Of four questions one is always solved and one never: two give pairs, at most two each."""
    problems = generate_problems("train", 4, seed=9)
    right = [problem.solution for problem in problems]
    wrong = [f"{problem.question[:5]}\n\\boxed{{{int(problem.answer) + 1}}}" for problem in problems]
    table = [[right[0]] * 3, [wrong[1]] * 3, [right[2], wrong[2], wrong[2]], [right[3], right[3] + " ", wrong[3] + "x"]]
    policy = ScriptedPolicy({f"{p.question}\n": answers for p, answers in zip(problems, table, strict=True)})
    monkeypatch.setattr(sampling.Policy, "from_pretrained", lambda path, device: policy)
    monkeypatch.setattr(sampling, "checkpoint_fingerprint", lambda path: "scripted")
    pairs = pocket_preferences(
        tmp_path, tmp_path, n_questions=4, n_samples=3, seed=9, pairs_per_question=2, progress=False
    )
    answers = {problem.question: problem.answer for problem in problems}
    assert {pair["question"] for pair in pairs} == {problems[2].question, problems[3].question}
    assert all(grade_pocket(pair["correct"], answers[pair["question"]])[1] for pair in pairs)
    assert not any(grade_pocket(pair["incorrect"], answers[pair["question"]])[1] for pair in pairs)
    assert len({(pair["correct"], pair["incorrect"]) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("split", SPLITS)
def test_response_limit_holds_every_solution(split: str) -> None:
    """The pocket tokenizer has one token per digit, operator, "=", line end, box start, box end and EOS."""
    limit = pocket_response_limit(split, DEFAULT_LEVEL)
    for problem in generate_problems(split, 300):
        assert sum(map(str.isdigit, problem.solution)) + 3 * problem.solution.count("\n") + 3 <= limit
