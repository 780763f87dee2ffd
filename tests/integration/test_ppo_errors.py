"""What users get wrong with rewards, agents, prompts and settings, by the command line: one line says what to do."""

from __future__ import annotations

import json
import re

import pytest

from openrlhf.models.pretrained import save_reward_model
from tests.runs import command, curve, ppo_words, run_ppo
from tests.tiny import tiny_reward_model, tiny_tokenizer

AGENT = """
import time
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Agent(AgentInstanceBase):
    def step(self, states):
        {body}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Agent)
"""
FUNCTION = "def reward_func(queries, prompts, labels):\n    "
GOES_ON = "return {'rewards': 0.0, 'environment_feedback': ' x', 'done': False}"

# Text of a file, the flag it goes to, and what is told; before any model is loaded.
FILES_BEFORE = {
    "no function": ("def other(x): return x", "remote_rm_url", r"has no function reward_func\(.*found .*\['other'\]"),
    "wrong signature": ("def reward_func(a, b): pass", "remote_rm_url", r"\(a, b\): expected reward_func\(queries"),
    "no arguments": ("def reward_func(): pass", "remote_rm_url", r"\(\): expected reward_func\(queries"),
    "syntax": ("def reward_func(:", "remote_rm_url", r"cannot load .*file.py, line 1: SyntaxError"),
    "raises at import": ("x = 1\nint('a')", "remote_rm_url", r"cannot load .*file.py, line 2: ValueError"),
    "an agent as reward": (
        AGENT.format(body=GOES_ON),
        "remote_rm_url",
        r"defines an agent: pass it as --agent_func_path",
    ),
    "a step as reward": (
        "async def step(observation, action, label): pass",
        "remote_rm_url",
        "pass it as --agent_func",
    ),
    "a reward as agent": (f"{FUNCTION}return 1", "agent_func_path", r"no agent: pass it as --remote_rm_url"),
    "an agent with syntax": ("class A(:", "agent_func_path", r"file.py fails when it is run: SyntaxError"),
    "an agent that exits": ("raise SystemExit(3)", "agent_func_path", r"file.py fails when it is run: SystemExit: 3"),
    "an agent for vLLM": ("from vllm import SamplingParams", "agent_func_path", r"take SamplingParams from openrlhf"),
    "no agent": ("x = 1", "agent_func_path", r"must define a class AgentExecutor"),
}
FILES_IN_A_CALL = {
    "raises": (f"{FUNCTION}return [1 / 0]", "remote_rm_url", r"ZeroDivisionError.* at file.py:2; sample 0 of 0 to 7"),
    "exits": (f"{FUNCTION}raise SystemExit(3)", "remote_rm_url", r"raised SystemExit: 3 at file.py:2"),
    "hangs": (f"{FUNCTION}__import__('time').sleep(60)", "remote_rm_url", r"within 1 s; .*\(--remote_rm_timeout\)"),
    "texts": (
        f"{FUNCTION}return ['a'] * len(queries)",
        "remote_rm_url",
        r"expected a number for sample 0, got str 'a'",
    ),
    "too few": (f"{FUNCTION}return [1.0]", "remote_rm_url", r"expected 8 numbers, one a sample, got 1"),
    "nothing": (f"{FUNCTION}pass", "remote_rm_url", r"expected 8 numbers, one a sample, got NoneType"),
    "another key": (
        f"{FUNCTION}return {{'reward': 1}}",
        "remote_rm_url",
        r"a dict with 'rewards' .* the keys \['reward'\]",
    ),
    "infinity": (f"{FUNCTION}return [1e999] * len(queries)", "remote_rm_url", r"sample 0"),
    "agent without keys": (
        AGENT.format(body="return {'reward': 0.0}"),
        "agent_func_path",
        r"sample 0: turn 1: Agent.step returned the keys \['reward'\], which lack .*'environment_feedback'",
    ),
    "agent raises": (
        AGENT.format(body="raise KeyError('boom')"),
        "agent_func_path",
        r"sample 0: turn 1: Agent.step raised KeyError: 'boom' at file.py:7",
    ),
    "agent hangs": (AGENT.format(body="time.sleep(60)"), "agent_func_path", r"Agent.step took more than 1 s"),
    "agent blocks": (
        AGENT.format(body="time.sleep(60)").replace("def step", "async def step"),
        "agent_func_path",
        r"Agent.step took more than 1 s",
    ),
    "agent of three": (
        AGENT.format(body="return '', 1.0, True"),
        "agent_func_path",
        r"returned a tuple of 3; expected",
    ),
}


