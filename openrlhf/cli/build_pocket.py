"""Before and after the training of the pocket policy: ``python -m openrlhf.cli.build_pocket``.

``--stage start`` trains the tokenizer and writes an untrained policy; ``train_sft --dataset pocket`` trains it; then
``--stage finish`` writes the folder that the repository carries: weights in bfloat16, tokenizer, and a manifest with
the measured accuracy. ``run_scripts/build_pocket_policy.sh`` runs all three.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.cli.run_folder import replaced_folder
from openrlhf.datasets.pocket import DEFAULT_LEVEL, generate_problems
from openrlhf.trainer.config import flag
from openrlhf.utils.checkpoint import atomic_write_text

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from transformers import PreTrainedTokenizerFast

    from openrlhf.models.policy import Policy

logger = logging.getLogger(__name__)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# A word takes the space before it, and the one behind it when a number follows; a digit is always alone.
TOKEN_PATTERN = r"\\[a-z]+\{|\d| [-+*=] | ?\p{L}+(?: (?=\d))?|\s|[^\s\p{L}\d]+"
# One user turn and its answer are exactly the "pocket" prompt template with BOS in front and EOS behind.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)
MAX_FOLDER_BYTES = 4_000_000


@dataclass(frozen=True)
class BuildPocketConfig:
    """Make the tokenizer and untrained policy of the pocket task (start), or finish the trained one (finish)."""

    stage: Literal["start", "finish"] = flag("start", "Before or after the training")
    save_path: str = flag("build/pocket/start", "Folder to write")
    policy_path: str = flag("build/pocket/sft", "finish: the trained policy, a folder written by train_sft")
    hidden_size: int = flag(128, "start: width of the policy")
    intermediate_size: int = flag(256, "start: width of its feed-forward layers")
    layers: int = flag(4, "start: number of layers")
    heads: int = flag(4, "start: attention heads")
    vocab_size: int = flag(512, "start: largest size of the vocabulary")
    test_problems: int = flag(1000, "finish: problems of each test on which the accuracy is measured")
    test_samples: int = flag(4, "finish: solutions sampled for each of them")
    seed: int = flag(0, "Seed of the weights, the tokenizer's text and the samples")


def train_tokenizer(vocab_size: int, seed: int, n_problems: int = 4000) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on pocket problems; any text can be encoded, and BOS is put in front of it."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = generate_problems("train", n_problems, seed=seed)
    backend.train_from_iterator((f"{problem.question}\n{problem.solution}" for problem in problems), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_start(config: BuildPocketConfig) -> None:
    """Write the tokenizer and an untrained policy in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from openrlhf.models.pretrained import without_deepspeed

    tokenizer = train_tokenizer(config.vocab_size, config.seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    model_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(model_config)
    with replaced_folder(config.save_path) as folder, without_deepspeed():
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"untrained policy of {model.num_parameters():,} parameters, {len(tokenizer)} tokens: {config.save_path}")


def measure_accuracy(policy: Policy, split: str, n_problems: int, n_samples: int, seed: int) -> dict[str, Any]:
    """Share of solved problems of a split, sampled at temperature 1 and greedily, also by number of steps."""
    from openrlhf.evaluation.sampling import grade_pocket, pocket_response_limit, sample_completions

    problems = generate_problems(split, n_problems, seed)
    settings = {"max_new_tokens": pocket_response_limit(split, DEFAULT_LEVEL), "seed": seed, "grade": grade_pocket}
    sampled = sample_completions(policy, problems, "pocket", n_samples, description=f"{split}, sampled", **settings)
    greedy = sample_completions(
        policy, problems, "pocket", 1, temperature=0, description=f"{split}, greedy", **settings
    )
    by_steps: dict[int, list[bool]] = {}
    for index, completion in enumerate(sampled):
        by_steps.setdefault(problems[index // n_samples].steps, []).append(bool(completion.is_correct))
    return {
        "problems": n_problems,
        "samples_per_problem": n_samples,
        "accuracy_temperature_1": _mean([bool(c.is_correct) for c in sampled]),
        "accuracy_greedy": _mean([bool(c.is_correct) for c in greedy]),
        "accuracy_temperature_1_by_steps": {str(k): _mean(v) for k, v in sorted(by_steps.items())},
        "without_answer": _mean([c.predicted_answer is None for c in sampled]),
    }


def build_finish(config: BuildPocketConfig) -> None:
    """Write the trained policy in bfloat16 with its manifest, after measuring it as it will be read.

    Raises:
        ValueError: the folder would be 4 MB or larger.
    """
    import torch
    from transformers import GenerationConfig

    from openrlhf.evaluation.sampling import pocket_response_limit
    from openrlhf.models.policy import Policy
    from openrlhf.models.pretrained import without_deepspeed

    trained = Path(config.policy_path)
    with replaced_folder(config.save_path) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        policy = Policy.from_pretrained(trained, dtype=torch.bfloat16)
        policy.model.config.dtype = torch.bfloat16
        tokenizer = policy.tokenizer
        policy.model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=pocket_response_limit("ood", DEFAULT_LEVEL),
        )
        with without_deepspeed():
            policy.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        saved = Policy.from_pretrained(folder)
        accuracy = {
            split: measure_accuracy(saved, split, config.test_problems, config.test_samples, config.seed)
            for split in ("test", "ood")
        }
        manifest = {
            "what": "policy of the embedded task pocket, trained by this project's own commands",
            "made_by": "bash run_scripts/build_pocket_policy.sh",
            "parameters": policy.model.num_parameters(),
            "pocket_level": DEFAULT_LEVEL,
            "accuracy": accuracy,
            "training": _training_record(trained),
        }
        atomic_write_text(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        size = sum(file.stat().st_size for file in folder.iterdir())
        if size >= MAX_FOLDER_BYTES:
            raise ValueError(f"{config.save_path} would take {size:,} bytes, must stay below {MAX_FOLDER_BYTES:,}")
    print(json.dumps(accuracy, indent=2))
    print(f"{size:,} bytes in {config.save_path}")


def _training_record(trained: Path) -> dict[str, Any]:
    """What the training's own manifest and metrics say, without anything that belongs to one machine."""
    kept = (
        "max_samples", "max_epochs", "train_batch_size", "micro_train_batch_size", "learning_rate", "lr_scheduler",
        "lr_warmup_ratio", "min_lr_ratio", "adam_betas", "l2", "max_norm", "seed", "bf16", "max_len",
    )  # fmt: skip
    record = json.loads((trained / "manifest.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").open(encoding="utf-8")]
    result: dict[str, Any] = {
        "command": "train_sft",
        "config": {name: record["config"][name] for name in kept if name in record["config"]},
        "data": record.get("data"),
        "packages": record.get("packages"),
        "python": record.get("python"),
        "steps": max(line["step"] for line in lines),
        "seconds": round(lines[-1]["time"] - lines[0]["time"]) if lines and "time" in lines[0] else None,
    }
    for split in ("train", "eval"):
        last = next((line for line in reversed(lines) if line.get("split") == split), None)
        if last is not None:
            result[f"last_{split}"] = {k: v for k, v in last.items() if k not in ("split", "time")}
    return result


def _mean(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def run(config: BuildPocketConfig) -> None:
    """Do one stage."""
    {"start": build_start, "finish": build_finish}[config.stage](config)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(BuildPocketConfig, argv)))


if __name__ == "__main__":
    main()
