"""Helpers without a model; the answer functions are re-exported because users import them from `openrlhf.utils`."""

from __future__ import annotations

from typing import Any

_GRADING = ("extract_boxed_answer", "extract_answer", "grade_answer")
__all__ = list(_GRADING)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _GRADING:
        from openrlhf.rewards import grading

        return getattr(grading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
