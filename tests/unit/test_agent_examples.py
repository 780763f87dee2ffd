"""The agents under examples/python, on the embedded task pocket and its policy."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from openrlhf.datasets.pocket import check_solution, generate_problems
from openrlhf.datasets.templates import render_prompt
from openrlhf.models.generation import PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.models.sampling import SamplingParams
from openrlhf.rewards.agent import run_episodes
from openrlhf.rewards.agent_file import load_agent

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.from_pretrained(EXAMPLES / "pocket")


def play(name: str, policy: Policy, n: int):
    problems = generate_problems("test", n)
    prompts = [render_prompt("pocket", problem.question) for problem in problems]
    return run_episodes(
        load_agent(EXAMPLES / "python" / f"{name}.py"), prompts, [problem.answer for problem in problems],
        SamplingParams(max_tokens=64, seed=3), 512, policy.tokenizer, PolicyEngine(policy),
    )  # fmt: skip


def spoken(policy: Policy, episode, own: bool = True) -> list[str]:
    """Texts of the policy's actions, or of the feedback behind each of them."""
    ranges = episode.action_ranges
    if not own:
        next_starts = [start for start, _ in ranges[1:]] + [len(episode.token_ids)]
        ranges = [(stop, next_start) for (_, stop), next_start in zip(ranges, next_starts, strict=True)]
    return [policy.tokenizer.decode(episode.token_ids[start:stop]) for start, stop in ranges]


def test_random_agent(policy: Policy):
    episodes = play("agent_func", policy, 12)
    assert {episode.turns for episode in episodes} <= {2, 3, 4}
    assert {episode.reward for episode in episodes} <= {0.0, 1.0}
    assert all(spoken(policy, episode, own=False)[-1] == "\n\nThat was all.\n" for episode in episodes)


def test_math_agent(policy: Policy):
    for episode in play("math_agent_func", policy, 12):
        texts = spoken(policy, episode)
        assert episode.scores == episode.extra_logs["correct"] == check_solution(texts[-1], episode.label)
        assert episode.reward == (1.0 if episode.scores else -0.3 if episode.extra_logs["answered"] else -0.5)
        assert episode.turns == 3 or episode.scores == 1.0
        assert not any(check_solution(text, episode.label) for text in texts[:-1])


def test_calculator_answers_every_equation(policy: Policy):
    """What follows an equals sign is the calculator's and right, so the policy never writes a wrong result."""
    for episode in play("calculator_agent_func", policy, 12):
        actions, fed = spoken(policy, episode), spoken(policy, episode, own=False)
        assert episode.turns > 1 and fed[-1] == ""
        for action, result in zip(actions[:-1], fed[:-1], strict=True):
            expression = action.rsplit("\n", 1)[-1].removesuffix(" = ")
            assert action.endswith(" = ") and int(result) == eval(expression)
        assert episode.reward == float(check_solution(actions[-1], episode.label))
        assert episode.extra_logs["calculator_calls"] == episode.turns - 1


def test_calculator_arithmetic():
    calculate = runpy.run_path(str(EXAMPLES / "python" / "calculator_agent_func.py"))["calculate"]
    assert calculate("so 17 + 4 * 8 =") == "49" and calculate("x\n(1 - 3) * 2 = ") == "-4"
    assert calculate("7 / 2 =") == "3.5" and calculate("6/3=") == "2"
    for text in ("x =", "=", "1 / 0 =", "2 ** 9999 =", "1 + =", "9" * 200 + " =", "2 * 3"):
        assert calculate(text) is None, text


def test_retry_asks_again_and_halves_the_reward(policy: Policy):
    seen = set()
    for episode in play("retry_agent_func", policy, 24):
        texts = spoken(policy, episode)
        right = [check_solution(text, episode.label) for text in texts]
        assert right[:-1] == [False] * (episode.turns - 1) and (right[-1] or episode.turns == 3)
        assert episode.reward == (0.5 ** (episode.turns - 1) if right[-1] else 0.0)
        assert episode.scores == float(right[-1])
        assert all(text == "\n" + episode.prompt for text in spoken(policy, episode, own=False)[:-1])
        seen.add((episode.turns, right[-1]))
    assert {(1, True), (3, False)} <= seen
