"""Build the paper's preference file from labelled solutions, and lay base-model generations out by benchmark."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from openrlhf.cli.parser import parse_config
from openrlhf.datasets.completions import (
    GREEDY_FILE,
    Completion,
    completion_to_row,
    group_by_question,
    read_completions,
    row_to_completion,
    sample_files,
    write_jsonl,
)
from openrlhf.datasets.pairing import build_pairs
from openrlhf.datasets.sources import load_rows, source_files


def _flag(default: object, help: str) -> object:
    if isinstance(default, list):
        return field(default_factory=list, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DataSetupConfig:
    """Preference pairs from labelled solutions, and base-model generations by benchmark."""

    solutions: str | None = _flag(
        None, "Labelled solutions: hub id, folder or file, or a comma list (question, generated_solution, is_correct)"
    )
    output: str | None = _flag(None, "Preference file to write (question, correct, incorrect), .jsonl or .jsonl.gz")
    pairs_per_question: int = _flag(4, "At most this many pairs of one question")
    seed: int = _flag(0, "Seed of the pairing")
    decontaminate: list[str] = _flag([], "Test files whose questions must not occur among the pairs")
    strip_calculator: bool = _flag(False, "Remove calculator annotations <<...>> from the solutions")
    include_unparsed: bool = _flag(False, "Keep solutions without a predicted answer")
    split: str = _flag("train", "Split of --solutions, where it has splits")
    on_bad_row: str = _flag("error", "Unreadable line: error, or skip (counted)")
    generations: list[str] = _flag(
        [], "Completions by benchmark, as BENCHMARK=SOURCE, or BENCHMARK/greedy=SOURCE for greedy ones"
    )
    generations_dir: str | None = _flag(None, "Folder that gets BENCHMARK/output-rs*.jsonl and output-greedy.jsonl")

    def validate(self) -> None:
        """Refuse combinations that cannot work.

        Raises:
            ValueError: nothing to do, or one half of a pair of flags.
        """
        if not self.solutions and not self.generations:
            raise ValueError("nothing to do: pass --solutions and --output, or --generations and --generations_dir")
        if bool(self.solutions) != bool(self.output):
            raise ValueError("--solutions and --output go together")
        if bool(self.generations) != bool(self.generations_dir):
            raise ValueError("--generations and --generations_dir go together")
        if self.output and not self.output.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"--output: expected a name ending in .jsonl or .jsonl.gz, got {self.output!r}")
        for flag, place in (("--output", self.output), ("--generations_dir", self.generations_dir)):
            if place and "://" in place:
                raise ValueError(f"{flag}: expected a local path, got {place!r}: write it locally and copy it there")
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"--on_bad_row: expected error or skip, got {self.on_bad_row!r}")


def run(config: DataSetupConfig) -> dict[str, int]:
    """Do what the configuration asks for and print a summary.

    Returns:
        The counts of build_pairs; empty when no pairs were asked for.
    Raises:
        ValueError: bad flags or data; no pairs found.
    """
    config.validate()
    targets = [_parse_generation(entry) for entry in _split_commas(config.generations)]
    counts: dict[str, int] = {}
    if config.solutions:
        counts = _write_pairs(config)
    for benchmark, is_greedy, source in targets:
        _lay_out(Path(config.generations_dir) / benchmark, is_greedy, source, config.on_bad_row)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; a mistake prints one line and exits with code 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = parse_config(DataSetupConfig, argv)
    try:
        run(config)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"data_setup: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _write_pairs(config: DataSetupConfig) -> dict[str, int]:
    tests = _split_commas(config.decontaminate)
    _refuse_own_source(config.output, "--solutions", _split_commas([config.solutions]), config.split)
    _refuse_own_source(config.output, "--decontaminate", tests, "test")
    rows = load_rows(config.solutions, config.split, on_bad_row=config.on_bad_row)
    excluded = {question for source in tests for question in _test_questions(source, config.on_bad_row)}
    pairs, counts = build_pairs(
        rows,
        config.pairs_per_question,
        config.seed,
        excluded,
        strip_calculator=config.strip_calculator,
        include_unparsed=config.include_unparsed,
    )
    if config.decontaminate:
        counts = {"test_questions": len(excluded), **counts}
    print(f"solutions: {config.solutions}")
    for name, count in counts.items():
        print(f"  {name.replace('_', ' '):<26}{count:>9}")
    if not pairs:
        raise ValueError(
            f"no pairs from {len(rows)} solutions: no question has both a correct and a wrong one left "
            f"({json.dumps(counts)})"
        )
    write_jsonl(config.output, pairs)
    print(f"{len(pairs)} pairs written to {config.output}")
    return counts


def _refuse_own_source(output: str, flag: str, sources: Iterable[str], split: str) -> None:
    target = Path(output).resolve()
    for source in sources:
        if target in [file.resolve() for file in source_files(source, split)]:
            raise ValueError(f"--output {output}: is a file of {flag} {source} and would be overwritten: name another")


def _test_questions(source: str, on_bad_row: str) -> Iterator[str]:
    rows = load_rows(source, "test", on_bad_row=on_bad_row)
    column = next((name for name in ("question", "problem", "prompt") if name in rows.column_names), None)
    if column is None:
        raise ValueError(
            f"--decontaminate {source}: expected a column question, problem or prompt, got {rows.column_names}"
        )
    return (question for question in rows[column] if question)


def _parse_generation(entry: str) -> tuple[str, bool, str]:
    name, equals, source = entry.partition("=")
    benchmark, _, kind = name.partition("/")
    if not (equals and benchmark and source) or kind not in ("", "greedy") or benchmark in (".", ".."):
        raise ValueError(f"--generations: expected BENCHMARK=SOURCE or BENCHMARK/greedy=SOURCE, got {entry!r}")
    return benchmark, kind == "greedy", source


def _lay_out(folder: Path, is_greedy: bool, source: str, on_bad_row: str) -> None:
    """Write the completions of one source as output-greedy.jsonl, or as one output-rs*.jsonl for each sample."""
    path = Path(source).expanduser()
    if path.is_dir() and sample_files(path):  # already in this layout, as Nemo-Skills publishes it
        samples = [_with_sample(k, read_completions(file)) for k, file in enumerate(sample_files(path))]
        _write_samples(folder, [completion for sample in samples for completion in sample])
        greedy = path / GREEDY_FILE
        if greedy.is_file():
            _write_greedy(folder, read_completions(greedy), source)
        return
    completions = [row_to_completion(row) for row in load_rows(source, "test", on_bad_row=on_bad_row)]
    if is_greedy:
        _write_greedy(folder, completions, source)
    else:
        _write_samples(folder, completions)


def _with_sample(number: int, completions: Iterable[Completion]) -> list[Completion]:
    return [replace(completion, sample=number) for completion in completions]


def _write_samples(folder: Path, completions: list[Completion]) -> None:
    """Sample k of each question goes to output-rs{k}.jsonl, questions in order of appearance.

    k is the row's own number where these differ within every question, else the place among the question's rows.
    """
    groups = group_by_question(completions).values()
    numbered = all(len({completions[i].sample for i in positions}) == len(positions) for positions in groups)
    by_sample: dict[int, list[dict]] = {}
    for positions in groups:
        for place, i in enumerate(positions):
            k = completions[i].sample if numbered else place
            by_sample.setdefault(k, []).append(completion_to_row(replace(completions[i], sample=k)))
    files = {folder / f"output-rs{k}.jsonl": rows for k, rows in sorted(by_sample.items())}
    stale = [path.name for path in sample_files(folder) if path not in files] if folder.is_dir() else []
    if stale:
        raise ValueError(
            f"{folder}: holds samples of an earlier run that would mix with these ({stale[0]}): remove them"
        )
    for path, rows in files.items():
        write_jsonl(path, rows)
    print(f"{folder}: {len(completions)} completions in {len(files)} files output-rs*.jsonl")


def _write_greedy(folder: Path, completions: list[Completion], source: str) -> None:
    groups = group_by_question(completions)
    repeated = next((question for question, positions in groups.items() if len(positions) > 1), None)
    if repeated is not None:
        raise ValueError(f"{source}: expected one greedy completion a question, got several of {repeated[:80]!r}")
    write_jsonl(folder / GREEDY_FILE, (completion_to_row(completion) for completion in completions))
    print(f"{folder}: {len(completions)} completions in {GREEDY_FILE}")


def _split_commas(entries: Iterable[str]) -> list[str]:
    return [part.strip() for entry in entries for part in entry.split(",") if part.strip()]


if __name__ == "__main__":
    main()
