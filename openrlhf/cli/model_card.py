"""README.md of a saved model: what it is, how it was made, how to load it."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from openrlhf.trainer.config import TrainConfig, TrainRMConfig
from openrlhf.utils.manifest import hide_secrets

FIGURES = (
    "loss",
    "preference_loss",
    "contrastive_loss",
    "accuracy",
    "ties",
    "margin",
    "reward_mean",
    "reward_std",
    "pairs",
)


def reward_model_card(
    config: TrainRMConfig, settings: dict[str, Any], figures: dict[str, float] | None, is_adapter: bool
) -> str:
    """Markdown text of a reward model's card.

    Args:
        settings: what config.json records. figures: of the last evaluation, if there was one.
    """
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-classification",
        "tags: [reward-model, goal-conditioned]" if config.contrastive else "tags: [reward-model]",
        "---",
        "",
        "# Reward model",
        "",
        f"{'LoRA adapter' if is_adapter else 'Model'} trained from `{config.pretrain}` on `{config.dataset}` with the "
        f"{settings['strategy']} strategy.",
        "",
        "## Command",
        "",
        "```",
        command_of("train_rm", config),
        "```",
        "",
        "Full settings, versions and data fingerprints: `manifest.json`; losses: `metrics.jsonl`.",
        "",
        "## Figures on held-out pairs",
        "",
    ]
    if figures:
        lines += ["| figure | value |", "| --- | --- |"]
        lines += [f"| {name} | {figures[name]:.4g} |" for name in FIGURES if name in figures]
    else:
        lines.append("No evaluation data was given.")
    template = (
        "the tokenizer's chat template" if settings["apply_chat_template"] else f"template `{settings['template']}`"
    )
    lines += ["", "## Use", "", f"Prompts are rendered with {template}; a response ends in one EOS token.", ""]
    special = ", add_special_tokens=False" if settings["apply_chat_template"] else ""  # the template writes BOS
    if is_adapter:
        lines.append("Merge it first: `python -m openrlhf.cli.lora_combiner --lora_path THIS --output_path MERGED`.")
    elif settings.get("value_head", config.value_head_strategy) == "mlp":
        lines.append("The two-layer head loads with `openrlhf.models.pretrained.load_reward_model` only.")
    else:
        lines += [
            "```python",
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            'model = AutoModelForSequenceClassification.from_pretrained("THIS FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
            "text = prompt + response + tokenizer.eos_token",
            f'inputs = tokenizer(text, return_tensors="pt"{special})',
            "reward = model(**inputs).logits[0, 0]",
            "```",
        ]
    return "\n".join(lines) + "\n"


def policy_card(config: TrainConfig, command: str = "train_sft") -> str:
    """Markdown text of the card of a language model that train_sft or train_ppo saved."""
    how = "on the answers of" if command == "train_sft" else "by reinforcement learning on the prompts of"
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "---",
            "",
            "# Language model",
            "",
            f"Fine-tuned from `{config.pretrain}` {how} `{config.dataset}`.",
            "",
            "```",
            command_of(command, config),
            "```",
            "",
            "Full settings, versions and data fingerprints: `manifest.json`; losses: `metrics.jsonl`.",
            'Load it with `AutoModelForCausalLM.from_pretrained("THIS FOLDER")`.',
            "",
        ]
    )


def command_of(name: str, config: TrainConfig) -> str:
    """The command that repeats a run: every setting that is not the default, secrets hidden."""
    words = ["python", "-m", f"openrlhf.cli.{name}"]
    shown = hide_secrets(dataclasses.asdict(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        if value == default or field.name == "local_rank":
            continue
        values = value if isinstance(value, list) else [shown[field.name]]
        words += [f"--{field.name}"] if value is True else [f"--{field.name}", *map(str, values)]
    return shlex.join(words)
