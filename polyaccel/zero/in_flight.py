"""Bytes of the gradient buckets under way, by following the pool from which a step borrows them.

A buffer serves whatever fits into it and is kept for the next borrower, so a pool may hold more than the largest
buckets that are ever under way together. Gradients are taken to come in layout order; of the buckets under way the one
that was launched first is finished first. Where parameters are sharded, a unit's buckets are launched together, and
those of persistent parameters at the end of the pass.
"""

from __future__ import annotations

from collections import deque

from polyaccel.types import DType
from polyaccel.zero.layout import ShardLayout
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.precision import Precision

Need = tuple[int, DType]
"""Elements and type of a buffer."""


def in_flight_nbytes(
    policy: ZeroPolicy, layout: ShardLayout, precision: Precision, *, micro_batches: int, most_in_use: int
) -> int:
    """What the pool of gradient buckets holds after two steps, at most `most_in_use` buffers lent where that can be."""
    groups: dict[tuple[str, int], list[Need]] = {}
    lasting: list[Need] = []
    by_unit = policy.params is Placement.SHARDED
    before = None
    for bucket in layout.buckets:
        kind = bucket.kind
        accumulates = precision.gradient_of(kind.dtype, accumulates=micro_batches > 1)
        need = (bucket.numel, precision.reduce_of(kind.dtype))
        if not kind.trainable or (policy.grads is Placement.REPLICATED and accumulates is need[1]):
            continue  # nothing to reduce, or reduced where it rests
        if by_unit and kind.persistent:
            lasting.append(need)
            continue
        start = before[1] if by_unit and before is not None and before[0] == kind.unit else bucket.index
        before = (kind.unit, start)
        groups.setdefault(before, []).append(need)

    pool = _Pool(most_in_use)
    passes = micro_batches if policy.grads is Placement.SHARDED else 1
    for _ in range(2):
        for _ in range(passes):
            last = [pool.borrow(need) for need in lasting]
            for group in groups.values():
                pool.launch([pool.borrow(need) for need in group])
            pool.launch(last)
        pool.finish_all()
    return pool.nbytes


class _Pool:
    """`BufferPool` and what `ZeroStep` borrows from it, in numbers."""

    def __init__(self, most_in_use: int) -> None:
        self._most_in_use = most_in_use
        self._free: list[Need] = []
        self._lent = 0
        self._under_way: deque[Need] = deque()

    @property
    def nbytes(self) -> int:
        """What it holds when nothing is lent."""
        return sum(numel * dtype.itemsize for numel, dtype in self._free)

    def borrow(self, need: Need) -> Need:
        """The buffer that serves `need`."""
        if self._lent >= self._most_in_use and self._under_way:
            self._finish_oldest()
        self._lent += 1
        idle = [buffer for buffer in self._free if buffer[1] is need[1]]
        fitting = [buffer for buffer in idle if buffer[0] >= need[0]]
        if idle:
            self._free.remove(min(fitting, key=_numel) if fitting else max(idle, key=_numel))
        return min(fitting, key=_numel, default=need)

    def launch(self, buffers: list[Need]) -> None:
        self._under_way.extend(buffers)

    def finish_all(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._free.append(self._under_way.popleft())
        self._lent -= 1


def _numel(need: Need) -> int:
    return need[0]
