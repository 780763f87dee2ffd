"""Scoring: the same numbers alone and in a batch, the right tokens, the order kept, and resuming after a kill."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from openrlhf.datasets.completions import Completion
from openrlhf.evaluation import scored_files, scoring
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.labels import grade_completions
from openrlhf.evaluation.scored_files import score_completions
from openrlhf.evaluation.scoring import encode_completions
from tests.tiny import tiny_reward_model, tiny_tokenizer

OPTIONS = {"template": "plain", "max_len": 120, "batch_tokens": 200, "progress": False}


def completions(count: int) -> list[Completion]:
    generator = np.random.default_rng(1)
    words = ["the", "answer", "is", "apples", "good", "bad", "plus", "7", "31"]
    return [
        Completion(
            f"what is {number % 7} plus 4 ?",
            " ".join(generator.choice(words, generator.integers(1, 16))),
            "4",
            "4",
            True,
            number,
        )
        for number in range(count)
    ]


def goal(hidden: int = 32) -> GoalState:
    vector = np.random.default_rng(2).normal(size=(1, hidden)).astype(np.float32)
    return GoalState(vector, 3, 1.0, "plain", False, 120, "c", "d")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_equal_those_of_each_text_alone(family):
    tokenizer = tiny_tokenizer(add_bos=True)
    model, texts = tiny_reward_model(family, tokenizer), completions(23)
    rows = score_completions(model, tokenizer, texts, goal=goal(), **OPTIONS)
    assert [row["sample"] for row in rows] == list(range(23))
    for row, text in zip(rows, texts, strict=True):
        prompt = [1, *tokenizer(f"{text.question}\n", add_special_tokens=False)["input_ids"]]
        response = [*tokenizer(text.generated_solution, add_special_tokens=False)["input_ids"], 2]
        with torch.no_grad():
            out = model(torch.tensor([prompt + response]), torch.ones(1, len(prompt + response), dtype=torch.bool))
        states = out.hidden_states[0, len(prompt) :]
        cosines = torch.nn.functional.cosine_similarity(states, torch.from_numpy(goal().vector), dim=-1)
        assert row["num_actions"] == len(response)
        assert row["reward"] == pytest.approx(out.reward.item(), abs=1e-5)
        assert row["reward"] == row["partial_rewards"][-1]
        assert row["partial_rewards"] == pytest.approx(out.values[0, len(prompt) :].tolist(), abs=1e-5)
        assert row["cosine_sim"] == pytest.approx(cosines.tolist(), abs=1e-5)
        assert not row["truncated"]


def test_without_a_goal_there_is_no_similarity():
    rows = score_completions(tiny_reward_model(), tiny_tokenizer(), completions(2), **OPTIONS)
    assert [row["cosine_sim"] for row in rows] == [None, None]


def test_chat_template_is_used_for_the_prompt():
    tokenizer = tiny_tokenizer()
    (one,) = encode_completions(tokenizer, completions(1), template="{}", apply_chat_template=True, max_len=120)
    text = tokenizer.decode(one.ids[: -one.num_actions])
    assert text == "<|user|>\nwhat is 0 plus 4 ?</s>\n<|assistant|>\n"


def test_long_response_keeps_its_eos_and_a_long_prompt_gets_no_reward():
    tokenizer = tiny_tokenizer()
    text = Completion("1234", "5" * 50, None, None, None)  # digits are single tokens; prompt 4 + newline = 5
    limits = {10: (5, True), 7: (2, True), 6: (0, True), 56: (51, False), 55: (50, True)}
    for max_len, wanted in limits.items():
        (one,) = encode_completions(tokenizer, [text], template="plain", apply_chat_template=False, max_len=max_len)
        assert (one.num_actions, one.truncated) == wanted
        if one.ids:
            assert len(one.ids) <= max_len
            assert one.ids.count(2) == 1 and one.ids[-1] == 2
    long = Completion("9" * 119, "5")  # 120 prompt tokens
    rows = score_completions(tiny_reward_model(), tokenizer, [long, *completions(1)], **OPTIONS)
    assert rows[0]["reward"] is None and rows[0]["partial_rewards"] is None
    assert rows[0]["num_actions"] == 0 and rows[0]["truncated"]
    assert rows[1]["reward"] is not None


def test_killed_scoring_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model, tokenizer, texts = tiny_reward_model(), tiny_tokenizer(), completions(40)
    whole = tmp_path / "whole.jsonl"
    rows = score_completions(model, tokenizer, texts, goal=goal(), out_path=whole, checkpoint="c", **OPTIONS)
    data = whole.read_bytes()
    assert [json.loads(line) for line in data.decode().split("\n")[:-1]] == rows

    resumed = tmp_path / "resumed.jsonl"
    score_completions(model, tokenizer, texts, goal=goal(), out_path=resumed, checkpoint="c", **OPTIONS)
    line_starts = [0] + [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    scored = []
    encode = scored_files.encode_completions
    monkeypatch.setattr(
        scored_files, "encode_completions", lambda t, part, **k: scored.extend(part) or encode(t, part, **k)
    )
    # inside line 17, just before its newline, exactly after it, inside the first line, whole file
    for cut, done in [
        (line_starts[17] + 30, 17),
        (line_starts[18] - 1, 17),
        (line_starts[18], 18),
        (5, 0),
        (len(data), 40),
    ]:
        resumed.write_bytes(data[:cut])
        scored.clear()
        again = score_completions(model, tokenizer, texts, goal=goal(), out_path=resumed, checkpoint="c", **OPTIONS)
        assert len(scored) == 40 - done
        assert len(again) == 40
        assert [row["sample"] for row in again] == list(range(40))
        assert [row["reward"] for row in again] == pytest.approx([row["reward"] for row in rows], abs=1e-5)
        assert [json.loads(line) for line in resumed.read_text().split("\n")[:-1]] == again


def test_rows_appear_before_the_end(tmp_path, monkeypatch):
    model, path, seen = tiny_reward_model(), tmp_path / "out.jsonl", []
    path.touch()
    monkeypatch.setattr(scoring, "WINDOW_BATCHES", {False: 1, True: 1})
    base = model.network.base_model
    forward = base.forward
    base.forward = lambda **k: seen.append(path.read_bytes().count(b"\n")) or forward(**k)
    score_completions(model, tiny_tokenizer(), completions(40), out_path=path, **OPTIONS)
    assert 0 < seen[-1] < 40


def test_file_of_other_completions_or_settings_is_refused(tmp_path):
    model, tokenizer, path = tiny_reward_model(), tiny_tokenizer(), tmp_path / "out.jsonl"
    score_completions(model, tokenizer, completions(4), out_path=path, checkpoint="c", **OPTIONS)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="checkpoint"):
        score_completions(model, tokenizer, completions(4), out_path=path, checkpoint="other", **OPTIONS)
    with pytest.raises(ValueError, match="goal_state"):
        score_completions(model, tokenizer, completions(4), goal=goal(), out_path=path, checkpoint="c", **OPTIONS)
    with pytest.raises(ValueError, match="row 0 belongs to another"):
        score_completions(model, tokenizer, completions(5)[1:], out_path=path, checkpoint="c", **OPTIONS)
    with pytest.raises(ValueError, match="more rows than the 3"):
        score_completions(model, tokenizer, completions(3), out_path=path, checkpoint="c", **OPTIONS)
    assert path.read_bytes() == before


def test_reward_that_is_not_finite_names_the_completion():
    model = tiny_reward_model()
    with torch.no_grad():
        model.network.score.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="completion 0: .*not finite"):
        score_completions(model, tiny_tokenizer(), completions(1), **OPTIONS)


def test_only_rows_without_a_label_are_graded():
    rows = [
        Completion("q", r"so \boxed{4}", "4", None, None),
        Completion("q", "so 5", "4", None, None),
        Completion("q", "so 4", "4", "4", False),  # a label that exists is kept
        Completion("q", "so 4", None, None, None),  # nothing to compare with
    ]
    labelled, graded = grade_completions(rows)
    assert graded == 2
    assert [one.is_correct for one in labelled] == [True, False, False, None]
    assert [one.predicted_answer for one in labelled] == ["4", "5", "4", None]


def test_resumed_rows_take_the_labels_of_now(tmp_path):
    model, tokenizer = tiny_reward_model(), tiny_tokenizer()
    path, items = tmp_path / "rows.jsonl", completions(4)
    first = score_completions(model, tokenizer, items, template="plain", max_len=64, out_path=path)
    corrected = [dataclasses.replace(one, is_correct=not one.is_correct, predicted_answer="7") for one in items]
    again = score_completions(model, tokenizer, corrected, template="plain", max_len=64, out_path=path)
    assert [row["is_correct"] for row in again] == [not one.is_correct for one in items]
    assert [row["reward"] for row in again] == [row["reward"] for row in first]
    assert [json.loads(line)["predicted_answer"] for line in path.read_text().split("\n") if line] == ["7"] * 4


def test_labelled_rows_without_any_answer_get_one_to_vote_with():
    items = [Completion("q", "so \\boxed{3}", "3", None, True), Completion("q", "so \\boxed{4}", "3", None, False, 1)]
    labelled, graded = grade_completions(items)
    assert [one.predicted_answer for one in labelled] == ["3", "4"]
    assert [one.is_correct for one in labelled] == [True, False] and graded == 0
