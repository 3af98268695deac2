"""Which engine owns a parameter, and whether the parameter still has the values that its engine has.

`record_of` is the way from a parameter that a user holds to its engine. Homes are kept next to the parameters, not on
them, so that parameters pickle and copy like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from polyaccel.errors import ShardingError
from polyaccel.zero.engine import ZeroEngine


class ShardedUse(Protocol):
    """The sharded parameters of an engine, as operations and functions use them."""

    def try_unshard(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Make `parameters` whole if that is safe now; False if it is not."""

    def handle_state_dict_op(self, func: Callable[..., Any], *args: Any) -> Any:
        """Handle an operation of saving or loading on a sharded parameter; None if it is not one."""

    def saved_tensor_hooks(self) -> saved_tensors_hooks | None:
        """Return hooks by which new graphs find gathered parameters in backward, until exit."""

    def register_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather `parameter` around `module` too, if it is sharded."""

    def unregister_external(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Undo `register_external`."""


class ParameterOwner(Protocol):
    """The adapter of an engine, as the functions see it that users call with one of its parameters.

    A protocol, because `TorchAdapter` records itself here: the class itself would close a cycle of imports.
    """

    checks_contents: bool
    """Look for changes of gathered parameters at their values, not only at their version counters."""

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The parameters of the engine, with their full names."""

    @property
    def engine_number(self) -> int:
        """Engines of a rank count from 1 in the order in which they were made."""

    @property
    def engine_name(self) -> str:
        """The engine in messages: its number, and the class of its model."""

    def hand_over(self, to: str) -> None:
        """Close the engine, whose parameters `to` gets. Collective where they are sharded."""

    @property
    def step(self) -> ZeroEngine:
        """Return the parameters' ZeRO step. Raises ShardingError when closed or offloaded."""

    @property
    def gradient_scale(self) -> float:
        """The gradients that the step holds were multiplied with this."""

    @property
    def unsharded_access_hint(self) -> tuple[str, str]:
        """Explain why a parameter is unavailable and how to access it."""

    @property
    def sharding(self) -> ShardedUse:
        """The uses of sharded parameters."""

    def parameter(self, fqn: str) -> nn.Parameter: ...

    def gradient(self, fqn: str) -> Tensor | None:
        """The gradient that `parameter.grad` shows."""

    def set_gradient(self, fqn: str, value: Tensor | None) -> bool:
        """Take over what is assigned to `parameter.grad`; False if the engine does not train that parameter."""

    def is_sharded(self, fqn: str) -> bool:
        """Whether a parameter is whole only while it is gathered."""

    def adopt_changes(self) -> None:
        """Take over what users wrote into parameters since the last update. Collective."""

    def adopt_here(self, fqn: str) -> None:
        """Take over this rank's writes to a parameter and its memory; the next update compares ranks."""

    def on_update(self) -> None:
        """The parameters have new values: graphs built on the old ones must not be used any more."""


@dataclass(eq=False)
class ParamRecord:
    """Where a parameter's values live, and which adapter owns it.

    `version` is its version counter when its values were last those that the engine knows, and `is_handed_out` says
    that users may write to it without raising that ([Note: Parameter aliases]). `is_whole` is False while it
    is sharded: then its tensor is `placeholder`, without values, and `kind` is the class that it will have again.
    `openings` counts the `GatheredParameters` that it is open in. `memory` is the address of the buffer that it stands
    in for good, 0 for a sharded one.
    """

    fqn: str
    owner_ref: ReferenceType[ParameterOwner]
    version: int
    is_handed_out: bool = False
    is_whole: bool = True
    kind: type[nn.Parameter] = nn.Parameter
    placeholder: Tensor | None = None
    openings: int = 0
    memory: int = 0

    @property
    def owner(self) -> ParameterOwner | None:
        """The adapter; None once its engine is gone."""
        return self.owner_ref()


_homes = WeakIdKeyDictionary()


