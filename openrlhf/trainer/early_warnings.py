"""Early signs that a reinforcement-learning run goes wrong, read from its logged metrics.

Pure functions of plain numbers. A history is a list of steps, oldest first, each a dict from metric name to number; a
metric that is absent, None or NaN at a step is passed over there. `SIGNS` is the whole list of what is looked for. The
thresholds are rules of thumb, not measurements: docs/rl.md says where each comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

History = Sequence[Mapping[str, float | None]]
Figures = dict[str, float]


@dataclass(frozen=True)
class Thresholds:
    """When to warn. A mean is over the last `window` steps that have the metric, a start over the first `window`."""

    window: int = 5  # steps; nothing is compared with the start before 2 windows have passed
    kl_limit: float = 0.5  # nats per token, the mean
    kl_floor: float = 0.05  # nats per token; growth below it is no run-away
    kl_growth: float = 2.0  # factor from one window to the next, twice in a row
    length_factor: float = 2.0  # mean response length over its start, or the other way round
    entropy_share: float = 0.2  # of the entropy at the start
    gold_points: int = 3  # evaluations that a gold mean is over
    gold_drop: float = 0.02  # units of the gold reward, below its best mean
    gold_errors: float = 4.0  # standard errors of a difference of two gold means, which the drop must exceed too
    repeated_share: float = 0.3  # of n-grams, the mean
    repeated_rise: float = 0.1  # of n-grams, above the start
    equal_share: float = 0.8  # of groups, the mean
    reward_std: float = 1e-6  # reward units over a rollout, the mean
    unscored_share: float = 0.05  # of responses, the mean
    truncated_share: float = 0.3  # of responses, the mean
    clip_fraction: float = 0.3  # of tokens, the mean
    reward_clipped_share: float = 0.1  # of responses, the mean

    def __post_init__(self) -> None:
        for threshold in fields(self):
            value = getattr(self, threshold.name)
            if not 0 < value < math.inf:
                raise ValueError(f"threshold {threshold.name} must be above 0, got {value}")


@dataclass(frozen=True)
class EarlyWarning:
    """One sign, seen at one step."""

    name: str  # of `SIGNS`
    step: int  # as logged: the metric 'step' where it is there, else the place in the history from 0
    figures: Figures  # what it was seen in
    sentence: str  # for a person
    advice: str  # what to try


@dataclass(frozen=True)
class Sign:
    """How one sign is seen and told."""

    find: Callable[[History, Thresholds], Figures | None]  # the figures where the sign is there, else None
    metrics: tuple[str, ...]  # that it reads, the most telling first
    sentence: str  # a format string of the figures
    advice: str


def repeated_ngram_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of a response that have been there before: 1 - distinct / all; 0 with fewer than two.

    Raises:
        ValueError: n below 1.
    Source: Welleck et al. 2019, arXiv 1908.04319 (seq-rep-n).
    """
    if n < 1:
        raise ValueError(f"n-grams need n of 1 or more, got {n}")
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def current_warnings(history: History, thresholds: Thresholds | None = None) -> list[EarlyWarning]:
    """The signs that are there after the last step of the history; none for an empty one."""
    if not history:
        return []
    thresholds = thresholds or Thresholds()
    step = history[-1].get("step")
    step = len(history) - 1 if step is None else int(step)
    found = []
    for name, sign in SIGNS.items():
        figures = sign.find(history, thresholds)
        if figures is not None:
            found.append(EarlyWarning(name, step, figures, sign.sentence.format(**figures), sign.advice))
    return found


def new_warnings(history: History, thresholds: Thresholds | None = None) -> list[EarlyWarning]:
    """The signs that are there after the last step and were not one step before: what to log at this step."""
    before = {warning.name for warning in current_warnings(history[:-1], thresholds)}
    return [warning for warning in current_warnings(history, thresholds) if warning.name not in before]


def all_warnings(history: History, thresholds: Thresholds | None = None) -> list[EarlyWarning]:
    """Every warning at the step where it began, for a report."""
    found, before = [], set()
    for end in range(1, len(history) + 1):
        now = current_warnings(history[:end], thresholds)
        found += [warning for warning in now if warning.name not in before]
        before = {warning.name for warning in now}
    return found


