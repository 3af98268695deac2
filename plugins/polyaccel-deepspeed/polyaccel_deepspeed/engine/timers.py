"""`deepspeed.utils.timer`: clocks that scripts start and stop by name, on events of the device where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel_deepspeed.accelerator import get_accelerator
from polyaccel_deepspeed.utils import print_dist

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"


class CudaEventTimer:
    """The time between two events of the device."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event, self.end_event = start_event, end_event

    def get_elapsed_msec(self) -> float:
        """Wait for the second event, and return the milliseconds since the first."""
        get_accelerator().current_stream().wait_event(self.end_event)
        self.end_event.synchronize()
        return float(self.start_event.elapsed_time(self.end_event))


class Clock:
    """A clock that may run several times; `elapsed` and `mean` are milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.elapsed_records: list[float] = []
        self._began: Any = None
        self._intervals: list[Callable[[], float]] = []

    def start(self) -> None:
        """Start the clock. Raises PolyaccelError if it runs."""
        if self.started_:
            raise PolyaccelError(f"timer {self.name_!r} was started twice", hint="stop it first", value=self.name_)
        self._began, self.started_ = _now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the clock; `reset` forgets earlier intervals. Raises PolyaccelError if it does not run."""
        if not self.started_:
            raise PolyaccelError(f"timer {self.name_!r} does not run", hint="start it first", value=self.name_)
        began, ended = self._began, _now()
        if reset:
            self._intervals.clear()
        self._intervals.append(lambda: _milliseconds(began, ended))
        self.started_ = False

    def reset(self) -> None:
        """Forget all intervals."""
        self.started_, self._began = False, None
        self._intervals.clear()
        self.elapsed_records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum of all intervals, a running one too, which then starts again."""
        is_running = self.started_
        if is_running:
            self.stop()
        self._settle()
        total = sum(self.elapsed_records)
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean of the intervals, without the tenth that is shortest and the tenth that is longest."""
        self._settle()
        return trim_mean(self.elapsed_records, 0.1)

    def _settle(self) -> None:
        self.elapsed_records += [interval() for interval in self._intervals]
        self._intervals.clear()


class SynchronizedWallClockTimer:
    """Clocks by name."""

    Timer = Clock

    def __init__(self) -> None:
        self.timers: dict[str, Clock] = {}

    def get_timers(self) -> dict[str, Clock]:
        """Return the clocks."""
        return self.timers

    def __call__(self, name: str) -> Clock:
        """Return the clock of a name, made when it is first asked for."""
        return self.timers.setdefault(name, Clock(name))

    @staticmethod
    def memory_usage() -> str:
        """Return the memory of the device that is in use and was, as a line."""
        device, gib = get_accelerator(), 1024**3
        used, most = device.memory_allocated() / gib, device.max_memory_allocated() / gib
        return f"mem_allocated: {used:.4f} GB | max_mem_allocated: {most:.4f} GB"

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of clocks, divided by `normalizer`, on rank 0 or on `ranks`."""
        _require_positive(normalizer)
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        print_dist(" | ".join(["time (ms)", *parts]), ranks=list(ranks or [0]))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean of clocks in microseconds, divided by `normalizer`, as DeepSpeed does."""
        _require_positive(normalizer)
        return {name: self.timers[name].mean() * 1000.0 / normalizer for name in names if name in self.timers}


class NoopTimer:
    """Clocks that measure nothing."""

    class Timer:
        """A clock that stands still."""

        def start(self) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Do nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """Return 0."""
            return 0

        def mean(self) -> float:
            """Return 0."""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Any:
        """Return the one clock."""
        return self.timer

    def get_timers(self) -> Mapping[str, Any]:
        """Return no clocks."""
        return {}

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Return nothing."""


class ThroughputTimer:
    """How many samples a second a loop trains. `config` has `enabled` and `synchronized`, as `timers.throughput`."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        """The first `start_step` steps are not counted."""
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = print if logging_fn is None else logging_fn
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._began: float | None = None

    def update_epoch_count(self) -> None:
        """Begin another epoch, whose micro-batches are counted from zero."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch."""
        if self.config.enabled and self.global_step_count >= self.start_step:
            self._synchronise()
            self._began = perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch; `global_step` ends an optimizer step, which is printed each `steps_per_output` of them."""
        if not self.config.enabled:
            return
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._began is None:
            return
        self._synchronise()
        duration, self._began = perf_counter() - self._began, None
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                now = self.batch_size / self.step_elapsed_time
                self.logging(
                    f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count},"
                    f" RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}"
                )
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the mean over the counted steps; minus infinity before there is one."""
        counted = self.global_step_count - self.start_step
        if counted <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * counted / self.total_elapsed_time

    def _synchronise(self) -> None:
        if self.config.synchronized:
            get_accelerator().synchronize()


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of `data` without `trim_percent` of it at both ends; 0 of nothing.

    Raises PolyaccelError unless the part is from 0 to 1.
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise PolyaccelError(f"trim_percent = {trim_percent}", hint="use a part from 0 to 1", value=trim_percent)
    count = len(data)
    if not count:
        return 0
    ordered, left_out = sorted(data), round(count * trim_percent)
    kept = ordered[left_out : count - left_out]
    return sum(kept) / len(kept) if kept else 0


def _require_positive(normalizer: float) -> None:
    if normalizer <= 0.0:
        raise PolyaccelError(f"normalizer = {normalizer}", hint="use a number above 0", value=normalizer)


def _now() -> Any:
    """The host's time, or an event that the device records now."""
    device = get_accelerator()
    if device.use_host_timers():
        return perf_counter()
    event = device.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began) * 1000.0
    return CudaEventTimer(began, ended).get_elapsed_msec()
