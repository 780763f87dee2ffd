"""The report of reinforcement learning: numbers are those of the logs, texts stay texts, runs are compared."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from openrlhf.cli import rl_report
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.early_warnings import EarlyWarning, logged_metrics, read_warnings
from openrlhf.trainer.held_out_samples import SHOWN, held_out_samples
from openrlhf.trainer.ppo_curves import PANELS, curve_of, group_names, plot_curves
from openrlhf.trainer.ppo_records import differing_settings, group_runs, read_run, read_runs
from openrlhf.trainer.ppo_report import (
    MAX_EVALUATIONS,
    MAX_LETTERS,
    pack_runs,
    refresh_report,
    spread_evenly,
    write_run_report,
)
from openrlhf.trainer.ppo_table import held_out_table
from openrlhf.utils.manifest import write_manifest
from openrlhf.utils.run_log import RunLog
from tests.browser import dom_of, needs_browser

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{script}}"
WARNING = EarlyWarning("length_drift", 3, {"start": 10.0, "length": 25.0}, "", "")


def sample(place, text, **more):
    one = {"place": place, "prompt": f"p{place}", "label": "7", "response": text, "reward": 0.5, "gold_reward": None}
    return one | more


def write_run(folder, rewards=(0.1, 0.25, 0.5, 0.7), seed=1, rate=1e-6, resume_step=None, first=1):
    """A run of a rollout a reward, evaluated at the start and behind every second, with a warning at the third."""
    config = {"seed": seed, "learning_rate": rate, "save_path": str(folder)}
    with RunLog(folder, "train_ppo", config, resume_step=resume_step) as log:
        write_manifest(folder, "train_ppo", config, argv=["train_ppo", "--seed", str(seed)])
        if first == 1:
            log.log(0, {"reward": 0.0, "gold_reward": 0.5}, prefix="eval")
            log.log_samples(0, [sample(0, "start"), sample(1, "other")])
        for step, reward in enumerate(rewards, first):
            log.log(step, {"reward": reward, "kl": 0.01 * step, "response_length": 10.0 * step, "my_count": step})
            if step % 2 == 0:
                log.log(step, {"reward": step / 10, "gold_reward": 1 / step}, prefix="eval")
                log.log_samples(step, [sample(0, f"step {step}", gold_reward=1 / step), sample(1, "other")])
            if step == 3:
                log.log(step, logged_metrics(WARNING), prefix="warning")
    return folder


class Page(HTMLParser):
    """Elements with their attributes, and the packed data."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.data = [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, text):
        if self.elements and self.elements[-1][1].get("id") == "packed" and self.data is None:
            self.data = json.loads(text)


def page_of(tmp_path, *folders):
    text = write_run_report(tmp_path / "out" / "report.html", read_runs(folders), date="2026-01-02").read_text("utf-8")
    return text, Page(text)


def test_the_numbers_of_the_page_are_those_of_the_metrics(tmp_path):
    folder = write_run(tmp_path / "run")
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    _, page = page_of(tmp_path, folder)
    shown = {(one["split"], one["metric"]): one["curves"][0] for one in page.data["panels"]}
    expected = {}
    for line in logged:
        for name, value in line.items():
            if line["split"] != "warning" and name not in ("step", "split", "time"):
                expected.setdefault((line["split"], name), []).append((line["step"], value))
    assert {key: list(zip(one["steps"], one["mean"], strict=True)) for key, one in shown.items()} == expected
    assert [one["metric"] for one in page.data["panels"] if not one["listed"]] == ["my_count"]
    assert not any("low" in one for one in shown.values())
    (told,) = page.data["warnings"]
    assert told["step"] == 3 and told["sentence"] == "Responses have gone from 10 to 25 tokens."
    assert page.data["panels"][told["panel"]]["metric"] == "response_length"
    assert page.data["panels"][told["panel"]]["split"] == "train"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    (packed,) = page.data["samples"]
    assert [
        (place, one["prompt"], one["label"], response["step"], response["text"], response["gold_reward"])
        for place, one in enumerate(packed["prompts"])
        for response in one["responses"]
    ] == sorted((s["place"], s["prompt"], s["label"], s["step"], s["response"], s["gold_reward"]) for s in samples)


