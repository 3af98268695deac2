"""Any device that torch supports, without a plugin of ours: `device_plugin("name")`.

Packages register a device with torch by the entry-point group `torch.backends`, or when a script imports them. The
abilities of that device are tried once, when its capabilities are asked; those that it lacks are listed in their notes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Capabilities, DeviceQueue, MemoryStats, Probe, Stream
from polyaccel.accelerators.memory.torch import allocate_torch, torch_dtype
from polyaccel.accelerators.torch_device import TorchAccelerator
from polyaccel.core.types import DType

_NAMED_OTHERWISE = {
    "current_device": "current_device_index",
    "set_device": "set_device_index",
    "mem_get_info": "get_memory_info",
}
"""Functions of a device's module that have another name in `torch.accelerator`, and that name."""


def device_plugin(device_type: str) -> type[GenericAccelerator] | None:
    """The accelerator for torch's devices of this type; None if torch has no module for them."""
    try:
        torch.get_device_module(device_type)
    except (RuntimeError, AssertionError):  # unknown type, or none that this build is linked with
        return None
    members = {"name": device_type, "torch_device_type": device_type, "__module__": __name__}
    return type(GenericAccelerator.__name__, (GenericAccelerator,), members)


class DeviceModule:
    """torch's module of a device, with the general functions of `torch.accelerator` for what it lacks."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._own = torch.get_device_module(device_type)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the device's own module, else of `torch.accelerator`."""
        if hasattr(self._own, name):
            return getattr(self._own, name)
        return getattr(torch.accelerator, _NAMED_OTHERWISE.get(name, name))

    def Stream(self) -> torch.Stream:  # noqa: N802 - torch's name
        return torch.Stream(device=self._type)

    def Event(self, enable_timing: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event(self._type, enable_timing=enable_timing)

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream


class GenericAccelerator(TorchAccelerator):
    """A device of torch's that no plugin is for. `device_plugin` makes the classes."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)

    @classmethod
    def probe(cls) -> Probe:
        count = int(DeviceModule(cls.torch_device_type).device_count())
        known = f"torch {torch.__version__}"
        if not count:
            return device_probe.unusable(f"{known} sees no {cls.name} device")
        return device_probe.usable(
            f"{known} sees {count} {cls.name} device{'s' if count > 1 else ''}; no plugin is for it"
        )

    @cached_property
    def _module(self) -> Any:
        return DeviceModule(self.torch_device_type)

    @cached_property
    def _has_streams(self) -> bool:
        def use() -> None:
            stream = super(GenericAccelerator, self).new_stream()
            with stream.use():
                torch.ones(1, device=self._torch_device())
            event = stream.record()
            super(GenericAccelerator, self).current_stream().wait(event)
            event.synchronize()

        return device_probe.works(use)

    @cached_property
    def _has_memory_stats(self) -> bool:
        return device_probe.works(super().memory_stats)

    @cached_property
    def _has_generator(self) -> bool:
        return device_probe.works(super()._generator_state)

    @cached_property
    def _pins(self) -> bool:
        return device_probe.works(lambda: allocate_torch(1, DType.UINT8, self._torch_device(), pinned=True))

    def _computes(self, dtype: DType) -> bool:
        def add() -> bool:
            two = torch.ones(2, dtype=torch_dtype(dtype), device=self._torch_device())
            total = two.clone() if dtype is DType.BOOL else two + two
            return bool((total.cpu() == (1 if dtype is DType.BOOL else 2)).all())

        return device_probe.works(add)

    @cached_property
    def _capabilities(self) -> Capabilities:
        backend = torch.distributed.Backend.default_device_backend_map.get(self.torch_device_type)
        lacks = {
            "no streams: nothing overlaps": not self._has_streams,
            "no pinned memory: copies from and to the host are synchronous": not self._pins,
            "no numbers on memory: they are 0": not self._has_memory_stats,
            "no generator state: only the host's is saved": not self._has_generator,
            "no own collectives: they go by the host and gloo": backend is None,
        }
        return Capabilities(
            dtypes=frozenset(dtype for dtype in DType if self._computes(dtype)),
            default_comm=backend or "gloo",
            streams=self._has_streams,
            host_pinning=self._pins,
            notes=tuple(note for note, lacking in lacks.items() if lacking),
        )

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def memory_stats(self) -> MemoryStats:
        return super().memory_stats() if self._has_memory_stats else MemoryStats(0, 0, 0, 0, 0)

    def reset_peak_memory(self) -> None:
        if self._has_memory_stats:
            super().reset_peak_memory()

    def _generator_state(self) -> bytes:
        return super()._generator_state() if self._has_generator else b""

    def _set_generator_state(self, state: bytes) -> None:
        if state or self._has_generator:
            super()._set_generator_state(state)

    def new_stream(self) -> Stream:
        return super().new_stream() if self._has_streams else DeviceQueue(self.synchronize)

    def current_stream(self) -> Stream:
        return super().current_stream() if self._has_streams else DeviceQueue(self.synchronize)