@pytest.fixture
def no_model(monkeypatch):
    """Fails where a policy is loaded."""

    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("openrlhf.cli.train_sft.load_policy", load)


def told(words, capsys, code: int = 1) -> str:
    """The one line that a run ends with."""
    got, _, errors = run_ppo(words, capsys)
    assert got == code and "Traceback" not in errors, errors
    lines = [line for line in errors.splitlines() if "error: " in line]
    assert len(lines) == 1 and re.match(r"(\S+: )?error: ", lines[0]), errors  # not behind a progress bar
    return lines[0]


@pytest.mark.parametrize("name", FILES_BEFORE)
def test_a_file_that_cannot_be_used_is_told_before_a_model_is_loaded(name, tmp_path, capsys, no_model):
    text, flag, message = FILES_BEFORE[name]
    (tmp_path / "file.py").write_text(text)
    words = ppo_words(tmp_path / "out", **{flag: tmp_path / "file.py"})
    assert re.search(message, told(words, capsys))


@pytest.mark.parametrize("name", FILES_IN_A_CALL)
def test_a_file_that_fails_in_a_call_ends_the_run(name, tmp_path, capsys):
    text, flag, message = FILES_IN_A_CALL[name]
    (tmp_path / "file.py").write_text(text)
    words = ppo_words(tmp_path / "out", remote_rm_timeout=1, max_len=400, **{flag: tmp_path / "file.py"})
    assert re.search(message, told(words, capsys))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_hanging_function_does_not_keep_the_process(tmp_path):
    (tmp_path / "file.py").write_text(f"{FUNCTION}__import__('time').sleep(600)")
    words = ppo_words(tmp_path / "out", remote_rm_url=tmp_path / "file.py", remote_rm_timeout=1)
    process = command("-m", "openrlhf.cli.train_ppo", *words, stdout=-1, stderr=-1)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1 and "gave no answer for 8 samples within 1 s" in errors
    assert errors.rstrip().endswith("(set OPENRLHF_TRACEBACK=1 to see where)") and "Traceback" not in errors