def test_the_page_loads_nothing_and_finds_what_it_asks_for(tmp_path):
    text, page = page_of(tmp_path, write_run(tmp_path / "run"))
    addresses = [value for _, one in page.elements for name, value in one.items() if name in ("src", "href")]
    assert all(value.startswith(("#", "data:,")) for value in addresses) and "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    used = set(re.findall(r'byId\("([\w-]+)"\)', text))
    assert used <= {one.get("id") for _, one in page.elements}
    assert "finished · 4 rollouts · 2026-01-02" in text and "Responses have gone from 10 to 25 tokens." in text
    assert "0.100 → 0.700" in text  # the reward, first and last


def test_texts_cannot_become_markup(tmp_path):
    folder = write_run(tmp_path / f"run {ATTACK}".replace("/", "|"))
    with RunLog(folder, "train_ppo", {}, resume_step=4) as log:
        log.log_samples(9, [sample(0, ATTACK + "\ud800", prompt=ATTACK, label=ATTACK)])
        log.log(9, {f"file/{ATTACK}": 1.0})
    write_manifest(folder, "train_ppo", {"prompt": ATTACK}, argv=["train_ppo", ATTACK])
    text, page = page_of(tmp_path, folder)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and "img" not in tags and "alert(1)</script><img" not in text
    assert page.data["samples"][0]["prompts"][0]["responses"][-1]["text"] == ATTACK + "\ud800"
    assert f"file/{ATTACK}" in [one["metric"] for one in page.data["panels"]]


def test_empty_and_short_runs_have_a_page(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    text, page = page_of(tmp_path, tmp_path / "empty")
    assert "Nothing has been logged yet." in text and page.data["panels"] == []
    written = rl_report.run(parse_config(rl_report.RLReportConfig, ["--run_folder", str(tmp_path / "empty")]))
    assert [path.name for path in written] == ["report.html"]
    _, page = page_of(tmp_path, write_run(tmp_path / "short", rewards=[0.5]))
    shown = {(one["split"], one["metric"]): one["curves"][0] for one in page.data["panels"]}
    assert shown["train", "reward"] == {"group": 0, "steps": [1], "mean": [0.5]}


def test_what_cannot_be_read_is_one_clear_error(tmp_path):
    for folder, words in ((tmp_path / "none", "no such folder"), (tmp_path, "holds no metrics.jsonl")):
        with pytest.raises(ValueError, match=words):
            read_run(folder)
    folder = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="given twice"):
        read_runs([folder, tmp_path / "." / "run"])
    for words, told in ((["--run_folder", "a", "b"], "--save_dir"), ([], "rl_report RUN_FOLDER")):
        with pytest.raises(ValueError, match=told):
            rl_report.run(parse_config(rl_report.RLReportConfig, words))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 5, "spl')  # killed while it wrote
    assert sorted(read_run(folder).train) == [1, 2, 3, 4]
    metrics.write_text("no json\n" + metrics.read_text())
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: expected a JSON object with a step"):
        read_run(folder)
    write_manifest(folder, "train_rm", {})
    with pytest.raises(ValueError, match="is a run of train_rm"):
        read_run(folder)


def test_a_report_that_fails_does_not_end_the_run(tmp_path, caplog):
    refresh_report(tmp_path / "none")
    assert "changes nothing else" in caplog.text and "no such folder" in caplog.text


def test_a_resumed_run_doubles_no_line_and_a_new_one_sets_the_old_aside(tmp_path):
    folder = write_run(tmp_path / "run")
    with open(folder / "samples.jsonl", "a") as handle:
        handle.write('{"step": 4, "pla')
    write_run(folder, rewards=(0.6, 0.8), resume_step=2, first=3)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(one["step"], one["place"]) for one in lines] == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]
    assert [line["reward"] for line in read_run(folder).train.values()] == [0.1, 0.25, 0.6, 0.8]
    write_run(folder, rewards=[0.9])
    assert len((folder / "samples.previous.jsonl").read_text().splitlines()) == 6
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 2


