"""The checkpoint that train_sft and train_ppo leave behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf.cli.parser import parse_config
from openrlhf.cli.train_sft import TrainSFTConfig, write_policy
from tests.tiny import tiny_config, tiny_tokenizer


@pytest.mark.parametrize("bf16", [False, True])
def test_tied_weights_that_an_engine_gives_as_copies_are_written_once(tmp_path, bf16):
    tokenizer = tiny_tokenizer()
    settings = tiny_config("llama", len(tokenizer))
    settings.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(settings)
    copies = {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(copies)
    engine = SimpleNamespace(state_dict=lambda: copies)
    words = ["--pretrain", "m", "--dataset", "d", *(["--bf16"] if bf16 else [])]
    write_policy(parse_config(TrainSFTConfig, words), engine, model, tokenizer, tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    wanted = model.lm_head.weight.bfloat16().float() if bf16 else model.lm_head.weight
    assert torch.equal(again.lm_head.weight, wanted)
    assert again.lm_head.weight is again.model.embed_tokens.weight
