"""serve_rm as a user runs it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from openrlhf.cli.reward_checkpoint import find_checkpoint
from openrlhf.cli.serve_rm import TOKEN_VARIABLE
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rewards.source import parse_reward_source
from tests.runs import command
from tests.unit.test_serve_command import request, save_checkpoint


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    """Start, score, stop by SIGTERM with a request in flight, and the client's error afterwards."""
    checkpoint = save_checkpoint(tmp_path)
    words = ["-m", "openrlhf.cli.serve_rm", "--reward_pretrain", str(checkpoint), "--port", "0"]
    words += ["--goal_state_path", str(tmp_path), "--batch_wait_ms", "1500"]
    server = command(*words, environment={TOKEN_VARIABLE: "a-long-token"}, stdout=-1, stderr=-1)
    try:
        told = server.stdout.readline()
        assert told.startswith(f"serving {checkpoint} on http://127.0.0.1:")
        url = told.split()[-1]
        source = parse_reward_source(url, token="a-long-token", tries=3)
        plain = parse_reward_source(str(checkpoint), find_checkpoint=find_checkpoint)
        assert source.score(request()).rewards == pytest.approx(plain.score(request()).rewards, abs=1e-5)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(source.score(request())))
        asking.start()
        time.sleep(0.5)
        os.kill(server.pid, signal.SIGTERM)
        asking.join(20)
        assert answers[0].rewards == pytest.approx(plain.score(request()).rewards, abs=1e-5)
        assert server.wait(20) in (0, -signal.SIGTERM)
    finally:
        server.kill()
        _, errors = server.communicate()
    assert "Traceback" not in errors
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"reward server {url} failed after 3 tries: ConnectionError"):
        RemoteReward([url], tries=3).score(request())
    assert time.monotonic() - start < 5
