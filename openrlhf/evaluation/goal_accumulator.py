"""Sums of last hidden states over responses: what goal states are the means of, and how they survive a stop."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from openrlhf.evaluation.batching import pad_right, token_batches, token_windows
from openrlhf.models.functional import last_valid_index, states_at
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.checkpoint import atomic_write_bytes
from openrlhf.utils.ranks import OneProcess, Ranks

SUMS_FILE = "goal_state.partial.npz"


@dataclass(frozen=True)
class EncodedResponse:
    """A prompt and a chosen response as token ids, and the goals that it counts in."""

    ids: Sequence[int]  # ends in EOS; empty when nothing of the response fits behind the prompt
    goals: tuple[int, ...] = (0,)  # numbers of the goals, at least one
    truncated: bool = False  # the end of the response was cut off

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class GoalSums:
    """Sums over the responses read so far, one row a goal; a response counts in each of its goals."""

    vectors: np.ndarray  # (G, H) float64, sum of the states
    units: np.ndarray  # (G, H) float64, sum of the states divided by their L2 norms
    norms: np.ndarray  # (G,) float64, sum of the L2 norms
    counts: np.ndarray  # (G,) int64, responses in the sums
    truncated: np.ndarray  # (G,) int64, those of them whose end was cut off
    unfit: np.ndarray  # (G,) int64, responses left out because nothing fits behind their prompt
    position: int = 0  # responses read, in the order given

    @classmethod
    def zeros(cls, goals: int, hidden_size: int) -> GoalSums:
        """Sums over nothing."""
        return cls(
            vectors=np.zeros((goals, hidden_size)),
            units=np.zeros((goals, hidden_size)),
            norms=np.zeros(goals),
            counts=np.zeros(goals, dtype=np.int64),
            truncated=np.zeros(goals, dtype=np.int64),
            unfit=np.zeros(goals, dtype=np.int64),
        )


def last_state(hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden state at the last real token of each row.

    Args:
        hidden_states: (B, S, H).
        attention_mask: (B, S) bool, True on real tokens; padding on either side.
    Returns:
        (B, H).
    Raises:
        ValueError: a row without a real token.
    """
    last = last_valid_index(attention_mask)
    return states_at(hidden_states, torch.arange(len(last), device=last.device), last.unsqueeze(1)).squeeze(1)


def mean_pairwise_cosine(unit_sum: np.ndarray, count: int) -> float | None:
    """Mean cosine over all pairs of different states, from the sum of their unit vectors alone.

    The squared norm of the sum holds every ordered pair once and each of the N states with itself:
    (|sum|^2 - N) / (N (N - 1)).

    Args:
        unit_sum: (H,) float64, sum of N vectors of norm 1.
        count: N.
    Returns:
        Cosine in [-1, 1]; None for fewer than two states.
    """
    if count < 2:
        return None
    return float((unit_sum @ unit_sum - count) / (count * (count - 1)))


def accumulate_states(
    model: RewardModel,
    responses: Iterable[EncodedResponse],
    sums: GoalSums,
    *,
    batch_tokens: int,
    ranks: Ranks | None = None,
    total: int | None = None,
    progress: bool = True,
) -> Iterator[GoalSums]:
    """Add the last hidden states of responses to sums, window by window.

    States are read in float32 and summed in float64, so the result does not depend on the batches, on the number of
    processes or on a stop in between.

    Args:
        responses: from number `sums.position` on, the same in every process; read once, in order.
        sums: where to go on; `GoalSums.zeros` to start. It is not changed.
        batch_tokens: most tokens of a forward pass, padding included.
        ranks: processes that share the work; all call this function alike and get all results.
        total: number of all responses, for the progress bar.
    Yields:
        The sums after each window, the same in every process. They can be stored, and later gone on from.
    Raises:
        ValueError: a state that is zero or not finite (names the response).
    """
    ranks = ranks or OneProcess()
    model.eval()
    with _ResponseBar(total, sums.position, disable=not progress or ranks.rank > 0) as bar:
        for window in token_windows(responses, batch_tokens * ranks.world_size):
            goals = np.unique([goal for one in window for goal in one.goals])
            partial = _window_sums(model, window, goals, batch_tokens, ranks, sums.position, bar)
            gathered = ranks.gather_objects(partial)
            problems = [problem for problem, _ in gathered if problem is not None]
            if problems:
                raise ValueError(problems[0])
            sums = _add(sums, goals, [part for _, part in gathered])
            sums = replace(sums, position=sums.position + len(window))
            bar.reach(sums.position, sum(map(len, window)))
            yield sums


