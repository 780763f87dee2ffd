"""The filter threshold that saves most at no loss: chosen on some questions, reported on others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.evaluation.ballots import Ballot, TieRule
from openrlhf.evaluation.bootstrap import Interval, QuestionDraws, draw_questions, ratio_intervals
from openrlhf.evaluation.filtering import (
    VoteReport,
    candidate_thresholds,
    check_filter,
    filter_outcomes,
    make_goal_ballots,
)
from openrlhf.evaluation.paired import mcnemar_p
from openrlhf.evaluation.selection import accuracy_at_share, vote_by_count

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EqualAccuracy:
    """The threshold that saves most at no loss of accuracy on validation questions, and what it does elsewhere."""

    threshold: float | None  # None: no threshold saves tokens without a loss, nothing is filtered
    validation: VoteReport
    test: VoteReport
    saving: Interval  # share of the test tokens
    accuracy_difference: Interval  # test, filtered minus unfiltered
    p_value: float  # exact McNemar test on the test questions
    better: int  # test questions that only the filtered vote answers rightly
    worse: int  # test questions that only the unfiltered vote answers rightly
    fewer_samples: float  # test accuracy of the unfiltered vote of fewer completions that cost as many tokens
    gain_over_fewer: Interval  # test, filtered minus that


def threshold_at_equal_accuracy(
    validation_rows: Rows,
    test_rows: Rows,
    *,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
    candidates: int = 100,
    bootstrap: int = 1000,
    seed: int = 0,
) -> EqualAccuracy:
    """Choose the threshold on validation questions, report it on others.

    Among `candidates` quantiles of the completions' lowest similarity, the threshold with the largest token saving
    whose validation accuracy is not below the unfiltered one. On the test questions its vote is compared with the
    unfiltered one, question by question.

    Args:
        bootstrap, seed: draws of test questions for the intervals, and of fewer completions.
    Raises:
        ValueError: as `vote_with_filter`; or a question is in both sets.
    """
    check_disjoint([row["question"] for row in validation_rows], [row["question"] for row in test_rows])
    check_filter(None, warmup_tokens)
    validation, test = make_goal_ballots(validation_rows), make_goal_ballots(test_rows)
    draws = draw_questions([ballot.question for ballot in test], bootstrap, seed)
    return equal_accuracy(validation, test, draws, warmup_tokens, tie_rule, candidates, seed)


def equal_accuracy(
    validation: Sequence[Ballot],
    test: Sequence[Ballot],
    draws: QuestionDraws,
    warmup_tokens: int = 0,
    tie_rule: TieRule = "score",
    candidates: int = 100,
    seed: int = 0,
) -> EqualAccuracy:
    """`threshold_at_equal_accuracy` of ballots that have goal similarities; draws hold every test question."""
    best = choose_threshold(validation, warmup_tokens, tie_rule, candidates)
    chosen = filter_outcomes(test, [best.threshold], warmup_tokens, tie_rule)
    columns = draws.columns([ballot.question for ballot in test])
    after, before = chosen.right[:, 0], chosen.unfiltered_right
    better, worse = int((after & ~before).sum()), int((before & ~after).sum())
    (saving,) = ratio_intervals(draws, columns, chosen.tokens - chosen.used[:, 0], chosen.tokens)
    (difference,) = ratio_intervals(draws, columns, after.astype(float) - before)
    fewer = accuracy_at_share(vote_by_count(test, tie_rule, seed), 1 - (saving.value or 0.0))
    (gain,) = ratio_intervals(draws, columns, after - fewer)
    return EqualAccuracy(
        threshold=best.threshold,
        validation=best,
        test=chosen.report(0),
        saving=saving,
        accuracy_difference=difference,
        p_value=mcnemar_p(better, worse),
        better=better,
        worse=worse,
        fewer_samples=float(fewer.mean()),
        gain_over_fewer=gain,
    )


def choose_threshold(
    validation: Sequence[Ballot], warmup_tokens: int = 0, tie_rule: TieRule = "score", candidates: int = 100
) -> VoteReport:
    """The filtered vote with the largest token saving whose accuracy is not below the unfiltered one, or no filter.

    Args:
        validation: questions whose completions all have goal similarities.
        candidates: quantiles of the completions' lowest similarity that are tried.
    """
    thresholds = [None, *candidate_thresholds(validation, candidates, warmup_tokens)]
    outcomes = filter_outcomes(validation, thresholds, warmup_tokens, tie_rule)
    best = outcomes.report(0)
    for t in range(1, len(thresholds)):
        report = outcomes.report(t)
        if report.accuracy >= report.unfiltered_accuracy and report.tokens_saved > best.tokens_saved:
            best = report
    return best


def check_disjoint(validation: Sequence[str], test: Sequence[str]) -> None:
    """Refuse a threshold that would be reported on questions it was chosen on."""
    shared = sorted(set(validation) & set(test))
    if shared:
        raise ValueError(
            f"{len(shared)} questions are in both sets, first {shared[0]!r:.80}: a threshold must be chosen on other "
            "questions than those it is reported on; leave them out of one set, or pass no validation rows: the set is "
            "split then"
        )


def split_questions(
    rows: Rows, share: float = 0.5, seed: int = 0
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows of about `share` of the questions, and the rest; a question's side depends only on its text and the seed."""
    sides: tuple[list, list] = ([], [])
    for row in rows:
        sides[not in_first_part(row["question"], share, seed)].append(row)
    return sides


def in_first_part(question: str, share: float = 0.5, seed: int = 0) -> bool:
    """Whether `split_questions` puts a question into its first part."""
    digest = hashlib.sha256(f"{seed}\n{question}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share
