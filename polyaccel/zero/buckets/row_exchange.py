"""Gradients of a parameter that travel as rows: those in which the gradient of some rank is not zero.

[Note: Gradients as rows]
A batch uses few rows of an embedding, and its gradient is zero in all others. Such a parameter has a bucket to itself.
The ranks first gather the numbers of their rows, so that each knows the union. They copy these rows together, zeros for
those that a rank lacks, and reduce what is then a short buffer as they reduce others. So the sums have the order and
the rounding of whole gradients, bit for bit. Sharded updates reduce-scatter it, in uneven parts: a rank receives the
rows of its shard. A rank whose gradient is whole, as of weights that the output layer shares, says so, and then all
ranks reduce the whole bucket. They do so too where the union is every row.

Gathering the numbers waits for the other ranks, where a bucket's reduction otherwise is launched and left.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.ops.base import SCALE
from polyaccel.ops.rows import MERGE_ROWS, PUT_ROWS, ROW_OPS, TAKE_ROWS
from polyaccel.zero.plan.layout import Bucket
from polyaccel.zero.plan.policy import ReductionPolicy

_WHOLE = -1
"""What a rank says instead of a number of rows."""


@dataclass(frozen=True)
class RowSet:
    """Numbers of rows on the device, ascending: the first `count` of `indices`."""

    indices: Buffer
    count: int

    @cached_property
    def on_host(self) -> array[int]:
        """The numbers on the host."""
        found = array("q")
        if self.count:
            found.frombytes(self.indices.view(0, self.count).to_bytes())
        return found

    def cut(self, bounds: Sequence[int], width: int) -> list[int]:
        """Where elements `bounds` of the whole stand when the rows are together."""
        rows, places = self.on_host, []
        for bound in bounds:
            row, element = divmod(bound, width)
            index = bisect_left(rows, row)
            is_inside = index < len(rows) and rows[index] == row
            places.append(index * width + (element if is_inside else 0))
        return places


class RowExchange:
    """The rows of the only parameter of `bucket`, agreed on by the ranks of `communicator`.

    See [Note: Gradients as rows].
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, accelerator: Accelerator) -> None:
        self.width = bucket.kind.row_numel
        self.rows = bucket.slots[0].param.numel // self.width
        self._numel = bucket.slots[0].param.numel
        self._bounds = [bucket.shard_bounds(rank)[0] for rank in range(bucket.world_size)] + [bucket.numel]
        self._bucket = bucket
        self._communicator = communicator
        self._accelerator = accelerator
        self._kernels = accelerator.kernels()

    @classmethod
    def of_bucket(cls, bucket: Bucket, communicator: Communicator, accelerator: Accelerator) -> Self | None:
        """The exchange of a bucket; None where its gradients travel whole."""
        has_kernels = all(op in accelerator.kernels() for op in ROW_OPS)
        return cls(bucket, communicator, accelerator) if bucket.kind.row_numel and has_kernels else None

    def agree(self, own: Sequence[Buffer] | None) -> RowSet | None:
        """The rows that some rank has; None where a rank's gradient is whole, which `own` says by None. Collective."""
        mine = None if own is None else self.unite(own)
        if self._communicator.world_size == 1:
            return mine
        counts = self._gather_counts(_WHOLE if mine is None else mine.count)
        if mine is None or _WHOLE in counts:
            return None
        gathered = self._communicator.allocate(sum(counts), DType.INT64)
        if gathered.numel:
            self._communicator.all_gather(
                gathered, mine.indices.view(0, mine.count), counts=counts, label="rows", bucket=self._bucket.index
            )
        return self._merge(gathered)

    def unite(self, parts: Sequence[Buffer]) -> RowSet:
        """The rows of all parts."""
        together = self._communicator.allocate(sum(part.numel for part in parts), DType.INT64)
        offset = 0
        for part in parts:
            together.view(offset, part.numel).copy_from(part)
            offset += part.numel
        return self._merge(together)

    def _merge(self, indices: Buffer) -> RowSet:
        return RowSet(indices, self._kernels[MERGE_ROWS](indices) if indices.numel else 0)

    def _gather_counts(self, mine: int) -> array[int]:
        ranks = self._communicator.world_size
        counts, own = (self._communicator.allocate(numel, DType.INT64) for numel in (ranks, 1))
        own.from_bytes(array("q", [mine]).tobytes())
        self._communicator.all_gather(counts, own, label="numbers of rows", bucket=self._bucket.index)
        return array("q", counts.to_bytes())

    def reduce(
        self, source: Buffer, rows: RowSet, dtype: DType, policy: ReductionPolicy, label: str, *, scatters: bool
    ) -> Callable[[], None]:
        """Launch the reduction of `rows` of a whole gradient, travelling as `dtype`. The returned function waits and
        writes them back: all, or where it `scatters`, those of this rank's shard and undefined ones outside of it."""
        resting = self._take(source, rows)
        travelling = resting
        if resting.dtype is not dtype:
            travelling = self._communicator.allocate(resting.numel, dtype)
            travelling.copy_from(resting)
        before, after, op = policy.scaling(self._communicator.world_size)
        if before != 1.0:
            self._kernels[SCALE](travelling, before)
        low, high, index = 0, travelling.numel, self._bucket.index
        if scatters:
            parts = list(pairwise(rows.cut(self._bounds, self.width)))
            low, high = parts[self._communicator.rank]
            own, counts = travelling.view(low, high - low), [end - begin for begin, end in parts]
            work = self._communicator.reduce_scatter(
                own, travelling, op, counts=counts, async_op=policy.overlap, label=label, bucket=index
            )
        else:
            own = travelling
            work = self._communicator.all_reduce(travelling, op, async_op=policy.overlap, label=label, bucket=index)

        def wait() -> None:
            work.wait()
            if after != 1.0 and own.numel:
                self._kernels[SCALE](own, after)
            if travelling is not resting:
                resting.copy_from(travelling)
            self._put(source, resting, rows, low, high)

        return wait

    def _take(self, source: Buffer, rows: RowSet) -> Buffer:
        """The rows of a whole gradient, together in a new buffer."""
        out = self._communicator.allocate(rows.count * self.width, source.dtype)
        indices = rows.indices.view(0, rows.count)
        self._kernels[TAKE_ROWS](out, source.view(0, self._numel), indices, self.width)
        return out

    def _put(self, target: Buffer, together: Buffer, rows: RowSet, low: int, high: int) -> None:
        """Write those rows back into a whole gradient that have elements in [low, high) of `together`."""
        first, last = low // self.width, -(-high // self.width)
        if low < high:
            found = together.view(first * self.width, (last - first) * self.width)
            indices = rows.indices.view(first, last - first)
            self._kernels[PUT_ROWS](target.view(0, self._numel), found, indices, self.width)
