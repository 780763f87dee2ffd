"""The rule reward: 1 for a response whose final answer equals the label, 0 for another one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from openrlhf.evaluation.sampling import grade_text
from openrlhf.rewards.source import RewardRequest, RewardResult


class RuleReward:
    """Grades responses by their labels, as a reward source.

    Args:
        grade: from (response, label as text) to (predicted answer or None, right or not); the default takes the boxed
            answer, else the last number, and compares as `openrlhf.rewards.grading` does.
    """

    name = "rule"

    def __init__(self, grade: Callable[[str, str], tuple[str | None, bool]] = grade_text) -> None:
        self.grade = grade

    def score(self, request: RewardRequest) -> RewardResult:
        """See `RewardSource.score`; a response whose label is None is not scored."""
        if request.labels is None:
            raise ValueError("the rule reward compares answers with labels, and the data has none; pass --label_key")
        graded = [
            (None, np.nan) if label is None else self.grade(response, str(label))
            for response, label in zip(request.responses, request.labels, strict=True)
        ]
        rewards = np.array([right for _, right in graded], np.float32)
        unanswered = np.array([float(predicted is None) for predicted, _ in graded])
        return RewardResult(rewards, rewards, None, {"unanswered": float(unanswered.mean())})

    def close(self) -> None:
        """Nothing to give back."""
