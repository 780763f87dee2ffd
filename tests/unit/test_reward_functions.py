"""Rewards from Python functions (case B11): what may come back, how they are called, and how they fail."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import sys
import threading
import time

import numpy as np
import pytest
import torch

from openrlhf.rewards import python_file
from openrlhf.rewards.adapting import as_reward_source
from openrlhf.rewards.function import FunctionReward, load_reward_function
from openrlhf.rewards.source import RewardRequest, WeightedSum
from tests.tiny import tiny_reward_model, tiny_tokenizer

NAN = float("nan")
INF = float("inf")
THREE = RewardRequest(
    queries=["p good</s>", "p bad</s>", "p so so</s>"],
    prompts=["p "] * 3,
    responses=["good", "bad", "so so"],
    labels=["1", "2", "3"],
    columns={"level": [5, 6, 7]},
    step=11,
    epoch=2,
    group_size=3,
)


def returns(value):
    def reward_func(queries, prompts, labels):
        return value

    return FunctionReward(reward_func)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1.0, 2.0, 3.0]),
        np.array([[1], [2], [3]]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), np.float64(2), torch.tensor([3.0])],
        {"rewards": [1, 2, 3]},
    ],
)
def test_three_numbers_in_any_form(value):
    result = returns(value).score(THREE)
    assert result.rewards.dtype == np.float32 and result.rewards.tolist() == [1, 2, 3]
    assert result.scores.tolist() == [1, 2, 3] and result.dense is None and result.extra_logs == {}


def test_booleans_are_numbers():
    assert returns([True, False, 1]).score(THREE).rewards.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1.0], "expected 3 numbers, one a sample, got 1"),
        ([1, 2], "expected 3 numbers, one a sample, got 2"),
        ([1, 2, 3, 4], "expected 3 numbers, one a sample, got 4"),
        (1.0, "got float 1.0"),
        ("123", "got str '123'"),
        ({"a": 1}, "keys .'a'."),
        (None, "got NoneType"),
        ([1, "2", 3], "sample 1, got str '2'"),
        ([1, [2], 3], "sample 1, got list"),
        ([1, 2j, 3], "sample 1, got complex"),
        ([1, np.zeros(2), 3], "sample 1"),
        (np.zeros((3, 2)), r"got shape \(3, 2\)"),
        (torch.zeros(1, 3), r"got shape \(1, 3\)"),
        (torch.tensor(1.0), r"got shape \(\)"),
        ([1, INF, 2], "sample 1 got inf"),
        ([1, 2, -INF], "sample 2 got -inf"),
        ([1, 1e39, 2], "sample 1 got 1e.39"),
        ([1, 10**400, 2], "sample 1 got 1000"),
        ({"rewards": [1, 2, 3], "scores": [1]}, "scores: expected 3 numbers, one a sample, got 1"),
        ({"rewards": [1, 2, 3], "extra_logs": {"note": "fine"}}, "extra_logs.'note'."),
        ({"rewards": [1, 2, 3], "extra_logs": [1]}, "expected a dict in extra_logs, got list"),
    ],
)
def test_anything_else_is_an_error_that_names_the_function(value, told):
    with pytest.raises(ValueError, match=rf"reward function reward_func \(test_reward_functions.py\).*{told}"):
        returns(value).score(THREE)


@pytest.mark.parametrize("missing", [None, NAN])
def test_none_and_nan_are_not_scored(missing):
    result = returns([1, missing, 3]).score(THREE)
    assert result.rewards == pytest.approx([1, NAN, 3], nan_ok=True)
    metrics = result.metrics()
    assert metrics["mean"] == 2.0 and metrics["unscored"] == pytest.approx(1 / 3)
    normalised = WeightedSum([returns([1, missing, 3])], normalize_first=True).score(THREE).rewards
    assert normalised == pytest.approx([-0.7071068, NAN, 0.7071068], abs=1e-4, nan_ok=True)


def test_all_unscored_has_no_mean():
    assert returns([None] * 3).score(THREE).metrics() == {"unscored": 1.0}


def test_a_score_of_zero_is_kept():
    result = returns({"rewards": [1, 2, 3], "scores": torch.zeros(3), "extra_logs": None}).score(THREE)
    assert result.scores.tolist() == [0, 0, 0]


def test_extra_logs_become_floats_and_lists():
    logs = {"mean": torch.tensor(2.0), "each": torch.tensor([[1.0], [3.0]]), "right": True, "some": [1, None, 2]}
    result = returns({"rewards": [1, 2, 3], "extra_logs": logs}).score(THREE)
    assert result.extra_logs["mean"] == 2.0 and result.extra_logs["each"] == [1.0, 3.0]
    metrics = result.metrics()
    assert (metrics["each"], metrics["right"], metrics["some"]) == (2.0, 1.0, 1.5)


def test_unused_keys_are_told(caplog):
    returns({"rewards": [1, 2, 3], "score": [1, 2, 3]}).score(THREE)
    assert "the keys ['score'] are not used" in caplog.text


# ---- how they are called


def called(function, request=THREE):
    """What the function was called with."""
    seen = {}

    @functools.wraps(function)
    def watched(*args, **kwargs):
        seen.update(zip(("first", "second", "third"), args, strict=False), **kwargs)
        return function(*args, **kwargs)

    result = FunctionReward(watched).score(request)
    assert len(result.rewards) == len(request)
    return seen


def ones(texts):
    return [1.0] * len(texts)


def test_openrlhf_signature_gets_whole_batches():
    seen = called(lambda queries, prompts, labels: ones(queries))
    assert seen == {"first": THREE.queries, "second": THREE.prompts, "third": THREE.labels}


def test_other_names_are_filled_by_position():
    assert called(lambda q, p, gold, **more: ones(q))["third"] == THREE.labels
    assert called(lambda *args: ones(args[0]))["second"] == THREE.prompts


def test_columns_step_and_epoch_come_only_where_asked_for():
    assert set(called(lambda queries, prompts, labels, level: ones(queries))) == {"first", "second", "third", "level"}
    assert set(called(lambda queries, prompts, labels, step=0: ones(queries))) == {"first", "second", "third", "step"}
    everything = called(lambda queries, prompts, labels, **kwargs: ones(queries))
    assert set(everything) == {"first", "second", "third", "level", "step", "epoch", "responses"}
    assert (everything["level"], everything["step"], everything["epoch"]) == ([5, 6, 7], 11, 2)


def test_any_order_of_known_names():
    assert called(lambda labels, responses: ones(labels)) == {"labels": THREE.labels, "responses": THREE.responses}
    assert called(lambda prompts, responses, level: ones(prompts))["level"] == [5, 6, 7]


def test_one_argument_gets_the_texts():
    """The request of TRL's users: a custom function of a list of texts, prompt and response together."""
    assert called(lambda texts: ones(texts)) == {"first": THREE.queries}
    assert called(lambda prompts: ones(prompts)) == {"prompts": THREE.prompts}


