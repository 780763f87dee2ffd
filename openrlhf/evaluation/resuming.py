"""Files of scores that a later call goes on with: what they were scored with lies beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openrlhf.datasets.jsonl import cut_partial_line
from openrlhf.utils.atomic import atomic_write_text


def scoring_settings(
    model: Any, goal: Any, *, checkpoint: str | None, template: str, apply_chat_template: bool, max_len: int
) -> dict[str, Any]:
    """What scores depend on besides the texts: two files with equal settings can be compared and continued."""
    return {
        "checkpoint": checkpoint,
        "goal_state": goal.digest if goal else None,
        "dtype": str(next(model.parameters()).dtype),
        "template": template,
        "apply_chat_template": apply_chat_template,
        "max_len": max_len,
    }


def open_scores(path: Path, settings: dict[str, Any], *, made: str = "scored", folder_flag: str = "--save_dir") -> bool:
    """Make a file of scores ready to be appended to; `<stem>.settings.json` beside it holds the settings.

    Args:
        settings: plain JSON values.
        made, folder_flag: for the message: what was done to the rows, and the flag that names their folder.
    Returns:
        Whether it holds rows of an earlier call; a last line that was cut off is removed.
    Raises:
        ValueError: the rows there were scored with other settings (names those that differ), or the settings cannot be
            read.
    """
    settings_path = path.with_name(path.stem + ".settings.json")
    if not path.is_file() or path.stat().st_size == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        atomic_write_text(settings_path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return False
    try:
        earlier = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{settings_path}: not valid JSON ({error}); remove it and {path} to score anew") from error
    if earlier != settings:
        changed = [name for name in settings | earlier if earlier.get(name) != settings.get(name)]
        told = "; ".join(f"{name} {earlier.get(name)!r} against {settings.get(name)!r}" for name in changed)
        raise ValueError(
            f"{path} was {made} with other settings ({', '.join(changed)} differ: {told}); "
            f"remove it or choose another {folder_flag}"
        )
    cut_partial_line(path)
    return True
