"""Guided decoding with tiny models: greedy equality, independence of the batch, and every score computed anew."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from decoding.beam import Beam, BeamSettings
from decoding.boundary import StepBoundary
from decoding.guidance import Drawn, Judge, Verdict
from decoding.guided import Batch, Row, cut_batches, decode_guided
from decoding.guided_settings import Guidance, GuidedSettings
from decoding.records import Question
from decoding.sampling import Piece
from decoding.self_evaluation import PLAIN, QUESTION, SelfEvaluation, answer_tokens
from openrlhf.datasets.tokenize import encode_prompt, encode_response
from openrlhf.evaluation.goal_state import GoalState
from openrlhf.evaluation.scoring import EncodedCompletion, score_encoded
from openrlhf.models.policy import Policy
from tests.tiny import tiny_config, tiny_reward_model, tiny_tokenizer

TEXTS = ["what is the question", "how many apples does she buy", "yes", "the answer is good plus bad minus"]
NOTHING = Guidance(goal=0.0)


@pytest.fixture(scope="module")
def policy():
    """A random policy of whole characters that likes to end lines, and now and then the response."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", len(tokenizer))).eval()
    with torch.no_grad():
        bias = torch.zeros(len(tokenizer))
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        bias[[not text.isascii() or text in ("<pad>", "<s>") for text in texts]] = -100.0  # whole characters only
        bias[tokenizer.eos_token_id] = 2.5
        bias[encode_response(tokenizer, "\n")[0]] = 4.0
        weight = model.lm_head.weight * 20
        model.lm_head = nn.Linear(*reversed(weight.shape))
        model.lm_head.weight.copy_(weight)
        model.lm_head.bias.copy_(bias)
    return Policy(model, tokenizer)


@pytest.fixture(scope="module")
def reward(policy):
    rng = np.random.default_rng(0)
    goals = [rng.standard_normal((1, 32)).astype(np.float32) for _ in range(2)]
    return {
        "model": tiny_reward_model(tokenizer=policy.tokenizer, seed=1),
        "tokenizer": policy.tokenizer,
        "goals": goals,
    }


def questions(texts=TEXTS):
    return [Question(i, text, f"Q: {text}\nA:", f"{text} =>") for i, text in enumerate(texts)]


def settings(**changes):
    beam = {name: changes.pop(name) for name in list(changes) if name in BeamSettings.__dataclass_fields__}
    if "bs_temperature" in changes:
        beam["temperature"] = changes.pop("bs_temperature")
    if "draw_temperature" in changes:
        changes["temperature"] = changes.pop("draw_temperature")
    defaults = {"n_samples": 2, "max_tokens": 20, "max_step_tokens": 6}
    return GuidedSettings(beam=BeamSettings(**{"beam_size": 2, "max_steps": 8, **beam}), **{**defaults, **changes})


def decode(policy, asked, reward=None, **changes):
    seed = changes.pop("seed", 0)
    return list(decode_guided(policy, asked, settings(**changes), seed=seed, with_trace=True, **(reward or {})))


def told(answered):
    """What of an answer must not depend on the questions around it."""
    return json.loads(json.dumps([answered.trace, [(one.text, one.ids, one.finished) for one in answered.responses]]))


