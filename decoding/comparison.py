"""Methods of decoding compared on the same questions: accuracy, what it costs, and what a baseline makes of as much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from decoding.comparison_files import COSTS, Comparison, MethodRun, SamplePools
from decoding.voting import FILTERED, POOL_FIGURES
from openrlhf.evaluation.bootstrap import Interval, draw_questions, percentile_interval, question_sums
from openrlhf.evaluation.filtering import filter_outcomes
from openrlhf.evaluation.selection import accuracy_at_share, selection_accuracies, subset_sizes, vote_by_count
from openrlhf.evaluation.study_statistics import t_interval, two_level_interval


class Spread(NamedTuple):
    """A figure of S seeds and Q questions with 95% intervals over what could have come out differently."""

    over_both: Interval  # seeds and questions resampled; for one seed the questions only
    over_questions: Interval  # of the mean over these seeds
    over_seeds: Interval  # t interval of the figures by seed, on these questions
    by_seed: list[float]  # S


class EqualTokens(NamedTuple):
    """A pool cut down to what another method spends."""

    right: np.ndarray  # (S, Q) expected accuracy
    samples: float  # of each question, mean over seeds; as asked for, also below 1 or above K
    within: bool  # False: the method spends less than one sample, or more than the pool holds


def spread_of_ratio(above: np.ndarray, below: np.ndarray | None = None, bootstrap: int = 1000, seed: int = 0) -> Spread:
    """Mean over seeds of a ratio of sums over questions, such as right answers per question or tokens per token.

    Args:
        above: (S, Q) numerators.
        below: (S, Q) denominators; None counts questions, so that the ratio is a mean.
        bootstrap, seed: draws of questions, the same for every figure of as many questions.
    """
    above = np.asarray(above, np.float64)
    below = np.ones_like(above) if below is None else np.asarray(below, np.float64)
    questions = np.arange(above.shape[1])
    draws = draw_questions(questions.tolist(), bootstrap, seed)
    by_seed = above.sum(axis=1) / below.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (question_sums(draws, questions, above.T) / question_sums(draws, questions, below.T)).T  # (S, n)
    over_questions = percentile_interval(float(by_seed.mean()), drawn.mean(axis=0))
    over_both = two_level_interval(by_seed, drawn, seed) if len(by_seed) > 1 else over_questions
    return Spread(over_both, over_questions, t_interval(by_seed), by_seed.tolist())


def at_equal_tokens(
    by_count: Sequence[Sequence[np.ndarray]], pool_tokens: np.ndarray, tokens: np.ndarray
) -> EqualTokens:
    """What a pool gives when every question draws only as many samples as cost what another method spends.

    Args:
        by_count: S lists of Q arrays (K,), the accuracy of n = 1 to K samples: see `vote_by_count`.
        pool_tokens: (S, Q) policy tokens of all K samples.
        tokens: (S, Q) policy tokens of the other method; equal in total over questions, seed by seed.
    """
    shares = np.asarray(tokens, np.float64).sum(axis=1) / pool_tokens.sum(axis=1)
    right = np.array([accuracy_at_share(counts, share) for counts, share in zip(by_count, shares, strict=True)])
    samples = shares * [np.mean([len(one) for one in counts]) for counts in by_count]
    # A method that chooses from the pool spends exactly all of it.
    within = bool((samples >= 1 - 1e-9).all() and (shares <= 1 + 1e-9).all())
    return EqualTokens(right, float(samples.mean()), within)


def compare_methods(
    comparison: Comparison, baseline: str | None = "majority", bootstrap: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Figures of every method, and its paired difference from a baseline at equal policy tokens.

    Args:
        baseline: method, or FOLDER/METHOD; a method alone means the one of the same folder, else the only one there is.
            None: no differences.
        bootstrap, seed: draws for the intervals.
    Returns:
        Plain JSON values: `questions`, `left_out`, `seeds`, `baseline`, and `methods`, each with `run`, `method`,
        `seeds`, `accuracy` (a `Spread` as an object), `policy_tokens`, `reward_tokens` and `seconds` a question,
        `against` (None for the baseline itself; `baseline`, `equal_tokens`: whether its pool was cut to the method's
        tokens, `samples`, `within`, `accuracy`, `difference`), `curve` (pool methods: `samples`, `policy_tokens`,
        `accuracy` at smaller pools) and `filter` (see `filter_figures`; None for other methods).
    Raises:
        ValueError: no such baseline, or several.
    """
    options = {"bootstrap": bootstrap, "seed": seed}
    by_count = cache(lambda run, figure: [vote_by_count(one, name=figure) for one in comparison.pools[run].ballots])
    records = []
    for one in comparison.methods:
        pools = comparison.pools.get(one.run)
        reference = None if baseline is None else find_baseline(comparison.methods, baseline, one)
        plain = reference is None or reference is one
        records.append(
            {
                "run": one.run,
                "method": one.method,
                "seeds": one.seeds,
                "accuracy": _as_json(spread_of_ratio(one.right, **options)),
                **{name: float(one.costs[name].mean()) for name in COSTS},
                "against": None if plain else _against(one, reference, comparison, by_count, options),
                "curve": _curve(one, pools, options) if pools is not None and one.method in POOL_FIGURES else None,
                "filter": filter_figures(one, pools, comparison.methods, options) if one.method == FILTERED else None,
            }
        )
    return {
        "questions": len(comparison.questions),
        "left_out": comparison.left_out,
        "seeds": max((one.seeds for one in comparison.methods), key=len),
        "baseline": baseline,
        "methods": records,
    }


