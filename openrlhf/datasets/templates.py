"""The one place where prompt templates are written and rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.datasets.jsonl import unpack_json

Message = Mapping[str, Any]

# "nemo" is the prompt of OpenMathInstruct-1 fine-tuning in Nemo-Skills (Toshniwal et al. 2024, arXiv 2402.10176).
TEMPLATES: dict[str, str] = {
    "nemo": (
        "System:\n"
        "You're an expert Python programmer and mathematician. "
        "Help the user to solve this problem using code when necessary. "
        "Make sure to put the answer (and only answer) inside \\boxed{}.\n\n"
        "User:\n{question}\n\n"
        "Assistant:\n"
    ),
    "plain": "{question}\n",
    "pocket": "{question}\n",
    "steps": "{question}\nWork it out step by step, one step a line, and put the final answer in \\boxed{}.\n",
    "instruction": "Instruction:\n{question}\n\nResponse:\n",
}


def render_prompt(template: str, question: str) -> str:
    """Put a question into a template.

    Args:
        template: a name from TEMPLATES, or a text that holds `{question}` (any number of times) or, when it has no
            `{question}`, `{}` exactly once. Every other brace is literal text.
        question: inserted as is; braces in it are literal text.
    Raises:
        ValueError: neither a known name nor a text with a place for the question, or `{}` more than once.
    """
    text = TEMPLATES.get(template, template)
    if "{question}" in text:
        return text.replace("{question}", question)
    places = text.count("{}")
    if places == 1:
        return text.replace("{}", question)
    if places > 1:
        raise ValueError(
            f"template {template!r} holds {{}} {places} times: mark the place of the question {{question}}"
        )
    raise ValueError(
        f"unknown template {template!r}: expected one of {sorted(TEMPLATES)} or a text that holds {{question}} or {{}}"
    )


def message_text(message: Message) -> str:
    """Text of a message whose content is a string or a list of text parts.

    Raises:
        ValueError: no text content.
    """
    content = unpack_json(message.get("content"))
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in map(unpack_json, content)]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise ValueError(
        f"message of role {message.get('role')!r}: expected its content as text or a list of text parts, "
        f"got {type(content).__name__}"
    )


def render_chat_prompt(messages: Sequence[Message], tokenizer: Any) -> str:
    """Text of a conversation up to where the assistant's answer starts, through the tokenizer's chat template.

    Args:
        messages: `role` and `content` of each turn, the last one not the assistant's.
    Raises:
        ValueError: no messages, the tokenizer has no chat template, or the template refuses these messages.
    """
    if not messages:
        raise ValueError("expected at least one message before the answer, got an empty conversation")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: "
            "pass --tokenizer_chat_template, or leave out --apply_chat_template and choose an --input_template"
        )
    turns = [{"role": message.get("role"), "content": message_text(message)} for message in messages]
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = [turn["role"] for turn in turns]
        raise ValueError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error


def split_chat(messages: Sequence[Message], tokenizer: Any) -> tuple[str, str]:
    """Prompt text and response text of a conversation that ends with the assistant's message.

    The response is the last message's content alone: what a template writes behind it (its end-of-turn mark) gives way
    to the EOS token that every tokenised response ends in, so that a training response and a sampled one of the same
    text are the same tokens.

    Raises:
        ValueError: the last message is not the assistant's, and whatever render_chat_prompt raises.
    """
    if not messages or messages[-1].get("role") != "assistant":
        roles = [message.get("role") for message in messages]
        raise ValueError(f"expected a conversation that ends with role 'assistant', got the roles {roles}")
    return render_chat_prompt(messages[:-1], tokenizer), message_text(messages[-1])


def render_question(question: str, tokenizer: Any, *, template: str, apply_chat_template: bool) -> str:
    """Prompt text of one question: as the user's only message of a chat, or in a template.

    Training, goal states, evaluation and decoding all render questions here.
    """
    if apply_chat_template:
        return render_chat_prompt([{"role": "user", "content": question}], tokenizer)
    return render_prompt(template, question)
