"""One measured training run of TRL's RewardTrainer; started by bench_train.py in the environment of the peer.

Reads settings as JSON from the command line and prints figures as JSON. Imports nothing of this project but what is in
this file: the peer has an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def peak_memory() -> float:
    """Largest resident size of this process in MiB = 2^20 bytes; on a GPU the largest allocation there."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def now() -> tuple[float, float]:
    """Seconds of the wall clock and of this process's work on the CPU, after everything that was started on a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def train(settings: dict) -> dict:
    """Train as the settings say.

    Args:
        settings: model (folder of a reward model), ids (json lines with chosen_ids, rejected_ids and length), batch
            (pairs per pass), accumulation, grouped (TRL's length grouping), gradient_checkpointing, and what both
            sides share: bf16, epochs, learning_rate, threads, warmup (steps that are not measured), max_len.
    Returns:
        seconds (wall clock), cpu_seconds and pairs of the measured steps, tokens of the whole run, memory in MiB, mean
        loss.
    """
    import datasets
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    torch.set_num_threads(settings["threads"])
    data = datasets.load_dataset("json", data_files=settings["ids"], split="train", cache_dir=settings["scratch"])
    model = AutoModelForSequenceClassification.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    # The sampler wants a column 'length' beside the ids, which the trainer would remove as unused.
    grouping = {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}
    arguments = RewardConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings["accumulation"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        num_train_epochs=settings["epochs"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=settings["max_len"],
        bf16=settings["bf16"],
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(grouping if settings["grouped"] else {}),
    )
    marks: list[tuple[float, float]] = []
    memory: list[float] = []

    class Clock(TrainerCallback):
        """Time at the end of the last warm-up step and of the last step."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (settings["warmup"], state.max_steps):
                marks.append(now())
                memory.append(peak_memory())

    trainer = RewardTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
    loss = trainer.train().training_loss
    per_step = settings["batch"] * settings["accumulation"]
    per_epoch = -(-len(data) // per_step)
    seen = (settings["warmup"] // per_epoch) * len(data) + (settings["warmup"] % per_epoch) * per_step
    return {
        "seconds": marks[-1][0] - marks[0][0],
        "cpu_seconds": marks[-1][1] - marks[0][1],
        "pairs": len(data) * settings["epochs"] - seen,
        "tokens": int(trainer._total_train_tokens),
        "memory": memory[-1],
        "loss": loss,
        "steps": int(trainer.state.global_step),
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
