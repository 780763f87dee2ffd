"""What the samples of a question give: their mean, majority and weighted votes, best-of-n, the live filtered vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decoding.records import Answered, Decoded, Question
from openrlhf.evaluation.ballots import Ballot, make_ballots
from openrlhf.evaluation.filtering import VoteReport
from openrlhf.evaluation.selection import figure_scores, vote_winners
from openrlhf.evaluation.threshold_choice import choose_threshold

# The predicted answer of a response and whether it is right; None where there is none, or nothing to judge it by.
Grade = Callable[[Question, str], tuple[str | None, bool | None]]

FILTERED = "filtered_vote"
POOL_FIGURES = {  # method -> figure of openrlhf.evaluation.selection
    "sample": "mean of samples",
    "majority": "majority vote",
    "weighted": "weighted vote, reward",
    "weighted_goal": "weighted vote, goal similarity",
    "best_of_n": "best of n, reward",
    "best_of_n_goal": "best of n, goal similarity",
}


@dataclass(frozen=True)
class DrawnSample:
    """One sample of a question and how it ended."""

    response: Decoded  # scores as far as it was read; `reward` only of a whole one
    answer: str | None  # None also where it was stopped
    is_right: bool | None  # None also where nothing says what is right
    end: str = "finished"  # or "length", "goal" (stopped below the threshold), "decided" (it could not change the vote)
    below: int | None = None  # first token of the reward model below the threshold, also where it is the last one
    reward_tokens: int = 0  # run through the reward model, the prompt excluded

    @property
    def kept(self) -> bool:
        """Whether it came to its end and never fell below the threshold: it may vote."""
        return self.end in ("finished", "length") and self.below is None


@dataclass(frozen=True)
class Pool:
    """K samples of one question in the order of their numbers."""

    question: Question
    samples: list[DrawnSample]
    fallback: bool = False  # nothing kept has an answer: the stopped samples were taken up again, and all vote
    seconds: float = 0.0  # wall time of every round, shared by its rows
    reward_seconds: float = 0.0  # of those, in the reward model

    @property
    def policy_tokens(self) -> int:
        """Tokens drawn, of stopped samples too."""
        return sum(len(one.response.ids) for one in self.samples)

    @property
    def reward_tokens(self) -> int:
        """Tokens run through the reward model."""
        return sum(one.reward_tokens for one in self.samples)

    @property
    def is_judged(self) -> bool:
        """Whether it can be told which answers are right."""
        return self.question.expected_answer is not None or all(
            one.is_right is not None for one in self.samples if one.kept or self.fallback
        )


def answer_pool(pool: Pool, seed: int, methods: Sequence[str] = tuple(POOL_FIGURES)) -> list[Answered]:
    """What every method makes of a pool whose samples are all whole; each costs the whole pool.

    `sample` keeps all responses and has no answer of its own: its accuracy is their mean. The others keep the response
    that they choose: best-of-n the highest-scored one (of equals the first), a vote the highest-scored one with the
    winning answer, or the first of the pool when nobody answers. Votes and ties are those of
    `openrlhf.evaluation.ballots`; a vote of one sample is its answer.

    Args:
        pool: scored where a method ranks or weighs by a score.
        methods: of `POOL_FIGURES`.
    Raises:
        ValueError: an unknown method, or a sample without the score that a method needs.
    """
    unknown = [method for method in methods if method not in POOL_FIGURES]
    if unknown:
        raise ValueError(f"expected methods of {', '.join(POOL_FIGURES)}, got {unknown[0]!r}")
    ballot = make_ballot(pool)
    everyone = np.ones(len(pool.samples), bool)
    answered = []
    for method in methods:
        if method == "sample":
            answered.append(_answered(pool, method, seed, [one.response for one in pool.samples]))
            continue
        choice = _choose(pool, ballot, POOL_FIGURES[method], everyone)
        chosen = replace(pool.samples[choice.place].response, score=choice.score)
        answered.append(_answered(pool, method, seed, [chosen], choice))
    return answered


def answer_filtered(pool: Pool, seed: int, settings: dict[str, Any]) -> Answered:
    """The majority vote among the samples that were kept, or among all of a fallback.

    Args:
        settings: `threshold`, `warmup_tokens` and `check_every` that the pool was drawn with, for the details.
    Returns:
        Responses that were begun, in the order of their numbers. Details: the settings, `samples`, `stopped` (below the
        threshold before their end), `dropped` (below it anywhere), `decided` (stopped, or never begun, since the vote
        could not change), `fallback` and `reward_seconds`. Trace: one object a sample.
    """
    kept = np.array([one.kept or pool.fallback for one in pool.samples])
    choice = _choose(pool, make_ballot(pool), POOL_FIGURES["majority"], kept)
    details = {
        **settings,
        "samples": len(pool.samples),
        "stopped": sum(one.end == "goal" for one in pool.samples),
        "dropped": sum(one.below is not None for one in pool.samples),
        "decided": sum(one.end == "decided" for one in pool.samples),
        "fallback": pool.fallback,
    }
    trace = [
        {
            "sample": one.response.sample,
            "end": one.end,
            "policy_tokens": len(one.response.ids),
            "reward_tokens": one.reward_tokens,
            "below": one.below,
            "answer": one.answer,
            "votes": bool(votes),
        }
        for one, votes in zip(pool.samples, kept, strict=True)
    ]
    begun = [one.response for one in pool.samples if one.response.ids]
    answered = _answered(pool, FILTERED, seed, begun, choice)
    return replace(answered, details=details | answered.details, trace=trace)


def choose_on_validation(pools: Sequence[Pool], warmup_tokens: int = 0) -> VoteReport:
    """The threshold that saves most tokens of plain pools at no loss of accuracy, or none.

    Args:
        pools: of validation questions, with goal similarities and expected answers.
    Returns:
        What filtering the whole samples gives there: see `openrlhf.evaluation.threshold_choice.choose_threshold`.
    Raises:
        ValueError: no pool, one without goal similarities, or one that cannot be judged.
    """
    ballots = [make_ballot(pool) for pool in pools]
    if not ballots or any(one.cosine_sim is None for one in ballots) or not all(one.is_judged for one in pools):
        raise ValueError("a threshold is chosen on samples with goal similarities, of questions with expected answers")
    return choose_threshold(ballots, warmup_tokens)


def can_change(votes: Sequence[int], unfinished: int) -> bool:
    """Whether votes that are still to come can change the winner, or make a tie of it.

    Args:
        votes: votes of each different answer so far.
        unfinished: completions that may still vote, for any answer or none.
    """
    first, second = _two_largest(votes)
    return unfinished > 0 and second + unfinished >= first


def fewest_to_decide(votes: Sequence[int], unfinished: int) -> int:
    """How many more votes for the leading answer would settle it, if the other unfinished ones all went to the next.

    Args:
        votes, unfinished: as for `can_change`, which is True.
    """
    first, second = _two_largest(votes)
    return (second + unfinished - first) // 2 + 1


def _two_largest(votes: Sequence[int]) -> tuple[int, int]:
    first, second, *_ = [*sorted(map(int, votes), reverse=True), 0, 0]
    return first, second


def make_ballot(pool: Pool) -> Ballot:
    """The ballot of a pool; where nothing says what is right, every answer counts as wrong (see `Pool.is_judged`).

    Raises:
        ValueError: no sample.
    """
    rows = []
    for one in pool.samples:
        similarities = one.response.cosine_sim
        scores = {"reward": one.response.reward, "cosine_sim": similarities}
        rows.append(
            {
                "question": pool.question.text,
                "expected_answer": pool.question.expected_answer,
                "predicted_answer": one.answer,
                "is_correct": bool(one.is_right),
                "num_actions": len(one.response.ids) if similarities is None else len(similarities),
                **{key: value for key, value in scores.items() if value is not None},
            }
        )
    return make_ballots(rows)[0]


@dataclass(frozen=True)
class _Choice:
    place: int  # of the chosen sample
    answer: str | None
    is_right: bool
    score: float  # what was compared: score, votes or weight


def _choose(pool: Pool, ballot: Ballot, figure: str, voters: np.ndarray) -> _Choice:
    """Winner of best-of-n, or of a vote among some samples ((K,) bool)."""
    scores = figure_scores(ballot, figure)
    if figure.startswith("best of n"):
        place = int(np.argmax(scores))
        return _Choice(place, pool.samples[place].answer, bool(ballot.labels[place]), float(scores[place]))
    winner = int(vote_winners(ballot, figure, scores, voters[None]).winner[0])
    if winner < 0:
        return _Choice(0, None, False, 0.0)
    gave = np.flatnonzero((ballot.groups == winner) & voters)
    ranking = ballot.tie_scores if scores is None else scores
    place = int(gave[0] if ranking is None else gave[np.argmax(ranking[gave])])
    weight = len(gave) if scores is None else scores[gave].sum()
    return _Choice(place, pool.samples[int(gave[0])].answer, bool(ballot.correct[winner]), float(weight))


def _answered(pool: Pool, method: str, seed: int, responses: list[Decoded], choice: _Choice | None = None) -> Answered:
    right = choice.is_right if choice is not None and pool.is_judged else None
    return Answered(
        question=pool.question,
        method=method,
        seed=seed,
        responses=responses,
        answer=None if choice is None else choice.answer,
        is_correct=right,
        policy_tokens=pool.policy_tokens,
        reward_tokens=pool.reward_tokens,
        seconds=pool.seconds,
        details={"reward_seconds": round(pool.reward_seconds, 6)},
    )
