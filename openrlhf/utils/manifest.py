"""The record of how a run was made: manifest.json."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from openrlhf.utils.atomic import atomic_write_text

MANIFEST_NAME = "manifest.json"

_PACKAGES = (
    "openrlhf",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "numpy",
    "deepspeed",
    "peft",
    "scikit-learn",
    "math-verify",
    "flash-attn",
    "bitsandbytes",
    "ray",
    "vllm",
    "wandb",
)
_SECRET_FIELD = re.compile(
    r"use_wandb|(.*[_.-])?(api_key|secret|password|(hf|auth|access|bearer)_token)", re.IGNORECASE
)
_NOT_SECRET = ("", "true", "false", "none", "offline")
_HIDDEN = "<hidden>"


def write_manifest(
    run_dir: str | Path,
    command: str,
    config: Mapping[str, Any] | Any,
    extra: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> Path:
    """Write manifest.json: how this run can be repeated. Call it in the main process when the work starts.

    Args:
        command: name of the command, such as "train_rm".
        config: resolved settings (a mapping or a dataclass); service keys in it, and in the command line, are hidden.
        extra: further entries, such as data fingerprints or figures; "seed" is taken from `config` when not given here.
        argv: the command line; None means that of this process.
    Returns:
        Path of the file. An existing manifest moves into "earlier_runs", newest last.
    Raises:
        ValueError: `extra` uses a name of the manifest's own.
    """
    settings = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    argv = list(sys.argv if argv is None else argv)
    for secret in _secrets(settings):
        argv = [part.replace(secret, _HIDDEN) for part in argv]
    manifest = {
        "command": command,
        "command_line": shlex.join(argv),
        "working_directory": os.getcwd(),
        "status": "running",
        "start_time": _now(),
        "end_time": None,
        "seed": settings.get("seed"),
        "config": hide_secrets(settings),
        "git": git_state(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "packages": package_versions(),
        "hardware": _hardware(),
    }
    extra = dict(extra or {})
    clash = sorted((set(extra) - {"seed"}) & set(manifest))
    if clash:
        raise ValueError(f"manifest entries {clash} are written by the manifest itself; rename them in `extra`")
    path = Path(run_dir) / MANIFEST_NAME
    earlier = _read_manifest(path)
    if earlier is not None:
        manifest["earlier_runs"] = [*earlier.pop("earlier_runs", []), earlier]
    atomic_write_text(path, to_json({**manifest, **extra}))
    return path


def update_manifest(run_dir: str | Path, entries: Mapping[str, Any]) -> None:
    """Add or replace top-level entries of an existing manifest.json, such as the final figures."""
    path = Path(run_dir) / MANIFEST_NAME
    manifest = _read_manifest(path)
    if manifest is None:
        raise ValueError(f"expected a readable {path}; write_manifest makes it when the run starts")
    atomic_write_text(path, to_json({**manifest, **entries}))


def finish_manifest(run_dir: str | Path, status: str) -> None:
    """Write the end time and the status of the run into its manifest.json, if there is one."""
    if _read_manifest(Path(run_dir) / MANIFEST_NAME) is not None:
        update_manifest(run_dir, {"status": status, "end_time": _now()})


def hide_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of nested settings with the values of service keys (wandb key, tokens, passwords) replaced by a mark."""
    hidden = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            hidden[name] = hide_secrets(value)
        else:
            hidden[name] = _HIDDEN if _is_secret(name, value) else value
    return hidden


def git_state(root: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the checkout with top folder `root`; None when there is no checkout or no git."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def to_json(content: Mapping[str, Any]) -> str:
    """Indented JSON text; what JSON has no form for is written as its text."""
    return json.dumps(content, indent=2, default=str) + "\n"


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(_SECRET_FIELD.fullmatch(name)) and value.lower() not in _NOT_SECRET


def _secrets(settings: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += _secrets(value)
        elif _is_secret(name, value):
            found.append(value)
    return sorted(found, key=len, reverse=True)


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def _hardware() -> dict[str, Any]:
    import torch  # takes seconds; flags are read without it

    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": memory,
        "gpus": gpus,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "torch_threads": torch.get_num_threads(),
    }
