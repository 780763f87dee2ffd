"""Supervised fine-tuning: ``python -m openrlhf.cli.train_sft`` or ``deepspeed examples/train_sft.py``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.cli.common import (
    POCKET,
    check_positions,
    loop_settings,
    main_first,
    main_only,
    open_log,
    optimizer_settings,
    print_resolved,
    resolve_attention,
    resolve_pocket_model,
    resume,
    run_command,
    start_engine,
    training_plan,
    training_tokenizer,
)
from openrlhf.cli.model_card import policy_card
from openrlhf.cli.parser import parse_config
from openrlhf.cli.run_folder import check_outputs, check_room, publish_model
from openrlhf.cli.splits import POCKET_HELD_OUT, load_splits, problem_rows, refuse_training_rows
from openrlhf.trainer.config import TrainConfig, TrainSFTConfig, validate
from openrlhf.utils.manifest import write_manifest
from openrlhf.utils.run_log import seed_everything

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.datasets.sft import SFTData
    from openrlhf.trainer.engine import Engine

logger = logging.getLogger(__name__)

POCKET_PROBLEMS = 40_000  # training problems of the embedded task when --max_samples does not say otherwise


def load_data(config: TrainSFTConfig, tokenizer) -> tuple[SFTData, SFTData | None]:
    """Tokenised training and evaluation rows."""
    from openrlhf.datasets.sft import SFTOptions, prepare_sft

    is_pocket = config.dataset == POCKET
    if is_pocket:
        train_rows = problem_rows("sft", config.max_samples or POCKET_PROBLEMS, config.seed)
        eval_rows = problem_rows("validation", POCKET_HELD_OUT, config.seed)
    else:
        train_rows, eval_rows = load_splits(config, config.input_key)
    options = SFTOptions(
        input_key=config.input_key,
        output_key=config.output_key,
        input_template=config.input_template or (POCKET if is_pocket and not config.apply_chat_template else None),
        apply_chat_template=config.apply_chat_template,
        max_len=config.max_len,
    )
    train = prepare_sft(train_rows, tokenizer, options)
    held_out = prepare_sft(eval_rows, tokenizer, options) if eval_rows is not None and len(eval_rows) else None
    if held_out is not None:
        refuse_training_rows(config, train.fingerprint, held_out.fingerprint)
    return train, held_out


def load_policy(config: TrainConfig, engine: Engine, tokenizer):
    """The language model to train, without dropout."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from openrlhf.models.pretrained import quiet_loading
    from openrlhf.models.reward_model import disable_dropout

    path = resolve_pocket_model(config.pretrain)
    model_config = AutoConfig.from_pretrained(path)
    disable_dropout(model_config)
    with engine.model_init(), quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=torch.float32,
            attn_implementation=resolve_attention(config.flash_attn, config.attn_implementation),
        )
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    if config.gradient_checkpointing:
        reentrant = config.gradient_checkpointing_use_reentrant
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def write_policy(
    config: TrainConfig, engine: Engine, model, tokenizer, folder: Path, command: str = "train_sft"
) -> None:
    """Fill ``folder`` with an ordinary language-model checkpoint. Collective."""
    import torch

    from openrlhf.models.pretrained import finish_export, quiet_loading, without_deepspeed

    state = engine.state_dict()
    if state is None:
        return
    # One name of each weight: engines give tied ones (embedding and head) as copies, which would be written twice.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(dict(model.named_parameters()))
    state = {name: value for name, value in state.items() if name not in tied}
    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if config.use_bf16 else torch.float32
    with quiet_loading(), without_deepspeed():
        model.save_pretrained(folder, state_dict={name: value.to(dtype) for name, value in state.items()})
    tokenizer.save_pretrained(folder)
    finish_export(folder, dtype)
    (folder / "README.md").write_text(policy_card(config, command), encoding="utf-8")


def run(config: TrainSFTConfig) -> dict[str, float]:
    """Train as configured; returns the last evaluation ({} without evaluation data)."""
    validate(config)
    if config.lora_rank > 0 or config.load_in_4bit or config.s3_save_path or config.save_best:
        raise ValueError(
            "train_sft trains all weights and saves the last ones locally: drop --lora_rank, --load_in_4bit, "
            "--s3_save_path and --save_best"
        )
    engine = start_engine(config)
    try:
        return _run(config, engine)
    finally:
        engine.close()


def _run(config: TrainSFTConfig, engine: Engine) -> dict[str, float]:
    from openrlhf.trainer.loop import run_training
    from openrlhf.trainer.sft_trainer import SFTTrainer

    seed_everything(config.seed, config.full_determinism)
    if not config.dry_run:
        main_only(engine, partial(check_outputs, config))
    tokenizer = training_tokenizer(config)
    train, held_out = main_first(engine, partial(load_data, config, tokenizer))
    plan = training_plan(config, engine, len(train))
    if config.dry_run:
        if engine.is_main:
            print_resolved(config, plan, engine, train.example_text(int(plan.indices(0)[0]), tokenizer))
        return {}
    model = load_policy(config, engine, tokenizer)
    check_positions(model, int(train.lengths.max()), config.max_len)
    main_only(engine, partial(check_room, config, model))
    engine.prepare(model, optimizer_settings(config, plan.total_steps))
    trainer = SFTTrainer(engine, train, plan, tokenizer.pad_token_id, held_out)
    write = partial(write_policy, config, engine, model, tokenizer)
    settings = loop_settings(config, train.fingerprint, write_model=write)
    folder, progress = resume(engine, settings, plan)
    with open_log(config, engine, "train_sft", progress.step if folder else None) as log:
        if engine.is_main:
            write_manifest(
                config.save_path, "train_sft", config, {"data": {"train": train.fingerprint, **train.counts}}
            )
        progress = run_training(engine, trainer, plan, settings, log, progress)
        publish_model(engine, config.save_path, write)
    return progress.last_eval or {}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(TrainSFTConfig, argv)) and None)


if __name__ == "__main__":
    main()