def test_seeds_of_one_setting_are_mean_and_range_and_others_lie_beside_them(tmp_path):
    """By hand: rewards 0.1, 0.4 and 0.3 and 0.2, 0.2 of two seeds; the third rollout is in one of them only."""
    folders = [
        write_run(tmp_path / "low-seed-1", (0.1, 0.4, 0.9), seed=1),
        write_run(tmp_path / "high" / "out", (0.7,), rate=1e-5),
        write_run(tmp_path / "low-seed-2", (0.3, 0.2), seed=2),
    ]
    runs = read_runs(folders)
    groups = group_runs(runs)
    assert [[run.settings["seed"] for run in group] for group in groups] == [[1, 2], [1]]
    assert differing_settings(groups) == {"learning_rate": [1e-6, 1e-5]}
    curve = curve_of(groups[0], PANELS[0])
    assert curve.steps == [1, 2] and curve.mean == pytest.approx([0.2, 0.3])
    assert (curve.low, curve.high) == ([0.1, 0.2], [0.3, 0.4])
    assert group_names(groups) == ["low (2 seeds)", "out"]
    text, page = page_of(tmp_path, *folders)
    assert [one["name"] for one in page.data["groups"]] == ["low (2 seeds)", "out"]
    reward = page.data["panels"][0]["curves"]
    assert reward[1] == {"group": 1, "steps": [1], "mean": [0.7]}
    assert reward[0]["low"] == [0.1, 0.2] and "Settings that differ" in text
    assert [one["run"] for one in page.data["samples"]] == ["low-seed-1", "out", "low-seed-2"]


def test_a_missing_number_of_one_seed_leaves_a_gap(tmp_path):
    folders = [write_run(tmp_path / "a", (0.1, None), seed=1), write_run(tmp_path / "b", (0.3, 0.2), seed=2)]
    (group,) = group_runs(read_runs(folders))
    curve = curve_of(group, PANELS[0])
    assert curve.mean == [pytest.approx(0.2), None] and curve.low == [0.1, None]


def test_runs_of_equal_folder_names_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / one / "out", rate=rate) for one, rate in (("x", 1e-6), ("y", 1e-5))]
    assert [run.name for run in read_runs(folders)] == ["x/out", "y/out"]


def test_the_command_writes_page_and_picture(tmp_path, capsys):
    folders = [write_run(tmp_path / "a", seed=1), write_run(tmp_path / "b", rate=1e-5)]
    rl_report.main([*map(str, folders), "--save_dir", str(tmp_path / "both"), "--title", "two <runs>"])
    assert capsys.readouterr().out.split()[-2:] == [str(tmp_path / "both" / n) for n in ("report.html", "curves.png")]
    assert (tmp_path / "both" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<title>two &lt;runs&gt;</title>" in (tmp_path / "both" / "report.html").read_text()


def test_long_responses_and_many_evaluations_are_cut(tmp_path):
    assert spread_evenly(range(5), 5) == [0, 1, 2, 3, 4]
    assert spread_evenly(range(0, 101, 10), 5) == [0, 20, 50, 80, 100]  # places 0, 2.5, 5, 7.5, 10; halves to even
    folder = write_run(tmp_path / "run", rewards=[0.1] * 100)
    with RunLog(folder, "train_ppo", {}, resume_step=100) as log:
        log.log_samples(101, [sample(0, "a" * (MAX_LETTERS + 5))])
    (packed,) = pack_runs([read_run(folder)])["samples"]
    responses = packed["prompts"][0]["responses"]
    assert packed["evaluations"] == 52 and packed["shown"] == len(responses) == MAX_EVALUATIONS
    assert (responses[0]["step"], responses[-1]["step"]) == (0, 101)
    assert len(responses[-1]["text"]) == MAX_LETTERS and responses[-1]["letters_left"] == 5


def test_warnings_come_back_from_the_metrics():
    logged = json.loads(json.dumps(logged_metrics(WARNING))) | {"unscored": 1, "unscored/share": None}
    drift, unscored = read_warnings(3, logged)
    assert (drift.name, drift.step, drift.figures) == ("length_drift", 3, {"start": 10.0, "length": 25.0})
    assert drift.sentence == "Responses have gone from 10 to 25 tokens." and "length penalty" in drift.advice
    assert math.isnan(unscored.figures["share"]) and read_warnings(3, {"kl_runaway/kl": 1.0}) == []


def test_held_out_samples_are_the_first_prompts_with_label_and_scores():
    import torch

    count = SHOWN + 2
    prompts = SimpleNamespace(labels=[*range(count - 1), None])
    rollout = SimpleNamespace(samples=[{"prompt": f"p{i}", "response": f"r{i}", "reward": i / 4} for i in range(count)])
    gold = torch.tensor([float("nan"), *[0.5] * (count - 1)])
    found = held_out_samples(prompts, rollout, gold)
    assert len(found) == SHOWN and [one["place"] for one in found] == list(range(SHOWN))
    assert found[0] == {
        "place": 0, "prompt": "p0", "label": "0", "response": "r0", "reward": 0.0, "gold_reward": None,
    }  # fmt: skip
    assert found[1]["gold_reward"] == 0.5


@needs_browser
def test_the_script_draws_curves_and_samples(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=1e-5)]
    with RunLog(folders[0], "train_ppo", {}, resume_step=4) as log:
        log.log_samples(6, [sample(0, ATTACK, prompt=ATTACK)])
    text, _ = page_of(tmp_path, *folders)
    dom = dom_of(text, tmp_path)
    assert "<title></title>" in dom, re.findall("<title>.*?</title>", dom)
    assert dom.count('<svg class="curve"') == 6  # two held-out and four of training
    assert "Reward. a: starts at 0.100, ends at 0.700; b: starts at 0.100, ends at 0.700" in dom
    readouts = [re.sub("<.*?>", " ", one).split() for one in re.findall(r'<p class="readout">(.*?)</p>', dom)]
    assert readouts[:2] == [["0.700", "0.700"], ["0.400", "0.400"]]  # at the last rollout
    strip = dom[dom.index('id="responses"') : dom.index('id="settings"')]
    assert re.findall(r"<b>(Rollout \d+)</b>", strip) == ["Rollout 0", "Rollout 2", "Rollout 4", "Rollout 6"]
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in strip and "<img" not in dom


