"""What a region changes in addition to its outputs, so that a second run sees what the first saw and leaves no trace:
buffers and other tensors, attributes, containers of plain values, arrays, variables, and random generators.

[Note: Tensor copies in recomputation]
A second run gets copies of the tensors in the places of the originals, and of tuples that hold some. Old values in the
originals would be seen by graphs that have saved them, and what the second run itself saves must keep its values when
the originals come back. Tensors that share memory share it as copies too.

[Note: Changes of large tensors]
Small tensors and arrays are copied before each first run. A larger one is compared before and after the first two runs
of the module or function that holds it, and is copied from then on only if one of them changed it. A later change is
seen by the tensor's version, and for an array by a sample of its elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from polyaccel.accelerators.named_random import named_random_states
from polyaccel.torch.activation_checkpointing.host_random import host_states
from polyaccel.torch.activation_checkpointing.places import Array
from polyaccel.torch.activation_checkpointing.plans import ModulePlans
from polyaccel.torch.activation_checkpointing.walk import Owner, StatePlaces

log = getLogger(__name__)

SMALL_NBYTES = 1 << 16
"""Tensors up to this size are copied before each first run."""
_SURVEYS = 2
_SAMPLES = 64


class RegionState:
    """The state that `roots` lead to, made right before a region's first run. `roots` are functions and arguments.
    `plans` remember the modules that regions begin with."""

    def __init__(self, roots: Iterable[Any], plans: ModulePlans | None = None) -> None:
        walk = StatePlaces(plans)
        for root in roots:
            walk.follow(root)
        self._places, self._tuples, self._unknown = walk.found(), walk.tuples, walk.unknown
        held = [_HeldTensor(*held) for held in walk.tensors if not held[0].requires_grad]
        self._tensors = [tensor for tensor in held if tensor.is_copied]
        self._others = [tensor for tensor in held if not tensor.is_copied]
        self._copies = copies_of([held.tensor for held in self._tensors])
        self._arrays = [_HeldArray(*held) for held in walk.arrays]
        self._modules = walk.modules
        self._parameters = walk.parameters
        self._versions = _versions(self._parameters)
        self._host, self._named = host_states(), named_random_states().states()

    def is_changed(self) -> bool:
        """Whether the first run has left anything else than its outputs. Called before `end_first_run`."""
        host, named = self._host.used_since(), named_random_states()
        tensors = zip(self._tensors, self._copies, strict=True)
        return (
            bool(self._unknown or self._arrays)
            or any(state is not None for state in host)
            or named.states() != self._named
            or any(place.is_changed for place in self._places)
            or _versions(self._parameters) != self._versions
            or any(_version(held.tensor) != held.version for held in self._others)
            or any(not torch.equal(held.tensor, copy) for held, copy in tensors)
        )

    def end_first_run(self) -> None:
        """Look at what the first run has changed, and name what a second run cannot see as it was."""
        self._host = self._host.used_since()
        for held, copy in zip(self._tensors, self._copies, strict=True):
            if held.large is not None:
                held.large.survey(partial(torch.equal, copy, held.tensor))
        kept = [held.large is None or held.large.is_written for held in self._tensors]
        if not all(kept):
            self._tensors = [held for held, is_kept in zip(self._tensors, kept, strict=True) if is_kept]
            self._copies = [copy for copy, is_kept in zip(self._copies, kept, strict=True) if is_kept]
        for held in self._others:
            if _version(held.tensor) != held.version:
                if held.large is not None:
                    held.large.is_written = True
                _name_once(held.owner, held.name, _UNSEEN)
                self._tensors.append(held)  # the second run changes a copy
                self._copies.append(held.tensor.detach().clone())
        for array in self._arrays:
            if (place := array.place_after_run()) is not None:
                self._places.append(place)
        for owner, name, kind in self._unknown:
            _name_once(owner, name, f"is a {kind}, whose state cannot be restored")
        if _versions(self._parameters) != self._versions:
            self._name_parameters()
        self._others, self._unknown, self._parameters, self._versions, self._modules = [], [], [], [], []
        self._arrays = []

    def _name_parameters(self) -> None:
        before = dict(zip(map(id, self._parameters), self._versions, strict=True))
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and before.get(id(parameter), now := _version(parameter)) != now:
                    _name_once(module, name, "is a parameter that was changed in place, which is not restored")

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Inside, everything is as the first run found it; afterwards as it was before."""
        present = [(place, place.contents()) for place in self._places]
        host, states = self._host.present(), named_random_states()
        named = states.states()
        try:
            fresh = zip(self._tensors, copies_of(self._copies), strict=True)
            instead: dict[int, Any] = {id(held.tensor): copy for held, copy in fresh}
            for whole in self._tuples if instead else ():
                if any(id(part) in instead for part in whole):
                    instead[id(whole)] = _made_of(type(whole), [instead.get(id(part), part) for part in whole])
            for place in self._places:
                place.put(place.saved, instead)
            self._host.restore()
            states.restore(self._named)
            yield
        finally:
            for place, contents in present:
                place.put(contents, {})
            host.restore()
            states.restore(named)


