"""Train a reward model: ``python -m openrlhf.cli.train_rm`` or ``deepspeed examples/train_rm.py``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.cli.common import (
    check_positions,
    loop_settings,
    main_first,
    main_only,
    open_log,
    optimizer_settings,
    position_limit,
    print_resolved,
    resolve_attention,
    resolve_pocket_model,
    resume,
    run_command,
    start_engine,
    training_plan,
    training_tokenizer,
)
from openrlhf.cli.model_card import reward_model_card
from openrlhf.cli.parser import parse_config
from openrlhf.cli.reward_data import load_pairs
from openrlhf.cli.run_folder import check_outputs, check_room, publish_model, upload_result
from openrlhf.trainer.config import TrainRMConfig, validate
from openrlhf.utils.manifest import write_manifest
from openrlhf.utils.run_log import seed_everything

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.models.reward_model import RewardModel
    from openrlhf.trainer.engine import Engine

logger = logging.getLogger(__name__)


def load_model(config: TrainRMConfig, engine: Engine, tokenizer) -> tuple[RewardModel, Any]:
    """The model to train and, with LoRA, its PEFT wrapper."""
    import torch
    from transformers import AutoConfig

    from openrlhf.models.pretrained import fit_embedding, load_reward_model
    from openrlhf.models.reward_model import read_settings

    quantization = four_bit_settings(config.use_bf16) if config.load_in_4bit else None
    path = resolve_pocket_model(config.pretrain)
    recorded = read_settings(AutoConfig.from_pretrained(path)).get("value_head")
    if config.zero_stage == 3 and recorded == "mlp" and not config.reset_value_head:
        raise ValueError(f"{path} has a two-layer head, which cannot be continued under ZeRO 3; use --zero_stage 2")
    # DeepSpeed keeps its own float32 master copy of bf16 weights; the local engine computes in bf16 by autocast.
    with engine.model_init():
        model = load_reward_model(
            path,
            dtype=torch.float32,
            attn_implementation=resolve_attention(config.flash_attn, config.attn_implementation),
            value_head=config.value_head_strategy,
            new_head=config.reset_value_head,
            allow_missing_head=True,
            seed=config.seed,
            pad_token_id=tokenizer.pad_token_id,
            with_aux_loss=config.aux_loss_coef > 0,
            quantization_config=quantization,
            gathered=engine.gathered,
        )
        fit_embedding(model, tokenizer)
    peft_model = None
    if config.lora_rank > 0:
        from openrlhf.models.lora import apply_lora

        peft_model = apply_lora(model, config.lora_rank, config.lora_alpha, config.lora_dropout, config.target_modules)
    if config.gradient_checkpointing:
        reentrant = config.gradient_checkpointing_use_reentrant
        model.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if peft_model is not None or reentrant:
            model.network.enable_input_require_grads()  # a frozen embedding would cut the graph
    return model, peft_model


def four_bit_settings(bf16: bool):
    """NF4 settings for bitsandbytes; an error that names the package where it is absent."""
    import torch
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise ValueError("--load_in_4bit needs bitsandbytes: pip install bitsandbytes==0.50.2")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
        llm_int8_skip_modules=["score"],
    )


def model_settings(config: TrainRMConfig, template: str | None) -> dict[str, Any]:
    """What a checkpoint records of its training, under the namespaced key of config.json."""
    settings: dict[str, Any] = {
        "template": template,
        "apply_chat_template": config.apply_chat_template,
        "max_len": config.max_len,
        "loss": config.loss,
        "strategy": "contrastive" if config.contrastive else "vanilla",
    }
    if config.contrastive:
        names = [f.name for f in dataclasses.fields(config) if f.name.startswith(("contrastive_", "source_", "goal_"))]
        names = [name for name in names if name != "contrastive_loss"] + ["sim_samples", "unsim_samples"]
        settings |= {name: getattr(config, name) for name in names}
    return settings


class ModelWriter:
    """Writes the model under training as a checkpoint folder; every process must call it."""

    def __init__(
        self, config: TrainRMConfig, engine: Engine, model: RewardModel, peft_model, tokenizer, template
    ) -> None:
        self.config, self.engine, self.model, self.peft_model = config, engine, model, peft_model
        self.tokenizer, self.settings = tokenizer, model_settings(config, template)

    def write(self, folder: Path, figures: dict[str, float] | None = None) -> None:
        """Fill ``folder`` (made when absent) in the main process. Collective."""
        import torch

        from openrlhf.models.pretrained import save_reward_model

        state = self.engine.state_dict()
        if state is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        settings = dict(self.settings)
        if figures:
            settings |= {"reward_mean": figures["reward_mean"], "reward_std": figures["reward_std"]}
        if self.peft_model is not None:
            from openrlhf.models.lora import save_adapter

            renamed = {name.replace("network.", "base_model.model.", 1): value for name, value in state.items()}
            save_adapter(folder, self.peft_model, self.tokenizer, renamed, settings)
        else:
            state = {name.removeprefix("network."): value for name, value in state.items()}
            dtype = torch.bfloat16 if self.config.use_bf16 else torch.float32
            save_reward_model(folder, self.model, self.tokenizer, state_dict=state, settings=settings, dtype=dtype)
        card = reward_model_card(self.config, settings, figures, is_adapter=self.peft_model is not None)
        (folder / "README.md").write_text(card, encoding="utf-8")

    def publish(self, figures: dict[str, float] | None) -> None:
        """Put the model in place of --save_path. Collective."""
        publish_model(self.engine, self.config.save_path, lambda folder: self.write(folder, figures))


def run(config: TrainRMConfig) -> dict[str, float]:
    """Train as configured; returns the last evaluation ({} without evaluation data)."""
    validate(config)
    engine = start_engine(config)
    try:
        return _run(config, engine)
    finally:
        engine.close()


def _run(config: TrainRMConfig, engine: Engine) -> dict[str, float]:
    from openrlhf.models.losses import PAIR_LOSSES
    from openrlhf.trainer.loop import run_training
    from openrlhf.trainer.prefix_sharing import choose_packing
    from openrlhf.trainer.reward_trainer import ContrastiveSettings, RewardTrainer

    seed_everything(config.seed, config.full_determinism)
    if not config.dry_run:
        main_only(engine, partial(check_outputs, config))
    tokenizer = training_tokenizer(config)
    train, held_out = main_first(engine, partial(load_pairs, config, tokenizer))
    plan = training_plan(config, engine, len(train))
    if engine.is_main:
        logger.info("training data: %s; evaluation: %s", train.counts, held_out.counts if held_out else "none")
    if config.dry_run:
        if engine.is_main:
            print_resolved(config, plan, engine, train.example_text(int(plan.indices(0)[0]), tokenizer))
        return {}

    model, peft_model = load_model(config, engine, tokenizer)
    longest = max(int(data.lengths.max()) for data in (train, held_out) if data)
    check_positions(model.network, longest, config.max_len)
    main_only(engine, partial(check_room, config, model))
    engine.prepare(model, optimizer_settings(config, plan.total_steps))
    contrastive = None
    if config.contrastive:
        contrastive = ContrastiveSettings(
            beta=config.contrastive_loss_beta,
            beta_end=config.contrastive_loss_beta_end,
            sim_samples=config.sim_samples,
            unsim_samples=config.unsim_samples,
            strategy=config.contrastive_strategy,
            reduction=config.contrastive_reduction,
            temperature=config.contrastive_temperature,
            start=config.contrastive_start,
            source_state_percentile=config.source_state_percentile,
            goal_state_percentile=config.goal_state_percentile,
            goal_sampling=config.goal_sampling,
            goal_discount=config.goal_discount,
            goal_stop_gradient=config.goal_stop_gradient,
        )
    trainer = RewardTrainer(
        engine,
        train,
        plan,
        tokenizer.pad_token_id,
        PAIR_LOSSES[config.loss],
        contrastive,
        held_out,
        use_margin=config.margin_loss,
        aux_loss_coef=config.aux_loss_coef,
        center_coef=config.center_rewards_coefficient,
        packing=choose_packing(
            config.prefix_sharing,
            engine,
            model,
            train,
            held_out,
            dropout=config.lora_dropout if config.lora_rank > 0 else 0.0,
            bf16=config.use_bf16,
            by_tokens=config.batch_tokens is not None,
        ),
    )
    limit = position_limit(model.network)
    if limit is not None:
        config = dataclasses.replace(config, max_len=min(config.max_len, limit))  # what scoring may use
    writer = ModelWriter(config, engine, model, peft_model, tokenizer, train.options.input_template)
    settings = loop_settings(config, train.fingerprint, write_model=writer.write, keep_best=writer.publish)
    folder, progress = resume(engine, settings, plan)
    with open_log(config, engine, "train_rm", progress.step if folder else None) as log:
        if engine.is_main:
            extra = {
                "data": {"train": train.fingerprint, "counts": train.counts},
                "total_steps": plan.total_steps,
                "pretrain_weights": settings.identity["pretrain_weights"],
            }
            write_manifest(config.save_path, "train_rm", config, extra)
        progress = run_training(engine, trainer, plan, settings, log, progress)
        if not config.save_best:
            writer.publish(progress.last_eval)
    if engine.is_main:
        upload_result(config)
        logger.info("saved the reward model to %s", config.save_path)
    engine.barrier()
    return progress.last_eval or {}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(TrainRMConfig, argv)) and None)


if __name__ == "__main__":
    main()
