"""The profile of a torch module: operations by torch's own formulas, times at the ends of each module's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.observability.profiles import ProfileNode, ProfileSettings, report_profile, tree_of
from polyaccel.torch.profiling.operations import CountingMode


class StepProfile:
    """Looks at two forward passes that are trained on, and then reports what it saw."""

    def __init__(self, module: nn.Module, settings: ProfileSettings, numels: Mapping[str, int]) -> None:
        """`numels`: the whole sizes of parameters, by name."""
        self._settings = settings
        self._profiler: ModuleProfiler | None = None
        self._module = module
        self._numels = numels
        self._is_counted = False
        self.found: ProfileNode | None = None
        """What was reported; None before."""

    def around(self, step: int) -> AbstractContextManager[None]:
        """Around a forward pass of optimizer step `step`."""
        return nullcontext() if self.found is not None or step < self._settings.step else self._looking()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._profiler = self._profiler or ModuleProfiler(self._module, self._numels)
        with self._profiler.looking(counts=not self._is_counted, times=self._is_counted):
            yield
        if not self._is_counted:
            self._is_counted = True
            return
        self.found = self._profiler.profile()
        title = f"flops profile of step {self._settings.step}, one micro-batch of rank 0"
        report_profile(self.found, title, self._settings)
        self._profiler = None


@dataclass(slots=True)
class _Sums:
    """What one module's forward passes have had so far."""

    operations: int = 0
    calls: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)


class ModuleProfiler:
    """Counts and times the forward passes of a module and of all modules inside it, between `start` and `stop`.

    Times are the device's where it has its own queue: events at both ends, which are not waited for before the profile
    is asked for. A module that is inside twice is listed under its first name, with all its calls.
    """

    def __init__(
        self, module: nn.Module, numels: Mapping[str, int] | None = None, ignored: tuple[type[nn.Module], ...] = ()
    ) -> None:
        """Keep `numels` by name (None: the module's); classes `ignored` count for their parents."""
        self._module = module
        named = dict(module.named_parameters())
        self._numels = {name: one.numel() for name, one in named.items()} if numels is None else dict(numels)
        self._names = {one: name for name, one in module.named_modules() if not name or not isinstance(one, ignored)}
        device = next((one.device for one in named.values()), torch.device("cpu"))
        self._mark = _marker(device)
        self._sums: dict[str, _Sums] = {}
        self._handles: list[Any] = []
        self._open: list[tuple[str, int, Any]] = []
        self._counting: CountingMode | None = None
        self._uncounted: set[str] = set()
        self._times = False

    def start(self, *, counts: bool = True, times: bool = True) -> None:
        """Watch forward passes: `counts` operations, `times` durations; counting itself takes time."""
        if self._handles:
            return
        self._times = times
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        if counts:
            self._counting = CountingMode()
            self._counting.__enter__()

    def stop(self) -> None:
        """Look no more. What was seen stays until `reset`."""
        if self._counting is not None:
            self._counting.__exit__(None, None, None)
            self._uncounted |= self._counting.uncounted
            self._counting = None
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()

    def reset(self) -> None:
        """Forget what was seen."""
        self._sums.clear()
        self._uncounted.clear()

    @contextmanager
    def looking(self, *, counts: bool, times: bool) -> Iterator[None]:
        """`start` and `stop` around a block."""
        self.start(counts=counts, times=times)
        try:
            yield
        finally:
            self.stop()

    def profile(self) -> ProfileNode:
        """What was seen, as a tree. Waits for the device."""
        nodes = {}
        for module, name in self._names.items():
            sums = self._sums.get(name, _Sums())
            seconds = sum(_elapsed_s(*span) for span in sums.spans) if sums.spans else None
            inside = f"{name}." if name else ""
            numel = sum(numel for fqn, numel in self._numels.items() if fqn.startswith(inside))
            nodes[name] = ProfileNode(name, type(module).__name__, numel, sums.operations, seconds, sums.calls)
        nodes[""] = replace(nodes[""], uncounted=tuple(sorted(self._uncounted)))
        return tree_of(nodes)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        count = 0 if self._counting is None else self._counting.total
        self._open.append((self._names[module], count, self._mark() if self._times else None))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._open:
            return
        name, count, begin = self._open.pop()
        sums = self._sums.setdefault(name, _Sums())
        if self._counting is not None:
            sums.operations += self._counting.total - count
            sums.calls += 1
        if begin is not None:
            sums.spans.append((begin, self._mark()))
            sums.calls = max(sums.calls, len(sums.spans))


def profile_module(
    module: nn.Module,
    run: Callable[[], Any],
    *,
    warm_up: int = 1,
    ignored: tuple[type[nn.Module], ...] = (),
) -> ProfileNode:
    """The profile of what `run` asks of `module`: it is called `warm_up` times, once to count, and once to be timed."""
    for _ in range(warm_up):
        run()
    profiler = ModuleProfiler(module, ignored=ignored)
    with profiler.looking(counts=True, times=False):
        run()
    with profiler.looking(counts=False, times=True):
        run()
    return profiler.profile()


def _marker(device: torch.device) -> Callable[[], Any]:
    """What marks a moment on `device`: an event where it has them, else the host's clock."""
    if device.type in ("cpu", "meta"):
        return perf_counter

    def mark() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return mark


def _elapsed_s(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def inputs_of_shape(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Ones of `shape`, of the type and on the device of the module's first floating parameter."""
    first = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.ones(()))
    return torch.ones(shape, dtype=first.dtype, device=first.device)
