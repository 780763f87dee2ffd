"""Models and preference data of bench_train.py, written as train_rm reads them and as token ids for the peer."""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = {
    "hh": DATA / "hh_harmless_dev.jsonl.gz",
    "gsm8k": DATA / "gsm8k_solutions" / "train.jsonl",
    "pool": DATA / "gsm8k_pool" / "train.jsonl.gz",
}
LEARNING_RATE = 1e-4  # of both sides; TRL's default
SIZES = {"5m": (256, 688, 6, 4), "300m": (1024, 2816, 24, 16)}  # Llamas made here: hidden, inner, layers, heads
WARMUP = 8  # pairs, or an eighth as many questions


def read_rows(arguments: argparse.Namespace, model: Path) -> list[dict]:
    """All rows of the data, in a format that train_rm reads and in random order; labelled responses by question."""
    from openrlhf.cli.common import POCKET, cache_folder, resolve_pocket_model
    from openrlhf.datasets.files import read_records
    from openrlhf.datasets.pairing import build_pairs
    from openrlhf.evaluation.sampling import pocket_preferences, pocket_question_count
    from openrlhf.models.pretrained import load_tokenizer

    if arguments.data == "generated":
        return generated_rows(load_tokenizer(model), arguments.pairs, arguments.length, arguments.prompt_share)
    if arguments.data == POCKET:
        questions = pocket_question_count(arguments.pairs)
        rows = pocket_preferences(cache_folder(), resolve_pocket_model(POCKET), n_questions=questions, progress=False)
    else:
        named = arguments.solutions if arguments.data in ("gsm8k", "pool") else None
        path = Path(named or FILES.get(arguments.data, arguments.data))
        if not path.is_file():
            raise SystemExit(f"--data {arguments.data}: no file {path}; name one (--solutions for labelled responses)")
        rows = [row for _, row in read_records(path)]
    if arguments.responses_per_prompt:
        return shuffled_questions(rows)
    if rows and "is_correct" in rows[0]:
        rows, _ = build_pairs(rows, arguments.pairs_per_question, 0, strip_calculator=True)
    random.Random(0).shuffle(rows)
    return rows


def shuffled_questions(rows: list[dict]) -> list[dict]:
    """Labelled responses of the questions that have both kinds, in random order of the questions."""
    questions: dict[str, list[dict]] = {}
    for row in rows:
        questions.setdefault(row["question"], []).append(row)
    mixed = [group for group in questions.values() if len({bool(row["is_correct"]) for row in group}) == 2]
    random.Random(0).shuffle(mixed)
    return [row for group in mixed for row in group]


def first_rows(rows: list[dict], count: int, by_question: bool) -> list[dict]:
    """The first rows, or all those of the first questions."""
    if not by_question:
        return rows[:count]
    groups = (list(group) for _, group in itertools.groupby(rows, key=lambda row: row["question"]))
    return [row for group in itertools.islice(groups, count) for row in group]


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
    if arguments.responses_per_prompt:
        words += ["--responses_per_prompt", str(arguments.responses_per_prompt), "--strip_calculator"]
    return words + (["--bf16"] if arguments.precision == "bf16" else [])


