"""Score texts with this version and again with transformers 4; run by check_transformers4.sh in two environments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-5  # float32 rounding of a few layers; rewards here are of order 1
TEXTS = [
    "The answer is 42.",
    "Tom has 3 apples and buys 4 more.\nHow many does he have?\n3 + 4 = 7\nThe answer is 7",
    "no",
    "  Two  spaces, an umlaut ü, a formula $x^2 = 16$ and a tab\tbefore the end",
]
THETA = {"rope_type": "default", "rope_theta": 500000.0}
# The texts have up to 80 tokens: more than original_max_position_embeddings, and than the 32 positions of "dynamic".
ROPES: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_parameters": THETA},
    "linear": {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    "llama3": {
        "rope_parameters": {
            **THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn": {
        "rope_parameters": {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "yarn, factor only": {"rope_parameters": {**THETA, "rope_type": "yarn", "factor": 4.0}},
    "longrope": {
        "rope_parameters": {
            **THETA, "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 3.0, 4.0, 6.0], "original_max_position_embeddings": 32,
        },
    },
}  # fmt: skip
PARTIAL = {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}
EQUAL = [
    *((family, "default", {}) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox")),
    *((family, rope, ROPES[rope]) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma") for rope in ROPES),
    ("gemma2", "rope_theta", {**ROPES["rope_theta"], "query_pre_attn_scalar": 8, "head_dim": 8}),
    ("mixtral", "rope_theta", {**ROPES["rope_theta"], "num_local_experts": 4}),
    ("qwen3_moe", "rope_theta", {**ROPES["rope_theta"], "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8}),
    ("gpt_neox", "partial", PARTIAL),
    ("phi3", "partial", PARTIAL),
    ("phi3", "longrope", {**ROPES["longrope"], "original_max_position_embeddings": 32}),
    ("stablelm", "partial", PARTIAL),
    ("llama", "default, Llama tokenizer", {}),
]
YARN = ROPES["yarn"]["rope_parameters"]
REFUSED = [
    *((family, "yarn, other factor", {"rope_parameters": {**YARN, "factor": 8.0}}) for family in ("llama", "mistral")),
    ("qwen3", "yarn, not truncated", {"rope_parameters": {**YARN, "truncate": False}}),
    ("llama", "proportional", {"rope_parameters": {**THETA, "rope_type": "proportional"}}),
    ("llama", "two-layer head", {}),
]
ABSOLUTE = ("gpt2",)  # learned positions: a left-padded row needs position ids, which RewardBench does not pass


def pad(rows: list[list[int]], pad_token_id: int, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) ids and mask of rows of different length."""
    longest = max(map(len, rows))
    spare = [longest - len(row) for row in rows]
    ids = [[pad_token_id] * n + row if left else row + [pad_token_id] * n for row, n in zip(rows, spare, strict=True)]
    mask = [[0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n for row, n in zip(rows, spare, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)


def llama_tokenizer():
    """A tokenizer of the Llama class without BOS and with extra special tokens: old versions add a BOS to it."""
    from transformers import LlamaTokenizer

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehinorstw3457.="]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "▁t", "he", "▁the"])}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[("▁", "t"), ("h", "e"), ("▁t", "he")], add_bos_token=False)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "apples"], "pad_token": "<unk>"})
    return tokenizer


def save_tiny(folder: Path, family: str, changes: dict[str, Any], value_head: str = "linear", tokenizer=None) -> None:
    """Save a random model of two layers with weights large enough that attention, so rotary positions, matter."""
    from transformers import AutoModelForSequenceClassification

    from openrlhf.models.pretrained import save_reward_model
    from openrlhf.models.reward_model import SETTINGS_KEY, MLPHead, RewardModel
    from tests.tiny import tiny_config, tiny_tokenizer

    base = tiny_config(family)
    settings = {SETTINGS_KEY: {"value_head": value_head}, "num_labels": 1, "id2label": {0: "LABEL_0"}}
    config = type(base).from_dict({**base.to_dict(), **changes, **settings})
    network = AutoModelForSequenceClassification.from_config(config)
    if value_head == "mlp":
        network.score = MLPHead(config.hidden_size)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    folder.mkdir(parents=True)
    save_reward_model(folder, RewardModel(network).eval(), tokenizer or tiny_tokenizer(add_bos=True))


def score(folder: Path, checkpoints: list[str]) -> None:
    """Write what this version says of every checkpoint to FOLDER/expected.json."""
    from openrlhf.models.pretrained import load_reward_model, load_tokenizer

    cases = []
    for number, (family, rope, changes) in enumerate([*EQUAL, *REFUSED]):
        path = folder / str(number)
        head, tokenizer = "mlp" if "head" in rope else "linear", llama_tokenizer() if "tokenizer" in rope else None
        save_tiny(path, family, changes, head, tokenizer)
        kind = "tiny" if number < len(EQUAL) else "refused"
        cases.append({"name": f"{family}, {rope}", "path": str(path), "kind": kind, "absolute": family in ABSOLUTE})
    cases += [{"name": Path(path).name, "path": path, "kind": "named", "absolute": False} for path in checkpoints]
    for case in cases:
        tokenizer, model = load_tokenizer(case["path"]), load_reward_model(case["path"]).eval()
        case["ids"] = [tokenizer(text)["input_ids"] for text in TEXTS]
        case["special"] = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id]
        case["chat_template"] = tokenizer.chat_template
        rows = [ids + [tokenizer.eos_token_id] for ids in case["ids"]]
        with torch.no_grad():
            case["alone"] = [model(*pad([row], 0)).reward.item() for row in rows]
            case["batch"] = model(*pad(rows, tokenizer.pad_token_id)).reward.tolist()
    (folder / "expected.json").write_text(json.dumps(cases))


def without_older_keys(path: str):
    """The configuration as transformers 4 would read it without what finish_export writes on rotary positions."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    defaults = AutoConfig.for_model(config.model_type)
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"):
        if hasattr(config, key):
            setattr(config, key, getattr(defaults, key, None))
    return config


def rewards(path: str, case: dict[str, Any], config=None) -> list[list[float]]:
    """Rewards by transformers 4: of each text alone, in a batch padded right, and padded left where that is defined."""
    from transformers import AutoModelForSequenceClassification

    # Gemma 2 caps its attention scores; the sdpa attention of transformers 4 leaves that out
    network, info = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, output_loading_info=True, attn_implementation="eager" if "gemma2" in case["name"] else None
    )
    if info["missing_keys"]:
        raise ValueError(f"missing weights {info['missing_keys'][:3]}")
    pad_id, eos_id, _ = case["special"]
    rows = [ids + [eos_id] for ids in case["ids"]]
    batches = [pad(rows, pad_id), pad(rows, pad_id, left=True)][: 1 if case["absolute"] else 2]
    with torch.no_grad():
        network.eval()
        return [
            [network(input_ids=torch.tensor([row]), use_cache=False).logits[0, 0].item() for row in rows],
            *(
                network(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].tolist()
                for ids, mask in batches
            ),
        ]


def largest(case: dict[str, Any], found: list[list[float]]) -> float:
    """Largest difference of any reward from this version's."""
    expected = [case["alone"], case["batch"], case["batch"]]
    return max(abs(a - b) for row, other in zip(expected, found, strict=False) for a, b in zip(row, other, strict=True))


def tokens_differ(case: dict[str, Any]) -> list[str]:
    """What of the tokenizer is not the same: ids, special ids, chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case["path"])
    found = {
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "special": [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id],
        "chat_template": tokenizer.chat_template,
    }
    return [key for key, value in found.items() if value != case[key]]


def compare(folder: Path) -> int:
    """Print one line a checkpoint; returns the exit status."""
    import transformers

    transformers.logging.set_verbosity_error()
    cases = json.loads((folder / "expected.json").read_text())
    print(f"transformers {transformers.__version__}: largest difference of a reward, alone and in padded batches")
    failed, worst = [], 0.0
    for case in cases:
        name, must_fail = case["name"], case["kind"] == "refused"
        try:
            tokens = tokens_differ(case)
            difference = largest(case, rewards(case["path"], case))
        except Exception as error:  # whatever the loader raises is its refusal
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
            print(f"{name:32} {'refused, as it must' if must_fail else 'FAILED'} ({reason})")
            failed += [name] * (not must_fail)
            continue
        worst = max(worst, difference)
        if must_fail:
            note = "FAILED: loaded, though this version cannot read it rightly"
        elif tokens:
            note = f"FAILED: the tokenizer differs in {tokens}"
        elif not difference < TOLERANCE:  # NaN too
            note = f"FAILED: more than {TOLERANCE}"
        elif "default" in name:
            note = ""
        else:
            plain = rewards(case["path"], case, without_older_keys(case["path"]))
            note = f"(without the older keys {largest(case, plain):.1e})"
        print(f"{name:32} {difference:.1e} {note}")
        failed += [name] * note.startswith("FAILED")
    print(f"{len(cases)} checkpoints, largest difference of those loaded {worst:.1e}, failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "score":
        score(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(compare(Path(sys.argv[2])))
