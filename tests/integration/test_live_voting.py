"""Live filtered voting with real models: equal to plain voting, scores as the evaluation gives them."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from decoding.pools import PoolSettings, draw_pools
from decoding.records import Question
from decoding.sampling import PolicySession
from decoding.scoring import PrefixScorer
from decoding.voting import answer_filtered, answer_pool, choose_on_validation, make_ballot
from openrlhf.datasets.tokenize import encode_prompts, encode_responses
from openrlhf.evaluation.filtering import filter_by_goal, filter_outcomes
from openrlhf.evaluation.goal_state import goal_similarities
from openrlhf.evaluation.scoring import EncodedCompletion, score_encoded
from openrlhf.models.policy import Policy
from tests.tiny import save_tiny_causal_lm, tiny_reward_model, tiny_tokenizer

QUESTIONS = [
    Question(n, text, f"{text} the answer is", f"question: {text}", "1")
    for n, text in enumerate(["how many apples", "what does she buy or sell", "yes", "plus or minus the apples", "no"])
]


def grade(question: Question, text: str):
    """The answer is whether the text is of even length; texts that end in a blank have none."""
    answer = None if text[-1:].isspace() else str(len(text) % 2)
    return answer, answer == question.expected_answer


class Models:
    """A policy of random weights that ends a response at any of thirty tokens, and a reward model."""

    def __init__(self, folder, same_tokens: bool) -> None:
        tokenizer = tiny_tokenizer()
        self.policy = Policy(AutoModelForCausalLM.from_pretrained(save_tiny_causal_lm(folder)), tokenizer)
        self.policy.stop_ids = [2, *range(40, 70)]
        self.tokenizer = tokenizer if same_tokens else tiny_tokenizer(add_bos=True)
        self.same_tokens = same_tokens
        self.reward = tiny_reward_model()
        self.goal = np.random.default_rng(0).normal(size=(1, self.reward.hidden_size)).astype(np.float32)

    def draw(self, seed: int = 0, scored: bool = True, **settings):
        settings = PoolSettings(**{"samples": 4, "batch_rows": 9, "check_every": 3, **settings})
        prompts = encode_prompts(self.policy.tokenizer, [question.policy_prompt for question in QUESTIONS])
        pools = draw_pools(
            QUESTIONS,
            prompts,
            lambda prompts: PolicySession(self.policy, prompts, temperature=1.0, top_p=0.95, max_tokens=14),
            self.open_scorer if scored else None,
            grade,
            settings,
            seed,
        )
        return sorted(pools, key=lambda pool: pool.question.index)

    def open_scorer(self, prompts) -> PrefixScorer:
        return PrefixScorer(self.reward, self.tokenizer, [self.goal], prompts, self.same_tokens)


@pytest.fixture(scope="module", params=[True, False], ids=["same tokens", "other tokens"])
def models(request, tmp_path_factory):
    return Models(tmp_path_factory.mktemp("policy"), request.param)


def ids_of(pools):
    return [[one.response.ids for one in pool.samples] for pool in pools]


def test_scores_are_those_of_the_evaluation(models):
    pools = models.draw()
    assert len({len(ids) for group in ids_of(pools) for ids in group}) > 5
    prompts = encode_prompts(models.tokenizer, [question.reward_prompt for question in QUESTIONS])
    rows = [(prompts[pool.question.index], one.response) for pool in pools for one in pool.samples]
    if models.same_tokens:
        responses = [[*[token for token in one.ids if token != 2], 2] for _, one in rows]
    else:
        responses = encode_responses(models.tokenizer, [one.text for _, one in rows])
    encoded = [EncodedCompletion(prompt, ids, False) for (prompt, _), ids in zip(rows, responses, strict=True)]
    scored = score_encoded(models.reward, encoded, progress=False)
    for (_, mine), wanted in zip(rows, scored, strict=True):
        assert mine.partial_rewards == pytest.approx(wanted.partial_rewards, abs=1e-5)
        assert mine.reward == mine.partial_rewards[-1] and len(mine.cosine_sim) == len(mine.partial_rewards)


def test_a_threshold_that_stops_nothing_gives_plain_voting(models):
    plain = models.draw()
    bare = models.draw(scored=False, check_every=5)
    assert ids_of(bare) == ids_of(plain) != ids_of(models.draw(seed=1))
    for batch_rows in (1, 6, 40):
        live = models.draw(threshold=-1.0, batch_rows=batch_rows)
        assert ids_of(live) == ids_of(plain)
        for one, other in zip(live, plain, strict=True):
            vote, (majority,) = answer_filtered(one, 0, {}), answer_pool(other, 0, ["majority"])
            assert (vote.answer, vote.is_correct) == (majority.answer, majority.is_correct)
            if models.same_tokens:
                assert vote.reward_tokens == majority.reward_tokens


@pytest.mark.parametrize("models", [True], indirect=True, ids=["same tokens"])
@pytest.mark.parametrize("every", [1, 4])
def test_live_filtering_keeps_what_filtering_whole_samples_keeps(models, every):
    plain = models.draw()
    lowest = sorted(min(one.response.cosine_sim) for pool in plain for one in pool.samples)
    for place in (3, 8, 15, 20):  # between two of the 20 lowest similarities, or above them all
        threshold = (lowest[place - 1] + lowest[place]) / 2 if place < len(lowest) else 1.0
        live = models.draw(threshold=threshold, check_every=every)
        outcomes = filter_outcomes([make_ballot(pool) for pool in plain], [threshold])
        assert sum(not one.kept for pool in live for one in pool.samples) == min(place, len(lowest))
        for number, (pool, whole) in enumerate(zip(live, plain, strict=True)):
            assert answer_filtered(pool, 0, {}).is_correct == outcomes.right[number, 0]
            assert pool.fallback == outcomes.fallback[number, 0]
            for one, other in zip(pool.samples, whole.samples, strict=True):
                kept, used = filter_by_goal(other.response.cosine_sim, threshold)
                drawn = len(other.response.ids) if kept or pool.fallback else -(-used // every) * every
                assert one.response.ids == other.response.ids[:drawn]


def test_a_question_that_loses_all_samples_is_answered_by_all(models):
    plain = models.draw()
    live = models.draw(threshold=1.0, check_every=2)
    assert ids_of(live) == ids_of(plain) and all(pool.fallback for pool in live)
    for one, other in zip(live, plain, strict=True):
        vote, (majority,) = answer_filtered(one, 0, {}), answer_pool(other, 0, ["majority"])
        assert vote.answer == majority.answer and vote.policy_tokens == majority.policy_tokens
        assert vote.reward_tokens >= majority.reward_tokens
        for mine, whole in zip(one.samples, other.samples, strict=True):
            assert mine.response.cosine_sim == pytest.approx(whole.response.cosine_sim, abs=1e-5)


def test_similarities_are_those_of_the_whole_sequence(models):
    import torch

    pool = models.draw()[1]
    (prompt,) = encode_prompts(models.tokenizer, [pool.question.reward_prompt])
    for one in pool.samples:
        ids = encode_responses(models.tokenizer, [one.response.text])[0]
        if models.same_tokens:
            ids = [*[token for token in one.response.ids if token != 2], 2]
        rows = torch.tensor([prompt + ids])
        with torch.no_grad():
            states = models.reward(rows, torch.ones_like(rows)).hidden_states[0, len(prompt) :]
        wanted = goal_similarities(states, torch.from_numpy(models.goal))[:, 0]
        assert one.response.cosine_sim == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_threshold_is_chosen_on_other_questions_and_used(models):
    report = choose_on_validation(models.draw(seed=5))
    assert report.questions == len(QUESTIONS) and report.accuracy >= report.unfiltered_accuracy
    live = models.draw(threshold=report.threshold)
    assert len(live) == len(QUESTIONS)
    with pytest.raises(ValueError, match="goal similarities"):
        choose_on_validation(models.draw(scored=False))
