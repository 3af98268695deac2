"""The profile of one step of an engine: its first micro-batch is counted, the next one timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from polyaccel.observability.profiles.report import ProfileSettings, report_profile
from polyaccel.torch.profiling.profiler import ModuleProfiler


class StepProfile:
    """Looks at two forward passes that are trained on, and then reports what it saw."""

    def __init__(self, module: nn.Module, settings: ProfileSettings, numels: Mapping[str, int]) -> None:
        """`numels`: the whole sizes of parameters, by name."""
        self._settings = settings
        self._profiler: ModuleProfiler | None = None
        self._module = module
        self._numels = numels
        self._is_counted = False
        self._is_done = False

    def around(self, step: int) -> AbstractContextManager[None]:
        """Around a forward pass of optimizer step `step`."""
        return nullcontext() if self._is_done or step < self._settings.step else self._looking()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._profiler = self._profiler or ModuleProfiler(self._module, self._numels)
        with self._profiler.looking(counts=not self._is_counted, times=self._is_counted):
            yield
        if not self._is_counted:
            self._is_counted = True
            return
        self._is_done = True
        title = f"flops profile of step {self._settings.step}, one micro-batch of rank 0"
        report_profile(self._profiler.profile(), title, self._settings)
        self._profiler = None
