"""K samples of many questions drawn in one batch, each with its own random stream; hopeless ones stop on the way.

A queue of questions fills the rows that become free. A sample is stopped at the first check at which the reward model
finds a goal similarity below the threshold; where no other sample of its question ends above it with an answer, the
stopped ones go on where they stopped, unjudged: the unfiltered vote counts then, as in
`openrlhf.evaluation.filtering`, and the question saves nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from decoding.records import Decoded, Question
from decoding.sampling import PolicySession
from decoding.scoring import PrefixScorer, RowText, TokenScores
from decoding.streams import Stream
from decoding.voting import DrawnSample, Grade, Pool, can_change, fewest_to_decide
from openrlhf.evaluation.ballots import group_answers
from openrlhf.evaluation.decimals import shortest_decimals
from openrlhf.evaluation.filtering import check_filter


@dataclass(frozen=True)
class PoolSettings:
    """How pools are drawn; a question's samples do not depend on `check_every` and `batch_rows`."""

    samples: int  # K, samples of a question
    threshold: float | None = None  # goal similarity below which a sample stops; None: none does
    warmup_tokens: int = 0  # tokens of the reward model at the start of a response that are never judged
    check_every: int = 16  # policy tokens between two checks, and between two fillings of free rows
    stop_when_decided: bool = False  # begin no more samples than may decide the vote, and stop when it is decided
    batch_rows: int = 64  # samples that grow at the same time

    def __post_init__(self) -> None:
        check_filter(self.threshold, self.warmup_tokens)
        for name in ("samples", "check_every", "batch_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of 1 or more, got {getattr(self, name)}")


@dataclass
class _Sample:
    """A sample while it grows."""

    question: int  # place among the questions
    number: int
    stream: Stream
    ids: list[int] = field(default_factory=list)
    text: str = ""
    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # by token of the reward model
    similarities: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    reward_tokens: int = 0
    end: str = ""  # "": it grows or waits
    below: int | None = None
    graded: tuple[str | None, bool | None] = (None, None)

    @property
    def whole(self) -> bool:
        """Whether it came to its own end."""
        return self.end in ("finished", "length")

    def read(self, scores: TokenScores, threshold: float | None, warmup_tokens: int) -> None:
        """Take the scores of new tokens in, and judge them."""
        if not (np.isfinite(scores.values).all() and np.isfinite(scores.similarities).all()):
            raise ValueError(
                f"sample {self.number}: the reward model gives a score that is not finite; check its dtype"
            )
        self.values = np.concatenate([self.values[: scores.start], scores.values])
        self.reward_tokens += len(scores.values)
        if not scores.similarities.shape[1]:
            return
        self.similarities = np.concatenate([self.similarities[: scores.start], scores.similarities[:, 0]])
        if threshold is not None and self.below is None:
            first = max(scores.start, warmup_tokens)
            low = np.flatnonzero(self.similarities[first:] < np.float32(threshold))
            self.below = first + int(low[0]) if len(low) else None

    def drawn(self) -> DrawnSample:
        """The sample as it ended."""
        partial = shortest_decimals(self.values).tolist() if len(self.values) else None
        response = Decoded(
            text=self.text,
            ids=tuple(self.ids),
            finished=self.end == "finished",
            sample=self.number,
            reward=partial[-1] if partial and self.whole else None,
            partial_rewards=partial,
            cosine_sim=shortest_decimals(self.similarities).tolist() if len(self.similarities) else None,
        )
        return DrawnSample(response, *self.graded, self.end, self.below, self.reward_tokens)


class _Board:
    """The samples of one question."""

    def __init__(self, place: int, index: int, count: int, seed: int) -> None:
        self.place = place
        self.samples = [_Sample(place, number, Stream(seed, index, number)) for number in range(count)]
        self.held = list(self.samples)  # of those without an end, the ones that neither grow nor wait for a row
        self.fallback = False
        self.seconds = self.reward_seconds = 0.0

    @property
    def is_open(self) -> bool:
        return any(not one.end for one in self.samples)

    def end_if_decided(self) -> None:
        """Stop the open samples if they cannot change the vote."""
        if not can_change(np.bincount(self._votes()), self._open):
            self.held = []
            for one in self.samples:
                one.end = one.end or "decided"

    def fall_back_if_needed(self, growing: Sequence[_Sample]) -> None:
        """Take stopped samples up again: something was dropped and nothing kept has an answer.

        Args:
            growing: samples that have rows; those that were stopped just now still have theirs, and go on in them.
        """
        if self.is_open or self.fallback or len(self._votes()) or all(one.below is None for one in self.samples):
            return
        self.fallback = True
        rows = {id(one) for one in growing}
        for one in self.samples:
            if one.end == "goal":
                one.end = ""
                self.held += [] if id(one) in rows else [one]

    def release(self, sparing: bool) -> list[_Sample]:
        """Held samples that shall grow now.

        Args:
            sparing: none while others grow, then the fewest that may decide the vote; False: all.
        """
        count = len(self.held)
        if sparing and count:
            count = fewest_to_decide(np.bincount(self._votes()), self._open) if count == self._open else 0
        released, self.held = self.held[:count], self.held[count:]
        return released

    @property
    def _open(self) -> int:
        return sum(not one.end for one in self.samples)

    def _votes(self) -> np.ndarray:
        """Groups of the answers of the samples that may vote; in a fallback all may."""
        voters = [one for one in self.samples if one.whole and (self.fallback or one.below is None)]
        groups, _ = group_answers([one.graded[0] for one in voters])
        return groups[groups >= 0]

    def pool(self, question: Question) -> Pool:
        """What came out."""
        samples = [one.drawn() for one in self.samples]
        return Pool(question, samples, self.fallback, self.seconds, self.reward_seconds)


