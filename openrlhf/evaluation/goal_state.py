"""Goal states: the mean last hidden state of preferred responses, and the similarity of any state to it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.evaluation.goal_accumulator import (
    EncodedResponse,
    GoalSums,
    accumulate_states,
    last_state,
    mean_pairwise_cosine,
)
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.checkpoint import atomic_write_bytes, atomic_write_text
from openrlhf.utils.ranks import Ranks

__all__ = [
    "FILE_NAME",
    "QUESTIONS_FILE",
    "GoalState",
    "QuestionGoals",
    "compute_goal_state",
    "goal_of_sums",
    "goal_similarities",
    "goal_similarity",
    "last_state",
    "load_goal",
    "question_goals_of_sums",
]

FILE_NAME = "goal_state.npy"
QUESTIONS_FILE = "goal_questions.jsonl"
_PER_QUESTION = "per question"


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
    # Files of earlier versions lack what follows.
    checkpoint_name: str | None = None  # folder or name of the reward model
    dtype: str | None = None  # of the model when it ran, such as "float32"
    dataset_fingerprint: str | None = None  # of the rows read
    mean_pairwise_cosine: float | None = None  # over all pairs of single states; None for one response
    attribute: str | None = None  # the responses are those rated at least min_value in it
    columns: list[str] | None = None  # the columns that were compared with min_value
    min_value: float | None = None
    counts: dict[str, int] | None = None  # rows read, responses truncated and left out, by reason

    def __post_init__(self) -> None:
        if self.vector.ndim != 2 or self.vector.shape[0] != 1 or self.vector.dtype != np.float32:
            raise ValueError(
                f"expected a float32 goal state of shape (1, H), got {self.vector.dtype} {self.vector.shape}"
            )
        _check_finite(self.vector)
        if self.count < 1:
            raise ValueError(f"expected a goal state of at least one response, got count {self.count}")

    @property
    def digest(self) -> str:
        """Short hash of the vector."""
        return hashlib.sha256(self.vector.tobytes()).hexdigest()[:16]

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write goal_state.npy and goal_state.json into a folder (made when absent); returns both paths."""
        details = _described(self, "vector") | {"norm": float(np.linalg.norm(self.vector))}
        (Path(folder) / QUESTIONS_FILE).unlink(missing_ok=True)
        return _write(folder, self.vector, details)

    @classmethod
    def load(cls, path: str | Path) -> GoalState:
        """Read a goal state from its folder or its .npy file; see `load_goal`."""
        goal = load_goal(path)
        if not isinstance(goal, cls):
            raise ValueError(f"{path}: expected one goal state, found goals per question")
        return goal

    def check(self, checkpoint: str, name: str | None = None, hidden_size: int | None = None) -> None:
        """Refuse a goal state of another checkpoint: hidden states of two models cannot be compared.

        Args:
            checkpoint: fingerprint of the reward model.
            name: its folder or name, for the message.
            hidden_size: its hidden size, where it is known.
        Raises:
            ValueError: names both checkpoints.
        """
        _check_checkpoint(self, self.vector.shape[1], checkpoint, name, hidden_size)


@dataclass(frozen=True)
class QuestionGoals:
    """One goal state for each question: the mean hidden state at the EOS of its correct solutions.

    An upper bound of what a goal state can tell, because it needs correct solutions of the very question.
    """

    vectors: np.ndarray  # (Q, H) float32
    questions: tuple[str, ...]  # Q texts, all different
    question_counts: tuple[int, ...]  # Q, responses in each mean
    mean_norm: float  # mean L2 norm of the single states of all questions
    template: str | None  # as in GoalState, also below
    apply_chat_template: bool
    max_len: int
    checkpoint: str
    dataset: str
    checkpoint_name: str | None = None
    dtype: str | None = None
    dataset_fingerprint: str | None = None
    mean_pairwise_cosine: float | None = None  # within questions, mean over those of two responses and more
    counts: dict[str, int] | None = None

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or self.vectors.dtype != np.float32 or not len(self.vectors):
            raise ValueError(f"expected float32 goals of shape (Q, H), got {self.vectors.dtype} {self.vectors.shape}")
        _check_finite(self.vectors)
        sizes = {len(self.vectors), len(self.questions), len(set(self.questions)), len(self.question_counts)}
        if len(sizes) > 1 or min(self.question_counts) < 1:
            raise ValueError(
                f"expected {len(self.vectors)} different questions of at least one response, got {len(self.questions)} "
                f"with the counts {sorted(set(self.question_counts))}"
            )

    @property
    def count(self) -> int:
        """Responses in all means."""
        return sum(self.question_counts)

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of each question."""
        return {question: row for row, question in enumerate(self.questions)}

    @property
    def digest(self) -> str:
        """Short hash of the vectors and of what belongs to which."""
        digest = hashlib.sha256(self.vectors.tobytes())
        digest.update(json.dumps([self.questions, self.question_counts]).encode())
        return digest.hexdigest()[:16]

    def goal_of(self, question: str) -> np.ndarray | None:
        """(1, H) float32 goal of a question; None where it has none."""
        row = self.index.get(question)
        return None if row is None else self.vectors[row : row + 1]

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write goal_state.npy, goal_questions.jsonl and goal_state.json; returns the first path and the last."""
        rows = zip(self.questions, self.question_counts, strict=True)
        lines = (
            json.dumps({"question": question, "row": row, "count": count}, ensure_ascii=False)
            for row, (question, count) in enumerate(rows)
        )
        atomic_write_text(Path(folder) / QUESTIONS_FILE, "".join(f"{line}\n" for line in lines))
        details = _described(self, "vectors", "questions", "question_counts")
        details |= {"goals": _PER_QUESTION, "questions": len(self.questions), "count": self.count}
        return _write(folder, self.vectors, details)

    @classmethod
    def load(cls, path: str | Path) -> QuestionGoals:
        """Read goals per question from their folder or .npy file; see `load_goal`."""
        goals = load_goal(path)
        if not isinstance(goals, cls):
            raise ValueError(f"{path}: expected goals per question, found one goal state for all")
        return goals

    def check(self, checkpoint: str, name: str | None = None, hidden_size: int | None = None) -> None:
        """Refuse goals of another checkpoint; see `GoalState.check`."""
        _check_checkpoint(self, self.vectors.shape[1], checkpoint, name, hidden_size)


