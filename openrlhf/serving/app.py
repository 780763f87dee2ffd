"""The reward server: OpenRLHF's request and answer, goal similarities, health and metrics over HTTP.

Every error has the body {"detail": reason}; every answer is strict JSON. One thread tokenises and scores; the texts of
concurrent requests go through the model together.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException as HTTPError
from starlette.requests import ClientDisconnect

from openrlhf.rewards.model import TextScorer
from openrlhf.serving.batcher import Batcher, FullError

logger = logging.getLogger(__name__)

ROUTES = ("/get_reward", "/score", "/goal_similarity", "/health", "/metrics")


@dataclass(frozen=True)
class ServerLimits:
    """What one request, and all that wait together, may hold."""

    texts: int = 4096  # of a request
    characters: int = 16_000_000  # of all texts of a request
    body_bytes: int = 64 << 20
    body_s: float = 60.0  # until the whole body has come
    waiting_texts: int = 16_384  # of all requests


class RewardBody(BaseModel):
    """Body of every POST. Further keys are left alone, as OpenRLHF's server does."""

    model_config = ConfigDict(strict=True)
    query: list[str] = Field(description="Prompt and response of each text")
    prompts: list[str] | None = Field(None, description="Prompt of each text; with it, tokens are cut as in training")
    labels: list[Any] | None = Field(None, description="Not used")


class Text(NamedTuple):
    """A text to score."""

    prompt: str | None  # None: not known where the response starts
    response: str


class Score(NamedTuple):
    """What the model gives for a text; None where its prompt leaves no room for a response."""

    reward: float | None
    goal_similarity: list[float] | None
    token_ends: list[int] | None


