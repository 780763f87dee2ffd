"""Responses of a policy drawn step by step: each with its own random numbers, its prompt computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decoding.boundary import StepBoundary, cut_at_stop
from decoding.streams import Stream
from decoding.token_texts import TokenTexts, decode
from openrlhf.models.key_values import KeyValues, check_context, context_of
from openrlhf.models.policy import Policy
from openrlhf.models.sampling import keep_likely

End = Literal["", "eos", "stop", "length"]


@dataclass(frozen=True)
class Piece:
    """What one row drew in one call."""

    ids: tuple[int, ...]  # EOS included
    logprobs: tuple[float, ...]  # of each token under the policy as it is, without temperature and top_p; nats
    ended: End  # why the whole response is over; "": only the step is


class PolicySession:
    """R responses that grow together, each behind its prompt.

    Args:
        policy: the language model; it is not changed.
        prompts: token ids, a prompt a row; equal ones are computed once.
        temperature: 0 takes the most likely token each time.
        top_p: share of the probability mass to draw from, in (0, 1].
        max_tokens: of a response, EOS included; one that would pass the policy's context ends there.
        stops: strings that end a response; its text is cut before them.
    Attributes:
        ids: response token ids of each row so far.
        ended: of each row, as in :class:`Piece`.
        policy_tokens: drawn so far, those of dropped rows included. prompt_tokens: computed, equal prompts once.
    Raises:
        ValueError: a number outside its range, a prompt without a token, or one that leaves no room in the context.
        CacheUnsupported: the policy's architecture keeps no keys and values.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        top_p: float = 1.0,
        max_tokens: int,
        stops: Sequence[str] = (),
    ) -> None:
        if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or max_tokens < 1:
            raise ValueError(
                "expected temperature 0 or more, top_p in (0, 1] and max_tokens 1 or more, "
                f"got {temperature}, {top_p} and {max_tokens}"
            )
        self.policy = policy
        self.temperature, self.top_p, self.max_tokens = temperature, top_p, max_tokens
        self.stops = [stop for stop in stops if stop]
        self.ids: list[list[int]] = []
        self.ended: list[End] = []
        self.policy_tokens = self.prompt_tokens = 0
        self._pending: list[int] = []  # last token of each row, not yet run through the policy
        self._limits: list[int] = []  # of each response, tokens
        self._cache = KeyValues(policy.model.base_model)
        self._texts = TokenTexts.of(policy.tokenizer)
        self._stop_tokens = self._texts.holding("".join(stop[-1] for stop in self.stops)) if self.stops else frozenset()
        self.add(prompts)

    def __len__(self) -> int:
        """R, the number of rows."""
        return len(self.ids)

    def add(self, prompts: Sequence[Sequence[int]], ids: Sequence[Sequence[int]] | None = None) -> None:
        """New rows at the end.

        Args:
            prompts: token ids, a prompt a row.
            ids: response ids of each, where they have been drawn before; such a row goes on behind them.
        Raises:
            ValueError: as on creation; nothing is computed then.
        """
        drawn = [[]] * len(prompts) if ids is None else ids
        first = len(self.ids)
        empty = [number for number, prompt in enumerate(prompts, first) if not len(prompt)]
        if empty:
            raise ValueError(f"prompts {empty[:5]} have no token; a policy needs at least one to continue from")
        config = self.policy.model.config
        check_context([len(prompt) for prompt in prompts], config, "the policy", first=first)
        context = context_of(config) or float("inf")
        self._cache.add([prompt[:-1] for prompt in prompts])
        self.prompt_tokens += sum(map(len, set(map(tuple, prompts))))
        for prompt, response in zip(prompts, drawn, strict=True):
            self.ids.append(list(response))
            self._limits.append(int(min(self.max_tokens, context - len(prompt))))
            self._pending.append(response[-1] if len(response) else prompt[-1])
            self.ended.append(self._end_of(self.ids[-1], self._limits[-1]) if len(response) else "")
        behind = [
            [*prompt[-1:], *response[:-1]] if response else [] for prompt, response in zip(prompts, drawn, strict=True)
        ]
        self._cache.append([()] * first + behind)

    def text(self, row: int) -> str:
        """The response so far, without special tokens, cut at the earliest stop string."""
        return cut_at_stop(decode(self.policy.tokenizer, self.ids[row]), self.stops)[0]

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was: rows may repeat, be left out or change order."""
        self._cache.select(rows)
        self.ids = [list(self.ids[row]) for row in rows]
        self.ended, self._pending, self._limits = (
            [values[row] for row in rows] for values in (self.ended, self._pending, self._limits)
        )

    @torch.inference_mode()
    def draw(
        self,
        streams: Sequence[Stream] | None,
        boundary: StepBoundary | None,
        max_step_tokens: int,
        rows: Sequence[int] | None = None,
    ) -> list[Piece]:
        """Let rows go on until their boundary, their end, or `max_step_tokens`.

        Rows that are there take no part in the passes that others still need. The token at place t of a response comes
        from number t of its stream, so it depends on no other row.

        Args:
            streams: of each named row; None at temperature 0.
            boundary: None for none.
            rows: named rows, each once; None names all.
        Returns:
            A piece a named row; an empty one for a response that was over before.
        """
        rows = range(len(self.ids)) if rows is None else rows
        if max_step_tokens < 1 or len(set(rows)) != len(rows):
            raise ValueError(f"expected max_step_tokens 1 or more and different rows, got {max_step_tokens}, {rows}")
        if streams is None and self.temperature > 0:
            raise ValueError(f"temperature {self.temperature} needs a stream a row; only temperature 0 needs none")
        if boundary is not None and boundary.kind == "tokens":
            boundary, max_step_tokens = None, min(max_step_tokens, boundary.tokens)
        stream_of = {} if streams is None else dict(zip(rows, streams, strict=True))
        ending = self._texts.holding(boundary.characters) if boundary is not None else frozenset()
        starts = {row: len(self.ids[row]) for row in rows}
        logprobs: dict[int, list[float]] = {row: [] for row in rows}
        active = sorted(row for row in rows if not self.ended[row])
        for step_tokens in range(1, max_step_tokens + 1):
            if not active:
                break
            uniforms = None
            if self.temperature > 0:
                uniforms = [stream_of[row].uniform(len(self.ids[row])) for row in active]
            tokens, logs = self._next_tokens(active, uniforms)
            going_on = []
            for row, token, log in zip(active, tokens, logs, strict=True):
                ids = self.ids[row]
                ids.append(token)
                logprobs[row].append(log)
                self._pending[row] = token
                self.ended[row] = ended = self._end_of(ids, self._limits[row])
                if ended:
                    continue
                if token not in ending or not boundary.reached(self._texts.read(ids[starts[row] :]), step_tokens):
                    going_on.append(row)
            self.policy_tokens += len(active)
            if any(self.ended[row] for row in active):  # nothing follows them: no more copies of their keys and values
                self._cache.crop([0 if end else n for end, n in zip(self.ended, self._cache.lengths, strict=True)])
            active = going_on
        return [Piece(tuple(self.ids[row][starts[row] :]), tuple(logprobs[row]), self.ended[row]) for row in rows]

    def _end_of(self, ids: Sequence[int], limit: int) -> End:
        """Why a response is over after its last token; its tokens before did not end it."""
        if ids[-1] in self.policy.stop_ids:
            return "eos"
        if ids[-1] in self._stop_tokens and cut_at_stop(decode(self.policy.tokenizer, ids), self.stops)[1]:
            return "stop"
        return "length" if len(ids) >= limit else ""

    def _next_tokens(self, active: Sequence[int], uniforms: Sequence[float] | None) -> tuple[list[int], list[float]]:
        """The next token of some rows, in rising order, and its log-probability."""
        waiting: list[Sequence[int]] = [()] * len(self.ids)
        for row in active:
            waiting[row] = (self._pending[row],)
        logits = self._cache.append(waiting, through=self.policy.model)[:, -1].float()
        normalizer = logits.logsumexp(dim=-1)
        if not normalizer.isfinite().all():
            raise ValueError("the policy gives logits that are not finite; check its dtype")
        if uniforms is None:
            tokens = logits.argmax(dim=-1)
        else:
            places = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
            tokens = choose_tokens(logits, places, self.temperature, self.top_p)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalizer
        return tokens.tolist(), logprobs.tolist()


def choose_tokens(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Draw tokens by the inverse of the cumulative distribution, in the order of the vocabulary.

    Args:
        logits: (B, V) float.
        uniforms: (B,) float64 in [0, 1 - 2**-53].
        temperature: above 0; divides the logits.
        top_p: draw from the fewest most likely tokens that together have at least this probability.
    Returns:
        (B,) int64; never a token of probability 0.
    """
    probabilities = (logits / temperature).softmax(dim=-1, dtype=torch.float64)
    if top_p < 1:
        probabilities = keep_likely(probabilities, top_p)
    reached = probabilities.cumsum(dim=-1)
    # The product is less than the total, however it is rounded: so there is a first token that passes it.
    return torch.searchsorted(reached, uniforms[:, None] * reached[:, -1:], right=True)[:, 0]
