"""What runs of train_ppo made of their held-out prompts, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from openrlhf.trainer.ppo_curves import Curve, Panel, curve_of, group_names
from openrlhf.trainer.ppo_records import RunRecord, group_runs

HEADER = (
    "| runs | rollouts | gold reward: start | best, at rollout | end | reward: start | end | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def held_out_table(runs: Sequence[RunRecord]) -> str:
    """Markdown: rewards of held-out prompts, means over repetitions with their range [low, high].

    The best is that of the mean. Seconds are those from the first line of the log to the last, evaluations included; a
    run that was interrupted counts the break. A dash where nothing was logged.
    """
    groups = group_runs(runs)
    lines = list(HEADER)
    for name, group in zip(group_names(groups), groups, strict=True):
        gold, reward = (curve_of(group, Panel("eval", metric, "", "")) for metric in ("gold_reward", "reward"))
        cells = [
            name,
            str(max(run.rollouts for run in group)),
            *_cells(gold),
            *_cells(reward, best=False),
        ]
        lines.append(f"| {' | '.join([*cells, _seconds(group)])} |")
    return "\n".join(lines)


def _cells(curve: Curve, best: bool = True) -> list[str]:
    """Start, best where asked, and end of a curve."""
    known = [place for place, value in enumerate(curve.mean) if value is not None]
    if not known:
        return ["-"] * (3 if best else 2)
    top = max(known, key=lambda place: curve.mean[place])
    middle = [f"{curve.mean[top]:.3f}, {curve.steps[top]}"] if best else []
    return [_told(curve, known[0]), *middle, _told(curve, known[-1])]


def _told(curve: Curve, place: int) -> str:
    low, mean, high = (part[place] for part in (curve.low, curve.mean, curve.high))
    return f"{mean:.3f}" if low == high else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _seconds(group: Sequence[RunRecord]) -> str:
    spans = [run.seconds for run in group if run.seconds is not None]
    return f"{fmean(spans):.0f}" if spans else "-"
