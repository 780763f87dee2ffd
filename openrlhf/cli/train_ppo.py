"""Reinforcement learning with any reward: ``python -m openrlhf.cli.train_ppo`` or ``python examples/train_ppo.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from openrlhf.cli.common import (
    POCKET,
    check_positions,
    loop_settings,
    main_first,
    main_only,
    open_log,
    optimizer_settings,
    print_settings,
    resolve_pocket_model,
    run_command,
    start_engine,
    training_tokenizer,
)
from openrlhf.cli.parser import parse_config
from openrlhf.cli.ppo_data import load_prompts, load_texts
from openrlhf.cli.run_folder import check_outputs, check_replaceable, check_room, publish_model
from openrlhf.trainer.ppo_config import RULE, PPOConfig, settings_of, source_specs, validate_ppo
from openrlhf.utils.manifest import write_manifest
from openrlhf.utils.run_log import seed_everything

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.datasets.prompts import PromptData
    from openrlhf.datasets.sft import SFTData
    from openrlhf.models.reward_model import RewardModel
    from openrlhf.rewards.source import RewardSource
    from openrlhf.trainer.engine import Engine
    from openrlhf.trainer.ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)


def load_source(config: PPOConfig, spec: str, has_labels: bool) -> RewardSource:
    """One reward source, checked: a function is found, a server answers, a reward model is loaded."""
    from openrlhf.cli.reward_checkpoint import find_checkpoint
    from openrlhf.evaluation.sampling import grade_pocket, grade_text
    from openrlhf.rewards.rule import RuleReward
    from openrlhf.rewards.source import parse_reward_source

    if spec == RULE:
        if not has_labels:
            raise ValueError(
                "the rule reward compares answers with labels: name their column by --label_key, or give another "
                "reward (--remote_rm_url, --reward_pretrain, --agent_func_path)"
            )
        return RuleReward(grade_pocket if config.dataset == POCKET else grade_text)
    of_model = spec in [part.strip() for part in (config.reward_pretrain or "").split(",")]
    settings = {
        "goal_state_path": config.goal_state_path,
        "goal_shaping_coef": config.goal_shaping_coef,
        "gamma": config.gamma,
        "normalize_reward": config.normalize_reward,
        "bf16": config.use_bf16,
    }
    return parse_reward_source(
        spec,
        find_checkpoint=partial(find_checkpoint, input_template=config.reward_template),
        timeout_s=config.remote_rm_timeout,
        tries=config.remote_rm_tries,
        **(settings if of_model else {}),
    )


def load_reward(config: PPOConfig, has_labels: bool) -> Any:
    """The reward source, a weighted sum of several, or the executor of an agent."""
    if config.agent_func_path:
        from openrlhf.rewards.agent_file import load_agent

        return load_agent(config.agent_func_path, step_limit_s=config.remote_rm_timeout)
    from openrlhf.rewards.source import WeightedSum

    sources = [load_source(config, spec, has_labels) for spec in source_specs(config)]
    if len(sources) == 1 and config.reward_weights is None and config.reward_aggregation == "sum_then_normalize":
        return sources[0]
    return WeightedSum(sources, config.reward_weights, config.reward_aggregation == "normalize_then_sum")


def load_gold(config: PPOConfig, has_labels: bool) -> RewardSource | None:
    """What evaluates held-out responses beside the reward; None: nothing."""
    spec = config.gold_rm_url
    if spec is None and not config.agent_func_path and has_labels:
        spec = RULE if config.dataset == POCKET or source_specs(config) == [RULE] else None
    if spec is not None and config.agent_func_path:
        raise ValueError("--gold_rm_url: an agent's episodes are evaluated by the agent; drop the flag")
    return None if spec is None else load_source(config, spec, has_labels)


def load_critic(config: PPOConfig, tokenizer: Any) -> RewardModel | None:
    """The critic that is named, or the reward model where it reads the policy's tokens; None: made of the policy."""
    from openrlhf.models.pretrained import load_reward_model, load_tokenizer

    name = config.critic_pretrain
    if name is None and config.reward_pretrain and "," not in config.reward_pretrain:
        name = config.reward_pretrain
    if name is None:
        return None
    path = resolve_pocket_model(name)
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        if config.critic_pretrain:
            raise ValueError(
                f"--critic_pretrain {name} has another tokenizer than the policy, whose tokens it must read"
            )
        logger.info("%s has other tokens than the policy: the critic starts from the policy, with a new head", name)
        return None
    return load_reward_model(path, allow_missing_head=True, seed=config.seed, pad_token_id=tokenizer.pad_token_id)