def assert_close(found, expected):
    """Equal JSON values, numbers up to what the shape of a batch changes in float32."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=5e-5)
    else:
        assert found == expected


@pytest.mark.parametrize("boundary", ["newline", "tokens:3"])
def test_one_beam_without_guidance_is_greedy_generation(policy, boundary):
    asked = questions([f"{text} {word}" for text in TEXTS for word in ("no", "is", "apples")])
    prompts = [encode_prompt(policy.tokenizer, one.policy_prompt) for one in asked]
    expected = [group[0] for group in policy.generate_ids(prompts, temperature=0.0, max_new_tokens=20)]
    assert len({len(ids) for ids in expected}) > 2  # some end early
    found = decode(
        policy, asked, guidance=NOTHING, beam_size=1, n_samples=1, draw_temperature=0.0,
        max_steps=20, boundary=StepBoundary.parse(boundary),
    )  # fmt: skip
    assert [list(one.responses[0].ids) for one in found] == expected
    ended = [ids[-1] in policy.stop_ids for ids in expected]
    assert [one.responses[0].finished for one in found] == ended
    assert [one.policy_tokens for one in found] == list(map(len, expected))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "bs_temperature": 0.5,
            "temperature_decay": 0.7,
            "guidance": Guidance(goal=0.3, reward=0.7, goal_weights=(1, -2)),
        },
        {"guidance": Guidance(goal=0.0, random=1.0), "unbiased": True, "bs_temperature": 1.0},
        {"guidance": Guidance(goal=0.0, self_evaluation=1.0), "stops": ("a",)},
    ],
    ids=["model", "random", "self-evaluation"],
)
def test_results_do_not_depend_on_the_questions_decoded_together(policy, reward, changes):
    asked = questions()
    together = decode(policy, asked, reward, **changes)
    assert len({tuple(one.responses[0].ids) for one in together}) == len(asked)
    for other in (
        decode(policy, asked[::-1], reward, **changes)[::-1],
        [decode(policy, [one], reward, **changes)[0] for one in asked],
        decode(policy, asked, reward, rows=3, **changes),  # fewer than the rows of one question
        decode(policy, asked, reward, cache_tokens=200, **changes),
    ):
        for one, expected in zip(other, together, strict=True):
            assert one.question == expected.question
            assert (one.policy_tokens, one.reward_tokens) == (expected.policy_tokens, expected.reward_tokens)
            assert_close(told(one), told(expected))
    assert [told(one) for one in decode(policy, asked, reward, seed=1, **changes)] != [told(one) for one in together]


def path_of(answered, response):
    """Candidates of the trace that make up a response, the first step first."""
    by_id = {one["id"]: one for entry in answered.trace for one in entry["candidates"]}
    for leaf in by_id.values():
        if leaf["fate"] in (["finished"] if response.finished else ["cut", "kept"]):
            path = [leaf]
            while path[0]["parent"] is not None:
                path.insert(0, by_id[path[0]["parent"]])
            text, tokens = "".join(one["text"] for one in path), sum(one["tokens"] for one in path)
            is_it = (text, tokens) == (response.text, len(response.ids))
            if is_it and leaf["score"] == pytest.approx(response.score, rel=1e-5):
                return path
    raise AssertionError(f"the trace has no path to {response.text!r}")


def test_every_score_of_the_trace_equals_one_computed_from_whole_texts(policy, reward):
    weights = (1.0, -0.5)
    guidance = Guidance(goal=0.5, reward=0.5, goal_weights=weights, reduction="mean")
    asked = questions(TEXTS + [f"{text} of" for text in TEXTS])
    found = decode(policy, asked, reward, guidance=guidance, conf_ratio=0.6, seed=5)
    goals = torch.from_numpy(np.concatenate(reward["goals"]))
    checked = 0
    for answered in found:
        for response in answered.responses:
            path = path_of(answered, response)
            ids, prompt = list(response.ids), encode_prompt(policy.tokenizer, answered.question.policy_prompt)
            with torch.inference_mode():
                logits = policy.model(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
            logprobs = [float(logits[len(prompt) + t - 1, token]) for t, token in enumerate(ids)]
            read = [token for token in ids if token not in policy.stop_ids]
            whole = encode_prompt(policy.tokenizer, answered.question.reward_prompt) + [
                *read,
                policy.tokenizer.eos_token_id,
            ]
            with torch.inference_mode():
                out = reward["model"](torch.tensor([whole]), torch.ones(1, len(whole)))
            states, values = out.hidden_states[0, -len(read) - 1 :], out.values[0, -len(read) - 1 :].tolist()
            cosines = torch.nn.functional.cosine_similarity(states[:, None], goals[None], dim=-1)  # (n, 2)
            assert response.partial_rewards == pytest.approx(values, abs=1e-5)
            assert response.reward == response.partial_rewards[-1]
            assert np.array(response.cosine_sim) == pytest.approx(cosines.numpy(), abs=1e-5)
            end, scores = 0, []
            for step in path:
                start, end = end, end + step["tokens"]
                is_end = step is path[-1]
                stop = len(values) if is_end else end  # the EOS belongs to the last step
                assert step["logprob"] == pytest.approx(np.mean(logprobs[start:end]), abs=1e-4)
                told_goals = cosines[start:stop].mean(0).tolist()
                assert step["similarities"] == pytest.approx(told_goals, abs=1e-4)
                goal = (told_goals[0] - 0.5 * told_goals[1]) / 1.5
                guided = 0.5 * goal + 0.5 / (1 + np.exp(-values[stop - 1]))
                assert step["guidance"] == pytest.approx(guided, abs=1e-4)
                scores.append(0.4 * step["logprob"] + 0.6 * guided)
                assert step["score"] == pytest.approx(np.mean(scores), abs=1e-4)
                checked += 1
            assert response.score == pytest.approx(np.mean(scores), abs=1e-4)
    assert checked > 20


def test_the_best_candidates_of_every_step_are_kept_and_tokens_counted(policy, reward):
    for answered in decode(policy, questions(), reward, guidance=Guidance(goal_weights=(1.0, 1.0)), n_samples=3):
        places = {}
        for number, entry in enumerate(answered.trace):
            assert entry["step"] == number + 1
            fates = {fate: [one for one in entry["candidates"] if one["fate"] == fate] for fate in ("kept", "dropped")}
            chosen = [one for one in entry["candidates"] if one["fate"] in ("kept", "finished", "cut")]
            assert 1 <= len(chosen) <= 2
            worst = min(one["score"] for one in chosen)
            assert all(one["score"] <= worst for one in fates["dropped"])
            for one in entry["candidates"]:
                assert (one["parent"] is None) == (number == 0)
                assert number == 0 or places[one["parent"]] == (number - 1, "kept")
                places[one["id"]] = (number, one["fate"])
            parents = {one["parent"] for one in entry["candidates"]}
            assert len(entry["candidates"]) == (6 if number == 0 else 3 * len(parents))
        assert answered.policy_tokens == sum(one["tokens"] for entry in answered.trace for one in entry["candidates"])
        assert sorted(places) == list(range(len(places)))
        scores = [one.score for one in answered.responses]
        assert scores == sorted(scores, reverse=True)


def test_equal_steps_are_merged_and_read_once(policy, reward):
    found = decode(
        policy, questions(TEXTS[:1]), reward, guidance=Guidance(goal_weights=(1.0, 1.0)), n_samples=4, beam_size=2,
        draw_temperature=0.05, max_steps=1,
    )[0]  # fmt: skip
    candidates = found.trace[0]["candidates"]
    merged = [one for one in candidates if one["fate"] == "merged"]
    by_id = {one["id"]: one for one in candidates}
    assert merged and all(by_id[one["into"]]["text"] == one["text"] for one in merged)
    texts = {(one["text"], one["ended"]): one for one in candidates}
    read = sum(one["tokens"] + (one["ended"] != "eos") for one in texts.values())  # the last step: EOS behind each
    assert found.reward_tokens == read < sum(one["tokens"] for one in candidates)


def test_figures_of_a_response_are_those_of_eval_rm(policy, reward):
    goal = GoalState(reward["goals"][0], 1, 1.0, "plain", False, 100, "checkpoint", "dataset")
    one_goal = {**reward, "goals": reward["goals"][:1]}
    by_goal = decode(policy, questions(), one_goal, max_steps=2)
    unguided = decode(policy, questions(), one_goal, max_steps=2, guidance=NOTHING)  # read at the end only
    assert all(one.reward_tokens > 0 for one in by_goal) and all(one.reward_tokens == 0 for one in unguided)
    ends = {one.finished for answered in by_goal + unguided for one in answered.responses}
    assert ends == {True, False}
    eos = policy.tokenizer.eos_token_id
    for answered in by_goal + unguided:
        prompt = encode_prompt(policy.tokenizer, answered.question.reward_prompt)
        for response in answered.responses:
            ids = [*(token for token in response.ids if token != eos), eos]
            scored = score_encoded(reward["model"], [EncodedCompletion(prompt, ids, False)], goal=goal, progress=False)[
                0
            ]
            assert response.partial_rewards == pytest.approx(scored.partial_rewards, abs=1e-5)
            assert response.cosine_sim == pytest.approx(scored.cosine_sim, abs=1e-5)
            assert response.reward == pytest.approx(scored.reward, abs=1e-5)
    assert decode(policy, questions(), guidance=NOTHING)[0].responses[0].reward is None


def byte_tokenizer():
    """A token a byte: another vocabulary than the policy's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


