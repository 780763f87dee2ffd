"""Names and ranges of the losses of a policy; without torch, so that flags are refused before it is imported."""

from __future__ import annotations

KL_KINDS = ("k1", "k2", "k3")
RATIOS = ("token", "sequence")  # PPO, GSPO
TOKEN_REDUCTIONS = ("token", "sequence", "constant")  # DAPO and OpenRLHF, GRPO, Dr. GRPO


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_reduction(reduction: str, normaliser: float | None = None) -> None:
    """Refuse an unknown reduction, and a constant one without its constant (or the other way round).

    Args:
        reduction: one of `TOKEN_REDUCTIONS`.
        normaliser: tokens; what 'constant' divides the sum of a response by.
    """
    check_choice("reduction", reduction, TOKEN_REDUCTIONS)
    if reduction == "constant" and not (normaliser is not None and normaliser > 0):
        raise ValueError(
            "reduction 'constant' divides by a fixed number of tokens and needs a normaliser above 0 "
            f"(the longest response allowed), got {normaliser}"
        )
    if reduction != "constant" and normaliser is not None:
        raise ValueError(f"a normaliser of {normaliser} has no effect on reduction {reduction!r}; leave it out")


def check_policy_loss(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    reduction: str = "token",
    normaliser: float | None = None,
    ratio: str = "token",
) -> None:
    """Refuse settings with which the clipped policy loss makes no sense; arguments as of `ppo_policy_loss`."""
    check_reduction(reduction, normaliser)
    check_choice("ratio", ratio, RATIOS)
    if not (0 < eps_low <= 1 and 0 < eps_high < float("inf")):
        raise ValueError(f"eps_low must lie in (0, 1] and eps_high above 0, got {eps_low} and {eps_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (3 in the paper), got {dual_clip}")
    if ratio == "sequence" and reduction != "sequence":
        raise ValueError(
            f"one ratio for a whole response (GSPO) needs reduction 'sequence', got {reduction!r}: "
            "a mean over tokens would weigh responses by their length"
        )