def prepare(rows: list[dict], folder: Path, model: Path, arguments: argparse.Namespace) -> dict:
    """Write what is trained on, as train_rm reads it and as token ids for the peer.

    Args:
        rows: all of the data; the first ``arguments.pairs`` (questions, where responses are labelled) are trained on.
    Returns:
        flags and warmup: of train_rm; examples and warmup_examples: how many it then sees. peer: by the order of rows
        (random, grouped) a file of token ids, its pairs and its tokens; a file for its warm-up. pairs, tokens (every
        row of every pair whole), unique_tokens (each prompt and each response once), longest (tokens of a row), flops.
    """
    from transformers import AutoConfig

    from openrlhf.cli.parser import parse_config
    from openrlhf.cli.reward_data import load_pairs
    from openrlhf.datasets.jsonl import write_jsonl
    from openrlhf.models.pretrained import load_tokenizer
    from openrlhf.trainer.config import TrainRMConfig

    folder.mkdir(exist_ok=True)
    tokenizer, by_question = load_tokenizer(model), bool(arguments.responses_per_prompt)

    def load(name: str, some: list[dict]):
        write_jsonl(folder / f"{name}.jsonl", some)
        flags = common_flags(arguments, model, folder / f"{name}.jsonl", folder)
        data, _ = load_pairs(parse_config(TrainRMConfig, flags), tokenizer)
        return flags, data

    def write_ids(name: str, pairs: list) -> dict:
        path = folder / f"{name}-ids.jsonl"
        write_jsonl(path, [dict(zip(("chosen_ids", "rejected_ids"), pair, strict=True)) for pair in pairs])
        return {"ids": str(path), "pairs": len(pairs), "tokens": sum(map(count_tokens, pairs))}

    flags, data = load("trained", first_rows(rows, arguments.pairs, by_question))
    warmup, few = load("warmup", first_rows(rows, WARMUP // 8 if by_question else WARMUP, by_question))
    pairs = [pair for i in range(len(data)) for pair in pair_ids(data[i])]
    everything = load("all", rows)[1] if len(rows) > arguments.pairs else data
    in_all = [pair for i in range(len(everything)) for pair in pair_ids(everything[i])]
    wanted = min(arguments.peer_pairs or len(pairs), len(pairs))
    sample = spread([[pair] for pair in pairs], wanted)
    random.Random(1).shuffle(sample)
    peer = {
        "random": write_ids("random", sample),
        "grouped": write_ids("grouped", spread(grouped_updates(in_all, arguments.peer_batch_size), wanted)),
        "warmup": write_ids("warmup", sample[:WARMUP])["ids"],
    }
    lengths = [len(row) for pair in pairs for row in pair]
    return {
        "flags": flags, "warmup": warmup, "peer": peer, "examples": len(data), "warmup_examples": len(few),
        "pairs": len(pairs), "tokens": sum(lengths), "unique_tokens": int(data.row_tokens.sum()),
        "longest": max(lengths), "flops": training_flops(AutoConfig.from_pretrained(model), lengths),
    }  # fmt: skip


def pair_ids(example) -> list[tuple[list[int], list[int]]]:
    """Chosen and rejected row, prompt included, of every pair of an example of our data."""
    if hasattr(example, "chosen_ids"):
        chosen, rejected = [example.chosen_ids], [example.rejected_ids]
    else:
        chosen, rejected = example.correct, example.wrong
    prompt = example.prompt_ids
    return [(prompt + one, prompt + other) for one in chosen for other in rejected]


def count_tokens(pair: tuple[list[int], list[int]]) -> int:
    """Tokens of both rows."""
    return len(pair[0]) + len(pair[1])


def grouped_updates(pairs: list, size: int) -> list[list]:
    """The whole updates of ``size`` pairs of an epoch in the order of TRL's length grouping.

    A few pairs are grouped badly, so that a short run would not show what the grouping does over a whole data set.
    """
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = [max(map(len, pair)) for pair in pairs]
    order = get_length_grouped_indices(lengths, size, generator=torch.Generator().manual_seed(0))
    size = min(size, len(order))
    return [[pairs[i] for i in order[start : start + size]] for start in range(0, len(order) - size + 1, size)]


def spread(updates: list[list], pairs: int) -> list:
    """The pairs of as many updates as hold about ``pairs`` of them, spread evenly over all updates by tokens."""
    updates = sorted(updates, key=lambda update: sum(map(count_tokens, update)))
    count = min(max(1, round(pairs / len(updates[0]))), len(updates))
    return [pair for i in range(count) for pair in updates[int((i + 0.5) * len(updates) / count)]]


def training_flops(config, lengths: list[int]) -> float:
    """Floating-point operations of forward and backward over rows of these lengths, each computed whole.

    6 for every weight of the layers and token, 6 L H S^2 for causal attention of a row (half of the full square).
    """
    layers, queries = config.num_hidden_layers, config.num_attention_heads * head_size(config)
    return float(sum(6 * layer_weights(config) * s + 6 * layers * queries * s * s for s in lengths))


def layer_weights(config) -> int:
    """Weights of the matrices in all layers of a Llama."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, head_size(config)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return config.num_hidden_layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner)


def head_size(config) -> int:
    """Width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
