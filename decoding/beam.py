"""Step beam search in plain numbers: scores of steps, selection, and the search over many questions in lockstep.

A step is what a response grows by at once, up to a boundary such as the end of a line. Nothing here knows of models:
candidates come from a callable, random numbers are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

ACCUMULATE = ("mean", "last")
REDUCTIONS = ("min", "mean", "last")
CUT = "length"  # the end of a response that a limit of tokens cut off; any other end is a finished response
Fate = Literal["kept", "finished", "cut", "merged", "rejected", "dropped"]


@dataclass(frozen=True)
class BeamSettings:
    """How candidates are scored and which are kept.

    Raises:
        ValueError: a value outside its range, with the name of the field.
    """

    beam_size: int = 4  # candidates kept at a step, and finished responses at most
    conf_ratio: float = 0.5  # weight of the guidance in the score of a step; the rest is the log-probability's
    accumulate: str = "mean"  # a beam's score: the mean over its steps, or its last step's
    temperature: float = 0.0  # of the selection, in units of the score; 0 keeps the best
    temperature_decay: float = -1.0  # factor on the temperature a step; -1 and 1: none
    reject_sample: bool = False  # drop candidates whose guidance is below min_score, unless all are
    min_score: float = 0.0
    unbiased: bool = False  # candidates are draws from the language model already: score by the guidance alone
    max_steps: int = 32

    def __post_init__(self) -> None:
        for name in ("beam_size", "max_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.conf_ratio <= 1:
            raise ValueError(f"conf_ratio: expected a share from 0 to 1, got {self.conf_ratio}")
        if self.accumulate not in ACCUMULATE:
            raise ValueError(f"accumulate: expected one of {ACCUMULATE}, got {self.accumulate!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature of the selection: expected 0 or more, got {self.temperature}")
        if self.temperature_decay != -1 and not 0 < self.temperature_decay <= 1:
            raise ValueError(f"temperature_decay: expected -1 (none) or from (0, 1], got {self.temperature_decay}")
        if not math.isfinite(self.min_score):
            raise ValueError(f"min_score: expected a number, got {self.min_score}")

    def temperature_at(self, step: int) -> float:
        """Temperature of the selection at a step, counted from 0: temperature * decay ** step."""
        return self.temperature * (1.0 if self.temperature_decay == -1 else self.temperature_decay**step)


@dataclass(frozen=True)
class Candidate:
    """One step drawn from a beam."""

    parent: int  # place of its beam among the open ones of its question
    sample: int  # its number among the steps drawn from that beam
    key: Hashable  # the whole response; equal keys are duplicates
    logprob: float  # mean over the tokens of the step, nats; -inf for a step without a token
    guidance: float | None = None  # larger is better; None: nothing guides
    ended: str = ""  # "": the response goes on; CUT: cut off; else finished


@dataclass(frozen=True)
class Beam:
    """A response after some steps; before the first one it has no candidate."""

    place: int = 0  # of its candidate in the list of the step
    candidate: Candidate | None = None
    step_scores: tuple[float, ...] = ()
    score: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the response came to an end of its own, not to a limit."""
        return self.candidate is not None and self.candidate.ended not in ("", CUT)


@dataclass(frozen=True)
class Selection:
    """What became of the candidates of one question at one step."""

    kept: list[int]  # places of the chosen ones, best score first; ended ones too
    fates: list[Fate]  # one a candidate
    stand_ins: list[int]  # the candidate that stands for each: itself, or the duplicate it was merged into
    step_scores: list[float]
    scores: list[float]  # of the beam that the candidate ends


@dataclass
class Progress:
    """Where the search of one question stands."""

    open: list[Beam] = field(default_factory=lambda: [Beam()])  # best first
    finished: dict[Hashable, Beam] = field(default_factory=dict)  # by key; never extended
    cut: list[Beam] = field(default_factory=list)  # ended by a limit of tokens; never extended

    def results(self, beam_size: int) -> list[Beam]:
        """At most `beam_size` finished beams, best first; the best unfinished one where nothing has finished."""
        if self.finished:
            return sorted(self.finished.values(), key=lambda beam: -beam.score)[:beam_size]
        return sorted(self.cut + self.open, key=lambda beam: -beam.score)[:1]


Extend = Callable[[int, dict[int, list[Beam]]], dict[int, list[Candidate]]]


