"""JSON lines, one record a line, read and written strictly."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

OnBadRow = Literal["error", "skip"]

# The white space that lists and objects start with where their column holds text too: see pack_json.
_PACKED = "\r\t\r"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read_jsonl(
    path: str | Path, on_bad_row: OnBadRow = "error", skipped: list[str] | None = None, *, hint: str = ""
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSON-lines file, plain or gzip (name ending in .gz), one line in memory at a time.

    Lines end at "\\n" alone: other line separators, such as U+2028, are text. Empty lines are passed over.

    Args:
        on_bad_row: what to do with a line that is no JSON object: "error" raises, "skip" leaves it out.
        skipped: gets "file:line: problem" of each line left out; None logs them instead.
        hint: what else the caller's user can do about a bad line, such as "pass --on_bad_row skip".
    Yields:
        (line number from 1, object)
    Raises:
        ValueError: a bad line, with file and line; a truncated or damaged .gz file.
    """
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f"on_bad_row: expected 'error' or 'skip', got {on_bad_row!r}")
    path = Path(path)
    for number, line in _lines(path):
        problem, value = None, None
        try:
            value = json.loads(line.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = f"not valid JSON ({error})"
        if problem is None and not isinstance(value, dict):
            problem = f"expected a JSON object, got {type(value).__name__}"
        if problem is None:
            yield number, without_lone_surrogates(value) if b"\\ud" in line.lower() else value
        elif on_bad_row == "error":
            raise ValueError(f"{path}:{number}: {problem}. Correct the line{hint and f', or {hint}'}")
        elif skipped is None:
            logger.warning("%s:%d: %s; line skipped", path, number, problem)
        else:
            skipped.append(f"{path}:{number}: {problem}")


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON lines (gzip if the name ends in .gz); the file appears whole or not at all.

    Returns:
        Number of rows written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    count = 0
    try:
        with open(temporary, "wb") as raw:
            # mtime 0: the same rows give the same bytes
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else None
            for row in rows:
                (packed or raw).write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                count += 1
            if packed:
                packed.close()
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def append_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows at the end of a plain JSON-lines file, which is made when absent; half characters become "?".

    Raises:
        ValueError: a number that is not finite.
    """
    with open(path, "a", encoding="utf-8", errors="replace", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def cut_partial_line(path: str | Path) -> None:
    """Remove what a killed writer left behind the last whole line of a plain JSON-lines file."""
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(end - 65536, 0)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def pack_json(value: list[Any] | dict[str, Any]) -> str:
    """A list or object as JSON text, for a column that holds text in other rows; unpack_json tells the two apart."""
    return _PACKED + json.dumps(value, ensure_ascii=False)


def unpack_json(value: Any) -> Any:
    """The list or object that pack_json made text of; every other value, JSON text included, as it is."""
    return json.loads(value) if isinstance(value, str) and value.startswith((_PACKED + "[", _PACKED + "{")) else value


def without_lone_surrogates(value: Any) -> Any:
    """The value with escapes such as "\\ud800", which are half a character and cannot be stored, replaced by U+FFFD."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_lone_surrogates(key): without_lone_surrogates(item) for key, item in value.items()}
    return value


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated gzip file after line {number} ({error})") from error