def test_runs_of_a_folder_are_repetitions_and_stand_in_the_table(tmp_path, capsys):
    """Held-out: gold 0.5 at the start, 1 / step after it; reward 0, then step / 10; one run has two rollouts more."""
    folders = [
        write_run(tmp_path / "a" / "seed-1"),
        write_run(tmp_path / "a" / "seed-2", rewards=(0.1,) * 6, seed=2, rate=2e-6),
        write_run(tmp_path / "b" / "seed-1", rewards=(0.1,), rate=3e-6),
    ]
    metrics = ["--metrics", "eval/gold_reward", "train/kl"]
    rl_report.main([*map(str, folders), "--by_folder", "--save_dir", str(tmp_path / "out"), *metrics])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| a (2 seeds) | 6 | 0.500 | 0.500, 0 | 0.250 | 0.000 | 0.400 |")
    assert lines[3].startswith("| b/seed-1 | 1 | 0.500 | 0.500, 0 | 0.500 | 0.000 | 0.000 |")
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    assert len(group_runs(read_runs(folders))) == 3  # by their settings
    assert [len(group) for group in group_runs(read_runs(folders, by_folder=True))] == [2, 1]


def test_the_table_tells_ranges_and_dashes(tmp_path):
    for seed, gold in ((1, 0.5), (2, 0.75)):
        with RunLog(tmp_path / f"seed-{seed}", "train_ppo", {"seed": seed}) as log:
            log.log(0, {"gold_reward": gold}, prefix="eval")
            log.log(2, {"gold_reward": 2 * gold}, prefix="eval")
    runs = read_runs([tmp_path / "seed-1", tmp_path / "seed-2"], by_folder=True)
    cells = held_out_table(runs).splitlines()[2].split(" | ")
    assert cells[1:7] == ["0", "0.625 [0.500, 0.750]", "1.250, 2", "1.250 [1.000, 1.500]", "-", "-"]


def test_a_metric_that_no_run_has_is_told(tmp_path):
    runs = read_runs([write_run(tmp_path / "run")])
    with pytest.raises(ValueError, match="no run has logged eval/kl; there are eval/gold_reward, eval/reward, train"):
        plot_curves(runs, tmp_path / "curves.png", ["eval/kl"])
