"""Labelled responses of one prompt as one training example: every correct one against every wrong one."""

from __future__ import annotations

import functools
import json
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch

from openrlhf.datasets.adapters import PreferenceOptions, default_template
from openrlhf.datasets.completions import are_labelled
from openrlhf.datasets.dealing import deal, fit_responses
from openrlhf.datasets.pairing import group_solutions, normalise_question, read_solution
from openrlhf.datasets.preference import PreferenceBatch, group_of, pad_rows
from openrlhf.datasets.prepared import (
    TOKEN_IDS,
    fingerprint_prepared,
    hash_lists,
    map_to_cache,
    prepared_file,
    worker_count,
)
from openrlhf.datasets.templates import render_question
from openrlhf.datasets.tokenize import encode_prompts, encode_responses
from openrlhf.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

_KEPT = ("kept", "truncated")
_DROPPED = "empty_response prompt_too_long too_long same_tokens conflicting_tokens one_sided surplus".split()
_REASONS = [*_KEPT, *_DROPPED]
# A row for each example; the reasons of a prompt's responses are those of its first row.
_FEATURES = datasets.Features(
    {
        "prompt_ids": TOKEN_IDS,
        "correct": datasets.List(TOKEN_IDS),
        "wrong": datasets.List(TOKEN_IDS),
        "reasons": datasets.List(datasets.Value("int8")),
    }
)
_BATCH_PROMPTS = 100


@dataclass(frozen=True)
class TokenizedGroup:
    """Responses to one prompt as token ids, at least one of each kind, all different."""

    prompt_ids: list[int]  # starts with BOS where the tokenizer or the template has one; no EOS added
    correct: list[list[int]]  # of each at least one token, then exactly one EOS
    wrong: list[list[int]]  # the same


class ResponseGroups:
    """Examples of a prepared data set, each a prompt with correct and wrong responses; ids stay on disk, memory-mapped.

    Attributes:
        counts: "read" rows, "examples", their "pairs" and "responses", "truncated" ones of these; rows left out by
            reason; "questions" that were read.
        fingerprint: of rows, tokenizer and settings: equal for equal examples.
        options: as they were used: with the template filled in.
        lengths: (N,) int64 tokens of the longest sequence (prompt + response) of each example.
        row_tokens: (N,) int64 tokens of each example's prompt, once, and responses.
        plain_tokens: (N,) int64 tokens of its sequences.
        row_counts: (N,) int64 sequences of each example: its responses.
        pair_counts: (N,) int64 pairs of each example: correct times wrong responses.
        has_margin: False.
    """

    has_margin = False

    def __init__(
        self, prepared: datasets.Dataset, fingerprint: str, options: PreferenceOptions, read_counts: Mapping[str, int]
    ) -> None:
        table = prepared.data
        self._prepared = prepared.select_columns(["prompt_ids", "correct", "wrong"])
        correct, wrong = (pc.list_value_length(table.column(name)).to_numpy() for name in ("correct", "wrong"))
        self._positions = np.flatnonzero(correct)
        correct, wrong = correct[self._positions].astype(np.int64), wrong[self._positions].astype(np.int64)
        prompt = pc.list_value_length(table.column("prompt_ids")).to_numpy()[self._positions].astype(np.int64)
        longest, responses = np.zeros_like(prompt), np.zeros_like(prompt)
        for name, counts in (("correct", correct), ("wrong", wrong)):
            sizes = pc.list_value_length(pc.list_flatten(table.column(name))).to_numpy().astype(np.int64)
            starts = np.cumsum(counts) - counts  # of each example's responses among all of them
            longest = np.maximum(longest, np.maximum.reduceat(sizes, starts))
            responses = responses + np.add.reduceat(sizes, starts)
        self.lengths: np.ndarray = prompt + longest
        self.row_tokens: np.ndarray = prompt + responses
        self.row_counts: np.ndarray = correct + wrong
        self.plain_tokens: np.ndarray = self.row_counts * prompt + responses
        self.pair_counts: np.ndarray = correct * wrong
        self.fingerprint, self.options = fingerprint, options

        tally = Counter(dict(read_counts))
        codes, numbers = np.unique(pc.list_flatten(table.column("reasons")).to_numpy(), return_counts=True)
        tally.update({_REASONS[code]: int(number) for code, number in zip(codes, numbers, strict=True)})
        kept = {"examples": len(self), "pairs": int(self.pair_counts.sum()), "responses": int(self.row_counts.sum())}
        truncated = tally["truncated"]
        left_out = {name: number for name, number in tally.items() if number and name not in ("read", *_KEPT)}
        self.counts: dict[str, int] = {"read": tally["read"], **kept, "truncated": truncated, **left_out}

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, i: int) -> TokenizedGroup:
        if not -len(self) <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        return TokenizedGroup(**self._prepared[int(self._positions[i])])

    def collate(self, indices: Sequence[int], pad_id: int) -> PreferenceBatch:
        """Right-padded batch of the examples at these positions: of each the correct rows, then the wrong ones.

        The pairs of an example lie together, by correct response and then by wrong one, and share a weight of 1.

        Args:
            indices: B positions, 0 <= i < len(self).
            pad_id: written where attention_mask is False.
        """
        examples = self._prepared[[int(self._positions[i]) for i in indices]]
        prompts, responses, pairs, weight = [], [], [], []
        for prompt, correct, wrong in zip(
            *(examples[name] for name in ("prompt_ids", "correct", "wrong")), strict=True
        ):
            first, middle = len(responses), len(responses) + len(correct)
            prompts += [prompt] * (len(correct) + len(wrong))
            responses += correct + wrong
            pairs += [(c, w) for c in range(first, middle) for w in range(middle, len(responses))]
            weight += [1 / (len(correct) * len(wrong))] * (len(correct) * len(wrong))
        chosen, rejected = torch.tensor(pairs, dtype=torch.long).unbind(1)
        return PreferenceBatch(
            *pad_rows(prompts, responses, pad_id),
            chosen=chosen,
            rejected=rejected,
            weight=torch.tensor(weight),
            margin=None,
            index=torch.tensor([int(i) for i in indices], dtype=torch.long),
            group=torch.tensor([group_of(prompt) for prompt in examples["prompt_ids"]], dtype=torch.long),
        )

    def prompt_hashes(self) -> set[int]:
        """Hashes of the token ids of all prompts, each once."""
        return hash_lists(self._prepared.data.column("prompt_ids"), self._positions)

    def example_text(self, i: int, tokenizer: Any) -> str:
        """Example i decoded from its ids, special tokens shown, for a look before training."""
        group = self[i]
        parts = [("prompt", group.prompt_ids)]
        parts += [(kind, ids) for kind in ("correct", "wrong") for ids in getattr(group, kind)]
        return "\n".join(f"[{name}: {len(ids)} tokens]\n{tokenizer.decode(ids)}" for name, ids in parts)


