"""Log-probabilities, entropies and values of the policy's tokens.

Those of the policy and of the reference are computed for a rollout and in the training step by one function, so the
ratio of a first update is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from openrlhf.models.functional import entropy_from_logits, logprobs_from_logits, position_ids_from_mask
from openrlhf.trainer.rollout import Rollout

Autocast = Callable[[], AbstractContextManager]


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    action_mask: Tensor,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the policy's tokens under softmax(logits / temperature), and the entropy there.

    Args:
        model: causal language model of transformers.
        input_ids: (B, S) int64. attention_mask, action_mask: (B, S) bool.
    Returns:
        Each (B, S) float32, nats, 0 outside of the action mask; the entropy is None unless asked for.
    """
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=position_ids_from_mask(attention_mask),
        use_cache=False,
    ).logits
    logprobs = logprobs_from_logits(logits, input_ids, action_mask, temperature)
    return logprobs, entropy_from_logits(logits, action_mask, temperature) if with_entropy else None


def token_values(critic: nn.Module, input_ids: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
    """The critic at the state that each of the policy's tokens is drawn in, that is after the token before it.

    Args:
        critic: `openrlhf.models.reward_model.RewardModel`.
    Returns:
        (B, S) float32, reward units; 0 outside of the action mask.
    """
    values = critic(input_ids, attention_mask).values
    return nn.functional.pad(values[:, :-1], (1, 0)).masked_fill(~action_mask, 0.0)


@torch.no_grad()
def with_logprobs(
    rollout: Rollout,
    policy: nn.Module,
    reference: nn.Module | None,
    critic: nn.Module | None,
    *,
    temperature: float,
    batch_size: int,
    autocast: Autocast = nullcontext,
) -> Rollout:
    """The rollout with log-probabilities and entropies of the policy, and where given those of a reference and values.

    Args:
        batch_size: rows of a forward pass; rows of like length share one.
    """
    device, parts = next(policy.parameters()).device, []
    for rows in rollout.lengths.argsort(stable=True).split(batch_size):
        part = rollout.select(rows)
        ids, mask, actions = (x.to(device) for x in (part.input_ids, part.attention_mask, part.action_mask))
        with autocast():
            logprobs, entropy = token_logprobs(policy, ids, mask, actions, temperature, with_entropy=True)
            found = {"logprobs": logprobs, "entropy": entropy}
            if reference is not None:
                found["reference_logprobs"], _ = token_logprobs(reference, ids, mask, actions, temperature)
            if critic is not None:
                found["values"] = token_values(critic, ids, mask, actions)
        parts.append((rows, {name: tensor.float().cpu() for name, tensor in found.items()}))
    return rollout.with_computed(parts)
