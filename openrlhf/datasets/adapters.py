"""From rows of the common preference formats to PreferenceExample."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.datasets.completions import are_labelled
from openrlhf.datasets.hh import HH_TURN, hh_messages, parse_hh
from openrlhf.datasets.jsonl import unpack_json
from openrlhf.datasets.templates import message_text, render_prompt, render_question, split_chat
from openrlhf.datasets.tokenize import ON_LONG

# Columns of each format: (prompt or None, chosen, rejected). docs/data_formats.md shows a row of each.
FORMATS: dict[str, tuple[str | None, str, str]] = {
    "prompt_chosen_rejected": ("prompt", "chosen", "rejected"),
    "messages": (None, "chosen", "rejected"),
    "hh": (None, "chosen", "rejected"),
    "question_correct_incorrect": ("question", "correct", "incorrect"),
}
DROP_REASONS: tuple[str, ...] = (
    "missing_value",
    "empty_response",
    "prompts_differ",
    "not_a_dialogue",
    "misordered_turns",
    "empty_turn",
    "last_turn_not_assistant",
)


@dataclass(frozen=True)
class PreferenceExample:
    """One pair as rendered text."""

    prompt: str
    chosen: str
    rejected: str
    margin: float | None  # reward units
    group: str  # hash of the prompt text: equal for pairs of one prompt


@dataclass(frozen=True)
class PreferenceOptions:
    """How rows become pairs. Keys left None are the format's own."""

    format: str | None = None  # a name of FORMATS; None: detected from the columns
    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    margin_key: str = "margin"
    input_template: str | None = None  # None: "nemo" for question_correct_incorrect, else the text as is
    apply_chat_template: bool = False
    max_len: int = 2048  # tokens of prompt + response + EOS
    on_long: str = "truncate"  # "truncate", "drop" or "error"

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"dataset_format: expected one of {sorted(FORMATS)}, got {self.format!r}")
        if self.on_long not in ON_LONG:
            raise ValueError(f"on_long: expected one of {ON_LONG}, got {self.on_long!r}")
        if self.max_len < 2:
            raise ValueError(f"max_len: expected at least 2 (one response token and EOS), got {self.max_len}")
        if self.apply_chat_template and self.input_template not in (None, "{}", "{question}"):
            raise ValueError(
                f"apply_chat_template and input_template {self.input_template!r} exclude each other: "
                "leave one of --apply_chat_template and --input_template out"
            )
        if self.input_template is not None:
            render_prompt(self.input_template, "")


def detect_format(column_names: Sequence[str], first_row: Mapping[str, Any] | None = None) -> str:
    """Name of the format that rows with these columns have.

    Args:
        column_names: of the data set.
        first_row: tells message lists from HH dialogues, which have the same columns.
    Raises:
        ValueError: no format, or more than one, fits.
    """
    names = set(column_names)
    fitting = [name for name in ("prompt_chosen_rejected", "question_correct_incorrect") if set(FORMATS[name]) <= names]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and {"chosen", "rejected"} <= names:
        return _format_without_prompt(first_row or {}, "chosen", column_names)
    found = f"fits {' and '.join(fitting)}" if fitting else "fits no known format"
    raise ValueError(
        f"a data set with the columns {list(column_names)} {found}. Known formats: {_describe_formats()}. "
        "Pass --dataset_format, or name the columns with --prompt_key, --chosen_key and --rejected_key"
        f"{_labelled_hint(column_names)}"
    )