def search(
    names: Sequence[str],
    extend: Extend,
    settings: BeamSettings,
    uniform: Callable[[int, int, Candidate], float] | None = None,
    on_step: Callable[[int, int, list[Candidate], Selection], None] | None = None,
) -> list[list[Beam]]:
    """Step beam search of several questions, a step of all of them at a time.

    The search of a question ends when `beam_size` beams have finished, when none is open, or after `max_steps`. That
    no open beam could still overtake is not asked for: a mean over steps can rise with every step.

    Args:
        names: of the questions, for errors.
        extend: gets the step, from 0, and the open beams of every question that goes on, by its number; returns the
            candidates of each. Finished beams are never passed to it.
        uniform: number in [0, 1) for a question, step and candidate; needed where the temperature is above 0.
        on_step: told of every question, step, its candidates and what became of them.
    Returns:
        for each question its finished beams, best first, at most `beam_size`; where none has finished the best
        unfinished one alone, whose `finished` is False.
    Raises:
        ValueError: a question has no candidate with a score (all NaN), or temperature without `uniform`.
    """
    if settings.temperature and uniform is None:
        raise ValueError("a temperature of the selection above 0 needs random numbers: pass uniform")
    states = [Progress() for _ in names]
    for step in range(settings.max_steps):
        going = {
            number: state.open
            for number, state in enumerate(states)
            if state.open and len(state.finished) < settings.beam_size
        }
        if not going:
            break
        for number, candidates in extend(step, going).items():
            draws = [uniform(number, step, one) for one in candidates] if settings.temperature else None
            try:
                selection = select_candidates(candidates, states[number].open, settings, step, draws)
            except ValueError as error:
                raise ValueError(f"{names[number]}, step {step + 1}: {error}") from error
            _advance(states[number], candidates, selection)
            if on_step is not None:
                on_step(number, step, candidates, selection)
    return [state.results(settings.beam_size) for state in states]


def select_candidates(
    candidates: Sequence[Candidate],
    beams: Sequence[Beam],
    settings: BeamSettings,
    step: int = 0,
    uniforms: Sequence[float] | None = None,
) -> Selection:
    """Choose at most `beam_size` of the candidates of one question.

    1. Candidates without a score (NaN or +inf) are dropped.
    2. Duplicates are merged: the one with the best score stands for all of them.
    3. With `reject_sample` those whose guidance is below `min_score` are rejected, unless all are.
    4. At temperature 0 the best scores are kept. Above, `beam_size` are drawn one after another, each with probability
       proportional to w * exp(score / T) among those left (Plackett-Luce): the largest score / T + log w + Gumbel
       noise are that draw. w is 1, or the number of merged duplicates where `unbiased`; at temperature 0 it decides
       between equal scores, and then the lower parent and sample do.

    The order of the list does not matter.

    Args:
        candidates: N, of one step.
        beams: the beams that their `parent` counts.
        uniforms: (N,) in [0, 1), needed where the temperature is above 0.
    Raises:
        ValueError: no candidate has a score.
    """
    step_scores = [step_score(one.logprob, one.guidance, settings) for one in candidates]
    paths = [(*beams[one.parent].step_scores, score) for one, score in zip(candidates, step_scores, strict=True)]
    scores = [beam_score(path, settings.accumulate) for path in paths]
    usable = [place for place, score in enumerate(scores) if score < math.inf]
    if not usable:
        raise ValueError(
            f"none of the {len(candidates)} candidates has a score: log-probability or guidance is not a number in all "
            "of them; check the dtype of both models"
        )
    fates: list[Fate] = ["dropped"] * len(candidates)
    order = sorted(usable, key=lambda place: (-scores[place], candidates[place].parent, candidates[place].sample))
    stand_ins, copies = _merge(candidates, order)
    for place in set(order) - set(copies):
        fates[place] = "merged"
    distinct = list(copies)
    if settings.reject_sample:
        passing = [place for place in distinct if not _is_below(candidates[place].guidance, settings.min_score)]
        for place in set(distinct) - set(passing) if passing else ():
            fates[place] = "rejected"
        distinct = passing or distinct
    weights = [math.log(copies[place]) if settings.unbiased else 0.0 for place in distinct]
    drawn = _draw_order(distinct, scores, weights, settings.temperature_at(step), uniforms)[: settings.beam_size]
    kept = [place for place in distinct if place in drawn]
    for place in kept:
        ended = candidates[place].ended
        fates[place] = "cut" if ended == CUT else "finished" if ended else "kept"
    return Selection(kept, fates, stand_ins, step_scores, scores)


