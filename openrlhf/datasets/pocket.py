"""Pocket, the embedded task: seeded multi-step arithmetic word problems with step-by-step solutions.

The embedded task of the project: it needs no download, its answers can be checked exactly, and a policy of less than a
million parameters can be trained on it. A problem is a short story about one running count, for instance

    Mia has 47 beads. She buys 6 boxes of 12. She loses 19. How many beads now?

with the solution (one equation per step, the answer in a box)

    6 * 12 = 72
    47 + 72 = 119
    119 - 19 = 100
    \\boxed{100}

Questions of different splits never meet: the SHA-256 of a question decides which split it may appear in.

    sft         demonstrations for the policy: as many steps as any other split, and solutions with slips (see SLIPS)
    train       preference pairs for the reward model
    validation  model selection
    test        as train
    ood         out of distribution for the reward model: more steps than train. The policy has met that many steps in
                sft, else it would never solve one and there would be no right completion to tell from wrong ones.

Demonstrations slip so that a policy trained to convergence still fails at nearly half of the problems when it samples
at temperature 1, in ways that a reader of question and solution can find: it has learnt how often people slip.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

SPLITS = ("sft", "train", "validation", "test", "ood")
DEFAULT_LEVEL = 2
_BUCKETS = 10  # a question's hash modulo this decides its split
_SPLIT_BUCKETS = {"validation": {0}, "test": {1}, "ood": {2}, "train": {3, 4}, "sft": set(range(5, _BUCKETS))}
_OOD_SHARE = 0.3  # of the problems in sft; the others are as in train
# Chance per event of each slip in the solutions of sft: wrong operation, misread number, wrong result, forgotten event.
SLIPS = {"sign": 0.08, "copy": 0.06, "sum": 0.05, "skip": 0.05}
_MAX_TRIES = 1_000  # consecutive rejected candidates before the level counts as exhausted


@dataclass(frozen=True)
class PocketProblem:
    """One word problem and its reference solution."""

    question: str
    solution: str  # one equation a line, last line "\\boxed{...}"; right except for slips in sft
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
    1: PocketLevel((2, 3), (4, 5), (2, 12), (2, 4), (2, 6), 60),
    2: PocketLevel((2, 4), (5, 6), (2, 20), (2, 5), (2, 9), 99),
    3: PocketLevel((4, 5), (6, 6), (2, 20), (2, 5), (2, 9), 99),
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
        yield _make_problem(rng, settings, rng.randint(low, high), careless=split == "sft")


@dataclass(frozen=True)
class _Event:
    """One sentence of a story and what it does to the count."""

    sentence: str
    sign: int  # 1 adds, -1 takes away
    packs: int  # 0: a plain amount
    size: int  # the amount, or what one pack holds


def _make_problem(rng: random.Random, level: PocketLevel, steps: int, careless: bool) -> PocketProblem:
    """One story whose right solution has exactly `steps` equations."""
    theme = rng.choice(_THEMES)
    name, pron = rng.choice(_NAMES)
    things = rng.choice(theme.things)
    start = rng.randint(*level.number)
    events: list[_Event] = []
    lines, count = [], start
    while len(lines) < steps:
        event = _make_event(rng, theme, level, packs_fit=steps - len(lines) >= 2)
        equations, after = _work(event, count)
        if 0 <= after <= level.max_count:
            events.append(event)
            lines, count = lines + equations, after
    sentences = [theme.start.format(name=name, n=start, things=things)]
    sentences += [event.sentence.replace("{pron}", pron) for event in events]
    question = " ".join([*sentences, theme.end.format(things=things)])
    written, result = _work_carelessly(rng, level, events, start) if careless else (lines, count)
    return PocketProblem(question, "\n".join([*written, f"\\boxed{{{result}}}"]), str(count), steps)


def _make_event(rng: random.Random, theme: _Theme, level: PocketLevel, packs_fit: bool) -> _Event:
    gain = rng.random() < 0.5
    if packs_fit and rng.random() < 0.4:
        packs, size = rng.randint(*level.packs), rng.randint(*level.pack_size)
        sentence = rng.choice(theme.pack_gain if gain else theme.pack_loss)
        return _Event(sentence.replace("{p}", str(packs)).replace("{q}", str(size)), 1 if gain else -1, packs, size)
    amount = rng.randint(*level.number)
    sentence = rng.choice(theme.gain if gain else theme.loss).replace("{n}", str(amount))
    return _Event(sentence, 1 if gain else -1, 0, amount)


def _work(event: _Event, count: int, error: int = 0) -> tuple[list[str], int]:
    """Equations of an event and the count after it; `error` is added to the last result."""
    amount = event.packs * event.size if event.packs else event.size
    after = count + event.sign * amount + error
    equations = [f"{event.packs} * {event.size} = {amount}"] if event.packs else []
    return [*equations, f"{count} {'+' if event.sign > 0 else '-'} {amount} = {after}"], after


def _work_carelessly(rng: random.Random, level: PocketLevel, events: list[_Event], start: int) -> tuple[list[str], int]:
    """The solution of someone who slips now and then and goes on with the wrong number.

    Slips after which a count leaves the level's range would be noticed: then the problem is worked again.
    """
    while True:
        lines, count = [], start
        for event, slip in zip(events, _draw_slips(rng, len(events)), strict=True):
            if slip == "skip":
                continue
            error = 0
            if slip == "sign":
                event = replace(event, sign=-event.sign)
            elif slip == "copy":
                event = replace(event, size=rng.randint(*(level.pack_size if event.packs else level.number)))
            elif slip == "sum":
                error = rng.choice((-10, -1, 1, 10))
            equations, count = _work(event, count, error)
            lines += equations
            if not 0 <= count <= level.max_count:
                break
        else:
            return lines, count


def _draw_slips(rng: random.Random, n: int) -> list[str]:
    """One of SLIPS or "none" for each of `n` events; never all of them skipped."""
    while True:
        slips = rng.choices(("none", *SLIPS), (1 - sum(SLIPS.values()), *SLIPS.values()), k=n)
        if any(slip != "skip" for slip in slips):
            return slips
