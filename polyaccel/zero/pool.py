"""Flat buffers that are borrowed and given back, so that a step allocates nothing anew."""

from __future__ import annotations

from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.types import DType


class BufferPool:
    """Communicator-owned buffers for what exists only while it is used: gradients under way, gathered parameters.

    Given-back buffers are kept for the next borrower. Contents are undefined. With `max_numel` the pool never holds
    more elements than that, lent or not, unless more are lent at once: a buffer then serves its own length only, for a
    large one in the hands of a small borrower would be in nobody's count.
    """

    def __init__(self, communicator: Communicator, max_numel: int | None = None) -> None:
        self._communicator = communicator
        self._max_numel = max_numel
        self._free: dict[DType, list[Buffer]] = {}
        self._lent: dict[int, Buffer] = {}

    @property
    def lent_count(self) -> int:
        return len(self._lent)

    @property
    def held_numel(self) -> int:
        """Elements of all buffers, lent and free."""
        return sum(map(len, self._lent.values())) + sum(len(buffer) for free in self._free.values() for buffer in free)

    def acquire(self, numel: int, dtype: DType) -> Buffer:
        """A buffer of `numel` elements: the smallest free one that may serve it, cut to that length, or a new one."""
        free = self._free.setdefault(dtype, [])
        bounded = self._max_numel is not None
        fitting = [buffer for buffer in free if buffer.numel == numel or (buffer.numel > numel and not bounded)]
        if fitting:
            whole = min(fitting, key=len)
            free.remove(whole)
        else:
            self._make_room(numel, dtype)
            whole = self._communicator.allocate(numel, dtype)
        self._lent[whole.data_ptr()] = whole
        return whole if whole.numel == numel else whole.view(0, numel)  # the same object in every step, if it can be

    def _make_room(self, numel: int, dtype: DType) -> None:
        if self._max_numel is None:
            if free := self._free[dtype]:  # all too small for what is needed now: one is replaced by a larger one
                free.remove(max(free, key=len))
            return
        while self.held_numel + numel > self._max_numel:
            idle = max(self._free.values(), key=lambda free: max(map(len, free), default=0))
            if not idle:
                return
            idle.remove(max(idle, key=len))

    def trim(self) -> None:
        """Let go of everything that nobody borrows."""
        self._free.clear()

    def forget(self, buffer: Buffer) -> None:
        """Never lend again what `acquire` gave: somebody keeps it."""
        del self._lent[buffer.data_ptr()]

    def release(self, buffer: Buffer) -> None:
        """Take back what `acquire` gave."""
        whole = self._lent.pop(buffer.data_ptr())
        self._free.setdefault(whole.dtype, []).append(whole)
