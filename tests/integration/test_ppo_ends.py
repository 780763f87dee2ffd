"""How runs of train_ppo end and what they leave in the log where dynamic filtering keeps little."""

from __future__ import annotations

import json

import pytest

from openrlhf.cli import train_ppo
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.ppo_config import PPOConfig
from tests.runs import curve, ppo_words, run_ppo

COUNTING = """
import json, zlib

def reward_func(queries, prompts, labels, **kwargs):
    \"\"\"Groups whose prompt has a checksum of 0 modulo 3 score 0 and 1 and pass the filter; the others score 1.\"\"\"
    passes = [zlib.crc32(prompt.encode()) % 3 == 0 for prompt in prompts]
    rewards = [float(place % 2) if one else 1.0 for place, one in enumerate(passes)]
    with open({record!r}, "a") as file:
        file.write(json.dumps([passes, [len(text) for text in queries]]) + "\\n")
    return {{"rewards": rewards, "extra_logs": {{"letters": [len(text) for text in queries]}}}}
"""
FILTERED = {"dynamic_filtering": True, "dynamic_filtering_reward_range": "0 1", "n_samples_per_prompt": 2}


def test_logs_are_over_all_that_was_sampled(tmp_path):
    record = tmp_path / "record.jsonl"
    (tmp_path / "count.py").write_text(COUNTING.format(record=str(record)))
    words = ppo_words(tmp_path / "out", remote_rm_url=tmp_path / "count.py", max_samples=40, **FILTERED)
    train_ppo.run(parse_config(PPOConfig, words))
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    lines, rounds = list(curve(tmp_path / "out").values()), iter(calls)
    assert len(lines) > 1 and len(calls) > len(lines) + 1
    for line in lines:
        passes, letters, kept = [], [], 0
        while kept < line["responses"]:  # a rollout is as many calls as fill it
            told, sizes = next(rounds)
            kept += sum(told)
            passes += told
            letters += sizes
        assert line["filtered_share"] == pytest.approx(1 - sum(passes) / len(passes))
        assert line["count/letters"] == pytest.approx(sum(letters) / len(letters))


LATER = """
calls = 0

def reward_func(queries, **kwargs):
    global calls
    calls += 1
    return [float(place % 2) if calls <= 2 else 1.0 for place in range(len(queries))]
"""


@pytest.mark.parametrize("eval_steps", [1, 2])
def test_a_run_that_filtering_ends_logs_and_evaluates_once(tmp_path, eval_steps):
    """Call 1 scores the held-out prompts, 2 fills the first rollout, and from then on no prompt passes."""
    (tmp_path / "later.py").write_text(LATER)
    rows = [{"q": f"Mia has {n} beads. She buys 2. How many beads now?", "answer": str(n + 2)} for n in range(2, 18)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ppo_words(
        tmp_path / "out", prompt_data=tmp_path / "p.jsonl", input_key="q", label_key="answer", input_template="pocket",
        remote_rm_url=tmp_path / "later.py", eval_fraction=0.25, eval_steps=eval_steps, logging_steps=5,
        max_samples=None, **FILTERED,
    )  # fmt: skip
    train_ppo.run(parse_config(PPOConfig, words))
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["split"], line["step"]) for line in metrics if line["split"] != "warning"] == (
        [("eval", 0), ("eval", 1), ("train", 1)] if eval_steps == 1 else [("eval", 0), ("train", 1), ("eval", 1)]
    )
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["place"]) for line in samples] == [(step, n) for step in (0, 1) for n in range(4)]


def test_a_run_without_evaluation_has_no_word_of_a_missing_report(tmp_path, caplog):
    train_ppo.run(parse_config(PPOConfig, ppo_words(tmp_path / "out")))
    assert "report.html" not in caplog.text and (tmp_path / "out" / "report.html").is_file()


def test_the_dry_run_counts_as_the_run_does(tmp_path, capsys):
    code, out, _ = run_ppo(ppo_words(tmp_path / "out", dry_run=True, max_samples=10, max_epochs=2), capsys)
    assert code == 0
    assert "10 prompts, 3 rollouts of 4 prompts x 2 responses, 6 optimizer steps of 8 responses" in out
    code, _, errors = run_ppo(ppo_words(tmp_path / "out", dry_run=True, rollout_batch_size=9, max_samples=8), capsys)
    assert code == 1 and "8 prompts are fewer than one rollout of 9" in errors


def test_pocket_takes_other_held_out_prompts_and_no_foreign_split(tmp_path, capsys):
    (tmp_path / "e.jsonl").write_text('{"question": "Tom has 2 pens. He buys 3. How many pens now?", "answer": "5"}\n')
    code, _, errors = run_ppo(ppo_words(tmp_path / "out", eval_dataset=tmp_path / "e.jsonl"), capsys)
    assert code == 0, errors
    assert [line["prompts"] for line in curve(tmp_path / "out", "eval").values()] == [1, 1]
    code, _, errors = run_ppo(ppo_words(tmp_path / "other", prompt_split="test"), capsys)
    assert code == 1 and "pocket has splits of its own: drop --prompt_split" in errors


def test_settings_without_effect_are_told(tmp_path, caplog):
    words = ppo_words(
        tmp_path / "out", overlong_penalty_factor=2, dynamic_filtering_reward_range="0.2 0.5", use_kl_loss=True,
        kl_estimator="k2", eval_temperature=0.5,
    )  # fmt: skip
    train_ppo.run(parse_config(PPOConfig, words))
    (told,) = [line for line in caplog.messages if line.startswith("without effect: ")]
    for name in ("overlong_penalty_factor", "dynamic_filtering_reward_range", "use_kl_loss", "eval_temperature"):
        assert f"--{name}" in told
    caplog.clear()
    train_ppo.run(parse_config(PPOConfig, ppo_words(tmp_path / "plain", max_samples=4)))
    assert "without effect" not in caplog.text
