"""The inputs of recomputed regions, and where they wait for the backward: on the device, in host memory, in one piece
of memory for all, or cut over ranks.

[Note: Offloaded inputs]
A region's inputs pass through hooks on saved tensors. Packed, they are copied, and what was copied is free when the
model has continued; unpacked, they are put together again. In host memory the copies go over their own stream while the
region runs, and what is queued after the region waits for that; when a region's inputs are taken back, those of the
region before, which backward needs next, follow while this one is computed again. Should nothing wait for those,
`record_stream` keeps their memory until the copy has run. Only inputs that the model computed are moved. Parameters,
masks and the like often serve many regions, so copies would multiply them; they go to the hooks that were in force
before, those of sharded parameters for example. A region inside another is dropped and recomputed with it, hence moves
nothing.

[Note: Sharded inputs]
Ranks that share a model compute with the same inputs, so each keeps one part, and all gather them when backward wants
them. That is a collective of theirs, which all make in the same order, because all run the same backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.accelerators.base import Accelerator, Event
from polyaccel.accelerators.torch_device import TorchStream
from polyaccel.comm.base import Communicator
from polyaccel.engine.policies.modules import RecomputePolicy

log = getLogger(__name__)


def is_in_host_memory(accelerator: Accelerator) -> bool:
    """Whether the accelerator's memory is the host's, so that there is nowhere to move anything."""
    return accelerator.torch_device_type == "cpu"


class KeptInput:
    """An input that waits as `memory`: its elements in the order of memory, or this rank's part of them."""

    def __init__(self, region: KeptInputs, tensor: Tensor, memory: Tensor, is_apart: bool) -> None:
        self.region = region
        self.memory = memory
        self.device = tensor.device
        self.size, self.stride = tensor.size(), _dense_stride(tensor)
        self.is_apart = is_apart
        """Whether `memory` is the host's and the device's is not."""
        self.is_used = False
        self.fetched: tuple[Tensor, Event] | None = None
        """`memory` on the device again, once the event is reached."""


class HostCopies:
    """Copies between a device and host memory, over a separate stream. See [Note: Offloaded inputs]."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.pins = accelerator.capabilities().host_pinning
        self._stream = accelerator.new_stream()

    def copy(self, source: Tensor, memory: Tensor) -> None:
        """Start copying `source` to `memory`. It must stay as it is until `settle`."""
        self._move(source, memory)

    def settle(self) -> None:
        """Let the device's work that is queued from now on wait for all copies."""
        self._accelerator.current_stream().wait(self._stream.record())

    def fetch(self, kept: KeptInput) -> None:
        """Start copying back, unless that was done."""
        if kept.fetched is None:
            tensor = torch.empty_like(kept.memory, device=kept.device)
            kept.fetched = tensor, self._move(kept.memory, tensor)
            if isinstance(self._stream, TorchStream):
                tensor.record_stream(self._stream.raw)

    def take(self, kept: KeptInput) -> Tensor:
        """`memory` on the device; work that is queued from now on sees its values."""
        self.fetch(kept)
        assert kept.fetched is not None  # by now
        tensor, arrived = kept.fetched
        kept.fetched = None
        self._accelerator.current_stream().wait(arrived)
        return tensor

    def _move(self, source: Tensor, target: Tensor) -> Event:
        self._stream.wait(self._accelerator.current_stream().record())
        with self._stream.use(), torch.no_grad():
            target.copy_(source, non_blocking=self.pins)
        return self._stream.record()


class InputMemory:
    """Memory for `number` inputs of each size and type, allocated at once when the first one comes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: dict[Any, list[Tensor]] = {}
        self._has_warned = False

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, *, pinned: bool) -> tuple[Tensor, bool]:
        """Flat memory, and whether it is the shelf's, which wants it back (`give_back`)."""
        kind = (numel, dtype, device)
        if kind not in self._free:
            whole = torch.empty(self._number * numel, dtype=dtype, device=device, pin_memory=pinned)
            self._free[kind] = list(whole.view(self._number, numel).unbind())
        if self._free[kind]:
            return self._free[kind].pop(), True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "activation_checkpointing.number_checkpoints = %d is less than the inputs of equal size that wait at "
                "a time: the others get their own memory",
                self._number,
            )
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned), False

    def give_back(self, memory: Tensor) -> None:
        """Take back `memory`, which is not needed any more."""
        self._free[memory.numel(), memory.dtype, memory.device].append(memory)


@dataclass(frozen=True)
class _Places:
    """What moves inputs: copies to the host, a shelf, and the ranks that share them; None without them."""

    host: HostCopies | None
    shelf: InputMemory | None
    ranks: Communicator | None
    accelerator: Accelerator


