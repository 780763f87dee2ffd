"""Pocket: a seeded generator of small multi-step arithmetic word problems with step-by-step solutions.

The embedded task of the project: it needs no download, its answers can be checked exactly, and a policy of less than a
million parameters can be trained on it. A problem is a short story about one running count, for instance

    Mia has 47 beads. She buys 6 boxes of 38. She loses 19. How many beads now?

with the solution (one equation per step, the answer in a box)

    6 * 38 = 228
    47 + 228 = 275
    275 - 19 = 256
    \\boxed{256}

Questions of different splits never meet: the SHA-256 of a question decides which split it may appear in.

    sft         the policy's own training, with as many steps as any other split
    train       preference pairs for the reward model
    validation  model selection
    test        as train
    ood         out of distribution for the reward model: more steps than train. The policy has met that many steps in
                sft, else it would never solve one and there would be no correct completion to tell from wrong ones.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

SPLITS = ("sft", "train", "validation", "test", "ood")
DEFAULT_LEVEL = 2
_BUCKETS = 10  # a question's hash modulo this decides its split
_SPLIT_BUCKETS = {"validation": {0}, "test": {1}, "ood": {2}, "train": {3, 4}, "sft": set(range(5, _BUCKETS))}
_OOD_SHARE = 0.3  # of the problems in sft; the others are as in train
_MAX_TRIES = 1_000  # consecutive rejected candidates before the level counts as exhausted


@dataclass(frozen=True)
class PocketProblem:
    """One word problem and its reference solution."""

    question: str
    solution: str  # one equation a line, last line "\\boxed{answer}"
    answer: str  # decimal integer, not negative
    steps: int  # equations in the solution


@dataclass(frozen=True)
class PocketLevel:
    """How hard the problems of one level are; every range is inclusive."""

    steps: tuple[int, int]  # equations per problem in train, validation, test and most of sft
    ood_steps: tuple[int, int]  # equations per problem in ood and the rest of sft, above `steps`
    number: tuple[int, int]  # starting counts and amounts that are added or taken away
    packs: tuple[int, int]  # how many packs are bought or sold (first factor of a product)
    pack_size: tuple[int, int]  # how many things are in one pack (second factor)
    max_count: int  # no running count or product exceeds this


LEVELS = {
    1: PocketLevel((2, 3), (4, 5), (2, 49), (2, 5), (2, 9), 199),
    2: PocketLevel((2, 4), (5, 6), (11, 99), (3, 19), (12, 99), 999),
    3: PocketLevel((2, 4), (5, 6), (11, 999), (3, 19), (12, 99), 9999),
    4: PocketLevel((3, 5), (6, 8), (101, 9999), (12, 99), (12, 99), 99999),
}

_NAMES = (
    ("Mia", "She"), ("Ana", "She"), ("Eva", "She"), ("Zoe", "She"), ("Ivy", "She"), ("Amy", "She"),
    ("Tom", "He"), ("Ben", "He"), ("Max", "He"), ("Leo", "He"), ("Sam", "He"), ("Dan", "He"),
)  # fmt: skip


@dataclass(frozen=True)
class _Theme:
    """The words of one kind of story; `{n}` is an amount, `{p}` packs of `{q}`."""

    things: tuple[str, ...]
    start: str
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    pack_gain: tuple[str, ...]
    pack_loss: tuple[str, ...]
    end: str


_THEMES = (
    _Theme(
        things=("beads", "cards", "coins", "shells", "stamps"),
        start="{name} has {n} {things}.",
        gain=("{pron} finds {n} more.", "{pron} gets {n} more."),
        loss=("{pron} loses {n}.", "{pron} gives away {n}."),
        pack_gain=("{pron} buys {p} boxes of {q}.", "{pron} gets {p} bags of {q}."),
        pack_loss=("{pron} sells {p} boxes of {q}.", "{pron} gives away {p} bags of {q}."),
        end="How many {things} now?",
    ),
    _Theme(
        things=("pens", "books", "lamps"),
        start="A shop has {n} {things}.",
        gain=("It orders {n} more.", "It gets {n} more."),
        loss=("It sells {n}.", "It returns {n}."),
        pack_gain=("It orders {p} boxes of {q}.", "It gets {p} bags of {q}."),
        pack_loss=("It sells {p} boxes of {q}.", "It returns {p} bags of {q}."),
        end="How many {things} are left?",
    ),
    _Theme(
        things=("dollars",),
        start="{name} has {n} dollars.",
        gain=("{pron} earns {n}.", "{pron} finds {n}."),
        loss=("{pron} spends {n}.", "{pron} pays {n}."),
        pack_gain=("{pron} earns {q} on each of {p} days.", "{pron} sells {p} toys at {q} each."),
        pack_loss=("{pron} spends {q} on each of {p} days.", "{pron} buys {p} toys at {q} each."),
        end="How many dollars are left?",
    ),
    _Theme(
        things=("apples", "plums", "pears"),
        start="{name} picks {n} {things}.",
        gain=("{pron} picks {n} more.", "{pron} finds {n} more."),
        loss=("{pron} eats {n}.", "{pron} drops {n}."),
        pack_gain=("{pron} fills {p} bags with {q} more each.", "{pron} gets {p} boxes of {q}."),
        pack_loss=("{pron} sells {p} bags of {q}.", "{pron} sends {p} boxes of {q}."),
        end="How many {things} are left?",
    ),
)  # fmt: skip


def generate_problems(split: str, n: int, seed: int = 0, level: int = DEFAULT_LEVEL) -> list[PocketProblem]:
    """Make the first `n` different problems of a split.

    Args:
        split: "sft", "train", "validation", "test" or "ood".
        n: how many; the first k problems of a longer list are the list of length k.
        seed: another seed gives other problems of the same split, never of another split.
        level: a key of LEVELS.
    Raises:
        ValueError: unknown split or level, negative n, or the level has fewer than n different questions.
    """
    if n < 0:
        raise ValueError(f"n must be 0 or more, got {n}")
    problems: list[PocketProblem] = []
    seen: set[str] = set()
    tries = 0
    for problem in _candidates(split, seed, level) if n else ():
        tries += 1
        if problem.question not in seen and split_allows(split, problem.question):
            seen.add(problem.question)
            problems.append(problem)
            tries = 0
        if len(problems) == n:
            break
        if tries > _MAX_TRIES:
            raise ValueError(
                f"pocket level {level} has no more new {split} questions after {len(problems)} of {n}; "
                "ask for fewer or pass a higher level"
            )
    return problems


def split_allows(split: str, question: str) -> bool:
    """Whether the hash of a question places it in this split."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % _BUCKETS
    return bucket in _SPLIT_BUCKETS[split]


