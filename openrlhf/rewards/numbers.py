"""Numbers that functions and servers answer with, checked, and their normalisation within the samples of a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Logs = dict[str, float | list[float]]


def read_numbers(values: Any, count: int, what: str) -> np.ndarray:
    """What a function or a server gave, as one float32 number a sample; NaN where it gave None or NaN.

    Args:
        values: list, tuple, array or tensor of shape (count,) or (count, 1).
        what: whose they are, for errors.
    Raises:
        ValueError: anything but exactly `count` numbers, or an infinite one; names `what`, `count` and what came.
    """
    if hasattr(values, "detach"):  # a tensor, of any dtype and device
        values = values.detach().cpu().double().numpy()
    if isinstance(values, np.ndarray):
        if values.shape == (count, 1):
            values = values[:, 0]
        if values.ndim != 1:
            raise ValueError(f"{what}: expected {count} numbers, one a sample, got shape {values.shape}")
    elif not isinstance(values, list | tuple):
        raise ValueError(f"{what}: expected {count} numbers, one a sample, got {type(values).__name__} {values!r:.80}")
    if len(values) != count:
        raise ValueError(f"{what}: expected {count} numbers, one a sample, got {len(values)}")
    with np.errstate(over="ignore"):
        numbers = np.array([_number(value, i, what) for i, value in enumerate(values)], np.float64).astype(np.float32)
    if np.isinf(numbers).any():
        place = int(np.flatnonzero(np.isinf(numbers))[0])
        raise ValueError(f"{what}: sample {place} got {values[place]}; return None for a sample that has no reward")
    return numbers


def read_logs(logs: Any, what: str) -> Logs:
    """Extra logs as floats and flat lists of floats.

    Raises:
        ValueError: no mapping of names to numbers; names the key.
    """
    if not isinstance(logs, Mapping):
        raise ValueError(f"{what}: expected a dict in extra_logs, got {type(logs).__name__}")
    read: Logs = {}
    for key, values in logs.items():
        values = values.detach().cpu().double().numpy() if hasattr(values, "detach") else values
        try:
            array = np.asarray(values, dtype=np.float64)  # None becomes NaN
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}: expected numbers in extra_logs[{key!r}], got {values!r:.80}") from error
        read[str(key)] = float(array) if array.ndim == 0 else array.ravel().tolist()
    return read


def normalize_groups(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Rewards with mean 0 and sample standard deviation 1 (n - 1) within each group; NaN stays and is left out.

    Args:
        rewards: (N,) float.
        group_size: samples a group, which stand together; a group of equal rewards, or of one, becomes 0.
    Returns:
        (N,) float64; 1e-4 is added to the standard deviation, as TRL does.
    """
    groups = rewards.astype(np.float64).reshape(-1, group_size)
    scored = ~np.isnan(groups)
    counts = scored.sum(axis=1, keepdims=True)
    means = np.where(scored, groups, 0.0).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    deviations = groups - means
    squares = np.where(scored, deviations**2, 0.0).sum(axis=1, keepdims=True)
    return (deviations / (np.sqrt(squares / np.maximum(counts - 1, 1)) + 1e-4)).ravel()


def _number(value: Any, place: int, what: str) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "item") and getattr(value, "size", None) != 0:
        try:
            value = value.item()  # an array or tensor of one number
        except (RuntimeError, ValueError):
            value = [value]
    if isinstance(value, str | bytes | complex | list | tuple | Mapping):
        raise ValueError(f"{what}: expected a number for sample {place}, got {type(value).__name__} {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: expected a number for sample {place}, got {value!r:.80}") from error