def test_trl_signature():
    def reward(prompts, completions, level, **kwargs):
        kwargs["log_extra"]("length", [len(text) for text in completions])
        kwargs["log_metric"]("batch", len(prompts))
        assert kwargs["trainer_state"].global_step == 11
        return [None, *map(len, completions[1:])]

    request = RewardRequest(
        THREE.queries, THREE.prompts, THREE.responses, columns=THREE.columns, step=11, response_ids=[[4], [5, 6], [7]]
    )
    result = FunctionReward(reward).score(request)
    assert result.rewards == pytest.approx([NAN, 3, 5], nan_ok=True)
    assert result.extra_logs == {"length": [4, 3, 5], "batch": 3}
    seen = called(lambda completions, completion_ids: ones(completions), request)
    assert seen == {"completions": THREE.responses, "completion_ids": [[4], [5, 6], [7]]}


def test_trl_signature_gets_chats_as_messages():
    chats = [[{"role": "user", "content": "p"}]] * 3
    request = RewardRequest(THREE.queries, THREE.prompts, THREE.responses, inputs=chats)
    seen = called(lambda prompts, completions: ones(prompts), request)
    assert seen["prompts"] == chats and seen["completions"][2] == [{"role": "assistant", "content": "so so"}]
    assert called(lambda queries, prompts, labels: ones(queries), request)["second"] == THREE.prompts


