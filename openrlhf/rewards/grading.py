r"""Find the final answer in a solution and decide whether two answers are equal.

Conventions, applied to both sides by one normaliser:
    percent    `35%` and `35\%` equal `0.35`, never `35`.
    units      words after a number are dropped: `3 cm`, `5 hours`, `3\text{ m}` equal `3` and `5`; so are degree and
               currency signs. `3 million` is 3000000. A letter that touches the number is a variable: `3x`.
    commas     `3,000` is a number when each group after the first has three digits and no bracket encloses it.
    lists      `2,7` is a list: equal to `7,2` and to `\{2,7\}` in any order, to `(2,7)` and `[2,7]` in this order.
               Brackets must agree otherwise: `[1,6)` is not `(1,6)`, and `(1,2)` is not `(2,1)`.
    equations  a leading name is dropped: `x=5` equals `5`.
    decimals   whole numbers compare exactly, others within 1e-6 (relative below 1).
    missing    None or an empty answer equals nothing.
Numbers, words and lists are decided here; expressions go to math-verify in a worker process (`grading_worker.py`).
"""

from __future__ import annotations

import re
import time
from fractions import Fraction
from functools import lru_cache

from openrlhf.rewards.grading_worker import equal_expressions

Answer = str | int | float | None

MAX_LENGTH = 1000  # characters; a longer answer is compared as text only
MAX_ITEMS = 64  # items of a list; a longer list is left to math-verify
MAX_NESTING = 8  # lists within lists; deeper ones too

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text
_BARE_BOX = re.compile(r"[^\s{}$]+")
_NUMBER_IN_TEXT = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-\u2212])?\$?"
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}\b)?|(?<![\w.])\.\d+)(?P<over>/\d+)?"
)
_PLAIN = re.compile(r"-?\d{1,300}")

_SYMBOLS = [
    ("\u2212", "-"), ("\u2013", "-"), ("\u00a0", " "), ("\u2009", " "), ("\u202f", " "), ("{,}", ","),
    ("\u00b2", "^2"), ("\u00b3", "^3"), ("\u03c0", r"\pi "), ("\u221e", r"\infty "), ("\u20ac", ""), ("\u00a3", ""),
    (r"\%", "%"), (r"\$", ""), ("$", ""), (r"\!", ""), (r"\,", " "), (r"\;", " "), (r"\:", " "), (r"\ ", " "),
    ("~", " "), (r"\(", ""), (r"\)", ""), (r"\[", ""), (r"\]", ""),
    ("tfrac", "frac"), ("dfrac", "frac"), ("cfrac", "frac"),
]  # fmt: skip
_COMMANDS = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree\b|\u00b0)(?:\s*[CF]\b)?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
_LEADING_NAME = re.compile(r"^\\?[A-Za-z][\w ]*(?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))(?=[^=]+$)")

_DIGITS = r"\d{1,3}(?:,\d{3})+|\d+"
_NUMBER = re.compile(
    r"(?P<sign>[+-])?\s*(?:"
    r"(?:(?P<whole>\d+)\s*)?\\frac\s*\{\s*(?P<over>-?\d+)\s*\}\s*\{\s*(?P<under>\d+)\s*\}"
    r"|(?:(?P<whole_slash>\d+)\s+)?(?P<over_slash>\d+)\s*/\s*(?P<under_slash>\d+)"
    rf"|(?P<decimal>(?:{_DIGITS})(?:\.\d*)?|\.\d+)(?:[eE](?P<power>[+-]?\d{{1,3}}))?"
    r")(?P<rest>.*)",
    re.DOTALL,
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PERCENT = re.compile(r"\s*(?:%|per\s?cent\b)", re.IGNORECASE)
_SCALE = re.compile(rf"\s*\b({'|'.join(_SCALES)})\b", re.IGNORECASE)
# Letters after a blank: one unit or several, such as "cm^2", "miles per hour", "km/h". One letter is a variable.
_UNIT = re.compile(r"\s+(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp|and|or|to|times|plus|minus|over|inf|infinity|mod)\b)"
                   r"[A-Za-z]{2}[A-Za-z.'/ -]*(?:\s*\^\s*\{?[23]\}?)?")  # fmt: skip
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,;'()-]*")
_LONG_WORD = re.compile(r"[A-Za-z]{3}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_CLOSING = {"(": ")]", "[": ")]", "{": "}"}


