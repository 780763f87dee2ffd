"""Whether the two sequences of a pair can share a row, and whether that pays."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from openrlhf.datasets.preference import PreferenceData
from openrlhf.models.packed import pack_pairs
from openrlhf.models.reward_model import RewardModel, RewardOutput
from openrlhf.trainer.engine import Engine

logger = logging.getLogger(__name__)

SAVING_THAT_PAYS = 0.05  # share of the counted work; below it masks and copies cost what is saved
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # relative, of the largest state; other dtypes round more
ROUGH_TOLERANCE = 3e-2


def window_of(config) -> int | None:
    """Tokens that the narrowest layer of limited view sees; None where every layer sees all."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    found = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    if getattr(text, "use_sliding_window", True) is False or (kinds and set(kinds) == {"full_attention"}):
        return None
    return min((int(size) for size in found if size), default=None)


def settings_that_forbid(model: RewardModel, longest: int, dropout: float) -> str | None:
    """Why packed rows would give other numbers than separate ones, as far as the configuration tells; None: nothing.

    Args:
        longest: tokens of the longest sequence. dropout: of LoRA updates.
    """
    attention = model.config._attn_implementation
    window, switch = window_of(model.config), model.switch_length
    if attention not in ("sdpa", "eager"):
        return f"{attention} takes no mask of its own for every token"
    if model.with_aux_loss:
        return "the load-balancing loss of the experts counts every token"
    if dropout > 0:
        return "dropout would fall on shared tokens once"
    if window is not None and window < longest:
        return f"a layer sees {window} tokens and the longest sequence has {longest}"
    if switch is not None and switch < longest:
        return f"rotary positions change for rows beyond {switch} tokens"
    return None


@torch.no_grad()
def probe(
    forward: Callable[..., RewardOutput], vocabulary: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare packed with separate rows on a few random tokens.

    Args:
        forward: a reward model, or the engine's wrapper of it; under ZeRO-3 every process must call this.
        dtype: of the model, for the tolerance.
    Returns:
        What is wrong; None when both agree.
    """
    lengths = [(6, 5, 9), (2, 7, 3), (0, 4, 4)]  # prompt, chosen, rejected
    generator = torch.Generator().manual_seed(0)
    draw = [[torch.randint(vocabulary, (n,), generator=generator) for n in row] for row in lengths]
    rows = [torch.cat([row[0], row[side]]) for side in (1, 2) for row in draw]
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool().to(device)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    try:
        separate, packed = forward(ids, mask), forward(ids, mask, pack_pairs(ids, mask))
    except Exception as error:  # models with masks of their own raise many unrelated types
        return f"{type(error).__name__}: {error}".splitlines()[0]
    size = separate.hidden_states[mask].abs().max()
    difference = ((separate.hidden_states - packed.hidden_states)[mask].abs().max() / size).item()
    tolerance = TOLERANCE.get(dtype, ROUGH_TOLERANCE)
    return None if difference <= tolerance else f"states of the same tokens differ by {difference:.1e}, relative"


def work_saved(parts: np.ndarray, hidden_size: int) -> float:
    """Share of the multiplications that packed rows save, without padding; below 0 where they cost more.

    A token costs 12 H^2 in the matrices of a layer and 2 H for each token of its row in attention, whose masked half is
    computed too.

    Args:
        parts: (N, 3) tokens of prompt, chosen and rejected response. hidden_size: H.
    """
    prompt, chosen, rejected = parts.astype(np.float64).T

    def work(tokens: np.ndarray) -> float:
        return float((tokens * (12 * hidden_size + 2 * tokens)).sum())

    return 1 - work(prompt + chosen + rejected) / (work(prompt + chosen) + work(prompt + rejected))


def decide_sharing(
    choice: str,
    engine: Engine,
    model: RewardModel,
    data: PreferenceData,
    eval_data: PreferenceData | None,
    dropout: float,
    bf16: bool,
) -> bool:
    """Whether pairs are computed in one row each; one line says so, or why not. Collective.

    Args:
        choice: ``auto`` shares where it can be and pays, ``on`` where it can be, ``off`` never.
        engine: holds the prepared model. model: the same without the engine's wrapper.
        dropout: of LoRA updates. bf16: computed in bfloat16.
    Raises:
        ValueError: ``on`` where it cannot be.
    """
    if choice == "off":
        return False
    longest = max(int(part.lengths.max()) for part in (data, eval_data) if part)
    reason = settings_that_forbid(model, longest, dropout)
    saved = work_saved(data.parts, model.hidden_size)
    if reason is None and choice == "auto" and saved < SAVING_THAT_PAYS:
        reason = f"it would save {saved:.0%} of the work"
    if reason is None:
        engine.model.eval()
        dtype = torch.bfloat16 if bf16 else model.network.dtype
        with engine.autocast():
            reason = probe(engine.model, model.config.get_text_config().vocab_size, dtype, engine.device)
    if reason is not None and choice == "on":
        raise ValueError(f"--prefix_sharing on: {type(model.network).__name__}: {reason}; use auto or off")
    if engine.is_main:
        told = f"pairs share prompts, which saves about {saved:.0%} of the work"
        logger.info(told if reason is None else f"pairs do not share prompts: {reason}")
    return reason is None
