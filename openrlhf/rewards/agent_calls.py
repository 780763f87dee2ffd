"""Calling the methods of a user's agent, and reading what they return in any of the documented forms."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.rewards.python_file import raised_at

logger = logging.getLogger(__name__)

STEP_KEYS = ("rewards", "environment_feedback", "done")
OPTIONAL_STEP_KEYS = ("scores", "sampling_params", "extra_logs", "environment_images")
_FEEDBACK_NAMES = ("environment_feedback", "next_observation", "observation", "prompt")
_OBSERVATION_NAMES = ("observation", "prompt")


class AgentError(RuntimeError):
    """An agent raised, took too long, or returned what cannot be read."""


@dataclass(frozen=True)
class StepResult:
    """What one step of an agent returned."""

    reward: float | None  # None: not scored (None or NaN)
    feedback: str  # text for the policy; may be empty
    done: bool
    scores: float | None  # None: not given
    sampling_params: Any  # of the next turn; None: as before
    extra_logs: Mapping[str, Any]


async def construct(agent_class: type) -> Any:
    """A new instance of an agent class without arguments; `__init__` may be a coroutine function."""
    try:
        instance = agent_class.__new__(agent_class)
        made = instance.__init__()
        if inspect.isawaitable(made):
            await _in_agents_loop(made)
    except Exception as error:
        raise AgentError(f"{agent_class.__name__}() raised {_told(error, agent_class.__init__)}") from error
    return instance


async def call(method: Callable, states: Mapping[str, Any], names: Mapping[str, Any], time_limit_s: float) -> Any:
    """Call a method of an agent, sync (in a thread) or async.

    Args:
        states: passed as one dictionary, as `reset(states)` and `step(states)` take it.
        names: passed by name instead to methods whose first parameter has one of these names, as in `reset(prompt)` or
            `step(observation, action, label)`.
        time_limit_s: seconds until it counts as hanging. A thread cannot be ended: it is left behind.
    Raises:
        AgentError: the method raises, takes too long, or asks for a parameter that is not known.
    """
    title = getattr(method, "__qualname__", repr(method))
    args, kwargs = _arguments(method, title, dict(states), names)

    async def run() -> Any:
        if inspect.iscoroutinefunction(method):
            return await _in_agents_loop(method(*args, **kwargs))
        returned = await _in_thread(functools.partial(method, *args, **kwargs))
        return await _in_agents_loop(returned) if inspect.isawaitable(returned) else returned

    try:
        return await asyncio.wait_for(run(), time_limit_s)
    except asyncio.TimeoutError as error:  # noqa: UP041  (another class than TimeoutError in Python 3.10)
        _leave_agents_loop()
        raise AgentError(f"{title} took more than {time_limit_s:g} s, or raised a timeout of its own") from error
    except Exception as error:
        hint = ""
        if "label" in names and names["label"] is None:
            hint = " (the sample has no label; if the agent needs one, name its column by --label_key)"
        raise AgentError(f"{title} raised {_told(error, method)}{hint}") from error


_agents_loop: asyncio.AbstractEventLoop | None = None  # where the coroutines of agents run


async def _in_agents_loop(awaitable: Awaitable) -> Any:
    """What a coroutine of an agent gives, run in an event loop of the agents' own, in a daemon thread: one that blocks,
    such as by `time.sleep`, holds up neither the policy nor its time limit. The loop stays the same over all calls."""
    global _agents_loop
    if _agents_loop is None:
        _agents_loop = asyncio.new_event_loop()
        threading.Thread(target=_agents_loop.run_forever, name="agents", daemon=True).start()

    async def run() -> Any:
        try:
            return await awaitable
        except (KeyboardInterrupt, SystemExit) as error:  # they would end the loop
            raise RuntimeError(f"{type(error).__name__} in an agent: {error}") from error

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), _agents_loop))


def _leave_agents_loop() -> None:
    """Later calls get a new loop: something may block this one."""
    global _agents_loop
    _agents_loop = None


async def _in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises, run in a daemon thread: unlike that of an executor, one that hangs keeps
    neither the event loop nor the program from ending."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():  # cancelled, for example at the time limit
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:
            error = raised
        if isinstance(error, StopIteration | KeyboardInterrupt | SystemExit):  # a future cannot hold the first
            error = RuntimeError(f"{type(error).__name__} in an agent: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await answer


def _arguments(method: Callable, title: str, states: dict, names: Mapping[str, Any]) -> tuple[tuple, dict]:
    parameters = list(inspect.signature(method).parameters.values())
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = bool(plain) and plain[0].name in names
    required = {p.name for p in plain if p.default is p.empty}
    if required - (set(names) if by_name else {plain[0].name} if plain else set()):
        raise AgentError(
            f"{title} asks for {[p.name for p in plain]}; take one dictionary, or by name any of {sorted(names)}"
        )
    if not by_name:
        takes_states = plain or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return ((states,) if takes_states else ()), {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return (), dict(names)
    return (), {p.name: names[p.name] for p in plain if p.name in names}


def read_observation(returned: Any, title: str) -> tuple[str, Any]:
    """The first observation's text and the sampling settings (None: as before) that `reset` returned.

    Accepts a dictionary with `observation` (or `prompt`), the text alone, or a pair (either of the two, info).
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        returned = returned[0]
    if isinstance(returned, str):
        return returned, None
    if not isinstance(returned, Mapping) or not any(name in returned for name in _OBSERVATION_NAMES):
        raise AgentError(f"{title} returned {_described(returned)}; expected a dictionary with the key 'observation'")
    name = next(name for name in _OBSERVATION_NAMES if name in returned)
    return _text(returned[name], f"{name!r} of {title}", allow_none=False), returned.get("sampling_params")


