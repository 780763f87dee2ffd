"""The goal state: mean last hidden state of preferred responses, and the similarity of any state to it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from openrlhf.evaluation.batching import pad_right, token_batches, token_windows
from openrlhf.models.functional import gather_at, last_valid_index
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.checkpoint import atomic_write_bytes, atomic_write_text

FILE_NAME = "goal_state.npy"


@dataclass(frozen=True)
class GoalState:
    """Mean hidden state at the EOS of `count` chosen responses, with what is needed to compare it rightly."""

    vector: np.ndarray  # (1, H) float32
    count: int  # responses in the mean
    mean_norm: float  # mean L2 norm of the single states; the vector's norm is smaller the more they differ
    template: str | None  # prompt template of the responses
    apply_chat_template: bool  # prompts rendered by the tokenizer's chat template instead
    max_len: int  # tokens of prompt + response
    checkpoint: str  # fingerprint of the reward model
    dataset: str  # where the responses come from

    def __post_init__(self) -> None:
        if self.vector.ndim != 2 or self.vector.shape[0] != 1 or self.vector.dtype != np.float32:
            raise ValueError(
                f"expected a float32 goal state of shape (1, H), got {self.vector.dtype} {self.vector.shape}"
            )
        if not np.isfinite(self.vector).all():
            raise ValueError("the goal state is not finite: the checkpoint or its dtype is broken")
        if self.count < 1:
            raise ValueError(f"expected a goal state of at least one response, got count {self.count}")

    @property
    def digest(self) -> str:
        """Short hash of the vector."""
        return hashlib.sha256(self.vector.tobytes()).hexdigest()[:16]

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write goal_state.npy and goal_state.json into a folder (made when absent); returns both paths."""
        array_path = Path(folder) / FILE_NAME
        details = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "vector"
        }
        details |= {
            "hidden_size": self.vector.shape[1],
            "norm": float(np.linalg.norm(self.vector)),
            "digest": self.digest,
        }
        buffer = io.BytesIO()
        np.save(buffer, self.vector)
        atomic_write_bytes(array_path, buffer.getvalue())
        atomic_write_text(array_path.with_suffix(".json"), json.dumps(details, indent=2, ensure_ascii=False) + "\n")
        return array_path, array_path.with_suffix(".json")

    @classmethod
    def load(cls, path: str | Path) -> GoalState:
        """Read a goal state from its folder or its .npy file.

        Raises:
            ValueError: a file is missing, unreadable, of another shape, or the two do not belong together.
        """
        array_path = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        json_path = array_path.with_suffix(".json")
        for file in (array_path, json_path):
            if not file.is_file():
                raise ValueError(f"expected a goal state at {file}, found no file; make one with get_representation")
        try:
            vector = np.load(array_path, allow_pickle=False)
            details = json.loads(json_path.read_text(encoding="utf-8"))
            known = {field.name: details[field.name] for field in dataclasses.fields(cls) if field.name != "vector"}
        except (ValueError, EOFError, KeyError, TypeError) as error:
            raise ValueError(
                f"{array_path}: cannot read the goal state ({error!r}); make it anew with get_representation"
            ) from error
        goal = cls(vector=vector, **known)
        if goal.digest != details.get("digest"):
            raise ValueError(
                f"{array_path} and {json_path.name} do not belong together; make them anew with get_representation"
            )
        return goal

    def check(self, checkpoint: str) -> None:
        """Refuse a goal state of another checkpoint: hidden states of two models cannot be compared.

        Raises:
            ValueError: names both fingerprints.
        """
        if checkpoint != self.checkpoint:
            raise ValueError(
                f"the goal state was made with checkpoint {self.checkpoint}, the reward model is {checkpoint}; "
                "run get_representation with this reward model"
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
    return gather_at(hidden_states, last_valid_index(attention_mask).unsqueeze(1)).squeeze(1)


def goal_similarity(hidden_states: Tensor, goal: Tensor) -> Tensor:
    """Cosine between the state at every token and the goal state: the Q-value of the paper.

    Args:
        hidden_states: (B, S, H), any float dtype.
        goal: (1, H) or (H,).
    Returns:
        (B, S) float32 in [-1, 1]; 0 where the state or the goal is the zero vector.
    Raises:
        ValueError: another hidden size.
    """
    goal = goal.reshape(-1).to(hidden_states.device, torch.float32)
    if goal.shape[0] != hidden_states.shape[-1]:
        raise ValueError(f"expected a goal state of hidden size {hidden_states.shape[-1]}, got {goal.shape[0]}")
    states = hidden_states.float()
    products = states @ torch.nn.functional.normalize(goal, dim=0)
    norms = torch.linalg.vector_norm(states, dim=-1)
    return torch.where(norms > 0, products / norms, 0.0).clamp(-1.0, 1.0)


@torch.inference_mode()
def compute_goal_state(
    model: RewardModel,
    sequences: Iterable[Sequence[int]],
    *,
    batch_tokens: int,
    template: str | None,
    max_len: int,
    checkpoint: str,
    dataset: str,
    apply_chat_template: bool = False,
    total: int | None = None,
    progress: bool = True,
) -> GoalState:
    """Mean of the last hidden states of token sequences.

    States are summed in float64, so the result does not depend on the batch size.

    Args:
        sequences: token ids of prompt + chosen response, ending in EOS; read once, in order.
        batch_tokens: most tokens of a forward pass, padding included.
        total: number of sequences, for the progress bar.
        template, max_len, checkpoint, dataset, apply_chat_template: recorded in the result.
    Raises:
        ValueError: no sequence, or a state that is not finite.
    """
    model.eval()
    vector_sum = torch.zeros(model.hidden_size, dtype=torch.float64)
    norm_sum, count = 0.0, 0
    with tqdm(total=total, desc="goal state", unit="response", disable=not progress) as bar:
        for window in token_windows(sequences, batch_tokens):
            for batch in token_batches([len(sequence) for sequence in window], batch_tokens):
                ids, mask = pad_right([window[i] for i in batch], model.config.pad_token_id, model.device)
                states = last_state(model(ids, mask).hidden_states, mask).cpu().double()
                vector_sum += states.sum(dim=0)
                norm_sum += states.norm(dim=-1).sum().item()
                count += len(batch)
                bar.update(len(batch))
    if count == 0:
        raise ValueError("expected at least one chosen response for the goal state, got none")
    return GoalState(
        vector=(vector_sum / count).float().numpy()[None],
        count=count,
        mean_norm=norm_sum / count,
        template=template,
        apply_chat_template=apply_chat_template,
        max_len=max_len,
        checkpoint=checkpoint,
        dataset=dataset,
    )
