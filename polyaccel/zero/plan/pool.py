"""Flat buffers that are borrowed and given back, so that a step allocates nothing new; those of gradients under way.

The engine borrows its buffers here, and the planner runs the same code with lengths for buffers to learn what the
engine will hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from polyaccel.core.types import DType
from polyaccel.zero.plan.policy import ReductionPolicy


class Poolable(Protocol):
    """A buffer, or a length in its place. A view that starts where its buffer starts has the same `data_ptr`."""

    numel: int
    dtype: DType

    def view(self, offset: int, numel: int) -> Self: ...

    def data_ptr(self) -> int: ...


L = TypeVar("L", bound=Poolable)
Allocate = Callable[[int, DType], L]


class BufferPool(Generic[L]):
    """Buffers from `allocate` for values that exist only while they are used: gradients under way, gathered parameters.

    Given-back buffers are kept for the next borrower. Contents are undefined. With `max_numel` the pool never holds
    more elements than that, lent or not, unless more are lent at once: a buffer then serves its own length only, for a
    large one in the hands of a small borrower would not be counted in full.
    """

    def __init__(self, allocate: Allocate[L], max_numel: int | None = None) -> None:
        self._allocate = allocate
        self._max_numel = max_numel
        self._free: dict[DType, list[L]] = {}
        self._lent: dict[int, L] = {}

    @property
    def in_use_count(self) -> int:
        return len(self._lent)

    def held(self) -> list[tuple[int, DType]]:
        """Length and type of every buffer, lent or free."""
        free = (buffer for buffers in self._free.values() for buffer in buffers)
        return [(buffer.numel, buffer.dtype) for buffer in (*self._lent.values(), *free)]

    @property
    def held_numel(self) -> int:
        """Elements of all buffers, lent and free."""
        return sum(numel for numel, _ in self.held())

    def acquire(self, numel: int, dtype: DType) -> L:
        """A buffer of `numel` elements: the smallest free one that may serve it, cut to that length, or a new one."""
        free = self._free.setdefault(dtype, [])
        bounded = self._max_numel is not None
        fitting = [buffer for buffer in free if buffer.numel == numel or (buffer.numel > numel and not bounded)]
        if fitting:
            whole = min(fitting, key=_numel)
            free.remove(whole)
        else:
            self._make_room(numel, dtype)
            whole = self._allocate(numel, dtype)
        self._lent[whole.data_ptr()] = whole
        return whole if whole.numel == numel else whole.view(0, numel)  # the same object in every step, if it can be

    def _make_room(self, numel: int, dtype: DType) -> None:
        if self._max_numel is None:
            if free := self._free[dtype]:  # all too small for what is needed now: one is replaced by a larger one
                free.remove(max(free, key=_numel))
            return
        while self.held_numel + numel > self._max_numel:
            idle = max(self._free.values(), key=lambda free: max(map(_numel, free), default=0))
            if not idle:
                return
            idle.remove(max(idle, key=_numel))

    def trim(self) -> None:
        """Release all buffers that are not lent."""
        self._free.clear()

    def forget(self, buffer: L) -> None:
        """Never lend again a buffer that `acquire` gave: views of it are still held."""
        del self._lent[buffer.data_ptr()]

    def release(self, buffer: L) -> None:
        """Take back a buffer that `acquire` gave."""
        whole = self._lent.pop(buffer.data_ptr())
        self._free.setdefault(whole.dtype, []).append(whole)


def _numel(buffer: Poolable) -> int:
    return buffer.numel


class Reduction(Protocol):
    """A reduction that was launched. `finish` gives back the buffers that it borrowed."""

    @property
    def is_pending(self) -> bool: ...

    def finish(self) -> None: ...


class InFlight(Generic[L]):
    """The pool from which reductions borrow full gradient buffers, and those reductions, oldest first.

    No more than `policy.max_in_flight` buffers are lent at once, as long as an older reduction can be finished first.
    """

    def __init__(self, allocate: Allocate[L], policy: ReductionPolicy) -> None:
        self.pool = BufferPool(allocate)
        self._policy = policy
        self._reductions: deque[Reduction] = deque()
        """As they were launched; some may be finished."""

    def make_room(self) -> None:
        """Finish the oldest reduction if no more buffers may be lent. Call it before a buffer is borrowed."""
        if self.pool.in_use_count >= self._policy.max_in_flight:
            self._finish_oldest()

    def add(self, reduction: Reduction) -> None:
        """Count a reduction that was launched; it is finished at once where reductions do not overlap backward."""
        self._reductions.append(reduction)
        if not self._policy.overlap:
            self._finish_oldest()

    def clear(self) -> None:
        """Forget the reductions: all were finished."""
        self._reductions.clear()

    def _finish_oldest(self) -> None:
        while self._reductions:
            reduction = self._reductions.popleft()
            if reduction.is_pending:
                reduction.finish()
                return
