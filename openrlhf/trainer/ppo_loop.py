"""The loop around rollouts: log, early warnings, evaluation, checkpoints. One step is one rollout with its updates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf.trainer.early_warnings import logged_metrics, new_warnings
from openrlhf.trainer.loop import LoopSettings, Progress, save_checkpoint
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.utils.run_log import RunLog

logger = logging.getLogger(__name__)

SHOWN = ("reward", "response_length", "kl", "entropy")


class RunState:
    """What checkpoints need of an engine, for all models of a trainer together."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self.trainer = trainer
        self.is_main = trainer.actor.is_main

    def save_state(self, folder: Path) -> None:
        """See `PPOTrainer.save_state`."""
        self.trainer.save_state(folder)

    def load_state(self, folder: Path) -> None:
        """See `PPOTrainer.load_state`."""
        self.trainer.load_state(folder)

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process."""
        return self.trainer.actor.broadcast(value)

    def barrier(self) -> None:
        """Wait for every process."""
        self.trainer.actor.barrier()


def run_ppo(
    trainer: PPOTrainer,
    settings: LoopSettings,
    log: RunLog,
    progress: Progress,
    refresh: Callable[[], None] = lambda: None,
) -> Progress:
    """Train from ``progress`` until the prompts are used up.

    ``settings`` count rollouts. The start is evaluated too, so that every run says what it gained. ``refresh`` is
    called after evaluations and checkpoints, for a report of the run so far.

    Returns:
        Progress at the end, with the last evaluation.
    Raises:
        RuntimeError: a loss or a gradient norm is no longer finite; nothing is saved then.
    """
    if progress.step == 0 and progress.last_eval is None:
        progress.last_eval = _evaluate(trainer, log, progress.step)
        if progress.last_eval:
            refresh()
    bar = log.progress(trainer.stream.total_steps, trainer.position, "prompts")
    state = RunState(trainer)
    logs = evaluates = True  # as of the step before
    while not trainer.done:
        episodes_before = int(trainer.epoch)
        figures = trainer.train_step(progress.step)
        bar.update(trainer.position - bar.n)
        if not figures:
            logger.warning("dynamic filtering left no prompt of the last ones; the run ends here")
            if not logs:
                log.log(progress.step, {name: x for name, x in trainer.history[-1].items() if name != "step"})
            if not evaluates:
                progress.last_eval = _evaluate(trainer, log, progress.step) or progress.last_eval
            break
        for name in ("policy_loss", "value_loss", "grad_norm", "critic_grad_norm"):
            if not math.isfinite(figures.get(name, 0.0)):
                raise RuntimeError(
                    f"{name} is {figures[name]} at step {progress.step + 1}: the run has diverged and is stopped "
                    "before anything is saved; start again with a lower --actor_learning_rate or --critic_learning_rate"
                )
        progress.step += 1
        logs = progress.step % settings.logging_steps == 0 or trainer.done
        if logs:
            log.log(progress.step, figures)
            bar.set_postfix({name: f"{figures[name]:.4g}" for name in SHOWN if figures.get(name) is not None})
        trainer.history.append({"step": progress.step, **figures})
        ends_episode = settings.eval_steps < 1 and int(trainer.epoch) > episodes_before
        evaluates = trainer.done or ends_episode
        evaluates |= settings.eval_steps > 0 and progress.step % settings.eval_steps == 0
        if evaluates:
            evaluation = _evaluate(trainer, log, progress.step)
            progress.last_eval = evaluation or progress.last_eval
            if "gold_reward" in evaluation:
                trainer.history[-1]["gold_reward"] = evaluation["gold_reward"]
        _warn(trainer, log, progress.step)
        saves = settings.save_steps > 0 and progress.step % settings.save_steps == 0
        if saves and not trainer.done:
            save_checkpoint(state, settings, progress)
        if saves or (evaluates and not trainer.done):  # at the end, the report is written when the log is closed
            refresh()
    bar.close()
    return progress


def _warn(trainer: PPOTrainer, log: RunLog, step: int) -> None:
    """Tell what has begun to look wrong, and put it into one line of the metrics."""
    told = {}
    for warning in new_warnings(trainer.history):
        logger.warning("step %d, %s: %s To try: %s.", step, warning.name, warning.sentence, warning.advice)
        told |= logged_metrics(warning)
    if told:
        log.log(step, told, prefix="warning")


def _evaluate(trainer: PPOTrainer, log: RunLog, step: int) -> dict[str, float]:
    figures = trainer.evaluate()
    if figures:
        log.log(step, figures, prefix="eval")
        log.log_samples(step, trainer.held_out_samples)
        told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        logger.info("step %d, held-out prompts: %s", step, told)
    return figures
