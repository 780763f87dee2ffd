"""Train, score and compare a declared grid of reward models: ``python -m openrlhf.cli.study --study FILE``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.cli.study_file import Study, read_study
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import atomic_write_text, clean_stale, ensure_writable, hold_lock

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.cli.study_plan import Cell


@dataclass(frozen=True)
class StudyConfig:
    """Train, score and compare a declared grid of reward models: tasks times variants times seeds."""

    study: str | None = flag(None, "Study file (JSON), see docs/study.md")
    output: str = flag("./runs/study", "Folder of everything that is written; several studies may share it")
    data: str = flag("../shared/data", "What {data} stands for in the paths of the study file")
    threads: int = flag(1, "CPU threads of a cell; its figures come back equal only with the same number")
    workers: int | None = flag(
        None, "Cells that run at a time, each in a process of its own (default: as many as the cores allow, 1 on a GPU)"
    )
    max_minutes: float | None = flag(None, "Start no further cell after so many minutes")
    only: str | None = flag(None, "Run only cells whose TASK/VARIANT/seed-N this regular expression is found in")
    tables_only: bool = flag(False, "Write the tables and plots of the finished cells, run nothing")
    keep_models: bool = flag(False, "Keep the weights of the trained models")
    list: bool = flag(False, "Print the cells and which are finished, run nothing")
    cell: str | None = flag(None, "Run this one cell, TASK/VARIANT/seed-N, in this process, without tables")

    def validate(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            ValueError: names the flag.
        """
        if not self.study:
            raise ValueError("--study is required: a JSON file, such as examples/studies/pocket.json")
        for name in ("threads", "workers"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"--max_minutes must be above 0, got {self.max_minutes}")
        if sum((self.tables_only, self.list, self.cell is not None)) > 1:
            raise ValueError("--tables_only, --list and --cell exclude each other")
        try:
            re.compile(self.only or "")
        except re.error as error:
            raise ValueError(f"--only: {self.only!r} is no regular expression ({error})") from None


def run(config: StudyConfig) -> dict[str, Any]:
    """Run what is not finished yet; returns the summary of all finished cells of the study.

    Raises:
        ValueError: bad flags, study file or data.
        RuntimeError: cells that failed, after all others have run.
    """
    config.validate()
    study = read_study(config.study)
    output = Path(config.output)
    from openrlhf.cli.study_plan import plan_cells, read_finished

    cells = plan_cells(study, config.data)
    if config.cell is not None:
        import torch

        from openrlhf.cli.study_cell import run_cell

        torch.set_num_threads(config.threads)
        (cell,) = [one for one in cells if one.name == config.cell] or _no_cell("--cell", config.cell, cells)
        return run_cell(cell, output, study.name, config.keep_models)
    chosen = [one for one in cells if re.search(config.only or "", one.name)]
    chosen = chosen or _no_cell("--only", config.only, cells)
    if config.list:
        for cell in chosen:
            print(f"{'finished' if read_finished(cell, output) else 'to run  '}  {cell.identity}  {cell.name}")
        return {}
    ensure_writable(output, inside=True)
    with hold_lock(output / "studies" / f"{study.name}.json"):
        if not config.tables_only:
            _run_cells(config, study, cells, chosen)
        return _write_tables(study, cells, output)


def _run_cells(config: StudyConfig, study: Study, cells: Sequence[Cell], chosen: Sequence[Cell]) -> None:
    from openrlhf.cli.study_plan import read_finished
    from openrlhf.cli.study_workers import deal_cells

    output = Path(config.output)
    clean_stale(output / "cells")
    copy = output / "studies" / f"{study.name}.json"  # workers read this one: the file may be edited meanwhile
    atomic_write_text(copy, Path(config.study).read_text(encoding="utf-8"))
    different: dict[str, Cell] = {}
    for cell in chosen:
        different.setdefault(cell.identity, cell)
    pending = [cell for cell in different.values() if read_finished(cell, output) is None]
    words = ["--study", str(copy), "--output", config.output, "--data", config.data, "--threads", str(config.threads)]
    failures = deal_cells(
        pending,
        words + ["--keep_models"] * config.keep_models,
        logs=output / "logs",
        workers=config.workers or default_workers(config.threads),
        threads=config.threads,
        finished=len(different) - len(pending),
        max_seconds=None if config.max_minutes is None else 60 * config.max_minutes,
        on_finished=lambda: _write_tables(study, cells, output),
    )
    if failures:
        _write_tables(study, cells, output)
        raise RuntimeError(f"{len(failures)} of {len(pending)} cells failed: {', '.join(failures)}")


def default_workers(threads: int) -> int:
    """Cells that may run at a time: one on a GPU, else as many as the cores allow."""
    import torch

    return 1 if torch.cuda.is_available() else max(1, len(os.sched_getaffinity(0)) // threads)


def _write_tables(study: Study, cells: Sequence[Cell], output: Path) -> dict[str, Any]:
    from openrlhf.cli.study_plan import SCORES_FILE, cell_line, read_finished
    from openrlhf.datasets.jsonl import write_jsonl
    from openrlhf.evaluation.study_summary import FinishedCell, summarise_study
    from openrlhf.evaluation.study_tables import write_tables

    records = [(cell, record) for cell in cells if (record := read_finished(cell, output)) is not None]
    finished = [
        FinishedCell(cell.task, cell.variant, cell.seed, record, cell.folder(output) / SCORES_FILE)
        for cell, record in records
    ]
    summary = summarise_study(finished, study.baseline, list(study.variants))
    counts = {"finished": len(finished), "declared": len(cells)}
    summary = {"study": study.name, "about": study.about, "cells": counts, **summary}
    write_tables(summary, output / "tables", study.name)
    write_jsonl(output / "tables" / f"{study.name}.jsonl", (cell_line(cell, record) for cell, record in records))
    return summary


def _no_cell(name: str, value: str | None, cells: Sequence[Cell]) -> list[Cell]:
    shown = ", ".join(cell.name for cell in cells[:3])
    raise ValueError(f"{name} {value}: none of the {len(cells)} cells has such a name; they are {shown}, ...")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(StudyConfig, argv)) and None)


if __name__ == "__main__":
    main()
