"""Agent files of every generation of OpenRLHF's contract, as its examples and documents write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.models.generation import PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.models.sampling import SamplingParams
from openrlhf.rewards.agent import run_episodes
from openrlhf.rewards.agent_file import load_agent
from tests.tiny import save_tiny_causal_lm

ROOT = Path(__file__).resolve().parents[2]

# 0.9.2 and later, as a multi-turn example writes it: sync constructor, no scores and no logs before the last step.
GENERATION_3 = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.step_idx += 1
        if self.step_idx < 3:
            return {"rewards": torch.tensor(0.0), "environment_feedback": " no", "done": False}
        good = torch.tensor(float(states["label"]))
        return {"rewards": good, "scores": good, "environment_feedback": " yes", "done": True,
                "extra_logs": {"step_count": self.step_idx}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

# 0.8.7 to 0.9.0, as the reference document writes it: async constructor, an executor with five arguments whose execute
# takes three; a special token in the feedback; the settings handed on; a check of the answer with up to three attempts.
GENERATION_2 = """
import re
from typing import Any, Dict
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx, self.max_steps, self.tried = 0, 3, []

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        assert states["observation_text"]
        self.tried.append(states["action_text"])
        found = re.search(r"answer is:? *(-?[0-9]+)", states["action_text"])
        right = found is not None and float(found[1]) == float(states["label"])
        self.step_idx += 1
        done = right or self.step_idx >= self.max_steps
        reward = 1.0 if right else -0.5 if done else 0.0
        return {
            "rewards": torch.tensor([reward]),
            "scores": torch.tensor([max(0.0, reward + 0.5)]),
            "environment_feedback": "\\n[END]\\n</s>" if done else "\\n[AGAIN]\\n</s>\\n\\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"step": self.step_idx, "attempts": len(self.tried)},
        }

class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""

# The same without an execute and without the tokenizer in the constructor; reset reads the key "prompt".
GENERATION_2_EARLY = """
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["prompt"]}

    async def step(self, states: dict, **kwargs):
        done = self.step_idx >= 2
        self.step_idx += 1
        reward = torch.tensor([float(states["label"])]) if done else torch.tensor(0)
        return {"rewards": reward, "scores": reward, "environment_feedback": "</s>", "done": done,
                "sampling_params": states.get("sampling_params", None), "extra_logs": {"dummy_scores": reward}}

class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, result_queue)
"""

# Before 0.8.7: a function; what it returns as next observation is the whole conversation.
GENERATION_1 = """
import torch

async def step(observation, action, label, **kwargs):
    turns = observation.count(" no") + 1
    return {
        "rewards": torch.tensor([float(label) if turns == 3 else 0.0]),
        "scores": torch.tensor([float(label)]),
        "next_observation": observation + action + " no",
        "done": turns == 3,
        "sampling_params": kwargs.get("sampling_params", None),
        "extra_logs": {"turns": turns},
    }
"""

# As a document shows the function: no label, a tuple, None at the end.
DOCUMENT_FUNCTION = """
async def step(observation, action, **kwargs):
    if observation.count("<refine>") == 2:
        return None, float(kwargs["label"]), True, {}
    return f"<refine>{action}</refine>", 0.0, False, {}
"""

# As a document shows the class: sync, the prompt and the action alone, tuples, and nothing else in the file.
DOCUMENT_CLASS = """
from openrlhf.utils.agent import AgentInstanceBase

class MathAgentInstance(AgentInstanceBase):
    def reset(self, prompt, **kw):
        self.problem, self.gold, self.turns = prompt, kw["label"], 0
        return {"prompt": prompt}

    def step(self, action):
        self.turns += 1
        if self.turns < 3:
            return {"prompt": " result"}, 0.0, False, {}
        return {}, float(self.gold), True, {"correct": True}
"""