def build_trainer(
    config: PPOConfig,
    engine: Callable[[], Engine],
    tokenizer: Any,
    prompts: PromptData,
    reward: Any,
    held_out: PromptData | None = None,
    gold: RewardSource | None = None,
    texts: SFTData | None = None,
) -> PPOTrainer:
    """Models, optimizers and the trainer over them.

    Args:
        engine: makes what policy and critic are trained by.
    """
    from openrlhf.cli.train_sft import load_policy
    from openrlhf.trainer.ppo_models import make_trainer

    settings = settings_of(config)
    model = load_policy(config, engine(), tokenizer)
    longest = max(map(len, prompts.ids)) + config.generate_max_len
    check_positions(model, config.max_len if config.agent_func_path else longest, config.max_len)
    optimizer = optimizer_settings(config, settings.total_updates(len(prompts)))
    return make_trainer(
        model,
        tokenizer,
        prompts,
        reward,
        settings,
        value_model=load_critic(config, tokenizer) if settings.needs_critic else None,
        held_out=held_out,
        gold=gold,
        optimizer=optimizer,
        critic_optimizer=replace(optimizer, learning_rate=config.critic_learning_rate),
        texts=texts,
        engine=engine,
    )


def tell_without_effect(config: PPOConfig, evaluates: bool) -> None:
    """Log the given settings that change nothing, and why."""
    unused = {
        "--overlong_penalty_factor: without --overlong_buffer_len": config.overlong_penalty_factor != 1.0
        and config.overlong_buffer_len is None,
        "--dynamic_filtering_reward_range: without --dynamic_filtering": not config.dynamic_filtering
        and config.dynamic_filtering_reward_range != PPOConfig().dynamic_filtering_reward_range,
        "--use_kl_loss, --kl_estimator: with --init_kl_coef 0": config.init_kl_coef == 0
        and (config.use_kl_loss or config.kl_estimator != "k1"),
        "--eval_temperature, --gold_rm_url: without held-out prompts": not evaluates
        and (config.eval_temperature is not None or config.gold_rm_url is not None),
    }
    if found := [text for text, applies in unused.items() if applies]:
        logger.warning("without effect: %s", "; ".join(found))


def check_files(config: PPOConfig) -> None:
    """Refuse save paths that cannot work or would replace what the run reads. Main process only."""
    check_outputs(config)
    read = [config.critic_pretrain, config.goal_state_path, config.agent_func_path, config.pretrain_data]
    check_replaceable(config.save_path, inputs=[*read, *source_specs(config)])


