"""`parameter.grad` of an engine's parameters: what user code reads there, and what it writes.

[Note: Bucketed gradients]
Gradients leave their parameters as they appear and are reduced in buckets. `parameter.grad` shows what has become of
them after the backward pass: a view of the reduced bucket where this rank has all of it (stage 0, and one rank at every
stage), a `ShardedGradient` where it has a slice. Both stand on the memory that the update reads, so what is written
there counts, in the norm and in the check for overflow too. Nothing is computed for it until it is read. A gradient
that is not reduced yet, of an accumulation that continues or inside a backward pass, is refused by name where there are
several ranks: it is this rank's own sum, and neither its norm nor its value is the gradient's. `Module.to` finds none,
for the engine's gradients stay where they are: forwards of transformers call it (Switch Transformers' router).

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

import math
import sys
from functools import cache
from logging import getLogger
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import ParamRecord, bind, record_of
from polyaccel.torch.sharding.sharded_gradient import LocalPart, ShardedGradient
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.fragments import drop_gradient, note_written, replace_gradient, shown_gradient
from polyaccel.zero.update.grad_norm import allocate_sums, read_sums, write_sums

AUTOGRAD_S: Any = Tensor.grad
"""torch's own attribute, in which autograd accumulates and from which the engine's hook takes."""
_MAKES_PARAMETERS = nn.Parameter.__new__.__code__
_CONVERTS_MODULES = nn.Module._apply.__code__
_log = getLogger(__name__)
_FITS_FLOAT32 = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8})
_KIND = "_polyaccel_kind"
"""The attribute of a class that `install_grad_property` made with the class that it was made of."""


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


class ShowsGradient(TracksAliases):
    """The `grad` of an engine's parameter. See [Note: Bucketed gradients]."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        own: Tensor | None = AUTOGRAD_S.__get__(self)
        home = record_of(self) if own is None else None  # type: ignore[arg-type]
        owner = None if home is None else home.owner
        if home is None or owner is None or sys._getframe(1).f_code is _CONVERTS_MODULES:
            return own
        return owner.gradient(home.fqn)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        home = record_of(self)  # type: ignore[arg-type]
        owner = None if home is None else home.owner
        if home is None or owner is None or not owner.set_gradient(home.fqn, value):
            AUTOGRAD_S.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor | None = memo.get(id(self))
        if copied is None:
            copied = super().__deepcopy__(memo)  # type: ignore[misc]
            remove_grad_property(copied)  # it belongs to no engine
        return copied


def install_grad_property(parameter: nn.Parameter) -> None:
    """Let `parameter.grad` be that of its engine from now on."""
    if not isinstance(parameter, ShowsGradient):
        parameter.__class__ = _revealing(type(parameter))


def remove_grad_property(parameter: Tensor) -> None:
    """Undo `install_grad_property`."""
    if (kind := type(parameter).__dict__.get(_KIND)) is not None:
        parameter.__class__ = kind


