"""Rewards and goal similarities of responses that grow: only what is new since the last call is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from decoding.token_texts import decode
from openrlhf.datasets.tokenize import encode_prompts, encode_responses
from openrlhf.evaluation.goal_state import goal_similarities
from openrlhf.models.key_values import KeyValues, check_context
from openrlhf.models.reward_model import RewardModel


@dataclass(frozen=True)
class RowText:
    """One response as far as it has grown."""

    ids: Sequence[int]  # of the policy, with or without its end token
    text: str  # without special tokens, cut at a stop string
    over: bool  # nothing follows: it is scored with EOS at its end


@dataclass(frozen=True)
class TokenScores:
    """Scores of the n tokens of the reward model from `start` on; those told of before start still hold."""

    start: int  # place in the response of the first of them
    values: np.ndarray  # (n,) float32 the head at each token, reward units
    similarities: np.ndarray  # (n, G) float32 goal similarity to each goal


@dataclass
class _Row:
    """A response as it has been read."""

    prompt: int  # tokens of its prompt
    ids: list[int] = field(default_factory=list)
    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    similarities: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class PrefixScorer:
    """R growing responses read by a reward model, each behind its prompt.

    Args:
        model: set to eval mode.
        tokenizer: of the reward model.
        goals: G goal states, (1, H) float32 each; may be none.
        prompts: rendered texts or token ids, one a row; equal ones are computed once.
        same_tokens: the policy's token ids are the reward model's (:func:`same_tokenizer`).
    Attributes:
        prompt_tokens: computed, equal prompts once.
    Raises:
        ValueError: a goal of another hidden size, or a prompt that leaves no room in the context.
        CacheUnsupported: the architecture keeps no keys and values.
    """

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Any,
        goals: Sequence[np.ndarray],
        prompts: Sequence[str] | Sequence[Sequence[int]],
        same_tokens: bool,
    ) -> None:
        sizes = [goal.shape for goal in goals if goal.shape != (1, model.hidden_size)]
        if sizes:
            raise ValueError(
                f"expected goal states of shape (1, {model.hidden_size}) for this reward model, got {sizes[0]}; "
                "run get_representation with this reward model"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.same_tokens = same_tokens
        vectors = np.concatenate([np.zeros((0, model.hidden_size), np.float32), *goals])
        self._goals = torch.from_numpy(vectors).to(model.device)
        self._special = set(tokenizer.all_special_ids)
        self._cache = KeyValues(model.network.base_model)
        self._rows: list[_Row] = []
        self.prompt_tokens = 0
        self.add(prompts)

    def __len__(self) -> int:
        """R, the number of rows."""
        return len(self._rows)

    @property
    def reward_tokens(self) -> int:
        """Response tokens run through the reward model so far, those computed again included."""
        return self._cache.tokens - self.prompt_tokens

    def add(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> None:
        """New rows at the end, of which no response has been read.

        Raises:
            ValueError: a prompt that leaves no room in the context; nothing is computed then.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(encode_prompts(self.tokenizer, texts) if texts else [])
        ids = [next(encoded) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        check_context(map(len, ids), self.model.config, "the reward model", first=len(self._rows))
        self._cache.add(ids)
        self.prompt_tokens += sum(map(len, set(map(tuple, ids))))
        none = np.zeros((0, len(self._goals)), np.float32)
        self._rows += [_Row(len(prompt), similarities=none) for prompt in ids]

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was: rows may repeat, be left out or change order."""
        self._cache.select(rows)
        self._rows = [_Row(**vars(self._rows[row])) for row in rows]  # a row that grows replaces its lists

    def scores(self, row: int) -> TokenScores:
        """Scores of all tokens of a response as it was last read."""
        return TokenScores(0, self._rows[row].values, self._rows[row].similarities)

    @torch.inference_mode()
    def extend(self, responses: Sequence[RowText], rows: Sequence[int] | None = None) -> list[TokenScores]:
        """Read rows as far as they have grown; the result is that of one pass over each whole text.

        Args:
            responses: of each named row, with everything it has so far.
            rows: named rows, each once; None names all.
        Returns:
            Scores of the tokens that are new, one record a named row. With other tokens than the policy's, new text may
            change the last tokens of the old one; `start` then lies before them.
        Raises:
            ValueError: another number of responses than rows, or one that has outgrown the reward model's context.
        """
        rows = range(len(self)) if rows is None else rows
        if len(responses) != len(rows) or len(set(rows)) != len(rows):
            raise ValueError(f"expected a response for each of {len(rows)} different rows, got {len(responses)}")
        named = [self._rows[row] for row in rows]
        ids = self._tokens_of(responses)
        totals = [row.prompt + len(tokens) for row, tokens in zip(named, ids, strict=True)]
        check_context(totals, self.model.config, "the reward model", what="prompt with response", room=0)
        starts = [common_prefix(row.ids, tokens) for row, tokens in zip(named, ids, strict=True)]
        kept, new = list(self._cache.lengths), [[]] * len(self)
        for place, row, tokens, start in zip(rows, named, ids, starts, strict=True):
            kept[place], new[place] = row.prompt + start, tokens[start:]
        self._cache.crop(kept)
        values, similarities, ends = self._run(new)
        found = []
        for place, row, tokens, start in zip(rows, named, ids, starts, strict=True):
            part = slice(ends[place] - len(new[place]), ends[place])
            scores = TokenScores(start, values[part], similarities[part])
            row.ids = tokens
            row.values = np.concatenate([row.values[:start], scores.values])
            row.similarities = np.concatenate([row.similarities[:start], scores.similarities])
            found.append(scores)
        return found

    def _run(self, new: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Values (T,) and similarities (T, G) of the new tokens of all rows, and where each row's end among them."""
        counts = [len(tokens) for tokens in new]
        ends = list(accumulate(counts))
        if not any(counts):
            return np.zeros(0, np.float32), np.zeros((0, len(self._goals)), np.float32), ends
        states = self._cache.append(new)
        states = torch.cat([row[:count] for row, count in zip(states, filter(None, counts), strict=True)])
        values = self.model.network.score(states)[:, 0].float()
        return values.cpu().numpy(), goal_similarities(states, self._goals).cpu().numpy(), ends

    def _tokens_of(self, responses: Sequence[RowText]) -> list[list[int]]:
        """Token ids of the reward model; those of a response that is over end in exactly one EOS."""
        drawn = [self._drawn_tokens(one) if self.same_tokens else None for one in responses]
        texts = [one.text for one, tokens in zip(responses, drawn, strict=True) if tokens is None]
        encoded = iter(encode_responses(self.tokenizer, texts))
        return [
            (next(encoded) if one.over else next(encoded)[:-1]) if tokens is None else tokens
            for one, tokens in zip(responses, drawn, strict=True)
        ]

    def _drawn_tokens(self, response: RowText) -> list[int] | None:
        """The policy's own tokens; None where they do not spell the text, because a stop string cut it."""
        tokens = list(response.ids)
        if not response.over:
            return tokens
        while tokens and tokens[-1] in self._special:  # the policy may end by another token
            tokens.pop()
        return [*tokens, self.tokenizer.eos_token_id] if decode(self.tokenizer, tokens) == response.text else None


def same_tokenizer(policy: Any, reward: Any) -> bool:
    """Whether the reward model's tokenizer gives texts the policy's tokens, as far as vocabularies and merges tell.

    It may have more tokens, such as one for padding.
    """
    return policy is reward or (
        policy.get_vocab().items() <= reward.get_vocab().items()
        and policy.backend_tokenizer.model.__getstate__() == reward.backend_tokenizer.model.__getstate__()
    )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
