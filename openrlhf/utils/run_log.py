"""The log of a run: its seed, metrics.jsonl, progress bars, and on request wandb and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from openrlhf.utils.atomic import atomic_write_bytes, atomic_write_text
from openrlhf.utils.manifest import (
    MANIFEST_NAME,
    finish_manifest,
    hide_secrets,
    to_json,
    update_manifest,
    write_manifest,
)

__all__ = ["RUN_FILES", "RunLog", "seed_everything", "update_manifest", "write_manifest"]

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"  # held-out responses of reinforcement learning
REPORT_NAME, CURVES_NAME = "report.html", "curves.png"
_OLD_NAMES = {METRICS_NAME: "metrics.previous.jsonl", SAMPLES_NAME: "samples.previous.jsonl"}
# What `atomic_dir(carry=...)` must keep when a model is saved into the folder of its run.
RUN_FILES = (
    *_OLD_NAMES,
    *_OLD_NAMES.values(),
    REPORT_NAME,
    CURVES_NAME,
    MANIFEST_NAME,
    "wandb",
    "wandb_run.json",
    "tensorboard",
)

_RESERVED = ("step", "split", "time")


def seed_everything(seed: int, full_determinism: bool = False) -> None:
    """Seed Python, numpy and torch on every device.

    full_determinism also asks torch for deterministic kernels, which are slower on a GPU; call it before the first CUDA
    operation, or cuBLAS keeps its non-deterministic workspace.
    """
    import torch  # takes seconds; flags are read without it

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


class RunLog:
    """Metrics of one run, written by the main process only; in every other process its methods do nothing.

    Args:
        run_dir: folder of metrics.jsonl; created.
        command: name of the command, such as "train_rm"; the wandb project when none is given.
        config: resolved settings, shown by wandb; keys of the services in it are hidden.
        is_main: True in the process of global rank 0.
        use_wandb: None for no wandb; an API key, "true" (a key known to wandb already) or "offline".
        tensorboard_dir: folder for TensorBoard's files, or None.
        resume_step: optimizer step the run continues from: later lines of metrics.jsonl and samples.jsonl are removed
            and the same wandb run goes on. None starts afresh; those of an earlier run in the folder become
            metrics.previous.jsonl and samples.previous.jsonl.
    Raises:
        ValueError: wandb or TensorBoard asked for and not installed.
        RuntimeError: wandb or TensorBoard does not start. Later failures of theirs only warn, once.
    """

    def __init__(
        self,
        run_dir: str | Path,
        command: str,
        config: Mapping[str, Any],
        is_main: bool = True,
        use_wandb: str | None = None,
        wandb_org: str | None = None,
        wandb_group: str | None = None,
        wandb_project: str | None = None,
        wandb_run_name: str | None = None,
        tensorboard_dir: str | Path | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.command = command
        self.is_main = is_main
        self._wandb_run: Any = None
        self._board: Any = None
        self._wandb_splits: set[str] = set()
        self._closed = not is_main
        self._bars: list[tqdm] = []
        if not is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name, old_name in _OLD_NAMES.items():
            if resume_step is not None:
                _cut_lines(self.run_dir / name, resume_step)
            elif (self.run_dir / name).exists():
                os.replace(self.run_dir / name, self.run_dir / old_name)
        if use_wandb is not None and use_wandb.lower() not in ("", "false", "none"):
            names = {
                "entity": wandb_org,
                "group": wandb_group,
                "project": wandb_project or command,
                "name": wandb_run_name,
            }
            self._wandb_run = _start_wandb(self.run_dir, use_wandb, hide_secrets(config), names, resume_step)
        if tensorboard_dir is not None:
            self._board = _start_tensorboard(tensorboard_dir, resume_step)

    def log(self, step: int, metrics: Mapping[str, Any], prefix: str = "train") -> None:
        """Append a line {"step", "split", "time", ...metrics} to metrics.jsonl and pass it on to wandb and TensorBoard.

        Args:
            step: optimizer steps done.
            metrics: name -> number, None or tensor of one element; NaN and infinity are written as null.
            prefix: the split, such as "train" or "eval".
        """
        if not self.is_main:
            return
        clash = sorted(set(metrics) & set(_RESERVED))
        if clash:
            raise ValueError(f"metric names {clash} are taken by the line itself; rename them")
        numbers = {name: _to_number(name, value) for name, value in metrics.items()}
        line = {"step": int(step), "split": prefix, "time": round(time.time(), 3), **numbers}
        # Opened for each line: the folder may have been swapped for a newly saved one in between.
        with open(self.run_dir / METRICS_NAME, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, allow_nan=False) + "\n")
        finite = {name: number for name, number in numbers.items() if number is not None}
        self._log_wandb(step, finite, prefix)
        self._log_board(step, finite, prefix)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append a line {"step", ...sample} for every sample to samples.jsonl, all in one write.

        Args:
            samples: texts, finite numbers and None by name.
        """
        if not self.is_main or not samples:
            return
        lines = [json.dumps({"step": int(step), **sample}, ensure_ascii=False, allow_nan=False) for sample in samples]
        with open(self.run_dir / SAMPLES_NAME, "ab") as handle:
            handle.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))

    def progress(self, total: int, initial: int = 0, desc: str = "") -> tqdm:
        """Progress bar on stderr, main process only; drawn twice a second on a terminal, twice a minute in a file."""
        interval = 0.5 if sys.stderr.isatty() else 30.0
        bar = tqdm(
            total=total,
            initial=initial,
            desc=desc,
            disable=not self.is_main,
            mininterval=interval,
            maxinterval=max(10.0, interval),
            dynamic_ncols=True,
        )
        self._bars.append(bar)
        return bar

    def close(self, status: str = "finished") -> None:
        """Write the end of the run into manifest.json, if there is one, and end bars, wandb and TensorBoard; once."""
        if self._closed:
            return
        self._closed = True
        for bar in self._bars:  # an error that follows starts on a line of its own
            bar.close()
        finish_manifest(self.run_dir, status)
        if self._wandb_run is not None:
            try:
                self._wandb_run.finish(exit_code=0 if status == "finished" else 1)
            except Exception as error:
                logger.warning("wandb did not end cleanly: %s", error)
        if self._board is not None:
            try:
                self._board.close()
            except Exception as error:
                logger.warning("TensorBoard did not end cleanly: %s", error)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else f"failed: {kind.__name__}")

    def _log_wandb(self, step: int, numbers: dict[str, float], prefix: str) -> None:
        if self._wandb_run is None:
            return
        try:
            if prefix not in self._wandb_splits:
                self._wandb_splits.add(prefix)
                self._wandb_run.define_metric(f"{prefix}/global_step")
                self._wandb_run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/global_step")
            self._wandb_run.log(
                {f"{prefix}/global_step": step, **{f"{prefix}/{name}": number for name, number in numbers.items()}}
            )
        except Exception as error:
            logger.warning("wandb failed and is left out from now on; metrics.jsonl goes on: %s", error)
            self._wandb_run = None

    def _log_board(self, step: int, numbers: dict[str, float], prefix: str) -> None:
        if self._board is None:
            return
        try:
            for name, number in numbers.items():
                self._board.add_scalar(f"{prefix}/{name}", number, step)
        except Exception as error:
            logger.warning("TensorBoard failed and is left out from now on; metrics.jsonl goes on: %s", error)
            self._board = None


