"""One optimizer step over responses (and texts), shared by the processes of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from openrlhf.datasets.sft import SFTBatch, SFTData
from openrlhf.models.losses import LossOutput
from openrlhf.models.policy_losses import count_units, entropy_loss, kl_loss, ppo_policy_loss, ppo_value_loss
from openrlhf.trainer.advantages import Advantages
from openrlhf.trainer.engine import Engine
from openrlhf.trainer.plan import even_batches
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.rollout import Rollout
from openrlhf.trainer.rollout_logprobs import token_logprobs, token_values
from openrlhf.trainer.sft_trainer import answer_loss

Terms = list[tuple[str, float, LossOutput]]  # name in the log, weight in the loss, loss


@dataclass(frozen=True)
class UpdateBatch:
    """B responses of one forward pass; None: without critic or reference."""

    input_ids: Tensor  # (B, S) int64
    attention_mask: Tensor  # (B, S) bool, True on real tokens
    action_mask: Tensor  # (B, S) bool, True on the policy's own tokens
    loss_mask: Tensor  # (B, S) bool, True on those of them that count
    advantages: Tensor  # (B, S) float32, reward units
    returns: Tensor | None  # (B, S) float32, reward units
    logprobs: Tensor  # (B, S) float32 of the policy that sampled, nats
    reference_logprobs: Tensor | None  # (B, S) float32, nats
    values: Tensor | None  # (B, S) float32 of the critic when the responses were sampled, reward units

    def to(self, device: torch.device | str) -> UpdateBatch:
        """A copy on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return UpdateBatch(**{name: None if x is None else x.to(device) for name, x in tensors.items()})


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of an optimizer step."""

    share: Tensor | float  # of the units of the whole update, over all processes; 0: this process only takes part
    terms: Callable[[], Terms]


def response_passes(
    engine: Engine,
    rollout: Rollout,
    advantages: Advantages,
    rows: Tensor,
    batch_size: int,
    terms: Callable[[UpdateBatch], Terms],
    reduction: str = "token",
) -> list[Pass]:
    """This process's passes over the responses of an update that have a token in the loss; [] where none has.

    Args:
        rows: (n,) int64, responses of the update over all processes. batch_size: responses of a pass.
        terms: losses of a batch, means over what `count_units` counts with this reduction.
    """
    learning = rows[advantages.loss_mask[rows].any(dim=1)]
    if not len(learning):
        return []

    def run(batch: UpdateBatch) -> Terms:
        return terms(batch.to(engine.device))

    units, passes = count_units(advantages.loss_mask[learning], reduction), []
    for places in even_batches(rollout.lengths[learning].numpy(), batch_size, engine.rank, engine.world_size):
        counts = len(places) > 0
        chosen = learning[torch.from_numpy(places)] if counts else learning[:1]
        batch = _update_batch(rollout.select(chosen), advantages, chosen, counts)
        passes.append(Pass(count_units(batch.loss_mask, reduction) / units, partial(run, batch)))
    return passes


def _update_batch(part: Rollout, advantages: Advantages, rows: Tensor, counts: bool) -> UpdateBatch:
    width = part.input_ids.shape[1]
    mask = advantages.loss_mask[rows, :width]
    return UpdateBatch(
        part.input_ids,
        part.attention_mask,
        part.action_mask,
        mask if counts else torch.zeros_like(mask),
        advantages.advantages[rows, :width],
        None if part.values is None else advantages.returns[rows, :width],
        part.logprobs,
        part.reference_logprobs,
        part.values,
    )


def policy_terms(engine: Engine, settings: PPOSettings, kl_coef: float, batch: UpdateBatch) -> Terms:
    """Losses of the policy on some responses: the clipped objective, KL divergence and entropy where asked for."""
    reduce = {"reduction": settings.reduction, "normaliser": settings.normaliser}
    with engine.autocast():
        logprobs, entropy = token_logprobs(
            engine.model, batch.input_ids, batch.attention_mask, batch.action_mask, settings.temperature,
            with_entropy=settings.entropy_coef > 0,
        )  # fmt: skip
    policy = ppo_policy_loss(
        logprobs, batch.logprobs, batch.advantages, batch.loss_mask, settings.eps_low, settings.eps_high,
        settings.dual_clip, ratio=settings.ratio, **reduce,
    )  # fmt: skip
    terms = [("policy_loss", 1.0, policy)]
    if settings.kl_in_loss and kl_coef > 0:
        divergence = kl_loss(logprobs, batch.reference_logprobs, batch.loss_mask, settings.kl_kind, **reduce)
        terms.append(("kl_loss", kl_coef, divergence))
    if entropy is not None:
        terms.append(("entropy_loss", settings.entropy_coef, entropy_loss(entropy, batch.loss_mask, **reduce)))
    return terms


def critic_terms(engine: Engine, value_clip: float | None, batch: UpdateBatch) -> Terms:
    """The loss of the critic on some responses."""
    with engine.autocast():
        values = token_values(engine.model, batch.input_ids, batch.attention_mask, batch.action_mask)
    return [("value_loss", 1.0, ppo_value_loss(values, batch.values, batch.returns, batch.loss_mask, value_clip))]


def text_passes(
    engine: Engine, texts: SFTData, indices: np.ndarray, batch_size: int, coef: float, pad_id: int
) -> list[Pass]:
    """This process's passes over texts of an update: coef times the mean cross-entropy of all their answer tokens.

    Args:
        indices: (n,) texts of the update over all processes. batch_size: texts of a pass.
    """
    tokens = texts.response_lengths[indices]

    def terms(batch: SFTBatch) -> Terms:
        return [("ptx_loss", coef, LossOutput(answer_loss(engine, batch), {}))]

    passes = []
    for places in even_batches(texts.lengths[indices], batch_size, engine.rank, engine.world_size):
        chosen = indices[places] if len(places) else indices[:1]
        share = float(tokens[places].sum() / tokens.sum())
        passes.append(Pass(share, partial(terms, texts.collate(chosen.tolist(), pad_id))))
    return passes


def optimizer_step(engine: Engine, passes: list[Pass], part: str, sums: dict[str, float]) -> None:
    """Forward, backward and step; collective, with the same number of passes in every process.

    Args:
        part: what is trained, "policy" or "critic"; the metrics of a pass's first term are kept as ``part/name``.
        sums: of losses, metrics, gradient norms and rates over steps and processes; added to.
    """
    names: list[str] = []
    values: list[Tensor] = []
    engine.model.train()
    engine.begin(len(passes))
    for one in passes:
        terms = one.terms()
        engine.backward(sum(weight * term.loss for _, weight, term in terms) * one.share)
        told = {name: term.loss.detach() * one.share for name, _, term in terms}
        told |= {f"{part}/{name}": value for name, value in terms[0][2].metrics.items()}
        names += told
        values += told.values()
    result = engine.step()
    # The one place where the step waits for the device.
    table = engine.gather(torch.stack(values).float()).reshape(engine.world_size, len(names)).tolist()
    for row in table:
        for name, value in zip(names, row, strict=True):
            sums[name] += value
    prefix = "" if part == "policy" else f"{part}_"
    sums[f"{part}_steps"] += 1.0
    sums[f"{prefix}learning_rate"] += result.learning_rate
    if result.grad_norm is not None:
        sums[f"{prefix}grad_norm"] += result.grad_norm.item()


def update_means(sums: dict[str, float]) -> dict[str, float]:
    """Losses, gradient norms and learning rates per optimizer step; what was counted in tokens per token."""
    figures = {}
    for part, steps in (("policy", "policy_steps"), ("critic", "critic_steps")):
        count, tokens = sums.get(steps, 0.0), sums.get(f"{part}/tokens", 0.0)
        own = {
            "policy": ("policy_loss", "kl_loss", "entropy_loss", "ptx_loss", "grad_norm", "learning_rate"),
            "critic": ("value_loss", "critic_grad_norm", "critic_learning_rate"),
        }[part]
        figures |= {name: sums[name] / count for name in own if name in sums and count}
        renamed = {"clipped": "clip_fraction"} if part == "policy" else {}
        figures |= {
            renamed.get(name.split("/")[1], name.split("/")[1]): value / tokens
            for name, value in sums.items()
            if name.startswith(f"{part}/") and name != f"{part}/tokens" and tokens
        }
    return figures
