"""The report: one safe file with tables, figures and packed completions, and the figures as PNG and PDF."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from openrlhf.evaluation.figures import list_figures
from openrlhf.evaluation.heat import (
    Scale,
    color_tokens,
    cut_token,
    score_color,
    sparkline,
    steepest_fall,
    token_scale,
    token_texts,
)
from openrlhf.evaluation.plots import plot_quickstart
from openrlhf.evaluation.report import save_figures, write_completion_page, write_report
from openrlhf.evaluation.showcase import choose_rows, instructive_order, pack_completions, share_out
from openrlhf.evaluation.summary import summarise_rows
from tests.browser import dom_of, needs_browser

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def scored_row(question, solution, correct, rewards, similarities=None, **more):
    """A scored row whose tokens are the letters of the solution, and EOS."""
    assert len(rewards) == len(solution) + 1
    row = {
        "question": question,
        "generated_solution": solution,
        "expected_answer": "7",
        "predicted_answer": "7" if correct else "8",
        "is_correct": correct,
        "sample": 0,
        "reward": rewards[-1],
        "partial_rewards": rewards,
        "cosine_sim": similarities,
        "num_actions": len(rewards),
        "truncated": False,
        "token_ends": [*range(1, len(solution) + 1), len(solution)],
    }
    return row | more


def random_rows(questions=12, samples=4, goal=True, seed=0):
    """Scored rows of questions with several samples; correct ones score higher on average."""
    generator = np.random.default_rng(seed)
    rows = []
    for question in range(questions):
        for sample in range(samples):
            correct = bool(generator.random() < 0.5)
            curve = np.cumsum(generator.normal(size=11)).astype(np.float32) * 0.1 + 0.5 * correct
            goal_curve = np.tanh(curve + generator.normal(size=11).astype(np.float32) * 0.1) if goal else None
            row = scored_row(f"question {question}", f"{question:02} and {sample:02}x", correct, curve, goal_curve)
            rows.append(row | {"sample": sample, "reward": float(curve[-1])})
    return rows


def results_of(scored):
    return {
        "models": {
            label: {
                "path": f"scores/{label}",
                "model": {"fingerprint": "0123abcd", "template": "plain", "max_len": 64},
                "sets": {name: summarise_rows(rows, bootstrap=20) for name, rows in sets.items()},
            }
            for label, sets in scored.items()
        },
        "comparisons": [],
    }


def report_of(tmp_path, scored, **options):
    path = write_report(tmp_path / "report.html", results_of(scored), scored, date="2024-05-01", **options)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def no_figures(monkeypatch):
    """Leave the figures out, for tests that look at the rest."""
    monkeypatch.setattr("openrlhf.evaluation.report.list_figures", lambda results, scored: [])


class Page(HTMLParser):
    """Elements of a page in order, as (tag, attributes), and the text of its data."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = []
        self.data = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, text):
        inside, attributes = self.elements[-1] if self.elements else ("", {})
        if inside == "script" and attributes.get("id") == "packed" and self.data is None:
            self.data = json.loads(text)
        elif inside not in ("script", "style"):
            self.texts.append(text)

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)


