"""The searches of a run in one HTML file: every step of every question as a tree; the file loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from openrlhf.evaluation.html_page import fill_page
from openrlhf.evaluation.showcase import share_out

MAX_SEARCHES = 600
MAX_BYTES = 16 * 2**20  # of their data in the page
MAX_LETTERS = 600  # of the text of one candidate
_PAGE = Path(__file__).with_name("trace_page")
_NUMBERS = ("logprob", "goal", "reward", "self_evaluation", "random", "guidance", "step_score", "score")
_FACTS = (
    "index question method seed answer expected_answer is_correct policy_tokens reward_tokens response finished".split()
)

Trace = Sequence[Mapping[str, Any]]
Row = Mapping[str, Any]  # of traces.jsonl


def write_trace_report(
    path: str | Path,
    rows: Iterable[Row],
    *,
    title: str = "Search traces",
    max_searches: int = MAX_SEARCHES,
    max_bytes: int = MAX_BYTES,
    date: str | None = None,
) -> Path:
    """Write the page.

    Args:
        path: HTML file.
        rows: of traces.jsonl: the facts of an answer and `trace`, of beam search or of filtered voting.
        title: heading.
        max_searches: questions shown, dealt evenly to methods and seeds.
        max_bytes: of the data; searches that would pass it are left out. The page says how many are.
        date: date to print; None: today.
    Returns:
        The path.
    Raises:
        ValueError: no row.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["seed"]), []).append(row)
    if not groups:
        raise ValueError("no traces to show: run beam or filtered_vote with --trace into this folder first")
    packed = pack_traces(list(groups.values()), max_searches, max_bytes)
    shown = len(packed["searches"])
    facts = [f"{shown:,} of {packed['total']:,} searches shown", ", ".join(dict.fromkeys(m for m, _ in groups))]
    facts.append(date or datetime.now().strftime("%Y-%m-%d"))
    parts = {"title": escape(title), "facts": f'<p class="facts">{escape(" · ".join(facts))}</p>'}
    return fill_page(path, _PAGE, parts, packed)


def pack_traces(groups: Sequence[Sequence[Row]], max_searches: int, max_bytes: int) -> dict[str, Any]:
    """What the page's script needs: the first searches of each group that fit, in order."""
    searches, size = [], 0
    shares = share_out([len(group) for group in groups], max_searches)
    for group, share, dealt in zip(groups, shares, accumulate(shares), strict=True):
        room = max_bytes * dealt / max(1, sum(shares))  # what the groups so far may take together
        for row in group[:share]:
            search = pack_search(row)
            length = len(json.dumps(search))
            if size + length <= room:
                searches.append(search)
                size += length
    return {"searches": searches, "total": sum(map(len, groups))}


def pack_search(row: Row) -> dict[str, Any]:
    """One question: its facts, and the columns of its tree or the samples of its vote."""
    facts = {name: row.get(name) for name in _FACTS}
    trace = row["trace"]
    if trace and "candidates" not in trace[0]:
        return {**facts, "samples": [dict(sample) for sample in trace]}
    return {**facts, "path": answer_path(trace), "columns": [_pack_step(step["candidates"]) for step in trace]}


def answer_path(trace: Trace) -> list[int]:
    """Numbers of the candidates that make up the answer, first step first.

    The answer ends in the best finished candidate; where none has finished, in the best of those that a limit of tokens
    cut off and those still open after the last step.
    """
    nodes = {one["id"]: one for step in trace for one in step["candidates"]}
    ends = [one for one in nodes.values() if one["fate"] == "finished"]
    if not ends:
        open_ones = [one for one in trace[-1]["candidates"] if one["fate"] == "kept"] if trace else []
        ends = [one for one in nodes.values() if one["fate"] == "cut"] + open_ones
    if not ends:
        return []
    best = max(ends, key=lambda one: -math.inf if one["score"] is None else one["score"])
    path = [best["id"]]
    while (parent := nodes[path[-1]]["parent"]) is not None:
        path.append(parent)
    return path[::-1]


def _pack_step(candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The different candidates of a step; one that was merged into another counts there."""
    copies: dict[int, int] = {}
    for one in candidates:
        copies[one.get("into", one["id"])] = copies.get(one.get("into", one["id"]), 0) + 1
    packed = []
    for one in candidates:
        if one["fate"] == "merged":
            continue
        text = one["text"]
        numbers = {name: one[name] for name in _NUMBERS if one.get(name) is not None}
        packed.append(
            {
                "id": one["id"],
                "parent": one["parent"],
                "fate": one["fate"],
                "text": text[:MAX_LETTERS],
                "letters_left": max(0, len(text) - MAX_LETTERS),
                "tokens": one["tokens"],
                "copies": copies.get(one["id"], 1),
                "numbers": numbers,
                "similarities": one.get("similarities") or [],
            }
        )
    return packed
