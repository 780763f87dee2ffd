"""Drawing tokens from logits: how a response is sampled, and by which random numbers.

One uniform number a token is turned into a token through the cumulative distribution of its row. A row has a stream of
such numbers of its own, so what it draws does not depend on the rows that share its batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

# Settings of vLLM's class of the same name that are not known here, with the values that leave them off.
_OFF = {
    "n": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}


@dataclass
class SamplingParams:
    """How one response is drawn; the names are those of vLLM's class, and agents may change them between turns."""

    temperature: float = 1.0  # 0 takes the most likely token each time
    top_p: float = 1.0  # share of the probability mass to draw from, in (0, 1]
    max_tokens: int | None = None  # of one response; None: what the context leaves
    stop: Sequence[str] | str | None = None  # texts that end a response; the token that completes one is kept whole
    seed: int | None = None  # of the response's random numbers
    skip_special_tokens: bool = False  # leave EOS and the like out of the text; the ids keep them
    logprobs: int | None = 1  # log-probabilities are always given; here for code that asks whether they are

    @classmethod
    def of(cls, params: Any) -> SamplingParams:
        """A checked copy of an object with these attributes, for example one of vLLM.

        Raises:
            ValueError: a value outside its range, or a setting that is not known here.
        """
        for name, values in _OFF.items():
            if getattr(params, name, None) not in values:
                raise ValueError(f"sampling with {name}={getattr(params, name)!r} is not supported here; leave it out")
        known = {field.name: getattr(params, field.name, field.default) for field in fields(cls)}
        checked = cls(**known)
        stop = checked.stop
        checked.stop = tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)
        check_temperature_and_top_p(checked.temperature, checked.top_p)
        if checked.max_tokens is not None and checked.max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, or None; got {checked.max_tokens}")
        return checked


@dataclass(frozen=True)
class SampledResponse:
    """One response with the log-probabilities of its tokens."""

    ids: list[int]  # with the EOS that ended it
    logprobs: list[float]  # one a token, nats, of softmax(logits / temperature); temperature 0: of softmax(logits)
    ended: str  # "eos", "stop" (a text of SamplingParams.stop) or "length"


def mix_seed(*words: int) -> int:
    """One seed made of several numbers, below 2^53, so that it survives JSON."""
    mixed = np.random.SeedSequence(words).generate_state(2)
    return int(mixed[0]) << 20 ^ int(mixed[1])


def spread_seeds(params: Any, n: int, first: int = 0) -> list[Any]:
    """N copies of sampling settings, each with a seed made of the settings' own (None counts as 0) and its number.

    Args:
        first: number of the first copy.
    """
    copies = [copy.copy(params) for _ in range(n)]
    for number, one in enumerate(copies, first):
        one.seed = mix_seed(getattr(params, "seed", None) or 0, number)
    return copies


def check_temperature_and_top_p(temperature: float, top_p: float) -> None:
    """Refuse values outside their ranges.

    Raises:
        ValueError: temperature below 0 or not finite, or top_p outside (0, 1].
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the cumulative distribution.

    Args:
        logits: (B, V) float32.
        uniforms: (B,) float64 in [0, 1).
        temperature: (B,) float32; 0 takes the most likely token.
        top_p: (B,) float32 in (0, 1]; the most likely tokens whose mass reaches it are drawn from.
    Returns:
        tokens (B,) int64, and their log-probabilities (B,) float32 under softmax(logits / temperature), before top_p
        cuts the tail (under softmax(logits) where the temperature is 0).
    Raises:
        ValueError: a row of logits gives no distribution (NaN, or infinity).
    """
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, torch.ones_like(temperature), temperature).unsqueeze(1)).log_softmax(-1)
    probabilities = logprobs.exp()
    if bool((top_p < 1).any()):
        probabilities = keep_likely(probabilities, top_p.unsqueeze(1))
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        rows = (~torch.isfinite(total.squeeze(1))).nonzero().flatten().tolist()
        raise ValueError(f"the policy gives logits that are no distribution (NaN or infinity) in rows {rows[:5]}")
    below_total = uniforms.unsqueeze(1).clamp(max=1 - 2**-32) * total
    tokens = torch.searchsorted(cumulative, below_total, right=True).squeeze(1)
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def keep_likely(probabilities: Tensor, top_p: Tensor | float) -> Tensor:
    """Probabilities with 0 for all but the fewest most likely tokens that together have at least `top_p`.

    Args:
        probabilities: (B, V) float. top_p: (B, 1), or one for all rows; in (0, 1].
    """
    falling, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = falling.cumsum(dim=-1) - falling  # 0 for the most likely token, which is always kept
    return probabilities.scatter(1, order, falling.masked_fill(mass_before >= top_p, 0))


class RowSampler(LogitsProcessor):
    """Draws the tokens of rows that grow together, and keeps what it drew.

    As a processor of the logits of a running `model.generate(do_sample=False)` it leaves one possible token in each
    row: the drawn one, or EOS once the row is over.

    Args:
        prompt_lengths: tokens of each prompt; with the seed they choose the row's random numbers, so that the turns of
            one episode do not repeat them.
        params: of each row, as SamplingParams.of gives them, with max_tokens and seed.
        stop_ids: EOS first, then the other tokens that end a response.
        decode: text of token ids; used for rows with stop texts.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        params: Sequence[SamplingParams],
        stop_ids: Sequence[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.decode = decode
        self.streams = [
            np.random.default_rng([one.seed, length]) for one, length in zip(params, prompt_lengths, strict=True)
        ]
        self.ids: list[list[int]] = [[] for _ in params]
        self.logprobs: list[list[float]] = [[] for _ in params]
        self.ended = [""] * len(params)

    @property
    def unfinished(self) -> list[int]:
        """Rows that go on."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    def draw(self, rows: Sequence[int], logits: Tensor) -> list[int]:
        """The next token of each of these rows.

        Args:
            logits: (R, V) float32 behind their newest tokens.
        """
        tokens, logprobs = draw_tokens(
            logits,
            torch.tensor([self.streams[row].random() for row in rows], dtype=torch.float64, device=logits.device),
            torch.tensor([self.params[row].temperature for row in rows], device=logits.device),
            torch.tensor([self.params[row].top_p for row in rows], device=logits.device),
        )
        drawn = tokens.tolist()
        for row, token, logprob in zip(rows, drawn, logprobs.tolist(), strict=True):
            self.ids[row].append(token)
            self.logprobs[row].append(logprob)
            self.ended[row] = self._reason(row)
        return drawn

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) in which every row has one token above minus infinity."""
        chosen = [self.stop_ids[0]] * len(self.ended)
        rows = self.unfinished
        for row, token in zip(rows, self.draw(rows, scores[rows]) if rows else [], strict=True):
            chosen[row] = token
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, torch.tensor(chosen, device=scores.device).unsqueeze(1), 0.0)

    def _reason(self, row: int) -> str:
        """Why the row is over with its newest token; empty when it goes on."""
        ids, params = self.ids[row], self.params[row]
        if ids[-1] in self.stop_ids:
            return "eos"
        if params.stop:  # a token holds at least one byte, so a stop text is within as many tokens as it has bytes
            longest = max(len(text.encode()) for text in params.stop)
            tail = self.decode(ids[-longest - 1 :])
            if any(text in tail for text in params.stop):
                return "stop"
        return "length" if len(ids) == params.max_tokens else ""

    def responses(self) -> list[SampledResponse]:
        """What every row drew."""
        return [
            SampledResponse(ids, logprobs, ended)
            for ids, logprobs, ended in zip(self.ids, self.logprobs, self.ended, strict=True)
        ]
