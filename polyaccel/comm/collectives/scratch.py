"""Scratch memory that is used again: fresh pages cost more than the copy into them."""

from __future__ import annotations

from threading import Lock

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType

_ROUND_NUMEL = 1024


class ScratchPool:
    """Hands out buffers and takes them back. Holds no more than were out at one time. `pinned`: host memory."""

    def __init__(self, accelerator: Accelerator, *, pinned: bool = False) -> None:
        self._accelerator = accelerator
        self._pinned = pinned
        self._free: dict[DType, list[Buffer]] = {}
        self._lock = Lock()

    def take(self, numel: int, dtype: DType) -> Buffer:
        """A buffer of at least `numel` elements with whatever was left in it. Cut a view of it."""
        with self._lock:
            free = self._free.setdefault(dtype, [])
            fitting = [block for block in free if block.numel >= numel]
            if fitting:
                block = min(fitting, key=lambda one: one.numel)
                free.remove(block)
                return block
            # A larger one replaces a smaller one, so that growing requests do not pile up.
            if free:
                free.remove(min(free, key=lambda one: one.numel))
        return self._accelerator.allocate(-(-numel // _ROUND_NUMEL) * _ROUND_NUMEL, dtype, pinned=self._pinned)

    def give_back(self, block: Buffer) -> None:
        with self._lock:
            self._free.setdefault(block.dtype, []).append(block)
