"""How far a training run is, what its sizes are, and how a script changes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyaccel.checkpoint.saver import SavePolicy
from polyaccel.engine.batch_ramp import BatchRamp
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.recording import Reporting, StepRecorder
from polyaccel.errors import ConfigError, Problem
from polyaccel.observability.metrics import StepMetrics
from polyaccel.zero.trained_state import TrainedState
from polyaccel.zero.update.optimizer_step import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that an engine counts with and answers to its users.

    Batch sizes count samples: of an optimizer step over all ranks, and of one rank's micro-batch. `counts_work`: tokens
    and operations are counted.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    zero_stage: int
    gradient_clipping: float
    reporting: Reporting
    counts_work: bool
    saving: SavePolicy

    @property
    def data_ranks(self) -> int:
        """How many ranks have their own samples."""
        return self.train_batch_size // (self.micro_batch_size * self.accumulation_steps)


class RunProgress:
    """The part of an engine that counts steps and samples. Names are DeepSpeed's."""

    _settings: EngineSettings
    counters: StepCounters
    loss_scaler: LossScaler
    zero: TrainedState
    _recorder: StepRecorder
    _result: StepResult | None = None

    # How far the run is.

    @property
    def global_steps(self) -> int:
        """Optimizer steps, skipped ones included."""
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all ranks in those steps."""
        return self.counters.global_samples

    @property
    def micro_steps(self) -> int:
        """Finished micro-batches."""
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite."""
        return self.counters.skipped_steps

    @property
    def metrics(self) -> StepMetrics | None:
        """Figures of the last optimizer step on this rank; None before the first."""
        return self._recorder.last

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed the parameters."""
        return self.counters.step_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the present micro-batch is the last of its optimizer step."""
        return self.counters.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set by hand whether micro-batches end an accumulation, from now on.

        Args:
            is_boundary: Whether the next `step` updates the parameters; None counts micro-batches again.
        """
        self.counters.set_gradient_accumulation_boundary(is_boundary)

    # What the config became, and what was set since.

    def train_batch_size(self) -> int:
        """Return the samples of an optimizer step, of all ranks together."""
        return self.counters.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch on one rank."""
        return self._settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of an optimizer step."""
        return self.counters.gradient_accumulation_steps

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO, 0 to 3."""
        return self._settings.zero_stage

    def gradient_clipping(self) -> float:
        """Return the L2 norm to which gradients are clipped; 0 is off."""
        return self._settings.gradient_clipping

    def get_loss_scale(self) -> float:
        """Return the factor that losses are multiplied with now."""
        return self.loss_scaler.loss_scale

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's gradients before clipping; None before the first step."""
        return None if self._result is None else self._result.grad_norm

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an optimizer step by changing the number of micro-batches. Collective.

        The size of a micro-batch stays. Inside an unfinished accumulation the change takes effect at the next one.

        Args:
            train_batch_size: Samples of all ranks, a multiple of micro-batch size times data-parallel ranks.

        Raises:
            ConfigError: It is not such a multiple, or the optimizer needs one micro-batch a step.
        """
        each = self.train_micro_batch_size_per_gpu() * self._data_ranks
        if train_batch_size < 1 or train_batch_size % each:
            expected = f"should be a multiple of micro-batch size * data-parallel ranks = {each}"
            raise ConfigError([Problem("train_batch_size", train_batch_size, expected, f"use {each}, for example")])
        steps = train_batch_size // each
        self._check_accumulation(steps)
        self._set_batch(steps, train_batch_size)

    def ramp_train_batch_size(self, start: int, increment: int, samples: int) -> None:
        """Let the samples of an optimizer step grow to the present `train_batch_size`. The key `rampup_batch_size`.

        Args:
            start: Samples of the first step.
            increment: How many more there are at each rise.
            samples: Over how many samples it grows.

        Raises:
            ConfigError: A size on the way is not a multiple of micro-batch size times data-parallel ranks, or the
                optimizer needs one micro-batch a step.
        """
        each = self.train_micro_batch_size_per_gpu() * self._data_ranks
        ramp = BatchRamp(start, increment, samples, self.train_batch_size())
        ramp.require(each)
        for size in range(start, ramp.target + 1, increment):
            self._check_accumulation(size // each)
        self.counters.follow(lambda seen: (ramp.at(seen) // each, ramp.at(seen)))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples that are counted in each micro-batch. Collective.

        The accumulation steps stay, so the samples of an optimizer step change; a loader that exists keeps its size.
        Inside an unfinished accumulation `global_samples` follows at the next one.

        Args:
            micro_batch_size: Samples of a micro-batch on one rank, at least 1.

        Raises:
            ConfigError: The size is below 1.
        """
        if micro_batch_size < 1:
            problem = Problem("train_micro_batch_size_per_gpu", micro_batch_size, "expected at least 1")
            raise ConfigError([problem])
        ranks, steps = self._data_ranks, self._settings.accumulation_steps
        batch = micro_batch_size * steps * ranks
        self._settings = replace(self._settings, micro_batch_size=micro_batch_size, train_batch_size=batch)
        steps = self.counters.next_accumulation_steps
        self._set_batch(steps, micro_batch_size * steps * ranks)

    def _set_batch(self, steps: int, train_batch_size: int) -> None:
        is_unfinished = self.counters.is_in_window or self.zero.holds_gradients
        self.counters.set_batch(
            gradient_accumulation_steps=steps, train_batch_size=train_batch_size, waits_for_window=is_unfinished
        )

    def _check_accumulation(self, steps: int) -> None:
        """Raise PolyaccelError where this engine cannot have so many micro-batches a step."""

    @property
    def _data_ranks(self) -> int:
        """How many ranks have their own samples."""
        return self._settings.data_ranks
