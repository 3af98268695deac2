"""The contract of monitors as tests: subclass `MonitorContract` and implement `make`.

The suite makes every call that an engine makes. Where and how a monitor writes is its own matter: its own `read` reads
back what it wrote.
"""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import SkipTest

from polyaccel.core.types import Probe
from polyaccel.errors import ConfigError
from polyaccel.observability.metrics import Monitor, StepMetrics
from polyaccel.testkit.comparison import equal, refused, same_numbers

_STEP = StepMetrics(
    step=1,
    loss=2.5,
    lr=(1e-3, 1e-4),
    grad_norm=1.25,
    grad_norm_clipped=1.0,
    samples=8,
    step_time_s=0.5,
    peak_memory_nbytes=1 << 30,
    phase_s={"backward": 0.25},
)
_OVERFLOW = StepMetrics(step=2, loss=math.nan, lr=(1e-3,), grad_norm=math.inf, loss_scale=2.0**16, skipped=True)
_SPARSE = StepMetrics(step=3, loss=None, lr=())
_STEPS = 40


class MonitorContract(ABC):
    """The tests that every monitor passes."""

    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The options that `opened` gives it."""

    @abstractmethod
    def make(self) -> Monitor:
        """Return a new monitor, not open."""

    @contextmanager
    def opened(self) -> Iterator[Monitor]:
        """Open a monitor in an empty folder, and close it at the end of the context.

        Yields:
            The monitor.
        """
        with tempfile.TemporaryDirectory() as folder:
            monitor = self.make()
            monitor.open(Path(folder, "run"), self.options)
            try:
                yield monitor
            finally:
                monitor.close()

    def test_probes(self) -> None:
        """The probe reports whether the monitor could be used here, and why: `doctor` shows it."""
        probe = type(self.make()).probe()
        equal(type(probe), Probe, "type of what probe() gives")
        equal(bool(probe.reason), True, "whether probe() gives a reason")

    def test_steps_of_every_kind_are_written(self) -> None:
        """A step with all figures, one that overflowed and one with hardly any are taken: losses are NaN now and
        then."""
        with self.opened() as monitor:
            for metrics in (_STEP, _OVERFLOW, _SPARSE):
                monitor.write(metrics)

    def test_events_are_written(self) -> None:
        """Events of any iterable are taken, NaN and integers among them: they are users' own."""
        with self.opened() as monitor:
            monitor.write_events([("accuracy", 0.5, 1), ("loss", math.nan, 2)])
            monitor.write_events([])
            monitor.write_events(event for event in [("accuracy", 1, 3)])

    def test_what_was_written_is_read_back(self) -> None:
        """Every step and event that was written is there once the monitor was closed, those of an earlier run of the
        folder too: a curve with holes misleads."""
        with tempfile.TemporaryDirectory() as folder:
            for part in (range(1, _STEPS // 2 + 1), range(_STEPS // 2 + 1, _STEPS + 1)):
                monitor = self.make()
                monitor.open(Path(folder), self.options)
                for step in part:
                    monitor.write(StepMetrics(step=step, loss=1 / step, lr=(1e-3,)))
                    monitor.write_events([("accuracy", step / _STEPS, step)])
                monitor.close()
            read = self.make().read(Path(folder), self.options)
            if read is None:
                raise SkipTest("has no `read`, by which to see what it wrote")
            rows = list(read)
        steps = range(1, _STEPS + 1)
        for tag, written in (("loss", [1 / step for step in steps]), ("accuracy", [step / _STEPS for step in steps])):
            found = {step: value for name, value, step in rows if name == tag}
            missing = [step for step in steps if step not in found]
            equal(missing, [], f"steps of {_STEPS} whose {tag!r} was written and cannot be read")
            values = [math.nan if value is None else value for value in map(found.get, steps)]
            same_numbers(values, written, f"{tag!r}, by step from 1", rtol=1e-6)

    def test_a_run_is_gone_on_with(self) -> None:
        """A monitor opens the folder of an earlier run and continues there: jobs are restarted."""
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                monitor = self.make()
                monitor.open(Path(folder), self.options)
                monitor.write(_STEP)
                monitor.close()

    def test_closing_is_always_allowed(self) -> None:
        """`close` may be called without `open`, and twice: engines end in every state."""
        self.make().close()
        with self.opened() as monitor:
            monitor.close()

    def test_unknown_options_are_refused(self) -> None:
        """An option that the monitor does not have is a ConfigError: a typing mistake must not be silence."""
        with tempfile.TemporaryDirectory() as folder:
            monitor, options = self.make(), {**self.options, "no_such_option": 1}
            try:
                refused(lambda: monitor.open(Path(folder), options), "an option that does not exist", ConfigError)
            finally:
                monitor.close()
