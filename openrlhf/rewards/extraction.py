r"""Find the final answer in the text of a solution.

Rules, first one that finds something:
    1. the last complete, non-empty \boxed{...} or \fbox{...}, or the last "answer" field of a JSON object, valid or not
       (`{"reasoning": ..., "answer": "18"}`); of both, the later one.
    2. the last number, with its minus sign, percent sign and scale word, without currency and thousands separators;
       `\frac{3}{7}`, `3/7` and `2 1/2` are numbers, the 2 of `7 cm^2` is none.
    3. None.
A box or field that the end of the text cuts off holds no answer: rule 2 reads only what stands before it.
"""

from __future__ import annotations

import re
from collections import deque

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text
_BARE_BOX = re.compile(r"[^\s{}$]+")

_FIELD = re.compile(r"\"(?:final_?)?answer\"[ \t]*:[ \t]*", re.IGNORECASE)
_STRING = re.compile(r'"((?:[^"\\]|\\.){0,1000})"', re.DOTALL)
_BARE_VALUE = re.compile(r"([^\s,\"{}][^\n\"{}]{0,1000})[}\n\"]")
# Only what JSON alone means: `\frac` and `\times` of careless writers stay LaTeX, though JSON reads \f and \t in them.
_JSON_ESCAPE = re.compile(r'\\(?:(["\\/])|u(?![dD][89a-fA-F])([0-9a-fA-F]{4})|[nrt](?![A-Za-z]))')

_NUMBER = re.compile(
    r"[A-Za-z}]\^\{?-?\d+|"  # the 2 of `7 cm^2` belongs to the unit; passed over
    r"(?P<sign>(?<![\w)\]}])[-\u2212])?(?:\\?[$\u20ac\u00a3\u00a5\u20b9])?"
    r"(?P<number>(?:\d{1,9} ?)?\\[dtc]?frac\{ ?-?\d+ ?\}\{ ?\d+ ?\}"
    r"|\d{1,9} \d{1,3}/\d{1,3}(?![\d/])"
    r"|(?:(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}\b)?|(?<![\w.])\.\d+)(?:/\d+)?)"
    r"(?: ?(?P<percent>\\?%|per\s?cent\b)| (?P<scale>(?:hundred|thousand|[mb]illion|trillion)\b))?"
)


def extract_boxed_answer(text: str | None) -> str | None:
    r"""Content of the last complete, non-empty \boxed{...} or \fbox{...}; also `\boxed 9`.

    Braces are balanced; escaped braces are text.

    Returns:
        The stripped content, or None when there is no complete box.
    """
    return None if text is None else _last_box(text, _brace_ends(text))[1]


def extract_answer(text: str | None) -> str | None:
    r"""Final answer of a solution by the rules of this module: a box or answer field, else the last number, else None.

    Examples: `... $1,234.50.` -> `1234.50`, `... by 35 percent` -> `35%`, `..., "answer": "1.5 hours"}` -> `1.5 hours`,
    `so 12. \boxed{\frac{3}{` -> `12`.
    """
    if text is None:
        return None
    ends = _brace_ends(text)
    box_start, boxed = _last_box(text, ends)
    field_end, field, cut_field = _last_field(text)
    if field is not None and box_start < field_end:
        return extract_boxed_answer(field) or field
    if boxed is not None:
        return boxed
    return _last_number(text[: min(_first_open_box(text, ends), cut_field)])


def _last_number(text: str) -> str | None:
    last = next(iter(deque((match for match in _NUMBER.finditer(text) if match["number"]), maxlen=1)), None)
    if last is None:
        return None
    number = ("-" if last["sign"] else "") + last["number"].replace("{,}", "").replace(",", "")
    return number + ("%" if last["percent"] else f" {last['scale']}" if last["scale"] else "")


def _last_box(text: str, ends: dict[int, int]) -> tuple[int, str | None]:
    """(start, content) of the last complete, non-empty box."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start in ends:
            content = text[start + 1 : ends[start]].strip()
        else:
            bare = _BARE_BOX.match(text, start)  # does not match an opening brace that is never closed
            content = bare.group().rstrip(".,;:") if bare else ""
        if content:
            return match.start(), content
    return -1, None


def _first_open_box(text: str, ends: dict[int, int]) -> int:
    """Where the first box starts whose brace is never closed; the length of the text when there is none."""
    opened = (m.start() for m in _BOX.finditer(text) if text[m.end() : m.end() + 1] == "{" and m.end() not in ends)
    return next(opened, len(text))


def _last_field(text: str) -> tuple[int, str | None, int]:
    """(end, value) of the last "answer" field of a JSON object, and where a field starts whose value is cut off."""
    cut, opened = len(text), text.find("{")
    keys = [key for key in _FIELD.finditer(text) if key.start() > opened] if opened >= 0 else []
    for key in reversed(keys):
        string = _STRING.match(text, key.end())
        value = string or _BARE_VALUE.match(text, key.end())
        if value is None:
            cut = key.start()
            continue
        content = _JSON_ESCAPE.sub(_unescape, value[1]).strip() if string else value[1].strip().rstrip(",").rstrip()
        if content and (string or content != "null"):
            return value.end(), content, cut
    return -1, None, cut


def _unescape(match: re.Match[str]) -> str:
    return match[1] or (chr(int(match[2], 16)) if match[2] else " ")


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