def test_an_agent_that_never_ends_is_ended_and_told(tmp_path, capsys, caplog):
    (tmp_path / "file.py").write_text(AGENT.format(body=GOES_ON))
    words = {"agent_func_path": tmp_path / "file.py", "generate_max_len": 2, "max_len": 400}
    assert run_ppo(ppo_words(tmp_path / "turns", **words), capsys)[0] == 0
    assert "8 of 8 episodes were ended at the limit of turns; the agent never said done" in caplog.text
    lines = curve(tmp_path / "turns").values()
    assert [line["turns"] for line in lines] == [16, 16] and all(line["truncated_share"] == 1 for line in lines)
    words |= {"generate_max_len": 16, "max_len": 100}  # the context is full before the turns are
    assert run_ppo(ppo_words(tmp_path / "context", **words), capsys)[0] == 0
    assert all(line["turns"] < 16 and line["truncated_share"] == 1 for line in curve(tmp_path / "context").values())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Eight prompts without labels; two are long."""
    texts = [f"Ann has {n} apples. How many apples?" + " Think again." * 40 * (n < 2) for n in range(8)]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    return file


def test_prompts_longer_than_the_limit_are_left_out_and_counted(prompts, tmp_path, capsys, caplog):
    (tmp_path / "file.py").write_text(f"{FUNCTION}return [len(query) for query in queries]")
    words = {"prompt_data": prompts, "remote_rm_url": tmp_path / "file.py", "input_template": "pocket", "max_len": 80}
    with caplog.at_level("INFO"):
        code, _, errors = run_ppo(ppo_words(tmp_path / "out", **words), capsys)
    assert code == 0, errors
    assert "{'read': 8, 'kept': 6, 'too_long': 2}" in caplog.text
    assert sum(line["responses"] for line in curve(tmp_path / "out").values()) == 6 * 2
    words["prompt_max_len"] = 4
    assert "no prompt is left of 8" in told(ppo_words(tmp_path / "none", **words), capsys)


def test_missing_labels(prompts, tmp_path, capsys, no_model):
    words = {"prompt_data": prompts, "input_template": "pocket", "max_len": 80}
    assert "name their column by --label_key" in told(ppo_words(tmp_path / "out", **words), capsys)
    words["label_key"] = "gold"
    assert "expected a column 'gold'" in told(ppo_words(tmp_path / "out", **words), capsys)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("remote_rm_url", f"{FUNCTION}return [float(label) for label in labels]"),
        ("agent_func_path", AGENT.format(body="return '', float(states['label']), True, {}")),
    ],
)
def test_a_reward_that_needs_labels_is_told_where_they_come_from(prompts, flag, text, tmp_path, capsys):
    (tmp_path / "file.py").write_text(text)
    words = {"prompt_data": prompts, "input_template": "pocket", "max_len": 80, flag: tmp_path / "file.py"}
    message = told(ppo_words(tmp_path / "out", **words), capsys)
    assert "raised TypeError" in message and "name " in message and "by --label_key" in message


def test_a_reward_model_of_other_tokens_gets_the_text_and_says_so(tmp_path, capsys, caplog):
    tokenizer = tiny_tokenizer()
    (tmp_path / "rm").mkdir()
    save_reward_model(tmp_path / "rm", tiny_reward_model(tokenizer=tokenizer), tokenizer, settings={"max_len": 128})
    words = {"reward_pretrain": tmp_path / "rm", "reward_template": "plain"}
    with caplog.at_level("INFO"):
        code, _, errors = run_ppo(ppo_words(tmp_path / "out", **words), capsys)
    assert code == 0, errors
    assert "8 of 8 responses have other tokens in the reward model's tokenizer" in caplog.text
    assert "their text is tokenised anew (said once)" in caplog.text
    assert all(line["unscored_share"] == 0 for line in curve(tmp_path / "out").values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples_per_prompt": 1, "train_batch_size": 4}, "'rloo' compares responses to one prompt"),
        ({"lora_rank": 8, "load_in_4bit": True}, "trains all weights .*drop --lora_rank, --load_in_4bit"),
        ({"zero_stage": 3, "adam_offload": True}, "--zero_stage 3 splits the weights"),
        ({"s3_save_path": "s3://bucket/x"}, "saves the last ones locally: drop --s3_save_path"),
        ({"save_path": "s3://bucket/x"}, "cannot save to s3://bucket/x: expected a local folder"),
        ({"ckpt_path": "s3://bucket/x"}, "--ckpt_path s3://bucket/x: .*name a local folder"),
        ({"remote_rm_url": "nowhere.py"}, "expected a Python file with reward_func at nowhere.py, found no file"),
        ({"agent_func_path": "nowhere.py"}, "there is no agent file nowhere.py"),
        ({"remote_rm_url": "http://127.0.0.1:9/get_reward", "remote_rm_tries": 1}, "failed after 1 try: Connection"),
    ],
)
def test_settings_are_refused_before_a_model_is_loaded(changes, message, tmp_path, capsys, no_model):
    assert re.search(message, told(ppo_words(tmp_path / "out", **changes), capsys))


@pytest.mark.parametrize("flag", ["--packing_samples", "--vllm_num_engines=2", "--colocate_all_models"])
def test_flags_of_other_engines_are_refused(flag, tmp_path, capsys, no_model):
    assert f"drop flags that this command does not have. {flag.split('=')[0]}: " in told(
        ppo_words(tmp_path / "out", flag), capsys, code=2
    )