def show_settings(config: PPOConfig, engine: Engine, prompts: PromptData) -> None:
    """Print the resolved settings and the first prompt."""
    from openrlhf.trainer.plan import TrainingPlan

    settings = settings_of(config)
    stream = TrainingPlan(len(prompts), settings.episodes, 1, 1, seed=config.seed)  # as the trainer reads them
    first = int(stream.indices(0)[0])
    label = None if prompts.labels is None else prompts.labels[first]
    rollouts = -(-stream.total_steps // settings.rollout_batch_size)
    sizes = (
        f"{len(prompts)} prompts, {rollouts} rollouts of {settings.rollout_batch_size} prompts x "
        f"{settings.samples_per_prompt} responses, {settings.total_updates(len(prompts))} optimizer steps of "
        f"{settings.train_batch_size} responses in micro-batches of {settings.micro_train_batch_size}; "
        f"{engine.world_size} process(es)"
    )
    print_settings(config, sizes, f"[prompt]\n{prompts.texts[first]}\n[label]\n{label}")


def show_rewards(config: PPOConfig, tokenizer: Any, prompts: PromptData, reward: Any) -> None:
    """Print some samples with everything that the reward was given and gave. Main process only."""
    from openrlhf.trainer.engine import LocalEngine
    from openrlhf.trainer.rollout import base_seed, request_rewards

    show = replace(config, advantage_estimator="reinforce", lambd=1.0, init_kl_coef=0.0, kl_target=None)
    show = replace(show, freezing_actor_steps=-1, rollout_batch_size=1, train_batch_size=1, critic_pretrain=None)
    show = replace(show, pretrain_data=None, ptx_coef=None)
    trainer = build_trainer(show, partial(LocalEngine, bf16=config.use_bf16), tokenizer, prompts, reward)
    settings = trainer.settings
    count = min(len(prompts), -(-config.dry_run_rewards // settings.samples_per_prompt))
    indices = [int(trainer.stream.indices(place)[0]) for place in range(count)]
    if trainer.agent_engine is not None:
        from openrlhf.trainer.rollout import episode_rollout

        rollout = episode_rollout(
            trainer.agent_engine, prompts, indices, trainer.reward, trainer.sampling,
            samples_per_prompt=settings.samples_per_prompt, seed=base_seed(settings.seed, 0),
        )  # fmt: skip
        for place, sample in enumerate(rollout.samples):
            print(f"sample {place}\n  prompt: {sample['prompt']!r}\n  episode: {sample['response']!r}")
            label = None if prompts.labels is None else prompts.labels[indices[place // settings.samples_per_prompt]]
            print(f"  label ({type(label).__name__}): {label!r}")
            print(f"  reward: {sample['reward']}, score: {rollout.score[place].item():g}")
        for name, value in rollout.logs.items():
            print(f"{name}: {value:g}")
        return
    request, _, seconds = request_rewards(
        trainer.policy, prompts, indices, trainer.sampling,
        samples_per_prompt=settings.samples_per_prompt, seed=base_seed(settings.seed, 0), step=0, epoch=0,
    )  # fmt: skip
    result = trainer.reward.score(request)
    print(f"reward source: {trainer.reward.name}; one call for {len(request)} samples ({seconds:.1f} s of sampling)")
    labels = request.labels if request.labels is not None else [None] * len(request)
    for place in range(len(request)):
        print(f"sample {place}")
        for name, value in (
            ("query", request.queries[place]),
            ("prompt", request.prompts[place]),
            ("response", request.responses[place]),
            ("label", labels[place]),
        ):
            print(f"  {name} ({type(value).__name__}): {value!r}")
        print(f"  reward: {result.rewards[place]:g}, score: {result.scores[place]:g}")
    print(f"columns given: {sorted(request.columns)}")
    print(f"rewards: shape {result.rewards.shape}, {result.rewards.dtype}; scores: shape {result.scores.shape}")
    if result.dense is not None:
        print(f"dense rewards: {[tokens.shape for tokens in result.dense]}")
    for name, value in result.metrics().items():
        print(f"{name}: {value:g}")


def run(config: PPOConfig) -> dict[str, float]:
    """Train as configured; returns the last evaluation ({} without held-out prompts)."""
    validate_ppo(config)
    engine = start_engine(config, varying_passes=True)
    if not engine.is_main:
        logging.getLogger().setLevel(logging.ERROR)  # the others would repeat the main process
    try:
        return _run(config, engine)
    finally:
        engine.close()


def _run(config: PPOConfig, engine: Engine) -> dict[str, float]:
    from openrlhf.cli.train_sft import write_policy
    from openrlhf.trainer.loop import find_resume
    from openrlhf.trainer.ppo_loop import RunState, run_ppo
    from openrlhf.trainer.ppo_report import refresh_report
    from openrlhf.trainer.shares import together

    if config.rollout_batch_size < engine.world_size:
        raise ValueError(
            f"--rollout_batch_size {config.rollout_batch_size} leaves some of {engine.world_size} processes without a "
            "prompt; raise it or start fewer processes"
        )
    seed_everything(config.seed, config.full_determinism)
    if not config.dry_run and config.dry_run_rewards == 0:
        main_only(engine, partial(check_files, config))
    tokenizer = training_tokenizer(config)
    prompts, held_out = main_first(engine, partial(load_prompts, config, tokenizer))
    if not config.dry_run_rewards:
        settings_of(config).check_prompts(len(prompts))
    tell_without_effect(config, held_out is not None)
    texts = main_first(engine, partial(load_texts, config, tokenizer))
    reward = together(engine, partial(load_reward, config, prompts.labels is not None))
    if config.dry_run:
        if engine.is_main:
            show_settings(config, engine, prompts)
        return {}
    if config.dry_run_rewards:
        main_only(engine, partial(show_rewards, config, tokenizer, prompts, reward))
        return {}
    gold = together(engine, partial(load_gold, config, prompts.labels is not None))
    start = partial(start_engine, config, varying_passes=True)
    trainer = build_trainer(config, start, tokenizer, prompts, reward, held_out, gold, texts)
    main_only(engine, partial(check_room, config, trainer.actor.module))
    write = partial(write_policy, config, trainer.actor, trainer.actor.module, tokenizer, command="train_ppo")
    data = {"prompts": prompts.fingerprint, **prompts.counts}
    fingerprint = prompts.fingerprint
    if texts is not None:
        data |= {"texts": texts.fingerprint, "text_counts": texts.counts}
        fingerprint = f"{fingerprint} {texts.fingerprint}"
    settings = loop_settings(config, fingerprint, write_model=write)
    state = RunState(trainer)
    folder, progress = find_resume(state, settings)
    if folder is not None:
        state.load_state(folder)
        logger.info("resumed from %s after %d rollouts", folder, progress.step)
    elif settings.resume:
        logger.warning("no complete checkpoint under %s; starting at step 0", settings.checkpoint_folder)
    refresh = partial(refresh_report, config.save_path) if config.report and engine.is_main else lambda: None
    with ExitStack() as at_end, open_log(config, engine, "train_ppo", progress.step if folder else None) as log:
        at_end.callback(refresh)  # when the log is closed: it tells how the run has ended
        if engine.is_main:
            write_manifest(config.save_path, "train_ppo", config, {"data": data})
        try:
            progress = run_ppo(trainer, settings, log, progress, refresh)
        finally:
            for source in (reward, trainer.gold):
                if hasattr(source, "close"):
                    source.close()
        publish_model(trainer.actor, config.save_path, write)
    return progress.last_eval or {}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(PPOConfig, argv)) and None)


if __name__ == "__main__":
    main()
