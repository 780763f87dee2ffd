"""Answers from a pool of samples, early decisions of a vote, and the choice of a filter threshold."""

from __future__ import annotations

from itertools import product

import pytest

from decoding.records import Decoded, Question
from decoding.voting import (
    POOL_FIGURES,
    DrawnSample,
    Pool,
    answer_filtered,
    answer_pool,
    can_change,
    choose_on_validation,
    fewest_to_decide,
)

QUESTION = Question(3, "how many", "p", "r", "5")


def sample(number, answer, reward=None, cosine_sim=None, right=None, **ended):
    ids = tuple(range(4))
    partial = None if reward is None else [0.0, 0.0, 0.0, reward]
    scores = {"reward": reward, "partial_rewards": partial, "cosine_sim": cosine_sim}
    response = Decoded(f"text {number}", ids, True, sample=number, **scores)
    return DrawnSample(response, answer, answer == "5" if right is None else right, reward_tokens=4, **ended)


def pool_of(*samples, question=QUESTION, **changes):
    return Pool(question, list(samples), **changes)


def test_every_method_of_one_pool():
    """Votes 4: two, 5: two, 7: one, none: one; the best reward has no answer."""
    pool = pool_of(
        sample(0, "4", -1.0, [0, 0, 0, -0.8]),
        sample(1, "4", 0.0, [0, 0, 0, 0.9]),
        sample(2, "5", 0.4, [0, 0, 0, 0.1]),
        sample(3, "5.0", -0.5, [0, 0, 0, -0.2], right=True),
        sample(4, "7", 2.0, [0, 0, 0, 1.0]),
        sample(5, None, 3.0, [0, 0, 0, 0.2]),
        seconds=2.0,
    )
    answered = {one.method: one for one in answer_pool(pool, seed=9)}
    assert list(answered) == list(POOL_FIGURES)
    chosen = {name: [one.sample for one in answered[name].responses] for name in answered}
    assert chosen["sample"] == [0, 1, 2, 3, 4, 5]
    assert (answered["sample"].answer, answered["sample"].is_correct) == (None, None)
    # Majority: 4 and 5 tie; mean similarities 0.05 and -0.05, so 4, of whose samples 1 is the more similar one.
    # Weights: sigmoid 0.2689 + 0.5 = 0.769 of 4, 0.5987 + 0.3775 = 0.976 of 5, 0.881 of 7.
    # By goal: 0.95 + 0.1 of 4, 0.55 + 0.4 of 5, 1.0 of 7.
    wanted = {
        "majority": ([1], "4", False, 2),
        "weighted": ([2], "5", True, 0.97623),
        "weighted_goal": ([1], "4", False, 1.05),
        "best_of_n": ([5], None, False, 3.0),
        "best_of_n_goal": ([4], "7", False, 1.0),
    }
    for name, (samples, answer, right, score) in wanted.items():
        one = answered[name]
        assert (chosen[name], one.answer, one.is_correct) == (samples, answer, right)
        assert one.responses[0].score == pytest.approx(score, abs=1e-5)
    for one in answered.values():
        assert (one.seed, one.policy_tokens, one.reward_tokens, one.seconds) == (9, 24, 24, 2.0)
        assert one.question is QUESTION


def test_a_vote_without_scores_or_answers():
    (tied,) = answer_pool(pool_of(sample(0, "5"), sample(1, "4")), 0, ["majority"])
    assert (tied.answer, tied.is_correct) == ("4", False)  # the text that sorts first
    (nobody,) = answer_pool(pool_of(sample(0, None), sample(1, None)), 0, ["majority"])
    assert (nobody.answer, nobody.is_correct, nobody.responses[0].sample) == (None, False, 0)


@pytest.mark.parametrize("method", [name for name in POOL_FIGURES if name != "sample"])
def test_a_pool_of_one_is_its_answer(method):
    for answer in ("5", "4"):
        (one,) = answer_pool(pool_of(sample(0, answer, -2.0, [0.1, 0.1, 0.1, -0.9])), 0, [method])
        assert (one.answer, one.is_correct) == (answer, answer == "5")


def test_what_cannot_be_judged_is_neither_right_nor_wrong():
    question = Question(0, "how many", "p", "r")
    unknown = [sample(n, "5", 1.0 * n, right=None) for n in range(2)]
    unknown = [DrawnSample(one.response, one.answer, None) for one in unknown]
    for one in answer_pool(pool_of(*unknown, question=question), 0, ["majority", "best_of_n"]):
        assert (one.answer, one.is_correct) == ("5", None)
    filtered = answer_filtered(pool_of(*unknown, question=question), 0, {})
    assert (filtered.answer, filtered.is_correct) == ("5", None)


def test_scores_that_lack_and_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="lacks the score"):
        answer_pool(pool_of(sample(0, "5", 1.0), sample(1, "5")), 0, ["best_of_n"])
    with pytest.raises(ValueError, match="expected methods of sample, .*'vote'"):
        answer_pool(pool_of(sample(0, "5")), 0, ["vote"])


