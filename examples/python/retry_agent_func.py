"""Retry: a wrong solution is followed by the question again, up to three times; each retry halves the reward.

Made for the embedded task pocket, whose policy has only seen questions and solutions: the feedback is the question in
the form in which it stands in the prompt. Use: --agent_func_path examples/python/retry_agent_func.py
"""

from openrlhf.utils import extract_answer, grade_answer
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_ATTEMPTS = 3


class RetryAgent(AgentInstanceBase):
    """Ends with the first right solution or after MAX_ATTEMPTS."""

    def __init__(self, *args, **kwargs):
        self.attempts = 0

    def reset(self, states, **kwargs):
        self.question = states["observation"]
        return {"observation": self.question}

    def step(self, states, **kwargs):
        self.attempts += 1
        correct = grade_answer(extract_answer(states["action_text"]), states["label"])
        done = correct or self.attempts == MAX_ATTEMPTS
        return {
            "rewards": 0.5 ** (self.attempts - 1) if correct else 0.0,
            "scores": float(correct),
            "environment_feedback": "" if done else "\n" + self.question,
            "done": done,
            "extra_logs": {"correct": correct, "attempts": self.attempts},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """The name that is looked for in the file."""

    def __init__(self):
        super().__init__(RetryAgent)
