r"""Decide whether two final answers are equal.

Conventions, applied to both sides by one normaliser:
    percent    `35%` and `35\%` equal `0.35`, never `35`; with percent="lenient" both.
    units      words after a number are dropped: `3 cm`, `5 hours`, `3\text{ m}` equal `3` and `5`; so are degree and
               currency signs, and short units that touch it (`3cm`, `48g`, `4th`). `3 million` is 3000000. Any other
               letter that touches the number is a variable: `3x`, `3m`.
    commas     `3,000` is a number when each group after the first has three digits and no bracket encloses it.
    lists      `2,7` is a list: equal to `7,2` and to `\{2,7\}` in any order, to `(2,7)` and `[2,7]` in this order.
               Brackets must agree otherwise: `[1,6)` is not `(1,6)`, and `(1,2)` is not `(2,1)`.
    equations  a name, a single quantity or a calculation before the last `=` is dropped: `x=5`, `\angle ABC=5` and
               `2+3=5` equal `5`. Other equations equal only equations: `x+y=5` is `y=5-x` and not `5`.
    bases      `11_3` equals `11` and not `11_5`.
    decimals   whole numbers compare exactly, others within 1e-6 (relative below 1).
    missing    None or an empty answer equals nothing.
`notation.py` reads an answer. Numbers, words and lists are compared here; expressions go to math-verify in a worker
process (`grading_worker.py`).
"""

from __future__ import annotations

import re
import time
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from openrlhf.rewards.extraction import extract_answer, extract_boxed_answer
from openrlhf.rewards.grading_worker import equal_expressions
from openrlhf.rewards.notation import (
    MAX_LENGTH,
    AnswerList,
    clean_notation,
    is_words,
    read_number,
    split_list,
    squeeze,
    to_expression,
    value_side,
)

__all__ = ["extract_answer", "extract_boxed_answer", "grade_answer", "normalise_answer"]

Answer = str | int | float | None
PercentRule = Literal["strict", "lenient"]

MAX_NESTING = 8  # lists within lists; deeper ones are left to math-verify

_PLAIN = re.compile(r"-?\d{1,300}")
_PERCENT_SIGN = re.compile(r"\\?%|per\s?cent\b", re.IGNORECASE)
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(\d{1,2})\}?")
_EQUALS = re.compile(r"(?<![<>!:])=")


def grade_answer(
    predicted: Answer, expected: Answer, time_limit_s: float = 5.0, percent: PercentRule = "strict"
) -> bool:
    """Whether two final answers are equal under the conventions of this module.

    Symmetric in its first two arguments, and callable from any thread.

    Args:
        predicted, expected: answers as text or numbers; None equals nothing.
        time_limit_s: seconds for one pair of expressions; a longer comparison counts as different (logged).
        percent: "lenient" also takes `35%` for 35, as the answers of GSM8K do. Not for grouping answers: 35 and 0.35
            both equal `35%` then, but not each other.
    Raises:
        RuntimeError: an expression has to be compared and math-verify does not start.
    """
    if predicted is None or expected is None:
        return False
    first, second = sorted((str(predicted).strip(), str(expected).strip()))
    if _PLAIN.fullmatch(first) and _PLAIN.fullmatch(second):
        return int(first) == int(second)
    if not first or not second:
        return False
    if _grade(first, second, time_limit_s):
        return True
    if percent == "strict" or not (_PERCENT_SIGN.search(first) or _PERCENT_SIGN.search(second)):
        return False
    return _grade(*sorted(_PERCENT_SIGN.sub("", text) for text in (first, second)), time_limit_s)


def normalise_answer(answer: Answer) -> str:
    """Canonical text of an answer: equal texts are equal answers, and sorting by it is stable.

    Numbers become `18` or `7/20`, words lower case, everything else loses its blanks.
    """
    if answer is None:
        return ""
    text = str(answer).strip()
    if _PLAIN.fullmatch(text):
        return str(int(text))
    cleaned = value_side(clean_notation(text))
    number = read_number(cleaned)
    if number is not None:
        return str(number)
    return squeeze(cleaned)


@lru_cache(maxsize=65536)
def _grade(first: str, second: str, time_limit_s: float) -> bool:
    deadline = time.monotonic() + time_limit_s
    notations = clean_notation(first), clean_notation(second)
    values = value_side(notations[0]), value_side(notations[1])
    if _equal(*values, deadline):
        return True
    equations = all(map(_EQUALS.search, notations)) and max(map(len, notations)) <= MAX_LENGTH
    return equations and None in map(read_number, values) and _equal_by_algebra(*notations, deadline)


def _equal(first: str, second: str, deadline: float, nesting: int = 0) -> bool:
    """Equality of two cleaned answers; the items of lists come back here, one level deeper."""
    if squeeze(first) == squeeze(second):
        return bool(first)
    if max(len(first), len(second)) > MAX_LENGTH:
        return False
    bases = [_BASE.fullmatch(text) for text in (first, second)]
    if any(bases):
        digits = [base[1] if base else text for base, text in zip(bases, (first, second), strict=True)]
        return digits[0].casefold() == digits[1].casefold() and (None in bases or bases[0][2] == bases[1][2])
    numbers = read_number(first), read_number(second)
    if None not in numbers:
        return _equal_numbers(*numbers)
    words = is_words(first), is_words(second)
    if all(words):
        return False
    lists = split_list(first), split_list(second)
    if None not in lists and nesting < MAX_NESTING:
        return _equal_lists(*lists, deadline, nesting + 1)
    for number, other_words, other_list in zip(numbers, reversed(words), reversed(lists), strict=True):
        if number is not None and (other_words or other_list is not None):
            return False
    if bool(_EQUALS.search(first)) != bool(_EQUALS.search(second)):
        return False
    return _equal_by_algebra(first, second, deadline)


def _equal_by_algebra(first: str, second: str, deadline: float) -> bool:
    remaining = deadline - time.monotonic()
    return remaining > 0 and equal_expressions(to_expression(first), to_expression(second), remaining)


def _equal_numbers(first: Fraction, second: Fraction) -> bool:
    if first.denominator == second.denominator == 1:
        return first == second
    return abs(first - second) <= Fraction(1, 10**6) * min(1, max(abs(first), abs(second)))


def _equal_lists(first: AnswerList, second: AnswerList, deadline: float, nesting: int) -> bool:
    kinds = {first[0] + first[1], second[0] + second[1]}
    if len(first[2]) != len(second[2]):
        return False
    if kinds <= {"", "{}"}:
        remaining = list(second[2])
        for item in first[2]:
            match = next((other for other in remaining if _equal(item, other, deadline, nesting)), None)
            if match is None:
                return False
            remaining.remove(match)
        return True
    if len(kinds) == 2 and kinds not in ({"", "()"}, {"", "[]"}):
        return False
    return all(_equal(item, other, deadline, nesting) for item, other in zip(first[2], second[2], strict=True))
