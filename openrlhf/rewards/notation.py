"""Read one final answer: its notation made uniform, its number, words or list; `grading.py` lists the conventions."""

from __future__ import annotations

import re
from fractions import Fraction

from openrlhf.rewards.extraction import extract_boxed_answer

AnswerList = tuple[str, str, list[str]]  # opening and closing bracket, both empty without brackets, and the items

MAX_LENGTH = 1000  # characters; a longer answer is text only
MAX_ITEMS = 64  # items of a list; a longer one is no list

_SYMBOLS = [
    ("\u2212", "-"), ("\u2013", "-"), ("\u00a0", " "), ("\u2009", " "), ("\u202f", " "), ("{,}", ","),
    ("\u00b2", "^2"), ("\u00b3", "^3"), ("\u03c0", r"\pi "), ("\u221e", r"\infty "), ("\u20ac", ""), ("\u00a3", ""),
    ("\u00a5", ""), ("\u20b9", ""),
    ("\u2248", "="), (r"\approx", "="), ("\u00d7", r"\times "), ("\u00f7", r"\div "), ("\u22c5", r"\cdot "),
    (r"\%", "%"), (r"\$", ""), ("$", ""), (r"\!", ""), (r"\,", " "), (r"\;", " "), (r"\:", " "), (r"\ ", " "),
    ("~", " "), (r"\(", ""), (r"\)", ""), (r"\[", ""), (r"\]", ""),
    ("tfrac", "frac"), ("dfrac", "frac"), ("cfrac", "frac"),
]  # fmt: skip
_COMMANDS = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree\b|\u00b0)(?:\s*[CF]\b)?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
_UNIT_TEXT = re.compile(r"(?<=[\d}) ])\\(?:text|textrm|mathrm|mbox)\s*\{\s*[A-Za-z]\s*\}(?:\s*\^\s*\{?[23]\}?)?$")
_MEMBER_OF = re.compile(r"^\\?[A-Za-z]\w*\s*\\in(?![A-Za-z])")
_SUBSCRIPT = re.compile(r"_(?:\w|\{\w+\})|(?<=[A-Za-z])\(\w+\)")  # of a_{10} and f(2), which are names
_NAMES = re.compile(r"\(\s*[A-Za-z]\w*(?:\s*,\s*[A-Za-z]\w*)*\s*\)")
_ARITHMETIC = re.compile(r"[\d+\-*<>:;,!]|\\(?:[lg]eq?|[lg]t|neq?|pm|mp|times|cdot|div)(?![A-Za-z])")
_UNIT_WORD = re.compile(r"(?<![\dA-Za-z\\)])[A-Za-z]{2,}")
_OPERATION = re.compile(r"\\(?:times|cdot|div|frac)(?![A-Za-z])")
_NO_CALCULATION = re.compile(r"[A-Za-z\\<>:;!]|,(?!\d{3})")

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
# Letters after a blank: one unit or several, such as "cm^2", "miles per hour", "km/h". One letter is a variable, but
# for the commonest units. Units that may touch the number are listed.
_POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
_SPACED_UNIT = (
    r"\s+(?!(?:d[xyztuvr]|pi|sqrt|sin|cos|tan|log|ln|exp|and|or|to|times|plus|minus|over|inf|infinity|mod)\b)"
    r"(?:[A-Za-z]{2}[A-Za-z.'/ -]*|[mghsLl](?:/[A-Za-z]+)?)" + _POWER
)
_TOUCHING_UNIT = (
    r"\s?(?:[ckm]ms?|m[lLg]|k?gs?|L|lbs?|oz|ft|in|yds?|mph|km/h|hrs?|mins?|secs?|[ap]\.?m\.?|st|nd|rd|th)"
    r"(?![A-Za-z])" + _POWER
)
_UNIT = re.compile(f"{_SPACED_UNIT}|{_TOUCHING_UNIT}")
_TRAILING_UNIT = re.compile(rf"(?:(?<=[\d}})])|(?<=\\pi)){_SPACED_UNIT}$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,;'()-]*")
_LONG_WORD = re.compile(r"[A-Za-z]{3}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_CLOSING = {"(": ")]", "[": ")]", "{": "}"}


