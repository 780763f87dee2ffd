"""Tokenised rows in the `datasets` cache: written once for a data set, a tokenizer and settings, then memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from openrlhf.datasets.sources import fingerprint_rows

TOKEN_IDS = datasets.List(datasets.Value("int32"))

_MANY_ROWS = 50_000  # from here on a second process pays for its start
_WORKERS = 2  # each further one adds about 0.3 GB: docs/data_formats.md, Memory and speed
_PREPARATION = 1  # raised when prepared rows of the same data and settings change, so that old caches are not reused


def fingerprint_prepared(rows: datasets.Dataset, tokenizer: Any, apply_chat_template: bool, **settings: Any) -> str:
    """Hex digest of everything that prepared rows depend on; 32 characters.

    Args:
        settings: further ones, of plain values.
    """
    whole = {
        "preparation": _PREPARATION,
        "rows": fingerprint_rows(rows),
        "special": [tokenizer.eos_token_id, tokenizer("a")["input_ids"]],
        "chat_template": tokenizer.chat_template if apply_chat_template else None,
        **settings,
    }
    digest = hashlib.blake2b(json.dumps(whole, sort_keys=True).encode(), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def prepared_file(kind: str, name: str) -> Path:
    """A file of prepared rows of one kind in the cache; its folder is made."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "openrlhf" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def worker_count(num_proc: int | None, texts: int) -> int:
    """Processes to tokenise so many rows of text; None: one for small data sets, two for large ones."""
    if num_proc is None:
        return min(os.cpu_count() or 1, _WORKERS) if texts >= _MANY_ROWS else 1
    return num_proc


def map_to_cache(
    rows: datasets.Dataset,
    prepare_batch: Callable[..., dict[str, list[Any]]],
    *,
    features: datasets.Features,
    kind: str,
    fingerprint: str,
    batch_rows: int,
    workers: int,
    cache: bool,
) -> datasets.Dataset:
    """The prepared rows, from the cache where they are there.

    Args:
        prepare_batch: (columns of some rows, their positions) -> columns with these features.
        kind: what is prepared, in the plural: names the folder.
        batch_rows: rows a call: bounds the Python lists alive at a time.
        cache: False prepares anew.
    """
    return rows.with_format(None).map(
        prepare_batch,
        with_indices=True,
        batched=True,
        batch_size=batch_rows,
        writer_batch_size=batch_rows,
        remove_columns=rows.column_names,
        features=features,
        num_proc=workers if workers > 1 else None,
        load_from_cache_file=cache,
        cache_file_name=str(prepared_file(kind, f"{fingerprint}.arrow")),
        new_fingerprint=fingerprint,
        desc=f"preparing {kind}",
    )


def hash_lists(column: pa.ChunkedArray, positions: np.ndarray) -> set[int]:
    """Hashes of the lists of numbers at these positions of a column, each once; they hold within this process."""
    hashes: set[int] = set()
    kept = np.zeros(len(column), dtype=bool)
    kept[positions] = True
    row = 0
    for chunk in column.chunks:
        values, offsets = np.asarray(chunk.values), np.asarray(chunk.offsets)
        for start, end in zip(offsets[:-1], offsets[1:], strict=True):
            if kept[row]:
                hashes.add(hash(values[start:end].tobytes()))
            row += 1
    return hashes
