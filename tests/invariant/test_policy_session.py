"""Responses drawn step by step: greedy as generate() draws, and every row by its own random numbers alone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from decoding.boundary import StepBoundary
from decoding.sampling import Piece, PolicySession, choose_tokens
from decoding.streams import Stream
from decoding.token_texts import TokenTexts, decode
from openrlhf.models.policy import Policy
from tests.tiny import tiny_config, tiny_tokenizer

FAMILIES = ("llama", "qwen2", "gemma", "gpt2", "gpt_neox", "mistral", "mistral with a window")
PROMPTS = ["how many apples", "yes no", "what is the answer of the question 12 plus 7", "yes no"]


def tiny_policy(family: str = "llama") -> Policy:
    """A random policy whose distributions are far from uniform, and which ends after some tokens."""
    config = tiny_config(family.split()[0])
    if family.endswith("window"):
        config.sliding_window = 6
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    policy = Policy(model, tiny_tokenizer())
    policy.stop_ids = [2, *range(3, 320, 16)]  # tokens that a random model comes upon
    return policy


def encoded(policy: Policy, prompts=PROMPTS) -> list[list[int]]:
    return [policy.tokenizer(prompt).input_ids for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("boundary", [None, "newline", "sentence", "tokens:3", "text:a"])
def test_greedy_steps_draw_what_generate_draws(family, boundary):
    policy = tiny_policy(family)
    prompts = encoded(policy)
    policy.stop_ids = []
    endless = [group[0] for group in policy.generate_ids(prompts, temperature=0, max_new_tokens=30)]
    policy.stop_ids = [endless[0][9], endless[2][14]]
    wanted = [group[0] for group in policy.generate_ids(prompts, temperature=0, max_new_tokens=30)]
    assert min(map(len, wanted)) <= 10
    session = PolicySession(policy, prompts, temperature=0, max_tokens=30)
    rows, rng, steps = list(range(len(prompts))), random.Random(0), 0
    while not all(session.ended):
        open_rows = [place for place, ended in enumerate(session.ended) if not ended]
        named = rng.sample(open_rows, rng.randrange(1, len(open_rows) + 1))
        kind = None if boundary is None else StepBoundary.parse(boundary)
        for place, piece in zip(named, session.draw(None, kind, 7, named), strict=True):
            drawn = session.ids[place]
            assert piece.ids and drawn == wanted[rows[place]][: len(drawn)]
            assert list(piece.ids) == drawn[len(drawn) - len(piece.ids) :]
            assert piece.ended == session.ended[place]
        steps += 1
        if steps % 2:  # drop rows, fork others, change their order
            kept = [rng.randrange(len(rows)) for _ in range(rng.randrange(1, 6))]
            session.select(kept)
            rows = [rows[place] for place in kept]
    for row, ids, ended in zip(rows, session.ids, session.ended, strict=True):
        assert ids == wanted[row]
        assert ended == ("eos" if ids[-1] in policy.stop_ids else "length")


def slow_distribution(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Tempered softmax of one row: only the fewest most likely tokens that have at least top_p together are kept."""
    weights = np.exp((logits - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    kept, total = set(), 0.0
    for token in sorted(range(len(logits)), key=lambda token: -probabilities[token]):
        if top_p == 1 or total < top_p:
            kept.add(token)
            total += probabilities[token]
    return np.array([p if token in kept else 0 for token, p in enumerate(probabilities)]) / total


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.5), (1.0, 1e-6)])
def test_draws_follow_the_tempered_distribution(temperature, top_p):
    """20 000 draws of 12 tokens: chi-square below the 99.9 % quantile of 11 degrees of freedom, 31.3."""
    logits = np.random.default_rng(0).normal(0, 1.5, 12).astype(np.float32)
    logits[3] = -np.inf
    wanted = slow_distribution(logits, temperature, top_p)
    uniforms = torch.tensor([Stream(5, row).uniform(place) for row in range(200) for place in range(100)]).double()
    drawn = choose_tokens(torch.from_numpy(logits).expand(len(uniforms), -1), uniforms, temperature, top_p)
    counts = np.bincount(drawn.numpy(), minlength=12)
    assert not counts[wanted == 0].any()
    expected = (wanted * len(uniforms))[wanted > 0]
    assert ((counts[wanted > 0] - expected) ** 2 / expected).sum() < 31.3
    edges = np.cumsum(wanted)  # token t has the numbers between the sums before and behind it
    for u, token in zip(uniforms[:500].tolist(), drawn[:500].tolist(), strict=True):
        assert edges[token] - wanted[token] - 1e-6 <= u <= edges[token] + 1e-6


