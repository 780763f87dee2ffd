"""The coefficient of the KL penalty: fixed, or steered towards a target."""

from __future__ import annotations

import math
from typing import Protocol

ERROR_CLIP = 0.2  # an update sees at most this share of the target as its error: Ziegler et al. 2019, section 2.2


class KLController(Protocol):
    """What the trainer needs of a coefficient."""

    coef: float

    def update(self, kl: float, samples: int) -> None:
        """Take note of the KL divergence of a rollout."""

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from `state_dict`."""


class FixedKLController:
    """A coefficient that stays.

    Args:
        coef: 0 or more.
    """

    def __init__(self, coef: float) -> None:
        self.coef = _checked_coef(coef)

    def update(self, kl: float, samples: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the coefficient."""
        self.coef = _checked_coef(state["coef"])


class AdaptiveKLController(FixedKLController):
    """A coefficient that grows while the KL divergence is above its target and shrinks while it is below.

        e = clip(kl / target - 1, -0.2, 0.2)        coef <- coef (1 + e samples / horizon)

    Args:
        coef: where it starts, above 0: a factor cannot move 0.
        target: KL divergence wanted, above 0, in the unit of what `update` is given (ours: nats per token, as
            OpenRLHF; the paper's 6 nats are of a whole response).
        horizon: samples; the coefficient moves by at most a fifth over so many.
    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with K_beta as samples / horizon as in its code and
        OpenRLHF's.
    """

    def __init__(self, coef: float, target: float, horizon: float = 10_000) -> None:
        super().__init__(coef)
        if coef == 0:
            raise ValueError("a KL target needs a starting coefficient above 0, got 0: it moves by factors")
        if not (0 < target < math.inf and 0 < horizon < math.inf):
            raise ValueError(f"KL target and horizon must be above 0, got {target} and {horizon}")
        self.target, self.horizon = target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Move the coefficient.

        Args:
            kl: mean KL divergence of a rollout, in the target's unit; an estimate may be negative.
            samples: responses in the rollout, over all processes.
        Raises:
            ValueError: kl is no finite number, or five horizons or more in one rollout.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL divergence of the rollout is {kl}; the policy or the reference is broken")
        if not samples * ERROR_CLIP < self.horizon:
            raise ValueError(
                f"{samples} samples a rollout could turn the KL coefficient negative at a horizon of {self.horizon}; "
                "raise the horizon"
            )
        error = min(max(kl / self.target - 1, -ERROR_CLIP), ERROR_CLIP)
        self.coef = _checked_coef(self.coef * (1 + error * samples / self.horizon))


def make_kl_controller(coef: float, target: float | None = None, horizon: float = 10_000) -> KLController:
    """A fixed coefficient without a target, an adaptive one with it."""
    return FixedKLController(coef) if target is None else AdaptiveKLController(coef, target, horizon)


def _checked_coef(coef: float) -> float:
    if not 0 <= coef < math.inf:
        raise ValueError(f"the KL coefficient must be 0 or more, got {coef}")
    return float(coef)