# An executor of its own that reads the engine's answer as vLLM gives it.
OWN_EXECUTOR = """
from copy import deepcopy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        ids = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        logprobs, ranges = [0.0] * len(ids), []
        for _ in range(3):
            sampling_params.max_tokens = min(4, max_length - len(ids))
            answer = await llm_engine.generate(ids, deepcopy(sampling_params))
            output = answer.outputs[0]
            assert output.finish_reason in ("stop", "length") and isinstance(output.text, str)
            ranges.append((len(ids), len(ids) + len(output.token_ids)))
            ids = ids + output.token_ids
            if sampling_params.logprobs is not None:
                logprobs += [table[token].logprob for token, table in zip(output.token_ids, output.logprobs)]
        return {"prompt": prompt, "label": label, "observation_tokens": ids, "action_ranges": ranges,
                "rollout_log_probs": logprobs, "truncated": output.finish_reason == "length",
                "reward": float(label), "scores": None, "extra_logs": {}}
"""

# An override that changes the result of the loop.
OVERRIDE = (
    GENERATION_3
    + """
    async def execute(self, *args, **kwargs):
        result = await super().execute(*args, **kwargs)
        result["reward"] -= 0.01 * len(result["observation_tokens"])
        return result
"""
)

# A class with the two methods and no base, beside a helper class that has only one of them.
PLAIN_CLASS = """
class Counter:
    def step(self): return 1

class Count:
    def __init__(self):
        self.turns = 0

    def reset(self, states):
        self.turns = 0
        return {"observation": states["observation"]}

    def step(self, states):
        self.turns += Counter().step()
        done = self.turns == 3
        return {"rewards": float(states["label"]) * done, "environment_feedback": " no", "done": done}
"""

FILES = {
    "generation 3": GENERATION_3,
    "generation 2": GENERATION_2,
    "generation 2, early": GENERATION_2_EARLY,
    "generation 1": GENERATION_1,
    "function of a document": DOCUMENT_FUNCTION,
    "class of a document": DOCUMENT_CLASS,
    "class without a base": PLAIN_CLASS,
    "executor of its own": OWN_EXECUTOR,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return Policy.from_pretrained(save_tiny_causal_lm(tmp_path_factory.mktemp("policy")))


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "agent_func.py").write_text(text)
    return tmp_path / "agent_func.py"


def play(executor, policy: Policy, labels):
    params = SamplingParams(max_tokens=4, seed=1)
    prompts = [f"question {label}" for label in labels]
    return run_episodes(executor, prompts, labels, params, 400, policy.tokenizer, PolicyEngine(policy))


@pytest.mark.parametrize("name", FILES)
def test_every_generation_runs_unchanged(name: str, policy: Policy, tmp_path):
    """Five samples of three turns each; the reward is the label (here below 0: the answer is never right)."""
    labels = ["2", "0", "3", "1", "5"]
    episodes = play(load_agent(write(tmp_path, FILES[name])), policy, labels)
    assert [episode.turns for episode in episodes] == [3] * 5
    expected = [-0.5] * 5 if name == "generation 2" else [float(label) for label in labels]
    assert [episode.reward for episode in episodes] == expected
    assert [episode.prompt for episode in episodes] == [f"question {label}" for label in labels]
    for episode in episodes:
        own = [logprob for logprob, mine in zip(episode.logprobs, episode.action_mask, strict=True) if mine]
        assert all(logprob < 0 for logprob in own) and sum(episode.logprobs) == pytest.approx(sum(own))
    if name.startswith("generation 2"):
        assert all(2 in episode.token_ids[episode.action_ranges[0][1] :] for episode in episodes)  # </s> is one token


def test_feedback_of_a_function_is_the_new_part_of_the_conversation(policy: Policy, tmp_path):
    [episode] = play(load_agent(write(tmp_path, GENERATION_1)), policy, ["1"])
    no = tuple(policy.tokenizer(" no").input_ids)
    for _, end in episode.action_ranges:
        assert episode.token_ids[end : end + len(no)] == no
    assert len(episode.token_ids) == len(episode.prompt_ids) + int(episode.action_mask.sum()) + 3 * len(no)
    assert episode.extra_logs == {"turns": 3}


