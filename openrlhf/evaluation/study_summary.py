"""Finished cells of a study brought together: means over seeds, and differences from the baseline with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from openrlhf.evaluation.bootstrap import QuestionDraws, draw_questions
from openrlhf.evaluation.study_scores import Kind, measure_draws
from openrlhf.evaluation.study_statistics import paired_by_seed, t_interval, two_level_interval

DRAWS = 1000  # of questions, for the intervals of shared sets
DRAW_SEED = 0


@dataclass(frozen=True)
class FinishedCell:
    """A finished cell under the names that the study gives it."""

    task: str
    variant: str
    seed: int
    record: dict[str, Any]  # what cell.json holds
    scores: Path  # scores.npz

    @property
    def key(self) -> str:
        """Changes when the cell is run again."""
        return f"{self.record['identity']}-{self.scores.stat().st_mtime_ns}"


def summarise_study(cells: Sequence[FinishedCell], baseline: str, variants: Sequence[str]) -> dict[str, Any]:
    """Figures of every task and evaluation set by variant.

    Args:
        cells: finished ones of one study.
        baseline: variant that the others are compared with.
        variants: names in the order of the tables; one without finished cells is left out.
    Returns:
        `baseline` and `tasks`: by task `variants` (by variant `seeds`, `steps`, `examples`, `seconds` of training and
        scoring) and `sets`: by name `kind`, `shared`, `completions`, `correct` (means over cells), of step-level sets
        `judged` (rows) and `chance` (accuracy of a random step), `measures` by measure and variant (see `_measure`),
        `votes` and `trajectory` by variant (means over seeds; None where there are none).
    """
    tasks: dict[str, Any] = {}
    for task in dict.fromkeys(cell.task for cell in cells):
        own = {name: [cell for cell in cells if (cell.task, cell.variant) == (task, name)] for name in variants}
        own = {name: sorted(part, key=lambda cell: cell.seed) for name, part in own.items() if part}
        first = next(iter(own.values()))[0].record["sets"]
        tasks[task] = {
            "variants": {name: _effort(part) for name, part in own.items()},
            "sets": {name: _set(name, own, baseline) for name in first},
        }
    return {"baseline": baseline, "tasks": tasks}


def _effort(cells: Sequence[FinishedCell]) -> dict[str, Any]:
    records = [cell.record for cell in cells]
    return {
        "seeds": [cell.seed for cell in cells],
        "steps": fmean(record["steps"] for record in records),
        "examples": fmean(record["pairs"].get("kept", record["pairs"].get("examples")) for record in records),
        "seconds": {part: fmean(record["seconds"][part] for record in records) for part in ("training", "scoring")},
    }


def _set(name: str, cells: dict[str, list[FinishedCell]], baseline: str) -> dict[str, Any]:
    """Figures of one evaluation set of one task."""
    found = {variant: [cell.record["sets"][name] for cell in part] for variant, part in cells.items()}
    everything = [one for part in found.values() for one in part]
    first = everything[0]
    correct = [one["correct"] for one in everything if one["correct"] is not None]
    stepped = first.get("step_level")
    return {
        "kind": first["kind"],
        "shared": first["shared"],
        "completions": fmean(one["completions"] for one in everything),
        "correct": fmean(correct) if correct else None,
        "judged": None if stepped is None else stepped["rows"],
        "chance": None if stepped is None else stepped["chance"][0],
        "measures": {
            measure: {
                variant: _measure(name, measure, part, cells.get(baseline, [])) for variant, part in cells.items()
            }
            for measure in first["measures"]
        },
        "votes": {variant: _mean([one["votes"] for one in part]) for variant, part in found.items()},
        "trajectory": {variant: _mean([one["trajectory"] for one in part]) for variant, part in found.items()},
    }


def _measure(
    name: str, measure: str, cells: Sequence[FinishedCell], baseline: Sequence[FinishedCell]
) -> dict[str, Any]:
    """One measure of one variant.

    Returns:
        `values` by seed, their `mean` and standard deviation `sd`; `difference` from the same measure of the baseline
        (None for the baseline itself), and of goal similarities `from_reward`, the difference from what the baseline
        reaches with its reward; both as `_difference` gives them.
    """
    values = _values(name, measure, cells)
    known = [value for value in values.values() if value is not None]
    is_baseline = bool(baseline) and cells[0].variant == baseline[0].variant
    of_reward = measure.replace("goal_similarity", "reward").replace("goal similarity", "reward")
    return {
        "values": {str(seed): value for seed, value in values.items()},
        "mean": fmean(known) if known else None,
        "sd": stdev(known) if len(known) > 1 else None,
        "difference": None if is_baseline else _difference(name, cells, measure, baseline, measure),
        "from_reward": None if of_reward == measure else _difference(name, cells, measure, baseline, of_reward),
    }


def _difference(
    name: str, cells: Sequence[FinishedCell], measure: str, baseline: Sequence[FinishedCell], other: str
) -> dict[str, Any] | None:
    """A measure of a variant minus another one of the baseline, over the seeds that have both on the same completions.

    Returns:
        `seeds`, `values`, `mean`, the intervals `t` and, of a shared set, `two_level` [low, high], and `interval`, the
        one to be shown; None without such seeds.
    """
    ours, theirs = ({cell.seed: cell for cell in part} for part in (cells, baseline))
    alike = [s for s in ours.keys() & theirs.keys() if _extent(ours[s], name) == _extent(theirs[s], name)]
    differences = paired_by_seed(
        *(_values(name, key, [own[seed] for seed in alike]) for key, own in ((measure, ours), (other, theirs)))
    )
    if not differences:
        return None
    mean, *t = t_interval(list(differences.values()))
    two_level = None
    if cells[0].record["sets"][name]["shared"]:
        drawn = [_drawn(ours[seed], name, measure) - _drawn(theirs[seed], name, other) for seed in differences]
        two_level = list(two_level_interval(list(differences.values()), np.stack(drawn), DRAW_SEED)[1:])
    return {
        "seeds": list(differences),
        "values": list(differences.values()),
        "mean": mean,
        "t": t,
        "two_level": two_level,
        "interval": t if two_level is None else two_level,
    }


def _values(name: str, measure: str, cells: Sequence[FinishedCell]) -> dict[int, float | None]:
    """A measure by seed."""
    return {cell.seed: cell.record["sets"][name]["measures"].get(measure) for cell in cells}


def _extent(cell: FinishedCell, name: str) -> tuple[int | None, ...]:
    """Completions and questions of a cell's set: a variant whose max_len drops other held-out pairs has others."""
    return tuple(cell.record["sets"][name].get(key) for key in ("completions", "questions"))