def _start_wandb(
    run_dir: Path, use_wandb: str, config: dict[str, Any], names: dict[str, str | None], resume_step: int | None
) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError("--use_wandb needs the wandb package: pip install wandb, or drop the flag") from error
    mode = use_wandb.lower()
    settings = {"init_timeout": 60}
    if mode not in ("true", "offline"):
        settings["api_key"] = use_wandb
    id_file = run_dir / "wandb_run.json"
    run_id = None
    if resume_step is not None and id_file.exists():
        run_id = json.loads(id_file.read_text(encoding="utf-8"))["id"]
    try:
        run = wandb.init(
            **names,
            dir=str(run_dir),
            config=json.loads(to_json(config)),
            id=run_id,
            resume="allow" if run_id else None,
            mode="offline" if mode == "offline" else None,
            reinit="finish_previous",
            settings=settings,
        )
    except Exception as error:
        raise RuntimeError(
            f"wandb did not start: {error}; check the key and the network, pass --use_wandb offline, or drop the flag"
        ) from error
    atomic_write_text(id_file, json.dumps({"id": run.id}) + "\n")
    return run


def _start_tensorboard(folder: str | Path, resume_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard files need the tensorboard package: pip install tensorboard") from error
    try:
        return SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)
    except Exception as error:
        raise RuntimeError(f"TensorBoard did not start in {folder}: {error}") from error


def _cut_lines(path: Path, last_step: int) -> None:
    """Drop the lines after `last_step`, and a line that a crash left unfinished, in one atomic rewrite."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= last_step:
            kept.append(line + b"\n")
    atomic_write_bytes(path, b"".join(kept))


def _to_number(name: str, value: Any) -> float | int | None:
    if hasattr(value, "shape"):  # of torch or numpy, whose plain numbers have one too
        if math.prod(value.shape) != 1:
            raise ValueError(f"metric {name!r}: expected one number, got shape {tuple(value.shape)}; reduce it first")
        value = value.item()
    if value is None or isinstance(value, int):
        return value
    if not isinstance(value, float):
        raise ValueError(f"metric {name!r}: expected a number, got {type(value).__name__} {value!r}")
    return value if math.isfinite(value) else None
