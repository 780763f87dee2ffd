"""Prompts with labels, for reinforcement learning."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from openrlhf.datasets.adapters import as_text_or_messages
from openrlhf.datasets.templates import render_chat_prompt, render_question
from openrlhf.datasets.tokenize import encode_prompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts."""

    input_key: str = "question"
    label_key: str | None = None  # None: no labels
    input_template: str | None = None  # None: the text as it is
    apply_chat_template: bool = False
    max_len: int = 1024  # tokens of a prompt; longer ones are left out and counted


@dataclass(frozen=True)
class PromptData:
    """N prompts as the policy reads them, with what a reward may want to know of them."""

    texts: list[str]  # N, rendered
    ids: list[list[int]]  # N lists of at least one token
    inputs: list[Any]  # N, as the data holds them: text or messages
    labels: list[Any] | None  # N; None: the data has none
    columns: Mapping[str, list[Any]]  # every column but the prompts', N each
    counts: Mapping[str, int]  # rows read, kept and left out, by reason
    fingerprint: str  # of texts, labels, columns and tokens

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        tokenizer: Any,
        labels: Sequence[Any] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        inputs: Sequence[Any] | None = None,
        max_len: int | None = None,
    ) -> PromptData:
        """The record of N rendered prompts; those of more than `max_len` tokens, or of none, are left out.

        Raises:
            ValueError: labels or a column of another length, or no prompt is left.
        """
        others = {name: list(values) for name, values in (columns or {}).items()}
        for name, values in {"labels": labels, "inputs": inputs, **others}.items():
            if values is not None and len(values) != len(texts):
                raise ValueError(f"expected {len(texts)} {name}, one a prompt, got {len(values)}")
        ids = encode_prompts(tokenizer, list(texts))
        reasons = [
            "empty" if not one else "too_long" if max_len is not None and len(one) > max_len else "kept" for one in ids
        ]
        counts = {"read": len(ids), **{reason: reasons.count(reason) for reason in sorted(set(reasons))}}
        keep = [place for place, reason in enumerate(reasons) if reason == "kept"]
        if not keep:
            raise ValueError(
                f"no prompt is left of {len(ids)} ({counts}); raise --prompt_max_len {max_len}, or look at the data"
            )

        def pick(values: Sequence[Any]) -> list[Any]:
            return [values[place] for place in keep]

        kept_labels = None if labels is None else pick(labels)
        kept_columns = {name: pick(values) for name, values in others.items()}
        digest = hashlib.sha256(json.dumps([pick(ids), kept_labels, kept_columns], default=str).encode()).hexdigest()
        return cls(
            texts=pick(texts),
            ids=pick(ids),
            inputs=pick(texts if inputs is None else inputs),
            labels=kept_labels,
            columns=kept_columns,
            counts=counts,
            fingerprint=digest[:32],
        )


def prepare_prompts(rows: Any, tokenizer: Any, options: PromptOptions) -> PromptData:
    """Render and tokenise rows of a `datasets.Dataset`; rows whose prompt is null are left out.

    A message list is rendered by the tokenizer's chat template; text by `input_template`, or as the only message of a
    chat with `apply_chat_template`.

    Raises:
        ValueError: a column is missing, a value is neither text nor messages (named by its row), or no row is left.
    """
    names = rows.column_names
    for flag, key in (("input_key", options.input_key), ("label_key", options.label_key)):
        if key is not None and key not in names:
            raise ValueError(f"expected a column {key!r}, got {names}; pass --{flag}")
    values = [as_text_or_messages(value) for value in rows[options.input_key]]
    present = [place for place, value in enumerate(values) if value is not None]
    missing = len(values) - len(present)
    if missing:
        logger.warning("%d of %d rows have no prompt in %r and are left out", missing, len(values), options.input_key)
    if not present:
        raise ValueError(f"the column {options.input_key!r} is empty in all {len(values)} rows; pass --input_key")
    others = [name for name in names if name not in (options.input_key, options.label_key)]
    data = PromptData.of(
        [_render(place, values[place], tokenizer, options) for place in present],
        tokenizer,
        labels=None if options.label_key is None else _at(rows[options.label_key], present),
        columns={name: _at(rows[name], present) for name in others},
        inputs=_at(values, present),
        max_len=options.max_len,
    )
    if options.label_key is not None:  # behind the fingerprint, which has the labels already
        data = replace(data, columns={**data.columns, options.label_key: data.labels})
    logger.info("prompts: %s (%s)", data.counts, {k: v for k, v in asdict(options).items() if v is not None})
    return data


def _at(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    values = list(values)
    return [values[place] for place in places]


def _render(place: int, value: Any, tokenizer: Any, options: PromptOptions) -> str:
    try:
        if isinstance(value, str):
            if options.input_template is None and not options.apply_chat_template:
                return value
            template = options.input_template or "{}"
            return render_question(value, tokenizer, template=template, apply_chat_template=options.apply_chat_template)
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise ValueError(f"expected text or a list of messages in {options.input_key!r}, got {value!r:.80}")
        return render_chat_prompt(value, tokenizer)
    except ValueError as error:
        raise ValueError(f"row {place}: {error}") from error
