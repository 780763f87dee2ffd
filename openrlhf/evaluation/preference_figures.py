"""Figures of scored preference sets: accuracy on pairs, margins, length, RewardBench scores, two models compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from openrlhf.evaluation.bootstrap import QuestionDraws, draw_questions, question_sums, ratio_intervals, two_sided_p
from openrlhf.evaluation.paired import mcnemar_p
from openrlhf.evaluation.rewardbench import (
    SUBSETS_2,
    TiesItem,
    best_of_credit,
    is_rewardbench_1,
    is_ties,
    parse_ties_id,
    rewardbench_1_scores,
    rewardbench_2_scores,
    ties_score,
)

Rows = Sequence[Mapping[str, Any]]
SCORES = {"reward": "rewards", "goal_similarity": "goal_similarity"}  # name in tables: key of the rows
# Tokens of the chosen response minus tokens of the rejected one, both ends inclusive; None: no end.
LENGTH_BINS: tuple[tuple[int | None, int | None], ...] = (
    (None, -129), (-128, -33), (-32, -9), (-8, 8), (9, 32), (33, 128), (129, None),
)  # fmt: skip
MARGIN_BINS = 20


@dataclass(frozen=True)
class _Pairs:
    """P pairs of a chosen with a rejected response of one prompt."""

    margins: np.ndarray  # (P,) score of the chosen minus score of the rejected response
    lengths: np.ndarray  # (P,) tokens of the chosen minus tokens of the rejected response, before any cut
    columns: np.ndarray  # (P,) prompt of each pair, as a column of the draws

    @property
    def won(self) -> np.ndarray:
        """(P,) bool: strictly higher; a tie is not a win."""
        return self.margins > 0


def summarise_preferences(rows: Rows, *, bootstrap: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Figures of one scored preference set.

    A pair is a chosen with a rejected response of one prompt; a row of c chosen and r rejected responses has c * r.
    Rows without a reward for every response are counted and left out. Undefined figures are None; an interval I is
    [value, low, high] (95%, bootstrap over prompts).

    Args:
        rows: from `score_preferences`.
    Returns:
        Counts `rows`, `prompts`, `pairs`, `without_reward` (rows), `truncated` (responses), `identical` (pairs of equal
        texts). For each score of SCORES that the rows have: `accuracy` I, `ties` (pairs), `margin`: `mean` I, `median`,
        `histogram` with `edges` and `counts`, `best_of_n` I (only where a row has more than two responses, otherwise
        None). `length`: see `_length_figures`. `subsets`: the same by subset, without those two last keys.
        `rewardbench`: scores of RewardBench 1 or 2 by score, None for other sets.
    """
    figures = _figures(rows, bootstrap, seed)
    subsets = list(dict.fromkeys(row["subset"] for row in rows if row["subset"] is not None))
    figures["subsets"] = {
        subset: _figures([row for row in rows if row["subset"] == subset], bootstrap, seed) for subset in subsets
    }
    figures["rewardbench"] = _rewardbench(rows, figures["subsets"])
    return figures


