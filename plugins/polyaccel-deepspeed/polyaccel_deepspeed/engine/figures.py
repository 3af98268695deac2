"""What scripts ask the engine of a step: the gradients' norm, and the timer of throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polyaccel.observability.metrics import StepMetrics


class GradNorm(float):
    """A norm of gradients: a float that has the methods of a tensor too, and that torch's functions take.

    DeepSpeed answers with a tensor at some stages and with a float at others, and scripts use both.
    """

    __slots__ = ()

    def item(self) -> float:
        return float(self)

    @property
    def tensor(self) -> Tensor:
        """The norm as a tensor without dimensions."""
        return torch.tensor(float(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, named = tree_map_only(GradNorm, lambda norm: norm.tensor, (args, dict(kwargs or {})))
        return function(*given, **named)


class ThroughputTimer:
    """`engine.tput_timer`: how many samples a second the engine trains. The engine counts, so `start` and `stop` have
    no effect."""

    def __init__(self, batch_size: int, start_step: int = 2) -> None:
        """The first `start_step` steps are not counted."""
        self.batch_size = batch_size
        self.start_step = start_step
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        """Begin another epoch, whose micro-batches are counted from zero."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Has no effect."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Has no effect."""

    def count(self, metrics: StepMetrics, micro_batches: int, batch_size: int) -> None:
        """Count an optimizer step."""
        self.batch_size = batch_size
        self.global_step_count += 1
        self.micro_step_count += micro_batches
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += metrics.step_time_s or 0.0

    def avg_samples_per_sec(self) -> float:
        """The mean over the counted steps; minus infinity before there is one."""
        counted = self.global_step_count - self.start_step
        if counted <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * counted / self.total_elapsed_time