def prepare_groups(
    rows: datasets.Dataset,
    tokenizer: Any,
    options: PreferenceOptions,
    responses_per_prompt: int,
    *,
    seed: int,
    strip_calculator: bool = False,
    include_unparsed: bool = False,
    num_proc: int | None = None,
    cache: bool = True,
) -> ResponseGroups:
    """Group labelled responses by prompt, render, tokenise and fit them, and deal them to examples.

    Which rows are usable, and of one question, is as in :func:`~openrlhf.datasets.pairing.build_pairs`. Responses of a
    prompt that have the same tokens, once cut, count once ("same_tokens"), and not at all where one is correct and
    another wrong ("conflicting_tokens"); then :func:`deal` makes examples of what is left. The result is written to the
    `datasets` cache under a fingerprint of all arguments, and memory-mapped from there.

    Args:
        rows: completions with a label (see row_to_completion).
        options: template and length; format and keys have no meaning here.
        responses_per_prompt: at most this many responses in an example, at least 2.
        seed: of the dealing, which depends on it, the question and its own responses alone.
        strip_calculator, include_unparsed: as in build_pairs.
        num_proc: worker processes; None: one for small data sets, two for large ones.
        cache: False prepares anew even where a cached result exists.
    Raises:
        ValueError: responses_per_prompt below 2, no rows, other columns, a bad row (named by its number), or no
            example left (with the counts).
    """
    if responses_per_prompt < 2:
        raise ValueError(f"responses_per_prompt: expected at least 2, got {responses_per_prompt}")
    if not len(rows):
        raise ValueError("the data set of labelled responses has no rows")
    if not are_labelled(rows.column_names):
        raise ValueError(
            "--responses_per_prompt needs labelled responses, with the columns question (or problem), "
            f"generated_solution (or generation) and is_correct, got {rows.column_names}; drop the flag for pairs"
        )
    template = options.input_template or default_template("question_correct_incorrect", options.apply_chat_template)
    options = replace(options, input_template=template)
    rows = rows.with_format(None)
    fingerprint = fingerprint_prepared(
        rows,
        tokenizer,
        options.apply_chat_template,
        options=asdict(options),
        groups=[responses_per_prompt, seed, strip_calculator, include_unparsed],
    )
    questions, counts = _group_rows(rows, fingerprint, strip_calculator, include_unparsed, cache)
    if not len(questions):
        raise _nothing_left(counts, options.max_len)
    prepared = map_to_cache(
        questions,
        functools.partial(
            _prepare_batch,
            rows=rows,
            tokenizer=tokenizer,
            options=options,
            limit=responses_per_prompt,
            seed=seed,
            strip_calculator=strip_calculator,
        ),
        features=_FEATURES,
        kind="groups",
        fingerprint=fingerprint,
        batch_rows=_BATCH_PROMPTS,
        workers=min(worker_count(num_proc, len(rows)), len(questions)),
        cache=cache,
    )
    data = ResponseGroups(prepared, fingerprint, options, counts)
    if not len(data):
        raise _nothing_left(data.counts, options.max_len)
    logger.info("response groups, template %r: %s", template, _describe(data.counts))
    return data


