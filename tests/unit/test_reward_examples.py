"""The reward files under examples/python, and files written as the public documents show them, run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.models.pretrained import save_reward_model
from openrlhf.rewards.source import RewardRequest, parse_reward_source
from tests.tiny import tiny_reward_model, tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
NAN = float("nan")
PROMPT = "What is 2 + 2?\n"


def request(*responses, labels=None):
    count = len(responses)
    queries = [f"{PROMPT}{response}</s>" for response in responses]
    return RewardRequest(queries, [PROMPT] * count, list(responses), labels=labels, step=4, group_size=count)


def score(name, *responses, labels=None):
    return parse_reward_source(str(EXAMPLES / name)).score(request(*responses, labels=labels))


def test_the_smallest_reward_grows_with_the_words():
    result = score("reward_func.py", "one two three four five", "word " * 80, "")
    assert result.rewards == pytest.approx([6 / 50 - 1 / 50, 1.0, 1 / 50], abs=0.021)  # EOS may count as a word
    assert result.extra_logs["words"][0] == 5


def test_math_reward():
    result = score("math_reward_func.py", r"so \boxed{4}", "It is 4.", "It is 5.", "4", labels=["4", "4.0", "4", None])
    assert result.rewards == pytest.approx([1, 1, 0, NAN], nan_ok=True)
    assert result.metrics()["math_accuracy"] == pytest.approx(2 / 3) and result.metrics()["unscored"] == 0.25
    assert score("math_reward_func.py", "4").metrics() == {"unscored": 1.0}  # no labels at all


def test_weighted_terms():
    long = r"\boxed{4}" + " " * 3000
    result = score("multi_reward_func.py", r"\boxed{4}", "4", r"\boxed{5}", long, labels=["4"] * 4)
    # 1 + 0.1; 1 - 0.1; 0.1; 1 + 0.1 - 0.001 * (9 + 3000 + 4 letters of EOS - 2048)
    assert result.rewards == pytest.approx([1.1, 0.9, 0.1, 1.1 - 0.965])
    assert result.scores.tolist() == [1, 1, 0, 1]
    assert result.metrics()["r_format"] == 0.5


def test_conversation_quality_by_a_local_reward_model(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    save_reward_model(tmp_path, tiny_reward_model(tokenizer=tokenizer), tokenizer, settings={"max_len": 64})
    monkeypatch.setenv("QUALITY_MODEL", str(tmp_path))
    result = score("conversation_reward_func.py", "the answer", "the answer is " * 5, "good " * 100)
    quality = result.extra_logs["quality"]
    assert result.rewards == pytest.approx([quality[0] / 2, quality[1], quality[2]])
    assert all(0 < value < 1 for value in quality)


# Written as the guides of OpenRLHF show: three arguments, tensors, extra logs of one number, no kwargs.
GUIDE_MATH = """
import torch, re
def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        answer = query.split(prompt)[-1].strip()
        found = re.search(r"(?:answer is:?|=)\\s*(-?\\d+)", answer, re.IGNORECASE)
        rewards.append(-0.5 if found is None else float(float(found.group(1)) == float(label)))
    rewards = torch.tensor(rewards).float()
    logs = {"math_accuracy": (rewards == 1.0).float().mean(), "answer_formatted": (rewards >= 0.0).float().mean()}
    return {"rewards": rewards, "scores": (rewards + 0.5) / 1.5, "extra_logs": logs}
"""
GUIDE_FILTERING = """
import torch
def reward_func(queries, prompts, labels):
    raw = torch.tensor([float(len(query)) for query in queries])
    rewards = (raw - raw.mean()) / (raw.std() + 1e-9)
    scores = (rewards > 0.0).float()
    return {"rewards": rewards, "scores": scores, "extra_logs": {"filtered_ratio": scores.mean()}}
"""


def of_text(tmp_path, text):
    file = tmp_path / "guide.py"
    file.write_text(text)
    return parse_reward_source(str(file))


def test_a_math_reward_as_in_the_guide(tmp_path):
    asked = request("The answer is 4", "2+2 = 5", "no", labels=["4", "4", "4"])
    result = of_text(tmp_path, GUIDE_MATH).score(asked)
    assert result.rewards.tolist() == [1, 0, -0.5]
    assert result.scores == pytest.approx([1, 1 / 3, 0]) and result.extra_logs["math_accuracy"] == pytest.approx(1 / 3)


def test_a_reward_relative_to_the_batch_as_in_the_guide(tmp_path):
    """Needs whole batches: called with one sample it would be NaN."""
    result = of_text(tmp_path, GUIDE_FILTERING).score(request("a", "aa", "aaa"))
    assert result.rewards == pytest.approx([-1, 0, 1], abs=1e-6) and result.scores.tolist() == [0, 0, 1]
