"""Rewards and agents under examples/python, and files in the shapes that OpenRLHF publishes, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.models.pretrained import save_reward_model
from tests.runs import curve, ppo_words, run_ppo
from tests.tiny import tiny_reward_model, tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
LOGS = {
    "reward_func": {"words"},
    "math_reward_func": {"math_accuracy"},
    "multi_reward_func": {"r_correct", "r_format", "r_length"},
    "code_reward_func": {"all_tests_passed", "has_program"},
    "conversation_reward_func": {"quality", "curt"},
}

# A function that prints, and that returns a tensor and no dictionary (the first scripts).
TENSOR = """
import torch

def reward_func(queries, prompts, labels):
    print(queries)
    return torch.randn(len(queries))
"""
# 'Answer: ...' before a box; a line is printed for each sample.
ANSWER_LINE = r"""
import re
from typing import List, Optional
import torch
from openrlhf.utils import extract_boxed_answer, grade_answer

def find(response: str) -> Optional[str]:
    found = re.findall(r"Answer:\s*(.+?)(?:\n|$)", response, re.IGNORECASE)
    return found[-1].strip() if found else extract_boxed_answer(response)

def reward_func(queries: List[str], prompts: List[str], labels: List[str], **kwargs) -> dict:
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        predicted = find(query[len(prompt):] if isinstance(prompt, str) and prompt in query else query)
        rewards.append(1.0 if grade_answer(predicted, label) else 0.0)
        print(f"predicted {predicted}, gold {label}")
    tensor = torch.tensor(rewards, dtype=torch.float)
    return {"rewards": tensor, "scores": tensor, "extra_logs": {"math_accuracy": tensor.mean()}}
"""
# 0.8.0: one function, text so far as `state`, the reward first.
STEP_0_8_0 = """
import torch

async def step(state, action, label, **kwargs):
    print(f"state: {state}, action: {action}")
    return torch.tensor([0.5]), state + action, True, {}
"""
# 0.8.7: an executor of four arguments, an async constructor, the prompt as first observation, an integer tensor.
FOUR_ARGUMENTS = """
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx, self.max_steps = 0, 2

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["prompt"]}

    async def step(self, states: dict, **kwargs):
        done = self.step_idx >= self.max_steps
        reward = torch.ones(1) if done else torch.tensor(0)
        self.step_idx += 1
        feedback = "\\n\\nHuman: [AGAIN]\\n</s>\\n\\nAssistant: "
        return {"rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done,
                "sampling_params": states.get("sampling_params", None), "extra_logs": {"dummy": reward}}

class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, result_queue)
"""
# 0.9.2 and later over a game: the environment's five values, a reward of its own for every turn.
GAME = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Game:
    turn = 0
    def step(self, action):
        self.turn += 1
        return "higher", 1.0 if self.turn == 3 else -2.0, self.turn == 3, False, {}

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.env = Game()

    async def step(self, states: dict, **kwargs):
        observation, reward, terminated, truncated, info = self.env.step(states["action_text"])
        reward = max(reward, -1.0)
        return {"rewards": torch.tensor(reward), "scores": torch.tensor(reward), "environment_feedback": observation,
                "done": terminated or truncated, "extra_logs": {"turn_count": torch.tensor(self.env.turn)}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
# Images in the feedback: not for a policy of text.
IMAGES = GAME.replace('"environment_feedback": observation,', '"environment_feedback": "", "environment_images": [1],')


def train(tmp_path, capsys, **flags) -> tuple[list[dict], str]:
    code, out, errors = run_ppo(ppo_words(tmp_path / "out", **flags), capsys)
    assert code == 0, errors
    lines = list(curve(tmp_path / "out").values())
    assert len(lines) == 2 and all(line["unscored_share"] == 0 for line in lines)
    return lines, out


@pytest.mark.parametrize("name", LOGS)
def test_reward_examples(name, tmp_path, capsys, monkeypatch):
    tokenizer = tiny_tokenizer()
    (tmp_path / "rm").mkdir()
    save_reward_model(tmp_path / "rm", tiny_reward_model(tokenizer=tokenizer), tokenizer, settings={"max_len": 256})
    monkeypatch.setenv("QUALITY_MODEL", str(tmp_path / "rm"))
    lines, _ = train(tmp_path, capsys, remote_rm_url=EXAMPLES / f"{name}.py")
    assert all({f"{name}/{log}" for log in LOGS[name]} <= set(line) for line in lines)


def test_the_example_with_a_model_asks_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("QUALITY_MODEL", raising=False)
    words = ppo_words(tmp_path / "out", remote_rm_url=EXAMPLES / "conversation_reward_func.py")
    code, _, errors = run_ppo(words, capsys)
    assert code == 1 and "ValueError: set QUALITY_MODEL to the reward model" in errors


@pytest.mark.parametrize("name", ["agent_func", "math_agent_func", "calculator_agent_func", "retry_agent_func"])
def test_agent_examples(name, tmp_path, capsys):
    lines, _ = train(tmp_path, capsys, agent_func_path=EXAMPLES / f"{name}.py", max_len=500)
    assert all(line["turns"] >= 1 for line in lines)


def test_published_functions(tmp_path, capsys):
    file = tmp_path / "reward_func.py"
    file.write_text(TENSOR)
    _, out = train(tmp_path, capsys, remote_rm_url=file)
    assert out.count("How many") >= 16  # both calls printed their queries
    file.write_text(ANSWER_LINE)
    lines, out = train(tmp_path, capsys, remote_rm_url=file)
    rule, _ = train(tmp_path, capsys)
    assert out.count("predicted ") == 16
    assert [line["reward"] for line in lines] == [line["reward"] for line in rule]  # pocket's own rule says the same


@pytest.mark.parametrize(
    ("text", "turns", "reward"),
    [(STEP_0_8_0, 1, 0.5), (FOUR_ARGUMENTS, 3, 1.0), (GAME, 3, -1 - 1 + 1)],
    ids=["0.8.0", "0.8.7", "game"],
)
def test_published_agents(text, turns, reward, tmp_path, capsys):
    file = tmp_path / "agent.py"
    file.write_text(text)
    lines, _ = train(tmp_path, capsys, agent_func_path=file, max_len=500)
    assert all(line["turns"] == turns and line["reward"] == pytest.approx(reward) for line in lines)


def test_agents_with_images_are_refused(tmp_path, capsys):
    file = tmp_path / "agent.py"
    file.write_text(IMAGES)
    code, _, errors = run_ppo(ppo_words(tmp_path / "out", agent_func_path=file, max_len=500), capsys)
    assert code == 1 and "returned environment_images; this engine takes text only" in errors
