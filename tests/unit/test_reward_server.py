"""The reward server: OpenRLHF's shape, equal to direct scoring in any crowd, refusals with a reason, a clean end."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
import torch
import uvicorn

from openrlhf.cli.serve_rm import listen
from openrlhf.datasets.tokenize import encode_prompt, encode_response
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.rewards.model import RewardModelSource, TextScorer
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rewards.source import RewardRequest
from openrlhf.serving.app import ServerLimits, build_app
from openrlhf.serving.batcher import Batcher, FullError
from tests.tiny import tiny_reward_model, tiny_tokenizer
from tests.unit.test_reward_models import byte_tokenizer

TOKENIZER = tiny_tokenizer(add_bos=True)
GOAL = GoalState(
    np.random.default_rng(3).normal(size=(1, 32)).astype(np.float32), 3, 1.0, "plain", False, 120, "c", "d"
)
LIMITS = ServerLimits(texts=50, characters=20_000, body_bytes=50_000, body_s=0.5)
PROMPT = "what is the answer?\n"
JSON = {"Content-Type": "application/json"}


def scorer(goal=GOAL, **settings):
    return TextScorer(tiny_reward_model(tokenizer=TOKENIZER), TOKENIZER, 120, goal=goal, **settings)


class Running:
    """A server in a thread of this process."""

    def __init__(self, texts, **settings):
        app = build_app(texts, name="tiny", **settings)
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=20)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(timeout=20)
        self.listener.close()
        assert not self.thread.is_alive()

    def post(self, path="/get_reward", **body):
        answer = requests.post(self.url + path, json=body, timeout=20)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextlib.contextmanager
def running(texts=None, **settings):
    server = Running(texts or scorer(), **settings)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server():
    with running(limits=LIMITS) as one:
        yield one


def texts_of(count, seed=0):
    """Prompts and responses of different lengths."""
    draw = random.Random(seed)
    words = "the answer is apples good bad plus 7 31 🎉".split()
    prompts = [f"what is {draw.randrange(5)} plus 4 ?\n" for _ in range(count)]
    return prompts, [" ".join(draw.choices(words, k=draw.randrange(16))) for _ in range(count)]


def directly(prompts, responses):
    texts = scorer()
    return texts.rewards(texts.score(texts.encode(prompts, responses))).tolist()


def test_requests_of_openrlhfs_client_get_its_answer(server):
    prompts, responses = texts_of(6)
    queries = [f"{prompt}{response}</s>" for prompt, response in zip(prompts, responses, strict=True)]
    answer = server.post(query=queries, prompts=prompts, labels=["", "a", None, 3, {"x": [1]}, 2.5])
    expected = directly(prompts, responses)
    assert answer == {"rewards": expected, "scores": expected, "extra_logs": {"dummy_scores": expected}}
    assert server.post("/score", query=queries, prompts=prompts)["rewards"] == expected
    alone = [
        server.post(query=[query], prompts=[prompt])["rewards"][0]
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    assert alone == pytest.approx(expected, abs=1e-5)


def test_openrlhf_sends_empty_lists_to_its_further_servers(server):
    answer = server.post(query=[], prompts=[], labels=[])
    assert answer == {"rewards": [], "scores": [], "extra_logs": {"dummy_scores": []}}


def test_queries_without_their_prompts(server):
    """One text, BOS in front and EOS behind once, whether the query writes them out or not."""
    expected = directly([PROMPT], ["good"])  # the prompt ends in a new line, so that no token straddles the boundary
    queries = [f"{start}{PROMPT}good{end}" for start in ("", "<s>") for end in ("", "</s>")]
    assert server.post(query=queries)["rewards"] == pytest.approx(expected * 4, abs=1e-5)
    assert server.post(query=queries, prompts=[PROMPT] * 4)["rewards"] == pytest.approx(expected * 4, abs=1e-5)
    assert server.post(query=[f"{PROMPT}good"], prompts=["another"])["rewards"] == pytest.approx(expected, abs=1e-5)


def test_a_query_is_cut_where_its_prompt_ends(server):
    """Tokenised apart as in training, where one token would span the boundary, and where only the query has BOS."""
    expected = directly(["what is the ans"], ["wer"])
    queries = [f"{start}what is the answer</s>" for start in ("", "<s>")]
    assert server.post(query=queries, prompts=["what is the ans"] * 2)["rewards"] == pytest.approx(
        expected * 2, abs=1e-5
    )
    assert server.post(query=queries)["rewards"] != pytest.approx(expected * 2, abs=1e-3)


def test_a_prompt_that_leaves_no_room_gets_null(server):
    answer = server.post(query=["plus " * 200 + "good", PROMPT + "good"], prompts=["plus " * 200, PROMPT])
    assert answer["rewards"] == [None, directly([PROMPT], ["good"])[0]]
    assert server.post(query=["plus " * 200])["rewards"][0] is not None  # one text is cut at its end


def test_goal_similarity_of_every_response_token(server):
    answer = server.post("/goal_similarity", query=[f"{PROMPT}the answer</s>", PROMPT], prompts=[PROMPT, PROMPT])
    ids = [encode_prompt(TOKENIZER, PROMPT), encode_response(TOKENIZER, "the answer")]
    with torch.no_grad():
        out = tiny_reward_model(tokenizer=TOKENIZER)(
            torch.tensor([sum(ids, [])]), torch.ones(1, len(sum(ids, [])), dtype=torch.bool)
        )
    states = out.hidden_states[0, len(ids[0]) :]
    expected = torch.nn.functional.cosine_similarity(states, torch.from_numpy(GOAL.vector), dim=-1).tolist()
    assert answer["goal_similarity"][0] == pytest.approx(expected, abs=1e-5)
    assert answer["token_ends"][0] == [3, 10, 10] and len(answer["goal_similarity"][1]) == 1
    assert answer["rewards"][0] == pytest.approx(out.reward.item(), abs=1e-5)


def test_goal_similarity_needs_a_goal_state():
    with running(scorer(goal=None)) as server:
        answer = requests.post(f"{server.url}/goal_similarity", json={"query": ["a"]}, timeout=20)
        assert answer.status_code == 404 and "--goal_state_path" in answer.json()["detail"]
        assert requests.get(f"{server.url}/health", timeout=20).json()["goal_similarity"] is False


def test_eight_threads_of_fifty_requests_keep_order_and_equal_direct_scoring(server):
    prompts, responses = texts_of(120, seed=4)
    expected = dict(zip(zip(prompts, responses, strict=True), directly(prompts, responses), strict=True))

    def ask(seed):
        draw, wrong = random.Random(seed), 0.0
        with requests.Session() as session:
            for _ in range(50):
                chosen = draw.choices(list(expected), k=draw.choice([0, 1, 1, 2, 3, 5, 8, 40]))
                body = {"query": ["".join(pair) for pair in chosen], "prompts": [prompt for prompt, _ in chosen]}
                rewards = session.post(f"{server.url}/get_reward", json=body, timeout=60).json()["rewards"]
                assert len(rewards) == len(chosen)
                wrong = max([wrong, *(abs(a - expected[b]) for a, b in zip(rewards, chosen, strict=True))])
        return wrong

    assert len({round(reward, 3) for reward in expected.values()}) > 60  # another order would be seen
    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(8))) < 1e-5


# ---- our client with our server


def test_our_client_scores_as_the_model_does(server):
    prompts, responses = texts_of(8)
    request = RewardRequest(
        [p + r + "</s>" for p, r in zip(prompts, responses, strict=True)], prompts, responses, labels=[1] * 8
    )
    source = RemoteReward([server.url, f"{server.url}/score"])
    source.check()
    result = source.score(request)
    assert result.rewards.tolist() == pytest.approx(directly(prompts, responses), abs=1e-6)
    source.close()


def test_the_eos_of_another_policy_does_not_reach_the_model(server):
    policy = byte_tokenizer()
    ids = [[*policy(PROMPT)["input_ids"]], [*policy("good")["input_ids"], policy.eos_token_id]]
    request = RewardRequest.from_tokens(policy, [PROMPT], ids[:1], ids[1:])
    assert request.queries == [f"{PROMPT}good<eos>"]
    source = RemoteReward([server.url])
    source.check()  # tells that the server ends texts itself
    expected = RewardModelSource(tiny_reward_model(tokenizer=TOKENIZER), TOKENIZER, max_len=120).score(request)
    assert source.score(request).rewards == pytest.approx(expected.rewards, abs=1e-6)


def test_a_killed_server_ends_in_the_named_error_within_the_bound():
    request = RewardRequest([f"{PROMPT}good"], [PROMPT], ["good"])
    with running() as server:
        source = RemoteReward([server.url], tries=3, pause_s=0.05, timeout_s=1)
        source.check()
        assert source.score(request).rewards[0] == pytest.approx(directly([PROMPT], ["good"])[0], abs=1e-6)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"reward server {server.url}/get_reward failed after 3 tries: Connection"):
        source.score(request)
    assert time.monotonic() - start < 4


# ---- bad requests

GOOD = {"query": ["a"]}
BAD = {
    "no body": (b"", 400, "EOF"),
    "no JSON": (b"query=a", 400, "Invalid JSON"),
    "broken JSON": (b'{"query": ["a"', 400, "EOF"),
    "trailing comma": (b'{"query": ["a",]}', 400, "trailing comma"),
    "two values": (b'{"query": []} {}', 400, "trailing characters"),
    "not UTF-8": (b'{"query": ["\xff\xfe"]}', 400, "Invalid JSON"),
    "half a surrogate": (b'{"query": ["\\ud800"]}', 400, "hex escape"),
    "control character": (b'{"query": ["\x01"]}', 400, "control character"),
    "deeply nested": (b'{"query": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "recursion"),
    "null": (b"null", 422, "Input should be"),
    "a list": (b"[]", 422, "Input should be"),
    "a text": (b'"query"', 422, "Input should be"),
    "no query": (b'{"prompts": []}', 422, "query: Field required"),
    "another key": (b'{"queries": ["a"]}', 422, "query: Field required"),
    "query null": ({"query": None}, 422, "query: Input should be a valid"),
    "query a text": ({"query": "a"}, 422, "query: Input should be a valid"),
    "query a dict": ({"query": {"0": "a"}}, 422, "query: Input should be a valid"),
    "a number": ({"query": ["a", 1]}, 422, "query.1: Input should be a valid string"),
    "a null in it": ({"query": [None]}, 422, "query.0: Input should be a valid string"),
    "token ids": ({"query": [[1, 2, 3]]}, 422, "query.0: Input should be a valid string"),
    "messages": ({"query": [{"role": "user"}]}, 422, "query.0: Input should be a valid string"),
    "a boolean": ({"query": [True]}, 422, "query.0: Input should be a valid string"),
    "prompts a text": ({"query": ["a"], "prompts": "a"}, 422, "prompts: Input should be a valid"),
    "a prompt null": ({"query": ["a"], "prompts": [None]}, 422, "prompts.0: Input should be a valid string"),
    "too few prompts": ({"query": ["a", "b"], "prompts": ["a"]}, 422, "prompts: expected 2 values"),
    "too many prompts": ({"query": ["a"], "prompts": ["a", "b"]}, 422, "prompts: expected 1 values"),
    "too few labels": ({"query": ["a", "b"], "labels": [1]}, 422, "labels: expected 2 values"),
    "labels a number": ({"query": ["a"], "labels": 7}, 422, "labels: Input should be a valid"),
    "too many texts": ({"query": ["a"] * 51}, 413, "at most 50 texts, got 51"),
    "too many letters": ({"query": ["a" * 15_000], "prompts": ["a" * 15_000]}, 413, "at most 20000 characters"),
    "too large": ({"query": ["a" * 60_000]}, 413, "at most 50000 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_refused_with_a_reason(server, name):
    body, status, told = BAD[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for path in ("/get_reward", "/goal_similarity"):
        answer = requests.post(server.url + path, data=content, headers=JSON, timeout=20)
        assert answer.status_code == status and told in answer.json()["detail"], answer.text
    assert server.post(**GOOD)["rewards"] == directly_whole("a")


def directly_whole(text):
    texts = scorer()
    return texts.rewards(texts.score(texts.encode_dialogues([text]))).tolist()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "told"),
    [
        ("POST", "/get_rewards", JSON, 404, "there are POST /get_reward"),
        ("POST", "/", JSON, 404, "there are POST /get_reward"),
        ("GET", "/get_reward", {}, 405, "Method Not Allowed: there are POST"),
        ("PUT", "/score", JSON, 405, "Method Not Allowed: there are POST"),
        ("POST", "/health", JSON, 405, "GET /health"),
        ("POST", "/get_reward", {"Content-Type": "text/plain"}, 415, "application/json, got 'text/plain'"),
        ("POST", "/get_reward", {}, 415, "application/json, got 'none'"),
        ("POST", "/get_reward", {**JSON, "Content-Encoding": "gzip"}, 415, "expected a plain body"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(server, method, path, headers, status, told):
    answer = requests.request(method, server.url + path, data=json.dumps(GOOD).encode(), headers=headers, timeout=20)
    assert answer.status_code == status and told in answer.json()["detail"]
    assert server.post(**GOOD)["rewards"] == directly_whole("a")


def by_hand(server, *parts):
    """The answer to bytes sent as they are."""
    with socket.create_connection(("127.0.0.1", server.listener.getsockname()[1]), timeout=5) as connection:
        for part in parts:
            connection.sendall(part)
        return connection.recv(65536).decode()


def test_broken_http_is_refused(server):
    head = b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    assert " 400 " in by_hand(server, b"hello\r\n\r\n")
    assert " 400 " in by_hand(server, head + b"Content-Length: -1\r\n\r\n")
    assert " 400 " in by_hand(server, head + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n")
    assert " 413 " in by_hand(server, head + b"Content-Length: 99999999999\r\n\r\n")
    assert " 408 " in by_hand(server, head + b'Content-Length: 100\r\n\r\n{"query"')  # the rest never comes
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    assert " 413 " in by_hand(server, head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 7)
    assert server.post(**GOOD)["rewards"] == directly_whole("a")


def test_clients_that_go_away_do_no_harm(server):
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.listener.getsockname()[1])) as connection:
            connection.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
            connection.sendall(b'Content-Length: 16\r\n\r\n{"query": ["a"')
    assert server.post(**GOOD)["rewards"] == directly_whole("a")


def test_every_request_needs_the_token():
    with running(token="a-long-token") as server:
        routes = [("POST", "/get_reward"), ("POST", "/goal_similarity"), ("GET", "/health"), ("GET", "/metrics")]
        for header in (None, "a-long-token", "Bearer a-long-toke", "Basic a-long-token", "Bearer ä", ""):
            headers = JSON | ({} if header is None else {"Authorization": header.encode("latin-1")})
            for method, path in routes:
                answer = requests.request(method, server.url + path, data=b"{", headers=headers, timeout=20)
                assert answer.status_code == 401 and "Authorization: Bearer" in answer.json()["detail"]
        source = RemoteReward([server.url], token="a-long-token")
        source.check()
        assert source.score(RewardRequest(["a"], [""], ["a"])).rewards == pytest.approx(directly_whole("a"), abs=1e-6)
        with pytest.raises(RuntimeError, match="status 401, it refuses the token"):
            RemoteReward([server.url], token="another").check()


# ---- figures, faults, and the end


def test_metrics_count_what_was_done():
    with running() as server:
        server.post(query=["a b", "c"])
        requests.post(f"{server.url}/score", data=b"{", headers=JSON, timeout=20)
        server.post(query=["plus " * 200], prompts=["plus " * 200])
        answer = requests.get(f"{server.url}/metrics", timeout=20)
    lines = answer.text.splitlines()
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    for line in (
        'reward_requests_total{path="/get_reward",status="200"} 2.0',
        'reward_requests_total{path="/score",status="400"} 1.0',
        'reward_request_seconds_count{path="/get_reward"} 2.0',
        "reward_batch_texts_sum 3.0",
        "reward_unscored_texts_total 1.0",
        "reward_waiting_texts 0.0",
    ):
        assert line in lines
    tokens = sum(len(one) for one in scorer().encode_dialogues(["a b", "c"]))
    assert f"reward_tokens_total {float(tokens)}" in lines


class Faulty(TextScorer):
    """Fails for texts that say so; slow when told."""

    pause = 0.0

    def encode_dialogues(self, texts):
        time.sleep(self.pause)
        if "raise" in texts:
            raise KeyError("raise")
        if "not finite" in texts:
            raise ValueError("sample 0: the reward model gives a reward that is not finite")
        return super().encode_dialogues(texts)


def faulty():
    return Faulty(tiny_reward_model(tokenizer=TOKENIZER), TOKENIZER, 120)


def test_a_fault_stays_with_its_request():
    with running(faulty(), wait_ms=300) as server, ThreadPoolExecutor(4) as pool:

        def ask(text):
            return requests.post(f"{server.url}/score", json={"query": [text]}, timeout=20)

        answers = list(pool.map(ask, ["a", "raise", "not finite", "b"]))  # all in one batch
        assert [answer.status_code for answer in answers] == [200, 500, 500, 200]
        assert answers[1].json()["detail"] == "KeyError in the server; see its log"
        assert "not finite" in answers[2].json()["detail"]
        assert answers[0].json()["rewards"] == pytest.approx(directly_whole("a"), abs=1e-5)


def threads_of_batches():
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_requests_in_flight_are_answered_when_the_server_stops():
    texts, others = faulty(), threads_of_batches()
    texts.pause = 0.4
    server = Running(texts, batch_size=1)
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(requests.post, f"{server.url}/score", json={"query": [text]}, timeout=20) for text in "abc"
        ]
        time.sleep(0.3)
        server.stop()
        for text, answer in zip("abc", asked, strict=True):
            assert answer.result().json()["rewards"] == pytest.approx(directly_whole(text), abs=1e-5)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)
    assert threads_of_batches() == others


def test_a_full_server_asks_to_come_again():
    texts = faulty()
    texts.pause = 0.4
    with running(texts, batch_size=1, limits=ServerLimits(waiting_texts=2)) as server, ThreadPoolExecutor(6) as pool:

        def ask(text):
            return requests.post(f"{server.url}/score", json={"query": [text, text]}, timeout=20)

        answers = list(pool.map(ask, "abcdef"))
        refused = [answer for answer in answers if answer.status_code == 503]
        assert refused and all(answer.headers["Retry-After"] == "1" for answer in refused)
        assert all(answer.status_code == 200 for answer in answers if answer not in refused)
        source = RemoteReward([server.url], pause_s=0.1)
        assert len(source.score(RewardRequest(["a"], [""], ["a"])).rewards) == 1


# ---- batches


def test_a_batch_gathers_items_of_several_calls_and_cuts_large_ones():
    batches, first = [], threading.Event()

    def work(items):
        batches.append(len(items))
        first.wait(5)
        return [item * 2 for item in items]

    batcher = Batcher(work, batch_size=4, wait_s=0.0, max_waiting=100)
    futures = [batcher.submit([0])]
    while not batches:
        time.sleep(0.001)
    futures += [
        batcher.submit(list(range(start, start + size))) for start, size in ((10, 1), (20, 6), (30, 2), (40, 0))
    ]
    first.set()
    assert [future.result(5) for future in futures] == [[0], [20], [40, 42, 44, 46, 48, 50], [60, 62], []]
    assert batches == [1, 4, 4, 1]
    batcher.close()
    assert not batcher.is_alive
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit([1])


def test_a_batch_waits_for_others_no_longer_than_asked():
    batches = []
    batcher = Batcher(lambda items: batches.append(len(items)) or items, batch_size=3, wait_s=0.2, max_waiting=100)
    start = time.monotonic()
    assert batcher.submit([1]).result(5) == [1] and 0.15 < time.monotonic() - start < 2
    start = time.monotonic()
    futures = [batcher.submit([i]) for i in range(3)]
    assert [future.result(5) for future in futures] == [[0], [1], [2]] and time.monotonic() - start < 0.15
    assert batches == [1, 3]
    batcher.close()


def test_an_error_in_a_part_of_a_large_call_is_the_call_s():
    def work(items):
        if 7 in items:
            raise ValueError("seven")
        return items

    batcher = Batcher(work, batch_size=2, wait_s=0.0, max_waiting=100)
    large, small = batcher.submit(list(range(12))), batcher.submit([20])
    with pytest.raises(ValueError, match="seven"):
        large.result(5)
    assert small.result(5) == [20] and batcher.waiting == 0
    batcher.close()


def test_closing_answers_what_waits_and_a_full_batcher_refuses():
    release = threading.Event()
    batcher = Batcher(lambda items: (release.wait(5), items)[1], batch_size=1, wait_s=0.0, max_waiting=2)
    futures = [batcher.submit([1])]
    while batcher.waiting:
        time.sleep(0.001)
    futures.append(batcher.submit([2, 3, 4]))  # more than may wait, but nothing else does
    with pytest.raises(FullError, match="3 texts wait"):
        batcher.submit([5])
    release.set()
    batcher.close()
    assert [future.result(0) for future in futures] == [[1], [2, 3, 4]]
