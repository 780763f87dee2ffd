"""The reward of bench_rl.py, given to both sides as a Python function."""

from __future__ import annotations

import re


def reward_func(prompts: list[str], completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """1 where the last number is the answer, less a thousandth a letter.

    The letters keep scores of one prompt apart: where all are equal there is nothing to learn, which only one of the
    sides makes use of, and both are to train on every response.
    """
    numbers = [re.findall(r"-?\d+", text) for text in completions]
    return [
        float(bool(found) and found[-1] == expected) - len(text) / 1000
        for found, expected, text in zip(numbers, answer, completions, strict=True)
    ]
