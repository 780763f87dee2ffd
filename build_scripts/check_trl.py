"""Train a few steps with TRL's RewardTrainer from a checkpoint folder, save, reload; run by check_trl.sh."""

from __future__ import annotations

import sys
import tempfile

import datasets
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


def main(checkpoint: str) -> None:
    """Print the figures of the check; an assertion fails where something is lost."""
    saved = load_file(f"{checkpoint}/model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert torch.equal(model.score.weight.detach().cpu(), saved["score.weight"].float()), "the head was not loaded"
    texts = [f"{i} + {i} = {2 * i}" + tokenizer.eos_token for i in range(3, 6)]
    with torch.no_grad():
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        before = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
    rows = [{"prompt": f"{i} + {i}\n", "chosen": f"= {2 * i}", "rejected": f"= {2 * i + 1}"} for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        settings = RewardConfig(
            output_dir=folder, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, bf16=False, use_cpu=True,
            gradient_checkpointing=False, report_to=[], logging_steps=1, save_strategy="no", max_length=128,
        )  # fmt: skip
        trainer = RewardTrainer(
            model=checkpoint, args=settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
        assert torch.equal(trainer.model.score.weight.detach().cpu(), saved["score.weight"].float())
        result = trainer.train()
        trainer.save_model(folder)
        again = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            after = again(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
    print(f"rewards before {before.tolist()}")
    print(f"rewards after three TRL steps {after.tolist()}, training loss {result.training_loss:.4f}")
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    print("TRL continues training from the checkpoint")


if __name__ == "__main__":
    main(sys.argv[1])
