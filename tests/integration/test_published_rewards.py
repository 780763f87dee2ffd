"""Rewards and agents as public documents print them, taken out of the documents and run by the command line.

What a document leaves to the reader (`...`, functions that it only names) is filled in, and nothing else. The documents
are no part of the project: without them these tests skip.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from tests.runs import curve, ppo_words, run_ppo
from tests.tiny import tiny_config, tiny_tokenizer

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
HEADS = ("import ", "from ", "def ", "async def ", "class ", "    ", "#")
SAMPLE = re.compile(r"^  (query|prompt|response|label) \(str\): (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def documents(shared_data) -> list[str]:
    """Texts of the documents, which lie beside the real data."""
    folder = shared_data.parent / "seeds"
    if not folder.is_dir():
        pytest.skip(f"documents not found at {folder}; OPENRLHF_TEST_DATA names the folder 'data' beside them")
    return [path.read_text() for path in sorted(folder.glob("*.txt"))]


@pytest.fixture(scope="module")
def guide(documents) -> dict[str, str]:
    """The guide's blocks of Python (it is printed as an addition, '+' before each line), by a word in them."""
    text = next(text for text in documents if "# Custom Reward Functions" in text)
    blocks = CODE.findall("\n".join(line[1:] for line in text.splitlines() if line.startswith("+")))
    words = {
        "template": "Your reward calculation logic here",
        "code": "reward_func_code_gen.py",
        "math": "# reward_func_math.py",
        "conversation": "reward_func_conversation.py",
        "filtering": "# Your reward logic\n",
        "agent": "Manages state for a single agent episode",
        "math_agent": "# agent_func_math.py",
        "printing": "Query sample",
    }
    found = {name: [block for block in blocks if word in block] for name, word in words.items()}
    assert {name: len(one) for name, one in found.items()} == dict.fromkeys(words, 1)
    return {name: one[0] for name, one in found.items()}


def printed(documents: list[str], first: str) -> str:
    """Code that a document prints without a fence: from its first line on, as long as lines look like code."""
    text = next(text for text in documents if f"\n{first}" in text)
    lines = text[text.index(f"\n{first}") + 1 :].splitlines()
    end = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith(HEADS))
    return "\n".join(lines[:end]) + "\n"


@pytest.fixture
def write(tmp_path):
    """Writes a file of code, with what is left to the reader put in."""

    def written(text: str, fill: dict[str, str] | None = None, behind: str = "") -> Path:
        for place, code in (fill or {}).items():
            assert place in text
            text = text.replace(place, code)
        file = tmp_path / "published.py"
        file.write_text(f"{text}\n{behind}")
        return file

    return written


def train(file: Path, tmp_path, capsys, **changes) -> tuple[list[dict], str]:
    """Logged metrics of a run of two rollouts with a reward file (or agent_func_path of the changes), and its log."""
    flags = ({} if "agent_func_path" in changes else {"remote_rm_url": file}) | changes
    code, _, errors = run_ppo(ppo_words(tmp_path / "out", **flags), capsys)
    assert code == 0, errors
    assert (tmp_path / "out" / "model.safetensors").is_file()
    lines = list(curve(tmp_path / "out").values())
    assert len(lines) == 2 and all(line["unscored_share"] == 0 for line in lines)
    return lines, errors


def look(flag: str, file: Path, tmp_path, capsys, count: int = 4, **changes) -> str:
    """What --dry_run_rewards prints."""
    words = ppo_words(tmp_path / "looked", dry_run_rewards=count, **{flag: file}, **changes)
    code, out, errors = run_ppo(words, capsys)
    assert code == 0, errors
    assert not (tmp_path / "looked").exists()
    return out


def shown_samples(out: str) -> list[dict[str, str]]:
    """Query, prompt, response and label of every sample that a dry run printed."""
    samples = out.split("\nsample ")[1:]
    return [{name: ast.literal_eval(value) for name, value in SAMPLE.findall(one)} for one in samples]