def test_the_ends_of_the_interval_choose_tokens_that_can_be_drawn():
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 300):
        logits = torch.from_numpy(rng.normal(0, 30, (50, size))).float()
        logits[:, rng.random(size) < 0.4] = -float("inf")
        logits[:, rng.integers(size)] = 0
        for top_p in (1.0, 0.9):
            wanted = np.stack([slow_distribution(row, 1.0, top_p) for row in logits.double().numpy()])
            for u in (0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-53):
                drawn = choose_tokens(logits, torch.full((50,), u, dtype=torch.float64), 1.0, top_p).numpy()
                assert (np.take_along_axis(wanted, drawn[:, None], 1) > 0).all()


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_row_draws_the_same_alone_and_beside_others(top_p):
    policy = tiny_policy()
    prompts = encoded(policy)
    options = {"temperature": 1.2, "top_p": top_p, "max_tokens": 25}
    streams = [Stream(3, row) for row in range(4)]
    alone = []
    for prompt, stream in zip(prompts, streams, strict=True):
        session = PolicySession(policy, [prompt], **options)
        alone += session.draw([stream], None, 100)
    together = PolicySession(policy, prompts, **options)
    pieces = together.draw(streams, None, 100)
    assert [piece.ids for piece in pieces] == [piece.ids for piece in alone]
    np.testing.assert_allclose(sum((p.logprobs for p in pieces), ()), sum((p.logprobs for p in alone), ()), atol=1e-5)
    assert len({piece.ids for piece in pieces}) == 4  # rows 1 and 3 share a prompt

    steps = PolicySession(policy, prompts[::-1], **options)  # another order, in steps, with rows dropped between
    rows = [3, 2, 1, 0]
    while rows:
        drawn = [rows[-1]] if len(rows) == 3 else rows
        steps.draw(
            [streams[row] for row in drawn], StepBoundary.parse("tokens:2"), 9, [rows.index(row) for row in drawn]
        )
        for row, ids in zip(rows, steps.ids, strict=True):
            assert tuple(ids) == alone[row].ids[: len(ids)]
        over = [row for row, ended in zip(rows, steps.ended, strict=True) if ended]
        leaving = over or (rows[:1] if len(rows) == 4 else [])
        kept = [row for row in rows if row not in leaving]
        steps.select([rows.index(row) for row in kept])
        rows = kept


def test_logprobs_are_those_of_the_policy_without_temperature():
    policy = tiny_policy()
    (prompt,) = encoded(policy, ["what is the answer"])
    session = PolicySession(policy, [prompt], temperature=3.0, top_p=0.9, max_tokens=12)
    (piece,) = session.draw([Stream(0)], None, 100)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + list(piece.ids)])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)[range(len(piece.ids)), list(piece.ids)]
    np.testing.assert_allclose(piece.logprobs, wanted.numpy(), atol=1e-5)


def test_rows_taken_up_again_go_on_as_if_they_had_not_left():
    policy = tiny_policy()
    prompts = encoded(policy)
    options = {"temperature": 1.0, "max_tokens": 20}
    streams = [Stream(9, row) for row in range(4)]
    whole = PolicySession(policy, prompts, **options)
    whole.draw(streams, None, 100)
    begun = PolicySession(policy, prompts[:1], **options)
    begun.draw(streams[:1], None, 5)
    begun.add(prompts[1:], [whole.ids[1][:3], [], whole.ids[3][:1]])
    assert begun.ids == [whole.ids[0][:5], whole.ids[1][:3], [], whole.ids[3][:1]]
    begun.draw(streams, None, 100)
    assert begun.ids == whole.ids and begun.ended == whole.ended
    finished = PolicySession(policy, prompts, **options)
    finished.select([])
    finished.add(prompts, whole.ids)
    assert finished.ended == whole.ended


