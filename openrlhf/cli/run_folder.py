"""The folder that a run writes: checked before anything is loaded, replaced as a whole at the end, uploaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.trainer.config import TrainConfig
from openrlhf.utils.checkpoint import atomic_dir, clean_stale, ensure_writable, list_checkpoints, require_free_space
from openrlhf.utils.run_log import RUN_FILES
from openrlhf.utils.storage import check_s3_target, upload_dir

if TYPE_CHECKING:  # torch takes seconds to import; flags are read without it
    import torch

    from openrlhf.trainer.engine import Engine

logger = logging.getLogger(__name__)

# What a saved model or adapter consists of; a folder with anything else, or without manifest, is not replaced.
MODEL_FILES = frozenset(
    "config.json generation_config.json model.safetensors model.safetensors.index.json adapter_config.json "
    "adapter_model.safetensors goal_reward.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json vocab.txt merges.txt tokenizer.model chat_template.jinja README.md "
    "upload.json".split()
)
MODEL_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def check_replaceable(path: str | Path, inputs: list[str | None]) -> None:
    """Refuse to put a model in place of a folder whose content would be lost.

    Args:
        inputs: what the run reads; none of them may be the folder or lie in it.
    Raises:
        ValueError: the folder is an input, was not written by this project, or holds something that is no part of a
            saved model.
    """
    folder = Path(path).resolve()
    for name in inputs:
        if name and (Path(name).resolve() == folder or folder in Path(name).resolve().parents):
            raise ValueError(f"{path} would replace {name}, which this run reads; choose another folder")
    names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    if names and "manifest.json" not in names:
        raise ValueError(
            f"{path} holds {', '.join(names[:3])} and no manifest.json of an earlier run; choose a new folder"
        )
    foreign = [name for name in names if name not in MODEL_FILES | set(RUN_FILES) and not MODEL_SHARD.fullmatch(name)]
    if foreign:
        raise ValueError(
            f"{path} holds {len(foreign)} things that are no part of a saved model ({', '.join(foreign[:3])}) "
            "and would be lost; choose a new folder"
        )


def check_outputs(config: TrainConfig) -> None:
    """Refuse save paths and services that cannot work, before anything is loaded. Main process only."""
    check_replaceable(config.save_path, inputs=[config.pretrain, config.dataset, config.eval_dataset])
    target = Path(config.save_path).resolve()
    if str(config.ckpt_path or "").startswith("s3:"):
        raise ValueError(f"--ckpt_path {config.ckpt_path}: checkpoints of a run are read back; name a local folder")
    for name, folder in (("ckpt_path", config.checkpoint_folder), ("use_tensorboard", config.use_tensorboard)):
        if folder and target in (Path(folder).resolve(), *Path(folder).resolve().parents):
            raise ValueError(f"--{name} {folder} lies inside --save_path, which is replaced at the end")
    if config.save_steps > 0 and not config.load_checkpoint and list_checkpoints(config.checkpoint_folder):
        raise ValueError(
            f"{config.checkpoint_folder} holds checkpoints of an earlier run: go on from them with --load_checkpoint, "
            "choose another --ckpt_path, or remove the folder"
        )
    ensure_writable(config.save_path)
    clean_stale(Path(config.save_path).resolve().parent)
    if config.save_steps > 0:
        ensure_writable(config.checkpoint_folder, inside=True)
    if config.s3_save_path:
        check_s3_target(config.s3_save_path)


def check_room(config: TrainConfig, model: torch.nn.Module) -> None:
    """Refuse a run whose model, and one checkpoint beside it, do not fit on the disk. Main process only."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    stored = trained if config.lora_rank > 0 else sum(size for size, _ in sizes)
    require_free_space(config.save_path, stored * (2 if config.use_bf16 else 4))
    if config.save_steps > 0 and not config.disable_ds_ckpt:
        require_free_space(config.checkpoint_folder, trained * 12)  # float32 weights and two moments


@contextmanager
def replaced_folder(path: str | Path):
    """A temporary folder that takes the place of ``path`` at the end; the files of the run in it are kept."""
    with atomic_dir(path, carry=RUN_FILES) as folder:
        yield folder


def publish_model(engine: Engine, path: str | Path, write: Callable[[Path], None]) -> None:
    """Put what ``write`` writes in place of ``path``. Collective: it runs in every process."""
    if engine.is_main:
        with replaced_folder(path) as folder:
            write(folder)
    else:
        write(Path(path))
    engine.barrier()


def upload_result(config: TrainConfig) -> None:
    """Send the final folder to --s3_save_path, verified."""
    if config.s3_save_path:
        count = upload_dir(config.save_path, config.s3_save_path)
        logger.info("uploaded %d files to %s", count, config.s3_save_path)
