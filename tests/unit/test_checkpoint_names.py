"""What is said of a folder that is no reward model."""

import pytest

from openrlhf.cli.reward_checkpoint import find_checkpoint
from tests.tiny import save_tiny_causal_lm


def test_a_language_model_is_told_to_be_none(tmp_path):
    folder = save_tiny_causal_lm(tmp_path / "policy")
    with pytest.raises(ValueError) as error:
        find_checkpoint(str(folder))
    told = str(error.value)
    assert "is no reward model but LlamaForCausalLM: train one with train_rm" in told
    assert "--input_template (train_ppo: --reward_template): nemo, plain, or a text with {question}" in told
