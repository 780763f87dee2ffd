"""Majority vote over completions, filtered by goal similarity; pure functions of answers and similarities.

Policies: answers are grouped by equivalence; missing answers do not vote; a tie goes to the answer with the higher mean
score when scores exist, else to the answer whose normalised text sorts first; when nothing with an answer is kept, the
unfiltered vote counts and the question is a fallback.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from openrlhf.rewards.grading import grade_answer, normalise_answer

TieRule = Literal["score", "original"]


@dataclass(frozen=True)
class Vote:
    """Outcome of the vote on one question."""

    answer: str | None  # the winning answer as first written; None when there is no answer at all
    votes: int  # completions that gave it
    tied: int  # answers with that many votes, 1 = no tie
    fallback: bool  # nothing with an answer was kept, so all completions voted


class FilterResult(NamedTuple):
    """What a live filter does to one completion."""

    kept: bool
    tokens_used: int


@dataclass(frozen=True)
class VoteReport:
    """Filtered against unfiltered majority vote over a set of questions."""

    threshold: float | None
    questions: int
    completions: int
    accuracy: float  # per question, after filtering and fallback
    unfiltered_accuracy: float  # per question
    tokens_saved: float  # share of all response tokens of all completions
    dropped: float  # share of completions below the threshold
    fallbacks: int  # questions decided by the unfiltered vote because nothing was kept
    unanswered: int  # questions without any answer: counted as wrong


@dataclass(frozen=True)
class EqualAccuracy:
    """The threshold that saves most at no loss of accuracy on validation questions, and what it does elsewhere."""

    threshold: float | None  # None: no threshold saves tokens without a loss, nothing is filtered
    validation: VoteReport
    test: VoteReport


def majority_vote(
    answers: Sequence[str | None],
    keep: Sequence[bool] | None = None,
    scores: Sequence[float] | None = None,
    tie_rule: TieRule = "score",
    expected: str | None = None,
) -> Vote:
    """Most frequent answer among K completions of one question.

    Args:
        answers: K answers, None where a completion has none.
        keep: K flags, True = the completion may vote; None keeps all.
        scores: K numbers (goal similarity or reward) that decide ties by their mean over an answer's voters.
        tie_rule: "score" as in the module's policies; "original" gives a tie to the answer equal to `expected`,
            which flatters the vote and exists only to compare with published numbers.
        expected: the correct answer, needed by "original" only.
    Raises:
        ValueError: lengths differ, unknown tie rule, or "original" without `expected`.
    """
    _check_tie_rule(tie_rule)
    for name, values in (("keep", keep), ("scores", scores)):
        if values is not None and len(values) != len(answers):
            raise ValueError(f"expected one value an answer in {name}, got {len(values)} for {len(answers)} answers")
    if tie_rule == "original" and expected is None:
        raise ValueError("tie_rule 'original' needs the expected answer; pass expected or use tie_rule 'score'")
    groups, texts = group_answers(answers)
    written = [answers[int(np.flatnonzero(groups == group)[0])] for group in range(len(texts))]
    correct = [grade_answer(answer, expected) for answer in written] if tie_rule == "original" else None
    kept = np.ones(len(answers), bool) if keep is None else np.asarray(keep, bool)
    ranking = None if scores is None else np.asarray(scores, np.float64)
    winner, votes, tied, fallback = _vote(groups, len(texts), kept, ranking, correct)
    return Vote(None if winner is None else written[winner], votes, tied, fallback)


def group_answers(answers: Sequence[str | None]) -> tuple[np.ndarray, list[str]]:
    """Group K answers by equivalence.

    Returns:
        (K,) int64 group of each answer, -1 for a missing one, and the normalised text of each group; groups are
        numbered in the order of that text, so the result does not depend on the order of the answers.
    """
    texts = [normalise_answer(answer) for answer in answers]
    written = dict(sorted(zip(texts, map(str, answers), strict=True), reverse=True))  # one spelling of each text
    representatives: list[str] = []
    number: dict[str, int] = {"": -1}
    for text in sorted(set(texts) - {""}):
        same = (i for i, other in enumerate(representatives) if grade_answer(written[text], written[other]))
        number[text] = next(same, len(representatives))
        if number[text] == len(representatives):
            representatives.append(text)
    return np.array([number[text] for text in texts], dtype=np.int64), representatives


def filter_by_goal(cosine_sim: Sequence[float], threshold: float | None, warmup_tokens: int = 0) -> FilterResult:
    """Stop a completion at the first token at or after `warmup_tokens` whose goal similarity is below the threshold.

    Args:
        cosine_sim: (A,) goal similarity at each response token.
        threshold: in [-1, 1]; None keeps everything.
        warmup_tokens: response tokens at the start that are never judged.
    Returns:
        (kept, tokens_used): a dropped completion used t + 1 tokens when token t (0-based) is the first below.
    Raises:
        ValueError: no token, negative warm-up, or a threshold that is not a number in [-1, 1].
    """
    similarities = _similarities(cosine_sim)
    _check_filter(threshold, warmup_tokens)
    return _filter(np.minimum.accumulate(similarities[warmup_tokens:]), len(similarities), threshold, warmup_tokens)


def vote_with_filter(
    rows: Sequence[Mapping[str, Any]],
    threshold: float | None,
    *,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
) -> VoteReport:
    """Majority vote on every question with and without the goal filter.

    Tokens saved are those after the point where a dropped completion is stopped. A fallback question saves nothing:
    its vote needs every completion in full.

    Args:
        rows: scored completions with `question`, `predicted_answer`, `expected_answer` (or `is_correct`),
            `num_actions`, and `cosine_sim` when a threshold is given. Ties are decided by the last goal similarity,
            else by `reward`, where every row of the question has it.
        threshold, warmup_tokens: as for `filter_by_goal`.
        tie_rule: as for `majority_vote`.
    Raises:
        ValueError: no rows, a threshold without `cosine_sim`, or neither expected answer nor label (names the row).
    """
    _check_filter(threshold, warmup_tokens)
    return _report(_questions(rows, warmup_tokens, tie_rule, threshold is not None), threshold)


def filter_tradeoff(
    rows: Sequence[Mapping[str, Any]], *, warmup_tokens: int = 0, tie_rule: TieRule = "score", candidates: int = 25
) -> list[VoteReport]:
    """Reports without a filter and at up to `candidates` rising thresholds: tokens saved against accuracy.

    Args, Raises: as `vote_with_filter`; every row needs `cosine_sim`.
    """
    _check_filter(None, warmup_tokens)
    questions = _questions(rows, warmup_tokens, tie_rule, True)
    return [_report(questions, threshold) for threshold in (None, *_candidate_thresholds(questions, candidates))]


def threshold_at_equal_accuracy(
    validation_rows: Sequence[Mapping[str, Any]],
    test_rows: Sequence[Mapping[str, Any]],
    *,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
    candidates: int = 100,
) -> EqualAccuracy:
    """Choose the threshold on validation questions, report it on others.

    Among `candidates` quantiles of the completions' lowest similarity, the threshold with the largest token saving
    whose validation accuracy is not below the unfiltered one.

    Raises:
        ValueError: as `vote_with_filter`; or a question is in both sets.
    """
    shared = {row["question"] for row in validation_rows} & {row["question"] for row in test_rows}
    if shared:
        raise ValueError(
            f"{len(shared)} questions are in both sets, first {sorted(shared)[0]!r:.80}; use split_questions"
        )
    _check_filter(None, warmup_tokens)
    validation = _questions(validation_rows, warmup_tokens, tie_rule, True)
    test = _questions(test_rows, warmup_tokens, tie_rule, True)
    best = _report(validation, None)
    for threshold in _candidate_thresholds(validation, candidates):
        report = _report(validation, threshold)
        if report.accuracy >= report.unfiltered_accuracy and report.tokens_saved > best.tokens_saved:
            best = report
    return EqualAccuracy(best.threshold, best, _report(test, best.threshold))


def split_questions(
    rows: Sequence[Mapping[str, Any]], share: float = 0.5, seed: int = 0
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows of about `share` of the questions, and the rest; a question's side depends only on its text and the seed."""
    sides: tuple[list, list] = ([], [])
    for row in rows:
        digest = hashlib.sha256(f"{seed}\n{row['question']}".encode()).digest()
        sides[int.from_bytes(digest[:8], "big") / 2**64 >= share].append(row)
    return sides


