"""Compare our RewardBench scores with those of the rewardbench package on random rewards; run by check_rewardbench.sh.

Prints the largest difference of each figure and exits with 1 when any is above 1e-12.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from analysis.get_benchmark_results import get_average_over_rewardbench
from datasets import Dataset
from rewardbench.constants import EXAMPLE_COUNTS, SUBSET_MAPPING
from rewardbench.utils import calculate_scores_per_section, process_single_model, reroll_and_score_dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openrlhf.evaluation.rewardbench import (  # noqa: E402
    SECTIONS,
    TiesItem,
    best_of_credit,
    parse_ties_id,
    rewardbench_1_scores,
    ties_score,
)

LIMIT = 1e-12
DRAWS = 200


def check_sections(generator: np.random.Generator) -> float:
    """Section scores of RewardBench 1 with all subsets and with some missing, and the overall score."""
    if {
        section: {name: EXAMPLE_COUNTS[name] for name in names} for section, names in SUBSET_MAPPING.items()
    } != SECTIONS:
        raise SystemExit("the package has other sections or weights")
    largest = 0.0
    for draw in range(DRAWS):
        # Few levels of reward: about every fourth pair is a tie.
        wins = {name: generator.integers(0, 4, 50) > generator.integers(0, 4, 50) for name in EXAMPLE_COUNTS}
        accuracy = {name: float(values.mean()) for name, values in wins.items()}
        if draw % 2:
            accuracy = {name: value for name, value in accuracy.items() if generator.random() < 0.7}
        ours = rewardbench_1_scores(accuracy)
        theirs = calculate_scores_per_section(EXAMPLE_COUNTS, SUBSET_MAPPING, accuracy)
        for section, value in ours["sections"].items():
            # Without any subset the package reports 0, we report that it is undefined.
            largest = max(largest, abs((0.0 if value is None else value) - theirs[section]))
        if not draw % 2:
            table = pd.DataFrame([{"model": "m", "model_type": "t", **accuracy}])
            prior = {name: [np.nan] for name in ("anthropic_helpful", "anthropic_hhh", "shp", "summarize")}
            average = get_average_over_rewardbench(table, pd.DataFrame({"model": ["other"], **prior}))["average"][0]
            largest = max(largest, abs(ours["overall"] - average))
    return largest


def check_best_of(generator: np.random.Generator) -> float:
    """Credit of best-of-4 rows of RewardBench 2."""
    rewards = generator.integers(0, 4, (DRAWS, 4)) / 4  # many ties
    flat = {"text": [""] * rewards.size, "scores": rewards.ravel().tolist(), "id": np.repeat(np.arange(DRAWS), 4)}
    theirs = reroll_and_score_dataset(Dataset.from_dict(flat), [4] * DRAWS)["results"]
    ours = [best_of_credit(row) for row in rewards.tolist()]
    return float(np.abs(np.array(ours) - np.array(theirs)).max())


def check_ties(generator: np.random.Generator) -> float:
    """Score of the Ties subset, with numbers that have one prompt only, and with equal rewards."""
    largest, undefined = 0.0, 0
    for draw in range(DRAWS):
        rows = []
        for number in range(generator.integers(2, 12)):
            for kind in ("ref", "tied"):
                if generator.random() < 0.15:
                    continue
                correct = 1 if kind == "ref" else int(generator.integers(1, 6))
                count = correct + int(generator.integers(0 if generator.random() < 0.1 else 1, 8))
                helped = generator.integers(0, 3) * (np.arange(count) < correct)
                rewards = generator.normal(size=count) + 2 * helped
                rewards = np.round(rewards * 2) / 2 if draw % 2 else rewards
                rows.append({"id": f"{kind}:{number}", "scores": rewards.tolist(), "num_correct": correct})
        generator.shuffle(rows)
        if not rows:
            continue
        items = [TiesItem(*parse_ties_id(row["id"]), row["scores"], row["num_correct"]) for row in rows]
        ours = ties_score(items)["score"]
        _, theirs = process_single_model(Dataset.from_list(rows))
        if ours is None:  # the package counts the missing parts as 0, or returns NaN
            undefined += 1
            continue
        largest = max(largest, abs(ours - theirs))
    if undefined > DRAWS // 2:
        raise SystemExit(f"{undefined} of {DRAWS} draws of the Ties subset are undefined: too few to compare")
    print(f"(Ties: {DRAWS - undefined} draws compared)")
    return largest


def main() -> int:
    """Run all comparisons."""
    warnings.simplefilter("ignore", RuntimeWarning)  # the package takes means of nothing
    failed = False
    for name, check in {"sections": check_sections, "best of 4": check_best_of, "ties": check_ties}.items():
        difference = check(np.random.default_rng(0))
        print(f"{name}: largest difference {difference:.3g}")
        failed = failed or not difference <= LIMIT
    print("the scores differ from the package's" if failed else "the scores equal the package's")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
