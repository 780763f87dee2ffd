"""The next update is made one step ahead, and an update waits for nothing on the device."""

import threading

import pytest
import torch

from openrlhf.models import reward_model
from openrlhf.models.losses import bradley_terry_loss
from openrlhf.trainer.engine import LocalEngine, OptimizerSettings
from openrlhf.trainer.plan import TrainingPlan
from openrlhf.trainer.prefetch import Prefetcher
from openrlhf.trainer.reward_trainer import ContrastiveSettings, Packing, RewardTrainer
from tests.invariant.test_prefix_sharing import batch_of, random_pairs
from tests.tiny import tiny_reward_model


def test_steps_are_made_ahead_and_in_any_order():
    made, ready = [], threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 1:
            ready.set()
        return step * step

    ahead = Prefetcher(make, 6)
    assert ahead.take(0) == 0 and ready.wait(10)  # nobody asked for step 1 yet
    assert [ahead.take(step) for step in (1, 4, 5)] == [1, 16, 25]
    assert ahead.take(2) == 4  # a step back, as after a resume
    ahead.thread.shutdown()
    assert sorted(set(made)) == [0, 1, 2, 3, 4, 5] and max(made) == 5  # none beyond the last


def test_an_error_is_raised_where_the_step_is_asked_for():
    def make(step: int) -> int:
        if step == 1:
            raise ValueError("row 17 is broken")
        return step

    ahead = Prefetcher(make, 3)
    assert ahead.take(0) == 0
    with pytest.raises(ValueError, match="row 17"):
        ahead.take(1)


def test_an_update_on_packed_rows_asks_the_device_for_no_number(monkeypatch):
    """With padded rows transformers itself asks whether there is padding, once a pass."""
    model, engine = tiny_reward_model("llama"), LocalEngine(device="cpu")
    engine.prepare(model, OptimizerSettings(1e-3, (0.9, 0.95), 0.0, 1.0, "constant", 0, 0.1, 1))
    batch = batch_of(random_pairs())

    class Data:
        pair_counts = torch.ones(9, dtype=torch.long).numpy()
        row_tokens = plain_tokens = lengths = row_counts = pair_counts

        def collate(self, indices, pad_id):
            return batch

    plan = TrainingPlan(examples=9, epochs=1, batch_size=9, micro_batch_size=9)
    packing = Packing(model.pack, share=True)
    contrastive = ContrastiveSettings(
        beta=0.5, beta_end=0.0, sim_samples=5, unsim_samples=4, strategy="infonce", start="diverge"
    )
    trainer = RewardTrainer(engine, Data(), plan, 0, bradley_terry_loss, contrastive, packing=packing)
    update = trainer.updates.take(0)
    monkeypatch.setattr(trainer.updates, "take", lambda step: update)
    # On a CPU an empty row is told at once; a GPU is not asked.
    monkeypatch.setattr(reward_model, "last_valid_index", lambda mask: mask.long().sum(1) - 1)

    def refuse(*_):
        raise AssertionError("waits for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        sums, norm, _ = trainer.train_step(0)
    assert sums[0] == 9 and norm > 0
