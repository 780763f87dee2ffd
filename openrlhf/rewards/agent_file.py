"""Load an agent from a user's Python file, written for any of OpenRLHF's contracts.

| OpenRLHF | what the file holds | what is done with it |
| --- | --- | --- |
| 0.9.1 and later | `AgentExecutor`, made without arguments | used as it is |
| 0.8.7 to 0.9.0 | `AgentExecutor(max_steps, max_length, llm_engine, ...)` | made with max_steps, the rest set later |
| before 0.8.7 | a function `step(observation, action, label, **kwargs)` | each sample's turns call it |
| (documents) | one class with `reset` and `step`, of whatever base | MultiTurnAgentExecutor over it |
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.rewards.agent import MAX_TURNS, AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.rewards.python_file import is_environment, own_values, run_file

_OLD_ARGUMENTS = ("max_length", "llm_engine", "hf_tokenizer", "result_queue")


def load_agent(path: str | Path, max_turns: int | None = None, step_limit_s: float | None = None) -> Any:
    """The executor that a Python file defines.

    Args:
        path: the file; it is run once.
        max_turns: actions of one episode at most; None leaves it to the file (MAX_TURNS where it says nothing).
        step_limit_s: seconds of one call of reset or step; None leaves it to the file (STEP_LIMIT_S).
    Raises:
        ValueError: no such file, an error while it runs, no agent in it, or an executor that cannot be made.
    """
    module = _run(Path(path))
    executor = _find_executor(module, str(path), max_turns if max_turns is not None else MAX_TURNS)
    if max_turns is not None:
        executor.max_turns = max_turns
    if step_limit_s is not None:
        executor.step_limit_s = step_limit_s
    return executor


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no agent file {path}")
    if importlib.util.spec_from_file_location(path.stem, path) is None:
        raise ValueError(f"{path} is not a Python file; an agent file ends in .py")
    try:
        return run_file(path)
    except (Exception, SystemExit) as error:
        vllm = isinstance(error, ImportError) and (error.name or "").split(".")[0] == "vllm"
        hint = "; the policy samples by itself: take SamplingParams from openrlhf.models.sampling" if vllm else ""
        raise ValueError(f"{path} fails when it is run: {type(error).__name__}: {error}{hint}") from error


def _find_executor(module: ModuleType, path: str, max_steps: int) -> Any:
    named = getattr(module, "AgentExecutor", None)
    if named is not None:
        return _make_executor(named, path, max_steps)
    own = [value for value in own_values(module).values() if inspect.isclass(value)]
    classes = [value for value in own if issubclass(value, AgentInstanceBase)]
    step = getattr(module, "step", None)
    if not classes and not callable(step):
        classes = [value for value in own if is_environment(value)]
    if len(classes) == 1:
        return MultiTurnAgentExecutor(classes[0])
    if callable(step) and not classes:
        return MultiTurnAgentExecutor(type("StepFunction", (AgentInstanceBase,), {"step": staticmethod(step)}))
    if hasattr(module, "reward_func"):
        raise ValueError(f"{path} defines reward_func and no agent: pass it as --remote_rm_url")
    found = f"the agent classes {[value.__name__ for value in classes]}" if classes else "none of these"
    raise ValueError(
        f"{path} must define a class AgentExecutor, one subclass of AgentInstanceBase or one class with reset and "
        f"step, or a function step; it has {found}"
    )


def _make_executor(executor: Any, path: str, max_steps: int) -> Any:
    """An instance of the class (or the object itself, where the file has made one)."""
    if not inspect.isclass(executor):
        return executor
    needed = [
        parameter.name
        for parameter in inspect.signature(executor.__init__).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ][1:]  # without self
    unknown = [name for name in needed if name not in ("max_steps", *_OLD_ARGUMENTS)]
    if unknown:
        raise ValueError(
            f"{path}: AgentExecutor is made without arguments, but its __init__ asks for {unknown}; write "
            "`def __init__(self): super().__init__(AgentInstance)`"
        )
    if inspect.iscoroutinefunction(executor.__init__):
        raise ValueError(f"{path}: AgentExecutor.__init__ must not be async (that of an agent instance may be)")
    if not callable(getattr(executor, "execute", None)):
        raise ValueError(f"{path}: AgentExecutor needs an execute method; derive it from {AgentExecutorBase.__name__}")
    try:
        return executor(**{name: max_steps if name == "max_steps" else None for name in needed})
    except Exception as error:
        old = [name for name in needed if name in _OLD_ARGUMENTS]
        hint = f" ({old} are None here: they are arguments of execute since OpenRLHF 0.9.1)" if old else ""
        raise ValueError(f"{path}: AgentExecutor() raised {type(error).__name__}: {error}{hint}") from error
