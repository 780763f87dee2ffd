"""Step boundaries, stop strings, and the random numbers of responses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from decoding.boundary import StepBoundary, cut_at_stop
from decoding.streams import Stream

ROOT = Path(__file__).resolve().parents[2]


def steps(boundary: str, text: str) -> list[str]:
    """The steps of a text that grows letter by letter."""
    kind, found, step = StepBoundary.parse(boundary), [], ""
    for letter in text:
        step += letter
        if kind.reached(step, len(step)):
            found.append(step)
            step = ""
    return found + [step] * bool(step)


@pytest.mark.parametrize(
    "boundary, text, wanted",
    [
        ("newline", "a = 1\nb = 2\n", ["a = 1\n", "b = 2\n"]),
        ("newline", "\n\n a\n\nb", ["\n\n a\n", "\nb"]),  # blank lines belong to the step after them
        ("newline", "no end of line", ["no end of line"]),
        ("sentence", "One. Two! Three?", ["One.", " Two!", " Three?"]),
        ("sentence", "It is 3.14 m. Good", ["It is 3.14 m.", " Good"]),  # a decimal is no end
        ("sentence", "He has 5. So. No 5\n6", ["He has 5. So.", " No 5\n", "6"]),
        ("sentence", "1. Jan has 4\n2. Bo", ["1. Jan has 4\n", "2. Bo"]),  # nor is the number of an item
        ("sentence", "Wait... what\nnext", ["Wait.", ".. what\n", "next"]),  # a step holds a letter or digit
        ("sentence", "“好。”行", ["“好。", "”行"]),
        ("tokens:4", "abcdefghij", ["abcd", "efgh", "ij"]),
        ("text:ab", "xaabyab", ["xaab", "yab"]),
        ("text:\\n\\n", "\n\na\n\n", ["\n\na\n\n"]),
    ],
)
def test_steps_of_a_text(boundary, text, wanted):
    assert steps(boundary, text) == wanted


def test_a_boundary_may_lie_within_a_token():
    assert StepBoundary.parse("newline").reached("x = 1\ny", 3)
    assert StepBoundary.parse("sentence").reached("It is so!) The", 4)
    assert not StepBoundary.parse("sentence").reached("at x.org", 4)


@pytest.mark.parametrize("boundary", ["newline", "sentence", "text:ab\u3042", "text: "])
def test_only_a_token_with_one_of_the_characters_reaches_a_boundary(boundary):
    kind = StepBoundary.parse(boundary)
    letters = [*" \n\t\u00a0\u3042a1b.!?…。\"')]*_x", *["a", "b", "\u3042", "ab\u3042"] * 4]
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(3000):
        before, last = ("".join(rng.choice(letters, rng.integers(0, n))) for n in (6, 4))
        if kind.reached(before + last, 2) and not kind.reached(before, 1):
            reached += 1
            assert set(last) & set(kind.characters)
    assert reached > 20


@pytest.mark.parametrize(
    "value", ["", "line", "newline:", "tokens", "tokens:", "tokens:0", "tokens:-1", "tokens:x", "text:"]
)
def test_other_boundaries_are_refused(value):
    with pytest.raises(ValueError, match="expected one of newline, sentence, tokens:N, text:STRING"):
        StepBoundary.parse(value)


@pytest.mark.parametrize(
    "text, stops, wanted",
    [
        ("aaSTOPbbHALTcc", ["STOP", "HALT"], ("aa", True)),
        ("aaSTOPbbHALTcc", ["HALT", "STOP"], ("aa", True)),
        ("aaSTOPbbSTOPcc", ["STOP"], ("aa", True)),
        ("aaSTOPbb", ["", "STOP"], ("aa", True)),
        ("aabb", [""], ("aabb", False)),
        ("aabb", [], ("aabb", False)),
        ("xabcd", ["bc", "abcd", "abc"], ("x", True)),  # overlapping
        ("abab", ["bab", "aba"], ("", True)),
        ("aaSTO", ["STOP"], ("aaSTO", False)),
    ],
)
def test_a_text_is_cut_at_its_earliest_stop(text, stops, wanted):
    assert cut_at_stop(text, stops) == wanted


def test_a_stream_depends_on_its_key_and_the_place_only():
    forwards = [Stream(1, "q", 2).uniform(place) for place in range(200)]
    one = Stream(1, "q", 2)
    assert [one.uniform(place) for place in reversed(range(200))] == forwards[::-1]
    assert len(set(forwards)) == 200
    keys = [(1, "q", 2), ("1", "q", 2), (1, "q", "2"), (1, "q"), (2, "q", 1), (1, "q,2")]
    assert len({Stream(*key).uniform(0) for key in keys}) == len(keys)
    program = "import json\nfrom decoding.streams import Stream\ns = Stream(1, 'q', 2)\n"
    program += "print(json.dumps([s.uniform(i) for i in range(200)]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == forwards


def test_numbers_of_a_stream_are_uniform_and_streams_differ():
    """Mean 1/2, variance 1/12, no correlation between streams or places: 4 standard errors each."""
    numbers = np.array([[Stream(0, row).uniform(place) for place in range(128)] for row in range(100)])
    count = numbers.size
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * np.sqrt(1 / 12 / count)
    assert abs(numbers.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / count)
    for left, right in (
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1], numbers[1:]),
        (numbers[:, :64], numbers[:, 64:]),
    ):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / np.sqrt(left.size)
