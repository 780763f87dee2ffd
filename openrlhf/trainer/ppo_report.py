"""The report of train_ppo: curves, warnings and samples of one or more runs in one HTML file that loads nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from openrlhf.evaluation.html_page import fill_page
from openrlhf.evaluation.report_tables import html_table
from openrlhf.trainer.ppo_curves import all_panels, curve_of, curve_record, group_names, is_listed, panel_of_warning
from openrlhf.trainer.ppo_records import Line, RunRecord, differing_settings, group_runs, read_run
from openrlhf.utils.run_log import REPORT_NAME

logger = logging.getLogger(__name__)

MAX_EVALUATIONS = 24  # of a run whose samples are shown: the first, the last, and some in between
MAX_LETTERS = 4000  # of a response
OPEN_WARNINGS = 6  # a longer list is folded
_PAGE = Path(__file__).with_name("run_page")
_SUMMARY = (  # heading, split, metric, format
    ("reward", "train", "reward", ".3f"),
    ("held-out reward", "eval", "reward", ".3f"),
    ("held-out gold reward", "eval", "gold_reward", ".3f"),
    ("KL", "train", "kl", ".3f"),
    ("entropy", "train", "entropy", ".3f"),
    ("response length", "train", "response_length", ".1f"),
)


def refresh_report(folder: str | Path) -> None:
    """Write the report of a run into its folder; whatever goes wrong there does not end the run."""
    try:
        write_run_report(Path(folder) / REPORT_NAME, [read_run(folder)])
    except Exception as error:
        logger.warning("report.html was not written, which changes nothing else: %s", error)


def write_run_report(
    path: str | Path, runs: Sequence[RunRecord], title: str | None = None, date: str | None = None
) -> Path:
    """Write the page.

    Args:
        path: HTML file.
        runs: one or more; those that differ in their seed only are drawn as mean and range.
        title: heading; None: the name of the run, or how many they are.
        date: date to print; None: today and the time.
    Returns:
        The path.
    """
    groups = group_runs(runs)
    names = group_names(groups)
    packed = pack_runs(runs)
    facts = [f"{len(runs)} runs" if len(runs) > 1 else runs[0].status or "no manifest"]
    facts += [f"{max((run.rollouts for run in runs), default=0):,} rollouts"]
    facts.append(date or datetime.now().strftime("%Y-%m-%d %H:%M"))
    command = runs[0].command_line if len(runs) == 1 else None
    told = f'<p class="facts">{escape(" · ".join(facts))}</p>'
    told += f'<p class="command"><code>{escape(command)}</code></p>' if command else ""
    parts = {
        "title": escape(title or (runs[0].name if len(runs) == 1 else f"{len(groups)} settings, {len(runs)} runs")),
        "facts": told,
        "summary": _summary(runs),
        "warnings": _warnings(packed),
        "settings": _settings(groups, names),
        "nothing": "" if packed["panels"] else '<p class="note">Nothing has been logged yet.</p>',
    }
    return fill_page(path, _PAGE, parts, packed)


def pack_runs(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """What the page's script reads."""
    groups, panels = group_runs(runs), all_panels(runs)
    names = group_names(groups)
    marks = [
        {
            "group": number,
            "run": run.name,
            "step": warning.step,
            "name": warning.name,
            "panel": None if panel is None else panels.index(panel),
            "sentence": warning.sentence,
            "advice": warning.advice,
        }
        for number, group in enumerate(groups)
        for run in group
        for warning in run.warnings
        for panel in [panel_of_warning(warning.name, panels)]
    ]
    return {
        "groups": [{"name": name, "runs": len(group)} for name, group in zip(names, groups, strict=True)],
        "panels": [
            {
                "split": panel.split,
                "metric": panel.metric,
                "title": panel.title,
                "unit": panel.unit,
                "listed": is_listed(panel),
                "curves": [
                    curve_record(curve_of(group, panel), number, len(group)) for number, group in enumerate(groups)
                ],
            }
            for panel in panels
        ],
        "warnings": marks,
        "samples": [pack_samples(run) for run in runs if run.samples],
    }


