"""Checkpoints of one run: named by their step, found only when complete, and pruned.

A checkpoint is complete when its `complete.json`, written last and listing every file with its size, agrees with it.
The writing itself is that of `openrlhf.utils.atomic`, whose functions can be imported from here too.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openrlhf.utils.atomic import (
    COMPLETE_NAME,
    GIB,
    atomic_dir,
    atomic_write_bytes,
    atomic_write_text,
    clean_stale,
    discard_folder,
    ensure_writable,
    folder_size,
    publish_folder,
    require_free_space,
    start_folder,
    temporary_sibling,
)

__all__ = [
    "COMPLETE_NAME",
    "atomic_dir",
    "atomic_write_bytes",
    "atomic_write_text",
    "clean_stale",
    "discard_folder",
    "ensure_writable",
    "folder_size",
    "folder_step",
    "latest_checkpoint",
    "list_checkpoints",
    "prune",
    "publish_folder",
    "read_complete",
    "require_free_space",
    "start_folder",
    "step_folder",
]

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step-(\d+)")


def step_folder(root: str | Path, step: int) -> Path:
    """Folder of the checkpoint after optimizer step `step`, such as root/step-00000012."""
    if step < 0:
        raise ValueError(f"expected an optimizer step of at least 0, got {step}")
    return Path(root) / f"step-{step:08d}"


def folder_step(folder: str | Path) -> int:
    """Optimizer step in the name of a checkpoint folder; the inverse of `step_folder`."""
    match = _STEP_NAME.fullmatch(Path(folder).name)
    if match is None:
        raise ValueError(f"expected a checkpoint folder named step-<number>, got {folder}")
    return int(match[1])


def read_complete(folder: str | Path) -> dict[str, Any] | None:
    """Entries of `complete.json` without the file list, or None unless every listed file is there with its size."""
    folder = Path(folder)
    try:
        record = json.loads((folder / COMPLETE_NAME).read_text(encoding="utf-8"))
        files = record.pop("files")
        whole = all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return record if whole else None


def list_checkpoints(root: str | Path) -> list[Path]:
    """Complete checkpoint folders under `root`, lowest step first; others are left out, and a broken one is logged."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = []
    for folder in root.iterdir():
        if folder.is_dir() and _STEP_NAME.fullmatch(folder.name):
            if read_complete(folder) is None:
                logger.warning("%s is not a complete checkpoint and is passed over", folder)
            else:
                found.append(folder)
    return sorted(found, key=folder_step)


def latest_checkpoint(root: str | Path) -> Path | None:
    """Complete checkpoint of the highest step under `root`, or None."""
    return next(reversed(list_checkpoints(root)), None)


def prune(
    root: str | Path, max_num: int | None = None, max_mem_gb: float | None = None, keep: Iterable[str | Path] = ()
) -> list[Path]:
    """Remove the oldest complete checkpoints until at most `max_num` stay and they take at most `max_mem_gb` GiB.

    The newest one and those in `keep` (paths or folder names) are counted but never removed. None means no limit.
    Returns the removed folders. A removal cut short leaves nothing that looks complete.
    """
    if max_num is not None and max_num < 1:
        raise ValueError(
            f"expected room for at least 1 checkpoint, got max_num={max_num}; pass --max_ckpt_num 1 or more"
        )
    checkpoints = list_checkpoints(root)
    kept_names = {Path(item).name for item in keep} | {folder.name for folder in checkpoints[-1:]}
    sizes = {folder: folder_size(folder) for folder in checkpoints}
    removed = []
    for folder in checkpoints:
        too_many = max_num is not None and len(sizes) > max_num
        too_large = max_mem_gb is not None and sum(sizes.values()) > max_mem_gb * GIB
        if not (too_many or too_large):
            break
        if folder.name in kept_names:
            continue
        trash = temporary_sibling(folder, "tmp")
        os.rename(folder, trash)
        discard_folder(trash)
        del sizes[folder]
        removed.append(folder)
    return removed