def extract_boxed_answer(text: str | None) -> str | None:
    r"""Content of the last complete, non-empty \boxed{...} or \fbox{...}; also `\boxed 9`.

    Braces are balanced; escaped braces are text.

    Returns:
        The stripped content, or None when there is no complete box.
    """
    if text is None:
        return None
    ends = _brace_ends(text)
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start in ends:
            content = text[start + 1 : ends[start]].strip()
        else:
            bare = _BARE_BOX.match(text, start)  # does not match an opening brace that is never closed
            content = bare.group().rstrip(".,;:") if bare else ""
        if content:
            return content
    return None


def extract_answer(text: str | None) -> str | None:
    r"""Final answer of a solution: the last complete box, else the last number, else None.

    A number loses its thousands separators and currency sign and keeps its minus sign: `$1,234.50.` -> `1234.50`.
    """
    boxed = extract_boxed_answer(text)
    if boxed is not None or text is None:
        return boxed
    numbers = list(_NUMBER_IN_TEXT.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    return ("-" if last["sign"] else "") + last["number"].replace(",", "") + (last["over"] or "")


def grade_answer(predicted: Answer, expected: Answer, time_limit_s: float = 5.0) -> bool:
    """Whether two final answers are equal under the conventions of this module.

    Symmetric in its first two arguments, and callable from any thread.

    Args:
        predicted, expected: answers as text or numbers; None equals nothing.
        time_limit_s: seconds for one pair of expressions; a longer comparison counts as different (logged).
    Raises:
        RuntimeError: an expression has to be compared and math-verify does not start.
    """
    if predicted is None or expected is None:
        return False
    first, second = str(predicted).strip(), str(expected).strip()
    if _PLAIN.fullmatch(first) and _PLAIN.fullmatch(second):
        return int(first) == int(second)
    if not first or not second:
        return False
    return _grade(*sorted((first, second)), time_limit_s)


def normalise_answer(answer: Answer) -> str:
    """Canonical text of an answer: equal texts are equal answers, and sorting by it is stable.

    Numbers become `18` or `7/20`, words lower case, everything else loses its blanks.
    """
    if answer is None:
        return ""
    text = str(answer).strip()
    if _PLAIN.fullmatch(text):
        return str(int(text))
    cleaned = _clean(text)
    number = _number(cleaned)
    if number is not None:
        return str(number)
    return _squeezed(cleaned)


@lru_cache(maxsize=65536)
def _grade(first: str, second: str, time_limit_s: float) -> bool:
    return _equal(_clean(first), _clean(second), time.monotonic() + time_limit_s)


def _equal(first: str, second: str, deadline: float, nesting: int = 0) -> bool:
    """Equality of two cleaned answers; the items of lists come back here, one level deeper."""
    if _squeezed(first) == _squeezed(second):
        return bool(first)
    if max(len(first), len(second)) > MAX_LENGTH:
        return False
    numbers = _number(first), _number(second)
    if None not in numbers:
        return _equal_numbers(*numbers)
    words = _is_words(first), _is_words(second)
    if all(words):
        return False
    lists = _split_list(first), _split_list(second)
    if None not in lists and nesting < MAX_NESTING:
        return _equal_lists(*lists, deadline, nesting + 1)
    for number, other_words, other_list in zip(numbers, reversed(words), reversed(lists), strict=True):
        if number is not None and (other_words or other_list is not None):
            return False
    remaining = deadline - time.monotonic()
    return remaining > 0 and equal_expressions(_expression(first), _expression(second), remaining)


def _clean(text: str) -> str:
    """Notation that does not change the value removed; blanks stay, because they tell `3 cm` from `3cm`."""
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    if "boxed" in text or "fbox" in text:
        text = extract_boxed_answer(text) or text
    if len(text) > MAX_LENGTH:
        return " ".join(text.split())
    for old, new in _SYMBOLS:
        text = text.replace(old, new)
    text = _COMMANDS.sub("", text)
    text = _TEXT.sub(r" \1 ", text)
    text = _DEGREES.sub("", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = " ".join(text.split()).rstrip(".,;: ")
    return _unwrapped(_LEADING_NAME.sub("", text, count=1).strip())


def _unwrapped(text: str) -> str:
    """`(A)` and `{5}` without their brackets; a list keeps them."""
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}") and _closes_at(text, 0) == len(text) - 1:
        if len(_split_top(text[1:-1])) > 1:
            break
        text = text[1:-1].strip()
    return text


def _squeezed(cleaned: str) -> str:
    squeezed = "".join(cleaned.split())
    return squeezed.casefold() if _is_words(cleaned) else squeezed


def _is_words(cleaned: str) -> bool:
    return bool(_WORDS.fullmatch(cleaned) and _LONG_WORD.search(cleaned))


def _number(cleaned: str) -> Fraction | None:
    match = _NUMBER.fullmatch(cleaned) if len(cleaned) <= MAX_LENGTH else None
    if match is None:
        return None
    under = int(match["under"] or match["under_slash"] or 1)
    factor = _rest_factor(match["rest"])
    if factor is None or under == 0:
        return None
    if match["decimal"]:
        value = Fraction(match["decimal"].replace(",", "")) * Fraction(10) ** int(match["power"] or 0)
    else:
        whole = int(match["whole"] or match["whole_slash"] or 0)
        value = whole + Fraction(int(match["over"] or match["over_slash"]), under)
    return (-value if match["sign"] == "-" else value) * factor


def _rest_factor(rest: str) -> Fraction | None:
    """What the text behind a number multiplies it by; None when it is more than percent, scale word and unit."""
    factor = Fraction(1)
    percent = _PERCENT.match(rest)
    if percent:
        factor, rest = Fraction(1, 100), rest[percent.end() :]
    else:
        scale = _SCALE.match(rest)
        if scale:
            factor, rest = Fraction(_SCALES[scale[1].lower()]), rest[scale.end() :]
    return factor if not rest.strip() or _UNIT.fullmatch(rest) else None


def _equal_numbers(first: Fraction, second: Fraction) -> bool:
    if first.denominator == second.denominator == 1:
        return first == second
    return abs(first - second) <= Fraction(1, 10**6) * min(1, max(abs(first), abs(second)))


def _brace_ends(text: str) -> dict[int, int]:
    """Position of the closing brace of each opening one; one pass, so that looping outputs cost no more."""
    ends: dict[int, int] = {}
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            open_braces.append(match.start())
        elif match.group() == "}" and open_braces:
            ends[open_braces.pop()] = match.start()
    return ends


def _closes_at(text: str, start: int) -> int | None:
    """Position of the bracket that closes the one at `start`; a backslash hides the character after it."""
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position
        position += 1
    return None


def _split_top(text: str) -> list[str]:
    """Items between commas, semicolons, `and`, `or` outside every bracket."""
    items, depth, start = [], 0, 0
    for match in re.finditer(r"\\?[(\[{]|\\?[)\]}]|[,;]|\s(?:and|or)\s", text):
        token = match.group()
        if token[-1] in "([{":
            depth += 1
        elif token[-1] in ")]}":
            depth -= 1
        elif depth == 0:
            items.append(text[start : match.start()].strip())
            start = match.end()
    return [item for item in [*items, text[start:].strip()] if item]


def _split_list(cleaned: str) -> tuple[str, str, list[str]] | None:
    """(opening, closing, items) of a list of at least two items; opening and closing are empty without brackets."""
    text = cleaned.replace(r"\{", "{").replace(r"\}", "}")
    if text[:1] in _CLOSING and text[-1] in _CLOSING[text[0]] and _closes_at(text, 0) == len(text) - 1:
        opening, closing, items = text[0], text[-1], _split_top(text[1:-1])
    else:
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
        opening, closing, items = "", "", _split_top(text)
    if not 2 <= len(items) <= MAX_ITEMS:
        return None
    return opening, closing, [_unwrapped(_LEADING_NAME.sub("", item, count=1).strip()) for item in items]


def _equal_lists(
    first: tuple[str, str, list[str]], second: tuple[str, str, list[str]], deadline: float, nesting: int
) -> bool:
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


def _expression(cleaned: str) -> str:
    return rf"\frac{{{cleaned[:-1]}}}{{100}}" if cleaned.endswith("%") else cleaned
