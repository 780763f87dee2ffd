"""Work of a step that processes share: which part is whose, and what happens when it fails in one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from openrlhf.trainer.engine import Engine
from openrlhf.trainer.rollout import Rollout
from openrlhf.trainer.rollout_logprobs import with_logprobs

Result = TypeVar("Result")


def own_part(places: range, engine: Engine) -> range:
    """The places of this process: over all ranks, in their order, every place once; sizes differ by at most 1."""
    count, rank, world = len(places), engine.rank, engine.world_size
    return places[count * rank // world : count * (rank + 1) // world]


def together(engine: Engine, work: Callable[[], Result]) -> Result:
    """Run work in every process; an error in one of them ends all, for the others would wait for it.

    Raises:
        Exception: what work raised in this process.
        RuntimeError: work raised in another one; has its message.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = engine.gather_objects(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for rank, message in enumerate(told):
        if message is not None:
            raise RuntimeError(f"stopped by process {rank}: {message}")
    return result


def gather_shares(engine: Engine, work: Callable[[], Result | None]) -> list[Result]:
    """What work returns in all processes, in the order of their ranks, known in every process; None is left out.

    Raises:
        Exception: as of `together`.
    """
    return [share for share in engine.gather_objects(together(engine, work)) if share is not None]


def shared_logprobs(
    engine: Engine, rollout: Rollout, reference: nn.Module | None, critic: nn.Module | None, **options: Any
) -> Rollout:
    """`with_logprobs` of the engine's model, where each process computes rows of all lengths and gets all of them.

    Args:
        rollout: the same in every process.
        options: temperature and batch_size of `with_logprobs`.
    """
    start = time.monotonic()
    rows = rollout.lengths.argsort(stable=True)[engine.rank :: engine.world_size]

    def work() -> tuple[Tensor, dict[str, Tensor]] | None:
        if not len(rows):
            return None
        part = rollout.select(rows)
        done = with_logprobs(part, engine.module, reference, critic, autocast=engine.autocast, **options)
        return rows, done.computed

    rollout = rollout.with_computed(gather_shares(engine, work))
    rollout.logs["seconds_logprobs"] = time.monotonic() - start
    return rollout
