"""Configuration of the training commands: one frozen dataclass each, from which flags and help are made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# The names in the tables of openrlhf.models, whose import takes seconds; a test keeps them equal.
PAIR_LOSSES = ("sigmoid", "logexp")
CONTRASTIVE_STRATEGIES = ("cosine", "cosine_avg", "infonce", "infonce_batch", "goal_margin", "value")
FORWARD_PASS_STRATEGIES = ("infonce_batch", "goal_margin")  # the loss of a pair depends on its forward pass
STARTS = ("response", "goals_diverge", "diverge")
GOAL_SAMPLINGS = ("uniform", "geometric", "last")
REDUCTIONS = ("pair", "original")
VALUE_HEADS = ("linear", "mlp")
SCHEDULERS = frozenset(  # schedules of transformers that need nothing but the number of steps
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt "
    "cosine_with_min_lr".split()
)


def flag(default: Any, help: str, *aliases: str) -> Any:
    """A field with its description and further spellings of its flag (dotted OpenRLHF names)."""
    metadata = {"help": help.replace("%", "%%"), "aliases": [f"--{alias}" for alias in aliases]}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """What every training command shares."""

    # model
    pretrain: str | None = flag(
        None, "Model to start from: hub id, folder, or 'pocket'", "model.model_name_or_path", "actor.model_name_or_path"
    )
    bf16: bool = flag(False, "Compute in bfloat16 (weights of the optimizer stay float32)", "ds.bf16")
    param_dtype: Literal["fp32", "bf16"] | None = flag(None, "Newer spelling of --bf16", "data_type", "ds.param_dtype")
    flash_attn: bool = flag(False, "Use flash-attn where installed, else say so and use sdpa")
    attn_implementation: str | None = flag(
        None, "Attention of transformers: sdpa, eager, flash_attention_2, ...", "ds.attn_implementation"
    )
    gradient_checkpointing: bool = flag(
        False, "Recompute activations to save memory", "model.gradient_checkpointing_enable"
    )
    gradient_checkpointing_use_reentrant: bool = flag(
        False, "Older kind of checkpointing", "model.gradient_checkpointing_reentrant"
    )
    pad_token: str | None = flag(None, "Pad token where the tokenizer has none that differs from EOS")
    disable_fast_tokenizer: bool = flag(False, "Refused: character offsets and caching need a fast tokenizer")

    # data
    dataset: str | None = flag(
        None, "Hub id, save_to_disk folder, json/jsonl(.gz)/parquet/csv file, 'pocket', or a comma list", "data.dataset"
    )
    dataset_probs: str | None = flag(None, "Comma list of shares, one per data set", "data.dataset_probs")
    dataset_split: str = flag("train", "Split to train on", "data.dataset_split")
    eval_dataset: str | None = flag(None, "Data set to evaluate on", "eval.dataset")
    eval_split: str | None = flag(None, "Split to evaluate on (of --eval_dataset, or of --dataset)", "eval.split")
    eval_fraction: float = flag(
        0.02, "Share of the training prompts taken out for evaluation when no evaluation data is named; 0: none"
    )
    max_samples: int | None = flag(None, "At most this many rows", "data.max_samples")
    on_bad_row: Literal["error", "skip"] = flag("error", "Unreadable or incomplete row: stop, or skip and count")
    input_template: str | None = flag(
        None, "Prompt template: nemo, plain, or a text with {question}", "data.input_template"
    )
    apply_chat_template: bool = flag(False, "Render with the tokenizer's chat template", "data.apply_chat_template")
    tokenizer_chat_template: str | None = flag(None, "Chat template to use instead", "data.tokenizer_chat_template")
    num_proc: int | None = flag(None, "Processes for tokenisation; default: 1, or 2 for large data sets")

    # optimisation; every step is an optimizer step
    max_epochs: int = flag(1, "Passes over the data", "train.max_epochs")
    train_batch_size: int = flag(128, "Examples per optimizer step over all processes", "train.batch_size")
    micro_train_batch_size: int = flag(8, "Examples per forward pass and process", "train.micro_batch_size")
    learning_rate: float = flag(9e-6, "Peak learning rate", "adam.lr")
    lr_scheduler: str = flag("cosine_with_min_lr", "Any schedule name of transformers")
    lr_warmup_ratio: float = flag(0.03, "Share of the steps with rising learning rate")
    min_lr_ratio: float = flag(0.1, "Floor of the cosine schedule as a share of the peak")
    adam_betas: list[float] = flag([0.9, 0.95], "Betas of AdamW", "adam.betas")
    l2: float = flag(0.0, "Weight decay", "adam.weight_decay")
    max_norm: float = flag(1.0, "Gradient norm is clipped to this; 0: not clipped")
    seed: int = flag(42, "Seed of everything random", "train.seed")
    full_determinism: bool = flag(False, "Deterministic kernels, slower", "train.full_determinism_enable")

    # engine
    zero_stage: int | None = flag(
        None, "DeepSpeed ZeRO stage 0-3; default: 2 under a launcher, without DeepSpeed otherwise", "ds.zero_stage"
    )
    zpg: int = flag(1, "ZeRO++ partition size (hpZ)", "ds.zpg")
    adam_offload: bool = flag(False, "Keep the optimizer state in CPU memory", "ds.adam_offload")
    overlap_comm: bool = flag(False, "Overlap communication and backward", "ds.overlap_comm")
    grad_accum_dtype: Literal["fp32", "bf16"] | None = flag(
        None, "Dtype of accumulated gradients", "ds.grad_accum_dtype"
    )
    disable_trace_cache: bool = flag(False, "ZeRO-3: do not cache the fetch order")
    local_rank: int = flag(-1, "Set by the launcher")

    # LoRA and quantisation
    lora_rank: int = flag(0, "Rank of LoRA updates; 0: train all weights", "ds.lora.rank")
    lora_alpha: int = flag(16, "Scale of LoRA updates", "ds.lora.alpha")
    lora_dropout: float = flag(0.0, "Dropout of LoRA updates", "ds.lora.dropout")
    target_modules: list[str] | None = flag(
        None, "Layers with LoRA updates; default: all linear layers", "ds.lora.target_modules"
    )
    load_in_4bit: bool = flag(False, "Load the frozen backbone in 4 bits (needs bitsandbytes)", "ds.load_in_4bit")

    # saving and logging
    save_path: str = flag("./ckpt/model", "Folder of the final model", "ckpt.output_dir")
    s3_save_path: str | None = flag(None, "s3://bucket/prefix to upload the final model to")
    ckpt_path: str | None = flag(None, "Folder of resumable checkpoints; default: SAVE_PATH-checkpoints", "ckpt.path")
    save_steps: int = flag(-1, "Save a resumable checkpoint every so many steps; -1: never", "ckpt.save_steps")
    max_ckpt_num: int = flag(3, "Keep at most this many checkpoints", "ckpt.max_num")
    max_ckpt_mem: float = flag(1000.0, "Keep at most this many GB of checkpoints", "ckpt.max_mem")
    save_hf_ckpt: bool = flag(False, "Also write each checkpoint as a Hugging Face folder", "ckpt.save_hf")
    disable_ds_ckpt: bool = flag(False, "Do not write resumable state, only --save_hf_ckpt folders", "ckpt.disable_ds")
    load_checkpoint: bool = flag(False, "Go on from the newest complete checkpoint", "ckpt.load_enable")
    save_best: bool = flag(False, "Keep the model with the best evaluation as the final model")
    logging_steps: int = flag(1, "Log every so many steps", "logger.logging_steps")
    eval_steps: int = flag(-1, "Evaluate every so many steps; -1: at the end of each epoch", "eval.steps")
    use_wandb: str | None = flag(None, "Weights & Biases: a key, 'true', or 'offline'", "logger.wandb.key")
    wandb_org: str | None = flag(None, "Entity", "logger.wandb.org")
    wandb_group: str | None = flag(None, "Group", "logger.wandb.group")
    wandb_project: str = flag("openrlhf", "Project", "logger.wandb.project")
    wandb_run_name: str | None = flag(None, "Run name", "logger.wandb.run_name")
    use_tensorboard: str | None = flag(None, "Folder of TensorBoard logs", "logger.tensorboard_dir")
    dry_run: bool = flag(False, "Print the resolved configuration and the first batch, then stop")

    @property
    def checkpoint_folder(self) -> Path:
        """Where resumable checkpoints lie."""
        return Path(self.ckpt_path) if self.ckpt_path else Path(self.save_path.rstrip("/") + "-checkpoints")

    @property
    def use_bf16(self) -> bool:
        """bfloat16 asked for in either spelling."""
        return self.bf16 or self.param_dtype == "bf16"


@dataclass(frozen=True)
class TrainRMConfig(TrainConfig):
    """Train a reward model on preference pairs, with the vanilla or the goal-contrastive strategy."""

    reward_model_strategy: Literal["vanilla", "contrastive"] | None = flag(
        None, "vanilla: Bradley-Terry only; contrastive: plus the goal term (default: vanilla)"
    )
    contrastive_loss: bool = flag(False, "Older spelling of --reward_model_strategy contrastive")
    contrastive_strategy: str = flag(
        "cosine", "cosine (the paper's), cosine_avg, infonce, infonce_batch, goal_margin or value: see docs/losses.md"
    )
    contrastive_reduction: str = flag("pair", "pair, or original: the published code's mean before the logarithm")
    contrastive_loss_beta: float = flag(0.5, "Weight of the contrastive term")
    contrastive_loss_beta_end: float | None = flag(
        None, "Move the weight in a straight line to this one over the training; default: it stays"
    )
    contrastive_temperature: float = flag(1.0, "Divides the cosines; with the strategy value, differences of values")
    contrastive_start: str = flag(
        "response",
        "Draw states from the whole responses; goals and rejected states only from the first token on in which the two "
        "responses differ (goals_diverge); all states only from there on (diverge)",
    )
    sim_samples: int = flag(16, "Source and goal states drawn per pair")
    unsim_samples: int = flag(16, "Source and rejected states drawn per pair")
    source_state_percentile: float = flag(0.0, "Sources lie in [p, 1] of the response; 0 first token, 1 last")
    goal_state_percentile: float = flag(0.0, "Goals lie in [max(p, source), 1] of the response")
    goal_sampling: str = flag("uniform", "Goals behind their source: uniform, geometric (near ones more), or last")
    goal_discount: float = flag(0.9, "Factor by which each token further away is drawn less often (geometric)")
    goal_stop_gradient: bool = flag(False, "Goals and rejected states are constants of the goal term")
    value_head_strategy: str | None = flag(None, "linear or mlp; default: as the checkpoint, else linear")
    reset_value_head: bool = flag(False, "Start a new head although the checkpoint has one")
    value_head_prefix: str = flag(
        "score", "Accepted for compatibility; the head is always 'score'", "ds.value_head_prefix"
    )

    loss: str = flag("sigmoid", "sigmoid or logexp", "model.loss_type")
    margin_loss: bool = flag(False, "Require the margin of the data set's 'margin' column", "model.margin_loss_enable")
    compute_fp32_loss: bool = flag(
        False, "Accepted for compatibility: rewards are always compared in float32", "model.compute_fp32_loss_enable"
    )
    aux_loss_coef: float = flag(0.0, "Weight of the load-balancing loss of experts", "model.aux_loss_coef")
    center_rewards_coefficient: float = flag(0.0, "Weight of the squared sum of a pair's rewards (0.01 is usual)")

    batch_tokens: int | None = flag(
        None, "Tokens per forward pass and process, without padding, instead of --micro_train_batch_size"
    )
    prefix_sharing: Literal["auto", "on", "off"] = flag(
        "auto", "Compute the prompt of a pair once: where possible, always (an error where it is not), never"
    )

    responses_per_prompt: int | None = flag(
        None,
        "Train on labelled responses (question, generated_solution, is_correct) in place of pairs: an example is a "
        "prompt with up to so many, its pairs all correct with all wrong ones; the batch sizes then count prompts",
        "data.responses_per_prompt",
    )
    strip_calculator: bool = flag(
        False, "Remove calculator annotations <<...>> from labelled responses", "data.strip_calculator"
    )
    include_unparsed: bool = flag(False, "Keep labelled responses without a predicted answer", "data.include_unparsed")

    dataset_format: str | None = flag(
        None, "prompt_chosen_rejected, messages, hh or question_correct_incorrect; default: by the columns"
    )
    prompt_key: str | None = flag(None, "Column of the prompt", "data.prompt_key")
    chosen_key: str | None = flag(None, "Column of the chosen response", "data.chosen_key")
    rejected_key: str | None = flag(None, "Column of the rejected response", "data.rejected_key")
    max_len: int = flag(512, "Tokens of prompt and response together", "data.max_len")
    on_long: Literal["truncate", "drop", "error"] = flag(
        "truncate", "Pair longer than --max_len: cut the responses, drop the pair, or stop"
    )

    @property
    def contrastive(self) -> bool:
        """The goal term is part of the loss."""
        return self.contrastive_loss or self.reward_model_strategy == "contrastive"


@dataclass(frozen=True)
class TrainSFTConfig(TrainConfig):
    """Fine-tune a language model on prompts and answers; the loss counts the answer's tokens only."""

    learning_rate: float = flag(5e-6, "Peak learning rate", "adam.lr")
    input_key: str = flag("question", "Column of the prompt, or of a message list", "data.input_key")
    output_key: str | None = flag(
        None, "Column of the answer; default: solution, answer, output or response", "data.output_key"
    )
    max_len: int = flag(2048, "Tokens of prompt and answer together", "data.max_len")


