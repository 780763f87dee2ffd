"""Generation as a service: what a rollout asks of an engine, and the engine over a policy in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from openrlhf.models.policy import Policy
from openrlhf.models.sampling import SampledResponse, SamplingParams


@dataclass(frozen=True)
class Generation:
    """One response of an engine."""

    token_ids: list[int]  # with the EOS that ended it
    logprobs: list[float]  # one a token, nats, of softmax(logits / temperature); see SampledResponse
    text: str  # decoded ids; special tokens too, unless the request leaves them out
    finish_reason: str  # "stop" (EOS, or a stop text) or "length"

    @property
    def outputs(self) -> list[SimpleNamespace]:
        """The same in the shape of vLLM's request output, which agent executors written for vLLM read."""
        tables = [
            {token: SimpleNamespace(logprob=logprob)}
            for token, logprob in zip(self.token_ids, self.logprobs, strict=True)
        ]
        fields = {"token_ids": self.token_ids, "text": self.text, "finish_reason": self.finish_reason}
        return [SimpleNamespace(**fields, logprobs=tables)]


class GenerationEngine(Protocol):
    """Anything that continues token ids."""

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any) -> Generation:
        """One response; `sampling_params` has the attributes of SamplingParams, max_tokens among them."""


@dataclass(frozen=True)
class _Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    answer: asyncio.Future


class PolicyEngine:
    """Generates with a policy of this process; requests that wait together run as one batch.

    Requests are gathered for a moment, then run in a thread of the engine, while the event loop goes on; those that
    come meanwhile form the next batch. A request's draws depend on its seed, not on its batch (up to rounding). Not for
    use while the policy's weights change.

    Args:
        policy: what generates.
        batch_tokens: upper bound of rows times tokens of one forward pass, as in Policy.sample.
        gather_s: seconds without a new request after which the waiting ones run.
        seed: of requests that have none; their numbers then depend on the order in which they come.
    """

    def __init__(self, policy: Policy, batch_tokens: int = 65_536, gather_s: float = 0.002, seed: int = 0) -> None:
        self.policy = policy
        self.batch_tokens = batch_tokens
        self.gather_s = gather_s
        self.requests = self.batches = 0  # answered so far
        self._waiting: list[_Request] = []
        self._runner: asyncio.Task | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._seeds = np.random.default_rng(seed)

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any) -> Generation:
        """One response to one prompt.

        Raises:
            ValueError: settings outside their range or not known here, no max_tokens, or an empty prompt.
        """
        params = SamplingParams.of(sampling_params)
        if not prompt_token_ids or params.max_tokens is None:
            raise ValueError("a request for generation needs at least one prompt token and max_tokens")
        if params.seed is None:
            params.seed = int(self._seeds.integers(2**53))
        loop = asyncio.get_running_loop()
        request = _Request(prompt_token_ids, params, loop.create_future())
        self._waiting.append(request)
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run())
        response: SampledResponse = await request.answer
        text = self.policy.tokenizer.decode(
            response.ids, skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return Generation(response.ids, response.logprobs, text, "length" if response.ended == "length" else "stop")

    async def _run(self) -> None:
        """Batches until no request waits."""
        while self._waiting:
            await self._gather()
            batch, self._waiting = self._waiting, []
            batch = [request for request in batch if not request.answer.done()]  # cancelled ones are done
            work = asyncio.get_running_loop().run_in_executor(
                self._thread,
                self.policy.sample,
                [request.prompt_ids for request in batch],
                [request.params for request in batch],
                self.batch_tokens,
            )
            try:
                responses = await work
            except Exception as error:  # told to every caller that waits for this batch
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            self.requests, self.batches = self.requests + len(batch), self.batches + 1
            for request, response in zip(batch, responses, strict=True):
                if not request.answer.done():
                    request.answer.set_result(response)

    async def _gather(self) -> None:
        """Let the other tasks of the loop file their requests, until none has come for `gather_s`."""
        count = 0
        while count < len(self._waiting):
            count = len(self._waiting)
            await asyncio.sleep(self.gather_s)
