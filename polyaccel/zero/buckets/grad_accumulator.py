"""Gradients of one bucket on one rank before a reduction takes them: their sums, and how many of them arrived."""

from __future__ import annotations

from collections.abc import Callable

from polyaccel.core.buffer import Buffer, BufferViews
from polyaccel.core.types import ReduceOp
from polyaccel.ops.base import REDUCE, KernelTable
from polyaccel.zero.plan.layout import Bucket

GradientWriter = Callable[[Buffer, bool], None]
"""Writes a gradient to its view of a bucket: adds it to what is there, or overwrites it if that is False."""


class GradAccumulator:
    """A buffer for a whole bucket, in which gradients of this rank add up slot by slot.

    Slots that are not in `filled` have undefined contents until `take` zeroes them. `rows` has the rows that gradients
    of the bucket's only slot consist of; None where they are whole.
    """

    def __init__(self, bucket: Bucket, kernels: KernelTable) -> None:
        self._kernels = kernels
        self._slots = BufferViews((slot.offset, slot.param.numel) for slot in bucket.slots)
        self._gaps = BufferViews(_gaps(bucket))
        self.buffer: Buffer | None = None
        self.is_borrowed = False
        """`buffer` belongs to a pool."""
        self._views: tuple[Buffer, ...] = ()
        self.filled: set[int] = set()
        self.rows: list[Buffer] | None = []

    def use(self, buffer: Buffer, *, borrowed: bool) -> None:
        """Accumulate in `buffer` from now on."""
        self.buffer, self.is_borrowed, self._views = buffer, borrowed, self._slots.get_views(buffer)

    def put(self, index: int, gradient: Buffer | GradientWriter, rows: Buffer | None = None) -> None:
        """Add a gradient, flat and of any floating type, to slot `index`, or let it be written there. `rows`: the
        numbers of the only rows in which it is not zero."""
        if rows is None:
            self.rows = None
        elif self.rows is not None:
            self.rows.append(rows)
        view = self._views[index]
        if not isinstance(gradient, Buffer):
            gradient(view, index in self.filled)
        elif index in self.filled:
            self._kernels[REDUCE](view, gradient, ReduceOp.SUM)
        else:
            view.copy_from(gradient)
        self.filled.add(index)

    def at(self, index: int) -> Buffer | None:
        """Return the sum of slot `index`, which may be changed, or None if the slot holds nothing."""
        self.rows = None
        return self._views[index] if index in self.filled else None

    def parts(self) -> list[Buffer]:
        """Return the sums of all slots that hold something, to be read."""
        return [self._views[index] for index in sorted(self.filled)]

    def take(self, *, keep: bool) -> Buffer:
        """Return the buffer with zeros in empty slots and padding, and forget the sums; unless `keep`, it too."""
        taken = self.buffer
        assert taken is not None  # the caller's condition
        for gap in self._gaps.get_views(taken):
            gap.fill(0.0)
        for index, view in enumerate(self._views):
            if index not in self.filled:
                view.fill(0.0)
        self.forget_sums()
        if not keep:
            self.forget_buffer()
        return taken

    def forget_sums(self) -> None:
        """Hold nothing, in the same buffer."""
        self.filled, self.rows = set(), []

    def forget_buffer(self) -> None:
        """Accumulate nowhere until the next `use`."""
        self.buffer, self.is_borrowed, self._views = None, False, ()


class PassArrivals:
    """How many gradients of a bucket arrived in the present pass, and how many are expected in each.

    A pass is expected to bring what any earlier pass brought, as often.
    """

    def __init__(self, slots: int) -> None:
        self._expected = [1] * slots
        self._most = [0] * slots
        self._present = [0] * slots
        self._missing = slots

    @property
    def are_complete(self) -> bool:
        """Every gradient that this pass expects has arrived."""
        return self._missing == 0

    def begin_pass(self, *, expects_grads: bool) -> None:
        """Count from 0 again."""
        self._present = [0] * len(self._present)
        self._missing = sum(self._expected) if expects_grads else 0

    def count(self, index: int) -> None:
        """A gradient of slot `index` arrived."""
        if self._present[index] < self._expected[index]:
            self._missing -= 1
        self._present[index] += 1

    def end_pass(self) -> None:
        """Expect from now on what any pass brought."""
        self._most = [max(pair) for pair in zip(self._most, self._present, strict=True)]
        self._expected = list(self._most)


def _gaps(bucket: Bucket) -> tuple[tuple[int, int], ...]:
    """The padding: (offset, numel) of every run of the bucket that belongs to no slot."""
    ends = [0, *(slot.end for slot in bucket.slots)]
    starts = [*(slot.offset for slot in bucket.slots), bucket.numel]
    return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)
