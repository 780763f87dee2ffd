"""A calculator: where the policy writes `17 + 32 =`, the environment writes the result and the policy goes on.

The results are feedback, so the policy is not trained to compute them. Made for the embedded task pocket; works for any
policy that writes its sums as equations. Use: --agent_func_path examples/python/calculator_agent_func.py
"""

import ast
import operator
import re

from openrlhf.utils import extract_answer, grade_answer
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = re.compile(r"([-+*/().\d ]+)=\s*$")  # what stands before the last equals sign, as far as it is arithmetic


class CalculatorAgent(AgentInstanceBase):
    """Ends when the policy ends its answer."""

    def __init__(self, *args, **kwargs):
        self.calls = 0

    def reset(self, states, **kwargs):
        """Every equals sign ends an action."""
        params = states["sampling_params"]
        params.stop = ["="]
        return {"observation": states["observation"], "sampling_params": params}

    def step(self, states, **kwargs):
        action = states["action_text"]
        if action.rstrip().endswith("="):
            result = calculate(action)
            self.calls += result is not None
            blank = "" if action.endswith(" ") else " "
            feedback = "" if result is None else blank + result  # no result: the policy writes one of its own
            return {"rewards": 0.0, "environment_feedback": feedback, "done": False}
        correct = grade_answer(extract_answer(action), states["label"])
        return {
            "rewards": float(correct),
            "environment_feedback": "",
            "done": True,
            "extra_logs": {"correct": correct, "calculator_calls": self.calls},
        }


def calculate(text):
    """Value of the arithmetic before the equals sign at the end of a text, as text; None where there is none."""
    found = EXPRESSION.search(text)
    if found is None or len(found[1]) > 100:
        return None
    try:
        value = _value(ast.parse(found[1].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"not arithmetic: {ast.dump(node)}")


class AgentExecutor(MultiTurnAgentExecutor):
    """The name that is looked for in the file."""

    def __init__(self):
        super().__init__(CalculatorAgent, max_turns=32)