def build_app(
    texts: TextScorer,
    *,
    name: str,
    batch_size: int = 32,
    wait_ms: float = 5.0,
    token: str | None = None,
    limits: ServerLimits = ServerLimits(),
) -> FastAPI:
    """The application; its thread starts here and ends with the application.

    Args:
        texts: the model; with a goal state, /goal_similarity is there.
        name: of the model, for /health.
        batch_size, wait_ms: texts that go through the model together, and how long the first waits for others.
        token: bearer token that every request needs; None: none.
    """
    metrics = _Metrics()
    batcher = Batcher(lambda items: _score(texts, items, metrics), batch_size, wait_ms / 1000, limits.waiting_texts)
    metrics.waiting.set_function(lambda: batcher.waiting)
    has_goal = texts.scorer.goal is not None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)  # requests are answered by now

    app = FastAPI(title="Reward server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(_Counting, metrics=metrics)
    schema = {"content": {"application/json": {"schema": RewardBody.model_json_schema()}}, "required": True}

    async def scores_of(request: Request) -> list[Score]:
        _check_token(request, token)
        body = _parsed(await _read_body(request, limits), limits)
        try:
            return await asyncio.wrap_future(batcher.submit(_split(body, texts.tokenizer.bos_token)))
        except FullError as error:
            raise HTTPException(503, f"{error}; try again", {"Retry-After": "1"}) from error
        except ValueError as error:  # of the scorer: a reward that is not finite
            raise HTTPException(500, str(error)) from error

    async def get_reward(request: Request) -> JSONResponse:
        rewards = [score.reward for score in await scores_of(request)]
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})

    for path in ("/get_reward", "/score"):
        app.add_api_route(path, get_reward, methods=["POST"], openapi_extra={"requestBody": schema})

    @app.post("/goal_similarity", openapi_extra={"requestBody": schema})
    async def goal_similarity(request: Request) -> JSONResponse:
        _check_token(request, token)
        if not has_goal:
            raise HTTPException(404, "no goal state; start the server with --goal_state_path")
        scores = await scores_of(request)
        return JSONResponse(
            {
                "goal_similarity": [score.goal_similarity for score in scores],
                "token_ends": [score.token_ends for score in scores],
                "rewards": [score.reward for score in scores],
            }
        )

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        _check_token(request, token)
        if not batcher.is_alive:
            raise HTTPException(503, "the thread that scores has ended; restart the server")
        told = {"status": "ok", "model": name, "max_len": texts.max_len, "goal_similarity": has_goal, "adds_eos": True}
        return JSONResponse(told)

    @app.get("/metrics")
    async def metrics_text(request: Request) -> PlainTextResponse:
        _check_token(request, token)
        return PlainTextResponse(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HTTPError)
    async def refused(request: Request, error: HTTPError) -> JSONResponse:
        detail = error.detail
        if request.url.path not in ROUTES or error.status_code == 405:
            detail = f"{detail}: there are POST /get_reward, /score and /goal_similarity, GET /health and /metrics"
        return JSONResponse({"detail": detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{type(error).__name__} in the server; see its log"}, 500)

    return app


def _score(scorer: TextScorer, items: Sequence[Text], metrics: _Metrics) -> list[Score]:
    """Scores of the texts of a batch, in order."""
    split = [i for i, item in enumerate(items) if item.prompt is not None]
    whole = [i for i, item in enumerate(items) if item.prompt is None]
    encoded: dict[int, Any] = {}
    parts = scorer.encode([items[i].prompt for i in split], [items[i].response for i in split])
    encoded |= zip(split, parts, strict=True)
    encoded |= zip(whole, scorer.encode_dialogues([items[i].response for i in whole]), strict=True)
    scored = scorer.score([encoded[i] for i in range(len(items))])
    rewards = [None if reward != reward else float(reward) for reward in scorer.rewards(scored)]  # NaN: no room
    metrics.batches.observe(len(items))
    metrics.tokens.inc(sum(len(one) for one in encoded.values()))
    metrics.unscored.inc(rewards.count(None))
    return [Score(reward, one.cosine_sim, one.token_ends) for reward, one in zip(rewards, scored, strict=True)]


def _split(body: RewardBody, bos: str | None) -> list[Text]:
    """Texts cut where their response starts. A BOS that only the query writes out is the tokenizer's own."""
    if body.prompts is None:
        return [Text(None, query) for query in body.query]
    found = []
    for query, prompt in zip(body.query, body.prompts, strict=True):
        if bos and query.startswith(bos) and not prompt.startswith(bos):
            query = query.removeprefix(bos)
        found.append(Text(prompt, query[len(prompt) :]) if query.startswith(prompt) else Text(None, query))
    return found


def _check_token(request: Request, token: str | None) -> None:
    if token is None:
        return
    given = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise HTTPException(401, "expected the header 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})


async def _read_body(request: Request, limits: ServerLimits) -> bytes:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" or "content-encoding" in request.headers:
        raise HTTPException(415, f"expected a plain body of Content-Type application/json, got {kind or 'none'!r}")
    body = bytearray()

    async def read() -> None:
        async for piece in request.stream():
            body.extend(piece)
            if len(body) > limits.body_bytes:
                raise HTTPException(413, f"expected a body of at most {limits.body_bytes} bytes")

    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise HTTPException(413, f"expected a body of at most {limits.body_bytes} bytes, got {declared}")
    try:
        await asyncio.wait_for(read(), limits.body_s)
    except asyncio.TimeoutError as error:
        raise HTTPException(408, f"the body did not come within {limits.body_s:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the body was cut off") from error
    return bytes(body)


def _parsed(body: bytes, limits: ServerLimits) -> RewardBody:
    try:
        parsed = RewardBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        status = 400 if first["type"] == "json_invalid" else 422
        place = ".".join(map(str, first["loc"]))
        raise HTTPException(status, f"{place}: {first['msg']}" if place else first["msg"]) from error
    count = len(parsed.query)
    for key in ("prompts", "labels"):
        values = getattr(parsed, key)
        if values is not None and len(values) != count:
            raise HTTPException(422, f"{key}: expected {count} values, as many as in query, got {len(values)}")
    if count > limits.texts:
        raise HTTPException(413, f"query: expected at most {limits.texts} texts, got {count}")
    characters = sum(map(len, [*parsed.query, *(parsed.prompts or [])]))
    if characters > limits.characters:
        raise HTTPException(413, f"expected at most {limits.characters} characters in all texts, got {characters}")
    return parsed


class _Metrics:
    """Figures of one application. prometheus_client is small, without dependencies, and right about the format."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        add = {"registry": self.registry}
        self.requests = Counter("reward_requests", "Requests", ["path", "status"], **add)
        self.seconds = Histogram("reward_request_seconds", "Time from request to answer", ["path"], **add)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batches = Histogram(
            "reward_batch_texts", "Texts that went through the model together", buckets=sizes, **add
        )
        self.tokens = Counter("reward_tokens", "Tokens of the texts scored", **add)
        self.unscored = Counter("reward_unscored_texts", "Texts whose prompt left no room for a response", **add)
        self.waiting = Gauge("reward_waiting_texts", "Texts that wait to be scored", **add)


class _Counting:
    """Counts and times requests."""

    def __init__(self, app: Any, metrics: _Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in ROUTES else "other"
        start = time.monotonic()

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, message["status"]).inc()
                self.metrics.seconds.labels(path).observe(time.monotonic() - start)
            await send(message)

        await self.app(scope, receive, counted)
