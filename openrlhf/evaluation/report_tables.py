"""Tables of the report as HTML; every text of the data is escaped, and what is undefined says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from openrlhf.evaluation.figures import SCORE_NAMES, comparison_words

Summary = Mapping[str, Any]
Place = tuple[str, str, Summary]  # model, set, its figures


def places(results: Mapping[str, Any]) -> list[Place]:
    """(model, set, figures) of everything in the results, set by set."""
    models = results["models"]
    names = dict.fromkeys(name for model in models.values() for name in model["sets"])
    return [
        (label, name, model["sets"][name]) for name in names for label, model in models.items() if name in model["sets"]
    ]


def html_table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "", texts: int = 1
) -> str:
    """A table with its caption above and a note below; "" without rows.

    Args:
        columns: headings; they and the cells are HTML already.
        texts: number of first columns that hold text; the others are numbers, and are set flush right.
    """
    rows = list(rows)
    if not rows:
        return ""
    head = "".join(f'<th scope="col"{_align(place, texts)}>{column}</th>' for place, column in enumerate(columns))
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if place == 0 else f"<td{_align(place, texts)}>{cell}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    note = f'<p class="note">{note}</p>' if note else ""
    dense = " dense" if len(columns) > texts + 3 else ""  # bounds on a line of their own
    return (
        f'<div class="table{dense}"><div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{note}</div>\n"
    )


def models_table(results: Mapping[str, Any]) -> str:
    """What each label stands for."""
    rows = []
    for label, model in results["models"].items():
        told = model.get("model") or {}
        template = "chat template" if told.get("apply_chat_template") else told.get("template")
        cells = [told.get("fingerprint"), template, told.get("max_len"), told.get("goal_state"), model.get("path")]
        rows.append(
            [escape(label), *("" if cell is None else f"<code>{escape(_short(cell))}</code>" for cell in cells)]
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
    for key, words in {"without_goal": "no goal similarity", "unjudged": "questions without a vote"}.items():
        if any(figures.get(key) for _, _, figures in places(results) if "goal_similarity" in figures.get("auroc", {})):
            left_out[key] = words
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
    return html_table("Completions", columns, rows, note, texts=2)


def auroc_table(results: Mapping[str, Any]) -> str:
    """AUROC at the last token."""
    scores = _keys(figures.get("auroc") for _, _, figures in places(results))
    rows = [
        [*_names(label, name), *(_interval_of(figures, "auroc", score) for score in scores)]
        for label, name, figures in places(results)
        if figures.get("auroc")
    ]
    note = (
        "Probability that a correct completion scores above a wrong one (a tie counts one half; 0.5 is chance), with "
        "95% bootstrap interval over questions. Goal similarity: cosine of the last hidden state with the goal state; "
        "“mean” averages it over the response."
    )
    names = [escape(SCORE_NAMES.get(score, score)) for score in scores]
    return html_table("AUROC at the last token", ["set", "model", *names], rows, note, texts=2)


def prefix_table(results: Mapping[str, Any]) -> str:
    """AUROC after a part of the response."""
    percents = _keys(
        curve for _, _, figures in places(results) for curve in (figures.get("prefix_auroc") or {}).values()
    )
    percents = sorted(percents, key=float)
    rows = [
        [
            *_names(label, name),
            escape(SCORE_NAMES.get(score, score)),
            *(_value(figures, curve.get(p)) for p in percents),
        ]
        for label, name, figures in places(results)
        for score, curve in (figures.get("prefix_auroc") or {}).items()
    ]
    note = (
        "AUROC when only the first part of each response is read. High numbers on the left mean that the score knows "
        "early. The figures give the intervals."
    )
    heads = ["set", "model", "score", *(f"{escape(p)}%" for p in percents)]
    return html_table("AUROC by share of the response read", heads, rows, note, texts=3)


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
    return html_table("Accuracy by way of choosing", heads, rows, note, texts=2)


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
                    "none saves tokens" if chosen is None else _number(chosen),
                    _percent(test["unfiltered_accuracy"]),
                    _percent(test["accuracy"]),
                    _interval(equal.get("accuracy_difference"), _points),
                    _interval(equal.get("saving") or [test["tokens_saved"], None, None], _percent),
                    _interval(equal.get("gain_over_fewer"), _points),
                    f"{equal['better']} / {equal['worse']}" if equal.get("better") is not None else "",
                    "" if equal.get("p_value") is None else f"{equal['p_value']:.3f}",
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
        "the set, unless others were given); the row shows the other questions. Gained and lost: questions that only "
        "the filtered or only the unfiltered vote answers right; p is McNemar’s exact test on them. A given threshold "
        "is shown on all questions. Over fewer: difference to the unfiltered vote of fewer completions, drawn at "
        "random, that cost as many tokens; a filter is worth its while only above 0."
    )
    columns = "set,model,threshold,no filter,filtered,difference,tokens saved,over fewer,gained / lost,p".split(",")
    return html_table("Majority vote with the goal filter", columns, rows, note, texts=2)


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
    return html_table("Calibration error", columns, rows, note, texts=2)


def steps_table(results: Mapping[str, Any]) -> str:
    """How often each rule finds the first wrong step, exactly and within one step."""
    rows = []
    for label, name, figures in places(results):
        report = figures.get("step_level")
        if not report:
            continue
        count = _count(report.get("rows"))
        chance = [_interval(report.get(key), _percent) for key in ("chance", "chance_within_one")]
        rows.append([*_names(label, name), "a random step", count, *chance])
        for rule, interval in (report.get("accuracy") or {}).items():
            near = _interval((report.get("within_one") or {}).get(rule), _percent)
            rows.append([*_names(label, name), escape(rule), count, _interval(interval, _percent), near])
    note = (
        "Share of wrong solutions whose first wrong step is the one that the rule names, or at most one step away "
        "from it. A random step is chance."
    )
    columns = ["set", "model", "rule", "solutions", "first wrong step", "within one step"]
    return html_table("First wrong steps found", columns, rows, note, texts=3)


def comparison_table(results: Mapping[str, Any]) -> str:
    """Paired differences of two scores or two models on the same completions."""
    rows = [
        [
            escape(one["set"]),
            escape(comparison_words(one)),
            _count(one.get("rows")),
            _interval([one["difference"], one["low"], one["high"]], _signed),
            "" if one.get("p_value") is None else f"{one['p_value']:.3f}",
        ]
        for one in results.get("comparisons") or []
    ]
    note = "Difference of AUROC on the same completions and the same bootstrap draws; p is two-sided, from these draws."
    columns = ["set", "difference of", "completions", "AUROC", "p"]
    return html_table("Differences of AUROC", columns, rows, note, texts=2)


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


def _interval_of(figures: Summary, key: str, score: str) -> str:
    if score not in figures[key]:
        return ""
    interval = figures[key][score]
    return _undefined(undefined_reason(figures)) if interval[0] is None else _interval(interval, _number)


def _value(figures: Summary, value: Any) -> str:
    value = value[0] if isinstance(value, list | tuple) else value
    return _undefined(undefined_reason(figures)) if value is None else _number(value)


def _interval(interval: Any, form: Callable[[float], str]) -> str:
    if interval is None:
        return ""
    value, low, high = interval if isinstance(interval, list | tuple) else (interval, None, None)
    if value is None:
        return _undefined()
    bounds = "" if low is None or high is None else f' <span class="bounds">[{form(low)}, {form(high)}]</span>'
    return form(value) + bounds


def _undefined(reason: str = "") -> str:
    return f'<span class="undefined">undefined{": " if reason else ""}{escape(reason)}</span>'


def _names(label: str, name: str) -> list[str]:
    return [escape(name), escape(label)]


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


def _points(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return f"{'0.0' if float(text) == 0 else text} pp".replace("-", "−")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:38] + "…" + text[-38:]
