r"""1 for a right final answer, 0 for a wrong one.

`--remote_rm_url examples/python/math_reward_func.py --label_key answer`. The answer of a response is its last
`\boxed{...}`, else its last number; see docs/grading.md for when two are equal.
"""

import torch

from openrlhf.utils import extract_answer, grade_answer


def reward_func(queries, prompts, labels, **kwargs):
    """Rewards of N responses; one without a label is not scored (None)."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query[len(prompt) :]
        rewards.append(None if label is None else float(grade_answer(extract_answer(response), label)))
    scored = [reward for reward in rewards if reward is not None]
    accuracy = torch.tensor(scored).mean() if scored else None
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"math_accuracy": accuracy}}
