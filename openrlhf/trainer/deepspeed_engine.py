"""The engine for many processes: DeepSpeed ZeRO 0 to 3. The only importer of deepspeed and torch.distributed."""

from __future__ import annotations

import gc
import os
import socket
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by deepspeed at import

import deepspeed
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

from openrlhf.trainer.engine import (
    OptimizerSettings,
    StepResult,
    build_scheduler,
    parameter_groups,
    random_state,
    restore_random_state,
    under_launcher,
)

STATE_TAG = "state"


def _fill_environment() -> None:
    """Names torch.distributed expects, from Slurm's or for a program started without a launcher."""
    env = os.environ
    if "RANK" not in env and under_launcher():
        env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
        if "MASTER_ADDR" not in env:
            raise ValueError("under Slurm, export MASTER_ADDR (the first node) and MASTER_PORT before srun")
    if "RANK" not in env:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env.setdefault("LOCAL_RANK", "0")
    env.setdefault("MASTER_PORT", "29500")


def _share_cores(processes: int) -> None:
    """Without a GPU, give every process of this machine its share of the cores; OMP_NUM_THREADS says otherwise.

    Args:
        processes: in all, where the launcher does not tell how many are on this machine.
    """
    if torch.cuda.is_available() or "OMP_NUM_THREADS" in os.environ:
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or processes)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))


class LaunchedRanks:
    """Processes of a launcher that share an evaluation: no DeepSpeed engine, only the process group."""

    def __init__(self) -> None:
        _fill_environment()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo", timeout=timedelta(hours=24))  # plain objects; a slow process is no failure
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        _share_cores(self.world_size)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        dist.destroy_process_group()


