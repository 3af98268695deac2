"""A device whose memory is not the host's: its addresses lead nowhere, so whoever reads them dies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DeviceId, DType

FAR = DeviceId("far", 0)
_ELSEWHERE = 1 << 56


class FarBuffer(Buffer):
    """What copies reach, and nothing else."""

    def __init__(self, hidden: Buffer) -> None:
        self._hidden = hidden
        self.numel, self.dtype, self.device = hidden.numel, hidden.dtype, FAR

    @property
    def raw(self) -> Any:
        raise AssertionError("no array of the host stands on this memory")

    @property
    def version(self) -> int:
        return self._hidden.version

    def bump_version(self) -> None:
        self._hidden.bump_version()

    def view(self, offset: int, numel: int) -> FarBuffer:
        return FarBuffer(self._hidden.view(offset, numel))

    def copy_from(self, source: Buffer) -> None:
        self._hidden.copy_from(source._hidden if isinstance(source, FarBuffer) else source)

    def fill(self, value: float) -> None:
        self._hidden.fill(value)

    def data_ptr(self) -> int:
        return self._hidden.data_ptr() + _ELSEWHERE

    def to_bytes(self) -> bytes:
        return self._hidden.to_bytes()

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._hidden.from_bytes(data)


class FarDevice(CpuAccelerator):
    """Hands out `FarBuffer`s, and host memory where pinned memory is asked for."""

    name = "far"

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), host_pinning=True)

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        host = super().allocate(numel, dtype)
        return host if pinned else FarBuffer(host)

    def current_device(self) -> DeviceId:
        return FAR
