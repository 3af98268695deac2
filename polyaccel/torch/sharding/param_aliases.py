"""Parameters whose memory users took hold of past autograd: `p.data`, `p.detach()`, `p.numpy()`, `p.data = ...`.

[Note: Parameter aliases]
An in-place operation on a parameter, or on a view of it, raises its version counter. What is written through `p.data`
or a numpy array does not. So a parameter of an engine is marked when it gives an alias away (`ParamRecord`), and
before the next update its values are looked at. The mark stays for as long as memory of its bucket is held elsewhere.

`p.data = values` would cut the parameter off from the engine's memory. It copies the values there instead.

torch makes a Parameter of a Parameter, `nn.Parameter(p)`, by `p.detach()`, and refuses one whose alias is of another
class than it is itself. So there, and only there, the alias has that class. A compiled graph is spared the marks: its
compiler could not follow into the dictionary of homes, and keeps track of what the graph writes by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import ParamRecord, bind, record_of

_MAKES_PARAMETERS = nn.Parameter.__new__.__code__


class TracksAliases:
    """The ways to the memory of an engine's parameter past autograd. See [Note: Parameter aliases]."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.detach(self)  # type: ignore[arg-type]
        values: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        _mark(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        home = record_of(self)  # type: ignore[arg-type]
        if home is None or home.owner is None or not home.is_whole or not isinstance(values, Tensor):
            bind(self, values)  # type: ignore[arg-type]
        else:
            _mark(self)
            _overwrite(self, values, home)  # type: ignore[arg-type]

    def detach(self) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.detach(self)  # type: ignore[arg-type]
        alias = Tensor.detach(self)  # type: ignore[arg-type]
        _mark(self)
        if sys._getframe(1).f_code is _MAKES_PARAMETERS:
            alias.__class__ = type(self)  # type: ignore[assignment]
        return alias

    def numpy(self, *, force: bool = False) -> Any:
        array = Tensor.numpy(self, force=force)  # type: ignore[arg-type]
        _mark(self)
        return array

    def __dlpack__(self, **kwargs: Any) -> Any:
        capsule = Tensor.__dlpack__(self, **kwargs)  # type: ignore[arg-type]
        _mark(self)
        return capsule


def _mark(parameter: TracksAliases) -> None:
    home = record_of(parameter)  # type: ignore[arg-type]
    if home is not None:
        home.is_handed_out = True


def _overwrite(parameter: nn.Parameter, values: Tensor, home: ParamRecord) -> None:
    """Copy `values` to where `parameter` stands, unless they stand there already."""
    _require_alike(parameter, values, home)
    if values.data_ptr() != parameter.data_ptr() or values.stride() != parameter.stride():
        with torch.no_grad():
            parameter.copy_(values.detach().clone() if _share_memory(values, parameter) else values.detach())


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _require_alike(parameter: nn.Parameter, values: Tensor, home: ParamRecord) -> None:
    """Raise ShardingError for `values` that cannot stand where the engine has the parameter."""
    before, after = _described(parameter), _described(values)
    if before == after:
        return
    raise ShardingError(
        f"parameter {home.fqn!r} belongs to an engine, which holds it as {before}; it cannot become {after} "
        "(parameter.data = ..., module.to, .double, .half, .bfloat16)",
        hint="convert or move the module before polyaccel.initialize; in training the config chooses precision "
        '("bf16", "fp16") and device; engine.destroy() gives the module back',
        value=home.fqn,
    )


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