def integers(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


def test_the_report_loads_nothing(tmp_path):
    text = report_of(tmp_path, {"a": {"gsm8k/all": random_rows()}, "b": {"gsm8k/all": random_rows(goal=False)}})
    page = Page(text)
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data")
    ]
    assert addresses
    assert all(value.startswith(("#", "data:,")) for value in addresses)
    assert not re.search(r"@import|url\((?!#)|(?:fetch|XMLHttpRequest|WebSocket|import)\(", text)
    # The only addresses left are names of vocabularies.
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    (policy,) = [one["content"] for tag, one in page.elements if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy


def test_text_of_the_data_is_never_markup(tmp_path):
    rows = random_rows()
    rows[0] |= {"question": f"Q {ATTACK}", "generator": ATTACK, "predicted_answer": ATTACK}
    rows[1] = scored_row(f"R {ATTACK}", ATTACK, True, [0.1] * (len(ATTACK) + 1), [0.2] * (len(ATTACK) + 1))
    name = f"set {ATTACK} {{{{script}}}}"  # a placeholder in a name is not filled in
    text = report_of(tmp_path, {f"model {ATTACK} $x$": {name: rows}, "_b": {name: rows}}, command=f"cmd {ATTACK}")
    page = Page(text)
    assert page.count("script") == 2  # the data and the page's own
    assert page.count("img") == 0
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert f"Q {ATTACK}" in page.data["strings"]
    assert ATTACK in page.data["strings"]
    assert name in "".join(page.texts)
    assert f"cmd {ATTACK}" in page.texts


def test_strange_letters_come_through(tmp_path, no_figures):
    solution = "a\u2028b\u2029\ufffd\x00\u202e\u05e9\U0001f600\ud83d."
    rows = [scored_row("\u2028 \ud800?", solution, True, [0.5] * (len(solution) + 1))]
    page = Page(report_of(tmp_path, {"half \udc00 pair": {"s": rows}}))
    assert page.data["strings"] == ["\u2028 \ud800?", solution]
    lengths = integers(page.data["groups"][0]["rows"][0]["ends"], "<u2")
    assert lengths.tolist() == [1] * 8 + [2, 1, 1, 0]  # the emoji is two letters to JavaScript, EOS none


def test_one_class_is_undefined_with_the_reason(tmp_path, no_figures):
    rows = [row | {"is_correct": False} for row in random_rows()]
    text = report_of(tmp_path, {"a": {"one": rows, "two": random_rows(seed=1)}})
    assert "undefined: all labelled completions are wrong" in text
    table = text[text.index("<caption>AUROC at the last token") :]
    line = next(line for line in table.split("\n") if line.startswith('<tr><th scope="row"><span class="part">one'))
    assert "0.000" not in line
    assert line.count("undefined:") == 1 and 'colspan="3"' in line  # reward, goal similarity and its mean


def test_names_are_not_repeated_in_every_row(tmp_path, no_figures):
    sets = {"first/all": random_rows(), "second/all": random_rows(seed=1)}
    alone = report_of(tmp_path, {"some/model": sets})
    table = re.search("<caption>AUROC by share.*?</table>", alone, re.DOTALL)[0]
    assert "model" not in table
    assert table.count('class="again"') == 2  # the second score of each set
    assert "[" in table  # intervals
    two = report_of(tmp_path, {"some/model": sets, "other": {"second/all": sets["second/all"]}})
    table = re.search("<caption>AUROC at the last.*?</table>", two, re.DOTALL)[0]
    names = re.findall(r'scope="row(?:group)?"[^>]*>(.*?)</th>', table)
    assert [re.sub("<.*?>", "", name) for name in names] == [
        "first/all",
        "some/model",
        "second/all",
        "some/model",
        "other",
    ]


def test_questions_without_a_vote_are_shown_without_a_goal_state_too(tmp_path, no_figures):
    rows = [row | {"expected_answer": None, "is_correct": None} for row in random_rows(goal=False)]
    assert "questions without a vote" in report_of(tmp_path, {"a": {"s": rows}})


def test_differences_and_steps_name_what_is_compared(tmp_path, no_figures):
    rows = [row | {"is_correct": False, "first_error_step": 1} for row in random_rows(samples=1)]
    results = results_of({"a": {"s": rows}})
    one = {"set": "s", "score": "goal_similarity minus reward", "a": "a", "b": "a", "rows": 12}
    results["comparisons"] = [one | {"difference": 0.1, "low": 0.05, "high": 0.2, "p_value": 0.0002}]
    text = write_report(tmp_path / "r.html", results, {"a": {"s": rows}}).read_text(encoding="utf-8")
    assert "goal similarity − reward" in text and "&lt;0.001" in text
    for caption in (
        "First wrong steps found",
        "Goal similarity against reward",
        "AUROC of steps before the first error",
    ):
        assert f"<caption>{caption}</caption>" in text


def test_many_sets_are_split_into_panels_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.evaluation.report.MAX_FIGURES", 2)
    interval = [0.6, 0.5, 0.7]
    summary = {"rows": 4, "auroc": {"reward": interval}, "prefix_auroc": {"reward": {"50": interval}}}
    models = {label: {"sets": {f"set {k}": summary for k in range(45)}} for label in ("a", "b")}
    figures = list_figures({"models": models, "comparisons": []}, {})
    # A set takes a heading, two points and half a line: 11 sets fit into 40 lines.
    assert [figure.title for figure in figures if figure.kind == "auroc"][-1] == "AUROC at the last token, 5 of 5"
    assert max(figure.size[1] for figure in figures) < 10
    text = write_report(tmp_path / "r.html", {"models": models, "comparisons": []}, {}).read_text(encoding="utf-8")
    assert "The first 2 of 45 figures are shown" in text


def test_sections_without_data_are_left_out(tmp_path):
    rows = [row for row in random_rows(goal=False) if row["sample"] == 0]
    text = report_of(tmp_path, {"vanilla": {"greedy": rows}})
    assert 'id="auroc"' in text
    for anchor in ("accuracy", "filter", "steps", "comparisons"):
        assert f'<section id="{anchor}"' not in text
    assert Page(text).data["groups"][0]["similarity_scale"] is None


def test_rows_without_reward_label_or_token_ends_are_shown(tmp_path, no_figures):
    nothing = {"partial_rewards": None, "cosine_sim": None, "token_ends": None, "num_actions": 0, "truncated": True}
    rows = random_rows()
    rows[0] |= {"reward": None} | nothing
    rows[1] |= {"is_correct": None}
    del rows[2]["token_ends"]
    page = Page(report_of(tmp_path, {"a": {"s": rows}}))
    packed = {one["place"]: one for one in page.data["groups"][0]["rows"]}
    assert len(packed) == len(rows)
    assert packed[0]["rewards"] is None
    assert "no reward" in packed[0]["reason"]
    assert packed[1]["correct"] is None
    assert packed[2]["ends"] is None
    assert packed[2]["similarity"] is not None


def test_no_completions(tmp_path):
    page = Page(report_of(tmp_path, {"a": {"empty": []}}))
    assert page.data["groups"] == []
    assert any("undefined: no completions" in text for text in page.texts)


def test_packed_numbers_are_those_of_the_row():
    row = random_rows(seed=3)[5]
    packed = pack_completions({"a": {"s": [row]}}, {("a", "s"): 0.1}, max_rows=9, max_bytes=1 << 20)
    one = packed["groups"][0]["rows"][0]
    low, high, steps = one["rewards"]
    rewards = low + integers(steps, "<u2") / 65535 * (high - low)
    # Half a step of the quantised range, and the rounding of float32.
    assert np.abs(rewards - row["partial_rewards"]).max() <= 0.51 * (high - low) / 65535 + 1e-6
    assert np.abs(integers(one["similarity"], "<i2") / 32767 - row["cosine_sim"]).max() <= 0.51 / 32767 + 1e-6
    below = [place for place, value in enumerate(row["cosine_sim"]) if value < np.float32(0.1)]
    assert one["cut"] == (below[0] if below else None)
    assert one["lowest"] == pytest.approx(min(row["cosine_sim"]), abs=1e-5)


def test_size_is_bounded_and_what_is_left_out_is_counted(tmp_path, no_figures):
    rows = random_rows(questions=50)
    long = "x" * 40_000
    rows.append(scored_row("long", long, False, [9.0] * 40_001, [0.0] * 40_001))
    page = Page(report_of(tmp_path, {"a": {"s": rows}}, max_rows=40))
    assert len(page.data["groups"][0]["rows"]) == 40
    assert page.data["groups"][0]["total"] == 201
    small = report_of(tmp_path, {"a": {"s": rows}}, max_bytes=20_000)
    large = report_of(tmp_path, {"a": {"s": rows}})
    packed = Page(small).data
    assert len(small) < len(large) - 200_000  # 40,000 letters and 80,000 numbers of two bytes
    assert packed["groups"][0]["left_out_for_size"] > 0
    assert long not in packed["strings"]
    assert len(json.dumps([packed["groups"][0]["rows"], packed["strings"]])) < 40_000
    with pytest.raises(ValueError, match="max_rows"):
        report_of(tmp_path, {"a": {"s": rows}}, max_rows=-1)


def test_rows_that_do_not_fit_together_are_named(tmp_path):
    rows = random_rows()
    for change, message in (
        ({"partial_rewards": [0.0] * 3}, "numbers"),
        ({"cosine_sim": [float("nan")] * 11}, "finite"),
        ({"token_ends": [99] * 11}, "token ends"),
    ):
        scored = {"model": {"s": [rows[0], rows[1] | change]}}
        with pytest.raises(ValueError, match=f"model, s, row 1.*{message}"):
            pack_completions(scored, {}, max_rows=9, max_bytes=1 << 20)


def test_most_instructive_come_first():
    # Rewards 5, 4, 3, 2, 1 in a set of five: ranks 0.9, 0.7, 0.5, 0.3, 0.1, the half of a row counted in itself.
    rewards_and_labels = [(5, False), (4, False), (3, True), (2, True), (1, True), (None, False)]
    rows = [
        scored_row("q", "", label, [reward or 0.0]) | ({"reward": None} if reward is None else {})
        for reward, label in rewards_and_labels
    ]
    order = instructive_order(rows)
    # Wrong with the highest reward, then the next; correct with the lowest, the next; the other; the one not scored.
    assert [one.place for one in order] == [0, 1, 4, 3, 2, 5]
    assert [one.tier for one in order] == [0, 0, 1, 1, 2, 3]
    assert order[0].reason == "wrong, with a reward above 90% of the set"
    falling = [scored_row("q", "ab", None, [0.0, -depth, 1.0]) for depth in (0.1, 0.5, 0.3)]
    assert [one.place for one in instructive_order(falling)] == [1, 2, 0]


def test_models_show_the_same_random_completions():
    first = random_rows(questions=60, seed=0)
    second = [row | {"reward": -row["reward"]} for row in first]
    chosen = [choose_rows(rows, 100, seed=1) for rows in (first, second)]
    assert [len(one) for one in chosen] == [100, 100]
    assert chosen[0] == choose_rows(first, 100, seed=1)
    assert choose_rows(first, 10, seed=1) == chosen[0][:10]
    # Half of the places are the same draw; chance alone would share 100 * 100 / 240, about 42.
    assert len(set(chosen[0]) & set(chosen[1])) >= 50


def test_places_are_dealt_evenly():
    # 10 places for 2, 100 and 100 rows: the small set takes 2, the others 4 each.
    assert share_out([100, 2, 100], 10) == [4, 2, 4]
    assert share_out([1, 1], 10) == [1, 1]
    assert share_out([], 10) == []


def test_page_is_readable_to_machines(tmp_path):
    scored = {"a": {"gsm8k/all": random_rows()}, "b": {"gsm8k/all": random_rows(seed=1)}}
    text = report_of(tmp_path, scored)
    page = Page(text)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert page.count("caption") == page.count("table")
    assert all("scope" in attributes for tag, attributes in page.elements if tag == "th")
    drawings = [attributes for _, attributes in page.elements if attributes.get("role") == "img"]
    assert len(drawings) == len(list_figures(results_of(scored), scored))
    assert all(attributes["aria-label"] for attributes in drawings)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert text == report_of(tmp_path, scored)  # the same bytes again


def test_figures_are_written_as_png_and_pdf(tmp_path):
    scored = {"a": {"x/y": random_rows()}}
    files = save_figures(tmp_path / "figures", results_of(scored), scored)
    for start in ("auroc", "prefix_auroc-x-y", "accuracy", "tradeoff-x-y", "calibration", "scores"):
        assert any(file.name.startswith(start) for file in files)
    for file in files:
        assert file.read_bytes()[:4] == (b"%PDF" if file.suffix == ".pdf" else b"\x89PNG")
    two = {"a": scored["a"] | {"x-y": random_rows(seed=2)}}  # sets that would have the same file names
    names = [figure.name for figure in list_figures(results_of(two), two)]
    assert "prefix_auroc-x-y-2" in names
    assert len(names) == len(set(names))


def test_undefined_figures_can_be_drawn(tmp_path):
    none = [None, None, None]
    results = {
        "models": {
            "a": {
                "path": "p",
                "model": None,
                "sets": {
                    "s": {
                        "rows": 3,
                        "correct": 1.0,
                        "auroc": {"reward": none, "goal_similarity": [0.5, None, None]},
                        "prefix_auroc": {"reward": {"50": none, "100": [0.7, None, None]}},
                        "accuracy": {"any correct": [1.0, None, None]},
                        "accuracy_by_n": {"any correct": {"1": None, "2": 1.0}},
                        "step_level": {"rows": 0, "steps": 0, "accuracy": {"lowest reward": none}, "chance": none},
                        "calibration": {"bins": [], "ece": none, "brier": none, "centred": None},
                        "tradeoff": [
                            {
                                "threshold": None,
                                "accuracy": none,
                                "tokens_saved": [0.0, None, None],
                                "correct_kept": None,
                            }
                        ],
                    }
                },
            }
        },
        "comparisons": [
            {"set": "s", "score": "reward", "a": "a", "b": "b", "rows": 3}
            | dict.fromkeys(("difference", "low", "high", "p_value"))
        ],
    }
    assert save_figures(tmp_path / "figures", results, {"a": {"s": []}})
    text = write_report(tmp_path / "report.html", results, {"a": {"s": []}}).read_text(encoding="utf-8")
    assert "undefined: all labelled completions are correct" in text
    assert "nan" not in text.lower().split('<script type="application/json"')[0].split("</style>")[1]


def test_quickstart_plot_is_drawn(tmp_path):
    curves = {"reward": {25.0: 0.5, 100.0: 0.8}, "goal": {25.0: None, 100.0: 0.7}}
    tradeoff = {"model": [(0.0, 0.9), (0.1, 0.9), (0.3, 0.85), (0.2, 0.9)]}
    path = plot_quickstart(
        {"prefix_auroc": curves, "filter_tradeoff": tradeoff, "title": "seed 0"}, tmp_path / "new" / "plot.png"
    )
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert plot_quickstart({"prefix_auroc": {}, "filter_tradeoff": {}}, path).is_file()


def test_tokens_and_cut_of_a_row():
    row = scored_row("q", "ab", True, [0.0, 0.1, 0.2], [0.5, -0.2, -0.3])
    assert token_texts(row) == ["a", "b", ""]
    assert token_texts(row | {"token_ends": np.array([0, 2, 2], np.int32)}) == ["", "ab", ""]
    assert token_texts(row | {"token_ends": None}) is None
    with pytest.raises(ValueError, match="3 token ends"):
        token_texts(row | {"token_ends": [1, 2]})
    assert cut_token(row["cosine_sim"], 0.0) == 1
    assert cut_token(row["cosine_sim"], 0.0, warmup_tokens=2) == 2
    assert cut_token(row["cosine_sim"], -0.5) is None
    assert cut_token(None, 0.0) is None
    assert steepest_fall([1.0, 3.0, 2.5, 0.5, 2.0]) == 2.5  # from 3 to 0.5
    assert steepest_fall([]) == 0.0


def test_colors_and_sparkline():
    # 101 numbers 0, 0.01, ..., 1: second percentile 0.02, median 0.5, 98th 0.98.
    assert token_scale([[k / 100 for k in range(101)]]) == pytest.approx((0.02, 0.5, 0.98))
    scale = Scale(-1.0, 0.0, 2.0)
    assert score_color(0.0, scale) == (246, 246, 243)
    assert score_color(-5.0, scale) == (241, 163, 102)
    assert score_color(1.0, scale) == (187, 216, 236)  # half way: (246 + 128) / 2, (246 + 185) / 2, (243 + 230) / 2
    assert score_color(3.0, Scale(3.0, 3.0, 3.0)) == (246, 246, 243)
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"  # 0, 7 and 3.5 of seven steps; a half rounds to the even 4
    assert len(sparkline(range(1000), width=50)) == 50
    painted = color_tokens(["a\x1b[2J", "\n", "b"], [0.0, 0.0, 0.0], scale, cut=1)
    assert "\x1b[2J" not in painted  # a solution cannot steer the terminal
    assert painted.endswith("\x1b[2;9mb\x1b[0m")
    assert "↵" in painted


def test_page_of_one_completion(tmp_path):
    row = random_rows()[0]
    page = Page(write_completion_page(tmp_path / "one.html", row, "model", threshold=0.2).read_text(encoding="utf-8"))
    (group,) = page.data["groups"]
    assert (group["model"], group["threshold"], len(group["rows"])) == ("model", 0.2, 1)
    assert page.count("table") == 0


@needs_browser
def test_a_browser_shows_the_first_completion(tmp_path, no_figures):
    rows = random_rows()
    solution = "z\U0001f600\u05e9<i>b</i>"
    row = scored_row(f"first {ATTACK}", solution, False, [99.0] * 12, [0.5] * 12)
    five = {"partial_rewards": [99.0] * 5, "cosine_sim": [0.5, 0.4, 0.3, -0.9, 0.1], "num_actions": 5}
    top = row | five | {"token_ends": [1, 2, 3, 11, 11]}
    text = report_of(tmp_path, {"a": {"s": [*rows, top]}})
    dom = dom_of(text, tmp_path)
    assert "<title></title>" in dom, re.findall("<title>.*?</title>", dom)
    view = dom[dom.index('id="tokens"') : dom.index('id="token-note"')]
    spans = re.findall(r'<span class="([^"]*)" data-i="(\d+)"[^>]*>([^<]*)', view)
    assert [text for _, _, text in spans] == ["z", "\U0001f600", "\u05e9", "&lt;i&gt;b&lt;/i&gt;", "end"]
    assert "first &lt;/script&gt;&lt;script&gt;alert(1)" in dom[dom.index('id="question"') :][:200]
    assert dom.count('class="curve"') >= 2
    assert "<img" not in dom