def _drawn(cell: FinishedCell, name: str, measure: str) -> np.ndarray:
    """(n,) a measure of a cell's set on every draw of its questions."""
    return _drawn_of_file(cell.scores, cell.key, name, measure, cell.record["sets"][name]["kind"])


@cache  # tables are written again after every cell; the key changes when a cell was run again
def _drawn_of_file(scores: Path, key: str, name: str, measure: str, kind: Kind) -> np.ndarray:
    with np.load(scores) as stored:
        arrays = {part.removeprefix(f"{name}/"): stored[part] for part in stored.files if part.startswith(f"{name}/")}
    return measure_draws(arrays, kind, measure, _draws(int(arrays["question"].max()) + 1))


@lru_cache(maxsize=8)
def _draws(count: int) -> QuestionDraws:
    """Draws of the questions 0 to count - 1; the same for all cells, so that their differences are paired."""
    return draw_questions(range(count), DRAWS, DRAW_SEED)


def _mean(parts: Sequence[Any]) -> Any:
    """Mean over seeds of every number in nested values; None where a seed has none; lists of thresholds stay out."""
    first = parts[0]
    if any(part is None for part in parts):
        return None
    if isinstance(first, dict):
        return {key: _mean([part[key] for part in parts]) for key in first if key != "thresholds"}
    if isinstance(first, list):
        return [_mean(list(part)) for part in zip(*parts, strict=True)]
    return fmean(parts)