def load_goal(path: str | Path) -> GoalState | QuestionGoals:
    """Read a goal state, or goals per question, from the folder, the .npy file or the .json file beside it.

    Raises:
        ValueError: a file is missing, unreadable, of another shape, or the files do not belong together.
    """
    array_path = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    if array_path.suffix == ".json":
        array_path = array_path.with_suffix(".npy")
    json_path = array_path.with_suffix(".json")
    for file in (array_path, json_path):
        if not file.is_file():
            inside = sorted(str(found.parent) for found in array_path.parent.glob(f"*/{FILE_NAME}"))
            raise ValueError(
                f"expected a goal state at {file}, found no file; "
                + (f"name one of {', '.join(inside[:5])}" if inside else "make one with get_representation")
            )
    try:
        array = np.load(array_path, allow_pickle=False)
        details = json.loads(json_path.read_text(encoding="utf-8"))
        if details.get("goals") == _PER_QUESTION:
            lines = (array_path.parent / QUESTIONS_FILE).read_text(encoding="utf-8").split("\n")[:-1]
            rows = [json.loads(line) for line in lines]
            details |= {
                "questions": tuple(row["question"] for row in rows),
                "question_counts": tuple(row["count"] for row in rows),
            }
            kind, values = QuestionGoals, {"vectors": array}
        else:
            kind, values = GoalState, {"vector": array}
        for field in dataclasses.fields(kind):
            if field.name not in values and (field.name in details or field.default is dataclasses.MISSING):
                values[field.name] = details[field.name]
    except (ValueError, EOFError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"{array_path}: cannot read the goal state ({error!r}); make it anew with get_representation --overwrite"
        ) from error
    goal = kind(**values)
    if goal.digest != details.get("digest"):
        raise ValueError(
            f"{array_path} and {json_path.name} do not belong together; "
            "make them anew with get_representation --overwrite"
        )
    return goal


def goal_similarity(hidden_states: Tensor, goal: Tensor) -> Tensor:
    """Cosine between the state at every token and the goal state: the Q-value of the paper.

    Args:
        hidden_states: (..., H), any float dtype.
        goal: (1, H) or (H,).
    Returns:
        (...) float32 in [-1, 1]; 0 where the state or the goal is the zero vector.
    Raises:
        ValueError: another hidden size.
    """
    return goal_similarities(hidden_states, goal.reshape(1, -1))[..., 0]


def goal_similarities(hidden_states: Tensor, goals: Tensor) -> Tensor:
    """Cosine between every state and every goal.

    Args:
        hidden_states: (..., H), any float dtype.
        goals: (G, H).
    Returns:
        (..., G) float32 in [-1, 1]; 0 where the state or the goal is the zero vector.
    Raises:
        ValueError: another hidden size.
    """
    if goals.shape[1] != hidden_states.shape[-1]:
        raise ValueError(f"expected a goal state of hidden size {hidden_states.shape[-1]}, got {goals.shape[1]}")
    states, goals = hidden_states.float(), goals.to(hidden_states.device, torch.float32)
    products = states @ torch.nn.functional.normalize(goals, dim=1).T
    norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return torch.where(norms > 0, products / norms, 0.0).clamp(-1.0, 1.0)


