"""The work of a torch engine's forward passes, counted once for each shape of their inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from logging import getLogger
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.core.types import ParamSpec
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.recording import StepRecorder
from polyaccel.observability.profiles import ProfileNode
from polyaccel.torch.profiling.kineto import KinetoProfiler, unit_spans
from polyaccel.torch.profiling.operations import CountingMode
from polyaccel.torch.profiling.profiler import StepProfile
from polyaccel.torch.settings import ModuleSettings

log = getLogger(__name__)

_MOST_SHAPES = 64
_SIZES = (512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.01
_TRIES = 5
_peaks: dict[tuple[str, torch.dtype], float] = {}


class ForwardWork:
    """Counts tokens and operations of forward passes in `counter`, if that is enabled.

    The first pass with inputs of new shapes runs under torch's dispatcher, which takes longer; others cost a look-up.
    Of more than `_MOST_SHAPES` shapes, further ones are counted by tokens, as those of the last one were.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: ModuleSettings,
        recorder: StepRecorder,
        steps: StepCounters,
        specs: Sequence[ParamSpec],
        units: Collection[str],
    ) -> None:
        """`specs` are the parameters of `module` as they are whole, `units` the names of modules in traces."""
        self._module, self._units = module, units
        self._trace = recorder.trace
        if self._trace is not None:
            self._trace.profile_by(KinetoProfiler())
        self._counter = counter = recorder.work
        self._steps = steps
        self._profile: StepProfile | None = None
        if settings.profile is not None and recorder.rank == 0:
            self._profile = StepProfile(module, settings.profile, {spec.fqn: spec.numel for spec in specs})
        self._known: dict[tuple[Any, ...], int] = {}
        self._last = (0, 0)
        self._uncounted: set[str] = set()
        """The operations that were named as not counted."""
        floating = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
        if floating is not None:
            device, dtype = floating.device, settings.autocast_dtype or floating.dtype
            counter.measure_peak = lambda: measured_peak(device, dtype)

    @property
    def profile(self) -> ProfileNode | None:
        """The profile that the config asks for; None before it was reported."""
        return None if self._profile is None else self._profile.found

    def forward_pass(self, inputs: Any, named: Any, *, counts: bool) -> AbstractContextManager[None]:
        """Around a forward pass; `counts`: it is trained on."""
        if not counts or not (self._profile or self._counter.enabled or self._trace):
            return nullcontext()
        return self._watched(inputs, named)

    @contextmanager
    def _watched(self, inputs: Any, named: Mapping[str, Any]) -> Iterator[None]:
        counted = self._counted(inputs, named) if self._counter.enabled else nullcontext()
        profiled = nullcontext() if self._profile is None else self._profile.around(self._steps.global_steps + 1)
        is_traced = self._trace is not None and self._trace.is_on
        with counted, profiled, self._traced() if is_traced else nullcontext():
            yield

    def _traced(self) -> AbstractContextManager[None]:
        assert self._trace is not None  # asked before
        return unit_spans(self._module, self._units, self._trace)

    @contextmanager
    def _counted(self, inputs: Any, named: Mapping[str, Any]) -> Iterator[None]:
        tensors = [leaf for leaf in tree_leaves((inputs, dict(named))) if isinstance(leaf, Tensor)]
        key = tuple((leaf.shape, leaf.dtype) for leaf in tensors)
        tokens = tokens_of(tensors)
        operations = self._known.get(key)
        if operations is None and len(self._known) >= _MOST_SHAPES:
            operations = self._last[1] * tokens // self._last[0] if self._last[0] else self._last[1]
        if operations is None:
            with CountingMode() as counted:
                yield
            self._known[key] = operations = counted.total
            if new := sorted(counted.uncounted - self._uncounted):
                self._uncounted.update(new)
                log.warning("timers.throughput: tflops leave out %s, which have no formula", ", ".join(new))
            self._last = tokens, operations
        else:
            yield
        self._counter.add(tokens, operations)


def tokens_of(tensors: list[Tensor]) -> int:
    """Return the tokens of a micro-batch: its first 2-d tensor of integers; 0 without one."""
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            return tensor.numel()
    return 0


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure operations a second of square products of `dtype` on `device`, once a process."""
    key = str(device), dtype
    if key not in _peaks:
        _peaks[key] = _measure(device, dtype)
    return _peaks[key]


def product_speed(accelerator: Accelerator) -> float:
    """Operations a second of large float32 products, or of bfloat16 where `accelerator` is a separate device."""
    device = torch_device_of(accelerator)
    return measured_peak(device, torch.float32 if device.type == "cpu" else torch.bfloat16)


@torch.no_grad()
def _measure(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for size in _SIZES:
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        times = []
        for _ in range(_TRIES):
            _settle(device)
            began = perf_counter()
            torch.mm(left, right)
            _settle(device)
            times.append(perf_counter() - began)
        best = max(best, 2 * size**3 / min(times))
        if min(times) >= _LONG_ENOUGH_S:
            break
    return best


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
