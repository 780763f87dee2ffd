"""Responses rated by attribute, as in HelpSteer: which rows are good in what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

ALL_GOOD = "all_categories_good"
# The columns of HelpSteer, rated 0 to 4 (Wang et al. 2023, arXiv 2311.09528).
HELPSTEER: tuple[str, ...] = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


def attribute_columns(names: Sequence[str], column_names: Sequence[str]) -> dict[str, list[str]]:
    """The columns that must all be rated well for each attribute asked for.

    Args:
        names: columns, and `all_categories_good` for every column named with it; named alone it stands for the columns
            of HelpSteer that there are.
        column_names: of the data set.
    Raises:
        ValueError: a column that does not exist, or a name given twice.
    """
    named = [name for name in names if name != ALL_GOOD]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated or not names:
        raise ValueError(f"--attribute: expected different names, got {list(names)}")
    missing = [name for name in named if name not in column_names]
    if missing:
        raise ValueError(f"--attribute {' '.join(missing)}: no such column; the columns are {list(column_names)}")
    wanted = {name: [name] for name in names}
    if ALL_GOOD in wanted:
        wanted[ALL_GOOD] = named or [name for name in HELPSTEER if name in column_names]
        if not wanted[ALL_GOOD]:
            raise ValueError(
                f"--attribute {ALL_GOOD}: expected at least one of the columns {list(HELPSTEER)}, or attributes named "
                f"with it; the columns are {list(column_names)}"
            )
    return wanted


def read_ratings(rows: datasets.Dataset, column: str) -> np.ndarray:
    """(N,) float64 ratings of one column; NaN where a row has none (null).

    Raises:
        ValueError: a value that is no finite number, with its row counted from 0.
    """
    values = [value for batch in rows.with_format(None).select_columns([column]).iter(1000) for value in batch[column]]
    return np.array([_rating(value, column, row) for row, value in enumerate(values)], dtype=np.float64)


def rated_at_least(
    ratings: dict[str, np.ndarray], attribute: str, columns: Sequence[str], minimum: float
) -> np.ndarray:
    """(N,) bool, True where a row is rated at least `minimum` in all columns; a missing rating is not.

    Raises:
        ValueError: no such row, with the counts of all ratings.
    """
    good = np.logical_and.reduce([ratings[column] >= minimum for column in columns])  # NaN >= x is False
    if not good.any():
        shown = "; ".join(f"{column}: {_tally(ratings[column])}" for column in columns)
        raise ValueError(
            f"--attribute {attribute}: none of {len(good)} rows is at or above --min_value {minimum:g} in "
            f"{' and '.join(columns)} (rows by value: {shown}); lower --min_value"
        )
    return good


def _rating(value: Any, column: str, row: int) -> float:
    if value is None:
        return math.nan
    try:
        rating = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        rating = math.nan
    if not math.isfinite(rating):
        raise ValueError(f"row {row}: expected a number under {column!r}, got {value!r}")
    return rating


def _tally(ratings: np.ndarray) -> str:
    values, counts = np.unique(ratings[~np.isnan(ratings)], return_counts=True)
    parts = [f"{value:g} in {count}" for value, count in zip(values[-10:], counts[-10:], strict=True)]
    unrated = int(np.isnan(ratings).sum())
    return ", ".join(parts + ([f"none in {unrated}"] if unrated else []))
