"""What goal states are the mean of: the chosen, correct or well rated responses of the rows that a command is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets

from openrlhf.cli.reward_checkpoint import RewardCheckpoint
from openrlhf.datasets.adapters import PreferenceOptions, as_text_or_messages, resolve_options, row_to_example
from openrlhf.datasets.attributes import attribute_columns, rated_at_least, read_ratings
from openrlhf.datasets.completions import row_to_completion
from openrlhf.datasets.preference import prepare_preferences
from openrlhf.datasets.sources import fingerprint_rows
from openrlhf.datasets.templates import message_text, render_chat_prompt, render_question
from openrlhf.datasets.tokenize import encode_prompts, encode_responses
from openrlhf.evaluation.goal_accumulator import EncodedResponse
from openrlhf.evaluation.scoring import fit_response

_ENCODE_ROWS = 256  # responses tokenised at a time
_COMPLETION_COLUMNS = ("question", "problem", "generated_solution", "generation", "is_correct")

Row = Mapping[str, Any]
Encode = Callable[[Sequence[int]], list[tuple[list[int], bool]]]


@dataclass(frozen=True)
class GoalPart:
    """One goal state (or one set of goals per question) to make."""

    fingerprint: str  # of the rows read, in the columns that matter
    counts: dict[str, int]  # rows read, and those left out, by reason
    attribute: str | None = None
    columns: list[str] | None = None  # that must be rated well


@dataclass(frozen=True)
class GoalResponses:
    """N responses to average, in order; they are tokenised when they are read."""

    parts: tuple[GoalPart, ...]  # one a goal, or a single one when the goals are questions
    members: list[tuple[int, ...]]  # N, numbers of the goals that each response counts in
    encode: Encode  # positions to (ids, truncated); ids are empty where nothing fits behind the prompt
    questions: tuple[str, ...] | None = None  # goals per question: their texts

    @property
    def goals(self) -> int:
        """G, goals that the responses count in."""
        return len(self.parts) if self.questions is None else len(self.questions)

    def read(self, start: int) -> Iterator[EncodedResponse]:
        """The responses from number `start` on."""
        for first in range(start, len(self.members), _ENCODE_ROWS):
            positions = range(first, min(first + _ENCODE_ROWS, len(self.members)))
            for i, (ids, truncated) in zip(positions, self.encode(positions), strict=True):
                yield EncodedResponse(ids, self.members[i], truncated)

    def only(self, parts: Sequence[int]) -> GoalResponses:
        """The responses of some parts alone, without those that count in none of them."""
        place = {part: i for i, part in enumerate(parts)}
        kept = [i for i, goals in enumerate(self.members) if any(goal in place for goal in goals)]
        return replace(
            self,
            parts=tuple(self.parts[part] for part in parts),
            members=[tuple(place[goal] for goal in self.members[i] if goal in place) for i in kept],
            encode=lambda positions: self.encode([kept[i] for i in positions]),
        )


def is_completions(columns: Sequence[str]) -> bool:
    """Whether rows with these columns are completions rather than preference pairs.

    Raises:
        ValueError: completions without labels, or rated responses for which no attribute was named.
    """
    names = set(columns)
    pairs = {"chosen", "rejected"} <= names or {"correct", "incorrect"} <= names
    if not pairs and names & {"question", "problem"} and names & {"generated_solution", "generation"}:
        if "is_correct" not in names:
            raise ValueError(
                f"completions without the column is_correct (got {list(columns)}): label them first, eval_rm does"
            )
        return True
    if not pairs and {"prompt", "response"} <= names:
        raise ValueError(f"rows of single responses (got {list(columns)}): name what makes them good with --attribute")
    return False


def preference_responses(
    rows: datasets.Dataset, tokenizer: Any, options: PreferenceOptions, num_proc: int | None
) -> GoalResponses:
    """The chosen responses of all pairs that training would keep."""
    pairs = prepare_preferences(rows, tokenizer, options, num_proc=num_proc)

    def encode(positions: Sequence[int]) -> list[tuple[list[int], bool]]:
        kept = [pairs[i] for i in positions]
        return [(pair.prompt_ids + pair.chosen_ids, False) for pair in kept]  # the counts tell how many were cut

    return GoalResponses((GoalPart(pairs.fingerprint, pairs.counts),), [(0,)] * len(pairs), encode)


def question_preference_responses(
    rows: datasets.Dataset, tokenizer: Any, checkpoint: RewardCheckpoint, options: PreferenceOptions
) -> GoalResponses:
    """The chosen responses of preference pairs, by question: the prompt, or its only message."""
    head = rows.with_format(None)[: min(100, len(rows))]
    first = {name: next((value for value in values if value is not None), None) for name, values in head.items()}
    options = resolve_options(rows.column_names, first, options)
    if options.prompt_key is None:
        raise ValueError(
            f"--per_question: the format {options.format} has no column of questions; expected pairs with a prompt, "
            "or completions"
        )

    def read(row: Row) -> tuple[str, str, str] | str:
        example = row_to_example(row, options.format, options, tokenizer)
        if isinstance(example, str):
            return example
        if example.chosen == example.rejected:
            return "identical"
        return _question_text(row[options.prompt_key]), example.prompt, example.chosen

    keys = list(dict.fromkeys([options.prompt_key, options.chosen_key, options.rejected_key]))
    return _text_responses(rows.select_columns(keys), read, tokenizer, checkpoint, per_question=True)


def completion_responses(
    rows: datasets.Dataset, tokenizer: Any, checkpoint: RewardCheckpoint, per_question: bool
) -> GoalResponses:
    """The correct ones of completions; those without a label are left out and counted."""

    def read(row: Row) -> tuple[str, str, str] | str:
        one = row_to_completion(row)
        if not one.is_correct:
            return "without_label" if one.is_correct is None else "wrong"
        if not one.generated_solution.strip():
            return "empty_response"
        return one.question, _prompt_text(one.question, tokenizer, checkpoint), one.generated_solution

    columns = [name for name in _COMPLETION_COLUMNS if name in rows.column_names]
    return _text_responses(rows.select_columns(columns), read, tokenizer, checkpoint, per_question)


def rated_responses(
    rows: datasets.Dataset,
    tokenizer: Any,
    checkpoint: RewardCheckpoint,
    *,
    attributes: Sequence[str],
    min_value: float,
    prompt_key: str,
    response_key: str,
) -> GoalResponses:
    """The responses rated at least `min_value`, for every attribute; each response is read once."""
    missing = [name for name in (prompt_key, response_key) if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"expected the columns {prompt_key!r} and {response_key!r}, got {rows.column_names}: {missing} missing; "
            "name them with --prompt_key and --response_key"
        )
    wanted = attribute_columns(attributes, rows.column_names)
    ratings = {column: read_ratings(rows, column) for column in dict.fromkeys(sum(wanted.values(), []))}
    good = [rated_at_least(ratings, name, columns, min_value) for name, columns in wanted.items()]

    def read(row: Row) -> tuple[str, str, str] | str:
        prompt, response = as_text_or_messages(row[prompt_key]), row[response_key]
        if prompt is None or response is None:
            return "missing_value"
        if not isinstance(response, str):
            raise ValueError(f"expected text under {response_key!r}, got {type(response).__name__}")
        return ("", _prompt_text(prompt, tokenizer, checkpoint), response) if response.strip() else "empty_response"

    goals = list(zip(*(mask.tolist() for mask in good), strict=True))
    chosen = [tuple(goal for goal, member in enumerate(row) if member) for row in goals]
    texts = _text_responses(rows.select_columns([prompt_key, response_key]), read, tokenizer, checkpoint, False, chosen)
    parts = []
    for goal, (name, columns) in enumerate(wanted.items()):
        used = rows.select_columns(list(dict.fromkeys([prompt_key, response_key, *columns])))
        left_out = sum(goal in members for members in chosen) - sum(goal in members for members in texts.members)
        counts = {"read": len(rows), "below_min_value": int((~good[goal]).sum()), "missing_or_empty": left_out}
        parts.append(GoalPart(fingerprint_rows(used), counts, name, columns))
    return replace(texts, parts=tuple(parts))


def _text_responses(
    rows: datasets.Dataset,
    read: Callable[[Row], tuple[str, str, str] | str],
    tokenizer: Any,
    checkpoint: RewardCheckpoint,
    per_question: bool,
    goals: Sequence[tuple[int, ...]] | None = None,
) -> GoalResponses:
    """Responses of rows that `read` turns into (question, rendered prompt, response), or a reason to leave them out.

    Args:
        goals: of each row; rows of no goal are passed over unread. None: goal 0, or one a question.
    """
    rows = rows.with_format(None)
    counts: Counter[str] = Counter()
    numbers: dict[str, int] = {}
    used, members = [], []
    for number, row in enumerate(_dicts(rows)):
        if goals is not None and not goals[number]:
            continue
        try:
            found = read(row)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        if isinstance(found, str):
            counts[found] += 1
            continue
        used.append(number)
        if goals is not None:
            members.append(goals[number])
        else:
            members.append((numbers.setdefault(found[0], len(numbers)) if per_question else 0,))
    if not used:
        report = ", ".join(f"{reason} {count}" for reason, count in counts.items())
        raise ValueError(
            f"expected at least one chosen response for the goal state, got none of {len(rows)} ({report})"
        )

    def encode(positions: Sequence[int]) -> list[tuple[list[int], bool]]:
        texts = [read(row) for row in _dicts(rows.select([used[i] for i in positions]))]
        prompts = encode_prompts(tokenizer, [prompt for _, prompt, _ in texts])
        responses = encode_responses(tokenizer, [response for _, _, response in texts])
        fitted = map(fit_response, prompts, responses, [checkpoint.max_len] * len(texts))
        return [(one.ids, one.truncated) for one in fitted]

    part = GoalPart(fingerprint_rows(rows), {"read": len(rows), **counts})
    return GoalResponses((part,), members, encode, tuple(numbers) if per_question else None)


def _dicts(rows: datasets.Dataset) -> Iterator[dict[str, Any]]:
    for batch in rows.iter(1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _prompt_text(prompt: Any, tokenizer: Any, checkpoint: RewardCheckpoint) -> str:
    chat = checkpoint.apply_chat_template
    if isinstance(prompt, str):
        return render_question(prompt, tokenizer, template=checkpoint.template, apply_chat_template=chat)
    if not isinstance(prompt, Sequence) or not all(isinstance(item, Mapping) for item in prompt):
        raise ValueError(f"expected a prompt of text or messages, got {type(prompt).__name__}")
    if not chat:
        raise ValueError("a prompt of messages is rendered by a chat template: pass --apply_chat_template")
    return render_chat_prompt(prompt, tokenizer)


def _question_text(prompt: Any) -> str:
    prompt = as_text_or_messages(prompt)
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return message_text(prompt[0])
    raise ValueError(f"--per_question: expected a prompt of one message, got {len(prompt)} messages")
