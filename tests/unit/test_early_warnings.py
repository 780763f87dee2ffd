"""Early warnings on made-up histories: both sides of every threshold, and silence on healthy ones."""

import math
import random
import string

import pytest

from openrlhf.trainer.early_warnings import (
    SIGNS,
    Thresholds,
    all_warnings,
    current_warnings,
    new_warnings,
    repeated_ngram_share,
)


def history(**series):
    """Steps of a history from one list for each metric."""
    return [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]


def names(steps, thresholds=None):
    return [warning.name for warning in current_warnings(steps, thresholds)]


def healthy(steps=60, seed=0):
    """A run as it should be, with noise."""
    generator = random.Random(seed)
    rows = []
    for step in range(steps):
        progress = step / steps
        rows.append(
            {
                "step": step + 1,
                "kl": 0.08 * progress + generator.gauss(0, 0.002),
                "response_length": 100 + 40 * progress + generator.gauss(0, 5),
                "entropy": 1.2 - 0.6 * progress + generator.gauss(0, 0.05),
                "reward": 0.5 + 0.3 * progress + generator.gauss(0, 0.03),
                "gold_reward": 0.5 + 0.2 * progress + generator.gauss(0, 0.02) if step % 3 == 0 else None,
                "repeated_share": 0.08 + generator.gauss(0, 0.01),
                "equal_group_share": 0.3 + 0.3 * progress,
                "reward_std": 0.45,
                "unscored_share": 0.0,
                "truncated_share": 0.02,
                "clip_fraction": 0.1 + generator.gauss(0, 0.02),
                "reward_clipped_share": 0.0,
            }
        )
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_no_warning_on_a_healthy_run(seed):
    assert all_warnings(healthy(seed=seed)) == []


# (sign, history with it, nearest history without it): each pair straddles a threshold.
FLAT, UP = [0.01] * 5, [0.02] * 5
CASES = [
    ("kl_runaway", {"kl": FLAT + [0.5] * 5}, {"kl": FLAT + [0.4999] * 5}),
    ("kl_runaway", {"kl": [0.5] * 5}, {"kl": [0.5] * 4}),
    ("kl_runaway", {"kl": [0.02] * 5 + [0.04] * 5 + [0.08] * 5}, {"kl": [0.02] * 5 + [0.04] * 5 + [0.079] * 5}),
    ("kl_runaway", {"kl": [0.0125] * 5 + [0.025] * 5 + [0.05] * 5}, {"kl": [0.0124] * 5 + [0.0248] * 5 + [0.0496] * 5}),
    ("kl_runaway", {"kl": [0.02] * 5 + [0.04] * 5 + [0.08] * 5}, {"kl": [0.021] * 5 + [0.04] * 5 + [0.08] * 5}),
    ("length_drift", {"response_length": [100] * 5 + [200] * 5}, {"response_length": [100] * 5 + [199] * 5}),
    ("length_drift", {"response_length": [100] * 5 + [50] * 5}, {"response_length": [100] * 5 + [51] * 5}),
    ("length_drift", {"response_length": [100] * 5 + [200] * 5}, {"response_length": [100] * 5 + [200] * 4}),
    ("entropy_collapse", {"entropy": [1.0] * 5 + [0.2] * 5}, {"entropy": [1.0] * 5 + [0.21] * 5}),
    ("repetition", {"repeated_share": [0.1] * 5 + [0.3] * 5}, {"repeated_share": [0.1] * 5 + [0.29] * 5}),
    ("repetition", {"repeated_share": [0.25] * 5 + [0.36] * 5}, {"repeated_share": [0.27] * 5 + [0.36] * 5}),
    ("equal_rewards", {"equal_group_share": [0.8] * 5}, {"equal_group_share": [0.79] * 5}),
    ("equal_rewards", {"reward_std": [0.0] * 5}, {"reward_std": [0.0] * 4 + [0.01]}),
    ("unscored", {"unscored_share": [0.0, 0.0, 0.0, 0.0, 0.26]}, {"unscored_share": [0.0, 0.0, 0.0, 0.0, 0.24]}),
    ("truncated", {"truncated_share": [0.31] * 5}, {"truncated_share": [0.29] * 5}),
    ("ratio_clipped", {"clip_fraction": [0.31] * 5}, {"clip_fraction": [0.29] * 5}),
    ("reward_clipped", {"reward_clipped_share": [0.11] * 5}, {"reward_clipped_share": [0.09] * 5}),
]


@pytest.mark.parametrize(("name", "with_sign", "without"), CASES)
def test_both_sides_of_every_threshold(name, with_sign, without):
    assert names(history(**with_sign)) == [name]
    assert names(history(**without)) == []


def gold_run(last_gold, rewards_end=0.9):
    """Gold 0.6, 0.7, 0.7, 0.7, then three evaluations of `last_gold`; the reward rises in a straight line."""
    gold = [0.6, 0.7, 0.7, 0.7, last_gold, last_gold, last_gold]
    return history(gold_reward=gold, reward=[0.5 + (rewards_end - 0.5) * k / 6 for k in range(7)])


