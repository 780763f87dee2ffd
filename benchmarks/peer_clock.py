"""Time and memory of a trainer of TRL."""

from __future__ import annotations

from measuring import now, peak_memory
from transformers import TrainerCallback


class PeerClock(TrainerCallback):
    """Time and memory from before the first step to the end of the last."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.memory = 0.0  # MiB

    def on_train_begin(self, args, state, control, **kwargs):
        self.marks.append(now())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            self.marks.append(now())
            self.memory = peak_memory()

    def figures(self) -> dict[str, float]:
        """Seconds of the wall clock and of the CPU, and the peak of memory in MiB."""
        (wall, cpu), (wall_end, cpu_end) = self.marks
        return {"seconds": wall_end - wall, "cpu_seconds": cpu_end - cpu, "memory": self.memory}
