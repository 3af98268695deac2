"""torch's own profiler (kineto) for the steps of a trace."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.observability.traces.recorder import RunTrace

_MARK = "polyaccel clock"


class KinetoProfiler:
    """Records operators and, on a device, its kernels. One at a time in a process."""

    framework = "torch"

    def __init__(self) -> None:
        self._profile: Any = None
        self._marked_s = 0.0

    def start(self) -> None:
        """Begin. Raises RuntimeError where another profiler of torch is at work."""
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        for _ in range(2):  # the first one takes long
            with torch.profiler.record_function(_MARK):
                self._marked_s = time()

    def stop(self) -> tuple[list[dict[str, Any]], float]:
        """End; return Chrome's trace events and the shift to this rank's wall clock in microseconds."""
        profile, self._profile = self._profile, None
        profile.stop()
        with TemporaryDirectory(prefix="polyaccel-trace-") as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        marks = [event["ts"] for event in events if event.get("name") == _MARK and event["ph"] == "X"]
        shift_us = self._marked_s * 1e6 - max(marks) if marks else 0.0
        return [event for event in events if event.get("name") != _MARK], shift_us


@contextmanager
def unit_spans(module: nn.Module, units: Collection[str], trace: RunTrace) -> Iterator[None]:
    """Record forward and backward passes of `units` in `trace`; a backward ends with its input's gradient."""
    names = {one: name for name, one in module.named_modules() if name in units}
    begun: dict[nn.Module, float] = {}
    handles: list[Any] = []

    def enter(unit: nn.Module, inputs: Any, named: Any) -> None:
        begun[unit] = time()
        for leaf in tree_leaves((inputs, named)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: trace.end_unit(names[unit]))  # type: ignore[no-untyped-call]

    def leave(unit: nn.Module, inputs: Any, outputs: Any) -> None:
        trace.span("unit", f"forward {names[unit]}", begun.pop(unit, time()), time())
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: trace.begin_unit(names[unit]))  # type: ignore[no-untyped-call]

    for unit in names:
        handles.append(unit.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(unit.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def span_again(name: str, trace: RunTrace) -> Iterator[None]:
    """Record a recomputation of the block `name` in `trace`, if that is on."""
    began_s = time()
    try:
        yield
    finally:
        if trace.is_on:
            trace.span("unit", f"again {name}", began_s, time())
