"""How training lays out its rows: packed where the model can, tokens that sequences share computed once."""

from __future__ import annotations

import logging

import torch

from openrlhf.datasets.preference import PreferenceData
from openrlhf.datasets.response_groups import ResponseGroups
from openrlhf.models.packing_support import forbids_packing, probe
from openrlhf.models.reward_model import RewardModel
from openrlhf.trainer.engine import Engine
from openrlhf.trainer.reward_trainer import Packing

logger = logging.getLogger(__name__)


def forbids_sharing(model: RewardModel, dropout: float) -> str | None:
    """Why a token of several sequences must be computed for each of them; None: it need not be.

    Args:
        dropout: of LoRA updates.
    """
    if model.with_aux_loss:
        return "the load-balancing loss of the experts counts every token"
    if dropout > 0:
        return "dropout would fall on shared tokens once"
    return None


def choose_packing(
    choice: str,
    engine: Engine,
    model: RewardModel,
    data: PreferenceData | ResponseGroups,
    eval_data: PreferenceData | ResponseGroups | None,
    dropout: float,
    bf16: bool,
    by_tokens: bool,
) -> Packing | None:
    """How rows are laid out; one line says so, or why not. Collective.

    Args:
        choice: ``auto`` shares tokens where that can be, ``on`` does or raises, ``off`` never.
        engine: holds the prepared model. model: the same without the engine's wrapper.
        dropout: of LoRA updates. bf16: computed in bfloat16.
        by_tokens: passes are filled by tokens: padding is left out even where nothing is shared.
    Raises:
        ValueError: ``on`` where it cannot be.
    """
    if choice == "off" and not by_tokens:
        return None
    longest = max(int(part.lengths.max()) for part in (data, eval_data) if part)
    no_packing = forbids_packing(model, longest)
    if no_packing is None:
        engine.model.eval()
        dtype = torch.bfloat16 if bf16 else model.network.dtype
        with engine.autocast():
            no_packing = probe(engine.model, model, dtype, engine.device, longest)
        no_packing = engine.broadcast(no_packing)  # processes must not differ, whatever their devices round
    no_sharing = no_packing or forbids_sharing(model, dropout)
    if no_sharing is not None and choice == "on":
        raise ValueError(f"--prefix_sharing on: {type(model.network).__name__}: {no_sharing}; use auto or off")
    if engine.is_main:
        saved = 1 - data.row_tokens.sum() / data.plain_tokens.sum()
        if no_packing is not None:
            logger.info("padded rows that share nothing: %s", no_packing)
        elif no_sharing is not None or choice == "off":
            logger.info("rows without padding share nothing: %s", no_sharing or "--prefix_sharing off")
        else:
            logger.info("rows without padding share prompts, which saves %.0f%% of the tokens", 100 * saved)
    if no_packing is not None:
        return None
    return Packing(model.pack, share=no_sharing is None and choice != "off")
