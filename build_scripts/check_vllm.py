"""Score texts with this version and again with vLLM; run by check_vllm.sh in two environments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from check_transformers4 import ROPES, TEXTS, save_tiny

TOLERANCE = 1e-4  # float32 through other kernels; seen: below 1e-5


def score(folder: Path, checkpoints: list[str]) -> None:
    """Write what this version says of every checkpoint to FOLDER/*.json, one file each."""
    from openrlhf.models.pretrained import load_reward_model, load_tokenizer

    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    save_tiny(folder / "scaled", "llama", {**sizes, **ROPES["llama3"]})
    save_tiny(folder / "two-layer", "llama", sizes, "mlp")
    cases = [
        ("tiny llama, llama3", str(folder / "scaled"), False),
        ("tiny llama, two-layer head", str(folder / "two-layer"), True),
        *((Path(path).name, path, False) for path in checkpoints),
    ]
    for number, (name, path, refused) in enumerate(cases):
        tokenizer, model = load_tokenizer(path), load_reward_model(path).eval()
        rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]
        with torch.no_grad():
            values = [model(ids := torch.tensor([row]), torch.ones_like(ids)).values[0].tolist() for row in rows]
        case = {"name": name, "path": path, "refused": refused, "rows": rows, "values": values}
        (folder / f"{number}.json").write_text(json.dumps(case))


def compare(file: Path, task: str) -> int:
    """Print one line for one checkpoint and task; returns the exit status."""
    import vllm
    from vllm.config import PoolerConfig

    case = json.loads(file.read_text())
    label = f"vLLM {vllm.__version__}, {case['name']}, {task}:"
    settings = PoolerConfig(task=task, use_activation=False)  # the raw reward; the default is its sigmoid
    try:
        engine = vllm.LLM(
            case["path"],
            runner="pooling",
            dtype="float32",
            enforce_eager=True,
            use_tqdm_on_load=False,
            max_model_len=128,
            pooler_config=settings,
        )
    except Exception as error:  # whatever the loader raises is its refusal
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90] if str(error).strip() else ''}"
        print(f"{label} {'refused, as it must' if case['refused'] else 'FAILED'} ({reason})")
        return int(not case["refused"])
    outputs = engine.encode([{"prompt_token_ids": row} for row in case["rows"]], pooling_task=task, use_tqdm=False)
    found = [output.outputs.data.flatten().tolist() for output in outputs]
    expected = [row if task == "token_classify" else row[-1:] for row in case["values"]]
    difference = max(
        abs(a - b) for row, other in zip(expected, found, strict=True) for a, b in zip(row, other, strict=True)
    )
    spread = max(map(max, expected)) - min(map(min, expected))
    good = difference < TOLERANCE and not case["refused"]
    count = sum(map(len, expected))
    print(f"{label} {count} values, range {spread:.3f}, largest difference {difference:.1e}{'' if good else ' FAILED'}")
    return int(not good)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "score":
        score(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(compare(Path(sys.argv[2]), sys.argv[3]))
