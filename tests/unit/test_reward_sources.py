"""Reward requests, results, and several sources as one."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf.datasets.tokenize import (
    decode_response_with_ends,
    encode_dialogues_with_ends,
    encode_prompt,
    encode_response,
    encode_responses_with_ends,
)
from openrlhf.rewards.numbers import normalize_groups
from openrlhf.rewards.source import RewardRequest, RewardResult, WeightedSum, parse_reward_source
from tests.tiny import tiny_tokenizer
from tests.unit.test_preference import metaspace_tokenizer

NAN = float("nan")


class Fixed:
    """A source of given numbers."""

    def __init__(self, name, rewards, scores=None, dense=None, logs=None):
        self.name = name
        numbers = np.array(rewards, np.float32)
        scores = numbers if scores is None else np.array(scores, np.float32)
        dense = None if dense is None else [np.array(tokens, np.float32) for tokens in dense]
        self.result = RewardResult(numbers, scores, dense, logs or {})
        self.closed = False

    def score(self, request):
        return self.result

    def close(self):
        self.closed = True


def request(count, **fields):
    texts = [str(i) for i in range(count)]
    return RewardRequest(queries=[f"q{text}" for text in texts], prompts=["q"] * count, responses=texts, **fields)


def test_a_request_holds_one_value_a_sample():
    with pytest.raises(ValueError, match=r"3 queries and \{'labels': 2\}"):
        request(3, labels=["a", "b"])
    with pytest.raises(ValueError, match=r"3 queries and \{'answer': 1\}"):
        request(3, columns={"answer": [1]})
    with pytest.raises(ValueError, match="group_size 2"):
        request(3, group_size=2)
    with pytest.raises(ValueError, match="0 queries"):
        request(0)


def test_a_part_of_a_request_holds_the_same_samples_of_every_field():
    whole = request(4, labels=[5, 6, 7, 8], columns={"level": list("abcd")}, step=3, group_size=2)
    part = whole.part(1, 3)
    assert (part.queries, part.responses, part.labels) == (["q1", "q2"], ["1", "2"], [6, 7])
    assert (part.columns, part.step, part.group_size, part.inputs) == ({"level": ["b", "c"]}, 3, 1, None)


def test_a_request_from_tokens_starts_with_the_prompt_and_shows_eos():
    tokenizer = tiny_tokenizer(add_bos=True)
    prompts = ["what is the answer?\n", "naïve 🎉\n"]
    texts = ["the answer is 4", "🎉 good"]
    made = RewardRequest.from_tokens(
        tokenizer,
        prompts,
        [encode_prompt(tokenizer, prompt) for prompt in prompts],
        [encode_response(tokenizer, texts[0]), encode_response(tokenizer, texts[1])[:-1]],  # the second was cut
        labels=[4, None],
    )
    assert made.queries == ["what is the answer?\nthe answer is 4</s>", "naïve 🎉\n🎉 good"]
    assert made.responses == texts and made.labels == [4, None]
    ((ids, ends),) = encode_responses_with_ends(tokenizer, texts[:1])
    assert made.response_ids[0] == ids and made.token_ends[0] == ends
    assert made.token_ends[1] == [0, 0, 0, 1, 6]  # an emoji of four bytes ends with the last of them


@pytest.mark.parametrize("style", ["normalizer", "first", "always"])
def test_decoding_keeps_the_space_between_prompt_and_response(style):
    """A tokenizer with a dummy space drops the first space of a text decoded by itself."""
    tokenizer, vocab = metaspace_tokenizer(style)
    prompt_ids = [vocab["▁the"], vocab[":"]]
    assert decode_response_with_ends(tokenizer, prompt_ids, [vocab["▁good"], 2]) == (" good", [5, 5])
    assert decode_response_with_ends(tokenizer, prompt_ids, [vocab["good"]]) == ("good", [4])
    assert decode_response_with_ends(tokenizer, prompt_ids, [vocab["good"], 2], keep_special=True) == (
        "good</s>",
        [4, 8],
    )


def test_bytes_of_one_character_end_where_it_does():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a🎉b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6  # four bytes of the emoji
    assert decode_response_with_ends(tokenizer, [5], ids) == ("a🎉b", [1, 1, 1, 1, 2, 3])
    assert decode_response_with_ends(tokenizer, [5], ids[:3]) == ("a", [1, 1, 1])


def test_a_dialogue_is_a_prompt_in_front_and_a_response_behind():
    tokenizer = tiny_tokenizer(add_bos=True)
    (ids, ends), (other, _) = encode_dialogues_with_ends(tokenizer, ["the answer</s>", "<s>the answer"])
    assert ids == other == [1, *tokenizer("the answer", add_special_tokens=False)["input_ids"], 2]
    assert ends[0] == 0 and ends[-2:] == [10, 10]


def test_a_weighted_sum_logs_every_source_apart():
    right = Fixed("right", [1, 0, 1, 0], logs={"steps": [1.0, 3.0]})
    length = Fixed("length", [0.5, NAN, NAN, 0.1], scores=[0.5, NAN, NAN, 0.3])
    result = WeightedSum([right, length], [1.0, 2.0]).score(request(4))
    # 1 + 2 * 0.5, then the scored source alone, then 0 + 2 * 0.1
    assert result.rewards == pytest.approx([2.0, 0.0, 1.0, 0.2]) and result.rewards.dtype == np.float32
    # (1 * 1 + 2 * 0.5) / 3, then the first alone, then 2 * 0.3 / 3
    assert result.scores == pytest.approx([2 / 3, 0.0, 1.0, 0.2])
    logs = result.metrics()
    assert logs["right/mean"] == 0.5 and logs["right/std"] == pytest.approx(0.57735027) and logs["right/unscored"] == 0
    assert logs["length/mean"] == pytest.approx(0.3) and logs["length/unscored"] == 0.5
    assert logs["right/steps"] == 2.0
    assert logs["mean"] == pytest.approx(0.8) and logs["unscored"] == 0


def test_a_sample_that_no_source_scored_is_not_scored():
    only_logged = Fixed("log", [5, 5, 5])
    result = WeightedSum([Fixed("a", [1, NAN, 3]), Fixed("a", [NAN, NAN, 1]), only_logged], [1, 1, 0]).score(request(3))
    assert result.rewards == pytest.approx([1, NAN, 4], nan_ok=True)
    assert result.metrics()["unscored"] == pytest.approx(1 / 3)
    assert result.metrics()["mean"] == 2.5  # (1 + 4) / 2: the unscored one counts nowhere
    assert {"a/mean", "a-2/mean", "log/mean"} <= set(result.metrics())


def test_normalize_then_sum_normalises_each_source_within_the_prompt():
    big, small = Fixed("big", [100, 300, 7, 7]), Fixed("small", [0.2, 0.1, NAN, 0.4])
    result = WeightedSum([big, small], [1, 1], normalize_first=True).score(request(4, group_size=2))
    # The first prompt: +-200 / 2 over std 141.42 is 0.7071 against it; the second: equal rewards and one scored are 0.
    assert result.rewards == pytest.approx([0.0, 0.0, 0.0, 0.0], abs=1e-3)
    alone = WeightedSum([big], normalize_first=True).score(request(4, group_size=2)).rewards
    assert alone == pytest.approx([-0.70710678, 0.70710678, 0, 0], abs=1e-5)
    with pytest.raises(ValueError, match="--n_samples_per_prompt"):
        WeightedSum([big], normalize_first=True).score(request(4))


def test_normalisation_of_groups_equals_a_loop():
    rewards = np.random.default_rng(0).normal(size=24)
    rewards[[3, 8, 9, 10, 11]] = np.nan  # one of a group, and a whole group
    expected = []
    for start in range(0, 24, 4):
        group = rewards[start : start + 4]
        scored = [x for x in group if x == x]
        mean = sum(scored) / len(scored) if scored else 0
        std = (sum((x - mean) ** 2 for x in scored) / (len(scored) - 1)) ** 0.5 if scored else 0
        expected += [(x - mean) / (std + 1e-4) for x in group]
    assert normalize_groups(rewards, 4) == pytest.approx(expected, nan_ok=True)


def test_dense_rewards_are_weighted_and_added():
    first = Fixed("first", [1, 1], dense=[[1, 2, 3], [4]])
    second = Fixed("second", [0, 0], dense=[[1, 0, 0], [1]])
    result = WeightedSum([first, Fixed("none", [0, 0]), second], [2, 1, -1]).score(request(2))
    assert [tokens.tolist() for tokens in result.dense] == [[1, 4, 6], [7]]
    assert WeightedSum([Fixed("none", [0, 0])]).score(request(2)).dense is None


def test_weights_that_make_no_sense_are_refused():
    sources = [Fixed("a", [1]), Fixed("b", [1])]
    for weights in ([1.0], [1.0, NAN], [0.0, 0.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match="--reward_weights"):
            WeightedSum(sources, weights)
    with pytest.raises(ValueError, match="expected 2 rewards, got 1"):
        WeightedSum(sources).score(request(2))


def test_closing_a_sum_closes_its_sources():
    sources = [Fixed("a", [1]), Fixed("b", [1])]
    WeightedSum(sources).close()
    assert all(source.closed for source in sources)


@pytest.mark.parametrize(
    ("spec", "options", "told"),
    [
        ("", {}, "expected one reward source"),
        ("a.py,b.py", {}, "expected one reward source"),
        ("http://localhost:1,./reward.py", {}, "expected one reward source"),
        ("nowhere.py", {}, "nowhere.py, found no file"),
        ("http:///path", {}, "expected a URL such as"),
        ("htp://localhost:1", {}, "expected an address that begins with http:.*got htp://$"),
        ("http://localhost:1,ftp://localhost:2", {}, "begins with http:.*got ftp://"),
        ("s3://bucket/model", {}, "s3://bucket/model is neither a .py file nor a URL"),
        ("HTTP:///path", {}, "expected a URL such as"),
        ("a_model", {}, "a_model is neither a .py file nor a URL"),
        ("nowhere.py", {"goal_state_path": "g", "goal_shaping_coef": 0.1}, "--goal_state_path needs a reward model"),
        ("nowhere.py", {"normalize_reward": True}, "--normalize_reward needs a reward model"),
        ("a_model", {"goal_state_path": "g"}, "--goal_shaping_coef other than 0"),
        ("a_model", {"goal_shaping_coef": 0.1}, "needs --goal_state_path"),
    ],
)
def test_specs_that_name_no_source_are_refused(spec, options, told):
    with pytest.raises(ValueError, match=told):
        parse_reward_source(spec, **options)


def test_a_spec_names_a_function_of_a_file(tmp_path):
    file = tmp_path / "lengths.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    return [len(q) for q in queries]\n")
    file.write_text(file.read_text() + "def other(responses):\n    return [7] * len(responses)\n")
    source = parse_reward_source(str(file))
    assert source.name == "lengths" and source.score(request(2)).rewards.tolist() == [2, 2]
    assert parse_reward_source(f"{file}:other").score(request(2)).rewards.tolist() == [7, 7]