def test_a_function_may_change_its_lists_without_harm_to_others():
    """The rewards of the second source are those that it gives alone, and the request stays what it was."""

    def changes(queries, prompts, labels, level, notes, **kwargs):
        queries.sort()
        labels.reverse()
        level[0] = 99
        notes[0]["seen"].append("x")
        kwargs["responses"].clear()
        prompts.clear()
        return [1.0, 2.0, 3.0]

    def rule(queries, prompts, labels, level, notes, responses):
        texts = zip(queries, prompts, labels, responses, strict=True)
        right = [(q == f"{p}{r}</s>") * 10 * int(label) for q, p, label, r in texts]
        return [one + number - len(note["seen"]) for one, number, note in zip(right, level, notes, strict=True)]

    note = {"seen": []}  # one for all, as the samples of a prompt share it
    columns = {"level": [5, 6, 7], "notes": [note] * 3}
    request = dataclasses.replace(copy.deepcopy(THREE), columns=columns)
    result = WeightedSum([FunctionReward(changes), FunctionReward(rule)], [0, 1]).score(request)
    assert result.rewards.tolist() == [15, 26, 37]
    assert note == {"seen": []} and request.queries == THREE.queries and request.columns["level"] == [5, 6, 7]


def test_a_function_of_completions_may_change_token_ids_and_messages():
    chats = [[{"role": "user", "content": "p"}]] * 3
    request = dataclasses.replace(copy.deepcopy(THREE), inputs=chats, response_ids=[[4], [5, 6], [7]])

    def reward(prompts, completions, completion_ids):
        assert len(prompts[0]) == 1
        for ids, prompt in zip(completion_ids, prompts, strict=True):
            ids.append(2)
            prompt.append({"role": "user", "content": "more"})
            prompt[0]["content"] = ""
        assert [len(prompt) for prompt in prompts] == [2, 2, 2]
        return ones(completions)

    FunctionReward(reward).score(request)
    assert request.response_ids == [[4], [5, 6], [7]] and chats == [[{"role": "user", "content": "p"}]] * 3


def test_a_column_may_have_the_name_of_a_positional_parameter():
    """As the label column has where the third parameter is called by it: Python refuses a value given twice."""
    request = dataclasses.replace(THREE, columns={"gold": ["1", "2", "3"], "level": [5, 6, 7]})
    seen = called(lambda queries, prompts, gold, **kwargs: ones(gold), request)
    assert seen["third"] == THREE.labels and seen["level"] == [5, 6, 7] and "gold" not in seen


def test_labels_that_are_missing_are_none():
    request = RewardRequest(THREE.queries, THREE.prompts, THREE.responses)
    assert called(lambda queries, prompts, labels: ones(queries), request)["third"] == [None, None, None]


def test_coroutine_functions_share_one_event_loop():
    loops = []

    async def reward_func(queries, prompts, labels, **kwargs):
        loops.append(asyncio.get_running_loop())
        await asyncio.gather(*(asyncio.sleep(0) for _ in queries))
        return [len(query) for query in queries]

    source = FunctionReward(reward_func)
    assert [source.score(THREE).rewards.tolist() for _ in range(2)] == [[10, 9, 11]] * 2
    assert loops[0] is loops[1]
    source.close()


def test_a_function_may_run_an_event_loop_of_its_own():
    async def answer():
        return [1, 2, 3]

    assert FunctionReward(lambda texts: asyncio.run(answer())).score(THREE).rewards.tolist() == [1, 2, 3]


def test_printing_is_harmless(capsys):
    def reward_func(queries, prompts, labels):
        print(queries)
        return [1, 2, 3]

    assert FunctionReward(reward_func).score(THREE).rewards.tolist() == [1, 2, 3]


@pytest.mark.parametrize("function", [lambda: [1], lambda a, b: [1], lambda a, b, *, c: [1], lambda **kwargs: [1]])
def test_wrong_signatures_are_refused_before_anything_runs(function):
    with pytest.raises(ValueError, match=r"reward function <lambda>.*expected reward_func\(queries, prompts, labels"):
        FunctionReward(function)


