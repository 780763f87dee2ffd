"""Keep the first layers of a language model: a cheap start for experiments on a CPU.

python build_scripts/truncate_lm.py models/SmolLM2-135M-Instruct 8 models/SmolLM2-8-layers
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def truncate(source: Path, layers: int, target: Path) -> None:
    """Save `source` with its first `layers` layers, and its tokenizer, at `target`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    depth = model.config.num_hidden_layers
    if not 1 <= layers <= depth:
        raise ValueError(f"{source} has {depth} layers, got {layers} to keep")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    print(f"{layers} of {depth} layers, {model.num_parameters() / 1e6:.1f} million parameters: {target}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    truncate(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
