"""From what happened in a step to its figures: collects, times, prints. The same for every frontend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import getLogger

from polyaccel.accelerators.base import Accelerator
from polyaccel.arrival import STEP, tell_launcher
from polyaccel.comm.base import Communicator
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.metrics import ExpertFigures, MetricSink, StepMetrics
from polyaccel.engine.timing import PhaseTimer
from polyaccel.zero.update.walk import StepResult

log = getLogger(__name__)


class StepRecorder:
    """Makes the `StepMetrics` of each optimizer step, hands them to `monitor`, and prints every `print_every`-th on
    rank 0 (None: none). `print_phases` adds where the host's time went."""

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        *,
        print_every: int | None,
        print_phases: bool,
        monitor: MetricSink,
    ) -> None:
        self.timer = PhaseTimer()
        self.last: StepMetrics | None = None
        self._accelerator = accelerator
        self._communicator = communicator
        self._print_every = print_every if communicator.rank == 0 else None
        self._print_phases = print_phases
        self._monitor = monitor
        self.begin()

    def begin(self) -> None:
        """Time and traffic of the next step count from here: setting a run up is no part of its first step."""
        self.timer.take()
        self._sent_before = self._communicator.sent_numel

    def record(
        self,
        result: StepResult,
        counters: StepCounters,
        *,
        loss: float | None,
        lr: tuple[float, ...],
        loss_scale: float,
        experts: Mapping[str, ExpertFigures],
    ) -> StepMetrics:
        """The figures of the step that has just ended; time and traffic count from the last call."""
        tell_launcher(os.environ, self._communicator.ranks[self._communicator.rank], STEP)
        sent = self._communicator.sent_numel
        phase_s = self.timer.take()
        elapsed = sum(phase_s.values())
        self.last = StepMetrics(
            step=counters.global_steps,
            loss=loss,
            lr=lr,
            grad_norm=result.grad_norm,
            grad_norm_clipped=result.clipped_norm,
            loss_scale=loss_scale,
            skipped=not result.applied,
            samples=counters.global_samples,
            step_time_s=elapsed,
            samples_per_s=counters.train_batch_size / elapsed,
            peak_memory_nbytes=self._accelerator.memory_stats().peak_nbytes,
            traffic_numel=sent - self._sent_before,
            phase_s=phase_s,
            experts=experts,
        )
        self._sent_before = sent
        self._monitor.write(self.last)
        if self._print_every is not None and self.last.step % self._print_every == 0:
            self._print(self.last)
        return self.last

    def close(self) -> None:
        """Let the monitors write what is left, and close them."""
        self._monitor.close()

    def _print(self, metrics: StepMetrics) -> None:
        loss = "none" if metrics.loss is None else f"{metrics.loss:.4f}"
        norm = "none" if metrics.grad_norm is None else f"{metrics.grad_norm:.4g}"
        rates = ", ".join(f"{lr:.3g}" for lr in metrics.lr)
        log.info(
            "step %d: loss %s, lr %s, grad norm %s, loss scale %g, %.1f samples/s",
            metrics.step, loss, rates, norm, metrics.loss_scale, metrics.samples_per_s,
        )  # fmt: skip
        for name, layer in metrics.experts.items():
            log.info(
                "  %s: balance %.2f, dropped %.1f %%, exchanges %.1f ms, %.1f MB",
                name, layer.balance, 100 * layer.dropped_share, 1e3 * layer.exchange_s, layer.exchanged_nbytes / 1e6,
            )  # fmt: skip
        if self._print_phases:
            log.info("  host ms: %s", ", ".join(f"{phase} {1e3 * s:.1f}" for phase, s in metrics.phase_s.items()))
