"""Whether a model can compute packed rows: what its configuration tells, and a try on a few tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from openrlhf.models.reward_model import RewardModel, RewardOutput

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # relative, of the largest state; other dtypes round more
ROUGH_TOLERANCE = 3e-2
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "index_topk")  # names of limits to what is seen


def window_of(config) -> int | None:
    """Tokens that the narrowest layer of limited view sees; None where every layer sees all."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    found = [getattr(text, name, None) for name in WINDOWS]
    if getattr(text, "use_sliding_window", True) is False or (kinds and set(kinds) == {"full_attention"}):
        return None
    return min((int(size) for size in found if size), default=None)


def longest_packed(model: RewardModel) -> int | None:
    """Tokens of the longest row that may be packed, as far as the configuration tells; None: any row may."""
    limits = (window_of(model.config), model.switch_length)
    return min((limit for limit in limits if limit is not None), default=None)


def forbids_packing(model: RewardModel, longest: int) -> str | None:
    """Why packed rows would give other numbers than padded ones, as far as the configuration tells; None: nothing.

    Args:
        longest: tokens of the longest sequence.
    """
    window, switch = window_of(model.config), model.switch_length
    if window is not None and window < longest:
        return f"a layer sees {window} tokens and the longest sequence has {longest}"
    if switch is not None and switch < longest:
        return f"rotary positions change for rows beyond {switch} tokens"
    return None


@torch.no_grad()
def probe(
    forward: Callable[..., RewardOutput],
    model: RewardModel,
    dtype: torch.dtype,
    device: torch.device,
    longest: int = 0,
) -> str | None:
    """Compare packed with padded rows on random tokens: a few short pairs, then one as long as the data's longest.

    Args:
        forward: the reward model, or the engine's wrapper of it; under ZeRO-3 every process must call this.
        model: the same without the wrapper. dtype: it computes in, for the tolerance.
        longest: tokens of the longest sequence: what a layer does to long rows alone (a limited view, other positions)
            shows in no short one.
    Returns:
        What is wrong; None when both agree.
    """
    generator = torch.Generator().manual_seed(0)
    batches = [[(6, 5, 9), (2, 7, 3), (0, 4, 4), (9, 2, 3)]]  # prompt, chosen, rejected
    if longest > 15:
        batches.append([(longest // 2, longest - longest // 2, longest // 4)])
    try:
        pairs = [_random_pairs(lengths, model, generator) for lengths in batches]
        # All padded rows first: packed ones put another attention into the model, and that may change it.
        separate = [forward(ids.to(device), mask.to(device)).hidden_states for ids, mask in pairs]
        for (ids, mask), expected in zip(pairs, separate, strict=True):
            mask_there = mask.to(device)
            found = forward(ids.to(device), mask_there, model.pack(ids, mask)).hidden_states
            difference = (expected - found)[mask_there].abs().max() / expected[mask_there].abs().max()
            if not difference <= TOLERANCE.get(dtype, ROUGH_TOLERANCE):
                return f"states of the same tokens differ by {difference.item():.1e}, relative"
    except Exception as error:  # models with attention of their own raise many unrelated types
        return f"the model computes no packed rows ({type(error).__name__}: {error})".replace("\n", " ")
    return None


@torch.inference_mode()
def probe_last(model: RewardModel) -> str | None:
    """Compare last tokens that go through the last layer alone with the same in a whole pass, on a few random rows.

    Returns:
        What is wrong; None when both agree.
    """
    if not model.takes_masks:
        return "attention takes no mask"
    try:
        ids, mask = _random_pairs([(6, 5, 9), (0, 4, 1)], model, torch.Generator().manual_seed(0))
        packed, length = model.pack(ids, mask), mask.sum(1)
        states, _ = model.read_packed(packed)
        tokens = packed.tokens_at(length - 1)
        found, _ = model.read_packed(packed, model.pack_last(packed, length))
        difference = (states[tokens] - found).abs().max() / states.abs().max()
        if found.shape != states[tokens].shape or not difference <= TOLERANCE.get(states.dtype, ROUGH_TOLERANCE):
            return f"states of the same tokens differ by {difference.item():.1e}, relative"
    except Exception as error:  # layers that take other inputs raise many unrelated types
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return None


def _random_pairs(
    lengths: list[tuple[int, int, int]], model: RewardModel, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, S) random ids and mask of pairs with so many tokens of prompt, chosen and rejected."""
    vocabulary = model.config.get_text_config().vocab_size
    draw = [[torch.randint(vocabulary, (n,), generator=generator) for n in row] for row in lengths]
    rows = [torch.cat([row[0], row[side]]) for side in (1, 2) for row in draw]
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), mask
