"""Tables of the report as HTML; every text of the data is escaped, and what is undefined says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from openrlhf.evaluation.figures import SCORE_NAMES, score_words

Summary = Mapping[str, Any]
Place = tuple[str, str, Summary]  # model, set, its figures
MOST_INTERVALS = 6  # columns of the prefix table that have room for intervals
STEP_SCORES = {"goal similarity": "goal similarity", "reward": "reward", "position": "position alone"}
LONGEST_PART = 32  # letters of a name that stay on one line


def places(results: Mapping[str, Any]) -> list[Place]:
    """(model, set, figures) of everything in the results, set by set."""
    models = results["models"]
    names = dict.fromkeys(name for model in models.values() for name in model["sets"])
    return [
        (label, name, model["sets"][name]) for name in names for label, model in models.items() if name in model["sets"]
    ]


def html_table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str = "",
    texts: int = 1,
    groups: Sequence[str] | None = None,
) -> str:
    """A table with its caption above and a note below; "" without rows.

    Args:
        columns: headings; they and the cells are HTML already.
        rows: cells of each row; the last one of a row with fewer cells than columns spans the rest.
        texts: number of first columns that hold text; the others are numbers, and are set flush right.
        groups: heading of each row's group; rows of one group stand together below it. None: no headings.
    """
    rows = list(rows)
    if not rows:
        return ""
    head = "".join(f'<th scope="col"{_align(place, texts)}>{column}</th>' for place, column in enumerate(columns))
    parts = []
    for number, row in enumerate(rows):
        heading = groups[number] if groups is not None else None
        new = number == 0 or (groups is not None and groups[number - 1] != heading)
        if new:
            parts.append("</tbody>\n<tbody>" if number else "<tbody>")
            if heading is not None:
                span = f'<th scope="rowgroup" colspan="{len(columns)}"><span>{heading}</span></th>'
                parts.append(f'<tr class="group">{span}</tr>')
        again = not new and rows[number - 1][0] == row[0]
        parts.append(_html_row(row, len(columns), texts, again))
    body = "\n".join([*parts, "</tbody>"])
    note = f'<p class="note">{note}</p>' if note else ""
    dense = " dense" if len(columns) > texts + 3 else ""  # bounds on a line of their own
    return (
        f'<div class="table{dense}"><div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n{body}\n</table></div>{note}</div>\n"
    )


def _html_row(row: Sequence[str], columns: int, texts: int, again: bool) -> str:
    """One row; a first cell that repeats the one above is only for those who hear the table read."""
    first = f'<span class="again">{row[0]}</span>' if again else row[0]
    cells = [f'<th scope="row">{first}</th>']
    for place, cell in enumerate(row[1:], 1):
        rest = columns - place
        span = f' colspan="{rest}"' if place == len(row) - 1 and rest > 1 else ""
        cells.append(f"<td{_align(place, texts)}{span}>{cell}</td>")
    return "<tr>" + "".join(cells) + "</tr>"


def set_table(
    results: Mapping[str, Any],
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str = "",
    texts: int = 2,
) -> str:
    """`html_table` of rows that begin with set and model: one model is not named, of several each set is a group."""
    rows = list(rows)
    if len(results["models"]) == 1:
        return html_table(caption, [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows], note, texts - 1)
    return html_table(caption, columns[1:], [row[1:] for row in rows], note, texts - 1, [row[0] for row in rows])


def models_table(results: Mapping[str, Any]) -> str:
    """What each label stands for."""
    rows = []
    for label, model in results["models"].items():
        told = model.get("model") or {}
        template = "chat template" if told.get("apply_chat_template") else told.get("template")
        cells = [told.get("fingerprint"), template, told.get("max_len"), told.get("goal_state"), model.get("path")]
        rows.append(
            [breakable(label), *("" if cell is None else f"<code>{breakable(_short(cell))}</code>" for cell in cells)]
        )
    note = "Checkpoint and goal state are named by a hash of their content. Length: tokens of prompt and response."
    columns = ["model", "checkpoint", "prompt template", "length", "goal state", "scored rows"]
    filled = [0, *(place for place in range(1, 6) if any(row[place] for row in rows))]
    if len(filled) == 1:
        return ""
    rows = [[row[place] for place in filled] for row in rows]
    note = note if 1 in filled else ""
    return html_table("Models", [columns[place] for place in filled], rows, note, texts=6)


def counts_table(results: Mapping[str, Any]) -> str:
    """How many completions there are, and what was left out."""
    left_out = {
        "without_label": "no label",
        "without_reward": "no reward",
        "truncated": "truncated",
        "duplicates": "duplicates",
    }
    told = [figures for _, _, figures in places(results)]
    # In a vanilla set nobody expects a goal similarity.
    if any(figures.get("without_goal") for figures in told if "goal_similarity" in (figures.get("auroc") or {})):
        left_out["without_goal"] = "no goal similarity"
    if any(figures.get("unjudged") for figures in told):
        left_out["unjudged"] = "questions without a vote"
    rows = [
        [
            *_names(label, name),
            _count(figures.get("rows")),
            _count(figures.get("questions")),
            _percent(figures.get("correct")) if figures.get("correct") is not None else _undefined("no labels"),
            *(_count(figures.get(key)) for key in left_out),
        ]
        for label, name, figures in places(results)
    ]
    note = (
        "Rows without a label or without a reward (the prompt left no room) are left out of the figures that need "
        "them. Truncated: the end of the response was cut to fit the model. Duplicates repeat a completion and sample "
        "number of an earlier row; they are counted like any other row."
    )
    columns = ["set", "model", "completions", "questions", "correct", *left_out.values()]
    return set_table(results, "Completions", columns, rows, note, texts=2)


def auroc_table(results: Mapping[str, Any]) -> str:
    """AUROC at the last token."""
    scores = _keys(figures.get("auroc") for _, _, figures in places(results))
    rows = [
        [*_names(label, name), *_merged([_interval_of(figures, figures["auroc"].get(score)) for score in scores])]
        for label, name, figures in places(results)
        if figures.get("auroc")
    ]
    note = (
        "Probability that a correct completion scores above a wrong one (a tie counts one half; 0.5 is chance), with "
        "95% bootstrap interval over questions. Goal similarity: cosine of the last hidden state with the goal state; "
        "“mean” averages it over the response."
    )
    names = [escape(SCORE_NAMES.get(score, score)) for score in scores]
    return set_table(results, "AUROC at the last token", ["set", "model", *names], rows, note, texts=2)


def prefix_table(results: Mapping[str, Any]) -> str:
    """AUROC after a part of the response."""
    percents = _keys(
        curve for _, _, figures in places(results) for curve in (figures.get("prefix_auroc") or {}).values()
    )
    percents = sorted(percents, key=float)
    many = len(percents) > MOST_INTERVALS
    rows = [
        [
            *_names(label, name),
            escape(SCORE_NAMES.get(score, score)),
            *_merged([_interval_of(figures, _bare(curve.get(p)) if many else curve.get(p)) for p in percents]),
        ]
        for label, name, figures in places(results)
        for score, curve in (figures.get("prefix_auroc") or {}).items()
    ]
    note = (
        "AUROC when only the first part of each response is read. High numbers on the left mean that the score knows "
        "early. "
        + ("The figures give the intervals." if many else "In brackets: 95% bootstrap interval over questions.")
    )
    heads = ["set", "model", "score", *(f"{escape(p)}%" for p in percents)]
    return set_table(results, "AUROC by share of the response read", heads, rows, note, texts=3)


def accuracy_table(results: Mapping[str, Any]) -> str:
    """Accuracy of ways to choose one answer a question."""
    found = [place for place in places(results) if place[2].get("accuracy")]
    ways = _keys(figures["accuracy"] for _, _, figures in found)
    rows = [
        [*_names(label, name), *(_interval(figures["accuracy"].get(way), _percent) for way in ways)]
        for label, name, figures in found
    ]
    note = (
        "Share of questions answered right when one answer is chosen from all completions of a question, with 95% "
        "bootstrap interval over questions. Best of n takes the completion with the highest score, a weighted vote "
        "adds up scores instead of counting; “any correct” is what a perfect choice would reach."
    )
    heads = ["set", "model", *map(escape, ways)]
    return set_table(results, "Accuracy by way of choosing", heads, rows, note, texts=2)


def filter_table(results: Mapping[str, Any]) -> str:
    """The filter at the threshold chosen on validation questions, and at the one given."""
    rows = []
    for label, name, figures in places(results):
        equal, given = figures.get("equal_accuracy"), figures.get("filtered_vote")
        if equal:
            test = equal["test"]
            chosen = equal.get("threshold")
            rows.append(
                [
                    *_names(label, name),
                    "none" if chosen is None else _number(chosen),
                    _percent(test["unfiltered_accuracy"]),
                    _percent(test["accuracy"]),
                    _interval(equal.get("accuracy_difference"), _points),
                    _interval(equal.get("saving") or [test["tokens_saved"], None, None], _percent),
                    _interval(equal.get("gain_over_fewer"), _points),
                    f"{equal['better']} / {equal['worse']}" if equal.get("better") is not None else "",
                    _p_value(equal.get("p_value")),
                ]
            )
        if given:
            accuracy = [_percent(given[key]) for key in ("unfiltered_accuracy", "accuracy")]
            difference = _points(given["accuracy"] - given["unfiltered_accuracy"])
            saved = _percent(given["tokens_saved"])
            rows.append(
                [
                    *_names(label, name),
                    f"{_number(given['threshold'])} (given)",
                    *accuracy,
                    difference,
                    saved,
                    "",
                    "",
                    "",
                ]
            )
    note = (
        "A completion is stopped at its first token whose goal similarity is below the threshold and does not vote. "
        "The threshold is the one that saves most tokens at no loss of accuracy on validation questions (one half of "
        "the set, unless others were given; “none” where no threshold saves any); the row shows the other questions. "
        "Gained and lost: questions that only the filtered or only the unfiltered vote answers right; p is McNemar’s "
        "exact test on them. A given threshold is shown on all questions. Over fewer: difference to the unfiltered "
        "vote of fewer completions, drawn at random, that cost as many tokens; a filter is worth it only above 0."
    )
    columns = "set,model,threshold,no filter,filtered,difference,tokens saved,over fewer,gained / lost,p".split(",")
    return set_table(results, "Majority vote with the goal filter", columns, rows, note, texts=2)


def calibration_table(results: Mapping[str, Any]) -> str:
    """Expected calibration error and Brier score, as it is and after one shift of all rewards."""
    rows = []
    for label, name, figures in places(results):
        raw = figures.get("calibration")
        if raw:
            centred = raw.get("centred") or {}
            cells = [_interval(part.get(key), _number) for part in (raw, centred) for key in ("ece", "brier")]
            shift = centred.get("shift")
            rows.append([*_names(label, name), *cells[:2], "" if shift is None else _signed(-shift), *cells[2:]])
    note = (
        "The sigmoid of the reward read as the probability of being correct. ECE: mean distance between that and the "
        "share that is correct, over bins; Brier: mean squared error. Both are 0 at best. A Bradley-Terry reward is "
        "only fixed up to a constant: the shift is the constant that makes the mean prediction right, and the last "
        "columns hold after it."
    )
    columns = ["set", "model", "ECE", "Brier", "shift", "ECE after it", "Brier after it"]
    return set_table(results, "Calibration error", columns, rows, note, texts=2)


def steps_table(results: Mapping[str, Any]) -> str:
    """How often each rule finds the first wrong step, against chance and goal similarity against reward."""
    rows, differences, aurocs, notes = [], [], [], []
    for label, name, figures in places(results):
        report = figures.get("step_level")
        if not report:
            continue
        names = _names(label, name)
        if report.get("rows"):
            count = _count(report["rows"])
            chance = [_interval(report.get(key), _percent) for key in ("chance", "chance_within_one")]
            rows.append([*names, "a random step", count, *chance])
            for rule, interval in (report.get("accuracy") or {}).items():
                near = _interval((report.get("within_one") or {}).get(rule), _percent)
                rows.append([*names, escape(rule), count, _interval(interval, _percent), near])
        for one in report.get("differences") or []:
            cells = [_interval(one["difference"], _points), f"{one['better']} / {one['worse']}"]
            differences.append([*names, escape(one["rule"]), *cells, _p_value(one["p_value"])])
        if report.get("auroc"):
            cells = [_interval(report["auroc"].get(score), _number) for score in STEP_SCORES]
            aurocs.append([*names, *cells])
        notes += [f"{escape(name)}, {escape(label)}: {told}." for told in _left_out_steps(report)]
    note = (
        "Share of wrong solutions whose first wrong step is the one that the rule names, or at most one step away "
        "from it. A random step is chance."
    )
    columns = ["set", "model", "rule", "solutions", "first wrong step", "within one step"]
    found = set_table(results, "First wrong steps found", columns, rows, " ".join([note, *notes]), texts=3)
    note = (
        "First wrong steps found by a rule on the goal similarity minus those by the same rule on the reward, of the "
        "same solutions; more / fewer: solutions where only the first or only the second finds it; p is McNemar’s."
    )
    columns = ["set", "model", "rule", "goal similarity − reward", "more / fewer", "p"]
    found += set_table(results, "Goal similarity against reward", columns, differences, note, texts=3)
    note = (
        "Steps before the first wrong one against it and all later ones. Position says only that earlier steps are "
        "more often right: a score that does no better knows nothing about errors."
    )
    columns = ["set", "model", *STEP_SCORES.values()]
    return found + set_table(results, "AUROC of steps before the first error", columns, aurocs, note)


def _left_out_steps(report: Mapping[str, Any]) -> list[str]:
    told = [
        f"{_count(count)} rows left out, {escape(reason)}" for reason, count in (report.get("left_out") or {}).items()
    ]
    if report.get("cut_off"):
        told.append(f"in {_count(report['cut_off'])} rows the last steps were cut off and are no candidates")
    return told


def comparison_table(results: Mapping[str, Any]) -> str:
    """Paired differences of two scores or two models on the same completions."""
    order = list(dict.fromkeys(name for model in results["models"].values() for name in model["sets"]))
    comparisons = sorted(results.get("comparisons") or [], key=lambda one: order.index(one["set"]))
    rows = [
        [
            _difference_of(one, alone=len(results["models"]) == 1),
            _count(one.get("rows")),
            _count(one.get("unmatched", 0) + one.get("left_out", 0)),
            _interval([one["difference"], one["low"], one["high"]], _signed),
            _p_value(one.get("p_value")),
        ]
        for one in comparisons
    ]
    note = (
        "Difference of AUROC on the same completions and the same bootstrap draws, with 95% interval; p is two-sided, "
        "from these draws. Left out: completions that only one model has, or whose score or label is missing or "
        "differs."
    )
    columns = ["difference of", "completions", "left out", "AUROC", "p"]
    sets = [breakable(one["set"]) for one in comparisons]
    return html_table("Differences of AUROC", columns, rows, note, groups=sets)


def _difference_of(one: Mapping[str, Any], alone: bool) -> str:
    """What is subtracted from what, as `comparison_words`; a single model is not named."""
    score = escape(score_words(one["score"]))
    if one["a"] == one["b"]:
        return score if alone else f"{breakable(one['a'])}: {score}"
    return f"{score}: {breakable(one['a'])} − {breakable(one['b'])}"


def undefined_reason(figures: Summary) -> str:
    """Why figures that compare correct with wrong completions are undefined, in a few words."""
    rows, correct = figures.get("rows") or 0, figures.get("correct")
    if not rows:
        return "no completions"
    if rows == figures.get("without_reward"):
        return "no rewards"
    if correct is None:
        return "no labels"
    if correct in (0, 1):
        return f"all labelled completions are {'correct' if correct else 'wrong'}"
    return "one class only among the scored completions"


def _interval_of(figures: Summary, interval: Any) -> str:
    """An AUROC, with the reason where it is undefined; "" where there is none."""
    if interval is not None and interval[0] is None:
        return _undefined(undefined_reason(figures))
    return _interval(interval, _number)


def _bare(interval: Any) -> Any:
    """An interval without its bounds."""
    return None if interval is None else [interval[0], None, None]


def _merged(cells: Sequence[str]) -> Sequence[str]:
    """One cell for the rest of the row where every figure is undefined for the same reason."""
    same = len(set(cells)) == 1 and 'class="undefined"' in cells[0]
    return cells[:1] if same else cells


def _interval(interval: Any, form: Callable[[float], str]) -> str:
    if interval is None:
        return ""
    value, low, high = interval if isinstance(interval, list | tuple) else (interval, None, None)
    if value is None:
        return _undefined()
    if low is None or high is None:
        return form(value)
    # The unit stands behind the value.
    low, high = (form(bound).removesuffix("%").removesuffix(" pp") for bound in (low, high))
    return f'{form(value)} <span class="bounds">[{low}, {high}]</span>'


def _undefined(reason: str = "") -> str:
    return f'<span class="undefined">undefined{": " if reason else ""}{escape(reason)}</span>'


def _names(label: str, name: str) -> list[str]:
    return [breakable(name), breakable(label)]


def breakable(text: str) -> str:
    """A name or path as HTML: lines break behind a slash, elsewhere only in parts too long for a narrow column."""
    parts = [escape(part) for part in re.findall(r"[^/]*/|[^/]+", text)]
    return "<wbr>".join(part if len(part) > LONGEST_PART else f'<span class="part">{part}</span>' for part in parts)


def _keys(mappings: Iterable[Mapping[str, Any] | None]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping or ()))


def _align(place: int, texts: int) -> str:
    return "" if place < texts else ' class="number"'


def _count(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def _number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%".replace("-", "−")


def _p_value(value: float | None) -> str:
    return "" if value is None else "&lt;0.001" if value < 0.001 else f"{value:.3f}"


def _points(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return f"{'0.0' if float(text) == 0 else text} pp".replace("-", "−")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:38] + "…" + text[-38:]
