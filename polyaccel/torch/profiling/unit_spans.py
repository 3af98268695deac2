"""The forward and backward of a module's units in a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import time
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.observability.traces.recorder import RunTrace


@contextmanager
def unit_spans(module: nn.Module, units: Collection[str], trace: RunTrace) -> Iterator[None]:
    """Record in `trace` the forward passes of the modules named `units` that run inside, and of the backward passes
    that follow: from the first gradient of an output to that of an input, which a unit may lack; then its backward ends
    with the whole one."""
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
