"""The host tier: states stand in the host's memory, and the host's kernels update them there."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.errors import InvariantError
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.types import DType


class HostTier(Tier):
    """Memory of the host; page-locked where `pin_memory` asks for it and the device can use it."""

    name = "host"

    def __init__(self) -> None:
        self._host: Accelerator | None = None
        self._pinned_by: Accelerator | None = None

    @property
    def compute(self) -> Accelerator:
        if self._host is None:
            raise InvariantError("the host tier was used before it was opened, or after it was closed")
        return self._host

    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        self._host = host
        pins = options.pin_memory and accelerator is not host and accelerator.capabilities().host_pinning
        self._pinned_by = accelerator if pins else None

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        if self._pinned_by is not None:
            return self._pinned_by.allocate(numel, dtype, pinned=True)
        return self.compute.allocate(numel, dtype)

    def lend(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        for group in groups:
            yield list(group)

    def close(self) -> None:
        self._host = self._pinned_by = None
