"""Prompts with answers, for supervised fine-tuning."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from openrlhf.datasets.adapters import as_text_or_messages
from openrlhf.datasets.jsonl import unpack_json
from openrlhf.datasets.sources import fingerprint_rows
from openrlhf.datasets.templates import render_prompt, split_chat
from openrlhf.datasets.tokenize import encode_prompts, encode_responses

logger = logging.getLogger(__name__)

OUTPUT_KEYS = ("solution", "answer", "output", "response", "generated_solution", "completion")


@dataclass(frozen=True)
class SFTOptions:
    """How rows become prompts and answers."""

    input_key: str = "question"
    output_key: str | None = None  # None: the first of OUTPUT_KEYS, or none where input_key holds message lists
    input_template: str | None = None  # None: the prompt text as it is
    apply_chat_template: bool = False
    max_len: int = 2048  # tokens of prompt + answer + EOS


@dataclass(frozen=True)
class SFTBatch:
    """B right-padded rows of prompt and answer."""

    input_ids: Tensor  # (B, S) int64
    attention_mask: Tensor  # (B, S) bool, True on real tokens
    response_mask: Tensor  # (B, S) bool, True on answer tokens including EOS

    def to(self, device: torch.device | str) -> SFTBatch:
        """A copy on another device."""
        return SFTBatch(self.input_ids.to(device), self.attention_mask.to(device), self.response_mask.to(device))


class SFTData:
    """Tokenised rows.

    Attributes:
        lengths: (N,) int64 tokens of prompt and answer. response_lengths: (N,) int64 answer tokens, EOS included.
        counts: rows read, kept and dropped by reason. fingerprint: of rows, tokenizer and options.
    """

    def __init__(
        self, prompts: list[list[int]], responses: list[list[int]], counts: dict[str, int], fingerprint: str
    ) -> None:
        self._prompts, self._responses = prompts, responses
        self.counts, self.fingerprint = counts, fingerprint
        self.response_lengths = np.array([len(ids) for ids in responses], dtype=np.int64)
        self.lengths = self.response_lengths + np.array([len(ids) for ids in prompts], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._prompts)

    def collate(self, indices: Sequence[int], pad_id: int) -> SFTBatch:
        """Right-padded batch of these rows."""
        width = int(self.lengths[list(indices)].max())
        input_ids = torch.full((len(indices), width), pad_id, dtype=torch.long)
        attention_mask = torch.zeros(len(indices), width, dtype=torch.bool)
        response_mask = torch.zeros(len(indices), width, dtype=torch.bool)
        for row, i in enumerate(indices):
            prompt, response = self._prompts[i], self._responses[i]
            end = len(prompt) + len(response)
            input_ids[row, :end] = torch.tensor(prompt + response)
            attention_mask[row, :end] = True
            response_mask[row, len(prompt) : end] = True
        return SFTBatch(input_ids, attention_mask, response_mask)

    def example_text(self, i: int, tokenizer: Any) -> str:
        """Row i decoded from its ids, special tokens shown."""
        prompt, answer = tokenizer.decode(self._prompts[i]), tokenizer.decode(self._responses[i])
        return f"[prompt]\n{prompt}\n[answer]\n{answer}"


def prepare_sft(rows: datasets.Dataset, tokenizer: Any, options: SFTOptions, whole_texts: bool = False) -> SFTData:
    """Render and tokenise all rows. An answer that does not fit is dropped and counted: half a solution is no example.

    Rows whose prompt or answer is null are dropped and counted as "missing_value".

    Args:
        whole_texts: as --pretrain_data is read, whose flags errors then name: where no column holds answers, each text
            is one as a whole, its first token stands for the prompt.
    Raises:
        ValueError: a column is missing, a value is neither text nor messages (named by its row), or no row is left.
    """
    names = rows.column_names
    where, flag = (" in --pretrain_data", "--pretrain_input_key") if whole_texts else ("", "--input_key")
    if options.input_key not in names:
        raise ValueError(f"expected a column {options.input_key!r}{where}, got {names}; pass {flag}")
    output_key = options.output_key or next((name for name in OUTPUT_KEYS if name in names), None)
    first = next((value for value in rows[:100][options.input_key] if value is not None), "")
    whole = whole_texts and options.output_key is None and output_key is None
    if not whole and isinstance(as_text_or_messages(first), str) and output_key not in names:
        raise ValueError(
            f"expected a column with answers ({options.output_key or OUTPUT_KEYS}){where}, got {names}; "
            "pass --output_key"
        )
    rendered = [_render_row(i, row, tokenizer, options, output_key, whole) for i, row in enumerate(rows)]
    texts = [text for text in rendered if text is not None]
    prompts = encode_prompts(tokenizer, [prompt for prompt, _ in texts])
    responses = encode_responses(tokenizer, [answer for _, answer in texts])
    if whole:  # nothing comes before the first token, so that it cannot be predicted
        prompts, responses = zip(
            *((p, r) if p else (r[:1], r[1:]) for p, r in zip(prompts, responses, strict=True)), strict=True
        )
    reasons = ["missing_value"] * (len(rendered) - len(texts))
    fits = [
        "empty_answer" if len(r) < 2 else "too_long" if len(p) + len(r) > options.max_len else "kept"
        for p, r in zip(prompts, responses, strict=True)
    ]
    reasons += fits
    keep = [i for i, reason in enumerate(fits) if reason == "kept"]
    counts = {"read": len(rows), **{reason: reasons.count(reason) for reason in sorted(set(reasons))}}
    if not keep:
        raise ValueError(f"no row is left of {len(rows)} ({counts}): check --max_len {options.max_len} and the columns")
    logger.info("prompts with answers: %s", counts)
    digest = hashlib.sha256((fingerprint_rows(rows) + json.dumps(asdict(options))).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return SFTData([prompts[i] for i in keep], [responses[i] for i in keep], counts, digest.hexdigest()[:32])


def _render_row(
    i: int, row: Mapping[str, Any], tokenizer: Any, options: SFTOptions, output_key: str | None, whole: bool
) -> tuple[str, str] | None:
    try:
        value = as_text_or_messages(row[options.input_key])
        return ("", value) if whole and isinstance(value, str) else _render(row, tokenizer, options, output_key)
    except ValueError as error:
        raise ValueError(f"row {i}: {error}") from error


def _render(
    row: Mapping[str, Any], tokenizer: Any, options: SFTOptions, output_key: str | None
) -> tuple[str, str] | None:
    """Prompt and answer of a row as text; None where one of them is null."""
    value = as_text_or_messages(row[options.input_key])
    answer = unpack_json(row[output_key]) if output_key in row else None
    if value is None:
        return None
    if not isinstance(answer, str | None):
        raise ValueError(f"column {output_key!r}: expected text, got {type(answer).__name__}")
    if not isinstance(value, str):
        return _render_messages(value, answer, tokenizer, options, output_key)
    if answer is None:
        if output_key not in row:
            raise ValueError(f"column {options.input_key!r} holds text here, and no column holds its answer")
        return None
    if options.apply_chat_template:
        return split_chat([{"role": "user", "content": value}, {"role": "assistant", "content": answer}], tokenizer)
    return render_prompt(options.input_template, value) if options.input_template else value, answer


def _render_messages(
    value: Any, answer: str | None, tokenizer: Any, options: SFTOptions, output_key: str | None
) -> tuple[str, str] | None:
    """A conversation, with the answer behind it where it does not end in one."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"column {options.input_key!r}: expected text or a list of messages, got {value!r:.80}")
    if output_key is None or (value and value[-1].get("role") == "assistant"):
        return split_chat(value, tokenizer)
    return None if answer is None else split_chat([*value, {"role": "assistant", "content": answer}], tokenizer)
