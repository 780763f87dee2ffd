"""What a trainer needs of the machinery below it, and the one-process form of it.

``DeepSpeedEngine`` (deepspeed_engine.py) has the same methods for many processes; both give the same loss curve.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import get_scheduler

STATE_FILE = "state.pt"


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule and clipping. One step is one optimizer step."""

    learning_rate: float  # peak
    betas: tuple[float, float]
    weight_decay: float
    max_norm: float  # clip the gradient norm to this; 0: not
    scheduler: str  # a schedule name of transformers
    warmup_steps: int
    min_lr_ratio: float  # floor of cosine_with_min_lr, share of the peak
    total_steps: int  # optimizer steps of the whole run


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step."""

    grad_norm: Tensor | None  # () before clipping, on the device; None where the engine does not tell
    learning_rate: float  # used by this step


class Engine(Protocol):
    """Runs a model on one or many processes."""

    device: torch.device
    rank: int
    world_size: int
    model: nn.Module  # called for forward passes of training

    @property
    def module(self) -> nn.Module:
        """The network itself: for sampling and other passes without gradients, and by its own name and methods."""

    @property
    def is_main(self) -> bool:
        """True in the process of global rank 0."""

    def model_init(self) -> AbstractContextManager:
        """Context in which the model is loaded (ZeRO-3 splits it while loading)."""

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager:
        """Context in which these parameters are whole and writable in every process."""

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> None:
        """Move the model to the device and build its optimizer and schedule."""

    def autocast(self) -> AbstractContextManager:
        """Context of forward passes."""

    def begin(self, micro_batches: int) -> None:
        """Tell how many backward passes the next optimizer step has; the same number in every process."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch; gradients sum over micro-batches and processes."""

    def step(self) -> StepResult:
        """One optimizer and schedule step on the summed gradient, which is then cleared."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes."""

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate (n_rank,) tensors of all processes; known in every process."""

    def gather_objects(self, value: Any) -> list[Any]:
        """The picklable values of all processes in the order of their ranks, known in every process."""

    def state_dict(self) -> dict[str, Tensor] | None:
        """Whole weights on the CPU by the model's names, in the main process; None in the others. Collective."""

    def save_state(self, folder: Path) -> None:
        """Write model, optimizer, schedule and random state. Collective."""

    def load_state(self, folder: Path) -> None:
        """Restore what save_state wrote. Collective."""

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process."""

    def barrier(self) -> None:
        """Wait for every process."""

    def close(self) -> None:
        """End communication."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, matrices with weight decay, vectors (biases, norms) without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    # ds_shape: a parameter split by ZeRO-3 shows an empty shape
    is_matrix = [len(getattr(p, "ds_shape", p.shape)) > 1 for p in trainable]
    groups = [
        {"params": [p for p, matrix in zip(trainable, is_matrix, strict=True) if matrix], "weight_decay": weight_decay},
        {"params": [p for p, matrix in zip(trainable, is_matrix, strict=True) if not matrix], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_scheduler(optimizer: torch.optim.Optimizer, settings: OptimizerSettings):
    """Schedule over exactly ``total_steps`` optimizer steps."""
    extra = {"min_lr_rate": settings.min_lr_ratio} if settings.scheduler.endswith("with_min_lr") else None
    return get_scheduler(
        settings.scheduler,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.total_steps,
        scheduler_specific_kwargs=extra,
    )


def random_state() -> dict[str, Any]:
    """State of torch's generators, for dropout after a resume."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class LocalEngine:
    """One process on a CPU or one GPU: plain torch, nothing to install or to launch.

    Args:
        bf16: forward passes under bfloat16 autocast; parameters and optimizer stay float32.
        device: None takes a GPU where there is one.
    """

    rank = 0
    world_size = 1
    is_main = True

    def __init__(self, bf16: bool = False, device: str | torch.device | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.bf16 = bf16
        self.model: nn.Module

    @property
    def module(self) -> nn.Module:
        return self.model

    def model_init(self) -> AbstractContextManager:
        return nullcontext()

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager:
        return nullcontext()

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.model = model if getattr(model, "is_quantized", False) else model.to(self.device)
        self.max_norm = settings.max_norm
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, settings.weight_decay), lr=settings.learning_rate, betas=settings.betas, fused=True
        )
        self.scheduler = build_scheduler(self.optimizer, settings)

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def begin(self, micro_batches: int) -> None:
        return None

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> StepResult:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.max_norm if self.max_norm > 0 else float("inf"))
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm.detach(), learning_rate)

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def state_dict(self) -> dict[str, Tensor] | None:
        return {name: value.detach().cpu() for name, value in self.model.state_dict().items()}

    def save_state(self, folder: Path) -> None:
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        torch.save(
            {
                "model": {k: v for k, v in self.model.state_dict().items() if k in trainable},
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "random": random_state(),
            },
            folder / STATE_FILE,
        )

    def load_state(self, folder: Path) -> None:
        if not (folder / STATE_FILE).is_file():
            raise ValueError(
                f"{folder} holds no state of a one-process run: resume it with the launcher that wrote it; a folder "
                "made with --disable_ds_ckpt cannot be resumed"
            )
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if trainable != set(state["model"]):
            raise ValueError(f"{folder} holds other weights than this model; was --lora_rank or --pretrain changed?")
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        restore_random_state(state["random"])

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None


def under_launcher(environment: dict[str, str] | None = None) -> bool:
    """True when deepspeed, torchrun or Slurm started this process as one of a group."""
    env = os.environ if environment is None else environment
    # Set by srun in every task; SLURM_NTASKS is also there in an allocation's shell, where nothing was launched.
    by_srun = "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return {"RANK", "WORLD_SIZE"} <= set(env) or by_srun


def make_engine(
    *,
    bf16: bool = False,
    zero_stage: int | None = None,
    micro_batch_size: int = 1,
    global_batch_size: int = 1,
    varying_passes: bool = False,
    max_norm: float = 1.0,
    zpg: int = 1,
    adam_offload: bool = False,
    overlap_comm: bool = False,
    grad_accum_dtype: str | None = None,
    disable_trace_cache: bool = False,
) -> Engine:
    """DeepSpeed under a launcher or when a ZeRO stage is asked for, else one plain process."""
    if zero_stage is None and not under_launcher():
        return LocalEngine(bf16=bf16)
    from openrlhf.trainer.deepspeed_engine import DeepSpeedEngine  # takes seconds to import; only where needed

    return DeepSpeedEngine(
        bf16=bf16,
        zero_stage=2 if zero_stage is None else zero_stage,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        varying_passes=varying_passes,
        max_norm=max_norm,
        zpg=zpg,
        adam_offload=adam_offload,
        overlap_comm=overlap_comm,
        grad_accum_dtype=grad_accum_dtype,
        disable_trace_cache=disable_trace_cache,
    )
