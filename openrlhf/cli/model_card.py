"""README.md of a saved model: what it is, how it was made, how to load it."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from openrlhf.trainer.config import TrainRMConfig

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
        shlex.join(["python", "-m", "openrlhf.cli.train_rm", *_visible(sys.argv[1:], config)]),
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
            'reward = model(**tokenizer(text, return_tensors="pt")).logits[0, 0]',
            "```",
        ]
    return "\n".join(lines) + "\n"


def _visible(arguments: list[str], config: TrainRMConfig) -> list[str]:
    return ["<hidden>" if config.use_wandb and word == config.use_wandb else word for word in arguments]