@dataclass(frozen=True)
class _Question:
    """K completions of one question, ready to vote under any threshold."""

    groups: np.ndarray  # (K,) answer group, -1 = no answer
    correct: list[bool]  # per group
    scores: np.ndarray | None  # (K,) for ties
    lengths: list[int]  # (K,) response tokens
    lowest: list[np.ndarray] | None  # K running minima of the similarity after the warm-up
    warmup_tokens: int
    tie_rule: TieRule


def _questions(
    rows: Sequence[Mapping[str, Any]], warmup_tokens: int, tie_rule: TieRule, filtered: bool
) -> list[_Question]:
    _check_tie_rule(tie_rule)
    if not rows:
        raise ValueError("expected scored completions to vote on, got none")
    members: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.get("num_actions") is None or (filtered and row.get("cosine_sim") is None):
            wanted = "'num_actions' and 'cosine_sim'" if filtered else "'num_actions'"
            raise ValueError(f"row {number}: expected keys {wanted}; score the file with eval_rm and a goal state")
        members.setdefault(row["question"], []).append(number)
    questions = []
    for numbers in members.values():
        chosen = [rows[number] for number in numbers]
        groups, texts = group_answers([row["predicted_answer"] for row in chosen])
        lowest = None
        if filtered:
            lowest = [np.minimum.accumulate(_similarities(row["cosine_sim"])[warmup_tokens:]) for row in chosen]
        questions.append(
            _Question(
                groups=groups,
                correct=[_is_correct(numbers, chosen, groups, group) for group in range(len(texts))],
                scores=_tie_scores(chosen),
                lengths=[int(row["num_actions"]) for row in chosen],
                lowest=lowest,
                warmup_tokens=warmup_tokens,
                tie_rule=tie_rule,
            )
        )
    return questions


