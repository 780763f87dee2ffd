"""The smallest agent: it asks for another try one to three times, then rewards at random.

A template for an environment of your own. Use: --agent_func_path examples/python/agent_func.py
"""

import random

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    """One episode; every sample gets a new instance."""

    def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = random.randint(1, 3)

    async def reset(self, states, **kwargs):
        """states: observation (the rendered prompt), label, sampling_params."""
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        """states: observation_text (all text before the action), action_text, label, sampling_params."""
        done = self.step_idx >= self.max_steps
        self.step_idx += 1
        reward = torch.randint(0, 2, (1,)).float() if done else torch.tensor(0.0)
        return {
            "rewards": reward,  # added up over the steps; used for advantages
            "scores": reward,  # in 0..1, that of the last step; used by dynamic filtering
            "environment_feedback": "\n\nThat was all.\n" if done else "\n\nNot yet. Try once more.\n\n",
            "done": done,
            "sampling_params": states["sampling_params"],  # of the next turn
            "extra_logs": {"steps": self.step_idx},  # those of the last step are logged
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """The name that is looked for in the file."""

    def __init__(self):
        super().__init__(AgentInstance)
