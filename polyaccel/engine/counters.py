"""The bookkeeping of a training run: micro-batches, optimizer steps, samples, and where accumulation ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyaccel.errors import CheckpointError, ConfigError, Problem


class StepCounters:
    """The progress of a run, counted as DeepSpeed counts it.

    `micro_steps`: finished micro-batches. `global_steps`: accumulation boundaries passed, skipped steps included.
    `global_samples`: `train_batch_size` for each of those. `skipped_steps`: those whose update was not applied.
    `step_applied`: whether the last `advance` was a boundary whose update was applied.

    A learning-rate schedule moves when `step_applied`, so not on skipped steps, unlike `global_steps`.
    """

    def __init__(self, *, gradient_accumulation_steps: int, train_batch_size: int) -> None:
        """Start at zero. Raises ConfigError unless both numbers are at least 1."""
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.step_applied = False
        self._boundary: bool | None = None
        self.set_batch(gradient_accumulation_steps=gradient_accumulation_steps, train_batch_size=train_batch_size)

    def set_batch(self, *, gradient_accumulation_steps: int, train_batch_size: int) -> None:
        """Change the sizes, between optimizer steps. Raises ConfigError unless both numbers are at least 1."""
        sizes = {"gradient_accumulation_steps": gradient_accumulation_steps, "train_batch_size": train_batch_size}
        problems = [Problem(key, value, "expected at least 1") for key, value in sizes.items() if value < 1]
        if problems:
            raise ConfigError(problems)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.train_batch_size = train_batch_size

    @property
    def is_boundary(self) -> bool:
        """Whether the present micro-batch ends an accumulation, so that `step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set by hand whether micro-batches end an accumulation, from now on; None goes back to counting."""
        self._boundary = is_boundary

    def advance(self, *, skipped: bool = False) -> bool:
        """End the present micro-batch. Returns whether it was a boundary. `skipped`: the update of that boundary was
        not applied."""
        was_boundary = self.is_boundary
        if was_boundary:
            self.global_steps += 1
            self.global_samples += self.train_batch_size
            self.skipped_steps += skipped
        self.step_applied = was_boundary and not skipped
        self.micro_steps += 1
        return was_boundary

    def state_dict(self) -> dict[str, int]:
        return {
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the counts of `state_dict`. Raises CheckpointError for anything but what `state_dict()` gives.

        Gradients of an unfinished accumulation are in no checkpoint, hence `micro_steps` goes back to where that one
        began; and it is counted anew in the present accumulation steps, so that the next boundary is a whole
        accumulation away under any setting.
        """
        missing = [key for key in self.state_dict() if not _is_count(state_dict.get(key))]
        if missing or state_dict["gradient_accumulation_steps"] < 1:
            raise CheckpointError(
                f"no usable {', '.join(missing) or 'gradient_accumulation_steps'} in the saved counters "
                f"{dict(state_dict)!r}",
                cure="load what StepCounters.state_dict() gave",
                value=dict(state_dict),
            )
        accumulations = state_dict["micro_steps"] // state_dict["gradient_accumulation_steps"]
        self.micro_steps = accumulations * self.gradient_accumulation_steps
        self.global_steps = state_dict["global_steps"]
        self.global_samples = state_dict["global_samples"]
        self.skipped_steps = state_dict["skipped_steps"]
        self.step_applied = False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