class InputStore:
    """Keeps the inputs of regions on `accelerator` by `policy`; `ranks` share the model, None if none do."""

    def __init__(self, policy: RecomputePolicy, accelerator: Accelerator, ranks: Communicator | None) -> None:
        offloads = policy.offload and not is_in_host_memory(accelerator)
        self.places = _Places(
            HostCopies(accelerator) if offloads else None,
            InputMemory(policy.number) if policy.number is not None else None,
            ranks if policy.partition and ranks is not None and ranks.world_size > 1 else None,
            accelerator,
        )
        self.moves = any((self.places.host, self.places.shelf, self.places.ranks))
        """Whether inputs wait elsewhere than where they are."""
        self._last: weakref.ref[KeptInputs] | None = None

    def region(self, inputs: Iterable[Any]) -> KeptInputs:
        """The inputs of a new region, which follows the one that was made last."""
        region = KeptInputs(self.places, inputs, None if self._last is None else self._last())
        self._last = weakref.ref(region)
        return region

    def settle(self) -> None:
        """Work of the device that is queued from now on may write over the inputs of all regions so far."""
        if self.places.host is not None:
            self.places.host.settle()


class KeptInputs:
    """The inputs of one region in one forward pass."""

    def __init__(self, places: _Places, inputs: Iterable[Any], previous: KeptInputs | None) -> None:
        self._places = places
        self._previous = None if previous is None else weakref.ref(previous)
        self._moved = {_place(leaf) for leaf in inputs if _is_computed(leaf)}
        self._kept: list[weakref.ref[KeptInput]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Hooks that move the inputs, over those in force."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            if _place(tensor) in self._moved:
                return self._keep(tensor.detach())
            return outer[0](tensor) if outer else tensor

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, KeptInput):
                tensor = self._take(saved)
                if self._previous is not None and (previous := self._previous()) is not None:
                    previous.prefetch()
                return tensor
            return outer[1](saved) if outer else saved

        return saved_tensors_hooks(pack, unpack)

    def prefetch(self) -> None:
        """Start copying back what has not been used yet."""
        host = self._places.host
        for reference in self._kept if host is not None else ():
            kept = reference()
            if kept is not None and not kept.is_used and host is not None:
                host.fetch(kept)

    def _keep(self, tensor: Tensor) -> KeptInput:
        host, shelf, ranks = self._places.host, self._places.shelf, self._places.ranks
        source = _flat(tensor)
        if ranks is not None:
            source = _own_part(source, ranks)
        device = torch.device("cpu") if host is not None else tensor.device
        pins = host is not None and host.pins
        is_borrowed = False
        if shelf is not None:
            memory, is_borrowed = shelf.take(source.numel(), source.dtype, device, pinned=pins)
        else:
            memory = torch.empty_like(source, device=device, pin_memory=pins)
        if host is not None:
            host.copy(source, memory)
        else:
            memory.copy_(source)
        kept = KeptInput(self, tensor, memory, host is not None)
        if shelf is not None and is_borrowed:
            weakref.finalize(kept, shelf.give_back, memory)
        self._kept.append(weakref.ref(kept))
        return kept

    def _take(self, kept: KeptInput) -> Tensor:
        host, ranks = self._places.host, self._places.ranks
        tensor = host.take(kept) if host is not None else kept.memory
        kept.is_used = True
        if ranks is not None:
            tensor = _gathered(tensor, ranks, self._places.accelerator, kept.size.numel())
        elif host is None:
            tensor = tensor.clone()  # the shelf's memory goes to another region before autograd releases a view of it
        return tensor.as_strided(kept.size, kept.stride)


def _own_part(flat: Tensor, ranks: Communicator) -> Tensor:
    """This rank's part of `flat`, filled up with zeros to the length of the others'."""
    numel = -(-flat.numel() // ranks.world_size)
    part = flat[ranks.rank * numel : (ranks.rank + 1) * numel]
    return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])


def _gathered(part: Tensor, ranks: Communicator, accelerator: Accelerator, numel: int) -> Tensor:
    """All parts, in the order of the ranks."""
    whole = part.new_empty(part.numel() * ranks.world_size)
    ranks.all_gather(accelerator.wrap(whole), accelerator.wrap(part), label="recomputed inputs")
    return whole[:numel]


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy of `tensor` without gaps, its dims in the same order of memory."""
    return torch.empty_like(tensor, device="meta").stride()


def _flat(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in the order of memory of `_dense_stride`: a view where there are no gaps."""
    stride = _dense_stride(tensor)
    if stride != tensor.stride():
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_computed(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and not isinstance(leaf, nn.Parameter)
        and leaf.grad_fn is not None
        and leaf.layout is torch.strided
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
