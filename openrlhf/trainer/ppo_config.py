"""Configuration of train_ppo: names of OpenRLHF, flat and dotted; values for the trainer are `settings_of`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from openrlhf.trainer.config import TrainConfig, flag, validate
from openrlhf.trainer.foreign_flags import FOREIGN_FLAGS
from openrlhf.trainer.ppo_settings import PPOSettings

RULE = "rule"  # as --remote_rm_url: answers are compared with labels
PTX_COEF = 0.05


@dataclass(frozen=True)
class PPOConfig(TrainConfig):
    """Train a policy by reinforcement learning with any reward: PPO with a critic, or an estimator without one."""

    foreign_flags: ClassVar = FOREIGN_FLAGS

    # models
    reward_pretrain: str | None = flag(
        None, "Reward model (folder, hub id, s3://), or several with commas", "reward.model_name_or_path"
    )
    critic_pretrain: str | None = flag(
        None,
        "What the critic of gae starts from; default: the reward model where its tokens are the policy's, else the "
        "policy with a new head",
        "critic.model_name_or_path",
    )

    # reward
    remote_rm_url: str | None = flag(
        None,
        "Reward: a Python file with reward_func, URLs of a reward server, 'rule' (compare answers with labels), or "
        "several files with commas; default: the reward model, or without one 'rule'",
        "reward.remote_url",
    )
    agent_func_path: str | None = flag(
        None, "Python file with an agent: episodes of several turns", "train.agent_func_path"
    )
    gold_rm_url: str | None = flag(
        None,
        "Reward that only evaluates held-out prompts, as --remote_rm_url; default: 'rule' where it is the reward, or "
        "on pocket",
    )
    reward_weights: list[float] | None = flag(None, "One weight a reward source; default: 1 each")
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = flag(
        "sum_then_normalize",
        "normalize_then_sum: bring each source to mean 0 and std 1 within a prompt's samples first",
    )
    reward_template: str | None = flag(None, "Prompt template of a reward model that records none")
    normalize_reward: bool = flag(
        False, "Use the mean and std that the reward model records", "reward.normalize_enable"
    )
    goal_state_path: str | None = flag(None, "Goal state of the reward model, for shaping along the response")
    goal_shaping_coef: float = flag(0.0, "Weight of the shaping by goal similarity")
    reward_clip_range: list[float] | None = flag(
        None, "Scores are cut to these two numbers (OpenRLHF: -10 10, after the baseline)", "reward.clip_range"
    )
    overlong_buffer_len: int | None = flag(
        None, "Tokens before --generate_max_len with a growing penalty", "reward.overlong_buffer_len"
    )
    overlong_penalty_factor: float = flag(1.0, "The penalty at the limit", "reward.overlong_penalty_factor")
    stop_properly_penalty_coef: float | None = flag(
        None,
        "Scores of responses cut at the limit: times this factor in [0, 1], or this number where negative",
        "reward.stop_properly_penalty_coef",
    )
    remote_rm_timeout: float | None = flag(
        None, "Seconds for a call of a function (600), a request (180), or one step of an agent (300)"
    )
    remote_rm_tries: int = flag(
        8, "Failures of a reward server in a row that end the run; pauses of 0.5, 1, 2, ... up to 30 s: 8 last a minute"
    )

    # data
    dataset: str | None = flag(
        None,
        "Prompts: hub id, save_to_disk folder, json/jsonl(.gz)/parquet/csv file, 'pocket', or a comma list",
        "prompt_data",
        "data.prompt_dataset",
    )
    dataset_probs: str | None = flag(
        None, "Comma list of shares, one per data set", "prompt_data_probs", "data.prompt_probs"
    )
    dataset_split: str = flag("train", "Split to train on", "prompt_split", "data.prompt_split")
    input_key: str = flag("question", "Column of the prompt: text or a message list", "data.input_key")
    pretrain_data: str | None = flag(
        None, "Texts that the policy keeps predicting (ptx): as --prompt_data; rows as train_sft reads them, or texts"
    )
    pretrain_data_probs: str | None = flag(None, "Comma list of shares, one per data set of --pretrain_data")
    pretrain_split: str = flag("train", "Split of --pretrain_data")
    pretrain_input_key: str | None = flag(None, "Column of its prompts or texts; default: --input_key")
    output_key: str | None = flag(
        None,
        "Column of the answers of --pretrain_data; default: solution, answer, output or response, or the whole text",
        "data.output_key",
    )
    label_key: str | None = flag(None, "Column that rewards get as label (pocket: answer)", "data.label_key")
    max_len: int = flag(2048, "Tokens of a whole sequence; an agent's episode ends there", "data.max_len")
    prompt_max_len: int | None = flag(
        None, "Prompts with more tokens are left out; default: --max_len less --generate_max_len"
    )
    generate_max_len: int = flag(
        1024, "Tokens of a response, or of one action of an agent", "max_new_tokens", "rollout.max_new_tokens"
    )

    # rollout and updates
    num_episodes: int = flag(1, "Passes over the prompts", "train.num_episodes")
    rollout_batch_size: int = flag(1024, "Prompts of a rollout", "rollout.batch_size")
    micro_rollout_batch_size: int = flag(
        16, "Responses of a forward pass without gradients", "rollout.micro_batch_size"
    )
    n_samples_per_prompt: int = flag(1, "Responses to a prompt", "rollout.n_samples_per_prompt")
    temperature: float = flag(1.0, "Of sampling and of all log-probabilities", "rollout.temperature")
    top_p: float = flag(1.0, "Share of the probability mass to draw from", "rollout.top_p")
    max_epochs: int = flag(1, "Passes over a rollout", "train.max_epochs")
    train_batch_size: int = flag(128, "Responses of an optimizer step", "train.batch_size")
    micro_train_batch_size: int = flag(8, "Responses of a forward pass with gradients", "train.micro_batch_size")
    learning_rate: float = flag(
        1e-6,
        "Peak learning rate of the policy",
        "actor_learning_rate",
        "actor-learning-rate",
        "actor.adam.lr",
    )
    critic_learning_rate: float = flag(9e-6, "Peak learning rate of the critic", "critic.adam.lr")
    gradient_checkpointing: bool = flag(
        False,
        "Recompute activations to save memory",
        "model.gradient_checkpointing_enable",
        "actor.gradient_checkpointing_enable",
    )
    eval_temperature: float | None = flag(
        None, "Of held-out responses; 0: the most likely token each time; default: --temperature", "eval.temperature"
    )
    report: bool = flag(
        True, "Write report.html into --save_path at every evaluation and checkpoint, and at the end; off: --no_report"
    )
    dry_run_rewards: int = flag(0, "Generate so many samples, call the reward once, print everything, and stop")

    # algorithm
    advantage_estimator: str = flag(
        "gae",
        "gae (PPO, with a critic), reinforce, rloo, reinforce_baseline, group_norm (GRPO) or dr_grpo",
        "algo.advantage.estimator",
        "algo.advantage_estimator",
    )
    gamma: float = flag(1.0, "Discount a token", "algo.advantage.gamma")
    lambd: float = flag(1.0, "Lambda of gae", "gae_lambda", "algo.advantage.lambd")
    no_advantage_std_norm: bool = flag(
        False, "Whitening does not divide by the standard deviation", "algo.advantage.no_std_norm"
    )
    init_kl_coef: float = flag(0.01, "Weight of the KL penalty; 0: no reference model", "algo.kl.init_coef")
    kl_target: float | None = flag(None, "Steer the weight to this KL, nats per token", "algo.kl.target")
    kl_horizon: float = flag(10_000, "Samples over which the weight moves", "algo.kl.horizon")
    kl_estimator: str = flag("k1", "k1, k2 or k3", "algo.kl.estimator")
    use_kl_loss: bool = flag(False, "KL as a term of the loss, not of the reward", "algo.kl.use_loss")
    dynamic_filtering: bool = flag(
        False, "Replace prompts whose mean score lies outside of the range", "algo.dynamic_filtering_enable"
    )
    dynamic_filtering_reward_range: list[float] = flag(
        [0.0, 1.0], "Range of mean scores that are kept, ends excluded", "algo.dynamic_filtering_range"
    )
    eps_clip: float = flag(0.2, "Range of the probability ratio", "actor.eps_clip")
    eps_clip_low_high: list[float] | None = flag(
        None, "Lower and upper range instead of --eps_clip", "actor.eps_clip_low_high"
    )
    dual_clip: float | None = flag(None, "Bound on the loss of bad tokens, above 1", "actor.dual_clip")
    value_clip: float = flag(0.5, "Range of the critic's change; 0: not clipped", "critic.value_clip")
    policy_loss_type: Literal["ppo", "gspo"] = flag(
        "ppo", "gspo: one ratio for a whole response", "actor.policy_loss_type"
    )
    loss_reduction: Literal["token", "sequence", "constant"] | None = flag(
        None, "Mean over tokens, over responses, or divided by --generate_max_len (Dr. GRPO); default: token"
    )
    entropy_loss_coef: float = flag(0.0, "Weight of the entropy bonus", "actor.entropy_coef", "actor.entropy_loss_coef")
    ptx_coef: float | None = flag(
        None, "Weight of the cross-entropy of --pretrain_data in each step of the policy; default: 0.05"
    )
    freezing_actor_steps: int = flag(
        -1, "Rollouts in which only the critic is trained, to warm it up", "critic.freezing_steps"
    )


def settings_of(config: PPOConfig) -> PPOSettings:
    """The values of the trainer.

    Raises:
        ValueError: values out of range, or that do not go together.
    """

    def pair(name: str) -> tuple[float, float] | None:
        values = getattr(config, name)
        if values is not None and len(values) != 2:
            raise ValueError(f"--{name} takes two numbers, got {values}")
        return None if values is None else (values[0], values[1])

    eps_low, eps_high = pair("eps_clip_low_high") or (config.eps_clip, config.eps_clip)
    gspo = config.policy_loss_type == "gspo"
    return PPOSettings(
        episodes=config.num_episodes,
        rollout_batch_size=config.rollout_batch_size,
        samples_per_prompt=config.n_samples_per_prompt,
        micro_rollout_batch_size=config.micro_rollout_batch_size,
        max_epochs=config.max_epochs,
        train_batch_size=config.train_batch_size,
        micro_train_batch_size=config.micro_train_batch_size,
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.generate_max_len,
        max_len=config.max_len,
        eval_temperature=config.eval_temperature,
        estimator=config.advantage_estimator,
        gamma=config.gamma,
        gae_lambda=config.lambd,
        scale_advantages=not config.no_advantage_std_norm,
        kl_coef=config.init_kl_coef,
        kl_target=config.kl_target,
        kl_horizon=config.kl_horizon,
        kl_kind=config.kl_estimator,
        kl_in_loss=config.use_kl_loss,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=config.dual_clip,
        value_clip=config.value_clip or None,
        reduction=config.loss_reduction or ("sequence" if gspo else "token"),
        ratio="sequence" if gspo else "token",
        entropy_coef=config.entropy_loss_coef,
        ptx_coef=0.0 if config.pretrain_data is None else PTX_COEF if config.ptx_coef is None else config.ptx_coef,
        freezing_actor_steps=max(0, config.freezing_actor_steps),
        reward_clip_range=pair("reward_clip_range"),
        filter_range=pair("dynamic_filtering_reward_range") if config.dynamic_filtering else None,
        overlong_buffer=config.overlong_buffer_len,
        overlong_factor=config.overlong_penalty_factor,
        stop_properly_coef=config.stop_properly_penalty_coef,
        seed=config.seed,
    )


def prompt_limit(config: PPOConfig) -> int:
    """Tokens of the longest prompt that is used."""
    return config.prompt_max_len or config.max_len - config.generate_max_len


def validate_ppo(config: PPOConfig) -> None:
    """Refuse impossible settings before anything is loaded.

    Raises:
        ValueError: names what was given and what to do.
    """
    if not config.dataset:
        raise ValueError("--prompt_data is required")
    unused = _changed(config, "lora_rank load_in_4bit s3_save_path save_best lora_alpha lora_dropout target_modules")
    if unused:
        raise ValueError(f"train_ppo trains all weights and saves the last ones locally: drop {', '.join(unused)}")
    if not 0 < config.learning_rate < 100 or not 0 < config.critic_learning_rate < 100:
        raise ValueError(
            "--actor_learning_rate and --critic_learning_rate must be above 0 and below 100, got "
            f"{config.learning_rate} and {config.critic_learning_rate}"
        )
    if config.dry_run and config.dry_run_rewards:
        raise ValueError("--dry_run samples nothing: drop it, or --dry_run_rewards")
    validate(config)
    settings_of(config)
    if config.dry_run_rewards < 0:
        raise ValueError(f"--dry_run_rewards is a number of samples, got {config.dry_run_rewards}")
    if prompt_limit(config) < 1:
        raise ValueError(
            f"--max_len {config.max_len} leaves no prompt beside --generate_max_len {config.generate_max_len}; raise "
            "the one or lower the other"
        )
    if config.agent_func_path and prompt_limit(config) >= config.max_len:
        raise ValueError(
            f"--prompt_max_len {config.prompt_max_len} leaves an agent no room in an episode of --max_len "
            f"{config.max_len} tokens; raise --max_len, such as to --prompt_max_len and --generate_max_len together"
        )
    if config.critic_pretrain and not settings_of(config).needs_critic:
        raise ValueError(f"--critic_pretrain: {config.advantage_estimator} has no critic; drop it or choose gae")
    if config.remote_rm_tries < 1 or (config.remote_rm_timeout is not None and not config.remote_rm_timeout > 0):
        raise ValueError(
            "--remote_rm_tries must be at least 1 and --remote_rm_timeout above 0, got "
            f"{config.remote_rm_tries} and {config.remote_rm_timeout}"
        )
    if config.zero_stage == 3:
        raise ValueError("--zero_stage 3 splits the weights, and sampling needs them whole: choose 2, 1 or 0")
    for name in ("ptx_coef", "pretrain_data_probs", "pretrain_input_key", "output_key"):
        if config.pretrain_data is None and getattr(config, name) is not None:
            raise ValueError(f"--{name} is about --pretrain_data: name that too, or drop it")
    if config.pretrain_data is not None and config.ptx_coef == 0:
        raise ValueError("--pretrain_data has no effect with --ptx_coef 0; drop both, or raise it")
    _validate_reward(config)


def _changed(config: PPOConfig, names: str) -> list[str]:
    """Those of these flags whose values are not the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [f"--{name}" for name in names.split() if getattr(config, name) != defaults[name]]


