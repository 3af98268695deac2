"""The log of a tensor that does not exist yet: the operations that make its memory, and their replay.

[Note: Initialisation replay]
Every operation on deferred memory is logged with the place of each argument and with the state of the random generator
that it drew from. A value is computed by running again, in their order, exactly the operations on which it depends; so
it has the bits that the program would have had, however many other tensors were made in between. Because each operation
names memory and geometry, not tensor objects, views need no log: whatever aliased in the program aliases in the replay.
The geometry of an output is that of the meta device. A device may lay the same output out otherwise (an SVD, an FFT, a
convolution of channels-last images); the replay then moves its values to where the log expects them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from polyaccel.accelerators.memory.torch import host_memory
from polyaccel.errors import PolyaccelError

SMALL_NUMEL = 1024
"""Tensors of up to this many elements are made at once: scalars and tables that Python code looks at."""

_clock = count()
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@dataclass(eq=False, slots=True)
class FakeStorage:
    """A storage of `nbytes` on `device` that was never allocated, and the operations on it, in order."""

    device: torch.device
    nbytes: int
    history: list[LoggedCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StridedView:
    """Where a deferred tensor lies in its memory: elements, as in torch.as_strided."""

    memory: FakeStorage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """A real tensor that a logged operation read. A large one is not copied and must not change before the replay."""

    tensor: Tensor
    version: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Constant:
        if tensor.numel() <= SMALL_NUMEL:
            tensor = tensor.clone()
        return cls(tensor, tensor._version)  # the tensor itself: a detached one made here would count versions alone

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise PolyaccelError(
                f"a tensor of shape {tuple(self.tensor.shape)} was changed in place after a deferred parameter was "
                "computed from it",
                hint="give zero.Init a copy of the tensor: parameter.copy_(tensor.clone())",
                value=tuple(self.tensor.shape),
            )
        return self.tensor


@dataclass(eq=False, slots=True)
class LoggedCall:
    """One logged call. `args` and `named` hold `StridedView` and `Constant` for tensors.

    `made` are the places of its outputs in new memory, None for an output in memory that was there before.
    `overwritten` is the memory whose earlier contents the operation makes irrelevant. `generator_state` is what it drew
    from, if it did.
    """

    function: OpOverload
    args: tuple[Any, ...]
    named: dict[str, Any]
    made: tuple[StridedView | None, ...] = ()
    overwritten: FakeStorage | None = None
    generator_state: tuple[torch.device, Tensor] | None = None
    order: int = field(default_factory=lambda: next(_clock))

    def places(self) -> Iterator[StridedView]:
        return (leaf for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, StridedView))


def replay(place: StridedView) -> Tensor:
    """The tensor that stands at `place` now, computed. It shares nothing with any other tensor. See
    [Note: Initialisation replay]."""
    storages: dict[FakeStorage, torch.UntypedStorage] = {}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, StridedView):
            return _view(leaf, storages)
        return leaf.value() if isinstance(leaf, Constant) else leaf

    needed = _needed(place.memory)
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # it may be called inside zero.Init
        for operation in needed:
            args, named = tree_map(real, (operation.args, dict(operation.named)))
            if operation.generator_state is not None:
                device, state = operation.generator_state
                named["generator"] = torch.Generator(device)
                named["generator"].set_state(state)
            outputs = tree_leaves(operation.function(*args, **named))
            for place_made, output in zip(operation.made, outputs, strict=False):
                if place_made is not None:
                    storages[place_made.memory] = _storage_as_logged(operation, place_made, output)
            del args, named, outputs
        value = _view(place, storages)
        storages.clear()
    if any(operation.made for operation in needed):
        return_holes()
    return value


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Memory for a short time."""
    if device.type == "cpu":
        return host_memory(nbytes).untyped_storage()
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def return_holes() -> None:
    """Give the system what large temporary tensors of torch's own left in the heap, where malloc keeps it (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _needed(target: FakeStorage) -> list[LoggedCall]:
    """The operations that the present contents of `target` depend on, in their order."""
    needed: dict[int, LoggedCall] = {}
    seen: set[tuple[FakeStorage, LoggedCall]] = set()
    pending: list[tuple[FakeStorage, float]] = [(target, float("inf"))]
    while pending:
        memory, before = pending.pop()
        for operation in reversed(memory.history):
            if operation.order >= before:
                continue
            if (memory, operation) in seen:
                break
            seen.add((memory, operation))
            needed[operation.order] = operation
            pending += [(place.memory, operation.order) for place in operation.places() if place.memory is not memory]
            if operation.overwritten is memory:
                break
    return [needed[order] for order in sorted(needed)]


def _storage_as_logged(operation: LoggedCall, place: StridedView, output: Tensor) -> torch.UntypedStorage:
    """The storage of `output`, if the output lies in it as in `place`, else one that it was copied into."""
    if (tuple(output.shape), output.dtype) != (place.shape, place.dtype):
        raise PolyaccelError(
            f"{operation.function} gave {output.dtype} of shape {tuple(output.shape)} where the meta device gave "
            f"{place.dtype} of shape {place.shape}, so it cannot be deferred",
            hint="build the module that calls it outside zero.Init, or under zero.Init(enabled=False)",
            value=str(operation.function),
        )
    storage = output.untyped_storage()
    is_same = (output.stride(), output.storage_offset()) == (place.strides, place.offset)
    if is_same and storage.nbytes() >= place.memory.nbytes:
        return storage
    storages: dict[FakeStorage, torch.UntypedStorage] = {}
    _view(place, storages).copy_(output)
    return storages[place.memory]


def _view(place: StridedView, storages: dict[FakeStorage, torch.UntypedStorage]) -> Tensor:
    memory = place.memory
    if memory not in storages:  # about to be overwritten: what it held before does not matter
        storages[memory] = allocate(memory.nbytes, memory.device)
    empty = torch.empty(0, dtype=place.dtype, device=memory.device)
    return empty.set_(storages[memory], place.offset, place.shape, place.strides)