def logged_metrics(warning: EarlyWarning) -> dict[str, float]:
    """How a warning stands in the metrics of a run."""
    return {warning.name: 1, **{f"{warning.name}/{name}": value for name, value in warning.figures.items()}}


def read_warnings(step: int, metrics: Mapping[str, float | None]) -> list[EarlyWarning]:
    """The warnings in a line of metrics, as `logged_metrics` writes them; a figure that was not finite is NaN."""
    found = []
    for name, sign in SIGNS.items():
        if metrics.get(name) is not None:
            start = f"{name}/"
            figures = {
                key.removeprefix(start): math.nan if value is None else value
                for key, value in metrics.items()
                if key.startswith(start)
            }
            found.append(EarlyWarning(name, step, figures, sign.sentence.format(**figures), sign.advice))
    return found


def _series(history: History, metric: str) -> list[float]:
    values = [step.get(metric) for step in history]
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _start_and_now(history: History, metric: str, window: int) -> tuple[float, float] | None:
    """Means of the first and the last window; None before both are full and apart."""
    values = _series(history, metric)
    return (_mean(values[:window]), _mean(values[-window:])) if len(values) >= 2 * window else None


def _kl_runaway(history: History, limits: Thresholds) -> Figures | None:
    values, window = _series(history, "kl"), limits.window
    if len(values) < window:
        return None
    now = _mean(values[-window:])
    before = [_mean(values[-k * window : -(k - 1) * window]) for k in (2, 3) if len(values) >= k * window]
    figures = {"kl": now, "before": before[0] if before else values[0]}
    if now >= limits.kl_limit:
        return figures
    if len(before) < 2 or now < limits.kl_floor:
        return None
    doubled_twice = all(
        late >= limits.kl_growth * max(early, 0.0) for late, early in zip([now, before[0]], before, strict=True)
    )
    return figures if doubled_twice and before[0] > 0 else None


def _length_drift(history: History, limits: Thresholds) -> Figures | None:
    means = _start_and_now(history, "response_length", limits.window)
    if means is None or min(means) <= 0:
        return None
    start, now = means
    drifted = max(now / start, start / now) >= limits.length_factor
    return {"start": start, "length": now} if drifted else None


def _entropy_collapse(history: History, limits: Thresholds) -> Figures | None:
    means = _start_and_now(history, "entropy", limits.window)
    if means is None or means[0] <= 0:
        return None
    start, now = means
    return {"start": start, "entropy": now} if now <= limits.entropy_share * start else None


def _gold_falls(history: History, limits: Thresholds) -> Figures | None:
    """The mean gold reward of the last evaluations against its best, and the reward trained on at the same places."""
    points = []
    for place, step in enumerate(history):
        rewards = _series(history[max(0, place + 1 - limits.window) : place + 1], "reward")
        if rewards and _series([step], "gold_reward"):
            points.append((float(step["gold_reward"]), _mean(rewards)))
    count = limits.gold_points
    means = [
        tuple(_mean(column) for column in zip(*points[end - count : end], strict=True))
        for end in range(count, len(points) + 1)
    ]
    earlier = means[: max(0, len(means) - count)]  # of other evaluations than the last ones
    if not earlier:
        return None
    (best, reward_then), (gold, reward) = max(earlier), means[-1]
    # Noise of one evaluation, from the changes between neighbours, which hold it twice and a slow trend hardly at all.
    noise = _mean([(late[0] - early[0]) ** 2 / 2 for early, late in zip(points, points[1:], strict=False)]) ** 0.5
    drop = max(limits.gold_drop, limits.gold_errors * noise * (2 / count) ** 0.5)
    fell = best - gold >= drop and reward > reward_then
    return {"best": best, "gold": gold, "reward_then": reward_then, "reward": reward} if fell else None


def _repeats(history: History, limits: Thresholds) -> Figures | None:
    means = _start_and_now(history, "repeated_share", limits.window)
    if means is None:
        return None
    start, now = means
    rose = now >= limits.repeated_share and now >= start + limits.repeated_rise
    return {"start": start, "share": now} if rose else None