def find_baseline(methods: Sequence[MethodRun], name: str, of: MethodRun) -> MethodRun:
    """The method that another one is compared with: named in full, or the one of the same folder, or the only one.

    Raises:
        ValueError: none, or several in other folders.
    """
    full = [one for one in methods if one.name == name]
    found = full or [one for one in methods if one.method == name]
    own = [one for one in found if one.run == of.run]
    if len(own or found) != 1:
        told = "no such method" if not found else f"{len(found)} folders have it"
        names = ", ".join(one.name for one in found or methods)
        raise ValueError(f"baseline {name!r} for {of.name}: {told}; pass one of {names}, or none")
    return (own or found)[0]


def filter_figures(
    filtered: MethodRun, pools: SamplePools | None, methods: Sequence[MethodRun], options: Mapping[str, int]
) -> dict[str, Any] | None:
    """Live filtered voting beside the plain vote of the same samples; None where its folder has no plain vote.

    Returns:
        `threshold`, `warmup_tokens`, `check_every`; `stopped`, `dropped` and `decided` shares of the samples (stopped
        below the threshold, below it at any token, stopped because the vote was decided); `fallbacks`, share of the
        questions; `tokens_saved` and `seconds_saved`, shares of the plain vote's, and `seconds_saved_unscored` of its
        time without the reward model; `difference` of accuracy from it; and `after_the_fact`, where the plain samples
        have goal similarities: `tokens_saved` and `difference` that the evaluation of them finds at this threshold, in
        tokens of the reward model.
    Raises:
        ValueError: questions that were filtered with different settings.
    """
    plain = next((one for one in methods if one.run == filtered.run and one.method == "majority"), None)
    if plain is None or pools is None:
        return None
    rows = [row for one in filtered.rows for row in one]
    samples = sum(row["samples"] for row in rows)
    settings = {name: rows[0][name] for name in ("threshold", "warmup_tokens", "check_every")}
    differ = [row for row in rows if any(row[name] != value for name, value in settings.items())]
    if differ:
        raise ValueError(f"{filtered.name}: filtered with {settings}, but question {differ[0]['index']} differently")

    scoring = np.array([[row.get("reward_seconds", 0.0) for row in one] for one in plain.rows])

    def saved(name: str, below: np.ndarray) -> dict[str, Any] | None:
        return _as_json(spread_of_ratio(below - filtered.costs[name], below, **options)) if below.all() else None

    return {
        **settings,
        **{name: sum(row[name] for row in rows) / samples for name in ("stopped", "dropped", "decided")},
        "fallbacks": sum(row["fallback"] for row in rows) / len(rows),
        "tokens_saved": saved("policy_tokens", plain.costs["policy_tokens"]),
        "seconds_saved": saved("seconds", plain.costs["seconds"]),
        "seconds_saved_unscored": saved("seconds", plain.costs["seconds"] - scoring),
        "difference": _as_json(spread_of_ratio(filtered.right - plain.right, **options)),
        "after_the_fact": _after_the_fact(pools, settings, options),
    }


