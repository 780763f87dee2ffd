"""What a PPO trainer is told in numbers and names; without torch, so that flags are refused before it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.models.policy_options import KL_KINDS, check_choice
from openrlhf.trainer.rl_options import ESTIMATOR_TRAITS, check_algorithm


@dataclass(frozen=True)
class PPOSettings:
    """Sizes and the algorithm of a run; formulas and defaults' sources: docs/rl.md."""

    # sizes; batches and micro-batches count responses, rollouts count prompts
    episodes: int = 1  # passes over the prompts
    rollout_batch_size: int = 64  # prompts of a rollout
    samples_per_prompt: int = 1
    micro_rollout_batch_size: int = 16  # responses of a forward pass without gradients
    max_epochs: int = 1  # passes over a rollout
    train_batch_size: int = 64  # responses of an optimizer step
    micro_train_batch_size: int = 8  # responses of a forward pass with gradients
    # sampling
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    max_len: int = 2048  # tokens of an agent's whole episode
    eval_temperature: float | None = None  # of held-out responses; 0: the most likely token; None: as in training
    # advantages
    estimator: str = "gae"
    gamma: float = 1.0
    gae_lambda: float = 1.0
    scale_advantages: bool = True
    # KL divergence from the reference
    kl_coef: float = 0.01  # 0: no reference model
    kl_target: float | None = None
    kl_horizon: float = 10_000
    kl_kind: str = "k1"
    kl_in_loss: bool = False
    # losses
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    value_clip: float | None = 0.5
    reduction: str = "token"
    ratio: str = "token"
    entropy_coef: float = 0.0
    ptx_coef: float = 0.0  # of the cross-entropy of texts that the policy keeps predicting; 0: no texts
    freezing_actor_steps: int = 0  # rollouts in which only the critic is trained
    # rewards
    reward_clip_range: tuple[float, float] | None = None
    filter_range: tuple[float, float] | None = None  # dynamic filtering; None: off
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    stop_properly_coef: float | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        for name in (
            "samples_per_prompt",
            "episodes",
            "rollout_batch_size",
            "micro_rollout_batch_size",
            "max_epochs",
            "train_batch_size",
            "micro_train_batch_size",
            "max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        responses = self.rollout_batch_size * self.samples_per_prompt
        if self.train_batch_size > responses:
            raise ValueError(
                f"train_batch_size {self.train_batch_size} is more than the {responses} responses of a rollout "
                f"(rollout_batch_size {self.rollout_batch_size} x samples_per_prompt {self.samples_per_prompt}); lower "
                "it, or raise one of these"
            )
        evaluation = self.temperature if self.eval_temperature is None else self.eval_temperature
        if not 0 < self.temperature < float("inf") or not 0 < self.top_p <= 1 or not evaluation >= 0:
            raise ValueError(
                f"temperature must be above 0 and top_p in (0, 1], got {self.temperature} and {self.top_p} "
                f"(evaluation: temperature 0 or above, got {evaluation})"
            )
        check_choice("the KL estimate", self.kl_kind, KL_KINDS)
        if self.kl_in_loss and self.kl_kind == "k1":
            raise ValueError("k1 in the loss has a gradient of expectation zero: choose kl_estimator k2 or k3")
        if not 0 <= self.entropy_coef < float("inf") or (self.value_clip is not None and not self.value_clip > 0):
            raise ValueError(
                f"the entropy coefficient must be 0 or more and the value clip above 0, got {self.entropy_coef} and "
                f"{self.value_clip}"
            )
        if not 0 <= self.ptx_coef < float("inf"):
            raise ValueError(f"ptx_coef must be 0 or more, got {self.ptx_coef}")
        check_algorithm(
            self.estimator,
            self.samples_per_prompt,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            kl_coef=self.kl_coef,
            kl_target=self.kl_target,
            kl_horizon=self.kl_horizon,
            reward_clip_range=self.reward_clip_range,
            filter_range=self.filter_range,
            longest_response=self.max_new_tokens,
            overlong_buffer=self.overlong_buffer,
            overlong_factor=self.overlong_factor,
            stop_properly_coef=self.stop_properly_coef,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            dual_clip=self.dual_clip,
            reduction=self.reduction,
            normaliser=self.normaliser,
            ratio=self.ratio,
        )
        if self.freezing_actor_steps > 0 and not self.needs_critic:
            raise ValueError(
                f"freezing_actor_steps warms up a critic, and {self.estimator!r} has none; leave it at 0, or choose gae"
            )

    @property
    def needs_critic(self) -> bool:
        """The estimator reads values."""
        return ESTIMATOR_TRAITS[self.estimator].critic

    @property
    def normaliser(self) -> float | None:
        """Tokens that reduction 'constant' divides by."""
        return float(self.max_new_tokens) if self.reduction == "constant" else None

    def check_prompts(self, prompts: int) -> None:
        """Raise a ValueError where so many prompts do not fill one rollout."""
        if prompts < self.rollout_batch_size:
            raise ValueError(
                f"{prompts} prompts are fewer than one rollout of {self.rollout_batch_size}; lower "
                "--rollout_batch_size or add data"
            )

    def updates(self, responses: int) -> int:
        """Optimizer steps over a rollout of so many responses."""
        return self.max_epochs * -(-responses // self.train_batch_size)

    def total_updates(self, prompts: int) -> int:
        """Optimizer steps of a run over so many prompts; fewer where dynamic filtering drops some."""
        full, rest = divmod(prompts * self.episodes, self.rollout_batch_size)
        sizes = [self.rollout_batch_size * self.samples_per_prompt, rest * self.samples_per_prompt]
        return full * self.updates(sizes[0]) + self.updates(sizes[1])
