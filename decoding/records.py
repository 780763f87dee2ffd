"""What a decoding method is asked and what it gives back."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Question:
    """One row of the input file, rendered for both models."""

    index: int  # line of the question in the input file, from 0; the key of its random streams
    text: str  # the question itself, without a template
    policy_prompt: str  # what the policy continues: template and question
    reward_prompt: str | None  # what the reward model reads before the response; None without a reward model
    expected_answer: str | None = None
    row: Mapping = field(default_factory=dict)  # the other columns, kept as they are


@dataclass(frozen=True)
class Decoded:
    """One response that a method gives for a question."""

    text: str  # without special tokens, cut at the stop
    ids: tuple[int, ...]  # tokens of the policy, its EOS included
    finished: bool  # ended by EOS or a stop; False where a limit of tokens or steps cut it off
    score: float | None = None  # what the method ranks its responses by
    sample: int = 0  # the response's place among the samples of its question
    reward: float | None = None  # of the whole response, ending in EOS, as eval_rm gives it
    partial_rewards: list[float] | None = None  # the head's value at every token of the reward model
    cosine_sim: list | None = None  # goal similarity at every token of the reward model


@dataclass(frozen=True)
class Answered:
    """What one method did for one question."""

    question: Question
    method: str
    seed: int
    responses: list[Decoded]  # best first
    answer: str | None = None
    is_correct: bool | None = None
    policy_tokens: int = 0  # tokens drawn, those of dropped samples included
    reward_tokens: int = 0  # tokens run through the reward model, prompts excluded
    seconds: float = 0.0  # wall time of the batch divided by its questions
    trace: list | None = None  # plain JSON values
    details: Mapping = field(default_factory=dict)  # further figures of the method, plain JSON values
