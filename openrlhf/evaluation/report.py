"""The report: one HTML file with tables, figures and a browser of single completions; it loads nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from openrlhf.evaluation import report_tables as tables
from openrlhf.evaluation.figures import EvaluationFigure, Results, Scored, figure_svg, list_figures, save_figures
from openrlhf.evaluation.html_page import fill_page
from openrlhf.evaluation.showcase import pack_completions

__all__ = ["save_figures", "write_completion_page", "write_report"]

MAX_ROWS = 600  # completions shown
MAX_FIGURES = 40  # figures shown in a section
MAX_BYTES = 16 * 2**20  # of their data in the page
_PAGE = Path(__file__).with_name("report_page")  # template, style and script

# Section: (id, heading, table, kind of its figures, caption of the figures).
_SECTIONS: tuple[tuple[str, str, Callable[[Results], str], str, str], ...] = (
    (
        "auroc",
        "Telling correct from wrong",
        tables.auroc_table,
        "auroc",
        "AUROC at the last token with 95% interval. Filled: reward; hollow: goal similarity; dotted line: chance.",
    ),
    (
        "prefix",
        "How early it shows",
        tables.prefix_table,
        "prefix",
        "AUROC after a part of the response, with 95% band. Solid: reward; dashed: goal similarity; dotted: chance.",
    ),
    (
        "accuracy",
        "One answer from several completions",
        tables.accuracy_table,
        "accuracy",
        "Accuracy against the completions sampled of each question. Dashed: by goal similarity; dotted: any correct.",
    ),
    (
        "filter",
        "Stopping early with the goal filter",
        tables.filter_table,
        "tradeoff",
        "Filtered vote at rising thresholds, with 95% band. Dashed level: no filter. Dotted: the unfiltered vote of "
        "fewer completions, drawn at random, that cost as many tokens. Ring: the threshold that was chosen on "
        "validation questions.",
    ),
    (
        "steps",
        "The first wrong step",
        tables.steps_table,
        "steps",
        "How often each rule names the first wrong step, with 95% interval; the dotted line is chance. Blue: goal "
        "similarity; orange: reward.",
    ),
    (
        "calibration",
        "Calibration",
        tables.calibration_table,
        "calibration",
        "Share of correct completions by predicted probability, with 95% interval of each bin; on the dotted diagonal "
        "both are equal. The shift moves all rewards of a set by one constant.",
    ),
    (
        "scores",
        "Distribution of scores",
        lambda results: "",
        "scores",
        "Scores at the last token of correct (solid) and wrong (dashed) completions, each as shares of its own class. "
        "The less they overlap, the higher the AUROC.",
    ),
    (
        "comparisons",
        "Differences between models and scores",
        tables.comparison_table,
        "comparisons",
        "Difference of AUROC on the same completions, with 95% interval; an interval that crosses the dotted line at 0 "
        "leaves open which is better.",
    ),
)


def write_report(
    path: str | Path,
    results: Results,
    scored: Scored,
    title: str | None = None,
    max_rows: int = MAX_ROWS,
    *,
    max_bytes: int = MAX_BYTES,
    warmup_tokens: int = 0,
    seed: int = 0,
    command: str | None = None,
    date: str | None = None,
) -> Path:
    """Write the report of one or more models.

    Args:
        path: HTML file; its folder is made when absent.
        results: `models` (by label: `path`, `model`, `sets` of `summarise_rows` figures) and `comparisons`.
        scored: the scored rows by label and set.
        title: heading; by default it names the models.
        max_rows, max_bytes: bounds of the completions shown, over all sets; the page says how many are left out.
        warmup_tokens: response tokens that the filter never judges.
        seed: draws the completions that are shown besides the most instructive ones.
        command: command line to print under the title.
        date: date to print; None: today.
    Returns:
        The path.
    Raises:
        ValueError: `max_rows` below 0, or a scored row whose per-token numbers do not fit together (names the row).
    """
    if max_rows < 0 or max_bytes < 0:
        raise ValueError(f"expected max_rows and max_bytes of 0 or more, got {max_rows} and {max_bytes}")
    thresholds = {
        (label, name): filter_threshold(figures)
        for label, model in results["models"].items()
        for name, figures in model["sets"].items()
    }
    bounds = {"max_rows": max_rows, "max_bytes": max_bytes}
    packed = pack_completions(scored, thresholds, **bounds, warmup_tokens=warmup_tokens, seed=seed)
    labels = list(results["models"])
    title = title or f"Evaluation of {', '.join(labels) if len(labels) < 4 else f'{len(labels)} reward models'}"
    sections = [("models", "Models and data", tables.models_table(results) + tables.counts_table(results))]
    figures = list_figures(results, scored)
    for anchor, heading, table, kind, caption in _SECTIONS:
        content = table(results) + _figures([figure for figure in figures if figure.kind == kind], caption)
        if content:
            sections.append((anchor, heading, content))
    facts = _facts(results, date or datetime.now().strftime("%Y-%m-%d"), command)
    return _write_page(path, title, facts, sections, packed)


def write_completion_page(
    path: str | Path,
    row: Mapping[str, Any],
    label: str,
    *,
    threshold: float | None = None,
    warmup_tokens: int = 0,
    title: str = "A look at one response",
) -> Path:
    """Write the report's view of a single scored completion.

    Args:
        path: HTML file.
        row: scored row.
        label: name of the model that scored it.
        threshold, warmup_tokens: the goal filter.
    """
    packed = pack_completions(
        {label: {"response": [row]}},
        {(label, "response"): threshold},
        max_rows=1,
        max_bytes=1 << 62,
        warmup_tokens=warmup_tokens,
    )
    packed["groups"][0]["rows"][0]["reason"] = ""
    return _write_page(path, title, "", [], packed)


def filter_threshold(figures: Mapping[str, Any]) -> float | None:
    """Threshold that the page starts with: the one given, else the one chosen on validation questions."""
    for key in ("filtered_vote", "equal_accuracy"):
        threshold = (figures.get(key) or {}).get("threshold")
        if threshold is not None:
            return float(threshold)
    return None


def _facts(results: Results, date: str, command: str | None) -> str:
    models = results["models"]
    names = dict.fromkeys(name for model in models.values() for name in model["sets"])
    largest = [max(m["sets"][name].get("rows", 0) for m in models.values() if name in m["sets"]) for name in names]
    words = [_plural(len(models), "model"), _plural(len(names), "set"), _plural(sum(largest), "completion"), date]
    told = f'<p class="facts">{escape(" · ".join(words))}</p>'
    return told + (f'<p class="command"><code>{escape(command)}</code></p>' if command else "")


def _figures(figures: Sequence[EvaluationFigure], caption: str) -> str:
    if not figures:
        return ""
    if len(figures) > MAX_FIGURES:
        caption += f" The first {MAX_FIGURES} of {len(figures):,} figures are shown; --figures writes all of them."
        figures = figures[:MAX_FIGURES]
    headings = [f"<h3>{tables.breakable(figure.title)}</h3>" if len(figures) > 1 else "" for figure in figures]
    drawn = "".join(
        f'<div class="panel">{headings[number]}'
        f'<div role="img" aria-label="{escape(f"Figure, {figure.title}. {caption}")}">'
        f"{figure_svg(figure, f'{figure.kind}{number}-')}</div></div>\n"
        for number, figure in enumerate(figures)
    )
    return f'<figure><div class="panels">{drawn}</div><figcaption>{escape(caption)}</figcaption></figure>\n'


def _write_page(
    path: str | Path, title: str, facts: str, sections: Sequence[tuple[str, str, str]], packed: Mapping[str, Any]
) -> Path:
    contents = [(anchor, heading) for anchor, heading, _ in sections]
    contents.append(("completions", "Single completions"))
    parts = {
        "title": escape(title),
        "facts": facts,
        "contents": "".join(f'<li><a href="#{anchor}">{escape(heading)}</a></li>' for anchor, heading in contents),
        "sections": "\n".join(
            f'<section id="{anchor}" aria-labelledby="{anchor}-heading">\n'
            f'<h2 id="{anchor}-heading">{escape(heading)}</h2>\n{content}</section>'
            for anchor, heading, content in sections
        ),
        "single": "single" if not sections else "",
    }
    return fill_page(path, _PAGE, parts, packed)


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
