"""Speed and memory of training on pairs that share a row, against separate rows of the same trainer.

    python benchmarks/bench_sharing.py                       # pocket, and a 5-million Llama on longer generated prompts
    python benchmarks/bench_sharing.py --dataset PAIRS       # the 5-million Llama on your pairs
    python benchmarks/bench_sharing.py --quick               # pocket alone, one run of each way

Both ways train the same model from the same seed on the same batches (float32, contrastive strategy), each in a process
of its own, in turn, several times; medians. Time is that of the updates, data loading included, after one update of
warm-up; with one thread it is processor time, to which other programs on the machine add little. Memory is the largest
resident size of the process. The losses of the last update are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measuring import largest_resident_size, run_measurement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
POCKET = ROOT / "examples" / "pocket"


def make_llama(folder: Path) -> Path:
    """A random Llama of about 5 million parameters with pocket's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=452, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=768, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(POCKET).save_pretrained(folder)
    return folder


def write_pairs(path: Path, count: int, prompt: int, response: int) -> Path:
    """Pairs of random words of pocket; the numbers are means of words, each length varies by a third of its mean."""
    import random

    rng = random.Random(0)
    words = "Tom has apples and buys more then sells some how many are left 3 4 5 7 + - = so the answer is".split()

    def text(mean: int) -> str:
        return " ".join(rng.choices(words, k=round(mean * rng.uniform(2 / 3, 4 / 3))))

    rows = [{"prompt": text(prompt), "chosen": text(response), "rejected": text(response)} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def work(arguments: argparse.Namespace) -> None:
    """One measurement, in a process of its own."""
    import torch

    from openrlhf.cli.common import optimizer_settings, training_plan, training_tokenizer
    from openrlhf.cli.train_rm import load_model, load_pairs
    from openrlhf.models.losses import PAIR_LOSSES
    from openrlhf.trainer.config import TrainRMConfig
    from openrlhf.trainer.engine import LocalEngine
    from openrlhf.trainer.prefix_sharing import work_saved
    from openrlhf.trainer.reward_trainer import ContrastiveSettings, RewardTrainer

    torch.set_num_threads(arguments.threads)
    pocket = arguments.dataset == "pocket"
    config = TrainRMConfig(
        pretrain=arguments.model, dataset=arguments.dataset, input_template="pocket" if pocket else "plain",
        max_len=1024, train_batch_size=arguments.batch, micro_train_batch_size=arguments.micro,
        max_samples=arguments.batch * (arguments.steps + 1), eval_fraction=0.0, learning_rate=1e-4, seed=0,
        on_bad_row="skip", gradient_checkpointing=arguments.checkpointing,
    )  # fmt: skip
    engine = LocalEngine()
    tokenizer = training_tokenizer(config)
    data, _ = load_pairs(config, tokenizer)
    plan = training_plan(config, engine, len(data))
    model, _ = load_model(config, engine, tokenizer)
    engine.prepare(model, optimizer_settings(config, plan))
    trainer = RewardTrainer(
        engine, data, plan, tokenizer.pad_token_id, PAIR_LOSSES["sigmoid"], ContrastiveSettings(0.5, 16, 16),
        prefix_sharing=arguments.work == "shared",
    )  # fmt: skip
    trainer.train_step(0)
    clock = time.process_time if arguments.threads == 1 and engine.device.type == "cpu" else time.perf_counter
    start = clock()
    steps = min(arguments.steps, plan.total_steps - 1)
    pairs = 0.0
    for step in range(1, steps + 1):
        sums, _, _ = trainer.train_step(step)
        pairs += sums[0].item()
    seconds = clock() - start
    figures = {"pairs_per_s": pairs / seconds, "mib": largest_resident_size(), "loss": trainer.summarise(sums)["loss"]}
    lengths = [round(mean) for mean in data.parts.mean(axis=0)]
    print(json.dumps(figures | {"lengths": lengths, "work_saved": work_saved(data.parts, model.hidden_size)}))


def measure(kind: str, model: str, dataset: str, arguments: argparse.Namespace) -> dict:
    """Run one measurement and read what it printed."""
    command = [__file__, "--work", kind, "--model", model, "--dataset", dataset]
    for name in ("threads", "batch", "micro", "steps"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--checkpointing"] if arguments.checkpointing else []
    return run_measurement(command, arguments.threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model to start from; default: pocket's policy for pocket, else a random Llama")
    parser.add_argument("--dataset", help="pairs; default: pocket's, and generated ones with longer prompts")
    parser.add_argument("--batch", type=int, default=16, help="pairs an update")
    parser.add_argument("--micro", type=int, default=8, help="pairs a forward pass")
    parser.add_argument("--steps", type=int, default=3, help="updates measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="pocket only, one run of each")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama = arguments.model or str(make_llama(folder / "llama"))
        count = arguments.batch * (arguments.steps + 1)
        if arguments.dataset:
            cases = {arguments.dataset: (llama, arguments.dataset)}
        elif arguments.quick:
            cases, arguments.repeats = {"pocket": (str(POCKET), "pocket")}, 1
        else:
            cases = {"pocket": (str(POCKET), "pocket")}
            for prompt, response in ((30, 30), (100, 30)):
                data = write_pairs(folder / f"{prompt}-{response}.jsonl", count, prompt, response)
                cases[f"{prompt} words, then {response}"] = (llama, str(data))
        names = f"{'separate':>10}{'shared':>8}  pairs/s{'MiB':>12}{'loss differs':>14}{'ratio':>7}"
        print(f"{'pairs':22}{'tokens':>14}{names}")
        for case, (model, data) in cases.items():
            runs: dict[str, list[dict]] = {"separate": [], "shared": []}
            for _ in range(arguments.repeats):
                for kind, done in runs.items():
                    done.append(measure(kind, model, data, arguments))
            speed, memory = (
                {kind: statistics.median(run[key] for run in done) for kind, done in runs.items()}
                for key in ("pairs_per_s", "mib")
            )
            one, two = runs["separate"][0], runs["shared"][0]
            ratio = speed["shared"] / speed["separate"]
            difference = abs(one["loss"] - two["loss"])
            tokens = "+".join(str(n) for n in one["lengths"])
            sizes = f"{memory['separate']:.0f}, {memory['shared']:.0f}"
            print(
                f"{case[-22:]:22}{tokens:>14}{speed['separate']:10.1f}{speed['shared']:8.1f}{sizes:>21}"
                f"{difference:14.1e}{ratio:7.2f}",
                flush=True,
            )
            results[case] = {
                "tokens": one["lengths"], "work_saved": one["work_saved"], "pairs_per_s": speed, "mib": memory,
                "loss_difference": difference, "ratio": ratio,
            }  # fmt: skip
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"settings": vars(arguments), "results": results}, indent=2) + "\n")
    print(f"ratio {list(results.values())[-1]['ratio']:.2f} training speed, shared rows against separate ones")


if __name__ == "__main__":
    main()