def _describe(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _nothing_left(counts: Mapping[str, int], max_len: int) -> ValueError:
    return ValueError(
        f"no prompt has both a correct and a wrong response left ({_describe(counts)}): check the labels, max_len "
        f"({max_len}) and max_samples, which draws rows without looking at prompts"
    )


def _group_rows(
    rows: datasets.Dataset, fingerprint: str, strip_calculator: bool, include_unparsed: bool, cache: bool
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Row numbers of the questions that have correct and wrong solutions, and counts of all rows; from the cache."""
    path = prepared_file("groups", f"{fingerprint}.json")
    if cache and path.is_file():
        grouped = json.loads(path.read_text(encoding="utf-8"))
    else:
        questions, counts = group_solutions(rows, strip_calculator=strip_calculator, include_unparsed=include_unparsed)
        paired = [question for question in questions if question.correct and question.wrong]
        one_sided = sum(len(q.correct) + len(q.wrong) for q in questions if not (q.correct and q.wrong))
        numbers = {name: [getattr(question, name) for question in paired] for name in ("row", "correct", "wrong")}
        grouped = {"counts": {**counts, "one_sided": one_sided}, "numbers": numbers}
        atomic_write_text(path, json.dumps(grouped))
    number = datasets.Value("int64")
    features = datasets.Features({"row": number, "correct": datasets.List(number), "wrong": datasets.List(number)})
    return datasets.Dataset.from_dict(grouped["numbers"], features=features), grouped["counts"]


def _prepare_batch(
    questions: Mapping[str, list[Any]],
    indices: list[int],
    *,
    rows: datasets.Dataset,
    tokenizer: Any,
    options: PreferenceOptions,
    limit: int,
    seed: int,
    strip_calculator: bool,
) -> dict[str, list[Any]]:
    """The examples of some questions; a question that gives none still has a row, for its reasons."""
    sides = list(zip(questions["correct"], questions["wrong"], strict=True))
    numbers = sorted({*questions["row"], *(number for pair in sides for side in pair for number in side)})
    texts = dict(zip(numbers, _read_texts(rows, numbers, strip_calculator), strict=True))
    responses = encode_responses(tokenizer, [solution for _, solution in texts.values()])
    encoded = dict(zip(numbers, responses, strict=True))
    asked = [texts[row][0] for row in questions["row"]]
    chat = options.apply_chat_template
    prompts = [
        render_question(text, tokenizer, template=options.input_template, apply_chat_template=chat) for text in asked
    ]
    out: dict[str, list[Any]] = {name: [] for name in _FEATURES}
    for text, prompt_ids, pair in zip(asked, encode_prompts(tokenizer, prompts), sides, strict=True):
        given = [[encoded[number] for number in side] for side in pair]
        try:
            ids, reasons = fit_responses(
                prompt_ids, *given, tokenizer.eos_token_id, options.max_len, on_long=options.on_long
            )
        except ValueError as error:
            raise ValueError(f"row {pair[0][0]} and others of its question: {error}") from error
        kept = [i for i, reason in enumerate(reasons) if reason in _KEPT]
        correct, wrong = ([i for i in kept if (i < len(pair[0])) == is_correct] for is_correct in (True, False))
        examples = deal(correct, wrong, limit, random.Random(f"{seed}:{normalise_question(text)}"))
        for i in set(kept).difference(*(part for example in examples for part in example)):
            reasons[i] = "surplus" if examples else "one_sided"
        for example in examples or [([], [])]:
            out["prompt_ids"].append(prompt_ids if examples else [])
            for name, members in zip(("correct", "wrong"), example, strict=True):
                out[name].append([ids[i] for i in members])
            out["reasons"].append([_REASONS.index(reason) for reason in reasons])
            reasons = []
    return out


def _read_texts(rows: datasets.Dataset, numbers: list[int], strip_calculator: bool) -> list[tuple[str, str]]:
    """(question, solution) of these rows."""
    columns = rows[numbers]
    found = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [read_solution(number, row, strip_calculator)[:2] for number, row in zip(numbers, found, strict=True)]
