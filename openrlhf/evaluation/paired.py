"""Two scores or two ways to decide on the same questions: exact McNemar test, and AUROC differences of models."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.evaluation.metrics import paired_auroc_difference, prefix_scores

Rows = Sequence[Mapping[str, Any]]
SCORES = {"reward": "partial_rewards", "goal_similarity": "cosine_sim"}  # name in tables: per-token key of the rows
WITHIN = "goal_similarity minus reward"  # the two scores of one model


def mcnemar_p(better: int, worse: int) -> float:
    """Two-sided p-value that as many questions are gained as lost, exact.

    Args:
        better: questions right in the first way and wrong in the second.
        worse: the reverse. Questions on which both agree say nothing.
    Returns:
        Probability that a fair coin, thrown better + worse times, is at least as uneven; 1 when nothing differs.
    Raises:
        ValueError: a negative count.
    Source: McNemar 1947; exact form as the two-sided binomial test.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"expected counts of 0 or more, got {better} and {worse}")
    thrown = better + worse
    term = tail = 1  # ways to throw k heads, for k = 0, 1, ...; whole numbers, so nothing is rounded
    for k in range(min(better, worse)):
        term = term * (thrown - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**thrown)


def compare_scores(rows: Rows, bootstrap: int = 1000, seed: int = 0) -> dict[str, Any] | None:
    """AUROC of the goal similarity minus AUROC of the reward of one model, both at the last token.

    Returns:
        `score`, `rows`, `difference`, `low`, `high`, `p_value`; None when no labelled row has both scores.
    """
    usable = [row for row in rows if _has(row, "reward") and _has(row, "goal_similarity") and _label(row) is not None]
    if not usable:
        return None
    return {"score": WITHIN} | _difference(
        [_label(row) for row in usable],
        prefix_scores(usable, SCORES["goal_similarity"], 100),
        prefix_scores(usable, SCORES["reward"], 100),
        [row["question"] for row in usable],
        bootstrap,
        seed,
    )


def compare_models(a_rows: Rows, b_rows: Rows, bootstrap: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """AUROC of model a minus AUROC of model b, on the completions that both have scored.

    Completions are matched by question, solution and sample number; the k-th copy of one with the k-th of the other.

    Returns:
        One record for the reward, and one for the goal similarity where matched rows of both models have it: `score`,
        `rows` compared, `difference`, `low`, `high`, `p_value` as `paired_auroc_difference` gives them (None where
        undefined), `unmatched` rows of either model without a partner, and `left_out`: matched rows without the score,
        without a label, or with a different one in each file.
    """
    pairs, unmatched = match_completions(a_rows, b_rows)
    records = []
    for score, key in SCORES.items():
        usable = [(a, b) for a, b in pairs if _has(a, score) and _has(b, score) and _common_label(a, b) is not None]
        if not usable and score != "reward":
            continue
        first, second = [a for a, _ in usable], [b for _, b in usable]
        labels = [_common_label(a, b) for a, b in usable]
        questions = [row["question"] for row in first]
        a_scores, b_scores = prefix_scores(first, key, 100), prefix_scores(second, key, 100)
        records.append(
            {"score": score}
            | _difference(labels, a_scores, b_scores, questions, bootstrap, seed)
            | {"unmatched": unmatched, "left_out": len(pairs) - len(usable)}
        )
    return records


def compare_all(scored: Mapping[str, Mapping[str, Rows]], bootstrap: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Every comparison there is: both scores within each model, and each pair of models on the sets both have.

    Args:
        scored: rows by label of the model and name of the set.
    Returns:
        Records of `compare_scores` (with `a` equal to `b`) and `compare_models`, with `set`, `a` and `b`.
    """
    records = []
    for label, sets in scored.items():
        for name, rows in sets.items():
            record = compare_scores(rows, bootstrap, seed)
            if record is not None:
                records.append({"set": name, "a": label, "b": label} | record)
    for (a, a_sets), (b, b_sets) in itertools.combinations(scored.items(), 2):
        for name in (name for name in a_sets if name in b_sets):
            found = compare_models(a_sets[name], b_sets[name], bootstrap, seed)
            records += [{"set": name, "a": a, "b": b} | record for record in found]
    return records


def match_completions(a_rows: Rows, b_rows: Rows) -> tuple[list[tuple[Mapping[str, Any], Mapping[str, Any]]], int]:
    """Pairs of rows of the same completion in the order of `a_rows`, and how many rows of either side have none."""
    others: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for row in reversed(b_rows):
        others[completion_key(row)].append(row)
    pairs = []
    for row in a_rows:
        same = others.get(completion_key(row))
        if same:
            pairs.append((row, same.pop()))
    return pairs, len(a_rows) + len(b_rows) - 2 * len(pairs)


def completion_key(row: Mapping[str, Any]) -> tuple:
    """What makes two rows the same completion."""
    return row["question"], row.get("generated_solution"), row.get("sample")


def _difference(labels, a_scores, b_scores, questions, bootstrap: int, seed: int) -> dict[str, Any]:
    found = paired_auroc_difference(labels, a_scores, b_scores, questions, bootstrap, seed)
    return {"rows": len(labels)} | found._asdict()


def _has(row: Mapping[str, Any], score: str) -> bool:
    return row.get("reward") is not None and row.get(SCORES[score]) is not None


def _label(row: Mapping[str, Any]) -> bool | None:
    return row.get("is_correct")


def _common_label(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool | None:
    """The label of either row; None when they contradict each other."""
    first, second = _label(a), _label(b)
    if first is None or second is None:
        return second if first is None else first
    return first if first == second else None
