"""Choices that do not go together, and the KL controllers."""

import subprocess
import sys

import pytest

from openrlhf.trainer.advantages import ESTIMATORS
from openrlhf.trainer.kl_control import AdaptiveKLController, FixedKLController, make_kl_controller
from openrlhf.trainer.rl_options import ESTIMATOR_TRAITS, check_algorithm


def test_names_are_those_of_the_table():
    assert set(ESTIMATOR_TRAITS) == set(ESTIMATORS)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_ordinary_choices_pass(name):
    check_algorithm(
        name,
        4,
        gae_lambda=0.95 if name == "gae" else 1.0,
        kl_coef=0.01,
        kl_target=0.1,
        reward_clip_range=(-10.0, 10.0),
        filter_range=(0.0, 1.0),
        longest_response=128,
        overlong_buffer=32,
        stop_properly_coef=0.5,
        eps_low=0.2,
        eps_high=0.28,
        dual_clip=3.0,
        reduction="constant",
        normaliser=128,
    )
    if name in ("gae", "reinforce"):
        check_algorithm(name, 1, gamma=0.99)


@pytest.mark.parametrize(
    ("estimator", "samples", "settings", "message"),
    [
        ("rlo", 4, {}, r"unknown advantage estimator 'rlo' \(did you mean 'rloo'\?\); known: gae, reinforce, rloo"),
        ("gae", 0, {}, "samples_per_prompt must be 1 or more, got 0"),
        ("rloo", 1, {}, r"'rloo' compares .* \(--n_samples_per_prompt\) to 2 or more, or choose reinforce or gae"),
        ("reinforce_baseline", 1, {}, "raise samples_per_prompt"),
        ("group_norm", 1, {}, "raise samples_per_prompt"),
        ("dr_grpo", 1, {}, "raise samples_per_prompt"),
        ("gae", 1, {"filter_range": (0.0, 1.0)}, "dynamic filtering compares responses to one prompt"),
        ("gae", 2, {"filter_range": (1.0, 0.0)}, "dynamic filtering's range must be two numbers, the lower one first"),
        ("gae", 1, {"gamma": 1.1}, r"gamma must lie in \(0, 1\], got 1.1"),
        ("gae", 1, {"gae_lambda": -0.1}, r"gae_lambda must lie in \[0, 1\]"),
        ("rloo", 2, {"gamma": 0.9}, "knows no discount, got gamma=0.9; pass 1"),
        ("reinforce", 1, {"gae_lambda": 0.9}, "no effect without a critic"),
        ("gae", 1, {"kl_coef": -1.0}, "KL coefficient must be 0 or more, got -1.0"),
        ("gae", 1, {"kl_coef": float("nan")}, "KL coefficient must be 0 or more, got nan"),
        ("gae", 1, {"kl_target": 0.1}, "starting coefficient above 0, got 0"),
        ("gae", 1, {"kl_coef": 0.1, "kl_target": 0.0}, "KL target and horizon must be above 0"),
        ("gae", 1, {"reward_clip_range": (10.0, -10.0)}, "reward_clip_range must be two numbers"),
        ("gae", 1, {"overlong_buffer": 10}, "needs to know the longest response"),
        ("gae", 1, {"overlong_buffer": 10, "longest_response": 9}, "1 to 9 tokens .* got 10"),
        ("gae", 1, {"overlong_buffer": 1, "longest_response": 9, "overlong_factor": -1.0}, "or more, got -1.0"),
        ("gae", 1, {"stop_properly_coef": 2.0}, "got 2.0"),
        ("gae", 1, {"ratio": "sequence"}, "needs reduction 'sequence'"),
        ("gae", 1, {"dual_clip": 0.5}, "above 1"),
    ],
)  # fmt: skip
def test_impossible_choices_are_refused(estimator, samples, settings, message):
    with pytest.raises(ValueError, match=message):
        check_algorithm(estimator, samples, **settings)


def test_choices_are_checked_without_torch():
    program = (
        "import sys; from openrlhf.trainer.rl_options import check_algorithm; check_algorithm('gae', 1); "
        "import openrlhf.trainer.early_warnings; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_adaptive_controller_by_hand():
    """Target 2, horizon 100, 10 samples a rollout, so K = 0.1; coefficient 0.5 at first.

    KL 2.2: error 0.1, factor 1.01 -> 0.505. KL 10: error cut to 0.2, factor 1.02 -> 0.5151. KL 2: 0.5151 stays.
    KL -1: cut to -0.2, factor 0.98 -> 0.504798. KL 1.8 with 50 samples: error -0.1, factor 0.95 -> 0.4795581.
    """
    controller = AdaptiveKLController(0.5, target=2.0, horizon=100)
    seen = []
    for kl, samples in ((2.2, 10), (10.0, 10), (2.0, 10), (-1.0, 10), (1.8, 50)):
        controller.update(kl, samples)
        seen.append(controller.coef)
    assert seen == pytest.approx([0.505, 0.5151, 0.5151, 0.504798, 0.4795581], abs=1e-12)


def test_adaptive_controller_finds_the_coefficient_of_its_target():
    """Where the KL is 1 / coefficient, the target 4 is met at 0.25, from either side."""
    for start in (0.01, 5.0):
        controller = AdaptiveKLController(start, target=4.0, horizon=100)
        for _ in range(1000):
            controller.update(1 / controller.coef, samples=10)
        assert controller.coef == pytest.approx(0.25, rel=1e-3)


def test_controllers_resume():
    one = make_kl_controller(0.5, 2.0, 100)
    one.update(5.0, 10)
    other = make_kl_controller(0.5, 2.0, 100)
    other.load_state_dict(one.state_dict())
    for controller in (one, other):
        controller.update(1.0, 10)
    assert one.coef == other.coef != 0.5
    assert isinstance(one, AdaptiveKLController)


def test_fixed_controller_stays():
    controller = make_kl_controller(0.01)
    controller.update(100.0, 1000)
    assert (
        type(controller) is FixedKLController and controller.coef == 0.01 and controller.state_dict() == {"coef": 0.01}
    )
    with pytest.raises(ValueError, match="got -1.0"):
        controller.load_state_dict({"coef": -1.0})


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_broken_kl_does_not_move_the_coefficient(kl):
    controller = AdaptiveKLController(0.5, 2.0, 100)
    with pytest.raises(ValueError, match=f"rollout is {kl}"):
        controller.update(kl, 10)
    with pytest.raises(ValueError, match="raise the horizon"):
        controller.update(1.0, 500)
    assert controller.coef == 0.5
