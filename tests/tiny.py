"""Tiny models and a tokenizer made in memory; nothing is downloaded."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from openrlhf.models.reward_model import RewardModel, initialise_head

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "mistral")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@functools.lru_cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = "the answer is what how many apples does she buy sell good bad yes no plus minus question of".split()
    rng = random.Random(0)
    corpus = [" ".join(rng.choices(words, k=12)) for _ in range(200)]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(add_bos: bool = False, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 entries; ids 0, 1, 2 are pad, BOS, EOS."""
    backend = Tokenizer.from_str(_trained_tokenizer())
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="right"
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(family: str = "llama", vocab_size: int = 320):
    """A configuration of two layers and hidden size 32, with one attention-head layout for all families."""
    common = {"vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    else:
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
        }
        if family != "gpt_neox":
            sizes["num_key_value_heads"] = 2
        if family in {"gemma", "qwen3"}:
            sizes["head_dim"] = 8
    return AutoConfig.for_model(family, **common, **sizes)


def tiny_reward_model(family: str = "llama", tokenizer=None, seed: int = 0) -> RewardModel:
    """A random reward model in float32, eval mode, with a head large enough that rewards differ visibly."""
    config = tiny_config(family, len(tokenizer) if tokenizer is not None else 320)
    config.num_labels = 1
    torch.manual_seed(seed)
    network = AutoModelForSequenceClassification.from_config(config)
    initialise_head(network.score, config.hidden_size, seed)
    with torch.no_grad():
        network.score.weight.mul_(10)
    return RewardModel(network).eval()


def save_tiny_causal_lm(folder: Path | str, family: str = "llama", seed: int = 0, tokenizer=None) -> Path:
    """Write a random language model and its tokenizer."""
    folder = Path(folder)
    tokenizer = tokenizer or tiny_tokenizer()
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(family, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