def pack_samples(run: RunRecord) -> dict[str, Any]:
    """Held-out prompts of a run with their responses by step, side by side."""
    steps = spread_evenly(sorted(run.samples), MAX_EVALUATIONS)
    prompts: dict[int, dict[str, Any]] = {}
    for step in steps:
        for sample in run.samples[step]:
            prompt = prompts.setdefault(
                sample["place"], {"prompt": sample["prompt"], "label": sample["label"], "responses": []}
            )
            prompt["responses"].append(_pack_response(step, sample))
    return {"run": run.name, "evaluations": len(run.samples), "shown": len(steps), "prompts": list(prompts.values())}


def spread_evenly(values: Sequence[int], most: int) -> list[int]:
    """The first, the last and, where there are more than `most`, evenly many in between."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _pack_response(step: int, sample: Line) -> dict[str, Any]:
    response = sample["response"]
    return {
        "step": step,
        "text": response[:MAX_LETTERS],
        "letters_left": max(0, len(response) - MAX_LETTERS),
        "reward": sample["reward"],
        "gold_reward": sample["gold_reward"],
    }


def _summary(runs: Sequence[RunRecord]) -> str:
    """First and last numbers of every run."""
    columns = [
        one for one in _SUMMARY if any(_values(run, one[1], one[2]) for run in runs)
    ]  # those that a run has at all
    rows = []
    for run in runs:
        cells = [escape(run.name), f"{run.rollouts:,}"]
        for _, split, metric, form in columns:
            values = _values(run, split, metric)
            cells.append(f"{values[0]:{form}} → {values[-1]:{form}}".replace("-", "−") if values else "–")
        cells.append("–" if run.seconds is None else f"{run.seconds / 60:,.1f}")
        rows.append(cells)
    headings = ["run", "rollouts", *(heading for heading, *_ in columns), "minutes"]
    note = "First and last logged number. Minutes are between the first and the last line of the metrics."
    return html_table("At a glance", headings, rows, note)


def _values(run: RunRecord, split: str, metric: str) -> list[float]:
    lines = run.train if split == "train" else run.evaluations
    return [line[metric] for _, line in sorted(lines.items()) if line.get(metric) is not None]


def _warnings(packed: Mapping[str, Any]) -> str:
    """Every warning with its sentence and advice; numbers and anchors are those of the marks in the curves."""
    if not packed["warnings"]:
        return '<p class="note">No early warning.</p>'
    several = sum(group["runs"] for group in packed["groups"]) > 1
    items = []
    for number, one in enumerate(packed["warnings"], 1):
        place = f"Rollout {one['step']:,}" + (f", {one['run']}" if several else "")
        items.append(
            f'<li id="warning-{number}"><b>{escape(place)}, {escape(one["name"].replace("_", " "))}.</b> '
            f'{escape(one["sentence"])} <span class="advice">To try: {escape(one["advice"])}.</span></li>'
        )
    listed = f'<ol class="warnings">{"".join(items)}</ol>'
    if len(items) <= OPEN_WARNINGS:
        return listed
    return f"<details><summary>{len(items)} warnings</summary>{listed}</details>"


def _settings(groups: Sequence[Sequence[RunRecord]], names: Sequence[str]) -> str:
    """Settings in which groups differ; of a single group all of them."""
    if len(groups) > 1:
        rows = [
            [escape(name), *(escape(_shown(value)) for value in values)]
            for name, values in differing_settings(groups).items()
        ]
        return html_table("Settings that differ", ["setting", *map(escape, names)], rows, texts=1 + len(names))
    rows = [[escape(name), escape(_shown(value))] for name, value in groups[0][0].settings.items()]
    table = html_table("Settings", ["setting", "value"], rows, texts=2)
    return f"<details><summary>{len(rows)} settings</summary>{table}</details>" if rows else ""


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)
