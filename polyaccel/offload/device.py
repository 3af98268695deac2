"""The device tier: states stay in the accelerator's own memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError
from polyaccel.offload.tier import Tier, TierOptions


class DeviceTier(Tier):
    """Memory of the device. Lending moves nothing: the buffers themselves are lent."""

    name = "device"

    def __init__(self) -> None:
        self._accelerator: Accelerator | None = None

    @property
    def compute(self) -> Accelerator:
        if self._accelerator is None:
            raise InvariantError("the device tier was used before it was opened, or after it was closed")
        return self._accelerator

    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        self._accelerator = accelerator

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        return self.compute.allocate(numel, dtype)

    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        for group in groups:
            yield list(group)

    def close(self) -> None:
        self._accelerator = None
