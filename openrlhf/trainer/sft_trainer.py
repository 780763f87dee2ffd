"""Supervised fine-tuning of a language model on answers."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.datasets.sft import SFTBatch, SFTData
from openrlhf.models.functional import position_ids_from_mask
from openrlhf.models.losses import next_token_loss
from openrlhf.trainer.engine import Engine
from openrlhf.trainer.plan import TrainingPlan, evaluation_batches


def answer_loss(engine: Engine, batch: SFTBatch) -> Tensor:
    """() mean cross-entropy of the answer tokens of a batch under the engine's causal language model, nats."""
    batch = batch.to(engine.device)
    with engine.autocast():
        logits = engine.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=position_ids_from_mask(batch.attention_mask),
            use_cache=False,
        ).logits
    return next_token_loss(logits, batch.input_ids, batch.response_mask)


class SFTTrainer:
    """One update and one evaluation of a language model; the loss is a mean over answer tokens of the update.

    Args:
        engine: holds the prepared causal language model of transformers.
        data: training rows. plan: which of them each update sees. eval_data: None for no evaluation.
    """

    def __init__(
        self, engine: Engine, data: SFTData, plan: TrainingPlan, pad_id: int, eval_data: SFTData | None = None
    ) -> None:
        self.engine, self.data, self.plan, self.pad_id, self.eval_data = engine, data, plan, pad_id, eval_data

    def train_step(self, step: int) -> tuple[Tensor, Tensor | None, float]:
        """Update ``step``. Returns [tokens, loss sum] of this process, gradient norm, learning rate."""
        indices = self.plan.indices(step)
        tokens_in_update = int(self.data.response_lengths[indices].sum())
        sums = torch.zeros(2, device=self.engine.device)
        self.engine.model.train()
        for places in self.plan.micro_batches(self.data.lengths[indices], self.engine.rank):
            tokens = int(self.data.response_lengths[indices[places]].sum())
            chosen = indices[places] if len(places) else indices[:1]  # every process takes part in every pass
            loss = answer_loss(self.engine, self.data.collate(chosen.tolist(), self.pad_id))
            self.engine.backward(loss * (tokens / tokens_in_update))
            sums = sums + torch.stack([loss.new_tensor(float(tokens)), loss.detach().float() * tokens])
        result = self.engine.step()
        return sums, result.grad_norm, result.learning_rate

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Loss per answer token, in nats, and the number of tokens."""
        tokens, total = sums.tolist()
        return {"loss": total / max(tokens, 1.0), "tokens": tokens}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss per answer token over the evaluation rows; {} without any."""
        if not self.eval_data:
            return {}
        size, rank, world = self.plan.micro_batch_size, self.engine.rank, self.engine.world_size
        sums = torch.zeros(2, device=self.engine.device)
        self.engine.model.eval()
        for rows, counts in evaluation_batches(self.eval_data.lengths, size, rank, world):
            loss = answer_loss(self.engine, self.eval_data.collate(rows.tolist(), self.pad_id))
            if counts:
                tokens = float(self.eval_data.response_lengths[rows].sum())
                sums = sums + torch.stack([loss.new_tensor(tokens), loss.float() * tokens])
        return self.summarise(self.engine.sum(sums))
