"""The engine over a policy: concurrent requests, one batch, errors and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from openrlhf.models.generation import Generation, PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.models.sampling import SamplingParams
from tests.tiny import save_tiny_causal_lm


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return Policy.from_pretrained(save_tiny_causal_lm(tmp_path_factory.mktemp("policy")))


def generate_all(engine, requests):
    async def run():
        return await asyncio.gather(*(engine.generate(ids, params) for ids, params in requests))

    return asyncio.run(run())


def test_requests_that_come_together_run_as_one_batch(policy: Policy):
    """Each answer is that of its own request: prompt, limit and seed as if it had come alone."""
    requests = [([5 + n] * (n + 1), SamplingParams(max_tokens=2 + n % 3, seed=n)) for n in range(12)]
    engine = PolicyEngine(policy, gather_s=0.05)
    answers = generate_all(engine, requests)
    assert (engine.requests, engine.batches) == (12, 1)
    for (ids, params), answer in zip(requests, answers, strict=True):
        [alone] = policy.sample([ids], [params])
        assert answer.token_ids == alone.ids
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert answer.text == policy.tokenizer.decode(alone.ids)
    assert {answer.finish_reason for answer in answers} <= {"length", "stop"}


def test_requests_that_come_later_form_another_batch(policy: Policy):
    engine = PolicyEngine(policy)

    async def two_turns(n):
        first = await engine.generate([5, 6, n + 7], SamplingParams(max_tokens=3, seed=n))
        return await engine.generate([5, 6, n + 7, *first.token_ids], SamplingParams(max_tokens=3, seed=n))

    async def run():
        return await asyncio.gather(*map(two_turns, range(6)))

    assert len(asyncio.run(run())) == 6
    assert engine.requests == 12 and engine.batches <= 4
    assert len(asyncio.run(run())) == 6  # a second event loop finds nothing left of the first


def test_text_with_and_without_special_tokens(policy: Policy):
    """With this seed the random model comes upon EOS before its limit."""
    engine = PolicyEngine(policy)
    with_specials, without = generate_all(
        engine, [([5], SamplingParams(max_tokens=400, seed=4, skip_special_tokens=skip)) for skip in (False, True)]
    )
    assert with_specials.token_ids == without.token_ids and with_specials.token_ids[-1] == 2  # EOS
    assert with_specials.finish_reason == "stop"
    assert with_specials.text.endswith("</s>") and "</s>" not in without.text


def test_outputs_have_the_shape_of_vllm():
    [output] = Generation([7, 8, 7], [-1.0, -2.0, -3.0], "aba", "stop").outputs
    assert output.token_ids == [7, 8, 7] and output.text == "aba" and output.finish_reason == "stop"
    assert [table[token].logprob for token, table in zip([7, 8, 7], output.logprobs, strict=True)] == [-1, -2, -3]


def test_an_error_reaches_every_caller_of_its_batch_and_the_engine_lives(policy: Policy):
    engine = PolicyEngine(policy, gather_s=0.02)
    real = policy.sample

    def fail(*_):
        raise RuntimeError("out of memory")

    async def run():
        policy.sample = fail
        failed = await asyncio.gather(
            *(engine.generate([5], SamplingParams(max_tokens=1)) for _ in range(3)), return_exceptions=True
        )
        del policy.sample
        return failed, await engine.generate([5], SamplingParams(max_tokens=1))

    failed, answer = asyncio.run(run())
    assert [str(error) for error in failed] == ["out of memory"] * 3
    assert len(answer.token_ids) == 1 and policy.sample == real


def test_a_cancelled_request_is_left_out(policy: Policy):
    engine = PolicyEngine(policy, gather_s=0.05)

    async def run():
        tasks = [asyncio.ensure_future(engine.generate([5], SamplingParams(max_tokens=2, seed=n))) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(run())
    assert isinstance(answers[1], asyncio.CancelledError) and engine.requests == 2


def test_bad_requests(policy: Policy):
    engine = PolicyEngine(policy)
    for ids, params in (([], SamplingParams(max_tokens=1)), ([5], SamplingParams())):
        with pytest.raises(ValueError, match="at least one prompt token and max_tokens"):
            generate_all(engine, [(ids, params)])
    with pytest.raises(ValueError, match="top_p"):
        generate_all(engine, [([5], SamplingParams(max_tokens=1, top_p=2.0))])


def test_requests_without_a_seed_differ_and_come_back_in_a_new_engine(policy: Policy):
    requests = [([5, 6], SamplingParams(max_tokens=4)) for _ in range(6)]
    first, again = (generate_all(PolicyEngine(policy, seed=9), requests) for _ in range(2))
    assert first == again
    assert len({tuple(answer.token_ids) for answer in first}) == 6