def test_stopped_and_dropped_samples_do_not_vote():
    """Two of 4 and two of 5 end, one of each below the threshold; 5 is the more similar of those that are left."""
    pool = pool_of(
        sample(0, "4", cosine_sim=[0.5, 0.5, 0.5, 0.1], below=3),
        sample(1, None, cosine_sim=[0.1], below=0, end="goal"),
        sample(2, "4", cosine_sim=[0.5, 0.5, 0.5, 0.5]),
        sample(3, "5.0", cosine_sim=[0.1, 0.5, 0.5, 0.5], below=0),
        sample(4, "5", cosine_sim=[0.5, 0.5, 0.5, 0.6], end="length"),
        sample(5, None, cosine_sim=[0.5], end="decided"),
    )
    one = answer_filtered(pool, 0, {"threshold": 0.2})
    assert (one.method, one.answer, one.is_correct) == ("filtered_vote", "5", True)
    assert {
        name: one.details[name] for name in ("threshold", "samples", "stopped", "dropped", "decided", "fallback")
    } == {
        "threshold": 0.2,
        "samples": 6,
        "stopped": 1,
        "dropped": 3,
        "decided": 1,
        "fallback": False,
    }
    assert [(step["end"], step["below"], step["votes"]) for step in one.trace] == [
        ("finished", 3, False),
        ("goal", 0, False),
        ("finished", None, True),
        ("finished", 0, False),
        ("length", None, True),
        ("decided", None, False),
    ]
    everyone = answer_filtered(pool_of(*pool.samples, sample(6, "4", cosine_sim=[0, 0, 0, 0.1]), fallback=True), 0, {})
    assert (everyone.answer, everyone.details["fallback"]) == ("4", True)


def test_an_early_decision_is_one_that_no_further_vote_changes():
    """All ways in which up to 4 more completions answer with one of 3 answers, a new one, or none."""
    checked = 0
    for votes in product(range(5), repeat=3):
        for unfinished in range(5):
            first = max(votes)
            leaders = [answer for answer in range(3) if votes[answer] == first > 0]
            changes = False
            for more in product(range(5), repeat=unfinished):  # 3 = another answer, 4 = none
                final = [*votes, 0]
                for answer in more:
                    if answer < 4:
                        final[answer] += 1
                winners = [answer for answer in range(4) if final[answer] == max(final) > 0]
                changes |= winners != leaders
            assert can_change(votes, unfinished) == changes, (votes, unfinished)
            if changes:
                enough = (
                    more
                    for more in range(1, unfinished + 1)
                    if not can_change([first + more, *sorted(votes)[:-1]], unfinished - more)
                )
                assert fewest_to_decide(votes, unfinished) == next(enough)
            checked += changes
    assert checked > 100
    assert not can_change([], 0) and can_change([], 1)


def test_a_threshold_is_chosen_that_saves_most_at_no_loss():
    """The wrong sample of each question falls low at its second token; the right ones of question 0 at their third."""
    low, high = [0.9, 0.1, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]
    other = Question(4, "how many more", "p", "r", "5")
    pools = [
        pool_of(*(sample(n, "5", cosine_sim=[0.9, 0.9, 0.4, 0.9]) for n in range(2)), sample(2, "4", cosine_sim=low)),
        pool_of(sample(0, "4", cosine_sim=low), sample(1, "5", cosine_sim=high), question=other),
    ]
    report = choose_on_validation(pools)
    # Unfiltered: 5 wins question 0, ties question 1 at similarity 0.9 each: 4 sorts first. Filtered above 0.1 both are
    # right; above 0.4 question 0 falls back and saves nothing.
    assert (report.unfiltered_accuracy, report.accuracy, report.fallbacks) == (0.5, 1.0, 0)
    assert 0.1 < report.threshold <= 0.4 and report.tokens_saved == pytest.approx(4 / 20)
    assert choose_on_validation(pools, warmup_tokens=4).threshold is None
    for bad in ([], [pool_of(sample(0, "5"))]):
        with pytest.raises(ValueError, match="goal similarities"):
            choose_on_validation(bad)


def test_the_command_votes_both_ways_and_compares(monkeypatch, capsys):
    generate = pytest.importorskip("decoding.generate")
    from decoding import compare, filtered_vote

    calls = []
    monkeypatch.setattr(generate, "run", lambda config: calls.append(config) or (None if config.dry_run else "table"))
    monkeypatch.setattr(compare, "run", calls.append)
    filtered_vote.main(["--threshold", "0.2", "--output_dir", "out"])
    assert calls[0].methods == ["majority", "filtered_vote"] and calls[0].threshold == 0.2
    assert calls[1].output_dir == ["out"] and len(calls) == 2
    filtered_vote.main(["--threshold", "0.2", "--dry_run"])
    assert len(calls) == 3
