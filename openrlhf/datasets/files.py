"""Local data files as memory-mapped rows."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import logging
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.datasets.jsonl import OnBadRow, read_jsonl, without_lone_surrogates, write_jsonl

if TYPE_CHECKING:  # the package takes a second to import; text files are read without it
    import datasets

logger = logging.getLogger(__name__)

COLUMNAR_SUFFIXES: tuple[str, ...] = (".parquet", ".arrow")
FILE_SUFFIXES: tuple[str, ...] = (
    ".jsonl",
    ".jsonl.gz",
    ".json",
    ".json.gz",
    ".csv",
    ".csv.gz",
    *COLUMNAR_SUFFIXES,
)
_HINT = "pass --on_bad_row skip"  # every command that loads rows has this flag
_READERS_VERSION = 2  # raised when the same file gives other rows, so that old conversions are not reused


def load_files(paths: list[Path], on_bad_row: OnBadRow = "error") -> datasets.Dataset:
    """Rows of local files, in the order given.

    json, jsonl and csv are converted once to an Arrow file in the `datasets` cache (keyed by path, size and time of
    change) with column types learnt over all rows of all of them; csv values are text. parquet and arrow are mapped.

    Raises:
        ValueError: a file of another kind, or one that cannot be read, named by file and line.
    """
    import datasets

    from openrlhf.datasets.columns import align_features

    unknown = [path for path in paths if not path.name.endswith(FILE_SUFFIXES)]
    if unknown:
        raise ValueError(f"{unknown[0]}: expected a file name ending in {', '.join(FILE_SUFFIXES)}")
    text_files = [path for path in paths if not path.name.endswith(COLUMNAR_SUFFIXES)]
    parts = [_load_columnar(path) for path in paths if path not in text_files]
    if text_files:
        parts.append(_load_converted(text_files, on_bad_row))
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(align_features(parts))


def read_records(
    path: Path, on_bad_row: OnBadRow = "error", skipped: list[str] | None = None, *, hint: str = ""
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or record number from 1, record) of a json, jsonl or csv file, plain or .gz; arguments as read_jsonl's."""
    if path.name.endswith((".csv", ".csv.gz")):
        return _read_csv(path, on_bad_row, skipped, hint)
    if path.name.endswith((".json", ".json.gz")) and not _is_json_lines(path):
        return _read_document(path)
    return read_jsonl(path, on_bad_row, skipped, hint=hint)


def _load_columnar(path: Path) -> datasets.Dataset:
    import datasets

    kind = path.suffix[1:]
    try:
        return datasets.load_dataset(kind, data_files=[str(path.resolve())], split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a readable {kind} file ({error.__cause__ or error})") from error


def _load_converted(paths: list[Path], on_bad_row: OnBadRow) -> datasets.Dataset:
    import datasets

    from openrlhf.datasets.columns import ColumnTypes, write_arrow

    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.blake2b(json.dumps([_READERS_VERSION, on_bad_row, states]).encode(), digest_size=16).hexdigest()
    arrow = Path(datasets.config.HF_DATASETS_CACHE) / "openrlhf" / "rows" / f"{key}.arrow"
    report = arrow.with_suffix(".skipped.jsonl")
    if not (arrow.exists() and report.exists()):
        types, skipped = ColumnTypes(), []
        for path in paths:
            for _, record in read_records(path, on_bad_row, skipped, hint=_HINT):
                types.add(record)
        records = (record for path in paths for _, record in read_records(path, on_bad_row, []))
        write_arrow(arrow, records, types)
        write_jsonl(report, ({"skipped": line} for line in skipped))
    problems = [record["skipped"] for _, record in read_jsonl(report)]
    if problems:
        logger.warning("%d bad rows skipped, the first: %s", len(problems), problems[0])
    return datasets.Dataset.from_file(str(arrow))


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """A text file, plain or .gz; what goes wrong in reading it names the file."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated gzip file ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    except csv.Error as error:
        raise ValueError(f"{path}: not a valid csv file ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error})") from error


def _is_json_lines(path: Path) -> bool:
    """Whether a .json file holds one object a line rather than one document."""
    with _open_text(path) as file:
        lines = (line for line in iter(file.readline, "") if line.strip())
        first, second = next(lines, ""), next(lines, "")
    try:
        value = json.loads(first or "{}")
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and (bool(second) or _list_field(value) is None)


def _read_document(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of a JSON document: a list of objects, or an object with one field that is such a list."""
    with _open_text(path) as file:
        text = file.read()
        value = json.loads(text)
    if "\\ud" in text.lower():
        value = without_lone_surrogates(value)
    records = value if isinstance(value, list) else _list_field(value)
    if records is None:
        raise ValueError(f"{path}: expected a JSON list of objects, or an object with one field that is such a list")
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}: entry {number}: expected a JSON object, got {type(record).__name__}")
        yield number, record


def _list_field(value: dict[str, Any]) -> list[Any] | None:
    lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
    return lists[0] if len(lists) == 1 else None


def _read_csv(
    path: Path, on_bad_row: OnBadRow, skipped: list[str] | None, hint: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of a csv file with a header line; values are text, empty ones are null."""
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB refuses long solutions
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True)
        names = next(reader, [])
        for values in reader:
            if len(values) == len(names):
                yield reader.line_num, {name: value or None for name, value in zip(names, values, strict=True)}
            elif values:
                problem = (
                    f"{path}:{reader.line_num}: expected {len(names)} fields ({', '.join(names)}), got {len(values)}"
                )
                if on_bad_row == "error":
                    raise ValueError(f"{problem}. Correct the row{hint and f', or {hint}'}")
                if skipped is not None:
                    skipped.append(problem)