def _after_the_fact(
    pools: SamplePools, settings: Mapping[str, Any], options: Mapping[str, int]
) -> dict[str, Any] | None:
    if any(ballot.cosine_sim is None for ballots in pools.ballots for ballot in ballots):
        return None
    outcomes = [
        filter_outcomes(ballots, [settings["threshold"]], settings["warmup_tokens"]) for ballots in pools.ballots
    ]
    tokens, used = np.array([one.tokens for one in outcomes]), np.array([one.used[:, 0] for one in outcomes])
    change = np.array([one.right[:, 0].astype(float) - one.unfiltered_right for one in outcomes])
    return {
        "tokens_saved": _as_json(spread_of_ratio(tokens - used, tokens, **options)),
        "difference": _as_json(spread_of_ratio(change, **options)),
    }


def _against(
    one: MethodRun,
    reference: MethodRun,
    comparison: Comparison,
    by_count: Callable[[str, str], list[list[np.ndarray]]],
    options: Mapping[str, int],
) -> dict[str, Any]:
    """The baseline at the method's policy tokens, or as it is where it has no pool.

    Args:
        by_count: accuracies of smaller pools of a folder, by figure.
    """
    pools = comparison.pools.get(reference.run)
    figure = POOL_FIGURES.get(reference.method)
    count = max(len(one.seeds), len(reference.seeds))  # a deterministic method stands for every seed
    right, tokens = (_repeat(values, count) for values in (one.right, one.costs["policy_tokens"]))
    if pools is not None and figure is not None and reference.method != "sample":
        equal = at_equal_tokens(by_count(reference.run, figure), pools.tokens, tokens)
        told = {"equal_tokens": True, "samples": equal.samples, "within": equal.within}
        other = equal.right
    else:
        told = {"equal_tokens": False, "samples": None, "within": None}
        other = _repeat(reference.right, count)
    return {
        "baseline": reference.name,
        **told,
        "accuracy": _as_json(spread_of_ratio(other, **options)),
        "difference": _as_json(spread_of_ratio(right - other, **options)),
    }


def _curve(one: MethodRun, pools: SamplePools, options: Mapping[str, int]) -> list[dict[str, Any]]:
    """Accuracy and policy tokens of smaller pools."""
    figure = POOL_FIGURES[one.method]
    right = np.array([selection_accuracies(ballots, [figure])[figure] for ballots in pools.ballots])  # (S, Q, sizes)
    sizes = subset_sizes([ballot for ballots in pools.ballots for ballot in ballots])
    points = []
    for column, size in enumerate(sizes):
        tokens = pools.tokens * np.minimum(size, pools.sizes) / pools.sizes
        accuracy = _as_json(spread_of_ratio(right[:, :, column], **options))
        points.append({"samples": size, "policy_tokens": float(tokens.mean()), "accuracy": accuracy})
    return points


def _repeat(values: np.ndarray, seeds: int) -> np.ndarray:
    return np.repeat(values, seeds, axis=0) if len(values) == 1 else values


def _as_json(spread: Spread) -> dict[str, Any]:
    return {
        "value": spread.over_both.value,
        "interval": list(spread.over_both[1:]),
        "over_questions": list(spread.over_questions[1:]),
        "over_seeds": list(spread.over_seeds[1:]),
        "by_seed": spread.by_seed,
    }
