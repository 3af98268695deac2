"""Host memory that a device shares best: page-locked where that is possible and asked for."""

from __future__ import annotations

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.types import DType


class HostMemory:
    """Memory that kernels of `host` reach and `accelerator` copies to and from; `pin` asks for page-locked memory.

    `is_the_devices`: the device works in host memory itself.
    """

    def __init__(self, accelerator: Accelerator, host: Accelerator, *, pin: bool) -> None:
        self.host = host
        self.is_the_devices = accelerator is host
        pins = pin and accelerator is not host and accelerator.capabilities().host_pinning
        self._pinned_by = accelerator if pins else None

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Zeros."""
        if self._pinned_by is not None:
            return self._pinned_by.allocate(numel, dtype, pinned=True)
        return self.host.allocate(numel, dtype)
