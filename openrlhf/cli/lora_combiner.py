"""Merge a LoRA adapter into an ordinary reward-model checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.cli.run_folder import check_replaceable, replaced_folder
from openrlhf.trainer.config import flag
from openrlhf.utils.checkpoint import ensure_writable
from openrlhf.utils.manifest import finish_manifest, write_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoraCombinerConfig:
    """Merge a LoRA adapter saved by train_rm into its base model and write a Hugging Face folder."""

    lora_path: str = flag("", "Folder of the adapter")
    output_path: str = flag("", "Folder of the merged model")
    bf16: bool = flag(False, "Store bfloat16 instead of float32")


def run(config: LoraCombinerConfig) -> None:
    """Merge as configured.

    Raises:
        ValueError: no adapter there, an adapter without head, or a path that cannot be written.
    """
    if not (Path(config.lora_path) / "adapter_config.json").is_file():
        raise ValueError(f"--lora_path: expected a folder with adapter_config.json, got {config.lora_path!r}")
    if not config.output_path:
        raise ValueError("--output_path is required")
    base = json.loads((Path(config.lora_path) / "adapter_config.json").read_text())["base_model_name_or_path"]
    check_replaceable(config.output_path, inputs=[config.lora_path, base])
    ensure_writable(config.output_path)
    import torch  # takes seconds, as does the next; flags are read without them

    from openrlhf.models.lora import merge_adapter

    with replaced_folder(config.output_path) as folder:
        merge_adapter(config.lora_path, folder, torch.bfloat16 if config.bf16 else torch.float32)
        (folder / "README.md").write_text(f"# Reward model\n\n`{base}` merged with `{config.lora_path}`.\n")
        write_manifest(folder, "lora_combiner", config)
        finish_manifest(folder, "finished")
    logger.info("merged model written to %s", config.output_path)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(LoraCombinerConfig, argv)))


if __name__ == "__main__":
    main()
