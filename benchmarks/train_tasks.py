"""Models and preference pairs of bench_train.py, written as train_rm reads them and as token ids for the peer."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HH = ROOT.parent / "shared" / "data" / "hh_harmless_dev.jsonl.gz"
LEARNING_RATE = 1e-4  # of both sides; TRL's default
SIZES = {"5m": (256, 688, 6, 4), "300m": (1024, 2816, 24, 16)}  # Llamas made here: hidden, inner, layers, heads


def pair_rows(arguments: argparse.Namespace, model: Path) -> list[dict]:
    """Preference rows in a format that train_rm reads."""
    from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model
    from openrlhf.datasets.files import read_records
    from openrlhf.datasets.pairing import build_pairs
    from openrlhf.evaluation.sampling import pocket_preferences, pocket_question_count
    from openrlhf.models.pretrained import load_tokenizer

    if arguments.data == "generated":
        return generated_rows(load_tokenizer(model), arguments.pairs, arguments.length, arguments.prompt_share)
    if arguments.data == POCKET:
        questions = pocket_question_count(arguments.pairs)
        return pocket_preferences(cache_folder(), resolve_pocket_model(POCKET), n_questions=questions, progress=False)
    path = {"hh": HH, "gsm8k": Path(arguments.solutions or "")}.get(arguments.data, Path(arguments.data))
    if not path.is_file():
        raise SystemExit(f"--data {arguments.data}: no file {path}; name one (--solutions or DATA for gsm8k)")
    rows = [row for _, row in read_records(path)]
    if rows and "is_correct" in rows[0]:
        rows, _ = build_pairs(rows, arguments.pairs_per_question, 0, strip_calculator=True)
    return rows


def generated_rows(tokenizer, pairs: int, length: int, prompt_share: float) -> list[dict]:
    """Pairs of random words, about ``length`` tokens for prompt and response, responses 75 to 125% of the rest."""
    marked = (token for token in sorted(tokenizer.get_vocab()) if token[:1] in "Ġ▁" and token[1:].isalpha())
    # A word counts where it is one token alone and twice: then a text of n words has n tokens.
    words = [" " + token[1:] for token in marked if len(tokenizer.tokenize(f" {token[1:]}" * 2)) == 2][:500]
    rng = random.Random(0)

    def text(tokens: float) -> str:
        return "".join(rng.choice(words) for _ in range(max(1, round(tokens))))

    def response() -> str:
        return text(length * (1 - prompt_share) * rng.uniform(0.75, 1.25))

    return [{"prompt": text(length * prompt_share), "chosen": response(), "rejected": response()} for _ in range(pairs)]


def make_model(folder: Path, arguments: argparse.Namespace) -> Path:
    """A reward checkpoint to start from: a Llama of SIZES, or --model with a head, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from openrlhf.cli.common import POCKET, resolve_pocket_model
    from openrlhf.models.pretrained import load_reward_model, load_tokenizer, save_reward_model

    source = resolve_pocket_model(arguments.model)
    if arguments.model in SIZES:
        tokenizer = load_tokenizer(resolve_pocket_model(arguments.tokenizer or POCKET))
        hidden, inner, layers, heads = SIZES[arguments.model]
        config = AutoConfig.for_model(
            "llama", vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, max_position_embeddings=4096, tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        torch.manual_seed(0)
        source = folder / "language-model"
        AutoModelForCausalLM.from_config(config).save_pretrained(source)
    else:
        tokenizer = load_tokenizer(source)
    model = load_reward_model(source, allow_missing_head=True, pad_token_id=tokenizer.pad_token_id)
    save_reward_model(folder / "model", model, tokenizer, dtype=torch.float32)
    return folder / "model"


def common_flags(arguments: argparse.Namespace, model: Path, rows: Path, scratch: Path) -> list[str]:
    """Flags of train_rm that all our variants share."""
    flags = {
        "pretrain": model, "dataset": rows, "save_path": scratch / "trained", "eval_fraction": 0,
        "max_len": arguments.max_len, "on_long": "drop", "max_epochs": arguments.epochs, "lr_scheduler": "constant",
        "learning_rate": LEARNING_RATE, "lr_warmup_ratio": 0, "reward_model_strategy": "vanilla",
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    words += ["--input_template", arguments.input_template] if arguments.input_template else []
    return words + (["--bf16"] if arguments.precision == "bf16" else [])


def prepare(rows: list[dict], folder: Path, model: Path, arguments: argparse.Namespace) -> dict:
    """Write pairs as train_rm reads them and as token ids for the peer; tells sizes and what a pair costs."""
    from transformers import AutoConfig

    from openrlhf.cli.parser import parse_config
    from openrlhf.cli.train_rm import load_pairs
    from openrlhf.datasets.jsonl import write_jsonl
    from openrlhf.models.pretrained import load_tokenizer
    from openrlhf.trainer.config import TrainRMConfig

    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "pairs.jsonl", rows)
    flags = common_flags(arguments, model, folder / "pairs.jsonl", folder)
    data, _ = load_pairs(parse_config(TrainRMConfig, flags), load_tokenizer(model))
    pairs = [data[i] for i in range(len(data))]
    config = AutoConfig.from_pretrained(model)
    ids = [
        {"chosen_ids": p.prompt_ids + p.chosen_ids, "rejected_ids": p.prompt_ids + p.rejected_ids, "length": int(n)}
        for p, n in zip(pairs, data.lengths, strict=True)
    ]
    write_jsonl(folder / "ids.jsonl", ids)
    lengths = [len(row[name]) for row in ids for name in ("chosen_ids", "rejected_ids")]
    shared = sum(len(p.prompt_ids) for p in pairs)
    return {
        "flags": flags, "ids": str(folder / "ids.jsonl"), "pairs": len(pairs), "tokens": sum(lengths),
        "shared_tokens": shared, "longest": max(lengths), "flops": training_flops(config, lengths),
    }  # fmt: skip


def training_flops(config, lengths: list[int]) -> float:
    """Floating-point operations of forward and backward over rows of these lengths, each computed whole.

    6 for every weight of the layers and token, 6 L H S^2 for causal attention of a row (half of the full square).
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    weights = layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner)
    return float(sum(6 * weights * s + 6 * layers * queries * s * s for s in lengths))
