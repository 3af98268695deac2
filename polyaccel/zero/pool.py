"""Flat buffers that are borrowed and given back, so that a step allocates nothing anew."""

from __future__ import annotations

from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.types import DType


class BufferPool:
    """Communicator-owned buffers for what exists only while it is used: gradients under way, gathered parameters.

    Given-back buffers are kept for the next borrower. Contents are undefined.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._free: dict[DType, list[Buffer]] = {}
        self._lent: dict[int, Buffer] = {}

    @property
    def lent_count(self) -> int:
        return len(self._lent)

    def acquire(self, numel: int, dtype: DType) -> Buffer:
        """A buffer of `numel` elements: the smallest free one that is large enough, cut to that length, or a new
        one."""
        free = self._free.setdefault(dtype, [])
        fitting = [buffer for buffer in free if buffer.numel >= numel]
        if fitting:
            whole = min(fitting, key=len)
            free.remove(whole)
        else:
            if free:
                free.remove(
                    max(free, key=len)
                )  # too small for what is needed now: replaced, not joined, by a larger one
            whole = self._communicator.allocate(numel, dtype)
        self._lent[whole.data_ptr()] = whole
        return whole.view(0, numel)

    def release(self, buffer: Buffer) -> None:
        """Take back what `acquire` gave."""
        whole = self._lent.pop(buffer.data_ptr())
        self._free[whole.dtype].append(whole)
