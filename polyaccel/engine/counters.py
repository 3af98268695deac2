"""The bookkeeping of a training run: micro-batches, optimizer steps, samples, and where accumulation ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyaccel.errors import CheckpointError, ConfigError, Problem


class StepCounters:
    """The progress of a run, counted as DeepSpeed counts it.

    A *window* is the micro-batches of one optimizer step. Its length may change from one window to the next.
    `micro_steps`: finished micro-batches. `global_steps`: accumulation boundaries passed, skipped steps included.
    `global_samples`: `train_batch_size` for each of those. `skipped_steps`: those whose update was not applied.
    `step_applied`: whether the last `advance` was a boundary whose update was applied.

    A learning-rate schedule moves when `step_applied`, so not on skipped steps, unlike `global_steps`.
    """

    def __init__(self, *, gradient_accumulation_steps: int, train_batch_size: int) -> None:
        """Start at zero. Raises ConfigError unless both numbers are at least 1."""
        self._micro_steps = 0
        self._position = 0
        """The place of the present micro-batch in a window, as counting has it."""
        self._since_boundary = 0
        """Micro-batches since the last boundary, a counted one or one that was set by hand."""
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.step_applied = False
        self.step_samples = train_batch_size
        """Samples of the last optimizer step."""
        self.boundary_by_hand: bool | None = None
        """Whether micro-batches end an accumulation, as set by hand; None counts them."""
        self._next_sizes: tuple[int, int] | None = None
        """Accumulation steps and batch size from the next window on."""
        self._sizes_at: Callable[[int], tuple[int, int]] | None = None
        self.set_batch(gradient_accumulation_steps=gradient_accumulation_steps, train_batch_size=train_batch_size)

    def set_batch(
        self, *, gradient_accumulation_steps: int, train_batch_size: int, waits_for_window: bool = False
    ) -> None:
        """Change the sizes now, or at the next window with `waits_for_window`. Raises ConfigError below 1."""
        sizes = {"gradient_accumulation_steps": gradient_accumulation_steps, "train_batch_size": train_batch_size}
        problems = [Problem(key, value, "expected at least 1") for key, value in sizes.items() if value < 1]
        if problems:
            raise ConfigError(problems)
        if waits_for_window:
            self._next_sizes = gradient_accumulation_steps, train_batch_size
            return
        self._next_sizes, self._position = None, 0
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.train_batch_size = train_batch_size

    def begin_window(self) -> None:
        """Take over the sizes that wait for the next window, unless the present one has finished micro-batches."""
        if self._next_sizes is not None and not self._since_boundary:
            steps, batch = self._next_sizes
            self.set_batch(gradient_accumulation_steps=steps, train_batch_size=batch)

    def follow(self, sizes_at: Callable[[int], tuple[int, int]]) -> None:
        """Let windows have the accumulation steps and batch size of `sizes_at(global_samples)` from now on."""
        self._sizes_at = sizes_at
        self._follow_samples()

    def _follow_samples(self) -> None:
        if self._sizes_at is not None:
            steps, batch = self._sizes_at(self.global_samples)
            if (steps, batch) != (self.gradient_accumulation_steps, self.train_batch_size):
                self.set_batch(gradient_accumulation_steps=steps, train_batch_size=batch)

    @property
    def is_in_window(self) -> bool:
        """Whether the present window has finished micro-batches."""
        return self._since_boundary > 0

    @property
    def next_accumulation_steps(self) -> int:
        """The micro-batches of the next window that begins."""
        return self.gradient_accumulation_steps if self._next_sizes is None else self._next_sizes[0]

    @property
    def micro_steps(self) -> int:
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        """Count on from `count`; its remainder is the place in the present window, as DeepSpeed has it."""
        self._micro_steps, self._position = count, count % self.gradient_accumulation_steps
        self._since_boundary = self._position

    @property
    def is_boundary(self) -> bool:
        """Whether the present micro-batch ends an accumulation, so that `step` updates the parameters."""
        if self.boundary_by_hand is not None:
            return self.boundary_by_hand
        return self._position + 1 >= self.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set by hand whether micro-batches end an accumulation, from now on; None goes back to counting."""
        self.boundary_by_hand = is_boundary

    def advance(self, *, skipped: bool = False) -> bool:
        """End the micro-batch; return whether it was a boundary. `skipped`: its update was not applied."""
        was_boundary = self.is_boundary
        if was_boundary:
            self.global_steps += 1
            self.step_samples = self.train_batch_size
            self.global_samples += self.step_samples
            self.skipped_steps += skipped
        self.step_applied = was_boundary and not skipped
        self._micro_steps += 1
        self._position = (self._position + 1) % self.gradient_accumulation_steps
        self._since_boundary = 0 if was_boundary else self._since_boundary + 1
        self.begin_window()
        if was_boundary:
            self._follow_samples()
        return was_boundary

    def skip_to_last(self) -> None:
        """Count the micro-batches of the present window but the last as finished."""
        self.micro_steps += self.gradient_accumulation_steps - 1 - self._position

    def state_dict(self) -> dict[str, int]:
        return {
            "micro_steps": self._micro_steps - self._position,
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; a new window begins, because no checkpoint holds unfinished gradients."""
        missing = [key for key in self.state_dict() if not _is_count(state_dict.get(key))]
        if missing or state_dict["gradient_accumulation_steps"] < 1:
            raise CheckpointError(
                f"no usable {', '.join(missing) or 'gradient_accumulation_steps'} in the saved counters "
                f"{dict(state_dict)!r}",
                hint="load what StepCounters.state_dict() gave",
                value=dict(state_dict),
            )
        self._micro_steps, self._position, self._since_boundary = state_dict["micro_steps"], 0, 0
        self.begin_window()
        self.global_steps = state_dict["global_steps"]
        self.global_samples = state_dict["global_samples"]
        self.skipped_steps = state_dict["skipped_steps"]
        self.step_applied = False
        self._follow_samples()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
