"""The reward model: any causal backbone of transformers with one scalar head, read at every token.

A checkpoint is an ordinary Hugging Face folder (``<Family>ForSequenceClassification``, ``num_labels`` 1, head
``score.weight`` [1, H]), so transformers, TRL and vLLM load it unchanged. What only this project needs lies under the
key ``goal_reward`` of ``config.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.models.functional import last_valid_index, position_ids_from_mask

SETTINGS_KEY = "goal_reward"
VALUE_HEADS = ("linear", "mlp")


@dataclass(frozen=True)
class RewardOutput:
    """What one forward pass tells of B sequences."""

    hidden_states: Tensor  # (B, S, H) last layer after the final norm, model dtype
    values: Tensor  # (B, S) float32, the head at every token, reward units
    reward: Tensor  # (B,) float32, the value at the last real token
    aux_loss: Tensor | None = None  # () load-balancing loss of a mixture-of-experts model, when asked for


class MLPHead(nn.Module):
    """Two-layer value head: linear H -> H, GELU, linear H -> 1.

    Its first layer is called ``weight`` on purpose: another library that expects ``score.weight`` of shape [1, H]
    then refuses the checkpoint with a size mismatch instead of scoring with a random head.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.out = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) -> (..., 1)."""
        return self.out(F.gelu(F.linear(hidden_states, self.weight, self.bias)))


class RewardModel(nn.Module):
    """A sequence-classification network of transformers, seen as a reward model.

    Args:
        network: ``<Family>ForSequenceClassification`` with one label and a head called ``score``.
        with_aux_loss: also return the load-balancing loss of a mixture-of-experts model.
    """

    def __init__(self, network: nn.Module, with_aux_loss: bool = False) -> None:
        super().__init__()
        self.network = network
        self.with_aux_loss = with_aux_loss

    @property
    def config(self):
        """The network's transformers configuration."""
        return self.network.config

    @property
    def hidden_size(self) -> int:
        """H, the width of the last hidden state."""
        return self.config.get_text_config().hidden_size

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.network.parameters()).device

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> RewardOutput:
        """Score B sequences.

        Args:
            input_ids: (B, S) int64, padded on either side.
            attention_mask: (B, S) bool or 0/1, 1 on real tokens.
        Raises:
            ValueError: a row without a real token.
        """
        extra = {"output_router_logits": True} if self.with_aux_loss else {}
        outputs = self.network.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=position_ids_from_mask(attention_mask),
            use_cache=False,
            **extra,
        )
        hidden_states = outputs.last_hidden_state
        values = self.network.score(hidden_states).squeeze(-1).float()
        last = last_valid_index(attention_mask)
        reward = values.gather(1, last.unsqueeze(1)).squeeze(1)
        aux_loss = self._aux_loss(outputs.router_logits, attention_mask) if self.with_aux_loss else None
        return RewardOutput(hidden_states, values, reward, aux_loss)

    def _aux_loss(self, router_logits: tuple[Tensor, ...], attention_mask: Tensor) -> Tensor:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.config.get_text_config()
        return load_balancing_loss_func(
            router_logits, count_experts(config), config.num_experts_per_tok, attention_mask.long()
        )


def count_experts(config) -> int | None:
    """Number of experts of a mixture-of-experts configuration; None for a dense model."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return None


def read_settings(config) -> dict[str, Any]:
    """Our own settings of a checkpoint: template, max_len, loss, reward mean and std, ...; empty for a foreign one."""
    return dict(getattr(config, SETTINGS_KEY, None) or {})


def disable_dropout(config) -> None:
    """Set every dropout probability of a configuration to 0, in place: rewards of a pair must be comparable."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)


