"""Training of a reward model: Bradley-Terry, plus the goal-contrastive term when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.datasets.preference import PreferenceBatch, PreferenceData
from openrlhf.datasets.response_groups import ResponseGroups
from openrlhf.models.goal_contrastive import goal_contrastive_loss
from openrlhf.models.goal_sampling import StateDraws, draw_states
from openrlhf.models.losses import LossOutput, centering_loss
from openrlhf.models.packed import PackedRows
from openrlhf.trainer.config import FORWARD_PASS_STRATEGIES
from openrlhf.trainer.engine import Engine
from openrlhf.trainer.loop import gather_rows
from openrlhf.trainer.plan import TrainingPlan, evaluation_batches, step_generator
from openrlhf.trainer.prefetch import Prefetcher

# Weighted sums over pairs, in the order of the vectors that train_step returns and evaluate gathers. The weights of the
# pairs of an example add up to 1.
SUMS = (
    "pairs",
    "loss",
    "preference_loss",
    "contrastive_loss",
    "aux_loss",
    "wins",
    "ties",
    "chosen_reward",
    "rejected_reward",
    "positive_similarity",
    "negative_similarity",
    "contrastive_skipped",
)
EVALUATION_STREAM = 1  # random stream of evaluation draws, apart from that of training


@dataclass(frozen=True)
class ContrastiveSettings:
    """The goal term: see :func:`goal_contrastive_loss`, whose options are the fields from ``strategy`` on."""

    beta: float
    sim_samples: int
    unsim_samples: int
    beta_end: float | None = None  # the weight moves there in a straight line over the training; None: it stays
    strategy: str = "cosine"
    reduction: str = "pair"
    temperature: float = 1.0
    start: str = "response"
    source_state_percentile: float = 0.0
    goal_state_percentile: float = 0.0
    goal_sampling: str = "uniform"
    goal_discount: float = 0.9
    goal_stop_gradient: bool = False

    @property
    def by_pair(self) -> bool:
        """The loss of a pair does not depend on what else is in its forward pass."""
        return self.reduction == "pair" and self.strategy not in FORWARD_PASS_STRATEGIES

    @property
    def options(self) -> dict[str, Any]:
        """Named arguments of :func:`goal_contrastive_loss`."""
        names = [field.name for field in fields(self)]
        return {name: getattr(self, name) for name in names[names.index("strategy") :]}

    def beta_at(self, progress: float) -> float:
        """Weight of the term after this share of the training."""
        return self.beta if self.beta_end is None else self.beta + (self.beta_end - self.beta) * progress


@dataclass(frozen=True)
class Packing:
    """Rows without padding: see :meth:`~openrlhf.models.reward_model.RewardModel.pack`."""

    pack: Callable[[Tensor, Tensor, bool], PackedRows]  # (input_ids (R, S), attention_mask (R, S), share)
    share: bool  # compute what sequences begin with alike once


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass needs."""

    batch: PreferenceBatch
    draws: StateDraws  # of its P pairs
    packed: PackedRows | None = None  # the rows of the batch without padding
    share: float = 1.0  # of the update's examples; 0: takes part only because every process must


class PairDraws:
    """The states drawn for the pairs of some examples; the pairs of an example lie together.

    Drawn for a whole update at once, so that the positions of a pair do not depend on how it is split.

    Args:
        settings: None draws nothing.
        counts: (n,) pairs of each example.
    """

    def __init__(self, settings: ContrastiveSettings | None, counts: np.ndarray, generator: torch.Generator) -> None:
        samples = (settings.sim_samples, settings.unsim_samples) if settings else (0, 0)
        self.counts, self.ends = counts, np.cumsum(counts)
        self.draws = draw_states(int(counts.sum()), *samples, generator=generator)

    def of(self, places: np.ndarray) -> StateDraws:
        """The draws of the examples at these places, in this order. ``places``: (b,) int64."""
        pairs = [np.arange(self.ends[i] - self.counts[i], self.ends[i]) for i in places]
        return self.draws.select(torch.from_numpy(np.concatenate(pairs)))


