"""Column types of rows whose values vary in type, and rows as a memory-mapped Arrow file.

JSON does not fix a type per field. A field may be null in one row and text in the next, or a number and then text. The
rules: null takes the other rows' type; int and float make float; any other mixture of plain values becomes text; a
mixture of plain values and lists or objects becomes text in which pack_json marks the lists and objects, so that
unpack_json gives them back; fields missing in some rows are null there, and so are objects without fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from openrlhf.datasets.jsonl import pack_json

# A type is one of the names below, ("list", type) or ("struct", {field: type}).
_PLAIN = {
    "null": datasets.Value("string"),
    "bool": datasets.Value("bool"),
    "int": datasets.Value("int64"),
    "float": datasets.Value("float64"),
    "text": datasets.Value("string"),
    "json": datasets.Value("string"),
}
_ROWS_PER_BATCH = 500
_BYTES_PER_BATCH = 8 << 20


class ColumnTypes:
    """Types of all columns, learnt row by row."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}
        self.rows = 0

    def add(self, row: dict[str, Any]) -> None:
        """Widen the types until the row fits."""
        self.rows += 1
        for name, value in row.items():
            self.types[name] = _merge(self.types.get(name, "null"), _type_of(value))

    def features(self) -> datasets.Features:
        """The types as `datasets` features; columns of nulls alone become text."""
        return datasets.Features({name: _feature(kind) for name, kind in self.types.items()})

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with every column, its values in the column types."""
        return {name: _convert(row.get(name), kind) for name, kind in self.types.items()}


def write_arrow(path: Path, rows: Iterable[dict[str, Any]], types: ColumnTypes) -> None:
    """Write rows as an Arrow stream file that `Dataset.from_file` maps; it appears whole or not at all.

    Args:
        rows: the same rows that the types were learnt from.
    """
    features = types.features()
    schema = features.arrow_schema
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for batch in _batches(types.convert(row) for row in rows):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def align_features(parts: list[datasets.Dataset]) -> list[datasets.Dataset]:
    """The data sets cast to common columns by the rules above, so that they can be joined.

    Raises:
        ValueError: a column that is nested in two different ways.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for name, feature in part.features.items():
            merged[name] = feature if name not in merged else _merge_features(name, merged[name], feature)
    return [_cast(part, datasets.Features(merged)) for part in parts]


def _cast(part: datasets.Dataset, features: datasets.Features) -> datasets.Dataset:
    for name in [name for name in features if name not in part.column_names]:
        part = part.add_column(name, [None] * len(part), feature=features[name])
    part = part.select_columns(list(features))
    return part if part.features == features else part.cast(features)


def _merge_features(name: str, a: Any, b: Any) -> Any:
    if a == b:
        return a
    if isinstance(a, datasets.Value) and isinstance(b, datasets.Value):
        for one, other in ((a, b), (b, a)):
            if one.dtype == "null":
                return other
        numbers = [value.dtype.startswith(("int", "uint", "float")) for value in (a, b)]
        return datasets.Value("float64") if all(numbers) else datasets.Value("string")
    if datasets.Value("null") in (a, b):
        return b if a == datasets.Value("null") else a
    raise ValueError(
        f"column {name!r} is {a} in one source and {b} in another: load them apart, or convert one of them"
    )


def _type_of(value: Any) -> Any:
    if isinstance(value, str):
        return "text"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "text"
    if isinstance(value, float):
        return "float"
    if isinstance(value, list):
        kind = "null"
        for item in value:
            kind = _merge(kind, _type_of(item))
        return ("list", kind)
    return ("struct", {key: _type_of(item) for key, item in value.items()}) if value else "null"


def _merge(a: Any, b: Any) -> Any:
    if a == b or b == "null":
        return a
    if a == "null":
        return b
    if isinstance(a, str) and isinstance(b, str):
        return "json" if "json" in (a, b) else "float" if {a, b} == {"int", "float"} else "text"
    if isinstance(a, tuple) and isinstance(b, tuple) and a[0] == b[0]:
        if a[0] == "list":
            return ("list", _merge(a[1], b[1]))
        return ("struct", {key: _merge(a[1].get(key, "null"), b[1].get(key, "null")) for key in {**a[1], **b[1]}})
    return "json"


def _feature(kind: Any) -> Any:
    if isinstance(kind, str):
        return _PLAIN[kind]
    if kind[0] == "list":
        return datasets.List(_feature(kind[1]))
    return {key: _feature(item) for key, item in kind[1].items()}


def _convert(value: Any, kind: Any) -> Any:
    if value is None or (value == {} and kind[0] != "struct"):
        return None
    if kind in ("text", "json"):
        if isinstance(value, (list, dict)):
            return pack_json(value)
        return value if isinstance(value, str) else json.dumps(value)
    if kind == "float":
        return float(value)
    if isinstance(kind, str):
        return value if kind != "null" else None
    if kind[0] == "list":
        return [_convert(item, kind[1]) for item in value]
    return {key: _convert(value.get(key), item) for key, item in kind[1].items()}


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows in groups bounded by number and by size of their text."""
    batch: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(batch) >= _ROWS_PER_BATCH or size >= _BYTES_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
