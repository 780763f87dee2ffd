"""Rows from wherever they lie: hub, saved data set, local files or folders, and blends of several."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openrlhf.datasets.files import FILE_SUFFIXES, load_files
from openrlhf.datasets.jsonl import OnBadRow

if TYPE_CHECKING:  # the package takes a second to import; flags are read without it
    import datasets

logger = logging.getLogger(__name__)

# File names in a folder that start with one of these words, with no letter behind it, belong to that split.
_SPLIT_WORDS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
_SPLIT_NAME = re.compile(rf"({'|'.join(_SPLIT_WORDS)})(?![a-z])")


def load_rows(
    spec: str,
    split: str = "train",
    *,
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    on_bad_row: OnBadRow = "error",
) -> datasets.Dataset:
    """Memory-mapped rows of one source or of a comma list of sources.

    A source is a local file (json, jsonl, csv, each also .gz, parquet, arrow), a folder of them, a folder made by
    `save_to_disk`, or a hub id; `name@subset` is a configuration or folder of a hub data set, or a folder in a
    local one.

    Args:
        spec: one source or several, comma separated.
        split: of data sets that have splits; in a folder whose files are named train, validation, test
            (and more behind it that does not start with a letter), the files.
            A single file is taken whole.
        probs: share of the rows of each source, comma separated, as "0.7,0.3"; they are scaled to sum to 1. As many
            rows as the shares allow are drawn, none of them twice, in random order. None: all rows of all sources, in
            order.
        max_samples: at most that many rows, drawn without replacement and kept in order.
        seed: of the draws; the same seed gives the same rows in the same order.
        on_bad_row: a line that cannot be read raises ("error") or is left out and counted in the log ("skip").
    Raises:
        ValueError: a source that does not exist or has no such split, bad probs, no rows at all.
        RuntimeError: the hub does not answer.
    """
    import datasets

    from openrlhf.datasets.columns import align_features

    names = [name.strip() for name in spec.split(",")]
    if not all(names):
        raise ValueError(f"dataset: expected a source or a comma list of sources, got {spec!r} with an empty entry")
    weights = parse_probs(probs, len(names)) if probs is not None else None
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples: expected at least 1, got {max_samples}")
    wanted = [i for i in range(len(names)) if weights is None or weights[i] > 0]
    parts = [_load_source(names[i], split, on_bad_row) for i in wanted]
    for i, part in zip(wanted, parts, strict=True):
        logger.info("%s: %d rows", names[i], len(part))
        if not len(part):
            logger.warning("%s has no rows: nothing is taken from it", names[i])
    filled = [i for i, part in enumerate(parts) if len(part)]
    if not filled:
        raise ValueError(f"no rows in {spec!r} (split {split!r})")
    parts = align_features([parts[i] for i in filled])
    rows = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if weights is not None and len(parts) > 1:
        picked = blend_indices([len(part) for part in parts], [weights[wanted[i]] for i in filled], seed)
        rows = rows.select(picked)
    if max_samples is not None and max_samples < len(rows):
        rows = rows.select(np.sort(np.random.default_rng(seed).permutation(len(rows))[:max_samples]))
    return rows


def parse_probs(probs: str, sources: int) -> list[float]:
    """Shares from a comma list, scaled to sum to 1.

    Raises:
        ValueError: not one number for each source, a negative or infinite one, or all zero.
    """
    try:
        weights = [float(part) for part in probs.split(",")]
    except ValueError:
        raise ValueError(f"dataset_probs: expected numbers such as 0.7,0.3, got {probs!r}") from None
    if len(weights) != sources:
        raise ValueError(
            f"dataset_probs: expected {sources} numbers, one for each source, got {len(weights)}: {probs!r}"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
        raise ValueError(f"dataset_probs: expected numbers of at least 0 and not all 0, got {probs!r}")
    return [weight / sum(weights) for weight in weights]


def blend_indices(sizes: Sequence[int], weights: Sequence[float], seed: int) -> np.ndarray:
    """Positions, in the sources laid end to end, of the largest blend that has these shares and no row twice.

    Args:
        sizes: rows of each source, at least 1.
        weights: share of each source, above 0.
    Returns:
        (N,) int64 in random order; source i gives round(N * share i) rows, drawn without replacement.
    """
    total = sum(weights)
    largest = min(size * total / weight for size, weight in zip(sizes, weights, strict=True))
    generator = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    picked = []
    for start, size, weight in zip(starts, sizes, weights, strict=True):
        count = min(size, max(1, round(largest * weight / total)))
        picked.append(start + generator.permutation(size)[:count])
    return generator.permutation(np.concatenate(picked)).astype(np.int64)


def split_rows(
    dataset: datasets.Dataset,
    eval_fraction: float,
    seed: int,
    group_columns: Sequence[str] = ("question", "prompt", "problem"),
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Take a share of the rows out for evaluation; no row, and no question, is on both sides.

    Args:
        eval_fraction: share of rows for evaluation, above 0 and below 1; met up to the size of one question's rows.
        seed: of the choice.
        group_columns: rows stay together whose value in the first of these columns that is not null is the same but
            for white space; where none of them exists, equal rows do.
    Returns:
        (train, eval), both in the original order.
    Raises:
        ValueError: a fraction out of range, or fewer than two questions.
    """
    if not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction: expected a share above 0 and below 1, got {eval_fraction}")
    groups = _row_groups(dataset, group_columns)
    count = int(groups.max()) + 1 if len(groups) else 0
    if count < 2:
        raise ValueError(
            f"cannot split {len(dataset)} rows of {count} different questions into train and evaluation rows"
        )
    order = np.random.default_rng(seed).permutation(count)
    sizes = np.bincount(groups, minlength=count)[order]
    wanted = max(1.0, eval_fraction * len(dataset))
    taken = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1
    is_eval = np.isin(groups, order[: min(taken, count - 1)])
    return dataset.select(np.flatnonzero(~is_eval)), dataset.select(np.flatnonzero(is_eval))