def test_a_column_that_is_not_there_is_named():
    source = FunctionReward(lambda queries, prompts, labels, difficulty: ones(queries))
    with pytest.raises(
        ValueError, match=r"needs 'difficulty', which is no column of the data \(columns: \['level'\]\)"
    ):
        source.score(THREE)


# ---- how they fail


def test_a_raising_function_is_named_with_its_sample():
    def reward_func(queries, prompts, labels):
        return [1 / (len(query) - 9) for query in queries]  # the second query has 9 letters

    line = reward_func.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError) as caught:
        FunctionReward(reward_func).score(THREE)
    assert str(caught.value).startswith(
        "reward function reward_func (test_reward_functions.py) raised ZeroDivisionError: "
    )
    assert f"at test_reward_functions.py:{line}; sample 1 of 0 to 2 raises alone too: label '2', response 'bad'" in str(
        caught.value
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_that_fails_on_whole_batches_only_tells_the_range():
    def reward_func(queries, prompts, labels):
        assert len(queries) < 3, "too many"
        return ones(queries)

    with pytest.raises(RuntimeError, match=r"(?s)AssertionError: too many.*called with the samples 0 to 2 together"):
        FunctionReward(reward_func).score(THREE)


def test_a_coroutine_that_raises_and_a_function_that_exits():
    async def raises(queries, prompts, labels):
        raise KeyError("gold")

    def leaves(queries, prompts, labels):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"raises \(test.*raised KeyError: 'gold'.*sample 0 of 0 to 2"):
        FunctionReward(raises).score(THREE)
    with pytest.raises(RuntimeError, match="raised SystemExit: 3"):
        FunctionReward(leaves).score(THREE)


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_hanging_function_ends_in_an_error(kind):
    stop = threading.Event()

    def hangs(queries, prompts, labels):
        stop.wait(20)

    async def hangs_too(queries, prompts, labels):
        await asyncio.to_thread(stop.wait, 20)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"hangs.* gave no answer for 3 samples within 0.2 s"):
        FunctionReward(hangs if kind == "function" else hangs_too, time_limit_s=0.2).score(THREE)
    assert time.monotonic() - start < 3
    stop.set()


# ---- files


def write(tmp_path, text):
    file = tmp_path / "my_reward.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def reward(q, p, l):\n    return q\n", r"no function reward_func\(queries.*found the functions \['reward'\]"),
        ("reward_func = 3\n", r"no function reward_func.*found the functions \[\]"),
        ("x = 1\nx =\n", r"my_reward.py, line 2: SyntaxError"),
        ("import math\n\nmath.sqrt(-1)\n", r"my_reward.py, line 3: ValueError"),
        ("import no_such_package\n", r"line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.exit('bye')\n", r"line 2: SystemExit: bye"),
        ("class AgentExecutor:\n    pass\n", r"it defines an agent: pass it as --agent_func_path"),
        ("class E:\n    def reset(self, s): ...\n    def step(self, s): ...\n", r"it defines an agent"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, told):
    with pytest.raises(ValueError, match=told):
        load_reward_function(write(tmp_path, text))


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 4\n")
    text = "from neighbour_of_reward import VALUE\n\ndef reward_func(queries, prompts, labels): return [VALUE] * 3\n"
    source = FunctionReward(load_reward_function(write(tmp_path, text)))
    assert source.score(THREE).rewards.tolist() == [4, 4, 4]


