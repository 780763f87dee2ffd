"""What the scoring commands share: find a reward checkpoint, how it was trained, and load it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from openrlhf.cli.common import check_positions
from openrlhf.evaluation.goal_state import GoalState, QuestionGoals, load_goal
from openrlhf.models.lora import SETTINGS_FILE
from openrlhf.models.pretrained import checkpoint_fingerprint, load_reward_model, load_tokenizer
from openrlhf.models.reward_model import RewardModel, read_settings, rotary_kinds
from openrlhf.utils.memory import keep_freed_memory
from openrlhf.utils.storage import is_s3, local_copy

DEFAULT_MAX_LEN = 2048


@dataclass(frozen=True)
class RewardCheckpoint:
    """A checkpoint on this machine and how its texts are rendered."""

    name: str  # last part of the name given, for output folders
    folder: Path
    fingerprint: str
    template: str  # prompt template; not used with apply_chat_template
    apply_chat_template: bool
    max_len: int  # tokens of prompt + response

    def described(self) -> dict[str, Any]:
        """What reports say of it: everything but the folder, which is of this machine."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}

    def load_goal(self, path: str | Path) -> GoalState | QuestionGoals:
        """A goal state, or goals per question, of this checkpoint.

        Raises:
            ValueError: it cannot be read, or was made with another checkpoint or another rendering of prompts.
        """
        goal = load_goal(path)
        goal.check(self.fingerprint, self.name)
        if (goal.template, goal.apply_chat_template) != (self.template, self.apply_chat_template):
            raise ValueError(
                f"the goal state was made with template {goal.template!r} (chat template: {goal.apply_chat_template}), "
                f"scoring uses {self.template!r} ({self.apply_chat_template}); use the same for both"
            )
        return goal

    def load(self, bf16: bool = False, attn_implementation: str | None = None) -> tuple[RewardModel, Any]:
        """The model, in eval mode on the GPU when there is one, and its tokenizer.

        Without a GPU the process keeps freed memory from now on, see `keep_freed_memory`.

        Raises:
            ValueError: texts of max_len tokens whose scores would depend on the other texts, or on too few positions.
        """
        tokenizer = load_tokenizer(self.folder)
        model = load_reward_model(
            self.folder,
            dtype=torch.bfloat16 if bf16 else torch.float32,
            attn_implementation=attn_implementation,
            pad_token_id=tokenizer.pad_token_id,
        )
        check_positions(model.network, self.max_len, self.max_len)
        dynamic = rotary_kinds(model.config).get("dynamic")
        if dynamic is not None and self.max_len > dynamic:
            raise ValueError(
                f"{self.name} has dynamic rotary positions: beyond {dynamic} tokens a score depends on texts scored "
                f"before, and max_len is {self.max_len}; pass --max_len {dynamic}"
            )
        if not torch.cuda.is_available():
            keep_freed_memory()
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def find_checkpoint(
    name: str,
    *,
    input_template: str | None = None,
    apply_chat_template: bool = False,
    max_len: int | None = None,
) -> RewardCheckpoint:
    """Locate a reward checkpoint and settle how prompts are rendered, without loading its weights.

    Args:
        name: folder, s3:// address or hub id.
        input_template, apply_chat_template, max_len: override what the checkpoint records.
    Raises:
        ValueError: no such checkpoint, no weights in it, or a template neither recorded nor given.
        RuntimeError: a hub id that cannot be fetched.
    """
    folder = model_folder(name, "a reward model checkpoint", "train one with train_rm")
    fingerprint = checkpoint_fingerprint(folder)
    recorded = _recorded_settings(folder)
    chat = apply_chat_template or (input_template is None and bool(recorded.get("apply_chat_template")))
    template = input_template or recorded.get("template") or ("{}" if chat else None)
    if template is None:
        kinds = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
        doubt = f", and is no reward model but {kinds[0]}: train one with train_rm" if "CausalLM" in kinds[0] else ""
        raise ValueError(
            f"{name} records no prompt template{doubt}; for a reward model that was trained elsewhere pass "
            "--input_template (train_ppo: --reward_template): nemo, plain, or a text with {question}"
        )
    return RewardCheckpoint(
        name=Path(os.path.abspath(name)).name if Path(name).is_dir() else name.rstrip("/").rsplit("/", 1)[-1],
        folder=folder,
        fingerprint=fingerprint,
        template=template,
        apply_chat_template=chat,
        max_len=max_len or recorded.get("max_len") or DEFAULT_MAX_LEN,
    )


def find_checkpoints(names: Sequence[str], **rendering: Any) -> list[RewardCheckpoint]:
    """Several checkpoints, whose results go into folders of their names.

    Args:
        rendering: as for `find_checkpoint`, also what it raises.
    Raises:
        ValueError: two of them have one name.
    """
    checkpoints = [find_checkpoint(name, **rendering) for name in names]
    twice = [name for name, count in Counter(checkpoint.name for checkpoint in checkpoints).items() if count > 1]
    if twice:
        raise ValueError(
            f"two models are called {twice[0]} and would write into one folder; call this for one at a time, each with "
            "its own --save_dir"
        )
    return checkpoints


def model_folder(name: str, kind: str, hint: str) -> Path:
    """Local folder of a model: itself, or a copy of an s3:// address or of a hub id.

    Args:
        name: folder, s3:// address or hub id.
        kind, hint: what was expected and what to do, for the message.
    Raises:
        ValueError: no such folder.
        RuntimeError: a hub id that cannot be fetched.
    """
    if is_s3(name) or Path(name).is_dir():
        return local_copy(name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).parent.is_dir():
        raise ValueError(f"expected {kind} at {name}, found no folder; {hint}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the hub client raises many unrelated types
        raise RuntimeError(f"cannot fetch {name}, which is no local folder either, from the hub: {error}") from error


def _recorded_settings(folder: Path) -> dict[str, Any]:
    adapter_settings = folder / SETTINGS_FILE
    if adapter_settings.is_file():
        return json.loads(adapter_settings.read_text(encoding="utf-8"))
    return read_settings(AutoConfig.from_pretrained(str(folder)))