def _check_choice(name: str, value: str | None, known) -> None:
    if value is not None and value not in known:
        raise ValueError(f"--{name}: expected one of {sorted(known)}, got {value!r}")


def validate(config: TrainConfig) -> None:
    """Refuse impossible settings before anything is loaded.

    Raises:
        ValueError: names the flag, what was expected and what came.
    """
    for name in ("pretrain", "dataset"):
        if not getattr(config, name):
            raise ValueError(f"--{name} is required")
    for name in (
        "max_epochs",
        "train_batch_size",
        "micro_train_batch_size",
        "max_len",
        "logging_steps",
        "max_ckpt_num",
    ):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}")
    if not config.save_path.strip():
        raise ValueError("--save_path is empty; name a folder")
    if config.bf16 and config.param_dtype == "fp32":
        raise ValueError("--bf16 and --param_dtype fp32 disagree; drop one")
    for name in ("seed", "lora_rank"):
        if getattr(config, name) < 0:
            raise ValueError(f"--{name} must be at least 0, got {getattr(config, name)}")
    if config.zpg < 1 or (config.num_proc is not None and config.num_proc < 1):
        raise ValueError("--zpg and --num_proc must be at least 1")
    if config.lr_scheduler not in SCHEDULERS:
        raise ValueError(f"--lr_scheduler: expected one of {sorted(SCHEDULERS)}, got {config.lr_scheduler!r}")
    if not (0 < config.learning_rate < 100 and config.max_norm >= 0 and config.l2 >= 0):
        raise ValueError("--learning_rate must be above 0, --max_norm and --l2 at least 0")
    for name in ("eval_fraction", "lr_warmup_ratio", "min_lr_ratio", "lora_dropout"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"--{name} is a share in [0, 1), got {getattr(config, name)}")
    if len(config.adam_betas) != 2 or not all(0 <= beta < 1 for beta in config.adam_betas):
        raise ValueError(f"--adam_betas takes two numbers in [0, 1), got {config.adam_betas}")
    if config.zero_stage not in (None, 0, 1, 2, 3):
        raise ValueError(f"--zero_stage is 0, 1, 2 or 3, got {config.zero_stage}")
    if config.max_samples is not None and config.max_samples < 1:
        raise ValueError(f"--max_samples must be at least 1, got {config.max_samples}")
    if config.disable_fast_tokenizer:
        raise ValueError("--disable_fast_tokenizer: a fast tokenizer is needed; drop the flag")
    if config.load_in_4bit and config.lora_rank == 0:
        raise ValueError("--load_in_4bit trains LoRA updates only: add --lora_rank 16")
    if config.save_best and config.eval_fraction == 0 and not (config.eval_dataset or config.eval_split):
        raise ValueError("--save_best needs evaluation data: --eval_dataset, --eval_split or --eval_fraction")
    if config.load_checkpoint and config.disable_ds_ckpt:
        raise ValueError("--load_checkpoint needs resumable state, --disable_ds_ckpt writes none; drop one")
    if config.disable_ds_ckpt and config.save_steps > 0 and not config.save_hf_ckpt:
        raise ValueError("--disable_ds_ckpt leaves nothing to save every --save_steps; add --save_hf_ckpt")
    if config.flash_attn and config.attn_implementation not in (None, "flash_attention_2"):
        raise ValueError(f"--flash_attn and --attn_implementation {config.attn_implementation} disagree; drop one")
    if isinstance(config, TrainRMConfig):
        _validate_reward_model(config)