@pytest.fixture
def own_imports(monkeypatch):
    """Paths and modules that a test's files add are taken away after it."""
    monkeypatch.setattr(python_file, "_folders", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("first_in_front", [False, True])
def test_each_file_gets_the_helper_of_its_own_folder(tmp_path, own_imports, caplog, first_in_front):
    """Also where the program runs in the first folder, which then is in front of all, where a file is loaded again, and
    for the parts of a package. What only the first folder has stays."""
    for folder, value in (("x", 4), ("y", 5)):
        (tmp_path / folder / "pack_of_reward").mkdir(parents=True)
        (tmp_path / folder / "pack_of_reward" / "__init__.py").touch()
        (tmp_path / folder / "pack_of_reward" / "part.py").write_text(f"TEN = {10 * value}\n")
        (tmp_path / folder / "helper_of_reward.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "reward_func.py").write_text(
            "import helper_of_reward\nfrom pack_of_reward.part import TEN\n"
            "def reward_func(queries, prompts, labels): return [helper_of_reward.VALUE + TEN] * len(queries)\n"
        )
    (tmp_path / "x" / "only_x_of_reward.py").touch()
    (tmp_path / "x" / "reward_func.py").open("a").write("import only_x_of_reward\n")
    files = [tmp_path / folder / "reward_func.py" for folder in ("x", "y", "x", "y")]
    if first_in_front:
        sys.path.insert(0, str(tmp_path / "x"))
    sources = []
    for place, file in enumerate(files):
        sources.append(FunctionReward(load_reward_function(file)))
        assert ("both have a module 'helper_of_reward'" in caplog.text) == (place > 0)
    assert [source.score(THREE).rewards[0] for source in sources] == [44, 55, 44, 55]
    assert "only_x_of_reward" in sys.modules and "only_x_of_reward" not in caplog.text


def test_the_folder_of_a_file_stands_behind_all_others(tmp_path, own_imports):
    before = list(sys.path)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text("1 / 0\n")
        (tmp_path / folder / "mine.py").write_text("import json\ndef reward_func(queries, prompts, labels): ...\n")
        load_reward_function(tmp_path / folder / "mine.py")
    assert sys.path == [*before, str(tmp_path / "x"), str(tmp_path / "y")]


# ---- the API


class Lengths(torch.nn.Module):
    """A module of texts."""

    def forward(self, texts):
        self.graph = torch.is_grad_enabled()
        return torch.tensor([float(len(text)) for text in texts])


class CountTokens(torch.nn.Module):
    """A module of token ids: how many there are."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids, attention_mask):
        assert input_ids.shape == attention_mask.shape
        return attention_mask.sum(dim=1, keepdim=True) * self.scale


def test_any_callable_or_module_is_a_source():
    assert as_reward_source(lambda texts: [len(text) for text in texts]).score(THREE).rewards.tolist() == [10, 9, 11]
    module = Lengths()
    assert as_reward_source(module).score(THREE).rewards.tolist() == [10, 9, 11]
    assert not module.graph and not module.training
    counts = as_reward_source(CountTokens(), name="tokens", batch_tokens=6)
    ids = RewardRequest(
        THREE.queries, THREE.prompts, THREE.responses, prompt_ids=[[3]] * 3, response_ids=[[4], [5, 6], []]
    )
    assert counts.score(ids).rewards.tolist() == [2, 3, 1] and counts.name == "tokens"
    with pytest.raises(ValueError, match="needs prompt_ids"):
        counts.score(THREE)
    source = returns([1, 2, 3])
    assert as_reward_source(source) is source
    with pytest.raises(ValueError, match="got int"):
        as_reward_source(3)


def test_a_classification_model_is_a_source():
    """With a tokenizer it scores texts, without one the policy's ids; transformers' own pooling is the reference."""
    tokenizer = tiny_tokenizer()
    network = tiny_reward_model(tokenizer=tokenizer).network
    request = RewardRequest.from_tokens(
        tokenizer,
        ["what is the answer?\n", "how many\n"],
        [tokenizer("what is the answer?\n")["input_ids"], tokenizer("how many\n")["input_ids"]],
        [[*tokenizer("good")["input_ids"], 2], [*tokenizer("the answer is no")["input_ids"], 2]],
    )
    expected = []
    for prompt, response in zip(request.prompt_ids, request.response_ids, strict=True):
        with torch.no_grad():
            expected.append(network(input_ids=torch.tensor([prompt + response])).logits.item())
    assert as_reward_source(network).score(request).rewards == pytest.approx(expected, abs=1e-5)
    assert as_reward_source(network, tokenizer).score(request).rewards == pytest.approx(expected, abs=1e-5)
    assert as_reward_source(tiny_reward_model(tokenizer=tokenizer)).score(request).rewards == pytest.approx(
        expected, abs=1e-5
    )
    with pytest.raises(ValueError, match="a head 'score'"):
        as_reward_source(CountTokens(), tokenizer)
