"""Rewards from HTTP servers: OpenRLHF's request and answer, with bounded retries, several servers, and failover."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from openrlhf.rewards.connection import Answer, PermanentError, RewardServer, TransientError
from openrlhf.rewards.numbers import Logs
from openrlhf.rewards.source import RewardRequest, RewardResult

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0


class RemoteReward:
    """Reward servers of one model, as a reward source.

    A request is `{"query", "prompts", "labels"}` with a list each, an answer `{"rewards"}` with a number a query (null:
    not scored) and, if wanted, `scores` and `extra_logs`. One server gets the whole batch at once. Several get chunks
    of it, the samples of a prompt together, and a chunk that one fails to answer goes to another.

    Args:
        urls: addresses to post to; one without a path gets /get_reward.
        token: sent as bearer token.
        timeout_s: seconds for one request, answer included.
        tries: failures of a server in a row before it is given up for the call. Only failures to connect, time-outs and
            the statuses 408, 429 and 5xx are tried again, after pauses that double.
        pause_s: the first pause.
        chunk_size: most samples of a request; None: an equal share for each server.
    Raises:
        ValueError: no address, or one that is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        timeout_s: float = 180.0,
        tries: int = 5,
        pause_s: float = 0.5,
        chunk_size: int | None = None,
    ) -> None:
        if tries < 1 or timeout_s <= 0 or (chunk_size is not None and chunk_size < 1):
            raise ValueError(
                f"expected tries, timeout_s and chunk_size above 0, got {tries}, {timeout_s}, {chunk_size}"
            )
        self.servers = [RewardServer(url, token, timeout_s) for url in urls if url.strip()]
        if not self.servers:
            raise ValueError("expected the URL of at least one reward server, got none")
        self.name = ",".join(server.shown.split("/")[2] for server in self.servers)
        self.tries = tries
        self.pause_s = pause_s
        self.chunk_size = chunk_size

    def check(self) -> None:
        """Wait until each server has answered a health check or failed `tries` times.

        Raises:
            RuntimeError: none answers, or one refuses the token; names URL, tries and cause.
        """
        failed = []
        for server in self.servers:
            for count in range(1, self.tries + 1):
                try:
                    server.check()
                    break
                except PermanentError as error:
                    raise RuntimeError(_told(server, count, error)) from error
                except TransientError as error:
                    if count == self.tries:
                        failed.append(_told(server, count, error))
                    else:
                        time.sleep(self._pause(server, count, error))
        if len(failed) == len(self.servers):
            raise RuntimeError("; ".join(failed))
        for told in failed:
            logger.warning("%s; going on with the others", told)

    def score(self, request: RewardRequest) -> RewardResult:
        """Post the samples and put the answers together in their order; see `RewardSource.score`.

        Raises:
            RuntimeError: all servers failed, or one gave an answer that cannot be used; names URL, tries and cause.
        """
        chunks = self._chunks(request)
        call = _Call(self, [request.part(*chunk) for chunk in chunks])
        answers = call.run()
        return RewardResult(
            np.concatenate([rewards for rewards, _, _ in answers]),
            np.concatenate([scores for _, scores, _ in answers]),
            None,
            _joined([logs for _, _, logs in answers], [stop - start for start, stop in chunks]),
        )

    def close(self) -> None:
        """Close the connections."""
        for server in self.servers:
            server.close()

    def _chunks(self, request: RewardRequest) -> list[tuple[int, int]]:
        """Start and end of consecutive chunks of whole prompts."""
        prompts = len(request) // request.group_size
        share = -(-prompts // len(self.servers))
        if self.chunk_size is not None:
            share = min(share, max(self.chunk_size // request.group_size, 1))
        size = share * request.group_size
        return [(start, min(start + size, len(request))) for start in range(0, len(request), size)]

    def _pause(self, server: RewardServer, failures: int, error: TransientError) -> float:
        """Seconds until the next try, which are told: a run that waits must not look like one that hangs."""
        pause_s = min(max(self.pause_s * 2 ** (failures - 1), error.pause_s), LONGEST_PAUSE_S)
        logger.warning(
            "reward server %s: try %d of %d failed (%s); again in %g s",
            server.shown, failures, self.tries, error, pause_s,
        )  # fmt: skip
        return pause_s


class _Call:
    """One batch: a thread a server, each of which takes the next chunk when it has answered the one before."""

    def __init__(self, source: RemoteReward, parts: Sequence[RewardRequest]) -> None:
        self.source = source
        self.parts = parts
        self.waiting = deque(range(len(parts)))
        self.answers: dict[int, Answer] = {}
        self.given_up: dict[int, str] = {}  # by server
        self.fatal: BaseException | None = None  # what ends the call although other servers are left
        self.changed = threading.Condition()

    def run(self) -> list[Answer]:
        """Answers in the order of the parts."""
        threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"reward server {number}", daemon=True)
            for number in range(len(self.source.servers))
        ]
        for thread in threads:
            thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self._is_over() or len(self.given_up) == len(threads))
        if self.fatal is not None:
            raise self.fatal
        if len(self.answers) < len(self.parts):
            raise RuntimeError("; ".join(told for _, told in sorted(self.given_up.items())))
        return [self.answers[number] for number in range(len(self.parts))]

    def _serve(self, number: int) -> None:
        server, failures = self.source.servers[number], 0
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self._is_over())
                if self._is_over():
                    return
                chunk = self.waiting.popleft()
            try:
                answer = server.post(self.parts[chunk])
            except TransientError as error:
                failures += 1
                with self.changed:
                    self.waiting.appendleft(chunk)
                    if failures == self.source.tries:
                        self.given_up[number] = _told(server, failures, error)
                    self.changed.notify_all()
                    if number in self.given_up:
                        return
                    self.changed.wait_for(self._is_over, timeout=self.source._pause(server, failures, error))
            except BaseException as error:
                told = _told(server, failures + 1, error)
                with self.changed:
                    self.fatal = RuntimeError(told) if isinstance(error, PermanentError) else error
                    self.changed.notify_all()
                return
            else:
                failures = 0
                with self.changed:
                    self.answers[chunk] = answer
                    self.changed.notify_all()

    def _is_over(self) -> bool:
        return self.fatal is not None or len(self.answers) == len(self.parts)


def _told(server: RewardServer, tries: int, error: BaseException) -> str:
    return f"reward server {server.shown} failed after {tries} {'try' if tries == 1 else 'tries'}: {error}"


def _joined(parts: Sequence[Logs], sizes: Sequence[int]) -> Logs:
    """Extra logs of chunks as those of the whole: lists one behind the other, numbers as mean over the samples."""
    joined: Logs = {}
    for key in dict.fromkeys(key for logs in parts for key in logs):
        held = [(logs[key], size) for logs, size in zip(parts, sizes, strict=True) if key in logs]
        if all(isinstance(values, float) for values, _ in held):
            joined[key] = sum(value * size for value, size in held) / sum(size for _, size in held)
        else:
            joined[key] = [x for values, _ in held for x in ([values] if isinstance(values, float) else values)]
    return joined