def draw_pools(
    questions: Sequence[Question],
    prompts: Sequence[Sequence[int]],
    open_policy: Callable[[list], PolicySession],
    open_scorer: Callable[[list], PrefixScorer] | None,
    grade: Grade,
    settings: PoolSettings,
    seed: int,
) -> Iterator[Pool]:
    """Draw the pools of questions, each as soon as it is done; see the module.

    Args:
        questions: with different indices; a sample's stream depends on the seed, the index and its number only.
        prompts: token ids of each question's policy prompt.
        open_policy, open_scorer: give a session and a scorer of these prompts, none at the start; the scorer has the
            filter's goal first. None: nothing is scored.
        grade: gives the answers that are counted.
    Raises:
        ValueError: a threshold without a scorer, or a score that is not finite.
    """
    if settings.threshold is not None and open_scorer is None:
        raise ValueError("a goal similarity threshold needs a reward model and a goal state")
    scorer = None if open_scorer is None else open_scorer([])
    batch = _Batch(questions, prompts, open_policy([]), scorer, grade, settings, seed)
    while batch.fill():
        yield from batch.advance()


class _Batch:
    """The rows that grow at the moment, and the samples that wait for one."""

    def __init__(
        self,
        questions: Sequence[Question],
        prompts: Sequence[Sequence[int]],
        policy: PolicySession,
        scorer: PrefixScorer | None,
        grade: Grade,
        settings: PoolSettings,
        seed: int,
    ) -> None:
        self.questions, self.prompts, self.grade = questions, prompts, grade
        self.policy, self.scorer = policy, scorer
        self.settings = settings
        self.boards = [
            _Board(place, question.index, settings.samples, seed) for place, question in enumerate(questions)
        ]
        self.waiting = deque(board.release(settings.stop_when_decided) for board in self.boards)
        self.rows: list[_Sample] = []  # row i of the session and of the scorer
        self.seconds = self.reward_seconds = 0.0  # of this round

    def fill(self) -> bool:
        """Put waiting samples into free rows, those of a question together, so that its prompt is read once.

        Returns:
            Whether there is any row.
        """
        self.seconds, self.reward_seconds = -time.perf_counter(), 0.0
        fresh: list[_Sample] = []
        while self.waiting:
            group = [one for one in self.waiting.popleft() if not one.end]
            free = self.settings.batch_rows - len(self.rows) - len(fresh)
            if free < 1 or free < len(group) <= self.settings.batch_rows:
                self.waiting.appendleft(group)
                break
            fresh += group[:free]
            if group[free:]:
                self.waiting.appendleft(group[free:])
        if fresh:
            self.policy.add([self.prompts[one.question] for one in fresh], [one.ids for one in fresh])
            self.rows += fresh
            if self.scorer is not None:
                with self._reward_time():
                    self.scorer.add([self.questions[one.question].reward_prompt for one in fresh])
        return bool(self.rows)

    def advance(self) -> list[Pool]:
        """Draw and judge up to the next check; returns the pools that are done."""
        self._grow()
        if self.scorer is not None:
            with self._reward_time():
                self._score()
        for one in self.rows:
            if one.below is not None and not one.end and not self.boards[one.question].fallback:
                one.end = "goal"
        touched = [self.boards[place] for place in sorted({one.question for one in self.rows})]
        for board in touched:
            self._decide(board)
        rows = self.rows
        self._let_go()
        self.seconds += time.perf_counter()
        for one in rows:
            self.boards[one.question].seconds += self.seconds / len(rows)
            self.boards[one.question].reward_seconds += self.reward_seconds / len(rows)
        return [board.pool(self.questions[board.place]) for board in touched if not board.is_open]

    @contextmanager
    def _reward_time(self) -> Iterator[None]:
        self.reward_seconds -= time.perf_counter()
        yield
        self.reward_seconds += time.perf_counter()

    def _grow(self) -> None:
        """Draw up to the next check, and score."""
        streams = [one.stream for one in self.rows]
        for row, piece in enumerate(self.policy.draw(streams, None, self.settings.check_every)):
            sample = self.rows[row]
            sample.ids = list(self.policy.ids[row])
            if piece.ended:
                sample.end = "length" if piece.ended == "length" else "finished"
                sample.text = self.policy.text(row)
                sample.graded = self.grade(self.questions[sample.question], sample.text)

    def _score(self) -> None:
        """Read the new tokens; without a threshold whole responses only, since nothing depends on the score before."""
        settings = self.settings
        rows = [row for row, one in enumerate(self.rows) if one.whole or settings.threshold is not None]
        texts = [RowText(self.rows[row].ids, self.policy.text(row), self.rows[row].whole) for row in rows]
        for row, scores in zip(rows, self.scorer.extend(texts, rows) if rows else (), strict=True):
            self.rows[row].read(scores, settings.threshold, settings.warmup_tokens)

    def _decide(self, board: _Board) -> None:
        """Stop what cannot matter, take up what was stopped too much, and begin what may decide the vote."""
        sparing = self.settings.stop_when_decided
        if sparing and board.is_open:
            board.end_if_decided()
        board.fall_back_if_needed(self.rows)
        released = board.release(sparing)
        if released:
            self.waiting.appendleft(released)

    def _let_go(self) -> None:
        """Free the rows of samples that ended."""
        for row, one in enumerate(self.rows):
            if one.end and not one.whole:
                one.text = self.policy.text(row)
        rows = [row for row, one in enumerate(self.rows) if not one.end]
        if len(rows) < len(self.rows):
            self.rows = [self.rows[row] for row in rows]
            self.policy.select(rows)
            if self.scorer is not None:
                self.scorer.select(rows)
