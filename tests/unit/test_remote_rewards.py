"""The client of reward servers (case B12), against local servers that misbehave on purpose."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from openrlhf.rewards.remote import RemoteReward
from openrlhf.rewards.source import RewardRequest, parse_reward_source

NAN = float("nan")


class FakeServer:
    """A reward server with OpenRLHF's one route; `script` changes its answers.

    Args:
        script: what to do with each POST in turn: a status, a body, or a function of (handler, queries) that answers
            itself; None, and after the end of the script, answers with the length of each query.
    """

    def __init__(self, *script, health=404):
        self.script = list(script)
        self.calls = []  # queries of each POST
        self.bodies = []
        self.headers = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, body, **headers):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.answer(health, {"detail": "Not Found"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.calls.append(body["query"])
                fake.bodies.append(body)
                fake.headers.append(dict(self.headers))
                step = fake.script.pop(0) if fake.script else None
                if self.path != "/get_reward":
                    self.answer(404, {"detail": "Not Found"})
                elif callable(step):
                    step(self, body["query"])
                elif isinstance(step, int):
                    self.answer(step, {"error": f"scripted {step}"})
                elif step is not None:
                    self.answer(200, step)
                else:
                    rewards = [float(len(query)) for query in body["query"]]
                    self.answer(200, {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *args: None  # a client that has left in the middle of an answer
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake():
    servers = []

    def start(*script, **settings):
        servers.append(FakeServer(*script, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def request(*responses, group_size=1, **fields):
    return RewardRequest(
        queries=[f"p{text}</s>" for text in responses],
        prompts=["p"] * len(responses),
        responses=list(responses),
        group_size=group_size,
        **fields,
    )


THREE = request("", "aa", "aaa", labels=["x", None, 3])  # queries of 5, 7 and 8 letters


def client(*servers, **settings):
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return RemoteReward(urls, **{"pause_s": 0.01, "timeout_s": 5, **settings})


def unused_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_request_and_answer_of_openrlhf(fake):
    server = fake()
    source = client(server)
    source.check()
    result = source.score(THREE)
    assert result.rewards.tolist() == result.scores.tolist() == [5, 7, 8]
    assert result.extra_logs == {"dummy_scores": [5, 7, 8]} and result.metrics()["dummy_scores"] == pytest.approx(
        20 / 3
    )
    assert server.bodies == [{"query": THREE.queries, "prompts": ["p"] * 3, "labels": ["x", None, 3]}]
    assert source.name == server.url.split("/")[2]


def test_without_labels_nulls_are_sent(fake):
    server = fake()
    client(server).score(request("a"))
    assert server.bodies[0]["labels"] == [None]


def test_500_then_200(fake):
    server = fake(500)
    assert client(server).score(THREE).rewards.tolist() == [5, 7, 8]
    assert len(server.calls) == 2


@pytest.mark.parametrize("status", [408, 429, 502, 503])
def test_statuses_that_may_pass_are_tried_again(fake, status):
    server = fake(status, status)
    assert client(server, tries=3).score(THREE).rewards.tolist() == [5, 7, 8]
    assert len(server.calls) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_other_4xx_fail_at_once(fake, status):
    server = fake(status, status)
    with pytest.raises(
        RuntimeError, match=rf"reward server {server.url} failed after 1 try: status {status}.*scripted"
    ):
        client(server).score(THREE)
    assert len(server.calls) == 1


def test_a_lasting_500_ends_after_the_tries(fake):
    server = fake(*[500] * 9)
    with pytest.raises(RuntimeError, match=rf"{server.url} failed after 4 tries: status 500: .*scripted 500"):
        client(server, tries=4).score(THREE)
    assert len(server.calls) == 4


def test_no_listener():
    url = f"http://127.0.0.1:{unused_port()}/get_reward"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"{url} failed after 3 tries: ConnectionError: .*refused"):
        RemoteReward([url], tries=3, timeout_s=0.2).score(THREE)
    assert time.monotonic() - start < 5


def test_a_server_that_never_answers(fake):
    stop = threading.Event()
    server = fake(*[lambda handler, queries: stop.wait(20)] * 2)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"{server.url} failed after 2 tries: ReadTimeout"):
        client(server, tries=2, timeout_s=0.2).score(THREE)
    assert time.monotonic() - start < 3
    stop.set()


def test_a_server_that_sends_byte_by_byte_does_not_escape_the_time_limit(fake):
    def drip(handler, queries):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="failed after 1 try: Timeout: no whole answer within 0.3 s"):
        client(fake(drip), tries=1, timeout_s=0.3).score(THREE)
    assert time.monotonic() - start < 2


def test_an_answer_that_breaks_off_is_tried_again(fake):
    def breaks_off(handler, queries):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"rewards": [1, 2')
        handler.close_connection = True

    server = fake(breaks_off)
    assert client(server).score(THREE).rewards.tolist() == [5, 7, 8]
    assert len(server.calls) == 2


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"rewards": [1, 2]}, "expected 3 numbers, one a sample, got 2"),
        ({"rewards": [1, 2, 3, 4]}, "expected 3 numbers, one a sample, got 4"),
        ({"rewards": 1.0}, "expected 3 numbers, one a sample, got float"),
        ({"rewards": [1, "2", 3]}, "expected a number for sample 1, got str"),
        ({"rewards": [1, 2, 3], "scores": [1]}, "scores: expected 3 numbers"),
        (b'{"rewards": [1, Infinity, 3]}', "sample 1 got inf"),
        ({"reward": [1, 2, 3]}, r"expected an answer with the key 'rewards', got \['reward'\]"),
        ([1, 2, 3], "expected an answer with the key 'rewards', got 'list'"),
        (b"<html>it works</html>", "expected JSON, got '<html>it works"),
        (b"", "expected JSON, got an empty body"),
    ],
)
def test_bad_bodies_fail_at_once(fake, body, told):
    server = fake(body)
    with pytest.raises(RuntimeError, match=f"{server.url} failed after 1 try: .*{told}"):
        client(server).score(THREE)
    assert len(server.calls) == 1


def test_null_is_not_scored_and_never_a_number(fake):
    result = client(fake({"rewards": [1, None, 3]})).score(THREE)
    assert result.rewards == pytest.approx([1, NAN, 3], nan_ok=True) and result.metrics()["unscored"] > 0.3


def test_labels_that_json_cannot_hold_are_refused(fake):
    server = fake()
    with pytest.raises(RuntimeError, match="the labels cannot be sent as JSON"):
        client(server).score(request("a", labels=[{1, 2}]))
    assert server.calls == []


def test_a_redirect_names_the_other_address(fake):
    server = fake(lambda handler, queries: handler.answer(307, {}, Location="http://elsewhere/get_reward"))
    with pytest.raises(RuntimeError, match="sent on to http://elsewhere/get_reward; name that URL"):
        client(server).score(THREE)


def test_the_pause_that_a_server_asks_for_is_kept(fake):
    server = fake(lambda handler, queries: handler.answer(429, {}, Retry_After=1))
    start = time.monotonic()
    client(server).score(THREE)
    assert time.monotonic() - start >= 1


def test_each_try_that_fails_is_told(fake, caplog):
    """A run that waits for a server must not look like one that hangs."""
    server = fake(500, 503)
    client(server).score(THREE)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[0].startswith(f"reward server {server.url}: try 1 of 5 failed (status 500: ")
    assert told[0].endswith("; again in 0.01 s") and told[1].endswith("; again in 0.02 s")


def test_the_token_is_sent_and_not_shown(fake):
    server = fake(None, 403)
    source = client(server.url.replace("http://", "http://user:secret@") + "?key=secret", token="very-secret")
    server.script.clear()
    with pytest.raises(RuntimeError) as caught:
        source.score(THREE)  # the fake knows the path without a query only
    assert server.headers[0]["Authorization"] == "Bearer very-secret"
    assert "secret" not in str(caught.value) and "secret" not in source.name


# ---- health


def test_the_health_check_waits_for_a_server_that_starts(fake):
    server = fake(health=503)
    with pytest.raises(RuntimeError, match=rf"{server.url} failed after 3 tries: status 503"):
        client(server, tries=3).check()


def test_no_server_is_an_error_before_anything_is_generated():
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(RuntimeError, match=rf"{url}/get_reward failed after 2 tries: ConnectionError"):
        parse_reward_source(url, tries=2)


def test_a_token_that_is_refused_is_told_at_the_check(fake):
    with pytest.raises(RuntimeError, match="status 401, it refuses the token"):
        client(fake(health=401)).check()


def test_one_server_of_two_may_be_down_at_the_check(fake, caplog):
    dead = f"http://127.0.0.1:{unused_port()}/get_reward"
    with caplog.at_level(logging.WARNING):
        client(dead, fake(), tries=1).check()
    assert f"{dead} failed after 1 try" in caplog.text and "going on with the others" in caplog.text


# ---- several servers


def test_the_first_chunk_answered_last_comes_first(fake):
    def late(handler, queries):
        time.sleep(0.3)
        handler.answer(200, {"rewards": [float(len(query)) for query in queries]})

    slow, fast = fake(late), fake(late)
    fast.script.clear()
    responses = ["a" * i for i in range(8)]
    result = client(slow, fast).score(request(*responses))
    assert result.rewards.tolist() == [5 + i for i in range(8)]
    assert sorted(map(len, slow.calls + fast.calls)) == [4, 4]


def test_chunks_hold_whole_prompts_and_are_shared(fake):
    servers = [fake(), fake()]
    responses = ["a" * i for i in range(12)]
    result = client(*servers, chunk_size=5).score(request(*responses, group_size=2))
    assert result.rewards.tolist() == [5 + i for i in range(12)]
    assert result.extra_logs["dummy_scores"] == [5 + i for i in range(12)]
    calls = servers[0].calls + servers[1].calls
    assert sorted(map(len, calls)) == [4, 4, 4]
    assert {query for call in calls for query in call} == set(request(*responses).queries)


def test_one_server_gets_the_batch_as_a_whole(fake):
    server = fake()
    client(server).score(request(*["a"] * 8, group_size=4))
    assert list(map(len, server.calls)) == [8]


def test_a_dead_server_leaves_its_work_to_the_other(fake):
    dead = f"http://127.0.0.1:{unused_port()}/get_reward"
    server = fake()
    source = client(dead, server, tries=2)
    for _ in range(2):
        assert source.score(request("", "a", "aa", "aaa")).rewards.tolist() == [5, 6, 7, 8]
    assert sum(map(len, server.calls)) == 8


def test_a_chunk_that_fails_here_is_tried_there(fake):
    broken, good = fake(*[500] * 50), fake()
    result = client(broken, good, tries=2, chunk_size=1).score(request(*["a" * i for i in range(6)]))
    assert result.rewards.tolist() == [5 + i for i in range(6)]
    assert len(broken.calls) <= 2 and len(good.calls) == 6


def test_only_failures_in_a_row_count(fake):
    server = fake(*[500, None] * 4)
    result = client(server, tries=2, chunk_size=1).score(request(*["a" * i for i in range(4)]))
    assert result.rewards.tolist() == [5 + i for i in range(4)] and len(server.calls) == 8


def test_when_all_servers_fail_all_are_named(fake):
    first, second = fake(*[500] * 50), fake(*[503] * 50)
    with pytest.raises(RuntimeError) as caught:
        client(first, second, tries=2).score(request("a", "b"))
    for server, status in ((first, 500), (second, 503)):
        assert f"{server.url} failed after 2 tries: status {status}" in str(caught.value)


def test_a_bad_answer_ends_the_call_although_another_server_is_left(fake):
    def late(handler, queries):
        time.sleep(0.2)
        handler.answer(200, {"rewards": [1.0] * len(queries)})

    with pytest.raises(RuntimeError, match="failed after 1 try: status 400"):
        client(fake(400), fake(late)).score(request("a", "b"))


def test_a_server_that_dies_between_two_batches(fake):
    server = FakeServer()
    source = client(server, tries=2)
    assert source.score(THREE).rewards.tolist() == [5, 7, 8]
    server.close()
    for adapter in source.servers[0].session.adapters.values():
        adapter.close()  # the thread of the kept connection lives on in this process
    with pytest.raises(RuntimeError, match=rf"{server.url} failed after 2 tries: ConnectionError"):
        source.score(THREE)


@pytest.mark.parametrize("urls", [[], [""], ["ftp://a"], ["http://"], ["localhost:5000"]])
def test_addresses_that_are_none(urls):
    with pytest.raises(ValueError, match="URL"):
        RemoteReward(urls)


def test_settings_that_cannot_work():
    for settings in ({"tries": 0}, {"timeout_s": 0}, {"chunk_size": 0}):
        with pytest.raises(ValueError, match="above 0"):
            RemoteReward(["http://a"], **settings)
