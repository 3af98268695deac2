"""Reuse of scratch memory: fresh pages cost more than the copy into them."""

from __future__ import annotations

from threading import Lock

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType

_ROUND_NUMEL = 1024


class ScratchPool:
    """Reusable buffers. It holds at most as many as were in use at one time. Threads may share it.

    Args:
        accelerator: Device that allocates.
        pinned: Whether buffers are page-locked host memory.
    """

    def __init__(self, accelerator: Accelerator, *, pinned: bool = False) -> None:
        self._accelerator = accelerator
        self._pinned = pinned
        self._free: dict[DType, list[Buffer]] = {}
        self._lock = Lock()

    def take(self, numel: int, dtype: DType) -> Buffer:
        """Borrow a buffer, allocating one where none fits.

        Args:
            numel: Elements that are needed.
            dtype: Element type.

        Returns:
            A buffer of at least `numel` elements with undefined contents. The caller cuts a view and gives the buffer
            back.
        """
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
        """Return a buffer to the pool. The caller no longer uses it.

        Args:
            block: Buffer from `take`, whole.
        """
        with self._lock:
            self._free.setdefault(block.dtype, []).append(block)
