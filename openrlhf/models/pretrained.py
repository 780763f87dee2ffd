"""Reading and writing checkpoints and tokenizers, checked: nothing is silently initialised anew."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.models.export import finish_export
from openrlhf.models.reward_model import (
    SETTINGS_KEY,
    VALUE_HEADS,
    MLPHead,
    RewardModel,
    check_head,
    count_experts,
    disable_dropout,
    initialise_head,
    read_settings,
)


@contextmanager
def quiet_loading():
    """No loading report and bar of transformers: what is missing is checked and told by the caller."""
    from transformers.utils import logging as hf_logging

    level, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()


@contextmanager
def without_deepspeed():
    """Context of save_pretrained: accelerate imports DeepSpeed there, which takes seconds, only to ask whether it has
    wrapped the model. A process that has not imported it has no such model."""
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # Python's way to say that there is no such module
    try:
        yield
    finally:
        del sys.modules["deepspeed"]


def load_reward_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    attn_implementation: str | None = None,
    value_head: str | None = None,
    new_head: bool = False,
    allow_missing_head: bool = False,
    seed: int = 0,
    pad_token_id: int | None = None,
    with_aux_loss: bool = False,
    quantization_config: Any = None,
    gathered: Callable[[list[nn.Parameter]], AbstractContextManager] = lambda parameters: nullcontext(),
) -> RewardModel:
    """Load a reward model from a Hugging Face folder or hub id, or start one from a language model.

    Args:
        path: reward checkpoint, LoRA adapter of one, or language model.
        dtype: parameter dtype; None keeps the checkpoint's.
        value_head: ``linear`` or ``mlp`` for a new head; None takes what the checkpoint records (linear if nothing).
        new_head: start a new head even where the checkpoint has one.
        allow_missing_head: a checkpoint without head (a language model) gets a new one; otherwise that is an error.
        seed: of a new head.
        pad_token_id: written into the configuration when given.
        gathered: context manager under which the listed parameters are whole and writable (ZeRO-3).
    Raises:
        ValueError: no head where one is needed, a head of another shape, all-zero or not finite, other missing weights.
    """
    path = str(path)
    if is_adapter(path):
        from openrlhf.models.lora import load_merged  # the adapter names its base; a cycle only at call time

        if new_head or with_aux_loss or quantization_config is not None or value_head is not None:
            raise ValueError(f"{path} is a LoRA adapter, which is loaded as it is; merge it with lora_combiner first")
        return load_merged(path, dtype=dtype, attn_implementation=attn_implementation)

    config = AutoConfig.from_pretrained(path)
    recorded = read_settings(config)
    is_reward_checkpoint = any("ForSequenceClassification" in name for name in config.architectures or [])
    kind = _head_kind(path, config, value_head, new_head, is_reward_checkpoint)
    if with_aux_loss and count_experts(config.get_text_config()) is None:
        raise ValueError(
            f"--aux_loss_coef needs a mixture-of-experts model; {path} ({config.model_type}) has no experts"
        )
    config.num_labels = 1
    if pad_token_id is not None and pad_token_id < config.get_text_config().vocab_size:
        config.pad_token_id = pad_token_id
        config.get_text_config().pad_token_id = pad_token_id
    disable_dropout(config)

    with quiet_loading():
        network, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=dtype if dtype is not None else "auto",
            attn_implementation=attn_implementation,
            quantization_config=quantization_config,
            output_loading_info=True,
            ignore_mismatched_sizes=kind == "mlp" or new_head,
        )
    _check_loaded(path, network, info)
    has_head = "score.weight" not in info["missing_keys"]
    if not has_head and (is_reward_checkpoint or not allow_missing_head):
        raise ValueError(
            f"{path}: the value head 'score.weight' is missing; this is not a trained reward model. "
            "Point to a folder saved by train_rm, or train one first"
        )
    hidden_size = config.get_text_config().hidden_size
    if kind == "mlp":
        reference = network.score.weight
        network.score = MLPHead(hidden_size).to(device=reference.device, dtype=reference.dtype)
        if has_head and not new_head:
            network.score.load_state_dict(_read_head(path))
    with gathered(list(network.score.parameters())):
        if new_head or not has_head:
            initialise_head(network.score, hidden_size, seed)
        check_head({f"score.{k}": v for k, v in network.score.state_dict().items()}, hidden_size, kind, path)
    setattr(network.config, SETTINGS_KEY, {**recorded, "value_head": kind})
    return RewardModel(network, with_aux_loss)


def _head_kind(path: str, config: Any, value_head: str | None, new_head: bool, is_reward_checkpoint: bool) -> str:
    """Kind of head to load or start; refuses one that contradicts the checkpoint."""
    saved = read_settings(config).get("value_head", "linear")
    kind = value_head or saved
    if kind not in VALUE_HEADS:
        raise ValueError(f"value head of {path}: expected one of {list(VALUE_HEADS)}, got {kind!r}")
    if is_reward_checkpoint and not new_head and config.num_labels != 1:
        raise ValueError(
            f"{path} has {config.num_labels} labels; a reward model has exactly 1 (num_labels in config.json)"
        )
    if is_reward_checkpoint and not new_head and kind != saved:
        raise ValueError(
            f"{path} was saved with a {saved} head, got --value_head_strategy {kind}; "
            "drop the flag, or pass --reset_value_head for a new head"
        )
    return kind


def _check_loaded(path: str, network: nn.Module, info: dict[str, Any]) -> None:
    """Refuse a network without a 'score' head or with weights, other than the head's, that were not in the files."""
    if not isinstance(getattr(network, "score", None), nn.Linear):
        raise ValueError(f"{path}: {type(network).__name__} has no head called 'score'; use a causal (decoder) model")
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("score."))
    names = {str(key[0]) if isinstance(key, tuple) else str(key) for key in info["mismatched_keys"]}
    mismatched = sorted(names - {"score.weight"})
    if missing or mismatched:
        raise ValueError(f"{path}: missing weights {missing[:5]}, weights of another shape {mismatched[:5]}")


