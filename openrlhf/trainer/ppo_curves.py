"""Curves of runs of train_ppo: which metrics are drawn, and their mean and range over repetitions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from openrlhf.trainer.early_warnings import SIGNS
from openrlhf.trainer.ppo_records import Line, RunRecord, group_runs


@dataclass(frozen=True)
class Panel:
    """One metric against the rollouts."""

    split: str  # "train": over the responses of a rollout; "eval": of held-out prompts
    metric: str
    title: str
    unit: str


PANELS = (
    Panel("train", "reward", "Reward", "reward units, mean of a rollout"),
    Panel("eval", "reward", "Held-out reward", "reward units, one response a prompt"),
    Panel("eval", "gold_reward", "Held-out gold reward", "gold reward units, one response a prompt"),
    Panel("train", "kl", "KL divergence from the reference", "nats a token"),
    Panel("train", "entropy", "Entropy", "nats a token"),
    Panel("train", "response_length", "Response length", "tokens"),
    Panel("eval", "response_length", "Held-out response length", "tokens"),
    Panel("train", "truncated_share", "Responses cut at the limit", "share"),
    Panel("train", "repeated_share", "Repeated 4-grams", "share of a response"),
    Panel("train", "equal_group_share", "Prompts whose responses score alike", "share"),
    Panel("train", "unscored_share", "Responses without a score", "share"),
    Panel("train", "reward_std", "Standard deviation of the reward", "reward units"),
    Panel("train", "reward_clipped_share", "Scores outside of the clip range", "share"),
    Panel("train", "clip_fraction", "Clipped ratios", "share of tokens"),
    Panel("train", "approx_kl", "Move of an update", "nats a token"),
    Panel("train", "policy_loss", "Policy loss", ""),
    Panel("train", "kl_loss", "KL loss", "nats"),
    Panel("train", "entropy_loss", "Entropy loss", "nats"),
    Panel("train", "value_loss", "Value loss", "squared reward units"),
    Panel("train", "explained_variance", "Variance that the critic explains", "share"),
    Panel("train", "grad_norm", "Gradient norm of the policy", ""),
    Panel("train", "critic_grad_norm", "Gradient norm of the critic", ""),
    Panel("train", "learning_rate", "Learning rate of the policy", ""),
    Panel("train", "critic_learning_rate", "Learning rate of the critic", ""),
    Panel("train", "kl_coef", "Coefficient of the KL penalty", ""),
    Panel("train", "seconds_sampling", "Time of sampling", "seconds a rollout"),
    Panel("train", "seconds_reward", "Time of the reward", "seconds a rollout"),
    Panel("train", "seconds_logprobs", "Time of log-probabilities", "seconds a rollout"),
    Panel("train", "seconds_training", "Time of updates", "seconds a rollout"),
)
MARKED_POINTS = 40  # a curve of at most so many has a dot at each
_ELSEWHERE = ("step", "split", "time", "responses", "updates", "epoch", "prompts")  # no curves of their own


@dataclass(frozen=True)
class Curve:
    """A metric of repetitions at the steps that all of them have."""

    steps: Sequence[int]
    mean: Sequence[float | None]  # None: a repetition has no number there
    low: Sequence[float | None]
    high: Sequence[float | None]


def all_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """`PANELS`, then whatever else the runs have logged, such as the numbers of a reward function; only with data."""
    present = {
        (split, name): None
        for run in runs
        for split, lines in (("train", run.train), ("eval", run.evaluations))
        for line in lines.values()
        for name, value in line.items()
        if value is not None and name not in _ELSEWHERE
    }
    known = [panel for panel in PANELS if (panel.split, panel.metric) in present]
    named = {(panel.split, panel.metric) for panel in PANELS}
    others = [key for key in present if key not in named]
    return known + [
        Panel(split, name, name if split == "train" else f"Held-out {name}", "") for split, name in sorted(others)[::-1]
    ]


def curve_of(group: Sequence[RunRecord], panel: Panel) -> Curve:
    """The metric of a panel over the repetitions of a run; of a single one low and high are the value itself."""
    lines = [run.train if panel.split == "train" else run.evaluations for run in group]
    steps = sorted(set.intersection(*(set(one) for one in lines)))
    columns = [[_number(one[step], panel.metric) for one in lines] for step in steps]
    mean, low, high = (
        [None if None in column else reduce(column) for column in columns] for reduce in (fmean, min, max)
    )
    return Curve(steps, mean, low, high)


def group_names(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """A name for each group: that of its run, or what those of its runs begin with."""
    names = []
    for group in groups:
        first = group[0].name
        if len(group) > 1:
            alike = os.path.commonprefix([run.name for run in group]).rstrip("-_./ 0123456789")
            alike = alike.removesuffix("seed").rstrip("-_./ ")
            first = f"{alike or first} ({_count(group)})"
        names.append(first)
    if len(set(names)) == len(names):
        return names
    return [f"{group[0].name} ({_count(group)})" if len(group) > 1 else group[0].name for group in groups]


def _count(group: Sequence[RunRecord]) -> str:
    seeds = {run.settings.get("seed") for run in group}
    return f"{len(group)} {'seeds' if len(seeds) == len(group) else 'runs'}"


def is_listed(panel: Panel) -> bool:
    """One of `PANELS`, not a number that only this run logs."""
    return panel in PANELS


def panel_of_warning(name: str, panels: Sequence[Panel]) -> Panel | None:
    """The panel that shows best what a sign was seen in."""
    by_metric = {panel.metric: panel for panel in reversed(panels)}  # of two of one metric, training counts
    return next((by_metric[metric] for metric in SIGNS[name].metrics if metric in by_metric), None)


def plot_curves(runs: Sequence[RunRecord], path: str | Path, metrics: Sequence[str] | None = None) -> Path:
    """Panels in one PNG: a line and a band a group, a dotted line a warning.

    Args:
        metrics: such as "eval/gold_reward" or "train/kl"; None: those of `PANELS` that the runs have.
    Raises:
        ValueError: nothing has been logged, or a metric that no run has.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from openrlhf.evaluation.plots import COLORS, plain_style

    groups = group_runs(runs)
    panels = all_panels(runs)
    if not panels:
        raise ValueError("nothing has been logged yet: there are no curves to draw")
    if metrics is None:
        panels = [panel for panel in panels if is_listed(panel)]
    else:
        by_name = {f"{panel.split}/{panel.metric}": panel for panel in panels}
        if unknown := [name for name in metrics if name not in by_name]:
            raise ValueError(f"no run has logged {', '.join(unknown)}; there are {', '.join(sorted(by_name))}")
        panels = [by_name[name] for name in metrics]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    colors = [COLORS[number % len(COLORS)] for number in range(len(groups))]
    with plain_style():
        figure = Figure(figsize=(3.4 * columns, 2.3 * rows + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, place in zip(panels, axes, strict=False):
            for group, color in zip(groups, colors, strict=True):
                marked = [
                    one.step for run in group for one in run.warnings if panel_of_warning(one.name, panels) == panel
                ]
                _draw_curve(place, curve_of(group, panel), color, marked)
            place.set_title(panel.title)
            place.set_ylabel(panel.unit.split(",")[0], fontsize=7)
            place.set_xlabel("rollouts", fontsize=7)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        if len(groups) > 1:
            lines = [axes[0].plot([], [], color=color)[0] for color in colors]
            figure.legend(lines, group_names(groups), loc="outside lower center", ncols=2)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    return path


def _draw_curve(axes: Any, curve: Curve, color: str, marked: Sequence[int]) -> None:
    low, mean, high = (
        [math.nan if value is None else value for value in part] for part in (curve.low, curve.mean, curve.high)
    )
    axes.plot(curve.steps, mean, color=color, marker="." if len(mean) <= MARKED_POINTS else "")
    axes.fill_between(curve.steps, low, high, color=color, alpha=0.15, linewidth=0)
    for step in marked:
        axes.axvline(step, color=color, linestyle=":", linewidth=1)


def curve_record(curve: Curve, number: int, repetitions: int) -> Mapping[str, Any]:
    """A curve as the page reads it; the range only where there is one."""
    record = {"group": number, "steps": curve.steps, "mean": curve.mean}
    return record if repetitions == 1 else {**record, "low": curve.low, "high": curve.high}


def _number(line: Line, metric: str) -> float | None:
    value = line.get(metric)
    return None if value is None else float(value)
