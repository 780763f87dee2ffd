"""What steers a beam search: goal similarity, reward, a self-evaluation or chance, of every step that was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from decoding.beam import sigmoid, step_similarity, weighted_mean
from decoding.guided_settings import Guidance
from decoding.scoring import PrefixScorer, RowText, TokenScores
from decoding.self_evaluation import SelfEvaluation
from decoding.streams import Stream


@dataclass(frozen=True)
class Drawn:
    """A step that the policy drew, with all that came before it."""

    question: int
    parent: int  # row of the response before the step, in the rows of the last call; a question's number at first
    rank: int  # of the beam
    sample: int  # of its continuations
    ids: tuple[int, ...]  # of the whole response
    text: str  # of the whole response
    final: bool  # nothing follows


@dataclass(frozen=True)
class Verdict:
    """What guides at one step."""

    guidance: float | None = None  # None: nothing does
    parts: dict[str, float] = field(default_factory=dict)  # of weight other than 0
    similarities: list[float] = field(default_factory=list)  # of the step with each goal, whatever its weight
    scores: TokenScores | None = None  # of the whole response so far; None without a reward model
    tokens: int = 0  # run through a model for it; 0 where an equal step had been read


class Judge:
    """Judges the steps of rows that grow; equal steps of one row are read once.

    Args:
        indexes: of the questions, the keys of their random numbers.
        scorer, evaluation: with one row a question, or None where not needed.
    """

    def __init__(
        self,
        guidance: Guidance,
        indexes: Sequence[int],
        seed: int,
        scorer: PrefixScorer | None = None,
        evaluation: SelfEvaluation | None = None,
    ) -> None:
        self._guidance, self._indexes, self._seed = guidance, indexes, seed
        self._scorer, self._evaluation = scorer, evaluation
        self._places = list(range(len(indexes)))  # the readers' row of every row of the last call

    def read(self, step: int, drawn: Sequence[Drawn]) -> list[Verdict]:
        """Verdicts of N steps, in order; they are the rows that the next call's parents count."""
        distinct: dict[tuple[int, tuple[int, ...], bool], int] = {}
        places = [distinct.setdefault((self._places[one.parent], one.ids, one.final), len(distinct)) for one in drawn]
        parents = [parent for parent, _, _ in distinct]
        firsts = [places.index(place) for place in range(len(distinct))]
        rows = [drawn[first] for first in firsts]
        verdicts = [Verdict() for _ in rows]
        if self._scorer is not None:
            verdicts = self._score(parents, rows)
        if self._evaluation is not None:
            self._evaluation.select(parents)
            told = zip(verdicts, *self._evaluation.extend([one.ids for one in rows]), strict=True)
            verdicts = [
                replace(one, parts=one.parts | {"self_evaluation": share}, tokens=one.tokens + tokens)
                for one, share, tokens in told
            ]
        if self._guidance.random:
            verdicts = [
                replace(one, parts=one.parts | {"random": self._random(step, row)})
                for one, row in zip(verdicts, rows, strict=True)
            ]
        self._places = places
        weighed = [replace(one, guidance=self._weigh(one.parts)) for one in verdicts]
        return [
            weighed[place] if firsts[place] == number else replace(weighed[place], tokens=0)
            for number, place in enumerate(places)
        ]

    def _score(self, parents: Sequence[int], rows: Sequence[Drawn]) -> list[Verdict]:
        """Goal similarity and reward of distinct steps; 0 while the reward model has read no token of a response."""
        self._scorer.select(parents)
        before = [len(self._scorer.scores(row).values) for row in range(len(rows))]
        told = self._scorer.extend([RowText(one.ids, one.text, one.final) for one in rows])
        guidance, verdicts = self._guidance, []
        for row, (start, new) in enumerate(zip(before, told, strict=True)):
            whole = self._scorer.scores(row)
            # The step's own tokens. One at least: a step may do no more than change the text of the last token.
            own = slice(max(0, min(start, len(whole.values) - 1)), None)
            values, cosines = whole.values[own], whole.similarities[own]
            if not len(values):
                values, cosines = np.zeros(1), np.zeros((1, cosines.shape[1]))
            similarities = [step_similarity(column[:, None], (1.0,), guidance.reduction) for column in cosines.T]
            parts = {}
            if guidance.goal:
                parts["goal"] = step_similarity(cosines, guidance.goal_weights, guidance.reduction)
            if guidance.reward:
                parts["reward"] = sigmoid(float(values[-1]))
            verdicts.append(Verdict(None, parts, similarities, whole, len(new.values)))
        return verdicts

    def _random(self, step: int, row: Drawn) -> float:
        stream = Stream(self._seed, "guidance", self._indexes[row.question], step, row.rank, row.sample)
        return stream.uniform(0)

    def _weigh(self, parts: dict[str, float]) -> float | None:
        weights = [self._guidance.weights[name] for name in parts]
        return weighted_mean(list(parts.values()), weights) if parts else None
