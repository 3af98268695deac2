"""From what happened in a step to its figures: collects, times, prints. The same for every frontend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import getLogger

from polyaccel.accelerators.base import Accelerator, MemoryStats
from polyaccel.comm.base import Communicator
from polyaccel.engine.counters import StepCounters
from polyaccel.job.readiness import STEP, report_to_launcher
from polyaccel.observability.alerts.watching import RunAlarms
from polyaccel.observability.metrics import ExpertFigures, MetricSink, StepMetrics
from polyaccel.observability.stats import CallCounter, DevicePhaseTimer, WorkCounter, by_purpose, memory_in_use
from polyaccel.observability.timing import OUTSIDE, PhaseTimer
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.zero.trained_state import TrainedMemory
from polyaccel.zero.update.optimizer_step import StepResult

log = getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """The content of progress lines, and how often they come: every so many optimizer steps (None: never).

    `phases` adds the time of each phase, `memory` what is in use; `synchronizes` waits for the device at the end of
    each step.
    """

    every: int | None = None
    phases: bool = False
    memory: bool = False
    synchronizes: bool = False


class StepRecorder:
    """Makes the `StepMetrics` of each optimizer step, hands them to `monitor`, and prints some on rank 0."""

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        *,
        reporting: Reporting,
        work: WorkCounter,
        monitor: MetricSink,
        trace: RunTrace | None = None,
        alarms: RunAlarms | None = None,
    ) -> None:
        """`accelerator` marks the device's time where phases are shown and it has streams."""
        self.work = work
        self.rank = communicator.rank
        marks = (reporting.phases or alarms is not None) and accelerator.capabilities().streams
        self.timer = PhaseTimer(DevicePhaseTimer(lambda: accelerator.current_stream().record()) if marks else None)
        self.figures: StepMetrics | None = None
        """Those of the last step, without a norm that the host has not read."""
        self._unread: StepResult | None = None
        """The update whose norm is missing there."""
        self._accelerator = accelerator
        self._communicator = communicator
        self._reporting = reporting
        self._print_every = reporting.every if communicator.rank == 0 else None
        self._monitor = monitor
        self._calls = CallCounter(communicator)
        self.trace = trace
        self.alarms = alarms
        if trace is not None:
            trace.attach(self.timer)
        self.memory: Callable[[], TrainedMemory | None] = lambda: None
        """The source of the purpose of memory."""
        self._estimated: TrainedMemory | None = None
        """Whose plan was logged."""
        self.begin()

    def begin(self) -> None:
        """Time and traffic of the next step count from here: setting a run up is not a part of its first step."""
        self.timer.take()
        self.timer.take_device()
        self._sent_before = self._communicator.sent_numel
        self._calls.take()
        if self.trace is not None:
            self.trace.after_step(0)

    @property
    def last(self) -> StepMetrics | None:
        """The figures of the last step; None before the first. Waits for a norm that is on the device still."""
        if self.figures is not None and self._unread is not None:
            norm, clipped = self._unread.grad_norm, self._unread.clipped_norm
            self.figures, self._unread = replace(self.figures, grad_norm=norm, grad_norm_clipped=clipped), None
        return self.figures

    def record(
        self,
        result: StepResult,
        counters: StepCounters,
        *,
        loss: float | None,
        lr: tuple[float, ...],
        loss_scale: float,
        experts: Mapping[str, ExpertFigures],
        steps: int = 1,
    ) -> None:
        """Make the figures of the step that has just ended; time and traffic count from the last call, and are means
        over so many `steps`. A norm on the device is left there, unless these figures are shown."""
        report_to_launcher(os.environ, self._communicator.ranks[self._communicator.rank], STEP)
        sent = self._communicator.sent_numel
        if self.work.needs_peak():
            with self.timer(OUTSIDE):
                self.work.know_peak()
        if self._reporting.synchronizes:
            self._accelerator.synchronize()
        phase_s = {phase: seconds / steps for phase, seconds in self.timer.take().items()}
        elapsed = sum(phase_s.values())
        memory = self._accelerator.memory_stats()
        prints = self._print_every is not None and counters.global_steps % self._print_every < steps
        shows = prints or self._monitor.takes_steps or self.alarms is not None
        self._unread = None if shows or result.has_arrived else result
        self.figures = figures = StepMetrics(
            step=counters.global_steps,
            loss=loss,
            lr=lr,
            grad_norm=None if self._unread else result.grad_norm,
            grad_norm_clipped=None if self._unread else result.clipped_norm,
            gradient_noise_scale=None if result.noise_ratio is None else result.noise_ratio * counters.step_samples,
            loss_scale=loss_scale,
            skipped=not result.applied,
            samples=counters.global_samples,
            step_time_s=elapsed,
            samples_per_s=counters.step_samples / elapsed,
            peak_memory_nbytes=memory.peak_nbytes,
            traffic_numel=(sent - self._sent_before) // steps,
            phase_s=phase_s,
            experts=experts,
            collectives=self._calls.take(),
            device_phase_s=self.timer.take_device(),
            memory_nbytes=self._memory_by_purpose(memory),
            planned_nbytes=self._plan_if_new(),
            **self.work.take(elapsed),
        )
        self._sent_before = sent
        self._monitor.write(figures)
        if self.alarms is not None:
            with self.timer("reduce"):
                self.alarms.after_step(figures, memory)
        if self.trace is not None:
            with self.timer(OUTSIDE):
                self.trace.after_step(figures.step)
        if prints:
            self._print(figures)

    def _memory_by_purpose(self, memory: MemoryStats) -> dict[str, int]:
        """What is in use, where anybody looks at it."""
        known = self.memory() if self._monitor.enabled or self._reporting.memory else None
        if known is None:
            return {}
        return {name: nbytes for name, nbytes in known.measured() if nbytes} | {"in use": memory.allocated_nbytes}

    def _plan_if_new(self) -> dict[str, int]:
        """The estimate, where that is looked at and was not logged before."""
        known = self.memory() if self._monitor.enabled or self._reporting.memory else None
        if known is None or known is self._estimated:
            return {}
        self._estimated = known
        return {name: nbytes for name, nbytes in known.estimated() if nbytes}

    def close(self) -> None:
        """Let the monitors write what is left, and close them."""
        self._monitor.close()

    def _print(self, metrics: StepMetrics) -> None:
        loss = "none" if metrics.loss is None else f"{metrics.loss:.4f}"
        norm = "none" if metrics.grad_norm is None else f"{metrics.grad_norm:.4g}"
        rates = ", ".join(f"{lr:.3g}" for lr in metrics.lr)
        log.info(
            "step %d: loss %s, lr %s, grad norm %s, loss scale %g, %.1f samples/s%s",
            metrics.step, loss, rates, norm, metrics.loss_scale, metrics.samples_per_s, _work_in_words(metrics),
        )  # fmt: skip
        for name, layer in metrics.experts.items():
            log.info(
                "  %s: balance %.2f, dropped %.1f %%, exchanges %.1f ms, %.1f MB",
                name, layer.balance, 100 * layer.dropped_share, 1e3 * layer.exchange_s, layer.exchanged_nbytes / 1e6,
            )  # fmt: skip
        if self._reporting.phases:
            log.info("  host ms: %s", _shares(metrics.phase_s))
            if metrics.device_phase_s:
                log.info("  device ms, of the last step that it has ended: %s", _shares(metrics.device_phase_s))
        if self._reporting.memory:
            log.info("  memory: %s", memory_in_use(self._accelerator))
            known = self.memory()
            if known is not None and (purposes := by_purpose(known.estimated())):
                log.info("  of that, by the plan: %s", purposes)
                log.info("  of that, by the buffers: %s", by_purpose(known.measured()))


def _shares(seconds: Mapping[str, float]) -> str:
    """Milliseconds by phase, and their shares, which are whole percents and add up to 100."""
    total = sum(seconds.values())
    if not total:
        return ", ".join(f"{phase} 0.0 (0 %)" for phase in seconds)
    exact = {phase: 100 * one / total for phase, one in seconds.items()}
    percents = {phase: int(one) for phase, one in exact.items()}
    by_rest = sorted(exact, key=lambda phase: percents[phase] - exact[phase])
    for phase in by_rest[: 100 - sum(percents.values())]:
        percents[phase] += 1
    return ", ".join(f"{phase} {1e3 * one:.1f} ({percents[phase]} %)" for phase, one in seconds.items())


def _work_in_words(metrics: StepMetrics) -> str:
    words = ""
    if metrics.tokens_per_s is not None:
        words += f", {metrics.tokens_per_s:.0f} tokens/s"
    if metrics.tflops is not None:
        words += f", {metrics.tflops:.3g} TFLOPS a rank"
    if metrics.model_flops_utilisation is not None:
        words += f" ({100 * metrics.model_flops_utilisation:.0f} % of a large product)"
    return words