def save_sums(path: str | Path, sums: GoalSums, identity: Mapping[str, Any]) -> None:
    """Write sums and what they are of; after a crash the file holds the old or the new ones."""
    buffer = io.BytesIO()
    np.savez(buffer, identity=np.array(json.dumps(identity)), **vars(sums))
    atomic_write_bytes(path, buffer.getvalue())


def load_sums(path: str | Path) -> tuple[dict[str, Any], GoalSums] | None:
    """The identity and the sums of a file written by `save_sums`; None where there is none.

    Raises:
        ValueError: the file cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            identity = json.loads(str(arrays["identity"]))
            named = {field.name: arrays[field.name] for field in fields(GoalSums)}
    except Exception as error:  # zipfile, numpy and json raise many unrelated types
        raise ValueError(
            f"{path}: cannot read the unfinished sums ({error!r}); remove the file to start anew"
        ) from error
    return identity, GoalSums(**{**named, "position": int(named["position"])})


@torch.inference_mode()
def _window_sums(
    model: RewardModel,
    window: Sequence[EncodedResponse],
    goals: np.ndarray,
    batch_tokens: int,
    ranks: Ranks,
    first: int,
    bar: _ResponseBar,
) -> tuple[str | None, GoalSums]:
    """This process's share of the sums of a window, with rows for `goals` alone; or what is wrong with a state.

    A problem is returned and not raised, so that no other process waits for this one.
    """
    fitting = [i for i, one in enumerate(window) if len(one)]
    sums = GoalSums.zeros(len(goals), model.hidden_size)
    if ranks.rank == 0:  # what needs no model
        for one in window:
            rows = np.searchsorted(goals, one.goals)
            sums.truncated[rows] += one.truncated and len(one) > 0
            sums.unfit[rows] += len(one) == 0
    batches = token_batches([len(window[i]) for i in fitting], batch_tokens, model.switch_length)
    for batch in batches[ranks.rank :: ranks.world_size]:
        members = [fitting[position] for position in batch]
        ids, mask = pad_right([window[i].ids for i in members], model.config.pad_token_id, model.device)
        states = last_state(model(ids, mask).hidden_states, mask).float().cpu().numpy().astype(np.float64)
        norms = np.linalg.norm(states, axis=1)
        broken = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
        if broken.size:
            number = first + members[broken[0]]
            return (
                f"response {number}: its hidden state is zero or not finite; check the checkpoint and its dtype",
                sums,
            )
        rows = [row for row, i in enumerate(members) for _ in window[i].goals]
        places = np.searchsorted(goals, [goal for i in members for goal in window[i].goals])
        np.add.at(sums.vectors, places, states[rows])
        np.add.at(sums.units, places, states[rows] / norms[rows, None])
        np.add.at(sums.norms, places, norms[rows])
        np.add.at(sums.counts, places, 1)
        bar.add(len(members), int(mask.sum()))
    return None, sums


def _add(sums: GoalSums, goals: np.ndarray, parts: Sequence[GoalSums]) -> GoalSums:
    """Sums with the parts of all processes, whose rows are those of `goals`, added in the order of the processes."""
    added = {}
    for field in fields(GoalSums):
        if field.name != "position":
            added[field.name] = getattr(sums, field.name).copy()
            for part in parts:
                added[field.name][goals] += getattr(part, field.name)
    return replace(sums, **added)


class _ResponseBar(tqdm):
    """Progress over responses with tokens per second of all processes; time left is that of the bar."""

    def __init__(self, total: int | None, initial: int, disable: bool):
        super().__init__(total=total, initial=initial, desc="goal state", unit="response", disable=disable)
        self.tokens = 0  # of finished windows
        self.open_tokens = 0  # of this process, in the window being read

    def add(self, responses: int, tokens: int) -> None:
        """Move by what this process has done."""
        self.open_tokens += tokens
        self._show(responses)

    def reach(self, position: int, tokens: int) -> None:
        """Move to the end of a window that holds this many tokens."""
        self.tokens += tokens
        self.open_tokens = 0
        self._show(position - self.n)

    def _show(self, responses: int) -> None:
        elapsed = self.format_dict["elapsed"]
        rate = (self.tokens + self.open_tokens) / elapsed if elapsed else 0
        self.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self.update(responses)
