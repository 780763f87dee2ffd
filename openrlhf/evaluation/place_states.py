"""States and values at some places of many responses, and nothing of the other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from openrlhf.datasets.completions import Completion
from openrlhf.evaluation.batching import cut_windows
from openrlhf.evaluation.metrics import prefix_index
from openrlhf.evaluation.passes import SequenceReader
from openrlhf.evaluation.scoring import BATCH_TOKENS, WINDOW_BATCHES, ScoringBar, encode_completions
from openrlhf.models.reward_model import RewardModel

PERCENTS = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


@dataclass(frozen=True)
class PlaceStates:
    """What a reward model makes of N labelled responses at P places of each."""

    states: np.ndarray  # (N, P, H) float32 last hidden states
    values: np.ndarray  # (N, P) float32 the value head, reward units
    labels: np.ndarray  # (N,) bool, True for a correct response
    questions: tuple[str, ...]  # (N,) texts

    def __post_init__(self) -> None:
        count, places = self.values.shape
        if self.states.shape[:2] != (count, places) or self.labels.shape != (count,) or len(self.questions) != count:
            raise ValueError(
                f"expected states, values, labels and questions of the same responses, got states of shape "
                f"{self.states.shape}, values {self.values.shape}, labels {self.labels.shape} and "
                f"{len(self.questions)} questions"
            )

    def __len__(self) -> int:
        """Number of responses."""
        return len(self.labels)


@torch.inference_mode()
def read_places(
    model: RewardModel,
    tokenizer,
    completions: Sequence[Completion],
    *,
    template: str,
    apply_chat_template: bool = False,
    max_len: int,
    percents: Sequence[float] = PERCENTS,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> PlaceStates:
    """Last hidden states and values of completions after some shares of the response, each as if it were alone.

    A response that is too long is cut as for scoring; one of which nothing fits behind its prompt is left out.

    Args:
        completions: N labelled completions.
        template, apply_chat_template, max_len: as in training; see `encode_completions`.
        percents: P shares of the response in (0, 100]; the tokens are those of `prefix_index`.
        batch_tokens: tokens of a forward pass as computed; None: what suits the model's device.
    Raises:
        ValueError: a state or value that is not finite (names the completion).
    """
    on_gpu = model.device.type == "cuda"
    batch_tokens = batch_tokens or BATCH_TOKENS[on_gpu]
    reader = SequenceReader(model.eval(), batch_tokens)
    states = np.empty((len(completions), len(percents), model.hidden_size), np.float32)
    values = np.empty(states.shape[:2], np.float32)
    fits = np.zeros(len(completions), bool)
    encode = {"template": template, "apply_chat_template": apply_chat_template, "max_len": max_len}
    encoded = encode_completions(tokenizer, completions, **encode)
    first = 0
    with ScoringBar(len(completions), disable=not progress, desc="states") as bar:
        for window in cut_windows(encoded, WINDOW_BATCHES[on_gpu] * batch_tokens):
            rows = [first + i for i, one in enumerate(window) if len(one)]
            first += len(window)
            prompts = [len(encoded[row].prompt_ids) for row in rows]
            for one in reader.read([encoded[row].ids for row in rows], prompts):
                members = [rows[place] for place in one.members]
                columns = [
                    [prompts[place] + prefix_index(encoded[rows[place]].num_actions, percent) for percent in percents]
                    for place in one.members
                ]
                tokens = one.places.gather(1, torch.tensor(columns)).flatten().to(one.states.device)
                found = one.states[tokens].float().cpu().numpy().reshape(len(members), len(percents), -1)
                states[members], fits[members] = found, True
                values[members] = one.values[tokens].float().cpu().numpy().reshape(len(members), -1)
                broken = [
                    row for row in members if not (np.isfinite(states[row]).all() and np.isfinite(values[row]).all())
                ]
                if broken:
                    raise ValueError(
                        f"completion {broken[0]}: a state or value is not finite; check the checkpoint and its dtype"
                    )
                bar.add(len(members), sum(len(encoded[row]) for row in members))
            bar.add(len(window) - len(rows), 0)
    if not fits.all():
        states, values = states[fits], values[fits]
    kept = [completions[row] for row in np.flatnonzero(fits)]
    labels = np.array([one.is_correct for one in kept], bool)
    return PlaceStates(states, values, labels, tuple(one.question for one in kept))
