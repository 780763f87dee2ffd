"""The example reward for code: programs found in responses, tests of both kinds, programs that cheat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from openrlhf.rewards.sandbox import best_isolation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"

DOUBLE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1) == 3", "assert double([1]) == [1, 1]"]


@pytest.fixture(scope="module")
def code_reward():
    try:
        best_isolation()
    except RuntimeError as error:
        pytest.skip(str(error))
    sys.path.insert(0, str(EXAMPLES))
    import code_reward_func

    sys.path.remove(str(EXAMPLES))
    return code_reward_func


def reward(module, responses, labels):
    prompts = [f"Problem {n}:\n" for n in range(len(responses))]
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return module.reward_func(queries, prompts, labels, step=3)


def test_rewards_are_the_share_of_tests_passed_in_order(code_reward):
    """3 of the 4 tests hold for the first program, none for the second; the third response holds no program."""
    fenced = f"First this:\n```python\nx = (\n```\nno, rather\n```python\n{DOUBLE}```\nDone.</s>"
    result = reward(
        code_reward,
        [fenced, "```\ndef double(x):\n    return None\n```", "I do not know.</s>", DOUBLE + "</s>"],
        [json.dumps(TESTS), TESTS, TESTS, "assert double(3) == 6\nassert double(0) == 0"],
    )
    assert result["rewards"].tolist() == pytest.approx([0.75, 0.0, -0.1, 1.0])
    assert result["scores"].tolist() == [0, 0, 0, 1]
    assert float(result["extra_logs"]["all_tests_passed"]) == 0.25
    assert float(result["extra_logs"]["has_program"]) == 0.75


def test_programs_that_only_look_successful(code_reward):
    cheats = [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('passed 4')\nprint('4 passed')\nraise SystemExit",
        "import os, builtins\nbuiltins.print = lambda *a, **k: os.write(1, b'4')\n",
        "class Always:\n    def __eq__(self, other): raise SystemExit(0)\ndouble = lambda x: Always()",
    ]
    result = reward(code_reward, [f"```python\n{cheat}\n```" for cheat in cheats], [TESTS] * len(cheats))
    assert result["rewards"].tolist() == [0.0] * len(cheats)


def test_hanging_programs_are_worth_nothing_and_hold_up_nothing(code_reward, monkeypatch):
    from openrlhf.rewards.sandbox import SandboxLimits

    monkeypatch.setattr(code_reward, "LIMITS", SandboxLimits(time_s=1))
    result = reward(code_reward, ["```python\nwhile True: pass\n```", f"```python\n{DOUBLE}```"], [TESTS[:1]] * 2)
    assert result["rewards"].tolist() == [0.0, 1.0]


def test_input_and_output(code_reward):
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    label = {"inputs": ["1 2\n", "4 5\n", "x\n"], "outputs": ["3\n", "9", "0"]}
    result = reward(code_reward, [program, "```python\nprint(3)\n```"], [label, json.dumps(label)])
    assert result["rewards"].tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("label", [None, "", [], {}, {"inputs": [], "outputs": []}])
def test_samples_without_tests_are_an_error(code_reward, label):
    with pytest.raises(ValueError, match="without tests cannot be rewarded"):
        reward(code_reward, [DOUBLE], [label])
