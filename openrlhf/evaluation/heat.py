"""One scored completion to look at: its tokens as text, colours of their scores, and its curve in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf.evaluation.filtering import filter_by_goal

# From low over the middle to high; orange and blue differ for any colour vision, dark text reads on all of them.
LOW_COLOR, MIDDLE_COLOR, HIGH_COLOR = (241, 163, 102), (246, 246, 243), (128, 185, 230)
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"


class Scale(NamedTuple):
    """Scores that get the end colours and the middle colour."""

    low: float
    middle: float
    high: float


def is_correct(row: Mapping[str, Any]) -> bool | None:
    """Label of a scored row, None where it has none."""
    label = row.get("is_correct")
    return None if label is None else bool(label)


def token_texts(row: Mapping[str, Any]) -> list[str] | None:
    """Text of each response token, "" for EOS and for tokens inside a character; None without `token_ends`.

    Raises:
        ValueError: `token_ends` does not fit `num_actions` or the solution.
    """
    ends = row.get("token_ends")
    if ends is None:
        return None
    text, ends = row["generated_solution"], [int(end) for end in ends]
    starts = [0, *ends][: len(ends)]
    if len(ends) != row["num_actions"]:
        raise ValueError(f"expected {row['num_actions']} token ends (num_actions), got {len(ends)}")
    if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > len(text)):
        raise ValueError(f"expected token ends that rise up to {len(text)}, the length of the solution, got {ends}")
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def cut_token(similarities: Sequence[float] | None, threshold: float | None, warmup_tokens: int = 0) -> int | None:
    """0-based token at which the goal filter stops a completion; None where it is kept or nothing is filtered."""
    if similarities is None or threshold is None or len(similarities) == 0:
        return None
    result = filter_by_goal(similarities, threshold, warmup_tokens)
    return None if result.kept else result.tokens_used - 1


def steepest_fall(values: Sequence[float] | None) -> float:
    """Largest fall of a curve from a value to a later one; 0 for a curve that never falls, or none."""
    if values is None or len(values) == 0:
        return 0.0
    values = np.asarray(values, np.float64)
    return float((np.maximum.accumulate(values) - values).max())


def token_scale(curves: Sequence[Sequence[float]]) -> Scale | None:
    """Second percentile, median and 98th percentile over all tokens; None without a token."""
    values = np.concatenate([np.asarray(curve, np.float64) for curve in curves]) if curves else np.zeros(0)
    return Scale(*(float(value) for value in np.percentile(values, [2, 50, 98]))) if len(values) else None


def score_color(value: float, scale: Scale) -> tuple[int, int, int]:
    """Red, green and blue (0 to 255) of a score: orange below the middle of the scale, blue above."""
    end, color = (scale.low, LOW_COLOR) if value < scale.middle else (scale.high, HIGH_COLOR)
    width = abs(end - scale.middle)
    share = min(abs(value - scale.middle) / width, 1.0) if width > 0 else 0.0
    return tuple(round(a + share * (b - a)) for a, b in zip(MIDDLE_COLOR, color, strict=True))


def color_tokens(
    texts: Sequence[str], scores: Sequence[float], scale: Scale, cut: int | None = None, true_color: bool = True
) -> str:
    """Tokens on coloured ground for a terminal; those behind the cut are struck through.

    Line ends stand behind a mark, since an empty line has no ground to colour; other control characters are replaced,
    so that a solution cannot steer the terminal.

    Args:
        texts, scores: of A tokens.
        cut: 0-based token at which the filter stops.
        true_color: 24-bit colours; False: the 6 x 6 x 6 cube of terminals with 256 colours.
    """
    parts = []
    for place, (text, score) in enumerate(zip(texts, scores, strict=True)):
        style = "\x1b[2;9m" if cut is not None and place > cut else _ground(score_color(score, scale), true_color)
        lines = plain_text(text).split("\n")
        for number, line in enumerate(lines):
            shown = line + "↵" * (number < len(lines) - 1)
            parts.append(f"{style}{shown}\x1b[0m" if shown else "")
            parts.append("\n" * (number < len(lines) - 1))
    return "".join(parts)


def _ground(color: tuple[int, int, int], true_color: bool) -> str:
    """Escape sequence of black text on this ground."""
    if true_color:
        return "\x1b[38;2;20;20;20;48;2;{};{};{}m".format(*color)
    red, green, blue = (round(part / 255 * 5) for part in color)
    return f"\x1b[38;5;16;48;5;{16 + 36 * red + 6 * green + blue}m"


def plain_text(text: str) -> str:
    """Text with every control character but tab and line end replaced by U+FFFD, half surrogate pairs too."""
    return "".join(letter if letter in "\n\t" or letter.isprintable() else "\ufffd" for letter in text)


def sparkline(values: Sequence[float], width: int = 72, bars: str = BARS) -> str:
    """A curve in one line of text: the lowest value of each part of it, from the lowest bar to the highest.

    Args:
        values: (A,) numbers; fewer than `width` take one letter each.
        bars: letters from low to high; ASCII_BARS for a terminal without the others.
    """
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        return ""
    lowest = np.array([part.min() for part in np.array_split(values, min(width, len(values)))])
    span = values.max() - values.min()
    levels = (lowest - values.min()) / span * (len(bars) - 1) if span > 0 else np.zeros(len(lowest))
    return "".join(bars[round(float(level))] for level in levels)
