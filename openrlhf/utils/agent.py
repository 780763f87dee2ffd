"""The agent classes under the import path that users know."""

from __future__ import annotations

from typing import Any

_AGENT = ("AgentInstanceBase", "MultiTurnAgentExecutor", "AgentExecutorBase")
__all__ = list(_AGENT)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _AGENT:
        from openrlhf.rewards import agent

        return getattr(agent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
