"""Conversation quality by a local reward model, halved for curt answers.

`QUALITY_MODEL=ckpt/my_reward_model` names the model; `--remote_rm_url examples/python/conversation_reward_func.py`.
A reward model alone needs no function: `--reward_pretrain ckpt/my_reward_model`.
"""

import functools
import os

import torch

from openrlhf.cli.reward_checkpoint import find_checkpoint
from openrlhf.rewards.model import TextScorer

FEW_WORDS = 10
MODEL = os.environ.get("QUALITY_MODEL")
if not MODEL:
    raise ValueError("set QUALITY_MODEL to the reward model that judges, such as ckpt/my_reward_model")


@functools.cache
def quality_model() -> TextScorer:
    """The model, loaded at the first call."""
    checkpoint = find_checkpoint(MODEL, input_template="{}")
    return TextScorer(*checkpoint.load(), checkpoint.max_len)


def reward_func(queries, prompts, labels, responses, **kwargs):
    """Rewards from 0 to 1; a conversation too long for the model is not scored (NaN)."""
    model = quality_model()
    raw = model.rewards(model.score(model.encode(prompts, responses)))
    quality = torch.sigmoid(torch.from_numpy(raw))
    curt = torch.tensor([len(response.split()) < FEW_WORDS for response in responses])
    rewards = torch.where(curt, quality * 0.5, quality)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"quality": quality, "curt": curt}}