def _validate_reward(config: PPOConfig) -> None:
    if config.agent_func_path:
        given = [name for name in ("remote_rm_url", "reward_pretrain", "reward_weights") if getattr(config, name)]
        if given:
            raise ValueError(f"an agent gives rewards of its own: drop --{given[0]} or --agent_func_path")
        return
    if config.agent_func_path is None and (config.remote_rm_url or "").endswith("agent_func.py"):
        raise ValueError(f"--remote_rm_url {config.remote_rm_url}: an agent goes to --agent_func_path")
    if (config.goal_state_path is None) != (config.goal_shaping_coef == 0):
        raise ValueError(
            "goal shaping needs --goal_state_path and a --goal_shaping_coef other than 0, "
            f"got {config.goal_state_path} and {config.goal_shaping_coef:g}"
        )
    for name in ("goal_state_path", "normalize_reward", "reward_template"):
        if getattr(config, name) and not config.reward_pretrain:
            raise ValueError(f"--{name} needs a reward model: add --reward_pretrain")
    if config.goal_state_path and "," in (config.reward_pretrain or ""):
        raise ValueError("--goal_state_path belongs to one reward model; name one in --reward_pretrain")
    sources = len(source_specs(config))
    if config.reward_weights is not None and len(config.reward_weights) != sources:
        raise ValueError(f"--reward_weights: expected {sources} numbers, one a source, got {config.reward_weights}")
    if config.reward_aggregation == "normalize_then_sum" and config.n_samples_per_prompt < 2:
        raise ValueError("--reward_aggregation normalize_then_sum needs --n_samples_per_prompt of 2 or more")


def source_specs(config: PPOConfig) -> list[str]:
    """One text a reward source, those of --remote_rm_url first; a comma list of URLs is one source."""
    remote = config.remote_rm_url or ("" if config.reward_pretrain else RULE)
    parts = [part.strip() for part in remote.split(",") if part.strip()]
    if parts and all(part.startswith(("http://", "https://")) for part in parts):
        parts = [",".join(parts)]
    return parts + [part.strip() for part in (config.reward_pretrain or "").split(",") if part.strip()]