def test_gold_falls_while_the_reward_rises():
    """Changes 0.1, 0, 0, d, 0, 0: one evaluation's noise sqrt((0.01 + d^2) / 12), times 4 sqrt(2/3) the least drop.

    With d = -0.15: noise 0.05204, least drop 0.16997 > 0.15. With d = -0.22: noise 0.06977, least drop 0.22785 > 0.22.
    With d = -0.30: 0.09129, 0.29814 < 0.30.
    """
    assert names(gold_run(0.55)) == [] == names(gold_run(0.48))
    [warning] = current_warnings(gold_run(0.40))
    assert warning.name == "gold_falls"
    assert warning.figures["best"] == pytest.approx(0.7) and warning.figures["gold"] == pytest.approx(0.4)
    assert names(gold_run(0.40, rewards_end=0.3)) == []  # both fall: no exploitation
    steady = Thresholds(gold_errors=1e-9)
    assert names(gold_run(0.6799), steady) == ["gold_falls"] and names(gold_run(0.6801), steady) == []


def overoptimised(seed, noise, fall):
    """40 evaluations: gold rises for 15, rests, and from the 20th on falls by `fall` each; the reward always rises."""
    generator = random.Random(seed)
    gold = [0.55 + 0.01 * min(k, 15) - fall * max(0, k - 20) + generator.gauss(0, noise) for k in range(40)]
    return history(gold_reward=gold, reward=[0.5 + 0.01 * k + generator.gauss(0, 0.05) for k in range(40)])


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.04])
def test_noisy_gold_rewards(noise):
    """Hardly one of 60 runs without a fall warns; a fall of 0.01 an evaluation is hardly ever missed."""

    def warned(fall):
        return sum(
            "gold_falls" in {w.name for w in all_warnings(overoptimised(seed, noise, fall))} for seed in range(60)
        )

    assert warned(0.0) <= 2
    assert warned(0.01) >= 58


def test_gold_is_compared_at_its_own_evaluations():
    """Evaluations every fifth step; the steps between them have no gold reward."""
    rows = []
    for gold, reward in zip([0.6, 0.6, 0.6, 0.6, 0.3, 0.3, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], strict=True):
        rows += [{"reward": reward, "gold_reward": None}] * 4 + [{"reward": reward, "gold_reward": gold}]
    [warning] = current_warnings(rows)
    assert warning.name == "gold_falls"
    # gold means over the first three and the last three evaluations, rewards over the same steps
    expected = {"best": 0.6, "gold": 0.3, "reward_then": 0.3, "reward": 0.6}
    assert warning.figures == pytest.approx(expected)


def test_an_infinite_kl_is_a_run_away_and_nan_is_no_number():
    assert names(history(kl=[0.01] * 4 + [math.inf])) == ["kl_runaway"]
    assert names(history(kl=[0.01] * 9 + [math.nan])) == []


def test_absent_metrics_are_passed_over():
    assert current_warnings([]) == []
    assert names([{}] * 20) == []
    rows = history(truncated_share=[0.5] * 5)
    assert names([step for row in rows for step in (row, {"loss": 1.0}, {"truncated_share": None})]) == ["truncated"]


def test_a_warning_is_told_once_and_again_when_it_comes_back():
    shares = [0.0] * 5 + [0.6] * 6 + [0.0] * 6 + [0.6] * 6
    rows = [{"step": 10 * place, "truncated_share": share} for place, share in enumerate(shares)]
    told = all_warnings(rows)
    # mean over 5 of [0, 0, 0.6, 0.6, 0.6] is 0.36 >= 0.3: at the third high step of each stretch
    assert [(warning.name, warning.step) for warning in told] == [("truncated", 70), ("truncated", 190)]
    one_by_one = [warning for end in range(1, len(rows) + 1) for warning in new_warnings(rows[:end])]
    assert one_by_one == told


def test_every_sign_has_a_sentence_of_its_figures_and_advice():
    seen = {}
    for name, with_sign, _ in CASES:
        [seen[name]] = current_warnings(history(**with_sign))
    [seen["gold_falls"]] = current_warnings(gold_run(0.40))
    assert set(seen) == set(SIGNS)
    for name, warning in seen.items():
        wanted = {field for _, field, _, _ in string.Formatter().parse(SIGNS[name].sentence) if field}
        assert wanted == set(warning.figures) or name == "equal_rewards"
        assert "{" not in warning.sentence and len(warning.advice) > 20
    assert seen["length_drift"].sentence == "Responses have gone from 100 to 200 tokens."
    assert seen["truncated"].step == 4  # the place in the history where there is no step


def test_thresholds_can_be_set_and_are_checked():
    rows = history(truncated_share=[0.2] * 3)
    assert names(rows, Thresholds(window=3, truncated_share=0.2)) == ["truncated"]
    with pytest.raises(ValueError, match="threshold window must be above 0, got 0"):
        Thresholds(window=0)
    with pytest.raises(ValueError, match="threshold kl_limit must be above 0, got nan"):
        Thresholds(kl_limit=math.nan)


def test_repeated_ngram_share_by_hand():
    """1 2 1 2 1 2: the bigrams 12 21 12 21 12 hold two distinct ones, 1 - 2/5; fourgrams 1212 2121 1212, 1 - 2/3."""
    assert repeated_ngram_share([1, 2, 1, 2, 1, 2], n=2) == pytest.approx(0.6)
    assert repeated_ngram_share([1, 2, 1, 2, 1, 2]) == pytest.approx(1 / 3)
    assert repeated_ngram_share(range(50)) == 0.0
    assert repeated_ngram_share([7] * 50) == pytest.approx(1 - 1 / 47)
    assert repeated_ngram_share([]) == repeated_ngram_share([1, 2, 3]) == repeated_ngram_share([1, 2, 3, 4]) == 0.0
    with pytest.raises(ValueError, match="got 0"):
        repeated_ngram_share([1], n=0)
