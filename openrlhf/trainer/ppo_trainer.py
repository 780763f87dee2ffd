"""Reinforcement learning of a policy with any reward: PPO with a critic, and estimators without one."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.datasets.prompts import PromptData
from openrlhf.datasets.sft import SFTData
from openrlhf.models.generation import PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.trainer.advantages import Advantages
from openrlhf.trainer.engine import Engine
from openrlhf.trainer.groups import keep_groups
from openrlhf.trainer.held_out_samples import held_out_samples
from openrlhf.trainer.kl_control import make_kl_controller
from openrlhf.trainer.plan import TrainingPlan, step_generator
from openrlhf.trainer.ppo_settings import PPOSettings
from openrlhf.trainer.ppo_update import (
    critic_terms,
    optimizer_step,
    policy_terms,
    response_passes,
    text_passes,
    update_means,
)
from openrlhf.trainer.rollout import Rollout, Sampling, base_seed, episode_rollout, join_logs, sample_rollout
from openrlhf.trainer.rollout_advantages import rollout_advantages
from openrlhf.trainer.shares import gather_shares, own_part, shared_logprobs

logger = logging.getLogger(__name__)

STATE_NAME = "ppo.json"
EVALUATION_STREAM = 1  # random stream of held-out responses, apart from that of training
FRUITLESS_ROUNDS = 20  # rollouts without a prompt that passes dynamic filtering, before a run gives up


class PPOTrainer:
    """Rollouts, updates and evaluations of a policy. Its models live in engines; see `ppo_models` for the short way.

    Args:
        actor: engine that holds the prepared policy, a causal language model of transformers.
        tokenizer: the policy's, with a pad token of its own.
        prompts: what responses are sampled to.
        reward: a reward source; or an agent's executor (`load_agent`), which plays whole episodes.
        critic: engine that holds the prepared `RewardModel` whose values are trained; for `gae` only.
        reference: frozen model that the policy is held near; None where the KL coefficient is 0.
        held_out: prompts of `evaluate`; None for no evaluation.
        gold: reward source that only evaluates, to tell whether `reward` is being exploited.
        texts: what the policy keeps predicting, with the weight `ptx_coef`; None where that is 0.

    Where the engines have several processes, each samples and scores a share of the prompts of a rollout and computes
    log-probabilities of a share of its responses; the whole rollout is then in all of them, and so is what follows from
    it. Each optimizer step splits its rows anew.
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
        texts: SFTData | None = None,
    ) -> None:
        if settings.needs_critic != (critic is not None):
            raise ValueError(f"{settings.estimator!r}: a critic is needed by 'gae' and by no other estimator")
        if settings.kl_coef > 0 and reference is None:
            raise ValueError(f"a KL coefficient of {settings.kl_coef} needs a reference model; pass one, or 0")
        settings.check_prompts(len(prompts))
        self.actor, self.critic, self.reference, self.settings = actor, critic, reference, settings
        self.policy = Policy(actor.module, tokenizer)
        self.pad_id = tokenizer.pad_token_id
        self.prompts, self.held_out, self.reward, self.gold = prompts, held_out, reward, gold
        self.agent_engine = None if hasattr(reward, "score") else PolicyEngine(self.policy)
        self.stream = TrainingPlan(len(prompts), settings.episodes, 1, 1, seed=settings.seed)  # one prompt a place
        self.texts = texts
        if texts is not None:  # read over and over, a batch an update
            size = settings.train_batch_size
            passes = 1 + settings.total_updates(len(prompts)) * size // len(texts)
            self.text_plan = TrainingPlan(len(texts), passes, size, 1, seed=settings.seed)
        self.kl = make_kl_controller(settings.kl_coef, settings.kl_target, settings.kl_horizon)
        self.position = 0  # prompts of the stream that are used up
        self.updates = 0  # optimizer steps so far
        self.history: list[dict[str, float]] = []  # metrics of every step, for early warnings
        self.held_out_samples: list[dict[str, Any]] = []  # some of the last evaluation, for people

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
        return {
            **figures,
            **update_means(sums),
            **rollout.logs,
            **seconds,
            "updates": self.updates,
            "epoch": self.epoch,
        }

    def collect(self) -> Rollout | None:
        """The next rollout; with dynamic filtering, more is sampled until it is full or the prompts are used up.

        Raises:
            RuntimeError: no prompt of many rollouts passes the filter.
        """
        settings, parts, wanted = self.settings, [], self.settings.rollout_batch_size
        logs = []  # of every round with its responses, of which a filter may keep few or none
        self.actor.model.eval()
        while wanted > 0 and not self.done:
            places = range(self.position, min(self.position + wanted, self.stream.total_steps))
            part = self._sample(places)
            self.position = places.stop
            logs.append((part.logs, len(part)))
            if settings.filter_range is not None:
                kept = keep_groups(part.score, part.group, *settings.filter_range)
                part.logs["filtered_share"] = 1 - kept.float().mean().item()
                part = part.select(kept.nonzero().flatten()) if kept.any() else None
            if part is not None:
                parts.append(part)
                wanted -= len(part) // settings.samples_per_prompt
            elif not parts and len(logs) >= FRUITLESS_ROUNDS:
                raise RuntimeError(
                    f"none of {len(logs) * settings.rollout_batch_size} prompts passed dynamic filtering to "
                    f"{settings.filter_range}: their responses score the same; take easier or harder prompts, raise "
                    "--n_samples_per_prompt, or look at one call of the reward with --dry_run_rewards"
                )
        if not parts:
            return None
        return shared_logprobs(
            self.actor,
            replace(Rollout.join(parts, self.pad_id), logs=join_logs(logs)),
            self.reference,
            None if self.critic is None else self.critic.module.eval(),
            temperature=settings.temperature,
            batch_size=settings.micro_rollout_batch_size,
        )

    def _sample(self, places: range) -> Rollout:
        """Responses to these places of the stream, each process's share gathered in all of them."""
        shares = gather_shares(self.actor, lambda: self._sample_part(places))
        return shares[0] if len(shares) == 1 else Rollout.join(shares, self.pad_id, at_once=True)

    def _sample_part(self, places: range) -> Rollout | None:
        settings, own = self.settings, own_part(places, self.actor)
        if not own:
            return None
        options = {
            "samples_per_prompt": settings.samples_per_prompt,
            "seed": base_seed(settings.seed, places.start),
            "first_group": own.start,
            "first_sample": (own.start - places.start) * settings.samples_per_prompt,
        }
        indices = [int(self.stream.indices(place)[0]) for place in own]
        if self.agent_engine is not None:
            return episode_rollout(self.agent_engine, self.prompts, indices, self.reward, self.sampling, **options)
        told = {"step": self.updates, "epoch": places.start // len(self.prompts)}
        return sample_rollout(self.policy, self.prompts, indices, self.reward, self.sampling, **options, **told)

    def estimate(self, rollout: Rollout) -> tuple[Advantages, dict[str, float]]:
        """Advantages over the whole rollout, and its figures."""
        return rollout_advantages(rollout, self.settings, self.kl.coef)

    def update_policy(self, rollout: Rollout, advantages: Advantages, rows: Tensor, sums: dict[str, float]) -> None:
        """One optimizer step of the policy on these rows; none where no token has a part in the loss.

        Args:
            sums: of metrics over tokens; added to.
        """
        settings, actor, size = self.settings, self.actor, self.settings.micro_train_batch_size
        terms = partial(policy_terms, actor, settings, self.kl.coef)
        passes = response_passes(actor, rollout, advantages, rows, size, terms, settings.reduction)
        if passes and self.texts is not None:
            chosen = self.text_plan.indices(self.updates)
            passes += text_passes(actor, self.texts, chosen, size, settings.ptx_coef, self.pad_id)
        if passes:
            optimizer_step(actor, passes, "policy", sums)

    def update_critic(self, rollout: Rollout, advantages: Advantages, rows: Tensor, sums: dict[str, float]) -> None:
        """One optimizer step of the critic on these rows; arguments as of `update_policy`."""
        terms = partial(critic_terms, self.critic, self.settings.value_clip)
        size = self.settings.micro_train_batch_size
        passes = response_passes(self.critic, rollout, advantages, rows, size, terms)
        if passes:
            optimizer_step(self.critic, passes, "critic", sums)

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
        own = own_part(range(len(self.held_out)), self.actor)
        options = {"seed": seed, "first_group": own.start, "first_sample": own.start}
        self.actor.model.eval()

        def work() -> tuple[Rollout, Tensor | None] | None:
            if not own:
                return None
            if self.agent_engine is not None:
                agent, engine = self.reward, self.agent_engine
                return episode_rollout(engine, self.held_out, own, agent, sampling, **options), None
            gold = _Keeping(self.reward, self.gold)
            rollout = sample_rollout(self.policy, self.held_out, own, gold, sampling, **options, step=self.updates)
            return rollout, gold.rewards

        rollouts, golds = zip(*gather_shares(self.actor, work), strict=True)
        rollout = Rollout.join(rollouts, self.pad_id, at_once=True)
        sources = {"reward": rollout.total, "score": rollout.score}
        if golds[0] is not None:
            sources["gold_reward"] = torch.cat(golds)
        self.held_out_samples = held_out_samples(self.held_out, rollout, sources.get("gold_reward"))
        means = {name: values.nanmean().item() for name, values in sources.items()}
        return {
            **means,
            "response_length": rollout.action_mask.sum(dim=1).float().mean().item(),
            "truncated_share": rollout.truncated.float().mean().item(),
            "prompts": len(self.held_out),
        }

    def save_state(self, folder: Path) -> None:
        """Write policy, critic, their optimizers, and where the run stands. Collective."""
        for name, engine in self._engines().items():
            if engine.is_main:
                (folder / name).mkdir()
            engine.barrier()
            engine.save_state(folder / name)
        state = {
            "position": self.position,
            "updates": self.updates,
            "kl": self.kl.state_dict(),
            "history": self.history,
        }
        if self.actor.is_main:
            (folder / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """Go on from what `save_state` wrote. Collective."""
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
