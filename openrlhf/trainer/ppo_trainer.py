"""Reinforcement learning of a policy with any reward: PPO with a critic, and estimators without one."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openrlhf.datasets.prompts import PromptData
from openrlhf.models.functional import approx_kl, masked_mean
from openrlhf.models.generation import PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.models.policy_losses import (
    count_units,
    entropy_loss,
    explained_variance,
    kl_loss,
    ppo_policy_loss,
    ppo_value_loss,
)
from openrlhf.models.reward_model import RewardModel, disable_dropout, initialise_head
from openrlhf.rewards.adapting import as_reward_source
from openrlhf.trainer.advantages import (
    ESTIMATORS,
    Advantages,
    AdvantageSettings,
    RolloutRewards,
    clip_rewards,
    overlong_penalty,
    penalise_truncated,
)
from openrlhf.trainer.early_warnings import repeated_ngram_share
from openrlhf.trainer.engine import Engine, LocalEngine, OptimizerSettings
from openrlhf.trainer.groups import group_figures, keep_groups
from openrlhf.trainer.kl_control import make_kl_controller
from openrlhf.trainer.plan import TrainingPlan, step_generator
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.rollout import (
    Rollout,
    Sampling,
    base_seed,
    episode_rollout,
    sample_rollout,
    token_logprobs,
    token_values,
    with_logprobs,
)

logger = logging.getLogger(__name__)

STATE_NAME = "ppo.json"
EVALUATION_STREAM = 1  # random stream of held-out responses, apart from that of training
FRUITLESS_ROUNDS = 20  # rollouts without a prompt that passes dynamic filtering, before a run gives up
OPTIMIZER = OptimizerSettings(1e-6, (0.9, 0.95), 0.0, 1.0, "constant", 0, 0.0, 1)


class PPOTrainer:
    """Rollouts, updates and evaluations of a policy. Its models live in engines; see `make_trainer` for the short way.

    Args:
        actor: engine that holds the prepared policy, a causal language model of transformers.
        tokenizer: the policy's, with a pad token of its own.
        prompts: what responses are sampled to.
        reward: a reward source; or an agent's executor (`load_agent`), which plays whole episodes.
        critic: engine that holds the prepared `RewardModel` whose values are trained; for `gae` only.
        reference: frozen model that the policy is held near; None where the KL coefficient is 0.
        held_out: prompts of `evaluate`; None for no evaluation.
        gold: reward source that only evaluates, to tell whether `reward` is being exploited.
    """

    def __init__(
        self,
        actor: Engine,
        tokenizer: Any,
        prompts: PromptData,
        reward: Any,
        settings: PPOSettings,
        critic: Engine | None = None,
        reference: nn.Module | None = None,
        held_out: PromptData | None = None,
        gold: Any = None,
    ) -> None:
        if settings.needs_critic != (critic is not None):
            raise ValueError(f"{settings.estimator!r}: a critic is needed by 'gae' and by no other estimator")
        if settings.kl_coef > 0 and reference is None:
            raise ValueError(f"a KL coefficient of {settings.kl_coef} needs a reference model; pass one, or 0")
        if len(prompts) < settings.rollout_batch_size:
            raise ValueError(
                f"{len(prompts)} prompts are fewer than one rollout of {settings.rollout_batch_size}; lower "
                "--rollout_batch_size or add data"
            )
        self.actor, self.critic, self.reference, self.settings = actor, critic, reference, settings
        self.policy = Policy(actor.model, tokenizer)
        self.prompts, self.held_out, self.reward, self.gold = prompts, held_out, reward, gold
        self.agent_engine = None if hasattr(reward, "score") else PolicyEngine(self.policy)
        self.stream = TrainingPlan(len(prompts), settings.episodes, 1, 1, seed=settings.seed)  # one prompt a place
        self.kl = make_kl_controller(settings.kl_coef, settings.kl_target, settings.kl_horizon)
        self.position = 0  # prompts of the stream that are used up
        self.updates = 0  # optimizer steps so far
        self.history: list[dict[str, float]] = []  # metrics of every step, for early warnings

    @property
    def done(self) -> bool:
        """All prompts are used up."""
        return self.position >= self.stream.total_steps

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn in training."""
        settings = self.settings
        return Sampling(settings.temperature, settings.top_p, settings.max_new_tokens, settings.max_len)

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far."""
        return self.position / len(self.prompts)

    def train_step(self, step: int) -> dict[str, float]:
        """One rollout and all updates from it: collect, estimate advantages, then passes of optimizer steps.

        Args:
            step: rollouts so far.
        Returns:
            Metrics; {} where dynamic filtering left nothing to the end of the prompts.
        """
        rollout = self.collect()
        if rollout is None:
            return {}
        start = time.monotonic()
        advantages, figures = self.estimate(rollout)
        sums: dict[str, float] = defaultdict(float)
        for epoch in range(self.settings.max_epochs):
            order = torch.randperm(len(rollout), generator=step_generator(self.settings.seed, step, epoch))
            for rows in order.split(self.settings.train_batch_size):
                if step >= self.settings.freezing_actor_steps:
                    self.update_policy(rollout, advantages, rows, sums)
                if self.critic is not None:
                    self.update_critic(rollout, advantages, rows, sums)
                self.updates += 1
        self.kl.update(figures.get("kl", 0.0), len(rollout))
        seconds = {"seconds_training": time.monotonic() - start}
        return {**figures, **_means(sums), **rollout.logs, **seconds, "updates": self.updates, "epoch": self.epoch}

    def collect(self) -> Rollout | None:
        """The next rollout; with dynamic filtering, more is sampled until it is full or the prompts are used up.

        Raises:
            RuntimeError: no prompt of many rollouts passes the filter.
        """
        settings, parts, wanted, rounds = self.settings, [], self.settings.rollout_batch_size, 0
        self.actor.model.eval()
        while wanted > 0 and not self.done:
            places = range(self.position, min(self.position + wanted, self.stream.total_steps))
            part = self._sample(places)
            self.position = places.stop
            rounds += 1
            if settings.filter_range is not None:
                kept = keep_groups(part.score, part.group, *settings.filter_range)
                part.logs["filtered_share"] = 1 - kept.float().mean().item()
                part = part.select(kept.nonzero().flatten()) if kept.any() else None
            if part is not None:
                parts.append(part)
                wanted -= len(part) // settings.samples_per_prompt
            elif not parts and rounds >= FRUITLESS_ROUNDS:
                raise RuntimeError(
                    f"none of {rounds * settings.rollout_batch_size} prompts passed dynamic filtering to "
                    f"{settings.filter_range}: their responses score the same; take easier or harder prompts, raise "
                    "--n_samples_per_prompt, or look at one call of the reward with --dry_run_rewards"
                )
        if not parts:
            return None
        start = time.monotonic()
        rollout = with_logprobs(
            Rollout.join(parts, self.policy.tokenizer.pad_token_id),
            self.actor.model,
            self.reference,
            None if self.critic is None else self.critic.model.eval(),
            temperature=settings.temperature,
            batch_size=settings.micro_rollout_batch_size,
            autocast=self.actor.autocast,
        )
        rollout.logs["seconds_logprobs"] = time.monotonic() - start
        return rollout

    def _sample(self, places: range) -> Rollout:
        settings = self.settings
        options = {
            "samples_per_prompt": settings.samples_per_prompt,
            "seed": base_seed(settings.seed, places.start),
            "first_group": places.start,
        }
        indices = [int(self.stream.indices(place)[0]) for place in places]
        if self.agent_engine is not None:
            return episode_rollout(self.agent_engine, self.prompts, indices, self.reward, self.sampling, **options)
        told = {"step": self.updates, "epoch": places.start // len(self.prompts)}
        return sample_rollout(self.policy, self.prompts, indices, self.reward, self.sampling, **options, **told)

    def estimate(self, rollout: Rollout) -> tuple[Advantages, dict[str, float]]:
        """Advantages over the whole rollout, and its figures."""
        settings, mask = self.settings, rollout.action_mask
        score, lengths = rollout.reward, mask.sum(dim=1)
        if settings.reward_clip_range is not None:
            score = clip_rewards(score, *settings.reward_clip_range)
        if settings.overlong_buffer is not None:
            score = score + overlong_penalty(
                lengths, settings.max_new_tokens, settings.overlong_buffer, settings.overlong_factor
            )
        if settings.stop_properly_coef is not None:
            score = penalise_truncated(score, rollout.truncated, settings.stop_properly_coef)
        kl = torch.zeros(mask.shape)
        if rollout.reference_logprobs is not None:
            kl = approx_kl(rollout.logprobs, rollout.reference_logprobs, settings.kl_kind, mask)
        rewards = RolloutRewards(
            score,
            rollout.group,
            mask,
            torch.zeros(mask.shape) if settings.kl_in_loss else kl,
            0.0 if settings.kl_in_loss else self.kl.coef,
            rollout.dense,
            rollout.values,
        )
        advantages = ESTIMATORS[settings.estimator](
            rewards, AdvantageSettings(settings.gamma, settings.gae_lambda, settings.scale_advantages)
        )
        return advantages, self._figures(rollout, rewards, kl, advantages)

    def _figures(
        self, rollout: Rollout, rewards: RolloutRewards, kl: Tensor, advantages: Advantages
    ) -> dict[str, float | None]:
        """What is logged of a rollout; names as `early_warnings` reads them."""
        mask, raw = rollout.action_mask, rollout.total
        scored = raw[~raw.isnan()]
        ends = rollout.reward[~rollout.reward.isnan()]
        figures = {
            "reward": scored.mean().item() if len(scored) else None,
            "reward_std": scored.std().item() if len(scored) > 1 else None,
            "shaped_reward": rewards.total.nanmean().item() if len(scored) else None,
            "unscored_share": 1 - len(scored) / len(raw),
            "response_length": mask.sum(dim=1).float().mean().item(),
            "truncated_share": rollout.truncated.float().mean().item(),
            "entropy": masked_mean(rollout.entropy, mask).item(),
            "repeated_share": float(
                np.mean(
                    [
                        repeated_ngram_share(ids[kept].tolist())
                        for ids, kept in zip(rollout.input_ids, mask, strict=True)
                    ]
                )
            ),
            "learning_share": (advantages.loss_mask.any(dim=1).float().mean()).item(),
            "responses": len(rollout),
            "kl_coef": self.kl.coef,
        }
        if self.settings.reward_clip_range is not None and len(ends):
            low, high = self.settings.reward_clip_range
            figures["reward_clipped_share"] = ((ends < low) | (ends > high)).float().mean().item()
        if self.settings.samples_per_prompt > 1:
            equal = group_figures(rewards.total, rollout.group).equal
            figures["equal_group_share"] = equal.float().mean().item()
        if rollout.reference_logprobs is not None:
            figures["kl"] = masked_mean(kl, mask).item()
        if rollout.values is not None:
            figures["explained_variance"] = explained_variance(
                rollout.values, advantages.returns, advantages.loss_mask
            ).item()
        return figures

    def update_policy(self, rollout: Rollout, advantages: Advantages, rows: Tensor, sums: dict[str, float]) -> None:
        """One optimizer step of the policy on these rows; none where no token has a part in the loss.

        Args:
            sums: of metrics over tokens; added to.
        """
        settings, device = self.settings, self.actor.device
        reduce = {"reduction": settings.reduction, "normaliser": settings.normaliser}
        units = count_units(advantages.loss_mask[rows], settings.reduction)
        micro_batches = self._micro_batches(rollout, advantages, rows)
        if units == 0:
            return
        self.actor.model.train()
        self.actor.begin(len(micro_batches))
        for micro in micro_batches:
            batch = rollout.select(micro)
            width = batch.input_ids.shape[1]
            ids, attention, actions, old = (
                x.to(device) for x in (batch.input_ids, batch.attention_mask, batch.action_mask, batch.logprobs)
            )
            advantage, mask = (x[micro, :width].to(device) for x in (advantages.advantages, advantages.loss_mask))
            with self.actor.autocast():
                logprobs, entropy = token_logprobs(
                    self.actor.model, ids, attention, actions, settings.temperature, settings.entropy_coef > 0
                )
            policy = ppo_policy_loss(
                logprobs, old, advantage, mask, settings.eps_low, settings.eps_high, settings.dual_clip,
                ratio=settings.ratio, **reduce,
            )  # fmt: skip
            terms = [("policy_loss", 1.0, policy)]
            if settings.kl_in_loss and self.kl.coef > 0:
                reference = batch.reference_logprobs.to(device)
                terms.append(("kl_loss", self.kl.coef, kl_loss(logprobs, reference, mask, settings.kl_kind, **reduce)))
            if entropy is not None:
                terms.append(("entropy_loss", settings.entropy_coef, entropy_loss(entropy, mask, **reduce)))
            share = count_units(mask, settings.reduction) / units
            self.actor.backward(sum(weight * term.loss for _, weight, term in terms) * share)
            for name, _, term in terms:
                _add(sums, {name: (term.loss * share).item()})
            _add(sums, {f"policy/{name}": value.item() for name, value in policy.metrics.items()})
        result = self.actor.step()
        _add(sums, {"policy_steps": 1.0, "learning_rate": result.learning_rate})
        if result.grad_norm is not None:
            _add(sums, {"grad_norm": result.grad_norm.item()})

    def update_critic(self, rollout: Rollout, advantages: Advantages, rows: Tensor, sums: dict[str, float]) -> None:
        """One optimizer step of the critic on these rows; arguments as of `update_policy`."""
        device = self.critic.device
        units = count_units(advantages.loss_mask[rows])
        micro_batches = self._micro_batches(rollout, advantages, rows)
        if units == 0:
            return
        self.critic.model.train()
        self.critic.begin(len(micro_batches))
        for micro in micro_batches:
            batch = rollout.select(micro)
            width = batch.input_ids.shape[1]
            ids, attention, actions, old = (
                x.to(device) for x in (batch.input_ids, batch.attention_mask, batch.action_mask, batch.values)
            )
            returns, mask = (x[micro, :width].to(device) for x in (advantages.returns, advantages.loss_mask))
            with self.critic.autocast():
                values = token_values(self.critic.model, ids, attention, actions)
            value = ppo_value_loss(values, old, returns, mask, self.settings.value_clip)
            share = count_units(mask) / units
            self.critic.backward(value.loss * share)
            _add(sums, {"value_loss": (value.loss * share).item()})
            _add(sums, {f"critic/{name}": metric.item() for name, metric in value.metrics.items()})
        result = self.critic.step()
        _add(sums, {"critic_steps": 1.0, "critic_learning_rate": result.learning_rate})
        if result.grad_norm is not None:
            _add(sums, {"critic_grad_norm": result.grad_norm.item()})

    def _micro_batches(self, rollout: Rollout, advantages: Advantages, rows: Tensor) -> list[Tensor]:
        """Rows of like length together; those without a token in the loss are left out."""
        rows = rows[advantages.loss_mask[rows].any(dim=1)]
        return list(rows[rollout.lengths[rows].argsort(stable=True)].split(self.settings.micro_train_batch_size))

    def evaluate(self) -> dict[str, float]:
        """Rewards of one response to every held-out prompt; {} without any.

        ``gold_reward`` is the mean of the gold source, or with none absent; the same draws at every call.
        """
        if self.held_out is None:
            return {}
        settings = self.settings
        temperature = settings.temperature if settings.eval_temperature is None else settings.eval_temperature
        sampling = replace(self.sampling, temperature=temperature, top_p=1.0)
        seed = base_seed(settings.seed, 0, EVALUATION_STREAM)
        everything = range(len(self.held_out))
        self.actor.model.eval()
        if self.agent_engine is not None:
            rollout = episode_rollout(self.agent_engine, self.held_out, everything, self.reward, sampling, seed=seed)
            sources = {"reward": rollout.total, "score": rollout.score}
        else:
            gold = _Keeping(self.reward, self.gold)
            rollout = sample_rollout(
                self.policy, self.held_out, everything, gold, sampling, seed=seed, step=self.updates
            )
            sources = {"reward": rollout.total, "score": rollout.score, "gold_reward": gold.rewards}
        means = {name: values.nanmean().item() for name, values in sources.items() if values is not None}
        return {
            **means,
            "response_length": rollout.action_mask.sum(dim=1).float().mean().item(),
            "truncated_share": rollout.truncated.float().mean().item(),
            "prompts": len(self.held_out),
        }

    def save_state(self, folder: Path) -> None:
        """Write policy, critic, their optimizers, and where the run stands."""
        for name, engine in self._engines().items():
            (folder / name).mkdir()
            engine.save_state(folder / name)
        state = {
            "position": self.position,
            "updates": self.updates,
            "kl": self.kl.state_dict(),
            "history": self.history,
        }
        (folder / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """Go on from what `save_state` wrote."""
        if not (folder / STATE_NAME).is_file():
            raise ValueError(f"{folder} is no checkpoint of train_ppo; choose another --ckpt_path")
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        for name, engine in self._engines().items():
            engine.load_state(folder / name)
        self.position, self.updates, self.history = state["position"], state["updates"], state["history"]
        self.kl.load_state_dict(state["kl"])

    def _engines(self) -> dict[str, Engine]:
        return {"policy": self.actor} | ({} if self.critic is None else {"critic": self.critic})


class _Keeping:
    """A reward source beside which a second one scores the same responses."""

    def __init__(self, source: Any, gold: Any) -> None:
        self.source, self.gold, self.name = source, gold, source.name
        self.rewards: Tensor | None = None  # (N,) of the gold source; None without one

    def score(self, request: Any) -> Any:
        """See `RewardSource.score`."""
        if self.gold is not None:
            self.rewards = torch.from_numpy(self.gold.score(request).rewards.copy())
        return self.source.score(request)

    def close(self) -> None:
        """Nothing of its own to give back."""


def make_trainer(
    model: nn.Module,
    tokenizer: Any,
    prompts: PromptData | Sequence[str],
    reward: Any,
    settings: PPOSettings,
    *,
    value_model: nn.Module | None = None,
    reference: nn.Module | None = None,
    reward_tokenizer: Any = None,
    held_out: PromptData | Sequence[str] | None = None,
    gold: Any = None,
    optimizer: OptimizerSettings = OPTIMIZER,
    critic_optimizer: OptimizerSettings | None = None,
    bf16: bool = False,
) -> PPOTrainer:
    """A trainer in this process, from models and any reward.

    Args:
        model: causal language model of transformers; it is trained in place, without dropout.
        prompts, held_out: texts as the policy reads them, or `PromptData` with labels and columns.
        reward, gold: what `as_reward_source` takes (a callable, a torch module, a source, a text), or for `reward` an
            agent's executor. reward_tokenizer: of a module that scores texts.
        value_model: critic of `gae`, a sequence-classification network or a `RewardModel` over the policy's tokens;
            None: the policy's own layers with a new head. It has nothing to do with `reward`.
        reference: what the KL divergence is measured from; None: a copy of `model`, where the coefficient is above 0.
        optimizer: of the policy; total_steps of 1 or less is replaced by those of the run. critic_optimizer: None: the
            same with 9e-6.
    Raises:
        ValueError: settings that do not go together, too few prompts, or a value model without use.
    """
    if value_model is not None and not settings.needs_critic:
        raise ValueError(f"{settings.estimator!r} uses no value model; choose the estimator gae, or leave it out")
    if not isinstance(prompts, PromptData):
        prompts = PromptData.of(prompts, tokenizer)
    if held_out is not None and not isinstance(held_out, PromptData):
        held_out = PromptData.of(held_out, tokenizer)
    source = reward if hasattr(reward, "execute") else as_reward_source(reward, reward_tokenizer)
    if settings.kl_coef > 0 and reference is None:
        reference = copy.deepcopy(model)
    total = settings.total_updates(len(prompts))
    actor = LocalEngine(bf16=bf16)
    actor.prepare(without_dropout(model), _over(optimizer, total))
    critic = None
    if settings.needs_critic:
        network = value_model if value_model is not None else critic_from_policy(model, settings.seed)
        critic = LocalEngine(bf16=bf16)
        critic.prepare(
            without_dropout(network if isinstance(network, RewardModel) else RewardModel(network)),
            _over(critic_optimizer or replace(optimizer, learning_rate=9e-6), total),
        )
    if reference is not None:
        reference = without_dropout(reference).to(actor.device).eval().requires_grad_(False)
    gold = None if gold is None else as_reward_source(gold)
    return PPOTrainer(actor, tokenizer, prompts, source, settings, critic, reference, held_out, gold)


def critic_from_policy(model: nn.Module, seed: int) -> RewardModel:
    """A critic with the layers of a policy, copied, and a new value head whose first values are near 0."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    disable_dropout(config)
    with torch.random.fork_rng(devices=[]):
        network = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    network.base_model.load_state_dict(model.base_model.state_dict())
    initialise_head(network.score, config.get_text_config().hidden_size, seed)
    return RewardModel(network)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout layer off, in place: an update must see the distribution that was sampled from."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model


def _over(optimizer: OptimizerSettings, total: int) -> OptimizerSettings:
    return optimizer if optimizer.total_steps > 1 else replace(optimizer, total_steps=total)


def _add(sums: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        sums[name] += value


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Losses, gradient norms and learning rates per optimizer step; what was counted in tokens per token."""
    figures = {}
    for part, steps in (("policy", "policy_steps"), ("critic", "critic_steps")):
        count, tokens = sums.get(steps, 0.0), sums.get(f"{part}/tokens", 0.0)
        own = {
            "policy": ("policy_loss", "kl_loss", "entropy_loss", "grad_norm", "learning_rate"),
            "critic": ("value_loss", "critic_grad_norm", "critic_learning_rate"),
        }[part]
        figures |= {name: sums[name] / count for name in own if name in sums and count}
        renamed = {"clipped": "clip_fraction"} if part == "policy" else {}
        figures |= {
            renamed.get(name.split("/")[1], name.split("/")[1]): value / tokens
            for name, value in sums.items()
            if name.startswith(f"{part}/") and name != f"{part}/tokens" and tokens
        }
    return figures
