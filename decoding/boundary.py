"""Where a step of a response ends, and where a stop string ends the response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("newline", "sentence", "tokens:N", "text:STRING")
_CLOSING = re.escape("\"'”’)]*_")
# A full stop behind a digit may stand in a decimal or behind the number of a list's item: it ends no sentence.
_SENTENCE_END = re.compile(rf"\w.*?(?:(?:(?<!\d)\.|[!?…])[{_CLOSING}]*(?:$|\s)|[。！？\n])", re.DOTALL)


@dataclass(frozen=True)
class StepBoundary:
    """What ends a step of a response; it belongs to the step that it ends.

    newline: a line end behind some text, so blank lines belong to the step after them. sentence: a full stop, question
    or exclamation mark with what closes it, or a line end, behind a letter or digit; a full stop right behind a digit
    is none. tokens: so many tokens. text: a string; a blank one is no end of blanks alone.
    """

    kind: str  # newline, sentence, tokens or text
    text: str = ""  # of kind text
    tokens: int = 0  # of kind tokens

    def __post_init__(self) -> None:
        given = {"tokens": self.tokens > 0, "text": bool(self.text)}.get(
            self.kind, self.kind in ("newline", "sentence")
        )
        if not given:
            raise ValueError(f"step boundary: expected one of {', '.join(KINDS)}, got {self}")

    @classmethod
    def parse(cls, value: str) -> StepBoundary:
        r"""Read a boundary as flags name it: "newline", "sentence", "tokens:32" or "text:STRING" (\n is a line end).

        Raises:
            ValueError: none of these.
        """
        kind, colon, rest = value.partition(":")
        if kind in ("newline", "sentence") and not colon:
            return cls(kind)
        if kind == "tokens" and rest.isascii() and rest.isdigit():
            return cls(kind, tokens=int(rest))
        if kind == "text":
            return cls(kind, text=rest.replace("\\n", "\n").replace("\\t", "\t"))
        raise ValueError(f"step boundary: expected one of {', '.join(KINDS)}, got {value!r}")

    def reached(self, step_text: str, step_tokens: int) -> bool:
        """Whether a step of this text and so many tokens is over."""
        if self.kind == "tokens":
            return step_tokens >= self.tokens
        if self.kind == "sentence":
            return _SENTENCE_END.search(step_text) is not None
        return self._string in (step_text if self._string.strip() else step_text.lstrip())

    @property
    def _string(self) -> str:
        return "\n" if self.kind == "newline" else self.text

    @property
    def characters(self) -> str:
        """A token whose text holds none of these cannot be the one with which a text reaches the boundary."""
        if self.kind == "sentence":
            return ".!?…。！？\n"
        return self._string[-1:]


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the earliest stop string, whatever their order, and whether there is one; "" is no stop."""
    found = [place for place in (text.find(stop) for stop in stops if stop) if place >= 0]
    return (text[: min(found)], True) if found else (text, False)