def _validate_reward_model(config: TrainRMConfig) -> None:
    _check_choice("loss", config.loss, PAIR_LOSSES)
    _check_choice("contrastive_strategy", config.contrastive_strategy, CONTRASTIVE_STRATEGIES)
    _check_choice("contrastive_reduction", config.contrastive_reduction, REDUCTIONS)
    _check_choice("contrastive_start", config.contrastive_start, STARTS)
    _check_choice("goal_sampling", config.goal_sampling, GOAL_SAMPLINGS)
    _check_choice("value_head_strategy", config.value_head_strategy, VALUE_HEADS)
    if config.contrastive_loss and config.reward_model_strategy == "vanilla":
        raise ValueError("--contrastive_loss and --reward_model_strategy vanilla disagree; drop one")
    if not 0 < config.contrastive_temperature < math.inf:
        raise ValueError(f"--contrastive_temperature must be above 0, got {config.contrastive_temperature}")
    for name in ("sim_samples", "unsim_samples"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(config, name)}")
    for name in ("source_state_percentile", "goal_state_percentile"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"--{name} is a place in the response, 0 to 1, got {getattr(config, name)}")
    if config.max_len < 3:
        raise ValueError(f"--max_len {config.max_len} holds no prompt, response and EOS; at least 3")
    if config.batch_tokens is not None and config.batch_tokens < 1:
        raise ValueError(f"--batch_tokens must be at least 1, got {config.batch_tokens}")
    if not 0 < config.goal_discount < 1:
        raise ValueError(f"--goal_discount must lie between 0 and 1, got {config.goal_discount}")
    if config.contrastive_reduction == "original" and config.contrastive_strategy not in ("cosine", "cosine_avg"):
        raise ValueError("--contrastive_reduction original belongs to --contrastive_strategy cosine or cosine_avg")
    of_pass = _forward_pass_setting(config)
    if config.batch_tokens is not None and of_pass:
        raise ValueError(f"{of_pass} depends on the micro-batches; drop --batch_tokens")
    if config.contrastive_strategy == "value" and config.goal_stop_gradient:
        raise ValueError("--goal_stop_gradient: --contrastive_strategy value compares no goals; drop one")
    for name in ("contrastive_loss_beta", "contrastive_loss_beta_end", "aux_loss_coef", "center_rewards_coefficient"):
        if not 0 <= (getattr(config, name) or 0) < math.inf:
            raise ValueError(f"--{name} must be at least 0, got {getattr(config, name)}")
    _validate_groups(config)