def is_adapter(path: str | Path) -> bool:
    """True for a folder with a LoRA adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def _read_head(path: str) -> dict[str, Tensor]:
    from safetensors import safe_open

    if not Path(path).is_dir():
        raise ValueError(f"{path} has a two-layer head, which is read from a local folder only; download it first")
    head = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            names = [name for name in tensors.offset_keys() if name.startswith("score.")]
            head.update({name.removeprefix("score."): tensors.get_tensor(name) for name in names})
    return head


def load_tokenizer(path: str | Path, pad_token: str | None = None):
    """Tokenizer with a pad token that is not an end-of-text token.

    The pad token is, in this order: ``pad_token``, the tokenizer's own when it differs from EOS, an unused reserved
    token, the unknown token, a new ``<pad>`` token (the caller grows the embedding: :func:`fit_embedding`).
    Raises:
        ValueError: ``pad_token`` equals EOS, or the tokenizer has no EOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer of {path} has no EOS token; set eos_token in its tokenizer_config.json")
    if pad_token is not None and pad_token == tokenizer.eos_token:
        raise ValueError(f"the pad token must differ from EOS {tokenizer.eos_token!r}: scores would be read before EOS")
    if pad_token in tokenizer.get_vocab() and tokenizer.get_vocab()[pad_token] not in tokenizer.added_tokens_decoder:
        raise ValueError(f"the pad token {pad_token!r} is an ordinary word of the vocabulary; choose a special token")
    if pad_token is not None:
        tokenizer.add_special_tokens({"pad_token": pad_token})
    elif tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        reserved = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|reserved_special_token_0|>")
        spare = next((name for name in reserved if name in vocabulary), tokenizer.unk_token or "<pad>")
        if spare == tokenizer.eos_token:  # GPT-2 uses one token for everything
            spare = "<pad>"
        tokenizer.add_special_tokens({"pad_token": spare})
    tokenizer.padding_side = "right"
    return tokenizer


def fit_embedding(model: RewardModel, tokenizer) -> None:
    """Grow the embedding table to hold every token id, never shrink it; keep pad ids equal. In place."""
    rows = model.network.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        model.network.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def checkpoint_fingerprint(path: str | Path) -> str:
    """Short hash that changes when the weights of a checkpoint folder change.

    Covers size, safetensors header and the first and last megabyte of every weight file: cheap for large models.
    """
    digest = hashlib.sha256()
    files = sorted(p for p in Path(path).iterdir() if p.suffix in {".safetensors", ".bin"})
    if not files:
        raise ValueError(f"{path}: expected a checkpoint folder with *.safetensors weights")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with open(file, "rb") as handle:
            digest.update(handle.read(1 << 20))
            handle.seek(max(0, size - (1 << 20)))
            digest.update(handle.read())
    return digest.hexdigest()[:16]


def save_reward_model(
    folder: str | Path,
    model: RewardModel,
    tokenizer,
    *,
    state_dict: dict[str, Tensor] | None = None,
    settings: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint into an existing folder (the caller makes it atomic).

    Args:
        state_dict: whole weights by the network's names, when the model's own are sharded; None takes the model's.
        settings: merged into the ``goal_reward`` key of config.json.
        dtype: of the stored weights; None keeps theirs.
    Raises:
        ValueError: the head is missing, of another shape, zero or not finite.
    """
    folder = Path(folder)
    network = model.network
    state = network.state_dict() if state_dict is None else state_dict
    kind = read_settings(network.config).get("value_head", "linear")
    check_head(state, model.hidden_size, kind, folder)
    state = {k: v.detach().to("cpu", dtype if v.is_floating_point() else None).contiguous() for k, v in state.items()}
    stored = dtype or next(v.dtype for v in state.values() if v.is_floating_point())
    config = network.config
    previous = getattr(config, SETTINGS_KEY, None)
    setattr(config, SETTINGS_KEY, {**read_settings(config), **(settings or {})})
    config.num_labels = 1
    with quiet_loading(), without_deepspeed():
        network.save_pretrained(folder, state_dict=state)
    setattr(config, SETTINGS_KEY, previous)
    tokenizer.save_pretrained(folder)
    finish_export(folder, stored)
