"""One reward server: its address, its session, and which of its failures may pass.

`requests` is the client: it is in every installation already (wandb needs it), keeps one connection a server, knows
proxies and certificates, and blocking calls are all that a thread a server needs.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import numpy as np
import requests
from urllib3.exceptions import HTTPError

from openrlhf.rewards.numbers import Logs, read_logs, read_numbers
from openrlhf.rewards.source import RewardRequest

CONNECT_LIMIT_S = 10.0
LARGEST_ANSWER_BYTES = 256 << 20
Answer = tuple[np.ndarray, np.ndarray, Logs]  # rewards, scores, extra logs


class PermanentError(Exception):
    """A failure that another try would repeat."""


class TransientError(Exception):
    """A failure that may pass; `pause_s` is the pause that the server asks for."""

    def __init__(self, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.pause_s = pause_s


class RewardServer:
    """One address and its connection; used by one thread at a time.

    Args:
        url: where to post; without a path /get_reward is added.
        token: sent as bearer token.
        timeout_s: seconds for one request, answer included.
    Raises:
        ValueError: no http(s) URL.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as http://127.0.0.1:5000/get_reward, got {url!r}")
        parts = parts if parts.path.strip("/") else parts._replace(path="/get_reward")
        self.url = urlunsplit(parts)
        self.shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))  # no secrets
        self.timeout_s = timeout_s
        self.adds_eos = False  # serve_rm: it ends texts itself, whatever the EOS of the policy is
        self.session = requests.Session()
        if token:  # as auth, not as header: a login in ~/.netrc would take the place of a header
            self.session.auth = lambda sent: _with_token(sent, token)
        self.session.trust_env = not _is_loopback(parts.hostname)  # no proxy to the machine itself

    def check(self) -> None:
        """Ask /health beside the address; any answer but 401, 403 and what may pass will do."""
        status, body = self._ask("GET", urljoin(self.url, "health"))
        if status in (401, 403):
            raise PermanentError(f"status {status}, it refuses the token: {_excerpt(body)}")
        try:
            told = json.loads(body)
        except ValueError:
            told = None
        self.adds_eos = isinstance(told, dict) and told.get("adds_eos") is True

    def post(self, part: RewardRequest) -> Answer:
        """Rewards of all samples of the part."""
        texts = part.queries
        if self.adds_eos:
            texts = [prompt + response for prompt, response in zip(part.prompts, part.responses, strict=True)]
        labels = [None] * len(part) if part.labels is None else part.labels
        try:
            body = json.dumps({"query": texts, "prompts": part.prompts, "labels": labels}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise PermanentError(f"the labels cannot be sent as JSON ({error}): {labels!r:.80}") from error
        status, answer = self._ask("POST", self.url, body)
        if status != 200:
            raise PermanentError(f"status {status}: {_excerpt(answer)}")
        try:
            told = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise PermanentError(f"expected JSON, got {_excerpt(answer)}") from error
        if not isinstance(told, Mapping) or "rewards" not in told:
            shown = list(told) if isinstance(told, Mapping) else type(told).__name__
            raise PermanentError(f"expected an answer with the key 'rewards', got {shown!r:.200}")
        try:
            rewards = read_numbers(told["rewards"], len(part), "its answer")
            scores = told.get("scores")
            scores = rewards if scores is None else read_numbers(scores, len(part), "its answer, scores")
            return rewards, scores, read_logs(told.get("extra_logs") or {}, "its answer")
        except ValueError as error:
            raise PermanentError(str(error)) from error

    def close(self) -> None:
        """Close the connection."""
        self.session.close()

    def _ask(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of an answer."""
        deadline = time.monotonic() + self.timeout_s
        settings: dict[str, Any] = {"stream": True, "allow_redirects": False}
        settings["timeout"] = (min(CONNECT_LIMIT_S, self.timeout_s), self.timeout_s)
        if body is not None:
            settings |= {"data": body, "headers": {"Content-Type": "application/json"}}
        try:
            with self.session.request(method, url, **settings) as answer:
                content = bytearray()
                # As it arrives: a server that sends byte by byte must not escape the deadline.
                while piece := answer.raw.read1(1 << 20, decode_content=True):
                    content += piece
                    if time.monotonic() > deadline:
                        raise requests.Timeout(f"no whole answer within {self.timeout_s:g} s")
                    if len(content) > LARGEST_ANSWER_BYTES:
                        raise PermanentError(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
        except requests.exceptions.SSLError as error:
            raise PermanentError(f"no secure connection: {error}") from error
        except (requests.ConnectionError, requests.Timeout, HTTPError) as error:
            raise TransientError(_cause(error)) from error
        except requests.RequestException as error:
            raise PermanentError(_cause(error)) from error
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            asked = answer.headers.get("Retry-After", "")
            pause_s = float(asked) if asked.isdecimal() else 0.0
            raise TransientError(f"status {answer.status_code}: {_excerpt(content)}", pause_s)
        if answer.is_redirect:
            place = answer.headers["Location"]
            raise PermanentError(f"status {answer.status_code}, sent on to {place}; name that URL")
        return answer.status_code, bytes(content)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_token(sent: requests.PreparedRequest, token: str) -> requests.PreparedRequest:
    sent.headers["Authorization"] = f"Bearer {token}"
    return sent


def _cause(error: Exception) -> str:
    """The innermost reason; it comes wrapped several times."""
    inner: BaseException = error
    while inner.__cause__ or inner.__context__:
        inner = inner.__cause__ or inner.__context__
    return f"{type(error).__name__}: {inner}"


def _excerpt(body: bytes | bytearray) -> str:
    text = body.decode("utf-8", "replace").strip()
    return repr(text[:200]) if text else "an empty body"