def record_of(parameter: Tensor) -> ParamRecord | None:
    """The home of a parameter; None if it belongs to no engine."""
    home: ParamRecord | None = _homes.get(parameter)  # type: ignore[no-untyped-call]
    return home


def bind(parameter: Tensor, values: Tensor) -> None:
    """Let `parameter` stand on the memory of `values`, whatever `parameter.data = ...` means for users."""
    Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]


def has_changed(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` was written to since its version was noted."""
    home = record_of(parameter)
    return home is not None and parameter._version != home.version


def is_handed_out(parameter: nn.Parameter) -> bool:
    """Whether users may write to `parameter` without raising its version ([Note: Parameter aliases])."""
    home = record_of(parameter)
    return home is not None and home.is_handed_out


def note_version(parameter: nn.Parameter) -> None:
    """Note that the engine has the present values of `parameter`."""
    home = record_of(parameter)
    if home is not None:
        home.version = parameter._version


def _references(parameter: Tensor) -> int:
    """How many tensors stand on the memory of `parameter`."""
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


def _require_own_memory(parameter: nn.Parameter, home: ParamRecord) -> None:
    """Raise ShardingError where `parameter` stands in other memory than its engine's."""
    if home.memory and parameter.untyped_storage().data_ptr() != home.memory:
        raise ShardingError(
            f"parameter {home.fqn!r} was given other memory than its engine's (parameter.set_, or a library that "
            "lays weights out again)",
            hint="write the values into the memory that is there: parameter.copy_(values) under torch.no_grad()",
            value=home.fqn,
        )


class OwnedParameters:
    """The parameters of `module`, which belong to `owner` until `leave`: their names, and changes by users. Those that
    are not `trained` and require no gradient are `frozen`.

    Tied parameters appear once, under their first name.
    """

    def __init__(self, module: nn.Module, owner: ParameterOwner, trained: Collection[str] = ()) -> None:
        self.by_name = dict(module.named_parameters())
        self.names = {parameter: fqn for fqn, parameter in self.by_name.items()}
        """Each parameter's fully qualified name."""
        self.homes: dict[str, ParamRecord] = {}
        for fqn, parameter in self.by_name.items():
            self.homes[fqn] = _homes[parameter] = ParamRecord(fqn, ref(owner), parameter._version)
        self.frozen = {
            fqn: parameter
            for fqn, parameter in self.by_name.items()
            if not parameter.requires_grad and fqn not in trained
        }
        self.lost_writes: list[str] = []
        """The parameters that were changed while they were gathered for a pass, whose changes are lost."""
        self._members_of: dict[int, list[nn.Parameter]] = {}
        """The parameters in each piece of memory, by its address."""
        self._seen_by_engine: set[int] = set()
        """The memory of which the engine itself sees what users write there, by its address."""
        self._references: dict[int, int] = {}
        """How many tensors stood on each piece of memory when none had been handed out."""
        self._module = module
        self._parts = list(module.modules())  # kept, so that no new object has the address of an old one
        self._members = self._addresses()

    def leave(self) -> None:
        """The parameters belong to no engine any more, unless another one has taken them since."""
        for fqn, parameter in self.by_name.items():
            if record_of(parameter) is self.homes[fqn]:
                del _homes[parameter]

    def whole(self) -> list[tuple[nn.Parameter, ParamRecord]]:
        """The parameters that have their values now."""
        return [(self.by_name[fqn], home) for fqn, home in self.homes.items() if home.is_whole]

    def begin(self, shared: Iterable[str]) -> None:
        """Begin with parameters in engine buffers; writes to `shared` memory are seen by the engine."""
        self._seen_by_engine = {self.by_name[fqn].untyped_storage().data_ptr() for fqn in shared}
        self._members_of = {}
        for parameter, home in self.whole():
            home.version, home.is_handed_out = parameter._version, False
            home.memory = parameter.untyped_storage().data_ptr()
            self._members_of.setdefault(home.memory, []).append(parameter)
        self._count_references()

    def before_freed(self, fqn: str, *, differs: Callable[[], bool]) -> None:
        """Note writes before a gathered parameter is freed; `differs` from this rank's slice."""
        home = self.homes[fqn]
        if home.is_whole and (home.version != self.by_name[fqn]._version or (home.is_handed_out and differs())):
            self.lost_writes.append(fqn)

    def on_update(self) -> None:
        """The engine has changed the values: autograd must refuse graphs that were built on the old ones."""
        whole = self.whole()
        known = [(parameter, home) for parameter, home in whole if parameter._version == home.version]
        torch.autograd.graph.increment_version([parameter for parameter, _ in whole])
        for parameter, home in known:
            home.version = parameter._version
        self._count_references()

    def changed(self, known: Collection[str]) -> list[str]:
        """The whole parameters that users may have written to since the engine last had their values, except those that
        are open in a `GatheredParameters`, which looks after them. `known` are those that the engine saw by itself.

        Raises ShardingError if a forward or backward pass changed a sharded one, for that is lost, and if the module
        has another parameter in the place of one.
        """
        lost, self.lost_writes = self.lost_writes, []
        if lost:
            raise ShardingError(
                f"parameter {lost[0]!r} was changed while it was gathered for a forward or backward pass",
                hint="change it between passes, inside polyaccel.zero.GatheredParameters([...], modifier_rank=0)",
                value=lost,
            )
        self._require_not_replaced()
        found = [fqn for fqn in known if not self.homes[fqn].openings]
        for parameter, home in self.whole():
            if (home.is_handed_out or parameter._version != home.version) and not home.openings:
                _require_own_memory(parameter, home)
                if home.memory not in self._seen_by_engine:
                    found.append(home.fqn)
        return found

    def on_adopted(self, names: Iterable[str]) -> None:
        """The engine has the values of these parameters. Those whose memory is still held elsewhere stay marked."""
        for fqn in names:
            parameter, home = self.by_name[fqn], self.homes[fqn]
            home.version = parameter._version
            if home.is_handed_out:
                home.is_handed_out = _references(parameter) > self._references.get(home.memory, 0)

    def _count_references(self) -> None:
        """Note how many tensors stand on each piece of memory of which no parameter was handed out."""
        taken = {home.memory for home in self.homes.values() if home.is_handed_out}
        for memory, (first, *_) in self._members_of.items():
            if memory not in taken:
                self._references[memory] = _references(first)

    def _require_not_replaced(self) -> None:
        """Raise ShardingError where the module has a new parameter under the name of one that the engine has."""
        for fqn, _ in self._added():
            if fqn in self.by_name:
                raise ShardingError(
                    f"the module has another nn.Parameter as {fqn!r} than the one that its engine trains "
                    "(load_state_dict(assign=True), or module.weight = nn.Parameter(...))",
                    hint="write the values into the parameter that is there: load_state_dict(assign=False), or "
                    "parameter.copy_(values) under torch.no_grad()",
                    value=fqn,
                )

    def check_trained(self) -> None:
        """Raise ShardingError if a frozen or unknown parameter is trained now."""
        for fqn, parameter in self.frozen.items():
            if parameter.requires_grad:
                raise ShardingError(
                    f"parameter {fqn!r} was frozen when it was laid out and requires a gradient now",
                    hint="put frozen parameters into a group of the optimizer too, change requires_grad between "
                    "optimizer steps, and run the model as engine(...)",
                    value=fqn,
                )
        for fqn, parameter in self._added():
            if parameter.grad is not None:
                raise ShardingError(
                    f"parameter {fqn!r} has a gradient, but the engine was built without it and does not update it",
                    hint="add modules before polyaccel.initialize, or engine.destroy(), add them and initialize again",
                    value=fqn,
                )

    def _added(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the module has got since, by name. Costs next to nothing while there are none."""
        if self._addresses() != self._members:
            yield from ((fqn, one) for fqn, one in self._module.named_parameters() if one not in self.names)

    def _addresses(self) -> list[int]:
        return [id(one) for part in self._parts for of in (part._parameters, part._modules) for one in of.values()]
