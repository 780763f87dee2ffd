"""Tokenised preference pairs: prepared once, memory-mapped, handed out as padded batches."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from openrlhf.datasets.adapters import (
    DROP_REASONS,
    FORMATS,
    PreferenceExample,
    PreferenceOptions,
    detect_format,
    resolve_options,
    row_to_example,
)
from openrlhf.datasets.hh import parse_hh
from openrlhf.datasets.prepared import TOKEN_IDS, fingerprint_prepared, hash_lists, map_to_cache, worker_count
from openrlhf.datasets.tokenize import (
    REASONS,
    TokenizedPair,
    build_pair,
    encode_prompt,
    encode_prompts,
    encode_response,
    encode_responses,
)

__all__ = [
    "FORMATS",
    "PreferenceBatch",
    "PreferenceData",
    "PreferenceExample",
    "PreferenceOptions",
    "TokenizedPair",
    "build_pair",
    "detect_format",
    "encode_prompt",
    "encode_response",
    "parse_hh",
    "prepare_preferences",
    "row_to_example",
]

logger = logging.getLogger(__name__)

_ALL_REASONS = REASONS + tuple(reason for reason in DROP_REASONS if reason not in REASONS)
_KEPT = [REASONS.index("kept"), REASONS.index("truncated")]
_FEATURES = datasets.Features(
    {
        "prompt_ids": TOKEN_IDS,
        "chosen_ids": TOKEN_IDS,
        "rejected_ids": TOKEN_IDS,
        "margin": datasets.Value("float32"),
        "reason": datasets.Value("int8"),
    }
)
_BATCH_ROWS = 500


@dataclass(frozen=True)
class PreferenceBatch:
    """P pairs among R right-padded rows; a row may be part of several pairs."""

    input_ids: Tensor  # (R, S) int64
    attention_mask: Tensor  # (R, S) bool, True on real tokens
    response_mask: Tensor  # (R, S) bool, True on response tokens including EOS
    chosen: Tensor  # (P,) int64, row of each pair's chosen response
    rejected: Tensor  # (P,) int64, row of its rejected response
    weight: Tensor  # (P,) float32, what each pair counts in a mean: those of one example add up to 1
    margin: Tensor | None  # (P,) float32, reward units; None when the data set has no margins
    index: Tensor  # (B,) int64, position of each example in the data set
    group: Tensor | None = None  # (B,) int64, equal for examples of one prompt

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(R, ...) -> the rows of the chosen (P, ...) and of the rejected (P, ...) responses."""
        return x[self.chosen], x[self.rejected]

    def to(self, device: torch.device | str) -> PreferenceBatch:
        """A copy on another device."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return PreferenceBatch(**{name: None if x is None else x.to(device) for name, x in fields.items()})


class PreferenceData:
    """Kept pairs of a prepared data set; ids stay on disk, memory-mapped.

    Attributes:
        counts: "read", "kept" (truncated ones included), "truncated", and one entry for each reason that dropped rows.
        fingerprint: of rows, tokenizer and options: equal for equal pairs.
        options: as they were used: with format, keys and template filled in.
        parts: (N, 3) int64 tokens of prompt, chosen and rejected response of each pair.
        lengths: (N,) int64 tokens of the longer sequence (prompt + response) of each pair.
        row_tokens: (N,) int64 tokens of each pair's prompt, once, and responses.
        plain_tokens: (N,) int64 tokens of its two sequences.
        row_counts: (N,) int64 sequences of each example: 2.
        pair_counts: (N,) int64 pairs of each example: 1.
        has_margin: whether any row has a margin; rows without one then count as 0.
    """

    def __init__(self, prepared: datasets.Dataset, fingerprint: str, options: PreferenceOptions) -> None:
        table = prepared.data
        reasons = np.asarray(table.column("reason"))
        self._prepared = prepared.select_columns(["prompt_ids", "chosen_ids", "rejected_ids", "margin"])
        self._positions = np.flatnonzero(np.isin(reasons, _KEPT))
        tally = Counter(
            {_ALL_REASONS[code]: int(n) for code, n in zip(*np.unique(reasons, return_counts=True), strict=True)}
        )
        self.counts: dict[str, int] = {
            "read": len(reasons),
            "kept": len(self._positions),
            "truncated": tally["truncated"],
        }
        self.counts |= {reason: tally[reason] for reason in _ALL_REASONS if tally[reason] and reason not in self.counts}
        self.fingerprint = fingerprint
        self.options = options
        self.has_margin = table.column("margin").null_count < len(reasons)
        columns = [pc.list_value_length(table.column(name)) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        self.parts: np.ndarray = np.stack(columns, axis=1)[self._positions].astype(np.int64)
        self.lengths: np.ndarray = self.parts[:, 0] + self.parts[:, 1:].max(axis=1)
        self.row_tokens: np.ndarray = self.parts.sum(axis=1)
        self.plain_tokens: np.ndarray = self.row_tokens + self.parts[:, 0]
        self.row_counts: np.ndarray = np.full(len(self._positions), 2, dtype=np.int64)
        self.pair_counts: np.ndarray = np.ones(len(self._positions), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, i: int) -> TokenizedPair:
        if not -len(self) <= i < len(self):
            raise IndexError(f"pair {i} of {len(self)}")
        return TokenizedPair(**self._prepared[int(self._positions[i])])

    def collate(self, indices: Sequence[int], pad_id: int) -> PreferenceBatch:
        """Right-padded batch of the pairs at these positions: the chosen in this order, then the rejected.

        Args:
            indices: B positions, 0 <= i < len(self).
            pad_id: written where attention_mask is False.
        """
        rows = self._prepared[[int(self._positions[i]) for i in indices]]
        prompts = rows["prompt_ids"] * 2
        responses = rows["chosen_ids"] + rows["rejected_ids"]
        count = len(rows["prompt_ids"])
        return PreferenceBatch(
            *pad_rows(prompts, responses, pad_id),
            chosen=torch.arange(count),
            rejected=torch.arange(count, 2 * count),
            weight=torch.ones(count),
            margin=torch.tensor([m or 0.0 for m in rows["margin"]]) if self.has_margin else None,
            index=torch.tensor([int(i) for i in indices], dtype=torch.long),
            group=torch.tensor([group_of(prompt) for prompt in rows["prompt_ids"]], dtype=torch.long),
        )

    def prompt_hashes(self) -> set[int]:
        """Hashes of the token ids of all kept prompts, each once."""
        return hash_lists(self._prepared.data.column("prompt_ids"), self._positions)

    def example_text(self, i: int, tokenizer: Any) -> str:
        """Pair i decoded from its ids, special tokens shown, for a look before training."""
        pair = self[i]
        parts = {"prompt": pair.prompt_ids, "chosen": pair.chosen_ids, "rejected": pair.rejected_ids}
        lines = [f"[{name}: {len(ids)} tokens]\n{tokenizer.decode(ids)}" for name, ids in parts.items()]
        return "\n".join(lines if pair.margin is None else [*lines, f"[margin] {pair.margin:g}"])


def pad_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt and response of each row, padded on the right.

    Args:
        prompts, responses: R token sequences each. pad_id: written where attention_mask is False.
    Returns:
        input_ids (R, S) int64, attention_mask and response_mask (R, S) bool, as in :class:`PreferenceBatch`.
    """
    shape = len(prompts), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    input_ids = torch.full(shape, pad_id, dtype=torch.long)
    attention_mask, response_mask = torch.zeros(2, *shape, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        input_ids[i, :end] = torch.tensor([*prompt, *response], dtype=torch.long)
        attention_mask[i, :end] = True
        response_mask[i, len(prompt) : end] = True
    return input_ids, attention_mask, response_mask


def prepare_preferences(
    rows: datasets.Dataset,
    tokenizer: Any,
    options: PreferenceOptions,
    *,
    num_proc: int | None = None,
    cache: bool = True,
) -> PreferenceData:
    """Render, tokenise and fit all rows.

    The result is written to the `datasets` cache under a fingerprint of rows, tokenizer and options, and memory-mapped
    from there; a second call with the same three reads it back.

    Args:
        rows: in one of the formats of FORMATS, or with keys named in the options.
        num_proc: worker processes; None: one for small data sets, two for large ones.
        cache: False prepares anew even where a cached result exists.
    Raises:
        ValueError: no rows, missing columns (before anything is tokenised), a bad value (named by its row), or no pair
            left (with the counts).
    """
    if not len(rows):
        raise ValueError("the preference data set has no rows")
    resolved = resolve_options(rows.column_names, _first_values(rows), options)
    logger.info("preference format %s, template %r", resolved.format, resolved.input_template)
    fingerprint = fingerprint_prepared(rows, tokenizer, resolved.apply_chat_template, options=asdict(resolved))
    prepared = map_to_cache(
        rows,
        functools.partial(_prepare_batch, tokenizer=tokenizer, options=resolved),
        features=_FEATURES,
        kind="pairs",
        fingerprint=fingerprint,
        batch_rows=_BATCH_ROWS,
        workers=worker_count(num_proc, len(rows)),
        cache=cache,
    )
    data = PreferenceData(prepared, fingerprint, resolved)
    report = ", ".join(f"{name} {count}" for name, count in data.counts.items())
    if not len(data):
        raise ValueError(
            f"no pair is left of {len(rows)} rows ({report}): check the format ({resolved.format}) and max_len "
            f"({resolved.max_len})"
        )
    logger.info("preference pairs: %s", report)
    return data


def _prepare_batch(
    rows: Mapping[str, list[Any]], indices: list[int], *, tokenizer: Any, options: PreferenceOptions
) -> dict[str, list[Any]]:
    """One prepared row for every row read: dropped ones have empty ids and their reason."""
    names = list(rows)
    out: dict[str, list[Any]] = {name: [None] * len(indices) for name in _FEATURES}
    examples: dict[int, PreferenceExample] = {}
    for i, index in enumerate(indices):
        try:
            result = row_to_example({name: rows[name][i] for name in names}, options.format, options, tokenizer)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        if isinstance(result, str):
            _put(out, i, None, result)
        else:
            examples[i] = result
    prompts = list(dict.fromkeys(example.prompt for example in examples.values()))
    prompt_ids = dict(zip(prompts, encode_prompts(tokenizer, prompts), strict=True))
    chosen = encode_responses(tokenizer, [example.chosen for example in examples.values()])
    rejected = encode_responses(tokenizer, [example.rejected for example in examples.values()])
    for (i, example), chosen_ids, rejected_ids in zip(examples.items(), chosen, rejected, strict=True):
        ids = prompt_ids[example.prompt], chosen_ids, rejected_ids
        try:
            pair, reason = build_pair(
                *ids, tokenizer.eos_token_id, options.max_len, on_long=options.on_long, margin=example.margin
            )
        except ValueError as error:
            raise ValueError(f"row {indices[i]}: {error}") from error
        _put(out, i, pair, reason)
    return out


def _put(out: dict[str, list[Any]], i: int, pair: TokenizedPair | None, reason: str) -> None:
    pair = pair or TokenizedPair([], [], [])
    for name, value in vars(pair).items():
        out[name][i] = value
    out["reason"][i] = _ALL_REASONS.index(reason)


def _first_values(rows: datasets.Dataset) -> dict[str, Any]:
    """The first value that is not null of each column, looked for in the first 100 rows."""
    head = rows.with_format(None)[: min(100, len(rows))]
    return {name: next((value for value in values if value is not None), None) for name, values in head.items()}


def group_of(prompt_ids: Sequence[int]) -> int:
    """Number that is equal for equal prompts: 64 bits of a hash of their tokens."""
    digest = hashlib.blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