def _report(questions: Sequence[_Question], threshold: float | None) -> VoteReport:
    right = unfiltered_right = used = dropped = fallbacks = unanswered = 0
    for question in questions:
        count = len(question.lengths)
        kept, tokens = np.ones(count, bool), list(question.lengths)
        if threshold is not None:
            for k in range(count):
                kept[k], tokens[k] = _filter(question.lowest[k], question.lengths[k], threshold, question.warmup_tokens)
        known = question.correct if question.tie_rule == "original" else None
        everyone, *_ = _vote(question.groups, len(question.correct), np.ones(count, bool), question.scores, known)
        winner, _, _, fallback = _vote(question.groups, len(question.correct), kept, question.scores, known)
        unanswered += winner is None
        right += winner is not None and question.correct[winner]
        unfiltered_right += everyone is not None and question.correct[everyone]
        fallbacks += fallback
        dropped += int((~kept).sum())
        used += sum(question.lengths if fallback else tokens)
    completions = sum(len(question.lengths) for question in questions)
    total = sum(sum(question.lengths) for question in questions)
    return VoteReport(
        threshold=threshold,
        questions=len(questions),
        completions=completions,
        accuracy=right / len(questions),
        unfiltered_accuracy=unfiltered_right / len(questions),
        tokens_saved=1 - used / total if total else 0.0,
        dropped=dropped / completions,
        fallbacks=fallbacks,
        unanswered=unanswered,
    )


