"""Where base-model completions lie: a folder for each benchmark, a single file, or the embedded task."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model
from openrlhf.datasets.completions import GREEDY_FILE, Completion, read_completions, sample_files
from openrlhf.evaluation.labels import grade_completions

logger = logging.getLogger(__name__)

POCKET_SPLITS = ("test", "ood")


@dataclass(frozen=True)
class CompletionFile:
    """Completions that are scored into one file."""

    benchmark: str
    kind: str  # "greedy" or "all"
    name: str  # of the scored file, without suffix
    completions: list[Completion]


def find_completions(path: str, benchmarks: Sequence[str] | None = None, seed: int = 0) -> list[CompletionFile]:
    """Completions of every benchmark, read in full so that a bad line is found before a model loads.

    Args:
        path: folder with BENCHMARK/output-greedy.jsonl and BENCHMARK/output-*.jsonl, the folder of one benchmark, a
            file, or "pocket". Where a benchmark's folder has no output-* files, every other file of completions in it
            is a set of its own.
        benchmarks: folders or files under `path`; for pocket "test", "ood"; None takes all folders.
        seed: of pocket's questions and samples.
    Raises:
        ValueError: nothing there, a name that leads out of `path`, or an unreadable file, named by file and line.
    """
    if path == POCKET:
        return _pocket_files(benchmarks, seed)
    root = Path(path)
    if root.is_file():
        return [_single_file(root)]
    if not root.is_dir():
        raise ValueError(f"--completions_data_path: expected a folder or file at {root}, found nothing")
    names = [_inside(root, name) for name in benchmarks] if benchmarks else _benchmark_folders(root)
    if not names and _has_completions(root):  # the folder of one benchmark
        root = Path(os.path.abspath(root))
        root, names = root.parent, [root.name]
    if not names:
        raise ValueError(f"{root}: expected folders with output-greedy.jsonl or output-*.jsonl, found none")
    files = []
    for name in names:
        place = root / name
        if place.is_file():
            files.append(_single_file(place, str(Path(name).with_name(_stem(place)))))
            continue
        if not place.is_dir() or not _has_completions(place):
            found = sorted(p.name for p in root.iterdir())
            raise ValueError(
                f"{place}: expected output-greedy.jsonl, output-*.jsonl or other .jsonl files there; "
                f"{root} holds {found[:20]}"
            )
        greedy = _greedy_file(place)
        if not greedy and not sample_files(place):
            files += [_single_file(file, f"{name}/{_stem(file)}") for file in _other_files(place)]
            continue
        if greedy:
            files.append(CompletionFile(name, "greedy", _stem(greedy), _read(greedy)))
        sampled = [CompletionFile(name, "all", _stem(file), _read(file)) for file in sample_files(place)]
        files += _numbered(sampled)
    places = Counter((file.benchmark, file.kind, file.name) for file in files)
    twice = [f"{benchmark}/{name}" for (benchmark, _, name), count in places.items() if count > 1]
    if twice:
        raise ValueError(f"{root}: {twice[0]} is there twice (as .jsonl and .gz?, or named twice); keep one")
    return files


def grade_files(files: Sequence[CompletionFile]) -> list[CompletionFile]:
    """The files with labels where rows have none and can be graded; see `grade_completions`."""
    graded = []
    for file in files:
        completions, count = grade_completions(file.completions)
        if count:
            logger.info("%s/%s/%s: graded %d rows without a label", file.benchmark, file.kind, file.name, count)
        graded.append(replace(file, completions=completions))
    return graded


def _inside(root: Path, name: str) -> str:
    """The name of a benchmark without detours; scored files lie under it, so it must not lead elsewhere."""
    plain = os.path.normpath(name)
    if os.path.isabs(name) or plain.split(os.sep)[0] in (".", ".."):
        raise ValueError(f"--benchmarks: expected folders or files under {root}, got {name!r}")
    return plain


def _benchmark_folders(root: Path) -> list[str]:
    """Names of the folders with completions, without hidden ones; files beside them are told."""
    places = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    names = [path.name for path in places if path.is_dir() and _has_completions(path)]
    beside = [path.name for path in _other_files(root)]
    if names and beside:
        logger.warning("%s: only folders are read, not %s; name files with --benchmarks", root, ", ".join(beside[:5]))
    return names


def _read(file: Path) -> list[Completion]:
    completions = read_completions(file)
    if not completions:
        raise ValueError(f"{file}: expected completions, the file holds none; remove it or write it anew")
    return completions


def _numbered(files: Sequence[CompletionFile]) -> list[CompletionFile]:
    """Files of one benchmark whose completions have different sample numbers; counted anew where they clash."""
    keys = Counter((one.question, one.sample) for file in files for one in file.completions)
    if not keys or max(keys.values()) == 1:
        return list(files)
    seen: Counter[str] = Counter()
    numbered = []
    for file in files:
        completions = []
        for one in file.completions:
            completions.append(replace(one, sample=seen[one.question]))
            seen[one.question] += 1
        numbered.append(replace(file, completions=completions))
    return numbered


def _single_file(path: Path, benchmark: str | None = None) -> CompletionFile:
    completions = _read(path)
    several = len({one.question for one in completions}) < len(completions)
    return CompletionFile(benchmark or _stem(path), "all" if several else "greedy", _stem(path), completions)


def _pocket_files(benchmarks: Sequence[str] | None, seed: int) -> list[CompletionFile]:
    from openrlhf.evaluation.sampling import pocket_completions

    splits = benchmarks or POCKET_SPLITS
    unknown = sorted(set(splits) - set(POCKET_SPLITS))
    if unknown:
        raise ValueError(f"--benchmarks: pocket has {list(POCKET_SPLITS)}, got {unknown}")
    policy = resolve_pocket_model(POCKET)
    return [
        CompletionFile(
            f"{POCKET}-{split}",
            "all",
            "output-all",
            pocket_completions(cache_folder(), policy, split, n_questions=200, n_samples=8, seed=seed),
        )
        for split in splits
    ]


def _greedy_file(folder: Path) -> Path | None:
    return next((path for path in (folder / GREEDY_FILE, folder / f"{GREEDY_FILE}.gz") if path.is_file()), None)


def _has_completions(folder: Path) -> bool:
    return _greedy_file(folder) is not None or bool(sample_files(folder)) or bool(_other_files(folder))


def _other_files(folder: Path) -> list[Path]:
    names = (".jsonl", ".jsonl.gz")
    return sorted(path for path in folder.iterdir() if path.name.endswith(names) and not path.name.startswith("."))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]