def compare_preferences(
    a_rows: Rows, b_rows: Rows, score: str = "reward", *, bootstrap: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Accuracy of model a minus accuracy of model b on the pairs that both have scored.

    Rows are matched by their place in the set and their responses; the prompts may be rendered differently.

    Returns:
        `score`, `pairs`, `a` and `b` (accuracies), `difference`, `low`, `high` (bootstrap over prompts), `better`
        (pairs that a alone decides rightly), `worse`, `p_value` (exact McNemar over pairs), `p_bootstrap` (over
        prompts, to be preferred where prompts have several pairs) and `unmatched` (rows of either side). None where
        undefined.
    """
    others = {_key(row): row for row in b_rows}
    matched = [(row, others[_key(row)]) for row in a_rows if _key(row) in others]
    usable = [(a, b) for a, b in matched if _complete(a, score) and _complete(b, score)]
    draws = draw_questions([a["prompt"] for a, _ in usable], bootstrap, seed)
    first = _pairs([a for a, _ in usable], score, draws)
    columns, won_a = first.columns, first.won
    won_b = _pairs([b | {"prompt": a["prompt"]} for a, b in usable], score, draws).won
    better, worse = int((won_a & ~won_b).sum()), int((won_b & ~won_a).sum())
    difference = won_a.astype(float) - won_b.astype(float)
    (interval,) = ratio_intervals(draws, columns, difference)
    p_bootstrap = two_sided_p(question_sums(draws, columns, difference)[:, 0]) if len(difference) else None
    return {
        "score": score,
        "pairs": len(won_a),
        "a": float(won_a.mean()) if len(won_a) else None,
        "b": float(won_b.mean()) if len(won_b) else None,
        "difference": interval.value,
        "low": interval.low,
        "high": interval.high,
        "better": better,
        "worse": worse,
        "p_value": mcnemar_p(better, worse) if len(won_a) else None,
        "p_bootstrap": p_bootstrap,
        "unmatched": len(a_rows) + len(b_rows) - 2 * len(matched),
    }


def _figures(rows: Rows, bootstrap: int, seed: int) -> dict[str, Any]:
    usable = [row for row in rows if _complete(row, "reward")]
    draws = draw_questions([row["prompt"] for row in usable], bootstrap, seed)
    scores = [name for name in SCORES if name == "reward" or _all_complete(usable, name)]
    pairs = {name: _pairs(usable, name, draws) for name in scores}
    intervals = {name: list(ratio_intervals(draws, one.columns, one.won)[0]) for name, one in pairs.items()}
    return {
        "rows": len(rows),
        "prompts": len({row["prompt"] for row in rows}),
        "pairs": len(pairs["reward"].margins),
        "without_reward": len(rows) - len(usable),
        "truncated": sum(sum(row["truncated"]) for row in rows),
        "identical": sum(
            chosen == rejected for row in usable for chosen, rejected in _each_pair(row["responses"], row["num_chosen"])
        ),
        "accuracy": intervals,
        "ties": {name: int((one.margins == 0).sum()) for name, one in pairs.items()},
        "margin": {name: _margin_figures(one, draws) for name, one in pairs.items()},
        "best_of_n": _best_of_n(usable, scores, draws),
        "length": _length_figures(pairs, draws),
    }


def _margin_figures(pairs: _Pairs, draws: QuestionDraws) -> dict[str, Any]:
    if not len(pairs.margins):
        return {"mean": [None, None, None], "median": None, "histogram": None}
    widest = float(np.abs(pairs.margins).max()) or 1.0  # symmetric, so that 0 is an edge
    counts, edges = np.histogram(pairs.margins, MARGIN_BINS, (-widest, widest))
    return {
        "mean": list(ratio_intervals(draws, pairs.columns, pairs.margins)[0]),
        "median": float(np.median(pairs.margins)),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _best_of_n(rows: Rows, scores: Sequence[str], draws: QuestionDraws) -> dict[str, list] | None:
    """Mean `best_of_credit` over rows, which is 1/k for a correct response that ties with others at the top."""
    if all(len(row["responses"]) == 2 for row in rows):
        return None
    columns = draws.columns([row["prompt"] for row in rows])
    credits = {name: [best_of_credit(row[SCORES[name]], row["num_chosen"]) for row in rows] for name in scores}
    return {name: list(ratio_intervals(draws, columns, np.array(values))[0]) for name, values in credits.items()}


def _length_figures(pairs: Mapping[str, _Pairs], draws: QuestionDraws) -> dict[str, Any]:
    """How accuracy depends on length, in response tokens before any cut.

    Returns:
        `chosen_longer`, `chosen_shorter` and `equal`: `pairs` and `accuracy` I by score. `longer_is_better` I: accuracy
        of the rule that the longer response is the better one; equal lengths are not a win. `prefers_longer`: I by
        score, the share of pairs of unequal length in which the longer response scores strictly higher: the agreement
        with that rule. `bins`: `low`, `high` (chosen minus rejected, inclusive, None for no end), `pairs`, `accuracy`.
    """
    difference = pairs["reward"].lengths
    columns = pairs["reward"].columns
    inside = {"chosen_longer": difference > 0, "chosen_shorter": difference < 0, "equal": difference == 0}
    bins = [_between(difference, low, high) for low, high in LENGTH_BINS]
    masks = np.stack([*inside.values(), *bins], axis=1)  # (P, 3 + bins)
    accuracy = {
        name: ratio_intervals(draws, one.columns, one.won[:, None] & masks, masks) for name, one in pairs.items()
    }
    agreement = {
        name: list(ratio_intervals(draws, columns, one.margins * difference > 0, difference != 0)[0])
        for name, one in pairs.items()
    }
    counted = [
        {
            "pairs": int(masks[:, column].sum()),
            "accuracy": {name: list(intervals[column]) for name, intervals in accuracy.items()},
        }
        for column in range(masks.shape[1])
    ]
    ends = [{"low": low, "high": high} for low, high in LENGTH_BINS]
    return {
        **dict(zip(inside, counted, strict=False)),
        "longer_is_better": list(ratio_intervals(draws, columns, difference > 0)[0]),
        "prefers_longer": agreement,
        "bins": [one | figures for one, figures in zip(ends, counted[len(inside) :], strict=True)],
    }


def _rewardbench(rows: Rows, subsets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Scores of RewardBench 1 or 2 by score; None for other sets."""
    is_pairs = all(len(row["responses"]) == 2 for row in rows)
    if is_pairs and is_rewardbench_1(subsets):
        names = {name for figures in subsets.values() for name in figures["accuracy"]}
        return {
            name: rewardbench_1_scores(
                {
                    subset: value
                    for subset, figures in subsets.items()
                    if (value := _accuracy(figures, name)) is not None
                }
            )
            for name in SCORES
            if name in names
        }
    if is_pairs or not {subset.lower() for subset in subsets} & {name.lower() for name in SUBSETS_2}:
        return None
    usable = [row for row in rows if _complete(row, "reward")]
    return {name: _rewardbench_2(usable, name) for name in SCORES if name == "reward" or _all_complete(usable, name)}


def _rewardbench_2(rows: Rows, score: str) -> dict[str, Any]:
    by_subset: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_subset.setdefault(row["subset"], []).append(row)
    key = SCORES[score]
    values: dict[str, float | None] = {}
    ties = None
    for subset, members in by_subset.items():
        if is_ties(subset):
            ties = ties_score(TiesItem(*parse_ties_id(row["id"]), row[key], row["num_chosen"]) for row in members)
            values[subset] = ties["score"]
        elif subset is not None:
            values[subset] = fmean(best_of_credit(row[key], row["num_chosen"]) for row in members)
    return rewardbench_2_scores(values) | {"ties": ties}


def _accuracy(figures: Mapping[str, Any], score: str) -> float | None:
    return figures["accuracy"].get(score, [None])[0]


def _pairs(rows: Rows, score: str, draws: QuestionDraws) -> _Pairs:
    key = SCORES[score]
    margins, lengths, prompts = [], [], []
    for row in rows:
        scored = _each_pair(row[key], row["num_chosen"])
        margins += [chosen - rejected for chosen, rejected in scored]
        lengths += [chosen - rejected for chosen, rejected in _each_pair(row["lengths"], row["num_chosen"])]
        prompts += [row["prompt"]] * len(scored)
    return _Pairs(np.array(margins, np.float64), np.array(lengths, np.int64), draws.columns(prompts))


def _each_pair(values: Sequence[Any], num_chosen: int) -> list[tuple[Any, Any]]:
    return [(chosen, rejected) for chosen in values[:num_chosen] for rejected in values[num_chosen:]]


def _complete(row: Mapping[str, Any], score: str) -> bool:
    values = row.get(SCORES[score])
    return values is not None and all(value is not None for value in values)


def _all_complete(rows: Rows, score: str) -> bool:
    return len(rows) > 0 and all(_complete(row, score) for row in rows)


def _between(values: np.ndarray, low: int | None, high: int | None) -> np.ndarray:
    inside = np.ones(len(values), dtype=bool)
    if low is not None:
        inside &= values >= low
    if high is not None:
        inside &= values <= high
    return inside


def _key(row: Mapping[str, Any]) -> tuple:
    return row["row"], tuple(text.strip() for text in row["responses"])
