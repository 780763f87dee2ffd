"""What several completions of a question are worth: best-of-n, majority and weighted votes, any correct, their mean.

All are accuracies per question with n of its K completions, averaged over the subsets of n without replacement. A
question with fewer than n completions takes part with all it has, so that every n is about the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np

from openrlhf.evaluation.ballots import Ballot, TieRule, Winners, check_tie_rule, count_votes

GOAL_FIGURES = ("best of n, goal similarity", "weighted vote, goal similarity")
FIGURES = (
    "mean of samples",
    "majority vote",
    "best of n, reward",
    "best of n, goal similarity",
    "weighted vote, reward",
    "weighted vote, goal similarity",
    "any correct",
)
# Votes are averaged over all subsets where there are no more than this, else over this many drawn at random.
VOTE_SUBSETS = 100


def subset_sizes(ballots: Sequence[Ballot]) -> list[int]:
    """1, 2, 4, ... below the largest number of completions of a question, and that number."""
    most = max(len(ballot.groups) for ballot in ballots)
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def selection_accuracies(
    ballots: Sequence[Ballot],
    names: Sequence[str] = FIGURES,
    tie_rule: TieRule = "score",
    seed: int = 0,
    subsets: int = VOTE_SUBSETS,
) -> dict[str, np.ndarray]:
    """Expected accuracy on each question with n completions, for every n of `subset_sizes`.

    "best of n" takes the completion with the highest score at the last token, with or without an answer; of tied ones,
    each is as likely. A weighted vote sums sigmoid(reward), or (1 + goal similarity) / 2 at the last token, over each
    answer. Ties of votes follow `tie_rule`. Best-of-n, any correct and the mean are exact. Votes are exact for n = 1
    and n = K, and where K completions have at most `subsets` subsets of n; else averaged over `subsets` random ones.

    Args:
        ballots: Q questions.
        names: which of `FIGURES`; one whose score a ballot lacks is an error.
        seed: seed of the drawn subsets.
        subsets: most subsets of a question that vote.
    Returns:
        (Q, number of sizes) float64 by name; the last column is the accuracy with all completions.
    """
    check_tie_rule(tie_rule)
    sizes = subset_sizes(ballots)
    values = {name: np.zeros((len(ballots), len(sizes))) for name in names}
    generator = np.random.default_rng(seed)
    for q, ballot in enumerate(ballots):
        count = len(ballot.groups)
        # One order a draw, of which every n takes the first n: neighbouring sizes share their luck.
        orders = generator.permuted(np.tile(np.arange(count), (subsets, 1)), axis=1) if count > 2 else None
        scores = {name: figure_scores(ballot, name) for name in names}
        for column, size in enumerate(sizes):
            n = min(size, count)
            if column and n == min(sizes[column - 1], count):
                for name in names:
                    values[name][q, column] = values[name][q, column - 1]
                continue
            voters = _subsets(count, n, orders, subsets)
            for name in names:
                values[name][q, column] = _accuracy(ballot, name, scores[name], n, voters, tie_rule)
    return values


def vote_by_count(
    ballots: Sequence[Ballot],
    tie_rule: TieRule = "score",
    seed: int = 0,
    subsets: int = VOTE_SUBSETS,
    name: str = "majority vote",
) -> list[np.ndarray]:
    """For every question (K,) float64: expected accuracy of the majority vote of n of its K completions, n = 1 to K.

    Args:
        tie_rule, seed, subsets: as for `selection_accuracies`.
        name: another one of `FIGURES` in place of the majority vote.
    """
    check_tie_rule(tie_rule)
    generator = np.random.default_rng(seed)
    accuracies = []
    for ballot in ballots:
        count = len(ballot.groups)
        orders = generator.permuted(np.tile(np.arange(count), (subsets, 1)), axis=1) if count > 2 else None
        scores = figure_scores(ballot, name)
        voters = (_subsets(count, n, orders, subsets) for n in range(1, count + 1))
        accuracies.append(np.array([_accuracy(ballot, name, scores, n, v, tie_rule) for n, v in enumerate(voters, 1)]))
    return accuracies


def accuracy_at_share(by_count: Sequence[np.ndarray], share: float) -> np.ndarray:
    """(Q,) expected accuracy of the majority vote when every question spends only a share of its completions.

    With K completions, share * K is rounded up or down at random, so that the share is met on average; at least one
    completion is kept. What a filter that saves tokens has to beat: drawing fewer completions in the first place.

    Args:
        by_count: of `vote_by_count`.
        share: in [0, 1].
    """
    expected = []
    for accuracy in by_count:
        n = max(1.0, share * len(accuracy))
        low = min(int(n), len(accuracy))
        high = min(low + 1, len(accuracy))
        expected.append(accuracy[low - 1] + (n - low) * (accuracy[high - 1] - accuracy[low - 1]))
    return np.array(expected)


def best_of_n(labels: np.ndarray, scores: np.ndarray, n: int) -> float:
    """Probability that the highest-scored of n completions drawn without replacement is right.

    Args:
        labels: (K,) bool.
        scores: (K,) higher = better; of equally high ones in the draw, each is taken with the same probability.
        n: from 1 to K.
    """
    levels, level = np.unique(-scores, return_inverse=True)  # best first
    tied = np.bincount(level, minlength=len(levels))
    right = np.bincount(level, labels, len(levels))
    none_better = np.concatenate([[0], np.cumsum(tied)])  # completions at least as good as each level, from level -1 on
    missing = _none_of(len(labels), n)  # by m: probability that a draw holds none of m given completions
    best_is_here = missing[none_better[:-1]] - missing[none_better[1:]]
    return float((best_is_here * right / tied).sum())


def any_correct(correct: int, completions: int, n: int) -> float:
    """Probability that n of the completions drawn without replacement hold a right one (pass@n).

    Source: Chen et al. 2021, arXiv 2107.03374.
    """
    return float(1 - _none_of(completions, n)[correct])


@lru_cache(maxsize=4096)
def _none_of(completions: int, n: int) -> np.ndarray:
    """(K + 1,) probability that n of K completions drawn without replacement hold none of m given ones, by m."""
    total = math.comb(completions, n)
    return np.array([math.comb(completions - m, n) / total for m in range(completions + 1)])


def figure_scores(ballot: Ballot, name: str) -> np.ndarray | None:
    """(K,) what the figure ranks or weighs completions by; None where it needs no score; raises where one lacks it."""
    if "reward" in name:
        values = ballot.rewards
    elif "goal similarity" in name:
        values = ballot.similarities
    else:
        return None
    if values is None:
        raise ValueError(f"{name}: a completion of {ballot.question!r:.80} lacks the score; leave its question out")
    if not name.startswith("weighted"):
        return values
    return sigmoid(values) if "reward" in name else (1 + values) / 2


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow and exact for small values too."""
    return np.exp(-np.logaddexp(0, -np.asarray(values, np.float64)))


