"""The device tier: states stay in the accelerator's own memory."""

from __future__ import annotations

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.errors import InvariantError
from polyaccel.offload.tier import Tier
from polyaccel.types import DType


class DeviceTier(Tier):
    """Nothing moves: a fetched buffer is the buffer."""

    name = "device"

    def __init__(self) -> None:
        self._accelerator: Accelerator | None = None

    def open(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        if self._accelerator is None:
            raise InvariantError("the device tier was used before it was opened")
        return self._accelerator.allocate(numel, dtype)

    def fetch(self, buffer: Buffer) -> Buffer:
        return buffer

    def evict(self, buffer: Buffer, fetched: Buffer) -> None:
        if fetched is not buffer:
            raise InvariantError("the device tier got back another buffer than it lent")

    def close(self) -> None:
        self._accelerator = None
