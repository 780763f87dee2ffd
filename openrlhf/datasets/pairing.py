"""Preference pairs from labelled solutions: a correct and a wrong solution of one question."""

from __future__ import annotations

import hashlib
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.datasets.completions import row_to_completion

_CALCULATOR = re.compile(r"<<.*?>>")
_LOOK_ALIKES = str.maketrans("‘’‚“”„‐‑‒–—−", "'''\"\"\"------")
_PUNCTUATION = re.compile(r"[?;\"']|[.,:](?!\d)|(?<!\d)[.,:]")


def build_pairs(
    rows: Sequence[Mapping[str, Any]],
    pairs_per_question: int,
    seed: int,
    exclude_questions: Collection[str] = frozenset(),
    *,
    strip_calculator: bool = False,
    include_unparsed: bool = False,
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Pair correct with wrong solutions of the same question, as the paper does with OpenMathInstruct-1.

    Each question gives min(pairs_per_question, correct * wrong) different pairs, which use its solutions as evenly as
    possible. The draw of a question depends on the seed, the question and its own solutions alone.

    Args:
        rows: solutions (see row_to_completion) with `is_correct`; read twice, by position.
        exclude_questions: questions, in any spelling that normalise_question makes equal, that give no pairs. (Rows
            are of one question where its text is equal but for white space.)
        strip_calculator: remove `<<...>>` from the solutions.
        include_unparsed: keep solutions marked `parsed: false`, and wrong ones whose predicted answer is null; these
            are mostly cut off or malformed. (A correct solution has an answer, whether the row names it or not.)
    Returns:
        (pairs with question, correct, incorrect, in order of the questions' appearance; counts of rows read, of rows
        left out by reason, of questions and of pairs). A solution that is labelled both ways counts as "conflicting".
    Raises:
        ValueError: pairs_per_question below 1, or a row that is no completion, named by its number.
    Source: correct with incorrect solutions of one question, as in arXiv 2407.13887.
    """
    if pairs_per_question < 1:
        raise ValueError(f"pairs_per_question: expected at least 1, got {pairs_per_question}")
    questions, counts = group_solutions(
        rows, exclude_questions, strip_calculator=strip_calculator, include_unparsed=include_unparsed
    )
    pairs = []
    for question in questions:
        spelling = normalise_question(question.text)  # the draw does not depend on how a question is written
        rng = random.Random(f"{seed}:{spelling}")
        for i, j in _draw(question.correct, question.wrong, pairs_per_question, rng):
            texts = (read_solution(k, rows[k], strip_calculator)[1] for k in (i, j))
            pairs.append(dict(zip(("question", "correct", "incorrect"), (question.text, *texts), strict=True)))
    return pairs, {**counts, "pairs": len(pairs)}


@dataclass(frozen=True)
class QuestionSolutions:
    """Row numbers of one question's usable solutions, in order of appearance."""

    text: str  # the question as its first row has it
    row: int  # number of that row
    correct: list[int]
    wrong: list[int]


def group_solutions(
    rows: Iterable[Mapping[str, Any]],
    exclude_questions: Collection[str] = frozenset(),
    *,
    strip_calculator: bool = False,
    include_unparsed: bool = False,
) -> tuple[list[QuestionSolutions], dict[str, int]]:
    """The different solutions of each question, correct and wrong; arguments and what raises as in build_pairs.

    Returns:
        (questions in order of appearance, also those without correct or without wrong solutions; counts of rows read,
        of rows left out by reason and of questions, those of 0 left out but for "read").
    """
    excluded = {normalise_question(question) for question in exclude_questions}
    counts: Counter[str] = Counter(read=0)
    groups: dict[str, _Solutions] = {}
    for i, row in enumerate(rows):
        counts["read"] += 1
        question, solution, is_correct = read_solution(i, row, strip_calculator)
        reason = _reason(row, solution, is_correct, include_unparsed)
        if reason:
            counts[reason] += 1
            continue
        if excluded and normalise_question(question) in excluded:
            counts["contaminated"] += 1
            continue
        key = " ".join(question.split())
        group = groups.setdefault(key, _Solutions(question, i))
        group.add(i, solution, is_correct)
    questions = []
    for group in groups.values():
        correct, wrong = group.usable()
        questions.append(QuestionSolutions(group.question, group.row, correct, wrong))
        counts["duplicate"] += group.duplicates
        counts["conflicting"] += len(group.conflicting)
        counts["questions"] += 1
        counts["questions_without_correct"] += not correct
        counts["questions_without_wrong"] += not wrong
        counts["questions_paired"] += bool(correct and wrong)
    return questions, {name: count for name, count in counts.items() if count or name == "read"}


def normalise_question(text: str) -> str:
    """A form that is equal for spellings of one question, for decontamination.

    It is loose: a few different questions become equal too, such as f'(2) and f''(2), or 5² and 52.
    Case, white space, quotes, Unicode variants and punctuation do not count, except `.`, `,` and `:` between digits.
    Signs of arithmetic count.
    """
    text = unicodedata.normalize("NFKC", text).translate(_LOOK_ALIKES).casefold()
    return " ".join(_PUNCTUATION.sub(" ", text).split())


def remove_calculator(text: str) -> str:
    """The solution without GSM8K's calculator annotations, such as `<<16-3=13>>`."""
    return _CALCULATOR.sub("", text)


def read_solution(i: int, row: Mapping[str, Any], strip_calculator: bool) -> tuple[str, str, bool | None]:
    """Question, solution and label of row i; a row that is no completion raises ValueError with its number."""
    try:
        completion = row_to_completion(row)
    except ValueError as error:
        raise ValueError(f"row {i}: {error}") from error
    solution = completion.generated_solution
    return completion.question, remove_calculator(solution) if strip_calculator else solution, completion.is_correct


@dataclass
class _Solutions:
    """Row numbers of one question's different solutions, by the hash of their text."""

    question: str
    row: int
    correct: dict[bytes, int] = field(default_factory=dict)
    wrong: dict[bytes, int] = field(default_factory=dict)
    duplicates: int = 0

    def add(self, row: int, solution: str, is_correct: bool) -> None:
        digest = hashlib.blake2b(" ".join(solution.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        side = self.correct if is_correct else self.wrong
        self.duplicates += digest in side
        side.setdefault(digest, row)

    @property
    def conflicting(self) -> set[bytes]:
        return self.correct.keys() & self.wrong.keys()

    def usable(self) -> tuple[list[int], list[int]]:
        """Row numbers of the correct and of the wrong solutions, without those labelled both ways."""
        both = self.conflicting
        return tuple([row for key, row in side.items() if key not in both] for side in (self.correct, self.wrong))


def _reason(row: Mapping[str, Any], solution: str, is_correct: bool | None, include_unparsed: bool) -> str | None:
    if is_correct is None:
        return "unlabelled"
    if not solution.strip():
        return "empty"
    no_answer = not is_correct and "predicted_answer" in row and row["predicted_answer"] is None
    unparsed = no_answer or str(row.get("parsed")).strip().lower() in ("false", "0")
    return "unparsed" if unparsed and not include_unparsed else None


def _draw(correct: list[int], wrong: list[int], limit: int, rng: random.Random) -> list[tuple[int, int]]:
    """Different pairs that walk round both shuffled lists, so that no solution is used much more than another."""
    correct, wrong = rng.sample(correct, len(correct)), rng.sample(wrong, len(wrong))
    if not correct or not wrong:
        return []
    # after lcm steps both walks are back at their start: shift one of them to go on with new pairs
    cycle = math.lcm(len(correct), len(wrong))
    count = min(limit, len(correct) * len(wrong))
    return [(correct[i % len(correct)], wrong[(i + i // cycle) % len(wrong)]) for i in range(count)]
