"""Make a saved folder readable by transformers 4 as well: same tokens, same rewards, or an error.

Transformers 5 keeps everything on rotary positions in one dictionary, ``rope_parameters``. Transformers 4 does not know
that key and scores with its defaults, without a word. So the older keys are written beside it. Transformers 5 reads
them too and comes to the same parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# Keys that transformers 4 expects under another name, by model type.
ROPE_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
OTHER_NAMES = {"qwen3_moe": {"num_local_experts": "num_experts"}}

# Transformers 4 refuses an empty rope_scaling (KeyError); transformers 5 takes rope_parameters then.
REFUSED: dict[str, Any] = {}


def finish_export(folder: Path, dtype: torch.dtype) -> None:
    """Complete config.json and tokenizer_config.json of a folder that transformers 5 saved. In place.

    Args:
        folder: with config.json, tokenizer_config.json and the weights.
        dtype: of the stored weights; transformers writes that of the live ones.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.update(older_keys(config))
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    file = folder / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(older_tokenizer(tokenizer, (folder / "tokenizer.json").is_file()), indent=2) + "\n")
    mode = file.stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)  # safetensors writes them readable by the owner alone


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of transformers 4 that say what a configuration of transformers 5 says; empty where it needs none.

    Nothing is written where the parameters differ by layer type: the reward models of transformers 4 have no such
    family, and refuse the model type.
    """
    names = OTHER_NAMES.get(config.get("model_type"), {})
    older = {name: config[key] for key, name in names.items() if key in config}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        return older
    names = ROPE_NAMES.get(config.get("model_type"), {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            older[names.get(key, key)] = rope[key]
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = older_rope_scaling(config)
    if rope.get("rope_type") == "longrope" and "original_max_position_embeddings" in rope:
        older["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return older


def older_rope_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """The ``rope_scaling`` of transformers 4 that equals ``rope_parameters``, or ``REFUSED`` where there is none.

    Source: modeling_rope_utils.py of transformers 4.51 and 5.24. For ``yarn``, and for ``longrope`` without an
    attention factor, 4.51 puts the ratio of the two lengths in place of a given factor.
    """
    scaling = {k: v for k, v in config["rope_parameters"].items() if k not in ("rope_theta", "partial_rotary_factor")}
    kind, factor = scaling["rope_type"], scaling.get("factor")
    longest = config.get("max_position_embeddings")
    original = scaling.get("original_max_position_embeddings", longest)
    factor_is_ratio = factor is None or (longest is not None and factor == longest / original)

    if kind in ("linear", "dynamic", "llama3"):
        return scaling
    if kind == "yarn" and scaling.pop("truncate", True):
        if original == longest:  # without the length 4.51 takes the factor as it is
            scaling.pop("original_max_position_embeddings", None)
            return scaling
        if factor_is_ratio:
            return {**scaling, "factor": longest / original}
    if kind == "longrope" and (factor_is_ratio or scaling.get("attention_factor") is not None):
        if config.get("model_type") != "phi3":
            return scaling
        if scaling.get("attention_factor") is None:  # Phi-3 accepts these three keys and no other
            return {"type": kind, "short_factor": scaling["short_factor"], "long_factor": scaling["long_factor"]}
    return REFUSED


def older_tokenizer(config: dict[str, Any], is_fast: bool) -> dict[str, Any]:
    """A tokenizer_config.json with which every version reads the same tokens from tokenizer.json.

    The classes of transformers 4 for Llama, Code Llama and Gemma put a BOS in front whatever tokenizer.json says; the
    general class takes that file as it is. A list of extra special tokens has an older name.
    """
    config = dict(config)
    if is_fast:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config
