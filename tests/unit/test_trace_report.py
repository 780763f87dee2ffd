"""The page of search trees: the path of the answer, what is packed, bounds, and texts that must not become markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from decoding.trace_report import MAX_LETTERS, answer_path, pack_search, write_trace_report


def node(number, parent, fate, score, text="x\n", **more):
    figures = {"logprob": -0.5, "goal": 0.25, "guidance": 0.25, "step_score": score, "score": score}
    return {"id": number, "parent": parent, "text": text, "tokens": 3, **figures, "similarities": [0.25], "ended": "",
            "fate": fate, **more}  # fmt: skip


# Two beams; 1 is a copy of 0. The best finished candidate, 5, continues 2, although 0 scored better than 2.
STEPS = [
    {"step": 1, "candidates": [
        node(0, None, "kept", 0.9), node(1, None, "merged", 0.9, into=0), node(2, None, "kept", 0.5, "y\n"),
        node(3, None, "dropped", 0.1, "z\n"),
    ]},
    {"step": 2, "candidates": [
        node(4, 0, "finished", 0.6, "a"), node(5, 2, "finished", 0.8, "b"), node(6, 2, "rejected", None, "c"),
    ]},
]  # fmt: skip


def row(index=0, method="beam", seed=0, trace=STEPS, **more):
    return {"index": index, "question": f"what is {index} ?", "method": method, "seed": seed, "answer": "7",
            "expected_answer": "7", "is_correct": True, "policy_tokens": 21, "reward_tokens": 18, "seconds": 0.5,
            "response": "y\nb", "finished": True, "trace": trace, **more}  # fmt: skip


class Page(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, text):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(text)


def written(tmp_path, rows, **options):
    text = write_trace_report(tmp_path / "new" / "trace.html", rows, date="2026-01-02", **options).read_text("utf-8")
    page = Page(text)
    return text, page, json.loads(page.scripts[0])


def test_the_answer_ends_in_the_best_finished_candidate():
    assert answer_path(STEPS) == [2, 5]


def test_without_a_finished_candidate_the_best_that_is_left_is_the_answer():
    open_steps = [
        {"step": 1, "candidates": [node(0, None, "cut", 0.3), node(1, None, "kept", 0.9)]},
        {"step": 2, "candidates": [node(2, 1, "kept", 0.2), node(3, 1, "dropped", 0.95)]},
    ]
    assert answer_path(open_steps) == [0]  # 0.3 beats 0.2; 0.9 is no end, and 3 was dropped
    assert answer_path([]) == []


def test_copies_of_a_candidate_are_one_card():
    search = pack_search(row())
    first, second = search["columns"]
    assert [(one["id"], one["copies"], one["fate"]) for one in first] == [
        (0, 2, "kept"), (2, 1, "kept"), (3, 1, "dropped"),
    ]  # fmt: skip
    assert second[2]["numbers"] == {"logprob": -0.5, "goal": 0.25, "guidance": 0.25}  # no score: none is shown
    assert search["path"] == [2, 5]


def test_long_texts_are_cut_and_counted():
    steps = [{"step": 1, "candidates": [node(0, None, "finished", 1.0, "a" * (MAX_LETTERS + 5))]}]
    (card,) = pack_search(row(trace=steps))["columns"][0]
    assert len(card["text"]) == MAX_LETTERS and card["letters_left"] == 5


def test_the_page_loads_nothing_and_holds_every_search(tmp_path):
    text, page, packed = written(tmp_path, [row(0), row(1), row(0, seed=1)])
    assert "3 of 3 searches shown · beam · 2026-01-02" in text
    addresses = [value for _, attrs in page.elements for name, value in attrs.items() if name in ("src", "href")]
    assert addresses == ["data:,"] and "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert [(one["index"], one["seed"]) for one in packed["searches"]] == [(0, 0), (1, 0), (0, 1)]
    used = set(re.findall(r'byId\("([\w-]+)"\)', text))
    assert used <= {attrs.get("id") for _, attrs in page.elements}  # the script finds all that it asks for


def test_texts_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    steps = [{"step": 1, "candidates": [node(0, None, "finished", 1.0, evil)]}]
    text, page, packed = written(tmp_path, [row(question=evil, response=evil, trace=steps)], title=f"t {evil}")
    assert [tag for tag, _ in page.elements].count("script") == 2 and "img" not in [tag for tag, _ in page.elements]
    assert evil not in text
    assert packed["searches"][0]["question"] == evil and packed["searches"][0]["columns"][0][0]["text"] == evil


def test_searches_that_do_not_fit_are_left_out_and_counted(tmp_path):
    rows = [row(k, seed=seed) for seed in range(2) for k in range(10)]
    text, _, packed = written(tmp_path, rows, max_searches=6)
    assert "6 of 20 searches shown" in text
    assert [(one["seed"], one["index"]) for one in packed["searches"]] == [(s, k) for s in range(2) for k in range(3)]
    one = len(json.dumps(pack_search(rows[0])))
    text, _, packed = written(tmp_path, rows, max_bytes=5 * one)
    # Half of the room is for each seed: 2 of 2.5 searches, and then what is left of 5.
    assert [one["seed"] for one in packed["searches"]] == [0, 0, 1, 1, 1] and "5 of 20 searches" in text


def test_samples_of_a_filtered_vote_are_shown_as_they_are(tmp_path):
    samples = [{"sample": 0, "end": "goal", "policy_tokens": 4, "reward_tokens": 4, "below": 3, "answer": None,
                "votes": False}]  # fmt: skip
    _, _, packed = written(tmp_path, [row(method="filtered_vote", trace=samples, response=None)])
    assert packed["searches"][0]["samples"] == samples and "columns" not in packed["searches"][0]


def test_nothing_to_show_is_said(tmp_path):
    with pytest.raises(ValueError, match="no traces to show"):
        write_trace_report(tmp_path / "x.html", [])
