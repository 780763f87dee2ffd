"""Questions of every kind of data, rendered for the policy and for the reward model, and how responses are graded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoding.config import DecodingConfig, parse_pocket
from decoding.records import Question
from openrlhf.cli.common import POCKET
from openrlhf.datasets.jsonl import unpack_json
from openrlhf.datasets.templates import (
    TEMPLATES,
    Message,
    message_text,
    render_chat_prompt,
    render_prompt,
    render_question,
)

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.cli.reward_checkpoint import RewardCheckpoint

# Keys that completions and scored rows have of their own: input columns of these names are not kept.
OWN_KEYS = frozenset(
    "question problem generated_solution generation expected_answer answer predicted_answer is_correct sample index "
    "seed method policy_tokens num_actions finished score reward partial_rewards cosine_sim token_ends truncated "
    "solution_correct first_error_step".split()
)


@dataclass(frozen=True)
class DataKind:
    """How one kind of data is read and asked."""

    key: str  # column of the question
    template: str  # prompt of a policy without chat template
    message: str = "{question}"  # template of the user's message to a policy with one
    has_answers: bool = True


KINDS: dict[str, DataKind] = {
    POCKET: DataKind("question", "pocket"),
    "gsm8k": DataKind("question", "steps", TEMPLATES["steps"].rstrip()),
    "helpsteer": DataKind("prompt", "instruction", has_answers=False),
    "chat": DataKind("messages", "{question}", has_answers=False),
    "custom": DataKind("question", "plain"),
}


@dataclass(frozen=True)
class Asked:
    """One row of the input, not yet rendered."""

    index: int  # row in the input, from 0
    text: str  # the question; of a longer conversation its turns
    messages: tuple[Message, ...]  # the conversation, all of it the user's one message for a plain question
    expected_answer: str | None
    row: Mapping[str, Any]  # the other columns


@dataclass(frozen=True)
class Rendering:
    """How the policy is asked."""

    template: str  # of the prompt, or of the user's message in a chat
    chat: bool  # by the tokenizer's chat template


def choose_rendering(config: DecodingConfig, tokenizer: Any) -> Rendering:
    """The policy's prompts: --input_template, else the chat template of its tokenizer, else the template of the data.

    Pocket has a template of its own: there the chat template is used only with --apply_chat_template.

    Raises:
        ValueError: a chat template is needed, and the tokenizer has none.
    """
    kind = KINDS[config.dt_name]
    if config.input_template is not None:
        return Rendering(config.input_template, False)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    must = config.apply_chat_template or config.dt_name == "chat"
    if must and not has_template:
        asked = "--apply_chat_template" if config.apply_chat_template else "--dt_name chat"
        raise ValueError(f"{asked}: the tokenizer of {config.policy_name} has no chat template")
    chat = must or (has_template and config.dt_name != POCKET)
    return Rendering(kind.message if chat else kind.template, chat)


def read_questions(config: DecodingConfig, input_file: str | None = None) -> list[Asked]:
    """The rows from --start up to --end, or all rows of another file.

    Args:
        input_file: instead of --input_file, whole.
    Raises:
        ValueError: no such data, no row in the range, or a row without a question (names the row and its keys).
    """
    name = config.input_file if input_file is None else input_file
    start, end = (config.start, config.end) if input_file is None else (0, None)
    rows = _pocket_rows(name, config.pocket_level) if config.dt_name == POCKET else _load(name, config.split)
    chosen = range(start, len(rows) if end is None else min(end, len(rows)))
    if not chosen:
        raise ValueError(f"--start {start} --end {end}: {name or POCKET} has {len(rows)} questions, none of them there")
    kind = KINDS[config.dt_name]
    key = config.question_key or kind.key
    return [_read_row(rows[index], index, f"{name}: row {index}", key, kind) for index in chosen]


def render_questions(
    asked: Sequence[Asked], rendering: Rendering, tokenizer: Any, reward: tuple[RewardCheckpoint, Any] | None = None
) -> list[Question]:
    """Questions with the prompts of both models.

    Args:
        tokenizer: the policy's.
        reward: the reward model's checkpoint, whose template is used, and its tokenizer.
    Raises:
        ValueError: a conversation that a model's template cannot render, with the row.
    """
    questions = []
    for one in asked:
        try:
            policy_prompt = _policy_prompt(one, rendering, tokenizer)
            reward_prompt = None if reward is None else _reward_prompt(one, *reward)
        except ValueError as error:
            raise ValueError(f"row {one.index}: {error}") from error
        questions.append(Question(one.index, one.text, policy_prompt, reward_prompt, one.expected_answer, one.row))
    return questions


def check_lengths(prompts: Sequence[tuple[int, str]], tokenizer: Any, context: int | None, room: int, name: str) -> int:
    """Refuse prompts that leave too little of a model's context; returns the tokens of the longest.

    Args:
        prompts: (row, rendered prompt).
        context: tokens that the model can read; None: any number.
        room: tokens that must fit behind the prompt.
        name: of the model, for the message.
    Raises:
        ValueError: an empty prompt or one that is too long, with its row.
    """
    from openrlhf.datasets.tokenize import encode_prompts

    lengths = [len(ids) for ids in encode_prompts(tokenizer, [prompt for _, prompt in prompts])]
    for (row, _), length in zip(prompts, lengths, strict=True):
        if not length:
            raise ValueError(f"row {row}: the prompt has no token, and the {name} needs one to start from")
        if context is not None and length + room > context:
            fits = context - length - 1
            raise ValueError(
                f"row {row}: its prompt of {length} tokens leaves no room for {room} more in {context} of the {name}; "
                + (f"pass --max_tokens {fits} or less" if fits > 0 else "leave it out (--start, --end)")
            )
    return max(lengths)


def grade_for(dt_name: str) -> Callable[[Question, str], tuple[str | None, bool | None]]:
    """The function from (question, response text) to (predicted answer, whether it is right) of a kind of data.

    Both are None where responses have no final answer; the second is None without an expected answer.
    """
    from openrlhf.evaluation.sampling import grade_pocket, grade_text
    from openrlhf.rewards.grading import extract_answer, extract_boxed_answer

    def grade(question: Question, text: str) -> tuple[str | None, bool | None]:
        if not KINDS[dt_name].has_answers:
            return None, None
        if question.expected_answer is None:
            return (extract_boxed_answer if dt_name == POCKET else extract_answer)(text), None
        return (grade_pocket if dt_name == POCKET else grade_text)(text, question.expected_answer)

    return grade


def _pocket_rows(name: str | None, level: int) -> list[dict[str, Any]]:
    from openrlhf.datasets.pocket import generate_problems

    split, number = parse_pocket(name)
    problems = generate_problems(split, number, level=level)
    return [{"question": one.question, "expected_answer": one.answer, "equations": one.steps} for one in problems]


def _load(name: str, split: str) -> Any:
    from openrlhf.datasets.sources import load_rows

    return load_rows(name, split)


def _read_row(row: Mapping[str, Any], index: int, place: str, key: str, kind: DataKind) -> Asked:
    row = {name: unpack_json(value) for name, value in row.items()}
    value = row.get(key)
    expected = "a list of messages" if kind is KINDS["chat"] else "text"
    if isinstance(value, str) and value.strip():
        messages = ({"role": "user", "content": value},)
    elif expected != "text" and isinstance(value, list) and value:
        messages = _conversation(value, place)
    else:
        found = [name for name, content in row.items() if content is not None]
        told = "nothing" if value is None else "an empty one" if not value else type(value).__name__
        raise ValueError(
            f"{place}: expected {expected} under {key!r}, got {told}; the row has {found}: name the column with "
            "--question_key"
        )
    texts = [message_text(message) for message in messages]
    named = "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))
    others = {name: value for name, value in row.items() if name not in OWN_KEYS | {key} and value is not None}
    others |= {"messages": list(messages)} if len(messages) > 1 else {}
    return Asked(
        index,
        texts[0] if len(texts) == 1 else named,
        messages,
        _expected_answer(row) if kind.has_answers else None,
        json.loads(json.dumps(others, default=str)),  # dates and the like as text
    )


def _conversation(value: list[Any], place: str) -> tuple[Message, ...]:
    """Messages up to the last one of the user; answers of the assistant behind it are what is to be written anew."""
    broken = [one for one in value if not isinstance(one, Mapping) or not {"role", "content"} <= set(one)]
    if broken:
        raise ValueError(f"{place}: expected messages with role and content, got {broken[0]!r:.80}")
    last = max((number for number, one in enumerate(value) if one["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{place}: expected a message of the user, got the roles {[one['role'] for one in value]}")
    return tuple({"role": one["role"], "content": message_text(one)} for one in value[: last + 1])


def _expected_answer(row: Mapping[str, Any]) -> str | None:
    """The final answer: that of GSM8K stands behind ####."""
    value = row.get("expected_answer")
    value = row.get("answer") if value is None else value
    text = "" if value is None else str(value).rsplit("####", 1)[-1].strip()
    return text or None


def _policy_prompt(one: Asked, rendering: Rendering, tokenizer: Any) -> str:
    if not rendering.chat:
        return render_prompt(rendering.template, one.text)
    *before, last = one.messages
    content = render_prompt(rendering.template, last["content"])
    return render_chat_prompt([*before, {**last, "content": content}], tokenizer)


def _reward_prompt(one: Asked, checkpoint: RewardCheckpoint, tokenizer: Any) -> str:
    if len(one.messages) == 1:
        return render_question(
            one.text, tokenizer, template=checkpoint.template, apply_chat_template=checkpoint.apply_chat_template
        )
    if not checkpoint.apply_chat_template:
        raise ValueError(
            f"a conversation of {len(one.messages)} messages, and {checkpoint.name} was trained with the template "
            f"{checkpoint.template!r} for one question; take a reward model trained with --apply_chat_template"
        )
    return render_chat_prompt(one.messages, tokenizer)