class RewardTrainer:
    """One update and one evaluation of a reward model.

    Args:
        engine: holds the prepared :class:`~openrlhf.models.reward_model.RewardModel`.
        data: training examples. plan: which of them each update sees.
        eval_data: None for no evaluation.
        pair_loss: (chosen (P,), rejected (P,), margin (P,) | None, weight (P,)) -> () mean over pairs.
        contrastive: None for the vanilla strategy.
        use_margin: give the data's margins to the pair loss.
        aux_loss_coef, center_coef: weights of the experts' load-balancing loss and of :func:`centering_loss`.
        packing: how the rows of a micro-batch are laid out; None leaves them as they are. Same numbers, less work.
    """

    def __init__(
        self,
        engine: Engine,
        data: PreferenceData | ResponseGroups,
        plan: TrainingPlan,
        pad_id: int,
        pair_loss: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor],
        contrastive: ContrastiveSettings | None = None,
        eval_data: PreferenceData | ResponseGroups | None = None,
        use_margin: bool = False,
        aux_loss_coef: float = 0.0,
        center_coef: float = 0.0,
        packing: Packing | None = None,
    ) -> None:
        self.engine, self.data, self.plan, self.pad_id = engine, data, plan, pad_id
        self.pair_loss, self.contrastive, self.eval_data = pair_loss, contrastive, eval_data
        self.use_margin, self.aux_loss_coef, self.center_coef = use_margin, aux_loss_coef, center_coef
        self.packing = packing
        self.updates = Prefetcher(self._update, plan.total_steps)

    def train_step(self, step: int) -> tuple[Tensor, Tensor | None, float]:
        """Update ``step``: forward, loss, backward over the micro-batches, then one optimizer step.

        Returns:
            Sums over this process's pairs in the order of ``SUMS``, gradient norm before clipping, learning rate.
        """
        micro_batches = self.updates.take(step)
        sums = torch.zeros(len(SUMS), device=self.engine.device)
        beta = self._beta(step / max(1, self.plan.total_steps - 1))
        self.engine.model.train()
        self.engine.begin(len(micro_batches))
        for micro in micro_batches:
            with self.engine.autocast():
                loss, micro_sums, _ = self._losses(micro, beta)
            self.engine.backward(loss * micro.share)
            sums = sums + micro_sums * (micro.share > 0)
        result = self.engine.step()
        return sums, result.grad_norm, result.learning_rate

    def _update(self, step: int) -> list[MicroBatch]:
        """The micro-batches of update ``step`` for this process."""
        indices = self.plan.indices(step)
        draws = PairDraws(self.contrastive, self.data.pair_counts[indices], step_generator(self.plan.seed, step))
        tokens, padded = self._tokens(self.data)
        micro_batches = []
        for places in self.plan.micro_batches(tokens[indices], self.engine.rank, padded):
            share = len(places) / len(indices)
            if share == 0 and self.engine.world_size == 1:  # a short last update
                continue
            if share == 0:  # every process takes part in every pass
                places = np.zeros(1, dtype=np.int64)
            micro_batches.append(self._micro_batch(self.data, indices[places], draws.of(places), share))
        return micro_batches

    def _micro_batch(
        self, data: PreferenceData | ResponseGroups, indices: np.ndarray, draws: StateDraws, share: float = 1.0
    ) -> MicroBatch:
        batch = data.collate(indices.tolist(), self.pad_id)
        packed = None
        if self.packing is not None:
            packed = self.packing.pack(batch.input_ids, batch.attention_mask, self.packing.share)
        return MicroBatch(batch, draws, packed, share)

    def _beta(self, progress: float) -> float:
        return 0.0 if self.contrastive is None else self.contrastive.beta_at(progress)

    def _tokens(self, data: PreferenceData | ResponseGroups) -> tuple[np.ndarray, bool]:
        """(N,) tokens by which examples are dealt to micro-batches, and whether those are padded to the longest.

        A loss that depends on what a micro-batch holds keeps the micro-batches of padded rows. There every example
        counts as many rows as the largest one: tokens are then bounded whatever examples come together.
        """
        by_pair = self.contrastive is None or self.contrastive.by_pair
        if self.packing is None or not by_pair or self.aux_loss_coef > 0:
            return data.row_counts.max() * data.lengths, True
        return data.row_tokens if self.packing.share else data.plain_tokens, False

    def _losses(self, micro: MicroBatch, beta: float) -> tuple[Tensor, Tensor, Tensor]:
        """Loss to differentiate (mean over pairs), metric sums over pairs, and the rewards (R,).

        Args:
            beta: weight of the goal term.
        """
        batch = micro.batch.to(self.engine.device)
        with_states = self.contrastive is not None
        out = self.engine.model(batch.input_ids, batch.attention_mask, micro.packed, with_states)
        chosen, rejected = batch.split(out.reward)  # (P,), (P,)
        preference = self.pair_loss(chosen, rejected, batch.margin if self.use_margin else None, batch.weight)
        zero = preference.new_zeros(())
        contrast = LossOutput(zero)
        if self.contrastive is not None:
            contrast = goal_contrastive_loss(
                out.hidden_states,
                batch.response_mask,
                micro.draws.to(self.engine.device),
                input_ids=batch.input_ids,
                values=out.values,
                chosen=batch.chosen,
                rejected=batch.rejected,
                weight=batch.weight if self.contrastive.reduction == "pair" else None,
                prompt=None if self.contrastive.by_pair else batch.group,
                **self.contrastive.options,
            )
        aux = out.aux_loss if out.aux_loss is not None else zero
        centre = centering_loss(chosen, rejected, batch.weight) if self.center_coef > 0 else zero
        loss = preference + beta * contrast.loss + self.aux_loss_coef * aux + self.center_coef * centre

        with torch.no_grad():
            weights = batch.weight.sum()
            means = [preference.new_ones(()), loss, preference, contrast.loss, aux]
            totals = [((chosen > rejected) * batch.weight).sum(), ((chosen == rejected) * batch.weight).sum()]
            totals += [(chosen * batch.weight).sum(), (rejected * batch.weight).sum()]
            totals += [contrast.metrics.get(name, zero) for name in SUMS[-3:]]
            sums = torch.stack([x.float() for x in [*(mean * weights for mean in means), *totals]])
        return loss, sums.detach(), out.reward.detach()

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Means per pair of sums in the order of ``SUMS``; a tie is not a win."""
        total = dict(zip(SUMS, sums.tolist(), strict=True))
        pairs = max(total["pairs"], 1.0)
        figures = {
            "loss": total["loss"] / pairs,
            "preference_loss": total["preference_loss"] / pairs,
            "accuracy": total["wins"] / pairs,
            "ties": total["ties"] / pairs,
            "chosen_reward": total["chosen_reward"] / pairs,
            "rejected_reward": total["rejected_reward"] / pairs,
            "margin": (total["chosen_reward"] - total["rejected_reward"]) / pairs,
        }
        if self.contrastive is not None:
            counted = max(pairs - total["contrastive_skipped"], 1.0)
            figures |= {
                "contrastive_loss": total["contrastive_loss"] / pairs,
                "positive_similarity": total["positive_similarity"] / counted,
                "negative_similarity": total["negative_similarity"] / counted,
                "contrastive_skipped": total["contrastive_skipped"],
            }
        if self.aux_loss_coef > 0:
            figures["aux_loss"] = total["aux_loss"] / pairs
        return figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss terms, accuracy and the distribution of rewards over the evaluation pairs; {} without any.

        ``reward_std`` is the sample standard deviation (n - 1) over the rewards of all responses; every example counts
        once whatever the number of processes.
        """
        if not self.eval_data:
            return {}
        generator = step_generator(self.plan.seed, 0, EVALUATION_STREAM)
        draws = PairDraws(self.contrastive, self.eval_data.pair_counts, generator)
        sums = torch.zeros(len(SUMS), device=self.engine.device)
        rewards, beta = [], self._beta(0.0)  # one weight for all evaluations, so that they can be compared
        self.engine.model.eval()
        tokens, padded = self._tokens(self.eval_data)
        size, rank, world = self.plan.micro_batch_size, self.engine.rank, self.engine.world_size
        for rows, counts in evaluation_batches(tokens, size, rank, world, self.plan.batch_tokens, padded):
            with self.engine.autocast():
                _, batch_sums, reward = self._losses(self._micro_batch(self.eval_data, rows, draws.of(rows)), beta)
            if counts:
                sums = sums + batch_sums
                rewards.append(reward)
        every_reward = gather_rows(self.engine, rewards)
        return {
            **self.summarise(self.engine.sum(sums)),
            "pairs": int(self.eval_data.pair_counts.sum()),
            "reward_mean": every_reward.mean().item(),
            "reward_std": every_reward.std().item(),
            "reward_min": every_reward.min().item(),
            "reward_max": every_reward.max().item(),
        }
