"""The loop around a training step: logging, evaluation, checkpoints, resuming. Shared by all trainers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from openrlhf.trainer.engine import Engine
from openrlhf.trainer.plan import TrainingPlan
from openrlhf.utils.checkpoint import (
    clean_stale,
    discard_folder,
    latest_checkpoint,
    prune,
    publish_folder,
    read_complete,
    start_folder,
    step_folder,
)
from openrlhf.utils.run_log import RunLog

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What the loop needs of a trainer."""

    def train_step(self, step: int) -> tuple[Tensor, Tensor | None, float]:
        """Update ``step``: metric sums of this process, gradient norm (both on the device), learning rate."""

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Means of metric sums that were added over processes and steps."""

    def evaluate(self) -> dict[str, float]:
        """Figures over the evaluation data; empty without any."""


@dataclass(frozen=True)
class LoopSettings:
    """When to log, evaluate and save; all in optimizer steps, -1: never (evaluation: at the end of each epoch)."""

    logging_steps: int
    eval_steps: int
    save_steps: int
    checkpoint_folder: Path
    max_ckpt_num: int
    max_ckpt_mem: float  # GB
    identity: dict[str, Any]  # settings and data that must be the same for a resume
    resume: bool = False
    save_state: bool = True
    write_model: Callable[[Path], None] | None = None  # also writes a Hugging Face folder into each checkpoint
    keep_best: Callable[[dict[str, float]], None] | None = None  # called when the evaluation loss is a new minimum


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    best_loss: float = math.inf
    last_eval: dict[str, float] | None = None
    sums: list[float] | None = None  # metric sums over processes since the last logged step


def find_resume(engine: Engine, settings: LoopSettings) -> tuple[Path | None, Progress]:
    """Newest complete checkpoint to go on from, if asked for.

    Raises:
        ValueError: the checkpoint belongs to a run with other data or settings; names them.
    """
    if engine.is_main:
        clean_stale(settings.checkpoint_folder)
    engine.barrier()
    folder = latest_checkpoint(settings.checkpoint_folder) if settings.resume else None
    folder = engine.broadcast(folder)
    if folder is None:
        return None, Progress()
    info = read_complete(folder) or {}
    changed = {k: (info.get("identity", {}).get(k), v) for k, v in settings.identity.items()}
    changed = {k: pair for k, pair in changed.items() if pair[0] != pair[1]}
    if changed:
        told = ", ".join(f"{name}: {old!r} then, {new!r} now" for name, (old, new) in changed.items())
        raise ValueError(f"{folder} is of another run ({told}); repeat its settings, or choose another --ckpt_path")
    return folder, Progress(
        step=info["step"],
        best_loss=math.inf if info["best_loss"] is None else info["best_loss"],
        last_eval=info["last_eval"],
        sums=info["sums"],
    )


def save_checkpoint(engine: Engine, settings: LoopSettings, progress: Progress) -> None:
    """Write a checkpoint that is either complete or invisible, then prune old ones. Collective."""
    target = step_folder(settings.checkpoint_folder, progress.step)
    temporary = Path(engine.broadcast(str(start_folder(target)) if engine.is_main else None))
    try:
        if settings.save_state:
            engine.save_state(temporary)
        if settings.write_model is not None:
            settings.write_model(temporary / "model")
        engine.barrier()
        if engine.is_main:
            info = {
                "step": progress.step,
                "best_loss": None if math.isinf(progress.best_loss) else progress.best_loss,
                "last_eval": progress.last_eval,
                "sums": progress.sums,
                "identity": settings.identity,
            }
            publish_folder(temporary, target, complete=info)
            prune(settings.checkpoint_folder, settings.max_ckpt_num, settings.max_ckpt_mem)
    except BaseException:
        if engine.is_main:
            discard_folder(temporary)
        raise
    engine.barrier()


def run_training(
    engine: Engine, trainer: Trainer, plan: TrainingPlan, settings: LoopSettings, log: RunLog, progress: Progress
) -> Progress:
    """Train from ``progress`` to the end of the plan.

    Returns:
        Progress at the end, with the last evaluation.
    Raises:
        RuntimeError: the gradient, the loss or the evaluation loss is no longer finite; nothing is saved then.
    """
    sums: Tensor | None = None
    largest_norm: Tensor | None = None  # since it was last looked at; NaN stays NaN
    if progress.sums is not None and engine.is_main:
        sums = torch.tensor(progress.sums, device=engine.device)
    bar = log.progress(plan.total_steps, progress.step, "train")
    for step in range(progress.step, plan.total_steps):
        step_sums, grad_norm, learning_rate = trainer.train_step(step)
        if grad_norm is not None:
            largest_norm = grad_norm if largest_norm is None else torch.maximum(largest_norm, grad_norm)
        sums = step_sums if sums is None else sums + step_sums
        epochs_before = plan.epochs_done(step)
        progress.step = step + 1
        bar.update(1)
        last = progress.step == plan.total_steps

        logs = progress.step % settings.logging_steps == 0 or last
        ends_epoch = settings.eval_steps < 1 and plan.epochs_done(progress.step) > epochs_before
        evaluates = last or ends_epoch or (settings.eval_steps > 0 and progress.step % settings.eval_steps == 0)
        saves = settings.save_steps > 0 and progress.step % settings.save_steps == 0 and not last
        if largest_norm is not None and (logs or evaluates or saves):  # in between, nothing waits for a GPU
            _check_finite("gradient norm", largest_norm.item(), progress.step)
            largest_norm = None
        if logs:
            metrics = trainer.summarise(engine.sum(sums))
            sums = None
            _check_finite("loss", metrics["loss"], progress.step)
            epoch = progress.step * plan.batch_size / plan.examples
            norm = None if grad_norm is None else grad_norm.item()
            log.log(
                progress.step,
                {**metrics, "grad_norm": norm, "learning_rate": learning_rate, "epoch": min(epoch, plan.epochs)},
            )
            bar.set_postfix({k: f"{metrics[k]:.4g}" for k in ("loss", "accuracy") if k in metrics})

        if evaluates:
            figures = trainer.evaluate()
            if figures:
                _check_finite("evaluation loss", figures["loss"], progress.step)
                log.log(progress.step, figures, prefix="eval")
                progress.last_eval = figures
                if figures["loss"] < progress.best_loss:
                    progress.best_loss = figures["loss"]
                    if settings.keep_best is not None:
                        settings.keep_best(figures)
        if saves:
            progress.sums = None if sums is None else engine.sum(sums).tolist()
            save_checkpoint(engine, settings, progress)
    bar.close()
    return progress


def _check_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise RuntimeError(
            f"the {name} is {value} at step {step}: the run has diverged and is stopped before anything is saved; "
            "start again with a lower --learning_rate, or look for broken rows in the data"
        )


def gather_rows(engine: Engine, rows: list[Tensor]) -> Tensor:
    """All processes' rows of numbers, stacked: (n, k) from lists of (m, k)."""
    local = torch.cat(rows) if rows else torch.zeros(0)
    return engine.gather(local.cpu())
