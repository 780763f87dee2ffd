"""A user's Python file as a module, and where its code raised."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_folders: set[str] = set()  # of the files run so far


def run_file(path: Path) -> ModuleType:
    """Run a file once, under a name of its own; what it raises is passed on.

    Its folder becomes importable, behind all others. While the file runs it stands in front of the folders of files run
    before, and a module that one of those has imported is imported anew where this folder has one of its name.

    Args:
        path: an existing file that Python knows how to import.
    """
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    _forget_namesakes(folder)
    _folders.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.path.insert(min(sys.path.index(one) for one in _folders if one in sys.path), folder)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)  # the first of the two
    return module


def own_values(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that a module defines itself, by name."""
    return {key: one for key, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__}


def is_environment(value: Any) -> bool:
    """Whether it is a class with the methods reset and step, of whatever base."""
    return inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in ("reset", "step"))


def _forget_namesakes(folder: str) -> None:
    """Take out of sys.modules what came from the folders of other files and this folder has by the same name."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        home = str(file.parents[1] if file.name == "__init__.py" else file.parent)
        if "." in name or home == folder or home not in _folders or PathFinder.find_spec(name, [folder]) is None:
            continue
        logger.warning(
            "%s and %s both have a module %r: each file gets its own where it imports it at its top, an import inside "
            "a function may get the other; rename one",
            home,
            folder,
            name,
        )
        for one in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[one]


def raised_at(error: BaseException, function: Callable) -> str:
    """Where an error came from, as " at FILE:LINE": the last line of the function's own file, else the last of all."""
    own = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename == own] or frames
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
