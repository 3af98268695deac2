"""An engine's states put into host memory between phases (for example to generate with another program) and back again.

[Note: In-place state reload]
Buffers are views of one another in many places: parameters of buckets, master weights of parameters, slices of both. So
nothing is exchanged: the storage under a buffer is copied to the host and emptied, and every view is good again when it
is refilled. Memory that is not torch's own to empty (a communicator's registered memory, a file) stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import TorchBuffer
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.core.buffer import Buffer
from polyaccel.errors import PolyaccelError
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.update.block_states import memory_of


class StateKind(str, Enum):
    """The kinds of states that can be offloaded each by itself. The values are DeepSpeed's names."""

    OPTIM_STATES = "optim_states"
    HP_PARAMS = "hp_params"
    """Master weights, where they are not the parameters themselves."""
    LP_PARAMS = "lp_params"
    """The parameters that the module computes with."""
    LP_GRADS = "lp_grads"
    """Gradients, reduced or accumulated."""
    CONTIGUOUS_GRAD_BUFFER = "contiguous_grad_buffer"
    """Buffers that gradients and gathered parameters pass through; they hold nothing, and are given up."""


class _Moved(NamedTuple):
    """A storage that was emptied, its size, and its contents."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor


class OffloadedStates:
    """The states of `zero` that were taken off its device, and the way back; `adapter` records what is away. See
    [Note: In-place state reload]."""

    def __init__(self, zero: ZeroEngine, adapter: TorchAdapter) -> None:
        self._zero = zero
        self._adapter = adapter
        self._device = torch_device_of(zero.accelerator)
        self._away: dict[StateKind, list[_Moved]] = {}

    def offload(
        self, include: Iterable[StateKind | str] | None, device: str, *, pin_memory: bool, non_blocking: bool
    ) -> None:
        """Copy states of `include` (None: all) to the host and free their memory. Collective."""
        self._adapter.require_nothing_away()
        if device != "cpu":
            raise PolyaccelError(f"states cannot be offloaded to {device!r}", hint='use device="cpu"', value=device)
        zero = self._zero
        zero.adopt_changes()
        zero.reducer.finish_reductions()
        zero.params.wait_all_gathers()
        for kind in self._kinds(include):
            if kind is StateKind.LP_PARAMS:
                self._adapter.residency.suspend(zero)
            if kind is StateKind.CONTIGUOUS_GRAD_BUFFER:
                zero.trim()
            self._away[kind] = list(self._copies(kind, pin_memory and self._is_foreign_device, non_blocking))
        self._adapter.residency.away = ", ".join(kind.value for kind in self._away)
        self._zero.accelerator.synchronize()
        for moved in self._moved():
            moved.storage.resize_(0)
        empty_cache(self._device)

    def reload(self, *, non_blocking: bool) -> None:
        """Put everything back where it was."""
        for moved in self._moved():
            moved.storage.resize_(moved.nbytes)
            _bytes_of(moved.storage).copy_(moved.copy, non_blocking=non_blocking)
        self._zero.accelerator.synchronize()
        away, self._away = self._away, {}
        self._adapter.residency.away = ""
        if StateKind.LP_PARAMS in away:
            self._adapter.residency.resume(self._zero)

    def _kinds(self, include: Iterable[StateKind | str] | None) -> list[StateKind]:
        try:
            return list(StateKind) if include is None else list(dict.fromkeys(map(StateKind, include)))
        except ValueError as error:
            known = ", ".join(kind.value for kind in StateKind)
            raise PolyaccelError(f"that name has no state to offload: {error}", hint=f"use {known}") from None

    @property
    def _is_foreign_device(self) -> bool:
        return self._device.type != "cpu"

    def _moved(self) -> Iterator[_Moved]:
        for moved in self._away.values():
            yield from moved

    def _copies(self, kind: StateKind, pin_memory: bool, non_blocking: bool) -> Iterator[_Moved]:
        """Copies of the memory under the states of one kind; what cannot be emptied is passed over."""
        known = {moved.storage.data_ptr() for moved in self._moved()}
        for buffer in self._buffers(kind):
            if not isinstance(buffer, TorchBuffer) or buffer.raw.device != self._device:
                continue
            storage = buffer.raw.untyped_storage()
            if storage.data_ptr() in known or not storage.resizable() or storage.nbytes() == 0:
                continue
            known.add(storage.data_ptr())
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin_memory)
            copy.copy_(_bytes_of(storage), non_blocking=non_blocking)
            yield _Moved(storage, storage.nbytes(), copy)

    def _buffers(self, kind: StateKind) -> Iterator[Buffer]:
        zero = self._zero
        if kind is StateKind.OPTIM_STATES:
            for shard in zero.shards:
                for state in shard.states.values():
                    yield from memory_of(state)
        elif kind is StateKind.LP_GRADS:
            for gradients in zero.reducer.buckets:
                yield from gradients.resident()
        elif kind is not StateKind.CONTIGUOUS_GRAD_BUFFER:
            for param in zero.params:
                if kind is StateKind.LP_PARAMS:
                    yield param.own
                elif not param.master_is_view:
                    yield param.master


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch keeps for later back to `device`, where torch keeps any."""
    give_back = getattr(torch.get_device_module(device), "empty_cache", None)
    if give_back is not None:
        give_back()


class OffloadsStates:
    """The part of an engine that moves its states to the host and back."""

    zero: ZeroEngine
    accelerator: Accelerator
    _offloaded: OffloadedStates

    def _settle_replica(self) -> None:
        """As that of `Engine`, which goes before it."""

    def offload_states(
        self,
        include: Iterable[StateKind | str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until `reload_states`, for phases in which the engine is idle. Collective.
        DeepSpeed's name.

        Meanwhile training is an error, and so is running the module if its parameters (`lp_params`) are offloaded.

        Args:
            include: Kinds of `StateKind`; None is all.
            device: Only "cpu" is supported.
            pin_memory: Copy to page-locked host memory.
            non_blocking: Let the copies overlap each other; they are complete when the call returns.

        Raises:
            PolyaccelError: Another device, or an unknown kind.
            ShardingError: States are already offloaded.
        """
        self._settle_replica()
        self._offloaded.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move offloaded states back to the device.

        Args:
            non_blocking: Let the copies overlap each other; they are complete when the call returns.
        """
        self._offloaded.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are not in use, and return cached memory to the device. DeepSpeed's name."""
        self.zero.trim()
        empty_cache(torch_device_of(self.accelerator))
