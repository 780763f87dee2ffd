"""How well scores along a solution find its first wrong step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf.evaluation.bootstrap import QuestionDraws, ratio_intervals
from openrlhf.evaluation.metrics import auroc_intervals
from openrlhf.evaluation.paired import mcnemar_p

Rows = Sequence[Mapping[str, Any]]
KEYS = {"goal similarity": "cosine_sim", "reward": "partial_rewards"}  # name in rules: per-token key of the rows


@dataclass(frozen=True)
class SteppedRow:
    """Scores of a solution with S steps of which the first wrong one is known."""

    question: str
    first_error: int  # 0-based
    values: dict[str, np.ndarray]  # (S,) float64 at the last token of each step, by name of the score
    before: dict[str, float]  # at the first response token, by name of the score
    cut_off: bool  # further steps were cut off and are not among the S

    @property
    def steps(self) -> int:
        """S."""
        return len(next(iter(self.values.values())))


def lowest_step(values: np.ndarray, before: float) -> int | None:
    """The step with the lowest value, the earlier one of equal ones."""
    return int(np.argmin(values))


def largest_drop(values: np.ndarray, before: float) -> int | None:
    """The step whose value lies furthest below the one before it, the earlier one of equal ones; may be a rise."""
    return int(np.argmin(np.diff(values, prepend=before)))


def first_fall(values: np.ndarray, before: float) -> int | None:
    """The first step whose value is below the one before it; None when none is."""
    falls = np.flatnonzero(np.diff(values, prepend=before) < 0)
    return int(falls[0]) if len(falls) else None


RULES: dict[str, Callable[[np.ndarray, float], int | None]] = {
    "lowest": lowest_step,
    "largest drop of": largest_drop,
    "first fall of": first_fall,
}


def step_level(rows: Rows, draws: QuestionDraws) -> dict[str, Any] | None:
    """How often each rule names the first wrong step, against a random step, and goal similarity against reward.

    Args:
        rows: scored completions with `first_error_step` (from 1; 0, -1 or null: no error), `generated_solution`,
            `token_ends`, `partial_rewards`, where it exists `cosine_sim`, and `steps`, the texts of the steps in order;
            without them every line of the solution that is not blank is a step.
        draws: draws of questions that include those of all rows.
    Returns:
        None when no row has the key `first_error_step`. Else
        - `rows` that are judged and their `steps`; `cut_off`: those of them whose last steps were cut off and are no
          candidates; `left_out`: rows by reason;
        - by rule [value, low, high]: `accuracy`, share of rows where the rule names the first wrong step, `within_one`,
          the same with the steps beside it, and `above_chance`, accuracy minus that of a random step of the same rows;
        - `chance`, `chance_within_one`: expected accuracy of a random step;
        - `auroc`: by score, of the steps before the first error against the others, also that of the "position" alone
          (earlier = better);
        - `differences`: goal similarity minus reward by rule, with interval, exact McNemar `p_value`, and the rows
          `better` and `worse`.
        Rules on goal similarity are judged on the rows that have it.
    Raises:
        ValueError: a `first_error_step` that is no whole number, or offsets that fall (names the row).
    """
    if not any("first_error_step" in row for row in rows):
        return None
    stepped: list[SteppedRow] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        found = stepped_row(row, number)
        if isinstance(found, str):
            left_out[found] += 1
        else:
            stepped.append(found)
    columns = draws.columns([row.question for row in stepped])
    figures: dict[str, dict[str, list]] = {"accuracy": {}, "within_one": {}, "above_chance": {}}
    rules: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # name: (rows that have the score, 0-based step named or -9)
    for score in KEYS:
        members = np.array([i for i, row in enumerate(stepped) if score in row.values], np.int64)
        for words, rule in RULES.items():
            if len(members):
                named = [rule(stepped[i].values[score], stepped[i].before[score]) for i in members]
                rules[f"{words} {score}"] = members, np.array([-9 if step is None else step for step in named])
    error = np.array([row.first_error for row in stepped], np.int64)
    lengths = np.array([row.steps for row in stepped], np.int64)
    for name, (members, named) in rules.items():
        distance = np.abs(named - error[members])
        hit = (distance == 0).astype(float)
        for key, values in zip(figures, (hit, distance <= 1, hit - 1 / lengths[members]), strict=True):
            figures[key][name] = list(ratio_intervals(draws, columns[members], values)[0])
    near = np.minimum(error + 1, lengths - 1) - np.maximum(error - 1, 0) + 1  # steps at most one away
    return {
        "rows": len(stepped),
        "steps": int(lengths.sum()),
        "cut_off": sum(row.cut_off for row in stepped),
        "left_out": dict(left_out),
        **figures,
        "chance": list(ratio_intervals(draws, columns, 1 / lengths)[0]),
        "chance_within_one": list(ratio_intervals(draws, columns, near / lengths)[0]),
        "auroc": _step_auroc(stepped, draws),
        "differences": _differences(rules, error, columns, draws),
    }


def stepped_row(row: Mapping[str, Any], number: int = 0) -> SteppedRow | str:
    """The scores of a row by step, or the reason why it cannot be judged."""
    first = row.get("first_error_step")
    if first is None or first in (0, -1):
        return "without error"
    if isinstance(first, bool) or not isinstance(first, int | float) or first < 0 or first % 1:
        raise ValueError(f"row {number}: expected a whole number in 'first_error_step', got {first!r}")
    if row.get("reward") is None or row.get("partial_rewards") is None:
        return "without reward"
    if row.get("token_ends") is None:
        return "without token_ends"
    ends = step_ends(row.get("generated_solution") or "", row.get("steps"))
    if ends is None:
        return "steps not found in the solution"
    if first > len(ends):
        return "first_error_step beyond the steps"
    token_ends = np.asarray(row["token_ends"])
    if (np.diff(token_ends) < 0).any() or len(token_ends) != len(row["partial_rewards"]):
        raise ValueError(f"row {number}: expected one rising offset a token in 'token_ends'; run eval_rm again")
    last = np.searchsorted(token_ends, ends)  # the first token that reaches the end of the step
    read = last[last < len(token_ends)]
    if len(read) < first:
        return "first wrong step cut off"
    scores = {name: row[key] for name, key in KEYS.items() if row.get(key) is not None}
    per_token = {name: np.asarray(values, np.float32).astype(np.float64) for name, values in scores.items()}
    return SteppedRow(
        question=row["question"],
        first_error=int(first) - 1,
        values={name: values[read] for name, values in per_token.items()},
        before={name: float(values[0]) for name, values in per_token.items()},
        cut_off=len(read) < len(ends),
    )


def step_ends(solution: str, steps: Sequence[str] | None = None) -> list[int] | None:
    """Offset behind the last character of each step, white space around it apart.

    Args:
        solution: the text that was scored.
        steps: texts of the steps; each is looked for behind the one before. None: the lines that are not blank.
    Returns:
        Rising offsets, or None when there is no step, an empty one, or one that the solution does not hold.
    """
    ends: list[int] = []
    position = 0
    for step in solution.split("\n") if steps is None else steps:
        text = step.strip()
        if not text and steps is None:
            continue
        position = solution.find(text, position) if text else -1
        if position < 0:
            return None
        position += len(text)
        ends.append(position)
    return ends or None


def _step_auroc(stepped: Sequence[SteppedRow], draws: QuestionDraws) -> dict[str, list[float | None]]:
    """AUROC of steps before the first error against the first wrong one and all after it."""
    intervals = {}
    for score in (*KEYS, "position"):
        rows = [row for row in stepped if score in row.values or score == "position"]
        if not rows:
            continue
        labels = [step < row.first_error for row in rows for step in range(row.steps)]
        groups = [row.question for row in rows for _ in range(row.steps)]
        if score == "position":
            values = [-float(step) for row in rows for step in range(row.steps)]
        else:
            values = np.concatenate([row.values[score] for row in rows])
        intervals[score] = list(auroc_intervals(labels, {score: values}, groups, draws)[score])
    return intervals


def _differences(
    rules: Mapping[str, tuple[np.ndarray, np.ndarray]], error: np.ndarray, columns: np.ndarray, draws: QuestionDraws
) -> list[dict[str, Any]]:
    """The rules on goal similarity against the same ones on the reward, on the rows that have both."""
    records = []
    for words in RULES:
        names = f"{words} goal similarity", f"{words} reward"
        if not all(name in rules for name in names):
            continue
        (goal_rows, goal_steps), (reward_rows, reward_steps) = (rules[name] for name in names)
        both = np.isin(reward_rows, goal_rows)
        goal = goal_steps == error[goal_rows]
        reward = reward_steps[both] == error[goal_rows]
        better, worse = int((goal & ~reward).sum()), int((reward & ~goal).sum())
        (difference,) = ratio_intervals(draws, columns[goal_rows], goal.astype(float) - reward)
        records.append(
            {
                "rule": words.removesuffix(" of"),
                "difference": list(difference),
                "p_value": mcnemar_p(better, worse),
                "better": better,
                "worse": worse,
            }
        )
    return records