def _subsets(count: int, size: int, orders: np.ndarray | None, most: int) -> np.ndarray:
    """(S, K) bool: all subsets of that size if there are at most `most`, else the beginnings of the random orders."""
    if math.comb(count, size) <= most or size in (1, count):
        chosen = np.array(list(combinations(range(count), size)))
    else:
        chosen = orders[:, :size]
    voters = np.zeros((len(chosen), count), bool)
    np.put_along_axis(voters, chosen, True, axis=1)
    return voters


def _accuracy(
    ballot: Ballot, name: str, scores: np.ndarray | None, size: int, voters: np.ndarray, tie_rule: TieRule
) -> float:
    if name == "mean of samples":
        return float(ballot.labels.mean())
    if name == "any correct":
        return any_correct(int(ballot.labels.sum()), len(ballot.labels), size)
    if name.startswith("best of n"):
        return best_of_n(ballot.labels, scores, size)
    winner = vote_winners(ballot, name, scores, voters, tie_rule).winner
    return float(np.append(ballot.correct, False)[winner].mean())  # nobody votes: -1, the appended False


def vote_winners(
    ballot: Ballot, name: str, scores: np.ndarray | None, voters: np.ndarray, tie_rule: TieRule = "score"
) -> Winners:
    """Winners of S votes of the kind `name`, each among its own voters.

    Args:
        name: a vote of `FIGURES`; a weighted one decides ties by its own score.
        scores: (K,) weights of `figure_scores`, None for the majority vote.
        voters: (S, K) bool.
    """
    known = ballot.correct if tie_rule == "original" else None
    tie_scores = ballot.tie_scores
    if "reward" in name:
        tie_scores = ballot.rewards
    elif "goal similarity" in name:
        tie_scores = ballot.similarities
    return count_votes(ballot.groups, len(ballot.correct), voters, tie_scores, scores, known)
