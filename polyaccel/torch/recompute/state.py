"""What a region changes besides its outputs, so that a second run sees what the first saw and leaves no trace: buffers
and other tensors, attributes, containers of plain values, and random generators.

[Note: Fresh tensors]
A second run gets copies of the tensors in the places of the originals. Old values in the originals would be seen by
graphs that have saved them, and what the second run itself saves must keep its values when the originals come back.
Tensors that share memory share it as copies too.

[Note: Large tensors]
Small tensors are copied before each first run. A larger buffer is compared before and after the first two runs of its
module, and is copied from then on only if one of them changed it. A later change is seen by the tensor's version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyaccel.accelerators.named_random import named_random_states
from polyaccel.torch.recompute.host_random import host_states
from polyaccel.torch.recompute.places import StatePlaces

log = getLogger(__name__)

SMALL_NBYTES = 1 << 16
"""Tensors up to this size are copied before each first run."""
_SURVEYS = 2


class RegionState:
    """The state that `roots` lead to, made right before a region's first run. `roots` are functions and arguments."""

    def __init__(self, roots: Iterable[Any]) -> None:
        places = StatePlaces()
        for root in roots:
            places.follow(root)
        self._places, self._unknown = places.found, places.unknown
        held = [_HeldTensor(*held) for held in places.tensors if not held[0].requires_grad]
        self._tensors = [tensor for tensor in held if tensor.is_copied]
        self._others = [tensor for tensor in held if not tensor.is_copied]
        self._copies = copies_of([held.tensor for held in self._tensors])
        self._parameters = [(*held, _version(held[0])) for held in places.parameters]
        self._host, self._named = host_states(), named_random_states().states()

    def end_first_run(self) -> None:
        """Look at what the first run has changed, and name what a second run cannot see as it was."""
        self._host = self._host.used_since()
        for held, copy in zip(self._tensors, self._copies, strict=True):
            if held.large is not None:
                held.large.survey(copy, held.tensor)
        kept = [held.large is None or held.large.is_written for held in self._tensors]
        if not all(kept):
            self._tensors = [held for held, is_kept in zip(self._tensors, kept, strict=True) if is_kept]
            self._copies = [copy for copy, is_kept in zip(self._copies, kept, strict=True) if is_kept]
        for held in self._others:
            if _version(held.tensor) != held.version:
                if held.large is not None:
                    held.large.is_written = True
                _name_once(held.module, held.name, "was changed in place, where a second run cannot see it unchanged")
                self._tensors.append(held)  # the second run changes a copy
                self._copies.append(held.tensor.detach().clone())
        for module, name, kind in self._unknown:
            _name_once(module, name, f"is a {kind}, whose state cannot be restored")
        for parameter, module, name, version in self._parameters:
            if _version(parameter) != version:
                _name_once(module, name, "is a parameter that was changed in place, which is not restored")
        self._others, self._unknown, self._parameters = [], [], []

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Inside, everything is as the first run found it; afterwards as it was before."""
        present = [(place, place.contents()) for place in self._places]
        host, states = self._host.present(), named_random_states()
        named = states.states()
        try:
            fresh = zip(self._tensors, copies_of(self._copies), strict=True)
            instead = {id(held.tensor): copy for held, copy in fresh}
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
    """A tensor that a module (None: something else) holds as `name`, at the start of a first run."""

    def __init__(self, tensor: Tensor, module: nn.Module | None, name: str) -> None:
        self.tensor, self.module, self.name = tensor, module, name
        self.version = _version(tensor)
        self.large: _Large | None = None
        self.is_copied = tensor.numel() * tensor.element_size() <= SMALL_NBYTES
        if not self.is_copied and module is not None:
            self.large = _LARGE.setdefault(module, {}).setdefault(name, _Large())
            self.is_copied = self.large.is_written or (self.large.surveys < _SURVEYS and _has_values(tensor))


class _Large:
    """What is known of a large tensor of a module. See [Note: Large tensors]."""

    def __init__(self) -> None:
        self.surveys = 0
        self.is_written = False

    def survey(self, before: Tensor, after: Tensor) -> None:
        """A first run has ended."""
        if not self.is_written:
            self.surveys += 1
            self.is_written = not torch.equal(before, after)


_LARGE: WeakKeyDictionary[nn.Module, dict[str, _Large]] = WeakKeyDictionary()
_NAMED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


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


def _name_once(module: nn.Module | None, name: str, why: str) -> None:
    if module is None:
        return
    named = _NAMED.setdefault(module, set())
    if name not in named:
        named.add(name)
        log.warning(
            "activation checkpointing: %s of a %s %s; the recomputed block may compute something else than the first "
            "time. Leave this block out of activation_checkpointing.blocks",
            name,
            type(module).__name__,
            why,
        )