def test_rows_leave_the_passes_when_they_are_over_and_prompts_are_computed_once():
    policy = tiny_policy()
    prompts = encoded(policy) * 2
    shapes = []
    policy.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    session = PolicySession(policy, prompts, temperature=1.0, max_tokens=25)
    assert sum(rows for rows, _ in shapes) == 3  # different prompts
    assert session.prompt_tokens == sum(map(len, {tuple(prompt) for prompt in prompts}))
    shapes.clear()
    pieces = session.draw([Stream(4, row) for row in range(8)], None, 100)
    lengths = [len(piece.ids) for piece in pieces]
    going_on = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert len(shapes) == len(going_on) and going_on[-1] < 4
    for (rows, width), needed in zip(shapes, going_on, strict=True):
        assert width == 1 and needed <= rows <= 1.25 * needed
    assert session.policy_tokens == sum(lengths)


class Scripted(nn.Module):
    """Stands in for a causal language model: says a text behind the prompt, token by token, then EOS."""

    generation_config = GenerationConfig()

    def __init__(self, script: list[int], prompt: int) -> None:
        super().__init__()
        self.base_model = AutoModelForCausalLM.from_config(tiny_config()).base_model
        self.config, self.script, self.prompt = self.base_model.config, script, prompt

    def forward(self, position_ids, **inputs):
        self.base_model(position_ids=position_ids, **inputs)
        logits = torch.zeros(*position_ids.shape, 320)
        for place in position_ids[:, -1].tolist():
            next_place = place + 1 - self.prompt
            logits[..., self.script[next_place] if next_place < len(self.script) else 2] = 9.0
        return (logits,)


def scripted(text: str, **options) -> PolicySession:
    tokenizer = tiny_tokenizer()
    policy = Policy(Scripted(tokenizer(text).input_ids, 2), tokenizer)
    return PolicySession(policy, [[5, 6]], **{"temperature": 0, "max_tokens": 60} | options)


@pytest.mark.parametrize("steps", ["tokens:1", "tokens:3", "newline"])
@pytest.mark.parametrize(
    "text, stops, wanted",
    [
        ("aaSTOPbbHALTcc", ["STOP", "HALT"], "aa"),
        ("aaSTOPbbHALTcc", ["HALT", "STOP"], "aa"),
        ("aaSTOPbbSTOPcc", ["STOP"], "aa"),
        ("aaSTOPbb", ["", "STOP"], "aa"),
        ("aaSTOPbb", [""], "aaSTOPbb"),
        ("xabcd", ["bcd", "abcdx", "abc"], "x"),
        ("say \u00e9t\u00e9\nyes", ["\u00e9\n"], "say \u00e9t"),  # the last character of the stop ends in a token
        ("say \u00e9t\u00e9 yes", ["\u00e9"], "say "),
        ("good apples", ["pp"], "good a"),  # within a token
    ],
)
def test_a_response_ends_at_its_earliest_stop(text, stops, wanted, steps):
    session = scripted(text, stops=stops)
    while not session.ended[0]:
        (piece,) = session.draw(None, StepBoundary.parse(steps), 100)
        assert piece.ids
    assert session.text(0) == wanted
    assert session.ended[0] == ("eos" if wanted == text else "stop")
    spoken = decode(session.policy.tokenizer, session.ids[0])
    assert spoken.startswith(wanted) and text.startswith(spoken)
    without_last = decode(session.policy.tokenizer, session.ids[0][:-1])
    assert session.ended[0] == "eos" or not any(stop and stop in without_last for stop in stops)
    assert session.draw(None, None, 5) == [Piece((), (), session.ended[0])]  # over: nothing more is drawn