def fingerprint_rows(dataset: datasets.Dataset) -> str:
    """Hex digest of column names, types, values and row order; 32 characters."""
    import pyarrow as pa

    digest = hashlib.blake2b(str(dataset.features).encode(), digest_size=16)
    for table in dataset.with_format("arrow").iter(batch_size=5000):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
            writer.write_table(table.replace_schema_metadata(None).combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()


def source_files(name: str, split: str) -> list[Path]:
    """The files that load_rows reads of one local source; none for a saved data set, or one that is not there."""
    path = Path(name).expanduser()
    base, _, subset = name.partition("@")
    if not path.exists() and subset:
        path = Path(base).expanduser() / subset
    if path.is_dir():
        return _folder_files(path, split)[0]
    return [path] if path.is_file() else []


def _load_source(name: str, split: str, on_bad_row: OnBadRow) -> datasets.Dataset:
    path = Path(name).expanduser()
    base, _, subset = name.partition("@")
    if not path.exists() and subset and Path(base).expanduser().is_dir():
        path = Path(base).expanduser() / subset
        if not path.exists():
            raise ValueError(f"{name}: no folder or file {subset!r} in {base}")
    if path.is_file():
        return load_files([path], on_bad_row)
    if path.is_dir():
        return _load_folder(path, split, on_bad_row)
    if _looks_like_path(name):
        raise ValueError(f"{name}: no such file or folder (seen from {Path.cwd()})")
    return _load_hub(base, subset, split)


def _load_folder(folder: Path, split: str, on_bad_row: OnBadRow) -> datasets.Dataset:
    import datasets

    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.Dataset):
            return saved
        if split not in saved:
            raise ValueError(f"{folder}: no split {split!r}, it has {sorted(saved)}")
        return saved[split]
    files, left_out = _folder_files(folder, split)
    if not files and not left_out:
        raise ValueError(
            f"{folder}: no data files in this folder (expected names ending in {', '.join(FILE_SUFFIXES)})"
        )
    if not files:
        names = sorted({found for path in left_out if (found := _split_of(path))})
        raise ValueError(f"{folder}: no files of split {split!r}, it has files of {names}")
    if left_out:
        shown = ", ".join(path.name for path in left_out[:20])
        logger.warning("%s: %d files are not of split %r and left out: %s", folder, len(left_out), split, shown)
    return load_files(files, on_bad_row)


def _folder_files(folder: Path, split: str) -> tuple[list[Path], list[Path]]:
    """Data files of a folder: those of the split, and the others; all are of it where no name starts with a split's."""
    files = sorted(
        path for path in folder.iterdir() if path.name.endswith(FILE_SUFFIXES) and not path.name.startswith(".")
    )
    splits = {path: _split_of(path) for path in files}
    if not any(splits.values()):
        return files, []
    wanted = _SPLIT_WORDS.get(split, split)
    return [path for path in files if splits[path] == wanted], [path for path in files if splits[path] != wanted]


def _split_of(path: Path) -> str | None:
    match = _SPLIT_NAME.match(path.name.lower())
    return _SPLIT_WORDS[match.group(1)] if match else None


def _looks_like_path(name: str) -> bool:
    if name.startswith((".", "/", "~")) or name.endswith(FILE_SUFFIXES) or name.count("/") > 1 or "\\" in name:
        return True
    return "/" in name and Path(name).parent.is_dir()


def _load_hub(name: str, subset: str, split: str) -> datasets.Dataset:
    import datasets

    try:
        config, folder = None, None
        if subset:
            config = subset if subset in datasets.get_dataset_config_names(name) else None
            folder = None if config else subset
        return datasets.load_dataset(name, config, data_dir=folder, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"{name}: neither a local file or folder (seen from {Path.cwd()}) nor a data set on the hub ({error})"
        ) from error
    except (ConnectionError, TimeoutError, OSError) as error:
        raise RuntimeError(
            f"{name}: no such local file or folder (seen from {Path.cwd()}), and the hub did not give it: {error}"
        ) from error


def _row_groups(dataset: datasets.Dataset, group_columns: Sequence[str]) -> np.ndarray:
    """(N,) int64 group number of each row, counted from 0 in order of appearance."""
    named = [name for name in group_columns if name in dataset.column_names]
    columns = named or dataset.column_names
    numbers: dict[bytes, int] = {}
    groups = np.empty(len(dataset), dtype=np.int64)
    position = 0
    for batch in dataset.with_format(None).select_columns(columns).iter(batch_size=1000):
        for values in zip(*(batch[name] for name in columns), strict=True):
            value = next((value for value in values if value is not None), None) if named else values
            text = " ".join(value.split()) if isinstance(value, str) else json.dumps(value, default=str)
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            groups[position] = numbers.setdefault(key, len(numbers))
            position += 1
    return groups
