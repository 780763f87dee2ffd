"""What the training commands share between parsing and training."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError

from openrlhf.trainer.config import TrainConfig
from openrlhf.utils.atomic import hold_lock
from openrlhf.utils.manifest import hide_secrets
from openrlhf.utils.ranks import OneProcess, Ranks
from openrlhf.utils.run_log import RunLog

if TYPE_CHECKING:  # torch and transformers take seconds to import: only the functions that need them do it
    import torch

    from openrlhf.trainer.engine import Engine, OptimizerSettings
    from openrlhf.trainer.loop import LoopSettings, Progress
    from openrlhf.trainer.plan import TrainingPlan

logger = logging.getLogger(__name__)

POCKET = "pocket"
POCKET_POLICY = Path(__file__).resolve().parents[2] / "examples" / "pocket"
Result = TypeVar("Result")


def cache_folder() -> Path:
    """Where generated pocket data lies: $OPENRLHF_CACHE, else ~/.cache/openrlhf."""
    return Path(os.environ.get("OPENRLHF_CACHE", Path.home() / ".cache" / "openrlhf"))


def run_command(main: Callable[[], None]) -> None:
    """Call a command; a mistake of the user or a failed service ends it with one line and exit code 1 (130: Ctrl-C)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "deepspeed", "datasets", "matplotlib", "fontTools"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        sys.exit(1)
    except (ValueError, RuntimeError, OSError, ImportError, SafetensorError) as error:
        if os.environ.get("OPENRLHF_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        print("(set OPENRLHF_TRACEBACK=1 to see where)", file=sys.stderr)
        sys.exit(1)


def resolve_pocket_model(name: str) -> str:
    """'pocket' is the policy that the repository carries; other names stay."""
    if name != POCKET:
        return name
    if not (POCKET_POLICY / "config.json").is_file():
        raise ValueError(f"the pocket policy is missing at {POCKET_POLICY}; run run_scripts/build_pocket_policy.sh")
    return str(POCKET_POLICY)


def resolve_attention(flash_attn: bool, attn_implementation: str | None) -> str | None:
    """Name for transformers; without flash-attn, --flash_attn says so and becomes sdpa."""
    if not flash_attn and attn_implementation != "flash_attention_2":
        return attn_implementation
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        return "flash_attention_2"
    logger.warning("flash-attn is not installed (pip install flash-attn, needs a GPU); using sdpa attention")
    return "sdpa"


def position_limit(model: torch.nn.Module) -> int | None:
    """Tokens after which a model's learned table of positions ends (GPT-2); None where there is no table."""
    import torch

    tables = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Embedding)]
    learned = any(name.endswith("wpe") or "position" in name for name in tables)
    return model.config.get_text_config().max_position_embeddings if learned else None


