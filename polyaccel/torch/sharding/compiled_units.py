"""Modules whose parameters are gathered around them, compiled one by one.

[Note: Compiled units]
A graph of `torch.compile` cannot contain a gather, so it ends where a unit begins and ends. torch would break the
model's forward there, once for each unit, and continue in functions that it compiles for each turn of the loop over
blocks: after eight turns it gives up. So the forward of each unit is compiled, inside of its hooks, which the compiler
never sees: no graph breaks for a gather, and units of one class share a graph. What is between units runs as it is.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

SPARE_GRAPHS = 8
"""Graphs that torch allows for one function, by default, for other reasons than the number of units."""


class UnitForward:
    """What stands for the forward of one unit. A copy of the unit gets the ordinary one, and so does one unpickled."""

    def __init__(self, module: nn.Module, named: dict[str, Any], args: Sequence[Any]) -> None:
        self.module = module
        self.before: Any = module.__dict__.get("forward")
        self._compiled = torch.compile(module.forward, *args, **named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._compiled(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.module))
        return self if copy is None else types.MethodType(type(self.module).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.module, "forward")  # whose attributes are not there yet when this is called


class CompiledUnits:
    """The forwards of `modules`, compiled with these arguments of `torch.compile`. `release` gives them back."""

    def __init__(self, modules: Iterable[nn.Module], args: Sequence[Any], named: dict[str, Any]) -> None:
        units = list(modules)
        self._forwards: list[UnitForward] = []
        named = _allowing(len(units) + SPARE_GRAPHS, named)
        for module in units:
            module.__dict__["forward"] = forward = UnitForward(module, named, args)
            self._forwards.append(forward)

    def release(self) -> None:
        for forward in self._forwards:
            if forward.module.__dict__.get("forward") is forward:
                del forward.module.__dict__["forward"]
                if forward.before is not None:
                    forward.module.__dict__["forward"] = forward.before
        self._forwards.clear()


def suits_units(module: nn.Module) -> bool:
    """Whether compiling `module` by itself gains anything: not one of torch's own layers."""
    return not type(module).__module__.startswith("torch.nn.modules")


def _allowing(graphs: int, named: dict[str, Any]) -> dict[str, Any]:
    """`named` with leave for so many graphs of a function: units may differ in a number, as in that of their layer."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": graphs, **named}
    import torch._dynamo.config as limits  # a torch before 2.13, which has one limit for all

    limits.recompile_limit = max(limits.recompile_limit, graphs)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, graphs)
    return named