def _forward_pass_setting(config: TrainRMConfig) -> str | None:
    """The setting by which the loss of a pair depends on what else is in its forward pass, if any."""
    if config.contrastive and config.contrastive_reduction == "original":
        return "--contrastive_reduction original"
    if config.contrastive and config.contrastive_strategy in FORWARD_PASS_STRATEGIES:
        return f"--contrastive_strategy {config.contrastive_strategy}"
    return None


def _validate_groups(config: TrainRMConfig) -> None:
    if config.responses_per_prompt is None:
        for name in ("strip_calculator", "include_unparsed"):
            if getattr(config, name):
                raise ValueError(f"--{name} is for labelled responses: add --responses_per_prompt, or drop it")
        return
    if config.responses_per_prompt < 2:
        raise ValueError(
            f"--responses_per_prompt must be at least 2, a correct and a wrong one, got {config.responses_per_prompt}"
        )
    if config.margin_loss:
        raise ValueError("--margin_loss: labelled responses have no margins; drop it or --responses_per_prompt")
    if _forward_pass_setting(config):
        raise ValueError(
            f"{_forward_pass_setting(config)} knows no pairs of one prompt; drop it or --responses_per_prompt"
        )
    for name in ("dataset_format", "prompt_key", "chosen_key", "rejected_key"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"--{name} is for rows of pairs, and --responses_per_prompt reads labelled responses "
                "(question, generated_solution, is_correct); drop one"
            )
