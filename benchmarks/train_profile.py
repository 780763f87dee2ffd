"""Where the time of a training step goes, and how near its matrix products come to their rate alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from measuring import now
from train_tasks import layer_weights

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
COPIES = ("copy", "cat", "index", "gather", "scatter", "select_backward", "slice_backward", "fill", "zero", "embedding")
VIEWS = (
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "narrow", "as_strided",
    "unsqueeze", "squeeze", "split", "chunk", "unbind", "alias", "detach", "empty", "empty_like", "empty_strided", "to",
    "_to_copy", "resize_", "item", "_local_scalar_dense",
)  # fmt: skip
KINDS = ("matrix products", "attention", "element by element", "copies and indexing", "optimizer", "rest")
COVERED = 0.95  # share of the products' operations whose shapes are timed alone


def kind_of(names: list[str]) -> str:
    """One of KINDS for an operation.

    Args:
        names: of the operation, of the one that called it, and so on outwards, as the profiler has them.
    """
    name = names[0]
    if any(one.startswith(("Optimizer.", "aten::_foreach_", "aten::_fused_")) for one in names):
        return "optimizer"
    if any("attention" in one.lower() for one in names):
        return "attention"
    if name in PRODUCTS:
        return "matrix products"
    if not name.startswith("aten::") or name.removeprefix("aten::") in VIEWS:
        return "rest"  # autograd's own work, and what only describes memory anew
    return "copies and indexing" if any(word in name for word in COPIES) else "element by element"


def profile_step(trainer, step: int) -> dict[str, Any]:
    """One more update of a trainer under torch's profiler.

    Returns:
        seconds of the update (profiled: slower); shares of them by KINDS, where "rest" holds all that is no operation,
        Python for the most part; product_flops and product_seconds of the matrix products; alone_flops_per_s, their
        rate when each shape is run by itself; needed_flops, those of the layers where each prompt and each response is
        computed once and nothing is padded.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, record_shapes=True, with_flops=True) as profiled:
        start, _ = now()
        trainer.train_step(step)
        end, _ = now()
    on_gpu = torch.cuda.is_available()
    seconds: Counter[str] = Counter()
    products: Counter[tuple] = Counter()
    for event in profiled.events():
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        names, caller = [event.name], event.cpu_parent
        while caller is not None:
            names.append(caller.name)
            caller = caller.cpu_parent
        kind = kind_of(names)
        seconds[kind] += own
        if kind == "matrix products":
            left, right = event.input_shapes[1:3] if "add" in event.name else event.input_shapes[:2]
            products[tuple(left), tuple(right)] += 1
    whole = end - start
    seconds["rest"] += whole - sum(seconds.values())
    dtype = torch.bfloat16 if trainer.engine.bf16 else torch.float32
    tokens = int(trainer.data.row_tokens[trainer.plan.indices(step)].sum())
    return {
        "seconds": whole,
        "shares": {kind: seconds[kind] / whole for kind in KINDS},
        "product_flops": sum(product_flops(*shapes) * count for shapes, count in products.items()),
        "product_seconds": seconds["matrix products"],
        "alone_flops_per_s": rate_alone(products, trainer.engine.device, dtype),
        "needed_flops": 6 * layer_weights(trainer.engine.model.config) * tokens,
    }


def product_flops(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Floating-point operations of (..., m, k) times (..., k, n): 2 m k n for each of the products."""
    flops = 2 * right[-1]
    for size in left:
        flops *= size
    return flops


def rate_alone(products: Counter[tuple], device, dtype) -> float:
    """Floating-point operations a second of these products, each shape run by itself on contiguous matrices, best of 3.

    Args:
        products: how often each (shape of the left, shape of the right matrix) is multiplied; those with the most
            operations are run, up to COVERED of all.
    """
    import torch

    work = {shapes: product_flops(*shapes) * count for shapes, count in products.items()}
    done, seconds = 0, 0.0
    for shapes in sorted(work, key=lambda one: -work[one]):
        left, right = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        best = float("inf")
        for _ in range(3):
            start, _ = now()
            left @ right
            end, _ = now()
            best = min(best, end - start)
        seconds += best * products[shapes]
        done += work[shapes]
        if done >= COVERED * sum(work.values()):
            break
    return done / seconds


def print_profiles(rows: dict[str, dict]) -> None:
    """A table of the profiled ways: shares of a step by kind, and its matrix products against their rate alone."""
    profiles = {name: row["profile"] for name, row in rows.items() if "profile" in row}
    if not profiles:
        return
    print(f"\n{'share of a step':26}" + "".join(f"{name:>22}" for name in profiles))
    for kind in KINDS:
        print(f"{kind:26}" + "".join(f"{one['shares'][kind]:22.1%}" for one in profiles.values()))
    lines = {
        "seconds, profiled": lambda one: f"{one['seconds']:.2f}",
        "seconds, not profiled": lambda one: f"{one['unprofiled_seconds']:.2f}",
        "GFLOP of products": lambda one: f"{one['product_flops'] / 1e9:.1f}",
        "GFLOP needed": lambda one: f"{one['needed_flops'] / 1e9:.1f}",
        "GFLOP/s in the step": lambda one: f"{one['product_flops'] / one['product_seconds'] / 1e9:.1f}",
        "GFLOP/s of them alone": lambda one: f"{one['alone_flops_per_s'] / 1e9:.1f}",
        "products, best case": lambda one: (
            f"{one['product_flops'] / one['alone_flops_per_s'] / one['unprofiled_seconds']:.1%}"
        ),
    }
    for title, line in lines.items():
        print(f"{title:26}" + "".join(f"{line(one):>22}" for one in profiles.values()))
