r"""A weighted sum: right answer, format (one \boxed answer), and a penalty for long responses.

`--remote_rm_url examples/python/multi_reward_func.py --label_key answer`. Several files or models as sources of their
own, weighted by `--reward_weights`, are the other way: see docs/rewards.md.
"""

import torch

from openrlhf.utils import extract_answer, grade_answer

CORRECT, FORMAT, LENGTH = 1.0, 0.1, 0.001  # weights
FREE_LETTERS = 2048  # no penalty below


def reward_func(queries, prompts, labels, **kwargs):
    """Rewards of N responses; filtering sees the correctness alone, the log sees every term."""
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    graded = [grade_answer(extract_answer(text), label) for text, label in zip(responses, labels, strict=True)]
    correct = torch.tensor([float(right) for right in graded])
    format_term = torch.tensor([1.0 if text.count(r"\boxed{") == 1 else -1.0 for text in responses])
    length_term = torch.tensor([-float(max(0, len(text) - FREE_LETTERS)) for text in responses])
    return {
        "rewards": CORRECT * correct + FORMAT * format_term + LENGTH * length_term,
        "scores": correct,
        "extra_logs": {"r_correct": correct, "r_format": format_term, "r_length": length_term},
    }