def _vote(
    groups: np.ndarray, count: int, keep: np.ndarray, scores: np.ndarray | None, correct: Sequence[bool] | None
) -> tuple[int | None, int, int, bool]:
    """(winning group, its votes, groups tied with it, fallback); `correct` wins ties when given."""
    voters = keep & (groups >= 0)
    fallback = not voters.any() and not keep.all()
    if fallback:
        voters = groups >= 0
    if not voters.any():
        return None, 0, 0, fallback
    votes = np.bincount(groups[voters], minlength=count)
    tied = np.flatnonzero(votes == votes.max())
    winner = int(tied[0])  # groups are in the order of their text
    if correct is not None and any(correct[group] for group in tied):
        winner = next(int(group) for group in tied if correct[group])
    elif scores is not None:
        means = [scores[voters & (groups == group)].mean() for group in tied]
        winner = int(tied[int(np.argmax(means))])
    return winner, int(votes[winner]), len(tied), fallback


def _filter(lowest: np.ndarray, length: int, threshold: float | None, warmup_tokens: int) -> FilterResult:
    """`lowest` never rises, so the first value below the threshold is found by bisection."""
    if threshold is None:
        return FilterResult(True, length)
    first = int(np.searchsorted(-lowest, -threshold, side="right"))
    return FilterResult(True, length) if first == len(lowest) else FilterResult(False, warmup_tokens + first + 1)


def _candidate_thresholds(questions: Sequence[_Question], count: int) -> list[float]:
    """Just above quantiles of the lowest similarity, so that each drops at least one completion."""
    minima = [float(lowest[-1]) for question in questions for lowest in question.lowest or [] if len(lowest)]
    if not minima:
        return []
    quantiles = np.unique(np.quantile(minima, np.linspace(0, 1, count), method="lower"))
    return [float(min(np.nextafter(value, 2.0), 1.0)) for value in quantiles]


def _tie_scores(rows: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    if all(row.get("cosine_sim") for row in rows):
        return np.array([row["cosine_sim"][-1] for row in rows], np.float64)
    if all(row.get("reward") is not None for row in rows):
        return np.array([row["reward"] for row in rows], np.float64)
    return None


def _is_correct(numbers: Sequence[int], rows: Sequence[Mapping[str, Any]], groups: np.ndarray, group: int) -> bool:
    """By the expected answer where there is one, else by the label of the group's first completion."""
    first = int(np.flatnonzero(groups == group)[0])
    if rows[first].get("expected_answer") is not None:
        return grade_answer(rows[first]["predicted_answer"], rows[first]["expected_answer"])
    if rows[first].get("is_correct") is None:
        raise ValueError(
            f"row {numbers[first]}: expected 'expected_answer' or 'is_correct' to judge the vote, found neither"
        )
    return bool(rows[first]["is_correct"])


def _similarities(cosine_sim: Sequence[float]) -> np.ndarray:
    similarities = np.asarray(cosine_sim, np.float64)
    if similarities.ndim != 1 or len(similarities) == 0:
        raise ValueError(f"expected goal similarities of at least one response token, got shape {similarities.shape}")
    if not np.isfinite(similarities).all():
        raise ValueError(f"expected finite goal similarities, got {similarities[~np.isfinite(similarities)][0]}")
    return similarities


def _check_filter(threshold: float | None, warmup_tokens: int) -> None:
    if threshold is not None and not (math.isfinite(threshold) and -1 <= threshold <= 1):
        raise ValueError(f"expected a goal similarity threshold in [-1, 1], got {threshold}")
    if warmup_tokens < 0:
        raise ValueError(f"expected warmup_tokens of 0 or more, got {warmup_tokens}")


def _check_tie_rule(tie_rule: str) -> None:
    if tie_rule not in ("score", "original"):
        raise ValueError(f"expected tie_rule 'score' or 'original', got {tie_rule!r}")
