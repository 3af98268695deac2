"""The GPU of Apple silicon, by torch's mps device. Written against torch's documentation; not run on hardware.

There is one device and one queue. torch counts no peak memory there: the peak is the largest use that `memory_stats`
has seen.
"""

from __future__ import annotations

import platform
import sys
from typing import Any, ClassVar

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Capabilities, Event, MemoryStats, Probe, Stream
from polyaccel.accelerators.torch_device import TorchAccelerator, TorchEvent
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError


class MpsStream(Stream):
    """The one queue of the device."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def record(self) -> Event:
        event = self._module.event.Event(enable_timing=True)
        event.record()
        return TorchEvent(event)

    def wait(self, event: Event) -> None:
        if not isinstance(event, TorchEvent):
            raise PluginContractError("a stream cannot wait for an event of another device", value=event)
        event.raw.wait()

    def synchronize(self) -> None:
        self._module.synchronize()


class MpsAccelerator(TorchAccelerator):
    """`torch.mps`. Not run on hardware."""

    name: ClassVar[str] = "mps"
    torch_device_type: ClassVar[str] = "mps"
    exported_variables: ClassVar[tuple[str, ...]] = ("PYTORCH_MPS_", "PYTORCH_ENABLE_MPS_FALLBACK")

    def __init__(self) -> None:
        self._peak_nbytes = 0

    @classmethod
    def probe(cls) -> Probe:
        if (sys.platform, platform.machine()) != ("darwin", "arm64"):
            return device_probe.unusable(f"no Apple silicon: this is {sys.platform} on {platform.machine()}")
        if (torch := device_probe.loaded_torch()) is not None:
            found = torch.backends.mps.is_available()
            return (
                device_probe.usable("torch sees the mps device")
                if found
                else device_probe.unusable("torch sees no mps")
            )
        if device_probe.torch_build() is None:
            return device_probe.unusable("Apple silicon, but torch is not installed")
        return device_probe.usable("Apple silicon, and torch is installed")

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=frozenset(DType) - {DType.FLOAT64}, default_comm="gloo")

    def device_count(self) -> int:
        return 1

    def current_device(self) -> DeviceId:
        return DeviceId(self.name, 0)

    def set_device(self, index: int) -> None:
        """Does nothing: there is one device."""

    def memory_stats(self) -> MemoryStats:
        module = self._module
        allocated, total = int(module.current_allocated_memory()), int(module.recommended_max_memory())
        driver = int(module.driver_allocated_memory())
        self._peak_nbytes = max(self._peak_nbytes, allocated)
        return MemoryStats(allocated, self._peak_nbytes, driver, total, max(0, total - driver))

    def reset_peak_memory(self) -> None:
        self._peak_nbytes = int(self._module.current_allocated_memory())

    def new_stream(self) -> Stream:
        return MpsStream(self._module)

    def current_stream(self) -> Stream:
        return MpsStream(self._module)