def kind_of(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor, without what `install_grad_property` added to it."""
    kind = type(tensor)
    own: type[Tensor] = kind.__dict__.get(_KIND, kind)
    return own


@cache
def _revealing(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (ShowsGradient, kind), {"__module__": kind.__module__, _KIND: kind})


class ScaledPasses(Protocol):
    """The backward passes that gradients come from."""

    hides_scaled_gradients: bool

    @property
    def loss_scale(self) -> float:
        """The factor that gradients were multiplied with."""


class GradientAccess:
    """Reads and writes gradients in the buckets of `step` for user code, and notes what it did to them.

    `trained` are the parameters that the step updates, by name; `passes` multiply gradients with the loss scale.
    """

    def __init__(self, step: ZeroEngine, trained: dict[str, nn.Parameter], passes: ScaledPasses) -> None:
        self._step = step
        self._trained = trained
        self._passes = passes
        self._has_warned = False
        self._shown: dict[str, tuple[Tensor, int]] = {}
        """Whole gradients that user code has seen, each with its version when it did."""
        self._dropped: dict[str, int] = {}
        """Gradients that user code set to None, each with the backward pass that it came from."""
        self._norms: dict[float, list[float]] = {}
        self._norms_of = -1
        """The pass after which `_norms` were computed."""

    def trains(self, fqn: str) -> bool:
        return fqn in self._trained

    def read(self, fqn: str) -> Tensor | None:
        """Return the gradient, None without one; not collective. Raises while it is not reduced."""
        if self._passes.hides_scaled_gradients and self._passes.loss_scale != 1.0:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s.grad is None while gradients are multiplied with the loss scale: what a script does to it "
                    "has no effect, for example clipping; set gradient_clipping in the config; logged once", fqn,
                )  # fmt: skip
            return None
        self._require_unscaled(fqn, "read")
        found = shown_gradient(self._step, fqn)
        if found is None:
            return None
        if self._dropped.get(fqn) == self._step.reducer.passes:
            return None
        parameter, values = self._trained[fqn], _tensor(found.values.raw)
        if not found.is_whole:
            return ShardedGradient(LocalPart(fqn, found.start, values, tuple(parameter.shape)), self)
        if not found.is_touched and not bool(values.any()):
            return None  # no rank had one
        shown = self._shown.get(fqn)
        if shown is None or shown[0].data_ptr() != values.data_ptr():
            gradient = values.view(parameter.shape).data  # with its own version counter
            self._shown[fqn] = shown = (gradient, gradient._version)
        return shown[0]

    def write(self, fqn: str, value: Tensor | None) -> None:
        """Replace the gradient by `value`, whole and equal on all ranks, or drop it; not collective."""
        if value is None:
            drop_gradient(self._step, fqn)
            self._shown.pop(fqn, None)
            self._dropped[fqn] = self._step.reducer.passes
            self._norms.clear()
            return
        self._require_unscaled(fqn, "set")
        parameter = self._trained[fqn]
        if not isinstance(value, Tensor) or value.shape != parameter.shape or value.layout is not torch.strided:
            given = f"{value.layout} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ShardingError(
                f"the gradient of {fqn!r} was set to a {given}, expected a dense tensor of {tuple(parameter.shape)}",
                hint="assign a tensor of the parameter's shape",
                value=given,
            )
        self._norms.clear()
        self._dropped.pop(fqn, None)
        if isinstance(value, ShardedGradient):
            value.part.require_of(fqn)
            part = value.part.values  # zeros where no rank had one
            replace_gradient(self._step, fqn, wrap_torch(part), is_part=True, counts=bool(part.any()))
        else:
            whole = value.detach().to(parameter.device).contiguous()
            replace_gradient(self._step, fqn, wrap_torch(whole))

    def on_sharded_write(self, fqn: str, *, is_zero: bool) -> None:
        """A `ShardedGradient` was written to. One that no rank had is zero until then, and counts once it is not."""
        self._norms.clear()
        note_written(self._step, fqn, counts=not is_zero)

    def norm(self, fqn: str, order: float) -> float:
        """Return a sharded gradient's norm over all ranks; the first call exchanges all. Collective."""
        if self._norms_of != self._step.reducer.passes:
            self._norms.clear()
            self._norms_of = self._step.reducer.passes
        if order not in self._norms:
            self._norms[order] = self._exchange_norms(order)
        return self._norms[order][list(self._trained).index(fqn)]

    def whole(self, part: LocalPart) -> Tensor:
        """Return all of what `part` is a slice of, in its type and the parameter's shape. Collective."""
        values, holders = part.values, self._step.holders(part.fqn)
        wide = DType.FLOAT32 if values.dtype in _FITS_FLOAT32 else DType.FLOAT64
        shared = holders.allocate(math.prod(part.shape), wide)
        whole = _tensor(shared.raw)
        whole[part.start : part.start + values.numel()].copy_(values)
        holders.all_reduce(shared, label="whole parameter.grad")  # zeros elsewhere, so nothing is rounded
        return whole.to(values.device, values.dtype, copy=True).view(part.shape)

    def _exchange_norms(self, order: float) -> list[float]:
        communicator = self._step.communicator
        powers = allocate_sums(self._step.accelerator, communicator, len(self._trained))
        mine = read_sums(powers)
        for index, fqn in enumerate(self._trained):
            found = shown_gradient(self._step, fqn)
            if found is not None and found.values.numel:
                norm = float(torch.linalg.vector_norm(_tensor(found.values.raw).double(), order))
                mine[index] = norm if order == float("inf") else norm**order
        write_sums(powers, mine)
        op = ReduceOp.MAX if order == float("inf") else ReduceOp.SUM
        communicator.all_reduce(powers, op, label="norms of parameter.grad")
        total = read_sums(powers)
        return [power if order == float("inf") else power ** (1.0 / order) for power in total]

    def note_writes(self) -> None:
        """Note which whole gradients user code has written to since it saw them: an update follows."""
        for fqn, (gradient, version) in self._shown.items():
            if gradient._version != version:
                self._step.reducer.user_edits.written.add(fqn)

    def forget(self) -> None:
        """The gradients are gone: used by an update, or discarded."""
        self._shown.clear()
        self._dropped.clear()
        self._norms.clear()

    def _require_unscaled(self, fqn: str, verb: str) -> None:
        if (scale := self._passes.loss_scale) != 1.0 and (verb == "set" or self._step.holds_gradients):
            raise ShardingError(
                f"the gradient of {fqn!r} was {verb} while gradients are multiplied with the loss scale {scale:g}",
                hint='clip with "gradient_clipping" in the config; polyaccel.utils.safe_get_full_grad and '
                "safe_set_full_grad read and write it without the scale; bf16 needs none",
                value=fqn,
            )


def _tensor(raw: Any) -> Tensor:
    """A buffer's memory as a tensor."""
    return raw if isinstance(raw, Tensor) else torch.from_numpy(raw)


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
