"""Some responses of an evaluation, kept for people: the same held-out prompts every time."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from openrlhf.datasets.prompts import PromptData
from openrlhf.trainer.rollout import Rollout

SHOWN = 8  # the first prompts of the held-out ones


def held_out_samples(prompts: PromptData, rollout: Rollout, gold: Tensor | None) -> list[dict[str, Any]]:
    """Lines for `RunLog.log_samples`: place, prompt, label, response, reward and gold_reward of the first prompts.

    Args:
        rollout: one response to every prompt, in their order.
        gold: (N,) rewards of the gold source, NaN: not scored; None without one.
    """
    labels = prompts.labels or [None] * len(prompts)
    golds = [None] * len(prompts) if gold is None else [None if math.isnan(one) else one for one in gold.tolist()]
    return [
        {
            "place": place,
            "prompt": sample["prompt"],
            "label": None if labels[place] is None else str(labels[place]),
            "response": sample["response"],
            "reward": sample["reward"],
            "gold_reward": golds[place],
        }
        for place, sample in enumerate(rollout.samples[:SHOWN])
    ]
