"""serve_rm: its flags, what it refuses before a model is loaded, and what it loads."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import requests

from openrlhf.cli.parser import parse_config
from openrlhf.cli.reward_checkpoint import find_checkpoint
from openrlhf.cli.serve_rm import TOKEN_VARIABLE, ServeConfig, listen, load_app, main, read_token
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.models.pretrained import checkpoint_fingerprint, save_reward_model
from openrlhf.rewards.source import RewardRequest, parse_reward_source
from tests.tiny import tiny_reward_model, tiny_tokenizer

PROMPT, TEXTS = "is it?\n", ["good", "the answer is no"]


def save_checkpoint(folder):
    """Folder of a tiny reward model; its goal state lies in the folder around it."""
    goal_folder, folder = folder, folder / "rm"
    folder.mkdir()
    settings = {"template": "plain", "max_len": 100, "reward_mean": 1.0, "reward_std": 2.0}
    save_reward_model(folder, tiny_reward_model(), tiny_tokenizer(), settings=settings)
    vector = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    GoalState(vector, 2, 1.0, "plain", False, 100, checkpoint_fingerprint(folder), "d").save(goal_folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("serve"))


def request():
    tokenizer = tiny_tokenizer()
    ids = [[*tokenizer(text)["input_ids"], 2] for text in TEXTS]
    prompts = [tokenizer(PROMPT)["input_ids"]] * 2
    return RewardRequest.from_tokens(tokenizer, [PROMPT] * 2, prompts, ids, inputs=["is it?"] * 2, group_size=2)


def test_flags_of_the_documents():
    config = parse_config(ServeConfig, "--reward_pretrain m --port 8000 --max_len 4096 --batch_size 32".split())
    assert (config.reward_pretrain, config.port, config.max_len, config.host) == ("m", 8000, 4096, "127.0.0.1")
    config = parse_config(
        ServeConfig, "--reward.model_name_or_path m --data.max_len 64 --reward.normalize_enable".split()
    )
    assert (config.reward_pretrain, config.max_len, config.normalize_reward) == ("m", 64, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "--reward_pretrain is required"),
        ("--reward_pretrain m --port 70000", "--port: expected 0 to 65535"),
        ("--reward_pretrain m --batch_size 0", "--batch_size must be at least 1"),
        ("--reward_pretrain m --batch_wait_ms -1", "--batch_wait_ms: expected 0 to 10000"),
        ("--reward_pretrain m --max_len 1", "--max_len must be at least 2"),
        ("--reward_pretrain m --token_file nowhere", "No such file"),
        ("--reward_pretrain ./nowhere --port 0", "found no folder"),
        ("--reward_pretrain m --port 0 --host 999.1.1.1", "cannot listen on 999.1.1.1, port 0"),
    ],
)
def test_what_cannot_work_is_refused(words, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 1 and told in capsys.readouterr().err


def test_a_taken_port_is_told_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit):
            main(["--reward_pretrain", "./nowhere", "--port", str(port)])
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-environment")
    assert read_token(None) == "of-the-environment"
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    assert read_token(str(file)) == "of-the-file"
    for text in ("", "short", "two words here", "fünfundzwanzig"):
        file.write_text(text)
        with pytest.raises(ValueError, match="at least 8 ASCII characters"):
            read_token(str(file))


def test_a_goal_state_of_another_model_is_refused(checkpoint, tmp_path):
    vector = np.ones((1, 32), np.float32)
    GoalState(vector, 2, 1.0, "plain", False, 100, "another", "d").save(tmp_path)
    with pytest.raises(ValueError, match="made with checkpoint another"):
        load_app(ServeConfig(reward_pretrain=str(checkpoint), goal_state_path=str(tmp_path)))


def test_a_checkpoint_is_a_source_by_its_path(checkpoint):
    """The same checkpoint by `parse_reward_source`: plain, normalised, and shaped by its goal state."""
    options = {"find_checkpoint": find_checkpoint}
    plain = parse_reward_source(str(checkpoint), **options)
    rewards = plain.score(request()).rewards
    assert plain.name == "rm" and len(set(rewards.tolist())) == 2
    normalised = parse_reward_source(str(checkpoint), normalize_reward=True, **options).score(request()).rewards
    assert normalised == pytest.approx((rewards - 1) / 2, abs=1e-6)
    shaped = parse_reward_source(
        str(checkpoint), goal_state_path=str(checkpoint.parent), goal_shaping_coef=0.5, **options
    )
    result = shaped.score(request())
    assert result.rewards == pytest.approx(rewards, abs=1e-6)
    assert result.dense[0].sum() == pytest.approx(result.dense[1].sum(), abs=1e-5)


def test_a_socket_is_bound_and_does_not_answer_yet():
    with listen("127.0.0.1", 0) as listener, pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{listener.getsockname()[1]}/health", timeout=5)