def shown_rewards(out: str) -> np.ndarray:
    """(N, 2) reward and score of every sample that a dry run printed."""
    return np.array(re.findall(r"^  reward: (\S+), score: (\S+)$", out, re.MULTILINE), dtype=float)


def called_alone(text: str, samples: list[dict[str, str]]) -> np.ndarray:
    """(N, 2) reward and score of each sample, from the printed function itself, called with one sample at a time."""
    scope: dict = {}
    exec(text, scope)
    answers = [scope["reward_func"]([s["query"]], [s["prompt"]], [s["label"]]) for s in samples]
    return np.array([(float(one["rewards"][0]), float(one["scores"][0])) for one in answers])


def test_math_function_of_the_guide(guide, write, tmp_path, capsys):
    file = write(guide["math"])
    out = look("remote_rm_url", file, tmp_path, capsys)
    samples = shown_samples(out)
    assert len(samples) == 4 and shown_rewards(out) == pytest.approx(called_alone(guide["math"], samples), abs=1e-5)
    lines, _ = train(file, tmp_path, capsys)
    assert all({"published/math_accuracy", "published/answer_formatted"} <= set(line) for line in lines)


def test_code_function_of_the_guide(guide, write, tmp_path, capsys, monkeypatch):
    """It runs pytest on each response; solutions of pocket are no programs, so no test passes or fails."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    small = {"max_samples": 2, "rollout_batch_size": 1, "train_batch_size": 2}
    lines, _ = train(write(guide["code"]), tmp_path, capsys, **small)
    assert all(line["reward"] == line["published/code_correctness"] == 0 for line in lines)


def test_conversation_function_of_the_guide(guide, write, tmp_path, capsys):
    """A local classifier stands for the one of the hub."""
    config = tiny_config()
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "quality")
    tiny_tokenizer().save_pretrained(tmp_path / "quality")
    file = write(guide["conversation"], {"OpenAssistant/reward-model-deberta-v3-large": str(tmp_path / "quality")})
    out = look("remote_rm_url", file, tmp_path, capsys)
    assert shown_rewards(out) == pytest.approx(called_alone(file.read_text(), shown_samples(out)), abs=1e-4)
    lines, _ = train(file, tmp_path, capsys)
    for line in lines:
        low, mean, high = (line[f"published/{name}_quality"] for name in ("min", "avg", "max"))
        assert 0 < low <= mean <= high < 1 and line["reward"] == pytest.approx(mean, abs=1e-5)


FILTERING = {"calculate_rewards(...)": "calculate_rewards(queries, prompts, labels)"}
CALCULATE = """
import json, torch
from openrlhf.utils import extract_answer, grade_answer

def calculate_rewards(queries, prompts, labels):
    texts = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    right = [float(grade_answer(extract_answer(text), label)) for text, label in zip(texts, labels)]
    with open("RECORD", "a") as record:
        record.write(json.dumps([prompts, right]) + "\\n")
    return torch.tensor(right)