class RepeatableRun:
    """`function`, whose later calls run with the state that its first call found, and leave what they found."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._state: RegionState | None = None

    def __call__(self, *args: Any) -> Any:
        if self._state is not None:
            with self._state.rerun():
                return self._function(*args)
        self._state = RegionState((self._function, *args))
        outputs = self._function(*args)
        self._state.end_first_run()
        return outputs


class _HeldTensor:
    """A tensor that `owner` (None: something else) holds as `name`, at the start of a first run."""

    def __init__(self, tensor: Tensor, owner: Owner, name: str) -> None:
        self.tensor, self.owner, self.name = tensor, owner, name
        self.version = _version(tensor)
        self.large: _Large | None = None
        self.is_copied = tensor.numel() * tensor.element_size() <= SMALL_NBYTES
        if not self.is_copied and owner is not None:
            self.large = _large(owner, name)
            self.is_copied = self.large.is_written or (self.large.is_surveyed and _has_values(tensor))


class _HeldArray:
    """A large array that `owner` (None: something else) holds as `name`, at the start of a first run."""

    def __init__(self, array: Any, owner: Owner, name: str) -> None:
        self._array, self._owner, self._name = array, owner, name
        self._large = None if owner is None else _large(owner, name)
        is_copied = self._large is not None and (self._large.is_written or self._large.is_surveyed)
        self._place = Array(array) if is_copied else None
        self._sample = None if is_copied else _sample(array)

    def place_after_run(self) -> Array | None:
        """What restores it; None where it was not changed, or was not copied."""
        if self._place is None:
            if _sample(self._array) != self._sample:
                if self._large is not None:
                    self._large.is_written = True
                _name_once(self._owner, self._name, _UNSEEN)
            return None
        assert self._large is not None
        self._large.survey(lambda: self._place is not None and np.array_equal(self._place.saved, self._array))
        return self._place if self._large.is_written else None


class _Large:
    """What is known of a large tensor or array of an owner. See [Note: Changes of large tensors]."""

    def __init__(self) -> None:
        self._surveys = 0
        self.is_written = False

    @property
    def is_surveyed(self) -> bool:
        """Whether the next first run is one of those that it is compared in."""
        return self._surveys < _SURVEYS

    def survey(self, is_equal: Callable[[], bool]) -> None:
        """A first run has ended."""
        if not self.is_written:
            self._surveys += 1
            self.is_written = not is_equal()


_LARGE: WeakKeyDictionary[Any, dict[str, _Large]] = WeakKeyDictionary()
_NAMED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_UNSEEN = "was changed in place, where a second run cannot see it unchanged"


def _large(owner: Owner, name: str) -> _Large:
    return _LARGE.setdefault(owner, {}).setdefault(name, _Large())


def _sample(array: Any) -> bytes:
    """Some elements of an array, evenly spread, as bytes."""
    found: bytes = array.flat[:: max(1, array.size // _SAMPLES)].tobytes()
    return found


def _made_of(kind: Any, parts: list[Any]) -> tuple[Any, ...]:
    """A tuple of the class `kind`, whose constructor is unknown."""
    made: tuple[Any, ...] = kind(parts) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, parts)
    return made


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that share memory where the tensors do."""
    memory = [_memory(tensor) for tensor in tensors]
    users = Counter(memory)
    copied: dict[Any, Any] = {}
    copies = []
    for tensor, key in zip(tensors, memory, strict=True):
        if key is None or users[key] == 1:
            copies.append(tensor.detach().clone())
            continue
        if key not in copied:
            copied[key] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies.append(view.set_(copied[key], tensor.storage_offset(), tensor.size(), tensor.stride()))
    return copies


def _memory(tensor: Tensor) -> int | None:
    """What names the memory of a plain tensor; None for any other."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return int(tensor.untyped_storage()._cdata)


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode
        return list(map(_version, tensors))


def _name_once(owner: Owner, name: str, why: str) -> None:
    if owner is None:
        return
    named = _NAMED.setdefault(owner, set())
    if name not in named:
        named.add(name)
        log.warning(
            "activation checkpointing: %s of a %s %s; the recomputed block may compute something else than the first "
            "time. Leave this block out of activation_checkpointing.blocks",
            name,
            type(owner).__name__ if isinstance(owner, nn.Module) else f"function {owner.co_name}",
            why,
        )