def step_score(logprob: float, guidance: float | None, settings: BeamSettings) -> float:
    """(1 - conf_ratio) * logprob + conf_ratio * guidance; a part of weight 0 is left out, even where it is infinite.

    Without guidance the log-probability alone. With `unbiased` the guidance alone, 0 without any.
    """
    if settings.unbiased:
        return 0.0 if guidance is None else guidance
    if guidance is None:
        return logprob
    return weighted_mean([logprob, guidance], [1 - settings.conf_ratio, settings.conf_ratio])


def beam_score(step_scores: Sequence[float], accumulate: str) -> float:
    """Score of a beam from those of its steps: their mean, each step counting alike, or the last one."""
    return step_scores[-1] if accumulate == "last" else sum(step_scores) / len(step_scores)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """sum(w * x) / sum(|w|): a negative weight steers away from its value. Values of weight 0 are left out.

    Raises:
        ValueError: lengths differ, or all weights are 0.
    """
    parts = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not parts:
        raise ValueError("expected at least one weight other than 0")
    return sum(weight * value for value, weight in parts) / sum(abs(weight) for _, weight in parts)


def step_similarity(similarities: np.ndarray, weights: Sequence[float], reduction: str) -> float:
    """Goal similarity of a step.

    Every token t has s_t = sum_g(w_g * cosine_tg) / sum_g(|w_g|); the step has the smallest, the mean or the last s_t.

    Args:
        similarities: (T, G) cosine of the step's tokens with every goal, T at least 1.
        weights: (G,) of the goals; a negative one steers away.
        reduction: "min", "mean" or "last".
    """
    tokens = np.asarray(similarities, dtype=np.float64) @ np.asarray(weights, dtype=np.float64)
    tokens = tokens / np.abs(weights).sum()
    if reduction == "last":
        return float(tokens[-1])
    return float(tokens.min() if reduction == "min" else tokens.mean())


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Mean log-probability of the tokens of a step; -inf for none: a beam that stands still wins against nothing."""
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _merge(candidates: Sequence[Candidate], order: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Let the first of equal candidates in an order stand for them.

    An open response and an ended one of the same text are not equal.

    Returns:
        the stand-in of every candidate, itself where it is not in the order; and how many each stands for, in order.
    """
    stand_ins, copies = list(range(len(candidates))), {}
    first: dict[tuple[Hashable, str], int] = {}
    for place in order:
        stand_in = stand_ins[place] = first.setdefault((candidates[place].key, candidates[place].ended), place)
        copies[stand_in] = copies.get(stand_in, 0) + 1
    return stand_ins, copies


def _is_below(guidance: float | None, least: float) -> bool:
    return guidance is not None and not guidance >= least


def _draw_order(
    places: list[int],
    scores: list[float],
    weights: list[float],
    temperature: float,
    uniforms: Sequence[float] | None,
) -> list[int]:
    """Places in the order in which they are chosen; stable where they are equal."""
    if temperature == 0:
        keys = {place: (-scores[place], -weight) for place, weight in zip(places, weights, strict=True)}
        return sorted(places, key=keys.__getitem__)
    best = max(scores[place] for place in places)
    if best == -math.inf:
        scores, best = [0.0] * len(scores), 0.0
    keys = {
        # The score decides where a small temperature has made all others infinitely unlikely.
        place: (-((scores[place] - best) / temperature + weight + _gumbel(uniforms[place])), -scores[place])
        for place, weight in zip(places, weights, strict=True)
    }
    return sorted(places, key=keys.__getitem__)


def _gumbel(uniform: float) -> float:
    """Standard Gumbel noise from a number in [0, 1)."""
    return -math.log(-math.log(max(uniform, 1e-300)))


def _advance(state: Progress, candidates: Sequence[Candidate], selection: Selection) -> None:
    """Replace the open beams by the chosen candidates; those that have ended are set aside."""
    before, state.open = state.open, []
    for place in selection.kept:
        one = candidates[place]
        path = (*before[one.parent].step_scores, selection.step_scores[place])
        beam = Beam(place, one, path, selection.scores[place])
        if one.ended == CUT:
            state.cut.append(beam)
        elif one.ended:
            same = state.finished.get(one.key)
            state.finished[one.key] = beam if same is None or beam.score > same.score else same
        else:
            state.open.append(beam)