def test_a_reward_model_of_another_tokenizer_reads_the_text(policy, reward):
    tokenizer = byte_tokenizer()
    other = {"model": tiny_reward_model(seed=2), "tokenizer": tokenizer, "goals": reward["goals"][:1]}
    other["model"].config.max_position_embeddings = 512
    for answered in decode(policy, questions(), other, guidance=Guidance(goal=1.0, reward=1.0), max_tokens=10):
        for response in answered.responses:
            prompt = encode_prompt(tokenizer, answered.question.reward_prompt)
            ids = encode_response(tokenizer, response.text)
            scored = score_encoded(other["model"], [EncodedCompletion(prompt, ids, False)], progress=False)[0]
            assert response.partial_rewards == pytest.approx(scored.partial_rewards, abs=1e-5)
            leaf = path_of(answered, response)[-1]
            assert leaf["reward"] == pytest.approx(1 / (1 + np.exp(-scored.reward)), abs=1e-5)


@pytest.mark.parametrize("chat", [False, True])
def test_self_evaluation_is_the_share_of_yes_behind_the_question(policy, chat):
    tokenizer = policy.tokenizer
    yes, no = answer_tokens(tokenizer)
    assert yes and no and not set(yes) & set(no)
    asked = [encode_prompt(tokenizer, one.policy_prompt) for one in questions(TEXTS[:2])]
    follow_up = f"</s>\n<|user|>\n{QUESTION}</s>\n<|assistant|>\n" if chat else PLAIN
    evaluation = SelfEvaluation(policy, asked, chat)
    steps = [[[], [5, 6, 7]], [[9, 10], [5, 6, 7, 8]], [[5, 6, 7, 8, 11, tokenizer.eos_token_id], [9, 10]]]
    behind = tokenizer(follow_up, add_special_tokens=False)["input_ids"]
    new = [[0, 3], [2, 1], [1, 0]]  # tokens since the call before, without EOS
    for number, responses in enumerate(steps):
        if number == 2:
            evaluation.select([1, 0])
            asked = asked[::-1]
        found, tokens = evaluation.extend(responses)
        assert tokens == [len(behind) + count for count in new[number]]
        for prompt, ids, probability in zip(asked, responses, found, strict=True):
            ids = [token for token in ids if token != tokenizer.eos_token_id]
            with torch.inference_mode():
                shares = policy.model(torch.tensor([prompt + ids + behind])).logits[0, -1].double().softmax(-1)
            expected = shares[yes].sum() / (shares[yes].sum() + shares[no].sum())
            assert probability == pytest.approx(float(expected), abs=1e-5)


