"""The accelerator plugin: what a vendor writes whose device torch supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from polyaccel.accelerators.base import Capabilities, Probe
from polyaccel.accelerators.torch_device import TorchAccelerator
from polyaccel.core.types import DType
from polyaccel.ops.base import SCALE, KernelTable

if TYPE_CHECKING:
    from polyaccel.core.buffer import Buffer


class SimdevAccelerator(TorchAccelerator):
    """`torch.simdev`: memory that the host cannot touch, real streams, the CPU's arithmetic."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 2)
    name: ClassVar[str] = "simdev"
    torch_device_type: ClassVar[str] = "simdev"
    extension: ClassVar[str | None] = "polyaccel_simdev.device"
    visible_devices_variable: ClassVar[str | None] = "POLYACCEL_SIMDEV_DEVICES"
    exported_variables: ClassVar[tuple[str, ...]] = ("POLYACCEL_SIMDEV_",)

    @classmethod
    def probe(cls) -> Probe:
        # Below the CPU, so that it is used only when it is named.
        return Probe(True, "simulated in host memory", priority=-1)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=frozenset(DType), default_comm="simcomm", streams=True, host_pinning=True, graphs=True
        )

    def kernels(self) -> KernelTable:
        return super().kernels().replaced(self.name, {SCALE: _scale})

    def record_work(self, work: Callable[[], None]) -> Callable[[], None]:
        from polyaccel_simdev import _device

        _device.begin_recording()
        try:
            work()
        finally:
            recording = _device.end_recording()
        play: Callable[[], None] = recording.play
        return play


def _scale(buffer: Buffer, factor: float) -> None:
    from polyaccel_simdev import _device

    _device.scale(buffer.raw, factor)
    buffer.bump_version()