def clean_notation(text: str) -> str:
    """Notation that does not change the value removed; blanks stay, because they tell `3 cm` from `3cm`."""
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    if "boxed" in text or "fbox" in text:
        text = extract_boxed_answer(text) or text
    if len(text) > MAX_LENGTH:
        return " ".join(text.split())
    text = r"\\".join(map(_uniform_symbols, text.split(r"\\")))  # `\\ ` ends a row of a matrix, `\ ` is a blank
    text = _COMMANDS.sub("", text)
    text = _TEXT.sub(r" \1 ", _UNIT_TEXT.sub("", text.rstrip(". ")))
    text = _DEGREES.sub("", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    return _unwrapped(" ".join(text.split()).rstrip(".,;: "))


def _uniform_symbols(text: str) -> str:
    for old, new in _SYMBOLS:
        text = text.replace(old, new)
    return text


def value_side(notation: str) -> str:
    """`5` for `x=5`, `f(2)=5` and `2+3=5`; `[1,2]` for `x\\in[1,2]`; other texts as they are."""
    if len(notation) > MAX_LENGTH:
        return notation
    text = _MEMBER_OF.sub("", notation)
    *left, right = (part.strip() for part in text.split("="))
    if left and right and all(map(_is_left_side, left)):
        text = right
    return _unwrapped(text.strip())


def _is_left_side(text: str) -> bool:
    """Whether a text before `=` only says what the value is of: names, one quantity, a calculation in numbers."""
    if any(text.count(opening) != text.count(closing) for opening, closing in ("()", "{}", "[]")):
        return False
    plain = _SUBSCRIPT.sub("", text)
    if not plain or _NAMES.fullmatch(plain) or not _ARITHMETIC.search(plain):
        return True
    return not _NO_CALCULATION.search(_OPERATION.sub(" ", _UNIT_WORD.sub("", plain)))


def _unwrapped(text: str) -> str:
    """`(A)` and `{5}` without their brackets; a list keeps them."""
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}") and _closes_at(text, 0) == len(text) - 1:
        if len(_split_top(text[1:-1])) > 1:
            break
        text = text[1:-1].strip()
    return text


def squeeze(cleaned: str) -> str:
    """An answer without blanks; words also in lower case."""
    squeezed = "".join(cleaned.split())
    return squeezed.casefold() if is_words(cleaned) else squeezed


def is_words(cleaned: str) -> bool:
    """Whether an answer is plain words, such as `no solution`; two letters may be a product."""
    return bool(_WORDS.fullmatch(cleaned) and _LONG_WORD.search(cleaned))


def read_number(cleaned: str) -> Fraction | None:
    """Value of an answer that is one number, with or without percent, scale word and unit; None for every other."""
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


def split_list(cleaned: str) -> AnswerList | None:
    """Brackets and items of a list of 2 to MAX_ITEMS items; None for every other answer."""
    text = cleaned.replace(r"\{", "{").replace(r"\}", "}")
    if text[:1] in _CLOSING and text[-1] in _CLOSING[text[0]] and _closes_at(text, 0) == len(text) - 1:
        opening, closing, items = text[0], text[-1], _split_top(text[1:-1])
    else:
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
        opening, closing, items = "", "", _split_top(text)
    if not 2 <= len(items) <= MAX_ITEMS:
        return None
    return opening, closing, [value_side(item) for item in items]


def to_expression(cleaned: str) -> str:
    """LaTeX for math-verify: without the unit behind it, and a percent sign written as a division."""
    text = _TRAILING_UNIT.sub("", cleaned)
    return rf"\frac{{{text[:-1]}}}{{100}}" if text.endswith("%") else text
