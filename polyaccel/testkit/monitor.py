"""The contract of monitors as tests: subclass `MonitorContract` and say how to make yours.

The suite makes every call that an engine makes. It cannot know where and how a monitor writes.
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

from polyaccel.engine.metrics import Monitor, StepMetrics
from polyaccel.testkit.contract import refused
from polyaccel.types import Probe

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


class MonitorContract(ABC):
    """The tests that every monitor passes."""

    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The options that `opened` gives it."""

    @abstractmethod
    def make(self) -> Monitor: ...

    @contextmanager
    def opened(self) -> Iterator[Monitor]:
        """A monitor that is open in an empty folder."""
        with tempfile.TemporaryDirectory() as folder:
            monitor = self.make()
            monitor.open(Path(folder, "run"), self.options)
            try:
                yield monitor
            finally:
                monitor.close()

    def test_probes(self) -> None:
        probe = type(self.make()).probe()
        assert isinstance(probe, Probe)
        assert probe.reason

    def test_steps_of_every_kind_are_written(self) -> None:
        with self.opened() as monitor:
            for metrics in (_STEP, _OVERFLOW, _SPARSE):
                monitor.write(metrics)

    def test_events_are_written(self) -> None:
        with self.opened() as monitor:
            monitor.write_events([("accuracy", 0.5, 1), ("loss", math.nan, 2)])
            monitor.write_events([])
            monitor.write_events(event for event in [("accuracy", 1, 3)])

    def test_a_run_is_gone_on_with(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                monitor = self.make()
                monitor.open(Path(folder), self.options)
                monitor.write(_STEP)
                monitor.close()

    def test_closing_is_always_allowed(self) -> None:
        self.make().close()
        with self.opened() as monitor:
            monitor.close()

    def test_unknown_options_are_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            monitor, options = self.make(), {**self.options, "no_such_option": 1}
            try:
                refused(lambda: monitor.open(Path(folder), options), "an option that does not exist")
            finally:
                monitor.close()
