"""One measured training run of TRL's RewardTrainer; started by bench_train.py in the environment of the peer.

Reads settings as JSON from the command line and prints figures as JSON. Imports nothing of this project but
measuring.py beside it: the peer has an environment of its own.
"""

from __future__ import annotations

import json
import sys

from measuring import forget_peak


def train(settings: dict, ids: str, epochs: int) -> dict:
    """Train from the start of the model's weights.

    Args:
        settings: model (folder of a reward model), batch (pairs per pass), accumulation, in_order (rows in the order of
            the file, which is that of TRL's length grouping; else TRL's random order), gradient_checkpointing, and what
            both sides share: bf16, learning_rate, max_len, scratch (folder).
        ids: json lines with chosen_ids and rejected_ids.
    Returns:
        seconds (wall clock) and cpu_seconds from the first step to the end of the last, pairs and tokens seen by then,
        memory in MiB, mean loss, steps.
    """
    import datasets
    import torch
    from peer_clock import PeerClock
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    data = datasets.load_dataset("json", data_files=ids, split="train", cache_dir=settings["scratch"])
    model = AutoModelForSequenceClassification.from_pretrained(settings["model"], dtype=torch.float32)
    arguments = RewardConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings["accumulation"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        train_sampling_strategy="sequential" if settings["in_order"] else "random",
        num_train_epochs=epochs,
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
    )
    clock = PeerClock()
    trainer = RewardTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[clock],
    )
    loss = trainer.train().training_loss
    measured = clock.figures()
    return {
        **measured,
        "pairs": len(data) * epochs,
        "tokens": int(trainer._total_train_tokens),
        "loss": loss,
        "steps": int(trainer.state.global_step),
    }


def main(settings: dict) -> None:
    """Warm up by a training of its own, then measure one."""
    import torch

    torch.set_num_threads(settings["threads"])
    train(settings, settings["warmup"], 1)
    forget_peak()
    print(json.dumps(train(settings, settings["ids"], settings["epochs"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
