"""A user's Python file as a module, and where its code raised."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def run_file(path: Path) -> ModuleType:
    """Run a file once, under a name of its own; what it raises is passed on.

    Args:
        path: an existing file that Python knows how to import.
    """
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def raised_at(error: BaseException, function: Callable) -> str:
    """Where an error came from, as " at FILE:LINE": the last line of the function's own file, else the last of all."""
    own = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename == own] or frames
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