class DeepSpeedEngine:
    """Same methods as :class:`openrlhf.trainer.engine.LocalEngine`, see there.

    Args:
        global_batch_size: examples per optimizer step over all processes; a multiple of micro_batch_size * processes.
        varying_passes: the number of micro-batches varies and is told by ``begin``; the sizes need not divide.
        zpg: ZeRO++ partition size. grad_accum_dtype: fp32, bf16 or None for DeepSpeed's choice.
    Raises:
        ValueError: the batch sizes do not divide.
    """

    def __init__(
        self,
        *,
        bf16: bool,
        zero_stage: int,
        micro_batch_size: int,
        global_batch_size: int,
        max_norm: float,
        varying_passes: bool = False,
        zpg: int = 1,
        adam_offload: bool = False,
        overlap_comm: bool = False,
        grad_accum_dtype: str | None = None,
        disable_trace_cache: bool = False,
    ) -> None:
        _fill_environment()
        has_gpu = torch.cuda.is_available()
        if not has_gpu and "deepspeed_shm_comm" in __compatible_ops__:
            # Compiled for two minutes by every init otherwise, and used by inference only.
            __compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("WARNING")
        local_rank = int(os.environ["LOCAL_RANK"])
        if has_gpu:
            torch.cuda.set_device(local_rank)
        deepspeed.init_distributed(
            dist_backend="nccl" if has_gpu else "gloo", timeout=timedelta(minutes=60), verbose=False
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        _share_cores(self.world_size)
        self.device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
        self.bf16, self.zero_stage, self.adam_offload = bf16, zero_stage, adam_offload
        per_pass = micro_batch_size * self.world_size
        if not varying_passes and global_batch_size % per_pass:
            raise ValueError(
                f"--train_batch_size {global_batch_size} must be a multiple of --micro_train_batch_size "
                f"{micro_batch_size} x {self.world_size} processes = {per_pass}"
            )
        # Where the number varies, DeepSpeed's own count is nominal; above 1, or offloading would not add gradients up.
        self.accumulation = 2 if varying_passes else global_batch_size // per_pass
        self.passes = self.accumulation  # of the current optimizer step
        self.micro_step = 0
        self.ds_config = self._config(
            micro_batch_size, max_norm, zpg, overlap_comm, grad_accum_dtype, disable_trace_cache
        )
        self.model: Any

    def _config(
        self, micro: int, max_norm: float, zpg: int, overlap_comm: bool, grad_dtype: str | None, no_trace: bool
    ) -> dict[str, Any]:
        offload = (
            {"device": "cpu", "pin_memory": torch.cuda.is_available()} if self.adam_offload else {"device": "none"}
        )
        zero: dict[str, Any] = {
            "stage": self.zero_stage,
            "overlap_comm": overlap_comm,
            "offload_optimizer": offload,
            "zero_hpz_partition_size": zpg,
        }
        if no_trace:
            zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        return {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
            "bf16": {"enabled": self.bf16},
            "gradient_clipping": max_norm,
            "data_types": {"grad_accum_dtype": grad_dtype},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 60,
        }

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @contextmanager
    def model_init(self):
        """ZeRO-3: split the weights while they are read. The setting must not outlive the context."""
        if self.zero_stage != 3:
            yield
            return
        live = HfDeepSpeedConfig(self.ds_config)
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            del live
            gc.collect()

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager:
        if self.zero_stage != 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)

    def prepare(self, model: nn.Module, settings: OptimizerSettings) -> None:
        groups = parameter_groups(model, settings.weight_decay)
        optimizer_class: Any = torch.optim.AdamW
        if self.adam_offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled on first use

            optimizer_class = DeepSpeedCPUAdam
        optimizer = optimizer_class(groups, lr=settings.learning_rate, betas=settings.betas)
        scheduler = build_scheduler(optimizer, settings)
        self.model, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=self.ds_config
        )

    def autocast(self) -> AbstractContextManager:
        return nullcontext()  # DeepSpeed holds bf16 copies of the weights

    def begin(self, micro_batches: int) -> None:
        self.passes = micro_batches

    def backward(self, loss: Tensor) -> None:
        if self.micro_step > 0:
            self.model.step()  # not yet at the boundary: counts the micro-batch only
        self.model.set_gradient_accumulation_boundary(self.micro_step + 1 == self.passes)
        # DeepSpeed divides by the accumulation count and averages over processes; our losses are already shares.
        self.model.backward(loss * (self.accumulation * self.world_size))
        self.micro_step += 1

    def step(self) -> StepResult:
        if self.micro_step != self.passes:
            raise RuntimeError(f"{self.micro_step} of {self.passes} micro-batches before the optimizer step")
        learning_rate = self.model.get_lr()[0]
        self.model.step()
        self.micro_step = 0
        norm = self.model.get_global_grad_norm()
        return StepResult(None if norm is None else torch.as_tensor(norm).detach(), learning_rate)

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat(self.gather_objects(values.cpu()))

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def state_dict(self) -> dict[str, Tensor] | None:
        module = self.model.module
        state: dict[str, Tensor] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            context = deepspeed.zero.GatheredParameters([parameter]) if self.zero_stage == 3 else nullcontext()
            with context:
                if self.is_main:
                    state[name] = parameter.detach().cpu().clone()
        for name, value in module.state_dict().items():
            if name not in parameters and self.is_main:
                state[name] = value.detach().cpu()
        return state if self.is_main else None

    def save_state(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder), tag=STATE_TAG, save_latest=False, exclude_frozen_parameters=True)
        torch.save(random_state(), folder / f"random-{self.rank}.pt")
        if self.is_main:
            (folder / "processes.txt").write_text(f"{self.world_size} {self.zero_stage}\n")

    def load_state(self, folder: Path) -> None:
        written = folder / "processes.txt"
        if not written.is_file():
            raise ValueError(f"{folder} was saved by a one-process run; resume it without a launcher and --zero_stage")
        world_size, stage = (int(x) for x in written.read_text().split())
        if (world_size, stage) != (self.world_size, self.zero_stage):
            raise ValueError(
                f"{folder} was saved by {world_size} processes with ZeRO stage {stage}; this run has {self.world_size} "
                f"and stage {self.zero_stage}. Resume with the same, or start from its Hugging Face folder"
            )
        self.model.load_checkpoint(str(folder), tag=STATE_TAG, load_module_strict=False)
        restore_random_state(torch.load(folder / f"random-{self.rank}.pt", weights_only=True))

    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
