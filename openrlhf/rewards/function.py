"""Rewards from Python: the `reward_func` of a file, or any callable."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf.rewards.numbers import Logs, read_logs, read_numbers
from openrlhf.rewards.python_file import is_environment, own_values, raised_at, run_file
from openrlhf.rewards.source import RewardRequest, RewardResult

logger = logging.getLogger(__name__)

Parameters = Mapping[str, inspect.Parameter]
STYLES = (
    "reward_func(queries, prompts, labels, **kwargs), reward_func(prompts, completions, **columns), or one argument "
    "for the texts of prompts and responses"
)
LOCATE_LIMIT_S = 30.0  # for finding the sample at which a function fails
_KEYS = ("rewards", "scores", "extra_logs")
_OPENRLHF = ("queries", "prompts", "labels")
_EXTRAS = ("step", "epoch", "responses")  # besides the columns, what **kwargs of every style get
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class FunctionReward:
    """A Python callable as a reward source, called with whole batches.

    It may be a coroutine function. It returns one number a sample (list, tuple, array or tensor; None or NaN: not
    scored), or a dict of `rewards` and, if wanted, `scores` and `extra_logs`. See docs/rewards.md for the signatures.

    Args:
        function: the callable; of a torch module, `forward` is looked at, and no gradient is kept.
        name: in logs and errors; None: the function's.
        time_limit_s: seconds for one call. A call cannot be stopped: its thread is left behind.
    Raises:
        ValueError: a signature that cannot be called.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, time_limit_s: float | None = 600.0
    ) -> None:
        self.function = function
        self.shown = _shown(function)
        self.name = name or self.shown
        self.time_limit_s = time_limit_s
        self._call = _caller(function, self.shown)
        self._loop = asyncio.new_event_loop()  # one for all calls: sessions that a function keeps belong to it

    def score(self, request: RewardRequest) -> RewardResult:
        """Call the function once with all samples; see `RewardSource.score`."""
        logged: Logs = {}
        count = len(request)
        try:
            value = self._run(request, logged, self.time_limit_s)
        except _LateError as error:
            raise RuntimeError(
                f"reward function {self.shown} gave no answer for {count} samples within "
                f"{self.time_limit_s:g} s; make it faster, or raise its time limit (--remote_rm_timeout)"
            ) from error
        except _RaisedError as error:
            raise RuntimeError(self._explained(error.cause, request)) from error.cause
        return _read_answer(value, count, f"reward function {self.shown}", logged)

    def close(self) -> None:
        """Close the event loop."""
        if not self._loop.is_running():
            self._loop.close()

    def _run(self, request: RewardRequest, logged: Logs, limit_s: float | None) -> Any:
        """The function's answer, from a thread of its own: a hanging one must not hang the run, nor its exit."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        async def finish(value: Any) -> Any:
            return await value

        def work() -> None:
            try:
                value = self._call(request, logged)
                if inspect.isawaitable(value):
                    value = self._loop.run_until_complete(finish(value))
                answers.put((value, None))
            except BaseException as error:  # sys.exit too: the caller must hear of it
                answers.put((None, error))

        threading.Thread(target=work, name=f"reward {self.shown}", daemon=True).start()
        try:
            value, error = answers.get(timeout=limit_s)
        except queue.Empty as error:
            raise _LateError from error
        if isinstance(error, _RequestError):
            raise ValueError(str(error)) from error
        if error is not None:
            raise _RaisedError(error)
        return value

    def _explained(self, error: BaseException, request: RewardRequest) -> str:
        place = raised_at(error, self.function)
        told = f"reward function {self.shown} raised {type(error).__name__}: {str(error)[:500]}{place}"
        if request.labels is None:
            told += " (the samples have no labels; if it needs them, name their column by --label_key)"
        failing = self._failing_sample(request)
        if failing is None:
            return f"{told}; called with the samples 0 to {len(request) - 1} together"
        return (
            f"{told}; sample {failing} of 0 to {len(request) - 1} raises alone too: "
            f"label {_label(request, failing)!r:.60}, response {request.responses[failing]!r:.120}"
        )

    def _failing_sample(self, request: RewardRequest) -> int | None:
        """A sample that makes the function raise by itself, found by halving; None where there is none, or too late."""
        deadline = time.monotonic() + min(self.time_limit_s or LOCATE_LIMIT_S, LOCATE_LIMIT_S)

        def raises(start: int, stop: int) -> bool:
            try:
                self._run(request.part(start, stop), {}, max(deadline - time.monotonic(), 0.01))
            except _RaisedError:
                return True
            return False

        start, stop = 0, len(request)
        try:
            while stop - start > 1:
                middle = (start + stop) // 2
                start, stop = (start, middle) if raises(start, middle) else (middle, stop)
            return start if raises(start, stop) else None
        except _LateError:
            return None


class _LateError(Exception):
    """No answer within the limit."""


class _RequestError(Exception):
    """The request lacks what the function asks for."""


class _RaisedError(Exception):
    """The function raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def load_reward_function(path: str | Path, name: str = "reward_func") -> Callable[..., Any]:
    """The function of a Python file, which may import its neighbours; see `run_file`.

    Raises:
        ValueError: no such file, one that cannot be imported, or one without the function; says which it has.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"expected a Python file with {name} at {path}, found no file")
    try:
        module = run_file(path)
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
        raise ValueError(f"cannot load {path}, line {line}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        own = own_values(module)
        agent = any(callable(getattr(module, key, None)) for key in ("AgentExecutor", "AgentInstanceBase", "step"))
        agent = agent or any(map(is_environment, own.values()))
        functions = [key for key, value in own.items() if inspect.isfunction(value)]
        hint = "it defines an agent: pass it as --agent_func_path" if agent else f"found the functions {functions}"
        raise ValueError(f"{path} has no function {name}(queries, prompts, labels, **kwargs); {hint}")
    return function


def _caller(function: Callable[..., Any], shown: str) -> Callable[[RewardRequest, Logs], Any]:
    """How the function is called with a request; the extra logs that it writes go into the second argument."""
    is_module = hasattr(function, "forward")
    try:
        parameters = inspect.signature(function.forward if is_module else function).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward function {shown}: its signature cannot be read; wrap it into a def") from error
    positional, trl_style = _style(parameters, shown)
    filled = set(list(parameters)[: len(positional)])
    others = set(parameters) - filled
    taken = filled.union(positional)

    def call(request: RewardRequest, logged: Logs) -> Any:
        offered = _offered(request, logged, trl_style)
        named = {key: offered[key] for key in others if key in offered}
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            more = set(request.columns) | set(_EXTRAS if not trl_style else offered)
            named |= {key: offered[key] for key in more if key in offered and key not in taken}
        missing = [key for key in others if _is_required(parameters[key]) and key not in named]
        if missing:
            raise _RequestError(
                f"reward function {shown} needs {missing[0]!r}, which is no column of the data "
                f"(columns: {sorted(request.columns)}); give it a default, or add the column"
            )
        arguments = [_copied(offered[key]) for key in positional]
        named = {key: _copied(value) for key, value in named.items()}
        if not is_module:
            return function(*arguments, **named)
        import torch

        with torch.inference_mode():
            return function(*arguments, **named)

    return call


def _style(parameters: Parameters, shown: str) -> tuple[tuple[str, ...], bool]:
    """What is passed by position, and whether the signature is TRL's.

    Raises:
        ValueError: none of the known signatures.
    """
    if "completions" in parameters:
        return (), True
    kinds = {one.kind for one in parameters.values()}
    places = [name for name, one in parameters.items() if one.kind in _POSITIONAL]
    required = [name for name, one in parameters.items() if _is_required(one)]
    known = {*_OPENRLHF, *_EXTRAS}
    takes_three = len(places) >= 3 or inspect.Parameter.VAR_POSITIONAL in kinds
    if takes_three and not any(
        name in known and name != expected for name, expected in zip(places, _OPENRLHF, strict=False)
    ):
        return _OPENRLHF, False
    if known.intersection(required):  # by name, whatever the order; the others must be columns
        return (), False
    if len(required) == 1 and required[0] in places:
        return ("queries",), False
    raise ValueError(f"reward function {shown}({', '.join(map(str, parameters.values()))}): expected {STYLES}")


def _offered(request: RewardRequest, logged: Logs, trl_style: bool) -> dict[str, Any]:
    """Everything a function may ask for, by name; our names win over columns. TRL's functions get chats as messages."""
    prompts, completions = request.prompts, request.responses
    if trl_style and request.inputs is not None and not isinstance(request.inputs[0], str):
        prompts = request.inputs
        completions = [[{"role": "assistant", "content": text}] for text in request.responses]
    offered = dict(request.columns) | {
        "queries": request.queries,
        "prompts": prompts,
        "labels": request.labels if request.labels is not None else [None] * len(request),
        "responses": request.responses,
        "completions": completions,
        "trainer_state": SimpleNamespace(global_step=request.step, epoch=request.epoch),
        "log_extra": lambda column, values: logged.update({column: values}),
        "log_metric": lambda name, value: logged.update({name: value}),
        "step": request.step,
        "epoch": request.epoch,
    }
    return offered | ({} if request.response_ids is None else {"completion_ids": request.response_ids})


def _copied(value: Any) -> Any:
    """The value with lists and dicts of its own, whatever they hold: a function may change what it is given, and the
    request goes to other sources too."""
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value


def _read_answer(value: Any, count: int, what: str, logged: Logs) -> RewardResult:
    if not isinstance(value, Mapping):
        value = {"rewards": value}
    if "rewards" not in value:
        raise ValueError(f"{what}: expected a dict with 'rewards' for {count} samples, got the keys {list(value)}")
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        logger.warning("%s: the keys %s are not used; known are %s", what, unknown, list(_KEYS))
    rewards = read_numbers(value["rewards"], count, what)
    scores = rewards
    if value.get("scores") is not None:
        scores = read_numbers(value["scores"], count, f"{what}, scores")
    logs = {} if value.get("extra_logs") is None else read_logs(value["extra_logs"], what)
    return RewardResult(rewards, scores, None, read_logs(logged, what) | logs)


def _label(request: RewardRequest, place: int) -> Any:
    return None if request.labels is None else request.labels[place]


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variable


def _shown(function: Callable[..., Any]) -> str:
    """Name of the function, with the file it comes from."""
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name})"