def test_an_override_may_change_the_result(policy: Policy, tmp_path):
    [episode] = play(load_agent(write(tmp_path, OVERRIDE)), policy, ["1"])
    assert episode.reward == pytest.approx(1 - 0.01 * len(episode.token_ids))
    assert episode.step_rewards == (0.0, 0.0, episode.reward)


def test_turns_are_limited_by_the_caller(policy: Policy, tmp_path):
    for text in (GENERATION_3, GENERATION_2, GENERATION_1):
        [episode] = play(load_agent(write(tmp_path, text), max_turns=2), policy, ["1"])
        assert (episode.turns, episode.ended) == (2, "turns")


def test_time_of_a_step_is_limited_by_the_caller(policy: Policy, tmp_path):
    file = write(tmp_path, "import time\n" + GENERATION_3.replace("self.step_idx += 1", "time.sleep(60)"))
    with pytest.raises(RuntimeError, match="AgentInstance.step took more than 0.2 s"):
        play(load_agent(file, step_limit_s=0.2), policy, ["1"])


def test_classes_of_a_file_can_be_pickled(tmp_path):
    import pickle

    executor = load_agent(write(tmp_path, GENERATION_3))
    assert pickle.loads(pickle.dumps(executor)).agent_instance_cls is executor.agent_instance_cls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must define a class AgentExecutor, .* it has none of these"),
        ("def reward_func(queries, prompts, labels): ...", "pass it as --remote_rm_url"),
        ("1 / 0", "fails when it is run: ZeroDivisionError"),
        ("def f(:", "fails when it is run: SyntaxError"),
        ("raise SystemExit(2)", "fails when it is run: SystemExit: 2"),
        ("from vllm.sampling_params import X", "No module named 'vllm'; .* take SamplingParams from openrlhf.models"),
        ("class AgentExecutor: pass", "needs an execute method; derive it from AgentExecutorBase"),
        (GENERATION_3.replace("def __init__(self):", "def __init__(self, url):"), r"asks for \['url'\]; write `def "),
        (GENERATION_3.replace("    def __init__(self):", "    async def __init__(self):"), "must not be async"),
        (GENERATION_3.replace("super().__init__(AgentInstance)", "super().__init__(AgentInstance())"),
         r"AgentExecutor\(\) raised ValueError: expected a class with a step method"),
        (GENERATION_2.replace("super().__init__(AgentInstance", "llm_engine.start(); super().__init__(AgentInstance"),
         "AttributeError.*they are arguments of execute since OpenRLHF 0.9.1"),
        (PLAIN_CLASS + "class Other(Count): pass", r"has the agent classes \['Count', 'Other'\]"),
        (DOCUMENT_CLASS + "class Other(AgentInstanceBase): pass", r"agent classes \['MathAgentInstance', 'Other'\]"),
    ],
)  # fmt: skip
def test_files_without_a_usable_agent(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_agent(write(tmp_path, text))


def test_a_plain_class_beside_another_agent_is_not_the_agent(tmp_path):
    """Files that ran before plain classes did run as they did."""
    name = load_agent(write(tmp_path, PLAIN_CLASS + GENERATION_1)).agent_instance_cls.__name__
    assert name == "StepFunction"
    name = load_agent(write(tmp_path, PLAIN_CLASS + DOCUMENT_CLASS)).agent_instance_cls.__name__
    assert name == "MathAgentInstance"


def test_no_such_file(tmp_path):
    with pytest.raises(ValueError, match="there is no agent file"):
        load_agent(tmp_path / "nowhere.py")
    (tmp_path / "agent.txt").write_text("x = 1")
    with pytest.raises(ValueError, match="ends in .py"):
        load_agent(tmp_path / "agent.txt")


def test_the_classes_are_reexported_without_being_imported():
    program = (
        "import sys, openrlhf.utils.agent as known; assert 'torch' not in sys.modules\n"
        "from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor\n"
        "from openrlhf.rewards import agent\n"
        "assert MultiTurnAgentExecutor is agent.MultiTurnAgentExecutor\n"
        "assert (AgentInstanceBase, AgentExecutorBase) == (agent.AgentInstanceBase, agent.AgentExecutorBase)\n"
        "assert not hasattr(known, 'Agent')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