def goal_of_sums(sums: GoalSums, goal: int = 0, **details: Any) -> GoalState:
    """The goal state of row `goal` of the sums.

    Args:
        details: the fields of GoalState that do not follow from sums; `counts` gets what was cut or left out.
    Raises:
        ValueError: no response in it.
    """
    count, unfit = int(sums.counts[goal]), int(sums.unfit[goal])
    if count == 0:
        raise ValueError(
            "expected at least one chosen response for the goal state, got none"
            + (f": of {unfit} none fits behind its prompt, raise --max_len" if unfit else "")
        )
    tally = {"truncated": int(sums.truncated[goal]), "prompt_too_long": unfit}
    return GoalState(
        vector=(sums.vectors[goal] / count).astype(np.float32)[None],
        count=count,
        mean_norm=float(sums.norms[goal] / count),
        mean_pairwise_cosine=mean_pairwise_cosine(sums.units[goal], count),
        **{**details, "counts": tally | (details.get("counts") or {})},
    )


def question_goals_of_sums(sums: GoalSums, questions: Sequence[str], **details: Any) -> QuestionGoals:
    """Goals of Q questions from sums of Q rows; a question of which no response fits is left out and counted.

    Args:
        details: the fields of QuestionGoals that do not follow from sums; `counts` gets what was cut or left out.
    Raises:
        ValueError: no response at all.
    """
    kept = np.flatnonzero(sums.counts)
    if not kept.size:
        raise ValueError("expected at least one chosen response for the goals, got none that fits behind its prompt")
    counts = sums.counts[kept]
    cosines = [mean_pairwise_cosine(sums.units[row], int(sums.counts[row])) for row in kept]
    cosines = [cosine for cosine in cosines if cosine is not None]
    tally = {
        "truncated": int(sums.truncated.sum()),
        "prompt_too_long": int(sums.unfit.sum()),
        "questions_without_goal": len(questions) - len(kept),
    }
    return QuestionGoals(
        vectors=(sums.vectors[kept] / counts[:, None]).astype(np.float32),
        questions=tuple(questions[row] for row in kept),
        question_counts=tuple(counts.tolist()),
        mean_norm=float(sums.norms.sum() / counts.sum()),
        mean_pairwise_cosine=float(np.mean(cosines)) if cosines else None,
        **{**details, "counts": tally | (details.get("counts") or {})},
    )


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
    ranks: Ranks | None = None,
    checkpoint_name: str | None = None,
    dataset_fingerprint: str | None = None,
) -> GoalState:
    """Mean of the last hidden states of token sequences; see `accumulate_states` for what it does not depend on.

    Args:
        sequences: token ids of prompt + chosen response, ending in EOS; read once, in order.
        batch_tokens: most tokens of a forward pass, padding included.
        total: number of sequences, for the progress bar.
        ranks: processes that share the work; all call this function alike and get the result.
        template, max_len, checkpoint, dataset, apply_chat_template, checkpoint_name, dataset_fingerprint: recorded in
            the result.
    Raises:
        ValueError: no sequence, or a state that is zero or not finite.
    """
    sums = GoalSums.zeros(1, model.hidden_size)
    responses = map(EncodedResponse, sequences)
    for added in accumulate_states(
        model, responses, sums, batch_tokens=batch_tokens, ranks=ranks, total=total, progress=progress
    ):
        sums = added
    return goal_of_sums(
        sums,
        template=template,
        apply_chat_template=apply_chat_template,
        max_len=max_len,
        checkpoint=checkpoint,
        dataset=dataset,
        checkpoint_name=checkpoint_name,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        dataset_fingerprint=dataset_fingerprint,
    )


def _described(goal: GoalState | QuestionGoals, *left_out: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(goal) if field.name not in left_out]
    return {name: getattr(goal, name) for name in names} | {"digest": goal.digest}


def _write(folder: str | Path, array: np.ndarray, details: dict[str, Any]) -> tuple[Path, Path]:
    array_path = Path(folder) / FILE_NAME
    json_path = array_path.with_suffix(".json")
    buffer = io.BytesIO()
    np.save(buffer, array)
    atomic_write_bytes(array_path, buffer.getvalue())
    details = details | {"hidden_size": array.shape[1]}
    atomic_write_text(json_path, json.dumps(details, indent=2, ensure_ascii=False) + "\n")
    return array_path, json_path


def _check_finite(array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise ValueError("the goal state is not finite: the checkpoint or its dtype is broken")


def _check_checkpoint(
    goal: GoalState | QuestionGoals, size: int, checkpoint: str, name: str | None, hidden_size: int | None
) -> None:
    if checkpoint == goal.checkpoint and hidden_size in (None, size):
        return
    made = f"{goal.checkpoint_name} ({goal.checkpoint})" if goal.checkpoint_name else goal.checkpoint
    asked = f"{name} ({checkpoint})" if name else checkpoint
    if hidden_size not in (None, size):
        made, asked = f"{made} of hidden size {size}", f"{asked} of hidden size {hidden_size}"
    raise ValueError(
        f"the goal state was made with checkpoint {made}, the reward model is {asked}; "
        "run get_representation with this reward model"
    )
