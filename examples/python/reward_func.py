"""The smallest reward: longer responses are better. `--remote_rm_url examples/python/reward_func.py`."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    """Called once with a whole batch, the samples of one prompt together.

    Args:
        queries: N texts of prompt and response, as the policy wrote them (with EOS).
        prompts: N prompts; each query starts with its prompt.
        labels: N values of the column `--label_key`, None without one.
        kwargs: `responses` without special tokens, `step`, `epoch`, and every other column of the data as a list.
    Returns:
        rewards: what the policy is trained on. scores: 0 to 1, what dynamic filtering reads. extra_logs: means are
        logged.
    """
    lengths = [len(query[len(prompt) :].split()) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([min(length / 50, 1.0) for length in lengths])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"words": lengths}}