def _equal_rewards(history: History, limits: Thresholds) -> Figures | None:
    """All groups of a rollout, or all its responses where prompts have one each."""
    shares, spreads = _series(history, "equal_group_share"), _series(history, "reward_std")
    share = _mean(shares[-limits.window :]) if len(shares) >= limits.window else 0.0
    flat = len(spreads) >= limits.window and _mean(spreads[-limits.window :]) <= limits.reward_std
    return {"share": 1.0 if flat else share} if flat or share >= limits.equal_share else None


def _share_above(metric: str, threshold: str) -> Callable[[History, Thresholds], Figures | None]:
    """A sign that is there when the mean of a share over the last window reaches its threshold."""

    def find(history: History, limits: Thresholds) -> Figures | None:
        values = _series(history, metric)
        if len(values) < limits.window:
            return None
        share = _mean(values[-limits.window :])
        return {"share": share} if share >= getattr(limits, threshold) else None

    return find


SIGNS = {
    "kl_runaway": Sign(
        _kl_runaway,
        ("kl",),
        "The policy moves away from the reference fast: KL {kl:.3g} nats per token, {before:.3g} before.",
        "raise --init_kl_coef or set --kl_target; lower --actor_learning_rate; look for samples that only the reward "
        "likes",
    ),
    "length_drift": Sign(
        _length_drift,
        ("response_length",),
        "Responses have gone from {start:.0f} to {length:.0f} tokens.",
        "check whether longer or shorter ones are better or only score better; add a length penalty "
        "(--overlong_buffer_len) or --reward_clip_range; dr_grpo has no length bias",
    ),
    "entropy_collapse": Sign(
        _entropy_collapse,
        ("entropy",),
        "The policy has nearly stopped exploring: entropy {entropy:.3g} nats per token, {start:.3g} at the start.",
        "add --entropy_loss_coef; raise the upper end of --eps_clip_low_high; lower --actor_learning_rate; raise "
        "--temperature",
    ),
    "gold_falls": Sign(
        _gold_falls,
        ("gold_reward", "reward"),
        "The reward rises ({reward_then:.3g} to {reward:.3g}) while the held-out gold reward falls ({best:.3g} to "
        "{gold:.3g}): the reward is being exploited.",
        "stop and take the checkpoint with the best gold reward; raise --init_kl_coef; train a better reward model on "
        "responses of this policy",
    ),
    "repetition": Sign(
        _repeats,
        ("repeated_share",),
        "Responses repeat themselves: {share:.0%} of their n-grams have been there before, {start:.0%} at the start.",
        "look at samples; raise --init_kl_coef; give repetition a negative reward",
    ),
    "equal_rewards": Sign(
        _equal_rewards,
        ("equal_group_share", "reward_std"),
        "Nothing to learn from: in {share:.0%} of the prompts all responses score the same.",
        "use --dynamic_filtering; take easier or harder prompts; raise --n_samples_per_prompt; look at one call of the "
        "reward with --dry_run_rewards",
    ),
    "unscored": Sign(
        _share_above("unscored_share", "unscored_share"),
        ("unscored_share",),
        "{share:.1%} of the responses got no score and are left out.",
        "check the reward function or server for None, NaN and time limits; --dry_run_rewards shows one call",
    ),
    "truncated": Sign(
        _share_above("truncated_share", "truncated_share"),
        ("truncated_share",),
        "{share:.0%} of the responses are cut at the length limit, and scored without their end.",
        "raise --generate_max_len; add --overlong_buffer_len or --stop_properly_penalty_coef",
    ),
    "ratio_clipped": Sign(
        _share_above("clip_fraction", "clip_fraction"),
        ("clip_fraction",),
        "Updates leave the trusted range: the ratio of {share:.0%} of the tokens is clipped.",
        "lower --actor_learning_rate; fewer --max_epochs over a rollout; a larger --train_batch_size",
    ),
    "reward_clipped": Sign(
        _share_above("reward_clipped_share", "reward_clipped_share"),
        ("reward_clipped_share",),
        "{share:.0%} of the scores lie outside of the clip range, where better and worse look alike.",
        "widen --reward_clip_range or normalise the reward (--normalize_reward)",
    ),
}
