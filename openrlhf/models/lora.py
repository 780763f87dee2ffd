"""LoRA adapters of a reward model: apply, save with the whole head, load, merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from openrlhf.models.pretrained import (
    fit_embedding,
    load_reward_model,
    load_tokenizer,
    save_reward_model,
    without_deepspeed,
)
from openrlhf.models.reward_model import SETTINGS_KEY, RewardModel, check_head, read_settings

SETTINGS_FILE = "goal_reward.json"


def apply_lora(
    model: RewardModel, rank: int, alpha: int, dropout: float = 0.0, target_modules: list[str] | None = None
) -> PeftModel:
    """Freeze the backbone and train low-rank updates of it and the whole head. Changes the model in place.

    Args:
        target_modules: names of linear layers; None or ["all-linear"] takes every linear layer but the head.
    Returns:
        The PEFT wrapper, needed to save the adapter.
    """
    targets = "all-linear" if not target_modules or target_modules == ["all-linear"] else target_modules
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        modules_to_save=["score"],
        task_type="SEQ_CLS",
    )
    return get_peft_model(model.network, config)


def save_adapter(
    folder: str | Path,
    peft_model: PeftModel,
    tokenizer,
    state_dict: dict[str, Tensor] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Write the adapter, the whole head and the tokenizer into an existing folder.

    Args:
        state_dict: whole weights by the PEFT model's names, when its own are sharded.
        settings: merged into what the model records of its training.
    Raises:
        ValueError: the adapter would hold no trained head.
    """
    folder = Path(folder)
    network = peft_model.base_model.model
    base = str(network.config._name_or_path)
    base = str(Path(base).resolve()) if Path(base).is_dir() else base  # a relative path holds in one folder only
    peft_model.peft_config["default"].base_model_name_or_path = base
    with without_deepspeed():
        peft_model.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)
    (folder / SETTINGS_FILE).write_text(
        json.dumps({**read_settings(network.config), **(settings or {})}, indent=2) + "\n"
    )
    tokenizer.save_pretrained(folder)
    _check_adapter_head(folder, network.config)


def _check_adapter_head(folder: Path, config) -> None:
    from safetensors.torch import load_file

    state = load_file(folder / "adapter_model.safetensors")
    head = {k[k.index("score.") :]: v for k, v in state.items() if "score." in k}
    kind = read_settings(config).get("value_head", "linear")
    check_head(head, config.get_text_config().hidden_size, kind, folder)


def load_merged(
    folder: str | Path, *, dtype: torch.dtype | None, attn_implementation: str | None = None
) -> RewardModel:
    """Load an adapter saved by :func:`save_adapter` onto its base and merge it into plain weights.

    Raises:
        ValueError: the adapter has no head.
    """
    folder = Path(folder)
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    settings_file = folder / SETTINGS_FILE
    settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(
        base,
        dtype=dtype,
        attn_implementation=attn_implementation,
        value_head=settings.get("value_head", "linear"),
        allow_missing_head=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    fit_embedding(model, tokenizer)
    _check_adapter_head(folder, model.config)
    merged = PeftModel.from_pretrained(model.network, str(folder)).merge_and_unload()
    setattr(merged.config, SETTINGS_KEY, {**read_settings(merged.config), **settings})
    return RewardModel(merged)


def merge_adapter(adapter: str | Path, output: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the merged model of an adapter as an ordinary checkpoint into an existing folder."""
    model = load_merged(adapter, dtype=dtype)
    save_reward_model(output, model, load_tokenizer(adapter), dtype=dtype)