def test_self_evaluation_guides_and_needs_no_reward_model(policy):
    found = decode(policy, questions(), guidance=Guidance(goal=0.0, self_evaluation=1.0), conf_ratio=1.0)
    for answered in found:
        candidates = [one for entry in answered.trace for one in entry["candidates"]]
        assert all(one["guidance"] == one["step_score"] == one["self_evaluation"] for one in candidates)
        assert answered.reward_tokens > 0 and answered.responses[0].reward is None


def test_texts_that_end_within_a_character_are_told_apart(policy):
    keys = []
    for text, ids in (("a \ufffd", (5, 200)), ("a \ufffd", (5, 201)), ("a b", (5, 7)), ("a b", (5, 8))):
        drawn = Drawn(0, 0, 0, 0, ids, text, False)
        keys.append(Row(drawn, Piece(ids, (-1.0, -2.0), ""), -1.5, Verdict(0.5), 0, None).candidate().key)
    assert keys[0] != keys[1] and keys[2] == keys[3]


def test_equal_steps_tie_exactly_whatever_the_rounding():
    """The place of a row in its batch moves its last digits; which duplicate stands for the others must not move."""
    session = SimpleNamespace(
        select=lambda rows: None,
        draw=lambda *_: [Piece((7,), (logprob,), "eos") for logprob in (-1.0, -0.9999999, -1.0000001)],
        ids=[[7]] * 3,
        text=lambda row: "a",
    )
    asked = questions(TEXTS[:1])
    batch = Batch(asked, settings(beam_size=1, n_samples=3), 0, session, Judge(NOTHING, [0], 0))
    candidates = batch.extend(0, {0: [Beam()]})[0]
    assert [one.logprob for one in candidates] == [-1.0] * 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [[0, 1, 2, 3]]),  # 16 of 64 rows
        ({"rows": 9}, [[0, 1], [2, 3]]),  # 4 rows a question
        ({"rows": 1}, [[0], [1], [2], [3]]),
        ({"cache_tokens": 4 * 3 * (9 + 20)}, [[0], [1, 2, 3]]),  # the longest of the last three prompts has 9 tokens
    ],
)
def test_batches_keep_to_their_limits(policy, changes, expected):
    asked = [Question(i, text, text, None) for i, text in enumerate(["no " * 30, *["no " * 4] * 3])]
    lengths = [len(encode_prompt(policy.tokenizer, one.policy_prompt)) for one in asked]
    assert lengths[1] == lengths[3] <= 9 < lengths[0]
    found = [[one.index for one in group] for group, _ in cut_batches(policy, asked, settings(**changes))]
    assert found == expected