def test_steps_end_where_their_boundary_does():
    texts, session = [], scripted("a is 4\n\nb is 5 plus\nno")
    while not session.ended[0]:
        (piece,) = session.draw(None, StepBoundary.parse("newline"), 100)
        texts.append(decode(session.policy.tokenizer, piece.ids))
    assert texts == ["a is 4\n", "\nb is 5 plus\n", "no"]


def test_a_step_without_boundary_or_text_ends_all_the_same():
    session = scripted("yes " * 60, max_tokens=45)
    lengths = []
    while not session.ended[0]:
        (piece,) = session.draw(None, StepBoundary.parse("newline"), 20)
        lengths.append(len(piece.ids))
    assert lengths == [20, 20, 5] and session.ended == ["length"]
    empty = scripted("")
    assert [piece.ids for piece in empty.draw(None, StepBoundary.parse("newline"), 9)] == [(2,)]
    assert empty.ended == ["eos"] and empty.text(0) == ""


def test_a_response_ends_where_the_context_does():
    policy = tiny_policy("gpt2")  # a table of 128 positions
    policy.stop_ids = []
    session = PolicySession(policy, [[5] * 120, [6] * 4], temperature=0, max_tokens=50)
    pieces = session.draw(None, None, 100)
    assert [len(piece.ids) for piece in pieces] == [8, 50]
    assert session.ended == ["length", "length"]


def test_prompts_that_leave_no_room_are_named_before_anything_is_computed():
    policy = tiny_policy()
    policy.model.forward = policy.model.base_model.forward = None  # a pass would fail
    with pytest.raises(
        ValueError, match="prompt 1 has 128 tokens, and the policy reads 128 with at least 1 .*: shorten it"
    ):
        PolicySession(policy, [[5] * 127, [5] * 128], temperature=0, max_tokens=5)
    with pytest.raises(ValueError, match=r"prompts \[1\] have no token"):
        PolicySession(policy, [[5], []], temperature=0, max_tokens=5)


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": 0}]
)
def test_settings_outside_their_range_are_refused(options):
    with pytest.raises(ValueError, match="expected temperature 0 or more"):
        PolicySession(tiny_policy(), [[5]], **{"temperature": 1.0, "max_tokens": 5} | options)


def test_misuse_of_draw_is_refused():
    session = PolicySession(tiny_policy(), [[5], [6]], temperature=1.0, max_tokens=5)
    with pytest.raises(ValueError, match="a stream a row"):
        session.draw(None, None, 5)
    with pytest.raises(ValueError):
        session.draw([Stream(0)], None, 5)
    with pytest.raises(ValueError, match="different rows"):
        session.draw([Stream(0), Stream(1)], None, 5, [0, 0])
    with pytest.raises(ValueError, match="max_step_tokens 1 or more"):
        session.draw([Stream(0), Stream(1)], None, 0)
    assert session.ids == [[], []]


def test_a_broken_policy_is_told():
    policy = copy.deepcopy(tiny_policy())
    with torch.no_grad():
        policy.model.base_model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        PolicySession(policy, [[5]], temperature=1.0, max_tokens=5).draw([Stream(0)], None, 5)


def sentencepiece_tokenizer():
    """Blanks as the letter U+2581, one in front of each text; bytes where a character is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "."]
    vocabulary = {word: place for place, word in enumerate(words)}
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_tokenizer])
def test_texts_of_tokens_are_what_decoding_tells(make):
    tokenizer, rng = make(), random.Random(0)
    texts, whole = TokenTexts.of(tokenizer), 0
    assert texts is TokenTexts.of(tokenizer)
    for _ in range(400):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(2, 9))]
        first = rng.randrange(1, len(ids))
        before, text = decode(tokenizer, ids[:first]), decode(tokenizer, ids)
        if before.strip() and "\ufffd" not in before + text:
            assert texts.read(ids[first:]) == text[len(before) :]
            whole += 1
    assert whole > 20
    newlines = texts.holding("\n")
    assert all(token in newlines for token in tokenizer("a\n").input_ids[-1:])
    assert texts.texts[tokenizer.eos_token_id] == "" and texts.read([10_000]) == ""
    assert len(newlines) < len(tokenizer) and texts.holding("\n") is newlines
