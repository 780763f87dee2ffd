"""A reward server that is killed while a policy is trained: it comes back in time, or the run ends and can go on."""

from __future__ import annotations

import json
import socket
import threading
import time
from urllib.request import urlopen

import pytest

from openrlhf.models.pretrained import save_reward_model
from openrlhf.utils.checkpoint import latest_checkpoint, list_checkpoints
from tests.runs import command, curve, largest_difference, ppo_words, run_ppo, weights
from tests.tiny import tiny_reward_model, tiny_tokenizer

# OpenRLHF's shape: one route, no health. It tells each request as it comes, and holds the one of the number given.
SERVER = """
import sys, time
import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()
port, hold = map(int, sys.argv[1:])
count = 0

@app.post("/get_reward")
async def get_reward(request: Request):
    global count
    queries = (await request.json())["query"]
    count += 1
    print("request", count, flush=True)
    if count == hold:
        time.sleep(60)
    rewards = [query.count("1") / 4 for query in queries]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}

uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
"""
TRAINING = {"max_samples": 24, "save_steps": 2, "actor_learning_rate": 1e-3, "n_samples_per_prompt": 4}  # 6 rollouts
HELD = 4  # the request during which the server is killed


class Server:
    """A server in a process of its own, always on the same port."""

    def __init__(self, words, hold: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.words = words
        self.url = f"http://127.0.0.1:{self.port}/get_reward"
        self.start(hold)

    def start(self, hold: int = 0) -> None:
        self.process = command(*self.words(self.port, hold), stdout=-1, stderr=-3)
        end = time.monotonic() + 60
        while True:
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                return
            except OSError as error:
                if hasattr(error, "code"):  # 404: it answers
                    return
                assert self.process.poll() is None and time.monotonic() < end, "the server does not start"
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()  # SIGKILL
        self.process.communicate()

    def kill_in_request(self, number: int, back_after_s: float | None) -> threading.Thread:
        """Kill it while it holds this request; start it again some seconds later, where they are given."""

        def work() -> None:
            while self.process.stdout.readline() != f"request {number}\n":
                assert self.process.poll() is None
            self.kill()
            if back_after_s is not None:
                time.sleep(back_after_s)
                self.start()

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@pytest.fixture
def openrlhf_server(tmp_path):
    servers = []

    def make(hold: int = 0) -> Server:
        (tmp_path / "server.py").write_text(SERVER)
        servers.append(Server(lambda port, hold: [str(tmp_path / "server.py"), str(port), str(hold)], hold))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def numbers(folder, split="train") -> list[dict]:
    """Logged metrics without times, and without the server's port in their names."""
    return [
        {name.rpartition("/")[2]: value for name, value in line.items() if not name.startswith(("seconds", "time"))}
        for line in curve(folder, split).values()
    ]


def same_runs(one, other) -> bool:
    return largest_difference(weights(one), weights(other)) == 0 and numbers(one) == numbers(other)


def test_a_server_that_comes_back_is_waited_for(openrlhf_server, tmp_path, capsys, caplog):
    server = openrlhf_server()
    assert run_ppo(ppo_words(tmp_path / "whole", remote_rm_url=server.url, **TRAINING), capsys)[0] == 0
    server.kill()
    server.start(HELD)
    killing = server.kill_in_request(HELD, back_after_s=1.0)
    assert run_ppo(ppo_words(tmp_path / "out", remote_rm_url=server.url, **TRAINING), capsys)[0] == 0
    killing.join()
    assert f"reward server {server.url}: try 1 of 8 failed (" in caplog.text and "again in 0.5 s" in caplog.text
    lines = numbers(tmp_path / "out")
    assert len(lines) == 6 and all(line["unscored_share"] == 0 and line["responses"] == 16 for line in lines)
    assert all(line["dummy_scores"] == pytest.approx(line["reward"]) for line in lines)
    assert same_runs(tmp_path / "whole", tmp_path / "out")


def test_a_server_that_stays_away_ends_the_run_which_can_go_on(openrlhf_server, tmp_path, capsys, caplog):
    server = openrlhf_server()
    assert run_ppo(ppo_words(tmp_path / "whole", remote_rm_url=server.url, **TRAINING), capsys)[0] == 0
    server.kill()
    server.start(HELD)
    killing = server.kill_in_request(HELD, back_after_s=None)
    words = {"remote_rm_url": server.url, **TRAINING}
    start = time.monotonic()
    code, _, errors = run_ppo(ppo_words(tmp_path / "out", remote_rm_tries=3, **words), capsys)
    killing.join()
    assert time.monotonic() - start < 20 and code == 1 and "Traceback" not in errors
    assert errors.splitlines()[-2].startswith(
        f"error: reward server {server.url} failed after 3 tries: ConnectionError"
    )
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["status"].startswith("failed")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert latest_checkpoint(tmp_path / "out-checkpoints").name == "step-00000002"
    assert all((one / "complete.json").is_file() for one in list_checkpoints(tmp_path / "out-checkpoints"))

    code, _, errors = run_ppo(ppo_words(tmp_path / "out", remote_rm_tries=1, load_checkpoint=True, **words), capsys)
    assert code == 1 and f"error: reward server {server.url} failed after 1 try: ConnectionError" in errors
    server.start()
    with caplog.at_level("INFO"):
        assert run_ppo(ppo_words(tmp_path / "out", load_checkpoint=True, **words), capsys)[0] == 0
    assert "step-00000002 after 2 rollouts" in caplog.text
    assert same_runs(tmp_path / "whole", tmp_path / "out")


@pytest.mark.slow
def test_serve_rm_that_is_killed_and_restarted(tmp_path, capsys, caplog):
    """The project's own server takes seconds to load its model again; the run waits as long with the default."""
    tokenizer = tiny_tokenizer()
    save_reward_model(tmp_path / "rm", tiny_reward_model(tokenizer=tokenizer), tokenizer, settings={"max_len": 128})

    def words(port: int, hold: int) -> list[str]:
        return ["-m", "openrlhf.cli.serve_rm", "--reward_pretrain", str(tmp_path / "rm"), "--port", str(port)]

    server = Server(words)
    try:
        assert run_ppo(ppo_words(tmp_path / "whole", remote_rm_url=server.url, **TRAINING), capsys)[0] == 0

        def kill_after_two_rollouts() -> None:
            metrics = tmp_path / "out" / "metrics.jsonl"
            while not metrics.exists() or metrics.read_text().count('"split": "train"') < 2:
                time.sleep(0.002)
            server.kill()
            server.start()

        killing = threading.Thread(target=kill_after_two_rollouts)
        killing.start()
        assert run_ppo(ppo_words(tmp_path / "out", remote_rm_url=server.url, **TRAINING), capsys)[0] == 0
        killing.join()
        assert "try 2 of 8 failed" in caplog.text
        assert same_runs(tmp_path / "whole", tmp_path / "out")
    finally:
        server.kill()