def resolve_options(
    column_names: Sequence[str], first_row: Mapping[str, Any], options: PreferenceOptions
) -> PreferenceOptions:
    """The options with format, keys and template filled in, checked against the columns.

    Raises:
        ValueError: a column that is asked for does not exist or holds neither text nor messages, the format cannot be
            told, or messages come without a chat template.
    """
    asked = [options.prompt_key, options.chosen_key, options.rejected_key]
    if options.margin_key != "margin":
        asked.append(options.margin_key)
    _require_columns([key for key in asked if key], column_names)
    name = options.format
    if name is None and any((options.prompt_key, options.chosen_key, options.rejected_key)):
        name = _format_of_keys(column_names, first_row, options)
    elif name is None:
        name = detect_format(column_names, first_row)
    prompt, chosen, rejected = FORMATS[name]
    resolved = dataclasses.replace(
        options,
        format=name,
        prompt_key=options.prompt_key or prompt,
        chosen_key=options.chosen_key or chosen,
        rejected_key=options.rejected_key or rejected,
        input_template=options.input_template or default_template(name, options.apply_chat_template),
    )
    keys = [key for key in (resolved.prompt_key, resolved.chosen_key, resolved.rejected_key) if key]
    _require_columns(keys, column_names, name)
    for key in keys:
        _check_value(key, as_text_or_messages(first_row.get(key)), name, resolved.apply_chat_template)
    return resolved


def row_to_example(
    row: Mapping[str, Any], format: str, options: PreferenceOptions, tokenizer: Any = None
) -> PreferenceExample | str:
    """One row as rendered text, or the reason (one of DROP_REASONS) why it is left out.

    Args:
        row: holds the columns of the format (or the options' keys).
        format: a name of FORMATS.
        tokenizer: for its chat template; needed for message lists and with apply_chat_template.
    Raises:
        ValueError: a value that is neither text nor messages, or a margin that is no finite number.
    """
    prompt_key, chosen_key, rejected_key = FORMATS[format]
    prompt_key = options.prompt_key or prompt_key
    values = []
    for key in (prompt_key, options.chosen_key or chosen_key, options.rejected_key or rejected_key):
        values.append(as_text_or_messages(row[key]) if key else None)
        _check_value(key, values[-1], format, options.apply_chat_template)
    prompt, chosen, rejected = values
    if chosen is None or rejected is None or (prompt_key and prompt is None):
        return "missing_value"
    if format == "hh":
        parts = _hh_parts(chosen, rejected, options, tokenizer)
    elif format == "messages" or any(map(_is_messages, values)):
        parts = _message_parts(prompt, chosen, rejected, tokenizer)
    else:
        template = options.input_template or default_template(format, options.apply_chat_template)
        question = render_question(
            prompt, tokenizer, template=template, apply_chat_template=options.apply_chat_template
        )
        parts = (question, chosen, rejected)
    if isinstance(parts, str):
        return parts
    text, chosen_text, rejected_text = parts
    if not chosen_text.strip() or not rejected_text.strip():
        return "empty_response"
    group = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return PreferenceExample(text, chosen_text, rejected_text, _margin(row.get(options.margin_key)), group)


def as_text_or_messages(value: Any) -> Any:
    """A column's value with the message lists and messages that `columns` had to make text of as they were."""
    value = unpack_json(value)
    return [unpack_json(item) for item in value] if _is_messages(value) else value


def default_template(format: str, apply_chat_template: bool) -> str:
    """Template of the prompts of a format where none is named."""
    return "nemo" if format == "question_correct_incorrect" and not apply_chat_template else "{}"


def _hh_parts(chosen: str, rejected: str, options: PreferenceOptions, tokenizer: Any) -> tuple[str, str, str] | str:
    parts = parse_hh(chosen, rejected)
    if isinstance(parts, str):
        return parts
    prompt, chosen_text, rejected_text = parts
    if not options.apply_chat_template:
        return render_prompt(options.input_template or "{}", prompt), chosen_text, rejected_text
    messages = hh_messages(prompt)
    text, chosen_text = split_chat([*messages, {"role": "assistant", "content": chosen_text.strip()}], tokenizer)
    return text, chosen_text, rejected_text.strip()