def initialise_head(head: nn.Module, hidden_size: int, seed: int) -> None:
    """Start a value head: normal with std 1 / (H + 1), so that first rewards are near 0; the same for one seed.

    In place. The head's parameters must be whole (gathered) when a sharding engine holds them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            inner = isinstance(head, MLPHead) and name == "weight"
            std = 1 / math.sqrt(hidden_size) if inner else 1 / (hidden_size + 1)
            drawn = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(drawn.to(parameter.dtype))


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
    if (Path(path) / "adapter_config.json").is_file():
        from openrlhf.models.lora import load_merged  # the adapter names its base; a cycle only at call time

        return load_merged(path, dtype=dtype, attn_implementation=attn_implementation)

    config = AutoConfig.from_pretrained(path)
    if count_experts(config.get_text_config()) is None and with_aux_loss:
        raise ValueError(
            f"--aux_loss_coef needs a mixture-of-experts model; {path} ({config.model_type}) has no experts"
        )
    recorded = read_settings(config)
    is_reward_checkpoint = any("ForSequenceClassification" in name for name in config.architectures or [])
    kind = value_head or recorded.get("value_head", "linear")
    if kind not in VALUE_HEADS:
        raise ValueError(f"value head of {path}: expected one of {list(VALUE_HEADS)}, got {kind!r}")
    if is_reward_checkpoint and config.num_labels != 1:
        raise ValueError(
            f"{path} has {config.num_labels} labels; a reward model has exactly 1 (num_labels in config.json)"
        )
    if is_reward_checkpoint and not new_head and kind != recorded.get("value_head", "linear"):
        raise ValueError(
            f"{path} was saved with a {recorded.get('value_head', 'linear')} head, got --value_head_strategy {kind}; "
            "drop the flag, or pass --reset_value_head for a new head"
        )
    config.num_labels = 1
    if pad_token_id is not None:
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
    if not isinstance(getattr(network, "score", None), nn.Linear):
        raise ValueError(f"{path}: {type(network).__name__} has no head called 'score'; use a causal (decoder) model")
    missing = {name for name in info["missing_keys"] if not name.startswith("score.")}
    mismatched = {str(key[0]) if isinstance(key, tuple) else str(key) for key in info["mismatched_keys"]} - {
        "score.weight"
    }
    if missing or mismatched:
        raise ValueError(
            f"{path}: missing weights {sorted(missing)[:5]}, weights of another shape {sorted(mismatched)[:5]}"
        )
    has_head = "score.weight" not in info["missing_keys"]
    if not has_head and (is_reward_checkpoint or not allow_missing_head):
        raise ValueError(
            f"{path}: the value head 'score.weight' is missing; this is not a trained reward model. "
            "Point to a folder saved by train_rm, or train one first"
        )
    start_new = new_head or not has_head
    hidden_size = config.get_text_config().hidden_size
    if kind == "mlp":
        reference = network.score.weight
        network.score = MLPHead(hidden_size).to(device=reference.device, dtype=reference.dtype)
    if start_new:
        with gathered(list(network.score.parameters())):
            initialise_head(network.score, hidden_size, seed)
    else:
        if kind == "mlp":
            network.score.load_state_dict(_read_head(path))
        with gathered(list(network.score.parameters())):
            check_head({f"score.{k}": v for k, v in network.score.state_dict().items()}, hidden_size, kind, path)
    settings = {**recorded, "value_head": kind}
    setattr(network.config, SETTINGS_KEY, settings)
    return RewardModel(network, with_aux_loss)


def _read_head(path: str) -> dict[str, Tensor]:
    from safetensors import safe_open

    head = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            head.update(
                {k.removeprefix("score."): tensors.get_tensor(k) for k in tensors.offset_keys() if k.startswith("score.")}
            )
    return head


def check_head(state: dict[str, Tensor], hidden_size: int, kind: str, where: str | Path) -> None:
    """Refuse a head that is absent, empty, of another shape, all zero or not finite.

    Args:
        state: tensors by name; those starting with ``score.`` are the head.
    Raises:
        ValueError: names the key, its shape and the place.
    """
    shapes = {"score.weight": (1, hidden_size)}
    if kind == "mlp":
        shapes = {"score.weight": (hidden_size, hidden_size), "score.out.weight": (1, hidden_size)}
    for key, shape in shapes.items():
        tensor = state.get(key)
        if tensor is None:
            raise ValueError(f"{where}: the value head '{key}' is missing")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}: the value head '{key}' has shape {tuple(tensor.shape)}, expected {shape}")
        if not torch.isfinite(tensor).all() or not tensor.any():
            raise ValueError(
                f"{where}: the value head '{key}' is all zero or not finite; the run that saved it is broken"
            )


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


def export_config(folder: Path) -> None:
    """Add the older spellings of dtype and rope base to a saved config.json, so that transformers 4 reads it right."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


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
    config.num_labels, config.dtype = 1, stored
    with quiet_loading():
        network.save_pretrained(folder, state_dict=state)
    setattr(config, SETTINGS_KEY, previous)
    export_config(folder)
    tokenizer.save_pretrained(folder)
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)  # safetensors writes them readable by the owner alone