def test_step_limit_returns_the_best_unfinished_and_flags_it(policy, reward):
    one_goal = {**reward, "goals": reward["goals"][:1]}
    found = decode(
        policy, questions(), one_goal, max_steps=1, max_step_tokens=2, boundary=StepBoundary.parse("tokens:2")
    )
    cut = [one for one in found if not any(c["ended"] for c in one.trace[0]["candidates"])]
    assert cut
    for answered in cut:
        (response,) = answered.responses
        assert not response.finished and len(response.ids) == 2
        assert response.score == pytest.approx(max(one["score"] for one in answered.trace[0]["candidates"]), abs=1e-5)
        assert len(response.partial_rewards) == 3  # the EOS that a reward model expects is read nevertheless


def test_a_stop_ends_the_response_and_is_cut_off(policy):
    found = decode(policy, questions(), guidance=NOTHING, stops=("", "o", "a"), n_samples=4, max_tokens=40)
    responses = [one for answered in found for one in answered.responses]
    assert not any(letter in one.text for one in responses for letter in "oa")
    ended = [c["ended"] for answered in found for entry in answered.trace for c in entry["candidates"]]
    assert {"stop", "eos"} <= set(ended)


def test_a_response_that_a_stop_ends_is_scored_as_its_text(policy, reward):
    one_goal = {**reward, "goals": reward["goals"][:1]}
    stopped = 0
    for answered in decode(policy, questions(), one_goal, stops=("o", "a", "e"), max_tokens=40):
        for response in answered.responses:
            leaf = path_of(answered, response)[-1]
            if leaf["ended"] == "stop":
                prompt = encode_prompt(policy.tokenizer, answered.question.reward_prompt)
                encoded = EncodedCompletion(prompt, encode_response(policy.tokenizer, response.text), False)
                scored = score_encoded(reward["model"], [encoded], progress=False)[0]
                assert response.partial_rewards == pytest.approx(scored.partial_rewards, abs=1e-5)
                assert leaf["goal"] == pytest.approx(response.cosine_sim[-1], abs=1e-5)
                stopped += 1
    assert stopped > 2


def test_a_broken_reward_model_is_an_error_that_names_the_question(policy, reward):
    model = tiny_reward_model(tokenizer=policy.tokenizer)
    with torch.no_grad():
        model.network.score.weight.fill_(float("nan"))
    asked = [replace(one, index=one.index + 40) for one in questions()]
    with pytest.raises(ValueError, match="question 40, step 1: none of the 4 candidates has a score"):
        decode(policy, asked, {**reward, "model": model, "goals": ()}, guidance=Guidance(goal=0.0, reward=1.0))


def test_guidance_without_what_it_reads_is_refused(policy, reward):
    asked = questions()
    with pytest.raises(ValueError, match="needs a reward model"):
        decode(policy, asked)
    with pytest.raises(ValueError, match=r"a goal state for each of the weights \(1.0,\), got 2"):
        decode(policy, asked, reward)
    with pytest.raises(ValueError, match="question 0 has no reward_prompt"):
        decode(policy, [replace(asked[0], reward_prompt=None)], {**reward, "goals": reward["goals"][:1]})
    with pytest.raises(ValueError, match=r"prompt of question 5 has \d+ tokens, and the policy reads 128"):
        decode(policy, [replace(asked[0], index=5, policy_prompt="no " * 130)], guidance=NOTHING)
    assert decode(policy, [], guidance=NOTHING) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: settings(n_samples=0), "n_samples: expected 1 or more"),
        (lambda: settings(max_tokens=0), "max_tokens"),
        (lambda: settings(draw_temperature=0.0), "temperature 0 draws equal steps"),
        (lambda: settings(draw_temperature=-1.0), "temperature: expected 0 or more"),
        (lambda: settings(top_p=0.0), "top_p"),
        (lambda: settings(guidance=NOTHING, reject_sample=True), "reject_sample"),
        (lambda: Guidance(goal=float("nan")), "finite weights"),
        (lambda: Guidance(goal_weights=(0.0,)), "goal_weights"),
        (lambda: Guidance(goal_weights=()), "goal_weights"),
        (lambda: Guidance(reduction="max"), "reduction"),
    ],
)
def test_bad_settings_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