def read_step(returned: Any, title: str, text_so_far: str = "") -> StepResult:
    """Read what `step` returned.

    Accepts a dictionary with the keys of STEP_KEYS and OPTIONAL_STEP_KEYS; (feedback, reward, done, info), its first
    two also the other way round; or (feedback, reward, terminated, truncated, info). In a tuple the feedback is a
    text, None, or a dictionary that holds it, and info becomes the extra logs. A dictionary may hold
    `next_observation` in place of `environment_feedback`.

    Args:
        text_so_far: a `next_observation` (or a tuple's feedback) that begins with all of this is the conversation so
            far: the rest of it is the feedback.
    Raises:
        AgentError: another form, a missing key, or a value of another type; says what was expected.
    """
    if isinstance(returned, tuple) and len(returned) in (4, 5):
        feedback, reward, *ends, info = returned
        if not isinstance(feedback, str | Mapping | None) and isinstance(reward, str):  # the order of OpenRLHF 0.8.0
            feedback, reward = reward, feedback
        if isinstance(feedback, Mapping):
            feedback = next((feedback[name] for name in _FEEDBACK_NAMES if name in feedback), None)
        info = {} if info is None else info
        found = {"rewards": reward, "environment_feedback": feedback, "extra_logs": info}
        found["done"] = ends[0] if len(ends) == 1 else _flag(ends[0], title) or _flag(ends[1], title)
        if isinstance(info, Mapping) and "scores" in info:
            found["scores"] = info["scores"]
        is_whole = True
    elif isinstance(returned, Mapping):
        found = _step_keys(returned, title)
        is_whole = "next_observation" in returned
    else:
        raise AgentError(
            f"{title} returned {_described(returned)}; expected a dictionary with the keys {list(STEP_KEYS)}, or "
            "(feedback, reward, done, info)"
        )
    feedback = _text(found["environment_feedback"], f"'environment_feedback' of {title}", allow_none=True)
    if is_whole and text_so_far and feedback.startswith(text_so_far):
        feedback = feedback[len(text_so_far) :]
    extra_logs = found.get("extra_logs")
    if extra_logs is not None and not isinstance(extra_logs, Mapping):
        raise AgentError(f"'extra_logs' of {title} must be a dictionary, got {_described(extra_logs)}")
    return StepResult(
        reward=read_number(found["rewards"], f"'rewards' of {title}"),
        feedback=feedback,
        done=_flag(found["done"], title),
        scores=read_number(found.get("scores"), f"'scores' of {title}"),
        sampling_params=found.get("sampling_params"),
        extra_logs=dict(extra_logs or {}),
    )


def read_number(value: Any, title: str) -> float | None:
    """One reward or score as a float; None for None and NaN, which mean "not scored".

    Raises:
        AgentError: not exactly one number, or infinity.
    """
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or isinstance(value, str) or math.isinf(number):
        raise AgentError(f"{title} must be one finite number (None or NaN: not scored), got {_described(value)}")
    return None if math.isnan(number) else number


def _step_keys(returned: Mapping, title: str) -> dict:
    found = dict(returned)
    if "environment_feedback" not in found and "next_observation" in found:
        found["environment_feedback"] = found.pop("next_observation")
    missing = [key for key in STEP_KEYS if key not in found]
    if missing:
        raise AgentError(
            f"{title} returned the keys {list(returned)}, which lack {missing}; expected {list(STEP_KEYS)} and, where "
            f"wanted, {list(OPTIONAL_STEP_KEYS)}"
        )
    if found.get("environment_images"):
        raise AgentError(f"{title} returned environment_images; this engine takes text only")
    unknown = tuple(key for key in found if key not in STEP_KEYS + OPTIONAL_STEP_KEYS)
    if unknown:
        _warn_of_unknown_keys(title, unknown)
    return found


@functools.lru_cache(maxsize=256)  # once for each agent
def _warn_of_unknown_keys(title: str, unknown: tuple[str, ...]) -> None:
    logger.warning("%s returned %s, which is not used; known keys: %s", title, unknown, STEP_KEYS + OPTIONAL_STEP_KEYS)


def _text(value: Any, title: str, allow_none: bool) -> str:
    if value is None and allow_none:
        return ""
    if not isinstance(value, str):
        raise AgentError(f"{title} must be a text, got {_described(value)}")
    return value


def _flag(value: Any, title: str) -> bool:
    try:
        if value is None or isinstance(value, str):
            raise TypeError
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise AgentError(f"'done' of {title} must be True or False, got {_described(value)}") from None


def _told(error: Exception, function: Callable) -> str:
    return f"{type(error).__name__}: {error}{raised_at(error, function)}"


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary with the keys {list(value)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {value!r:.60}"
