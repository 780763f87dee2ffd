"""What an agent's extra logs become in the log of a run."""

import numpy as np
import torch

from openrlhf.rewards.episode import Episode, mean_logs


def episode(**logs) -> Episode:
    return Episode.of({"observation_tokens": [1, 2], "action_ranges": [(1, 2)], "reward": 1.0, "extra_logs": logs})


def test_numbers_are_averaged_over_the_episodes_that_have_them():
    episodes = [
        episode(steps=1, right=True, note="a", grid=[1, 2]),
        episode(steps=torch.tensor(4.0), right=False, note="3"),
        episode(steps=np.array([1.0]), other=None, bad=float("inf")),
    ]
    assert mean_logs(episodes) == {"steps": 2.0, "right": 0.5}
    assert mean_logs([]) == {}