def _message_parts(prompt: Any, chosen: Any, rejected: Any, tokenizer: Any) -> tuple[str, str, str] | str:
    conversations = [_conversation(prompt, answer) for answer in (chosen, rejected)]
    for messages in conversations:
        if not messages or messages[-1]["role"] != "assistant":
            return "last_turn_not_assistant"
        if len(messages) < 2 or any(not message["content"].strip() for message in messages[:-1]):
            return "empty_turn"
    if conversations[0][:-1] != conversations[1][:-1]:
        return "prompts_differ"
    text, chosen_text = split_chat(conversations[0], tokenizer)
    return text, chosen_text, conversations[1][-1]["content"]


def _conversation(prompt: Any, answer: Any) -> list[dict[str, str]]:
    """Prompt (text, messages or None) and answer (text or messages, with or without the prompt's) as one list."""
    before = _as_messages(prompt, "user") if prompt is not None else []
    messages = _as_messages(answer, "assistant")
    if messages[: len(before)] == before or (
        isinstance(prompt, str) and messages and messages[0]["role"] != "assistant"
    ):
        return messages
    return before + messages


def _as_messages(value: Any, role: str) -> list[dict[str, str]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [{"role": message["role"], "content": message_text(message)} for message in value]


def _is_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _margin(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"margin: expected a finite number, got {value!r}")
    return margin


def _format_of_keys(column_names: Sequence[str], first_row: Mapping[str, Any], options: PreferenceOptions) -> str:
    """Format of a data set some of whose columns are named by hand."""
    if {"question", "correct", "incorrect"} == {
        options.prompt_key or "question",
        options.chosen_key or "correct",
        options.rejected_key or "incorrect",
    } and {"question", "correct", "incorrect"} <= set(column_names):
        return "question_correct_incorrect"
    if options.prompt_key or "prompt" in column_names:
        return "prompt_chosen_rejected"
    return _format_without_prompt(first_row, options.chosen_key or "chosen", column_names)


def _format_without_prompt(first_row: Mapping[str, Any], chosen_key: str, column_names: Sequence[str]) -> str:
    value = unpack_json(first_row.get(chosen_key))
    if _is_messages(value):
        return "messages"
    if isinstance(value, str) and HH_TURN.search(value):
        return "hh"
    raise ValueError(
        f"columns {list(column_names)}: no prompt column, and {chosen_key!r} holds neither a message list nor a "
        "dialogue with '\\n\\nHuman:' and '\\n\\nAssistant:' turns. Name the prompt column with --prompt_key, or the "
        "format with --dataset_format"
    )


def _require_columns(keys: Sequence[str], column_names: Sequence[str], format: str | None = None) -> None:
    missing = [key for key in keys if key not in column_names]
    if missing:
        wanted = f"the format {format} needs the columns" if format else "expected the columns"
        raise ValueError(
            f"{wanted} {list(keys)}, got {list(column_names)}: {missing} missing. "
            "Name the columns with --prompt_key, --chosen_key and --rejected_key, or the format with --dataset_format"
            f"{_labelled_hint(column_names)}"
        )


def _labelled_hint(column_names: Sequence[str]) -> str:
    """What to do with labelled responses where pairs are expected."""
    if not are_labelled(column_names):
        return ""
    told = "make pairs of them with data_setup, or train on them with train_rm --responses_per_prompt"
    return f". These are labelled responses: {told}"


def _check_value(key: str | None, value: Any, format: str, apply_chat_template: bool) -> None:
    if value is None or isinstance(value, str):
        return
    if not _is_messages(value) or not all(isinstance(item, Mapping) and "role" in item for item in value):
        raise ValueError(f"column {key!r}: expected text or a list of messages with a role, got {type(value).__name__}")
    if format == "hh":
        raise ValueError(
            f"column {key!r} holds message lists, and the format hh is text: pass --dataset_format messages"
        )
    if not apply_chat_template:
        raise ValueError(f"column {key!r}: {_NEEDS_CHAT_TEMPLATE}")


def _describe_formats() -> str:
    return "; ".join(f"{name} ({', '.join(key for key in keys if key)})" for name, keys in FORMATS.items())


_NEEDS_CHAT_TEMPLATE = "message lists are rendered by a chat template: pass --apply_chat_template"
