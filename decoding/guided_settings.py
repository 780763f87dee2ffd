"""What is asked of guided decoding; checked without loading a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from decoding.beam import REDUCTIONS, BeamSettings
from decoding.boundary import StepBoundary

PARTS = ("goal", "reward", "self_evaluation", "random")


@dataclass(frozen=True)
class Guidance:
    """Weights of the parts of the guidance, which is their weighted mean (`beam.weighted_mean`).

    0 leaves a part out, a negative weight steers away; with all at 0 the language model is left alone.

    Raises:
        ValueError: a weight that is no finite number, weights of goals that are missing or all 0, or the reduction.
    """

    goal: float = 1.0  # of the goal similarity, from -1 to 1
    reward: float = 0.0  # of sigmoid(reward) at the last token of the step
    self_evaluation: float = 0.0  # of the probability that the policy calls the response right so far
    random: float = 0.0  # of uniform random numbers from 0 to 1, a control
    goal_weights: tuple[float, ...] = (1.0,)  # of each goal within the goal similarity
    reduction: str = "last"  # a step's goal similarity: "min", "mean" or "last" of its tokens

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) for weight in (*self.weights.values(), *self.goal_weights)):
            raise ValueError(f"expected finite weights of the guidance, got {self}")
        if self.goal and not any(self.goal_weights):
            raise ValueError(f"goal_weights: expected a weight other than 0, got {self.goal_weights}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected one of {REDUCTIONS}, got {self.reduction!r}")

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every part by its name."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def reads_reward_model(self) -> bool:
        """Whether a reward model is needed while decoding."""
        return bool(self.goal or self.reward)


@dataclass(frozen=True)
class GuidedSettings:
    """How responses are drawn, what steers them, and how much is computed at a time.

    Raises:
        ValueError: a value outside its range, with the name of the field.
    """

    beam: BeamSettings = field(default_factory=BeamSettings)
    guidance: Guidance = field(default_factory=Guidance)
    boundary: StepBoundary = field(default_factory=lambda: StepBoundary.parse("newline"))  # what ends a step
    n_samples: int = 4  # steps drawn from every beam; the prompt gives beam_size times as many
    temperature: float = 1.0  # of the policy; 0 takes the most likely token and needs one beam and one sample
    top_p: float = 1.0
    max_tokens: int = 256  # of a response
    max_step_tokens: int = 64
    stops: tuple[str, ...] = ()
    rows: int = 64  # responses that grow in one forward pass; changes no result
    cache_tokens: int = 1 << 16  # of all responses kept at a time, prompts included; changes no result

    def __post_init__(self) -> None:
        for name in ("n_samples", "max_tokens", "max_step_tokens", "rows", "cache_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a share from (0, 1], got {self.top_p}")
        if self.beam.reject_sample and not any(self.guidance.weights.values()):
            raise ValueError("reject_sample drops candidates by their guidance, and nothing guides")
        if self.temperature == 0 and (self.n_samples > 1 or self.beam.beam_size > 1):
            raise ValueError(
                f"temperature 0 draws equal steps: expected n_samples 1 and beam_size 1, got {self.n_samples} and "
                f"{self.beam.beam_size}"
            )

    @property
    def width(self) -> int:
        """Responses of one question that grow at a time."""
        return self.beam.beam_size * self.n_samples