def check_positions(model: torch.nn.Module, longest: int, max_len: int) -> None:
    """Refuse rows longer than a learned table of positions; rotary positions only warn.

    Args:
        longest: tokens of the longest row.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or longest <= limit:
        return
    if position_limit(model) is not None:
        raise ValueError(f"the longest row has {longest} tokens, the model {limit} positions: pass --max_len {limit}")
    logger.warning("the longest row has %d tokens, the model was made for %d (--max_len %d)", longest, limit, max_len)


@contextmanager
def start_ranks() -> Iterator[Ranks]:
    """The processes that share an evaluation: those of deepspeed, torchrun or Slurm, else this one alone."""
    from openrlhf.trainer.engine import under_launcher

    if not under_launcher():
        yield OneProcess()
        return
    from openrlhf.trainer.deepspeed_engine import LaunchedRanks

    ranks = LaunchedRanks()
    if ranks.rank > 0:
        logging.getLogger().setLevel(logging.ERROR)
    yield ranks
    ranks.close()  # not after an error: the launcher ends the other processes, which may wait for this one


def start_engine(config: TrainConfig, varying_passes: bool = False) -> Engine:
    """The engine that the flags and the launcher ask for; a dry run starts none but the launcher's.

    Args:
        varying_passes: optimizer steps differ in their number of micro-batches.
    """
    from openrlhf.trainer.engine import LocalEngine, make_engine, under_launcher

    if config.dry_run and not under_launcher():
        return LocalEngine()
    return make_engine(
        bf16=config.use_bf16,
        zero_stage=config.zero_stage,
        micro_batch_size=config.micro_train_batch_size,
        global_batch_size=config.train_batch_size,
        # batch_tokens: a flag of reward models only
        varying_passes=varying_passes or getattr(config, "batch_tokens", None) is not None,
        max_norm=config.max_norm,
        zpg=config.zpg,
        adam_offload=config.adam_offload,
        overlap_comm=config.overlap_comm,
        grad_accum_dtype=config.grad_accum_dtype,
        disable_trace_cache=config.disable_trace_cache,
    )


def main_only(engine: Engine, work: Callable[[], Result]) -> Result | None:
    """Run work in the main process; its error ends all processes. None in the others."""
    result, failure = None, None
    if engine.is_main:
        try:
            result = work()
        except Exception as error:
            failure = error
    told = engine.broadcast(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if told is not None:
        raise ValueError(f"stopped by the main process: {told}")
    return result


def main_first(engine: Engine, work: Callable[[], Result]) -> Result:
    """Run work in the main process first, so that the others find its result in the cache, then in all of them."""
    result = main_only(engine, work)
    return result if engine.is_main else work()


def training_tokenizer(config: TrainConfig):
    """Tokenizer of the model to train, with a pad token that is not EOS and the chat template asked for."""
    from openrlhf.models.pretrained import is_adapter, load_tokenizer

    path = resolve_pocket_model(config.pretrain)
    if is_adapter(path):
        raise ValueError(f"--pretrain {path} is a LoRA adapter; merge it with lora_combiner and start from the result")
    try:
        tokenizer = load_tokenizer(path, config.pad_token)
    except OSError as error:
        raise ValueError(f"--pretrain {path}: no such folder, and not loaded from the hub ({error})") from error
    if config.tokenizer_chat_template:
        tokenizer.chat_template = config.tokenizer_chat_template
    if config.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(f"--apply_chat_template: the tokenizer of {config.pretrain} has no chat template")
    return tokenizer


def training_plan(config: TrainConfig, engine: Engine, examples: int) -> TrainingPlan:
    """Order and number of the updates."""
    from openrlhf.trainer.plan import TrainingPlan

    return TrainingPlan(
        examples=examples,
        epochs=config.max_epochs,
        batch_size=config.train_batch_size,
        micro_batch_size=config.micro_train_batch_size,
        world_size=engine.world_size,
        seed=config.seed,
        batch_tokens=getattr(config, "batch_tokens", None),
    )


def loop_settings(
    config: TrainConfig,
    fingerprint: str,
    write_model: Callable[[Path], None],
    keep_best: Callable[[dict[str, float]], None] | None = None,
) -> LoopSettings:
    """When to log, evaluate and save."""
    from openrlhf.trainer.loop import LoopSettings

    return LoopSettings(
        logging_steps=config.logging_steps,
        eval_steps=config.eval_steps,
        save_steps=config.save_steps,
        checkpoint_folder=config.checkpoint_folder,
        max_ckpt_num=config.max_ckpt_num,
        max_ckpt_mem=config.max_ckpt_mem,
        identity=run_identity(config, fingerprint),
        resume=config.load_checkpoint,
        save_state=not config.disable_ds_ckpt,
        write_model=write_model if config.save_hf_ckpt else None,
        keep_best=keep_best if config.save_best else None,
    )


def resume(engine: Engine, settings: LoopSettings, plan: TrainingPlan) -> tuple[Path | None, Progress]:
    """Restore the newest complete checkpoint if asked for; (None, start) otherwise."""
    from openrlhf.trainer.loop import find_resume

    folder, progress = find_resume(engine, settings)
    if folder is not None:
        engine.load_state(folder)
    if engine.is_main and folder is not None:
        logger.info("resumed from %s at step %d of %d", folder, progress.step, plan.total_steps)
    elif engine.is_main and settings.resume:
        logger.warning("no complete checkpoint under %s; starting at step 0", settings.checkpoint_folder)
    return folder, progress


def optimizer_settings(config: TrainConfig, total_steps: int) -> OptimizerSettings:
    """Settings of AdamW and its schedule over so many optimizer steps."""
    from openrlhf.trainer.engine import OptimizerSettings

    return OptimizerSettings(
        learning_rate=config.learning_rate,
        betas=(config.adam_betas[0], config.adam_betas[1]),
        weight_decay=config.l2,
        max_norm=config.max_norm,
        scheduler=config.lr_scheduler,
        warmup_steps=round(total_steps * config.lr_warmup_ratio),
        min_lr_ratio=config.min_lr_ratio,
        total_steps=total_steps,
    )


@contextmanager
def open_log(config: TrainConfig, engine: Engine, command: str, resume_step: int | None) -> Iterator[RunLog]:
    """Metrics file and trackers of a run; the main process writes and keeps other runs out, the others are silent."""
    with (
        hold_lock(config.save_path, engine.is_main),
        RunLog(
            config.save_path,
            command,
            dataclasses.asdict(config),
            is_main=engine.is_main,
            use_wandb=config.use_wandb,
            wandb_org=config.wandb_org,
            wandb_group=config.wandb_group,
            wandb_project=config.wandb_project,
            wandb_run_name=config.wandb_run_name,
            tensorboard_dir=config.use_tensorboard,
            resume_step=resume_step,
        ) as log,
    ):
        yield log


def run_identity(config: TrainConfig, fingerprint: str) -> dict[str, Any]:
    """Settings that a resumed run must share with the one that wrote the checkpoint."""
    from openrlhf.models.pretrained import checkpoint_fingerprint

    free = set(
        "save_path ckpt_path load_checkpoint s3_save_path dry_run local_rank num_proc use_wandb wandb_org wandb_group "
        "wandb_project wandb_run_name use_tensorboard logging_steps eval_steps save_steps save_hf_ckpt max_ckpt_num "
        "max_ckpt_mem disable_ds_ckpt save_best eval_dataset eval_split flash_attn attn_implementation dataset "
        "gradient_checkpointing gradient_checkpointing_use_reentrant micro_train_batch_size overlap_comm zpg "
        "disable_trace_cache prefix_sharing batch_tokens strip_calculator include_unparsed remote_rm_timeout "
        "remote_rm_tries report".split()
    )
    if config.save_best:
        free.remove("save_path")  # the best model so far lies there
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in free}
    start = resolve_pocket_model(config.pretrain)
    weights = checkpoint_fingerprint(start) if Path(start).is_dir() else None
    return json.loads(json.dumps({**settings, "data": fingerprint, "pretrain_weights": weights}))


def print_resolved(config: TrainConfig, plan: TrainingPlan, engine: Engine, example: str) -> None:
    """What --dry_run shows: settings, sizes and the first example."""
    passes = (
        f"{plan.accumulation} micro-batch(es) of {plan.micro_batch_size}"
        if plan.batch_tokens is None
        else f"micro-batches of {plan.batch_tokens} tokens"
    )
    steps = f"{plan.examples} training examples, {plan.total_steps} optimizer steps of {plan.batch_size}"
    print_settings(config, f"{steps}; {engine.world_size} process(es) x {passes}", example)


def print_settings(config: TrainConfig, sizes: str, example: str) -> None:
    """Settings without secrets, one line about sizes, and the first example."""
    print(json.dumps(hide_secrets(dataclasses.asdict(config)), indent=2, default=str))
    print(sizes)
    print("first example:\n" + example)
