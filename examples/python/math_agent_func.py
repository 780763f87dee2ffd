"""Math problems with up to three attempts: a wrong or missing answer is told, and the policy goes on.

The label is the gold answer. Use: --agent_func_path examples/python/math_agent_func.py --label_key answer
"""

from openrlhf.utils import extract_answer, grade_answer
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_ATTEMPTS = 3


class MathAgent(AgentInstanceBase):
    """Grades each attempt; ends with the first right one or after MAX_ATTEMPTS."""

    def __init__(self, *args, **kwargs):
        self.attempts = 0

    def step(self, states, **kwargs):
        """Sync: it runs in a thread, so that a slow comparison does not hold up the other episodes."""
        self.attempts += 1
        answer = extract_answer(states["action_text"])
        correct = grade_answer(answer, states["label"])
        done = correct or self.attempts >= MAX_ATTEMPTS
        if correct:
            reward, feedback = 1.0, "\n\nCorrect.\n"
        elif answer is None:
            reward, feedback = -0.5 if done else 0.0, "\n\nThere is no answer. Give the final answer in \\boxed{}.\n\n"
        else:
            reward, feedback = -0.3 if done else 0.0, "\n\nThat is not correct. Think step by step and try again.\n\n"
        return {
            "rewards": reward,
            "scores": float(correct),
            "environment_feedback": feedback,
            "done": done,
            "extra_logs": {"correct": correct, "attempts": self.attempts, "answered": answer is not None},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """The name that is looked for in the file."""

    def __init__(self):
        super().__init__(MathAgent)