def check_solution(text: str, answer: str) -> bool:
    """Whether the last complete `\\boxed{...}` of a solution holds exactly the integer `answer`."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return bool(boxes) and re.fullmatch(r"-?\d+", boxes[-1].strip()) is not None and int(boxes[-1]) == int(answer)


def _candidates(split: str, seed: int, level: int) -> Iterator[PocketProblem]:
    """Endless stream of problems of a level, before the split's hash is looked at."""
    if split not in SPLITS:
        raise ValueError(f"unknown pocket split {split!r}; expected one of {', '.join(SPLITS)}")
    if level not in LEVELS:
        raise ValueError(f"unknown pocket level {level!r}; expected one of {', '.join(map(str, LEVELS))}")
    rng = random.Random(f"pocket/{split}/{level}/{seed}")
    settings = LEVELS[level]
    while True:
        long = split == "ood" or (split == "sft" and rng.random() < _OOD_SHARE)
        low, high = settings.ood_steps if long else settings.steps
        yield _make_problem(rng, settings, rng.randint(low, high))


def _make_problem(rng: random.Random, level: PocketLevel, steps: int) -> PocketProblem:
    """One story of exactly `steps` equations."""
    theme = rng.choice(_THEMES)
    name, pron = rng.choice(_NAMES)
    things = rng.choice(theme.things)
    count = rng.randint(*level.number)
    story = [theme.start.format(name=name, n=count, things=things)]
    lines: list[str] = []
    while len(lines) < steps:
        room = steps - len(lines)
        event, amount, equations = _make_event(rng, theme, level, count, packs_fit=room >= 2)
        story.append(event.replace("{pron}", pron))
        lines += [*equations, f"{count} {'+' if amount > 0 else '-'} {abs(amount)} = {count + amount}"]
        count += amount
    story.append(theme.end.format(things=things))
    return PocketProblem(" ".join(story), "\n".join([*lines, f"\\boxed{{{count}}}"]), str(count), steps)


def _make_event(
    rng: random.Random, theme: _Theme, level: PocketLevel, count: int, packs_fit: bool
) -> tuple[str, int, list[str]]:
    """One event: its sentence, the signed change of the count, and the equations that give the amount."""
    while True:
        gain = rng.random() < 0.5
        if packs_fit and rng.random() < 0.5:
            packs, size = rng.randint(*level.packs), rng.randint(*level.pack_size)
            amount = packs * size
            sentence = rng.choice(theme.pack_gain if gain else theme.pack_loss)
            sentence = sentence.replace("{p}", str(packs)).replace("{q}", str(size))
            equations = [f"{packs} * {size} = {amount}"]
        else:
            amount = rng.randint(*level.number)
            sentence = rng.choice(theme.gain if gain else theme.loss).replace("{n}", str(amount))
            equations = []
        change = amount if gain else -amount
        if 0 <= count + change <= level.max_count and amount <= level.max_count:
            return sentence, change, equations