"""
SPELLINGS = {
    "flat": ["--dynamic_filtering", "--dynamic_filtering_reward_range", "0", "1"],
    "dotted": ["--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "0", "1"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_dynamic_filtering_of_the_guide(guide, write, spelling, tmp_path, capsys):
    """Prompts whose responses are all right or all wrong leave, and are replaced until the prompts are used up."""
    record = tmp_path / "record.jsonl"
    file = write(guide["filtering"], FILTERING, CALCULATE.replace("RECORD", str(record)))
    group, size = 4, 3
    words = ppo_words(
        tmp_path / "out", *SPELLINGS[spelling], remote_rm_url=file, max_samples=24, rollout_batch_size=size,
        n_samples_per_prompt=group, train_batch_size=12,
    )  # fmt: skip
    code, _, errors = run_ppo(words, capsys)
    assert code == 0, errors
    # By hand from what the function was called with: call after call, until a rollout is full.
    calls = [ast.literal_eval(line) for line in record.read_text().splitlines()]
    expected, kept, seen = [], 0, 0
    for number, (prompts, right) in enumerate(calls):
        groups = [right[i : i + group] for i in range(0, len(right), group)]
        assert all(len(set(prompts[i : i + group])) == 1 for i in range(0, len(right), group))
        kept += sum(0 < sum(one) < group for one in groups)
        seen += len(groups)
        if kept == size or number == len(calls) - 1:
            expected.append(kept)
            kept = 0
    lines = list(curve(tmp_path / "out").values())
    assert seen == 24 and len(calls) > len(expected) > 2  # some rollouts took several calls: prompts were filtered
    assert [line["responses"] for line in lines] == [group * one for one in expected if one]
    assert [line["learning_share"] for line in lines] == [1.0] * len(lines)  # every group left differs
    assert all(line["equal_group_share"] == 0 and 0 < line["reward"] < 1 for line in lines)
    assert max(line["filtered_share"] for line in lines) > 0


def test_agent_template_of_the_guide(guide, write, tmp_path, capsys):
    """Six actions: five with 'Next step', the reward with the last one."""
    reward = "def calculate_reward(action_text, label):\n    return 0.25\n"
    file = write(guide["agent"], behind=reward)
    out = look("agent_func_path", file, tmp_path, capsys, generate_max_len=8)
    episodes = re.findall(r"^  episode: (.*)\n  label .*\n  reward: (.*), score: .*$", out, re.MULTILINE)
    assert len(episodes) == 4
    for episode, reward in episodes:
        assert ast.literal_eval(episode).count("Next step:") == 5 and "[EPISODE COMPLETE]" in episode
        assert float(reward) == 0.25
    lines, _ = train(file, tmp_path, capsys, agent_func_path=file, generate_max_len=8)
    assert all(line["turns"] == 6 and line["reward"] == 0.25 for line in lines)


def test_math_agent_of_the_guide(guide, write, tmp_path, capsys):
    file = write(guide["math_agent"])
    out = look("agent_func_path", file, tmp_path, capsys, count=8)
    episodes = re.findall(r"^  episode: (.*)\n  label .*\n  reward: (.*), score: .*$", out, re.MULTILINE)
    assert len(episodes) == 8
    for episode, reward in episodes:
        told = re.findall(r"\[(CORRECT!|INCORRECT|NO ANSWER FOUND|INVALID FORMAT)", episode)
        ends = {"CORRECT!": 1.0, "INCORRECT": -0.3}
        assert 1 <= len(told) <= 3 and float(reward) == pytest.approx(ends.get(told[-1], -0.5))
    lines, _ = train(file, tmp_path, capsys, agent_func_path=file)
    assert all(1 <= line["turns"] <= 3 for line in lines)


def test_printing_of_the_guide_is_harmless(guide, write, tmp_path, capsys):
    file = write(guide["printing"], {"# ... reward logic": "return [float(len(query)) for query in queries]"})
    out = look("remote_rm_url", file, tmp_path, capsys)
    assert "Query sample: " in out and shown_rewards(out)[:, 0].tolist() == [
        float(len(sample["query"])) for sample in shown_samples(out)
    ]
    train(file, tmp_path, capsys)


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("template", "remote_rm_url", r"reward_func \(published.py\) raised .* at published.py:\d+; sample 0"),
        ("filtering", "remote_rm_url", r"raised NameError: name 'calculate_rewards' is not defined at published.py:2"),
        (
            "agent",
            "agent_func_path",
            r"turn 6: .*step raised NameError: name 'calculate_reward' .* at published.py:\d+",
        ),
        ("conversation", "remote_rm_url", r"error: cannot load .*published.py, line 6: OSError"),
    ],
)
def test_unfilled_templates_end_in_one_error(guide, write, name, flag, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ppo_words(tmp_path / "out", generate_max_len=8, **{flag: write(guide[name])})
    code, _, errors = run_ppo(words, capsys)
    assert code == 1 and re.search(message, errors) and "Traceback" not in errors
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_functions_of_the_chapter(documents, write, tmp_path, capsys):
    """The smallest function; the one for math, whose print lacks `import torch`; and the weighted sum."""
    train(
        write(printed(documents, "import torch\n\ndef reward_func(queries, prompts, labels, **kwargs):")),
        tmp_path,
        capsys,
    )
    math = "import torch\n" + printed(documents, "from openrlhf.utils import extract_boxed_answer, grade_answer\n")
    file = write(math)
    out = look("remote_rm_url", file, tmp_path, capsys)
    samples = shown_samples(out)
    assert (shown_rewards(out) == called_alone(math, samples)).all()
    assert shown_rewards(out)[:, 0].tolist() == [
        float(rf"\boxed{{{sample['label']}}}" in sample["response"]) for sample in samples
    ]
    train(file, tmp_path, capsys)


def test_weighted_sum_of_the_chapter(documents, write, tmp_path, capsys):
    text = documents[[i for i, one in enumerate(documents) if "r_length" in one][0]]
    start = text.rindex("def reward_func", 0, text.index("correct_log, format_log, length_log"))
    body = printed([text[start - 1 :]], "def reward_func(queries, prompts, labels, **kwargs):")
    needs = "import torch\nfrom openrlhf.utils import extract_boxed_answer, grade_answer\n"
    filled = needs + body + "\ndef has_proper_format(text):\n    return r'\\boxed' in text\n"
    file = write(filled)
    out = look("remote_rm_url", file, tmp_path, capsys)
    expected = [
        (right + (0.1 if r"\boxed" in sample["response"] else -0.1), right)
        for sample in shown_samples(out)
        for right in [float(rf"\boxed{{{sample['label']}}}" in sample["response"])]
    ]
    assert shown_rewards(out) == pytest.approx(np.array(expected), abs=1e-5)
    lines, _ = train(file, tmp_path, capsys)
    assert {"published/r_correct", "published/r_format", "published/r_length"} <= set(lines[0])


AGENT_NAMES = """
ground_truth = "1"
def is_final_answer(action): return "boxed" in action
def grade(action, truth): return "{" + truth in action
"""
CLASS_NAMES = """
from types import SimpleNamespace
sandbox = SimpleNamespace(run=lambda code: "42")
def extract_code(action): return action
def check_answer(problem, action): return "boxed" in action
"""


def test_agents_of_the_chapter(documents, write, tmp_path, capsys):
    """A function `step` that returns a tuple, and a class with sync methods that take their parts by name."""
    file = write(printed(documents, "async def step(observation, action, **kwargs):"), behind=AGENT_NAMES)
    lines, _ = train(file, tmp_path, capsys, agent_func_path=file, generate_max_len=24, max_len=400)
    assert all(line["turns"] > 1 for line in lines)  # where no answer has come, it asks for another turn
    base = "from openrlhf.utils.agent import AgentInstanceBase\n"
    file = write(base + printed(documents, "class MathAgentInstance(AgentInstanceBase):"), behind=CLASS_NAMES)
    lines, _ = train(file, tmp_path, capsys, agent_func_path=file)
    assert all(line["turns"] == 1 and 0 < line["reward"] <= 1 for line in lines)


def test_callable_of_the_request_for_any_reward(documents, write, tmp_path, capsys):
    """One argument, the texts; named behind the file. A function of one text alone is told what it must return."""
    file = write(printed(documents, "def reward_function(texts):"))
    train(file, tmp_path, capsys, remote_rm_url=f"{file}:reward_function")
    file = write(printed(documents, "def reward_func(text):"))
    code, _, errors = run_ppo(ppo_words(tmp_path / "one", remote_rm_url=file), capsys)
    assert code == 1 and "expected 8 numbers, one a sample, got float 8.0" in errors
