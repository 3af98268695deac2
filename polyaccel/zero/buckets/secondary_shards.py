"""Second copies of sharded buckets among near ranks, which spare gathers from far ones.

[Note: Secondary shards]
Where some ranks reach each other faster than the rest (those of a host), they keep what was gathered first in a step
among them, each a slice, and gather it from each other when it is needed again: in the backward pass, and in later
micro-batches (ZeRO++, Wang et al. 2023, section 3.2). The values are those of the first gather, bit for bit. The copy
is forgotten whenever parameters change.
"""

from __future__ import annotations

from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.zero.plan.bucket_plan import BucketPlan
from polyaccel.zero.plan.layout import Bucket
from polyaccel.zero.resources import Communicators


class SecondaryShards:
    """This rank's slices of gathered buckets. See [Note: Secondary shards]. It keeps nothing where no ranks are
    near."""

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self._slices: dict[int, Buffer] = {}
        self._kept: dict[int, bool] = {}
        """The buckets that are kept, and whether their values are exact."""

    @property
    def nbytes(self) -> int:
        """What the slices take."""
        return sum(own.nbytes for own in self._slices.values())

    def keep(self, plan: BucketPlan, full: Buffer, *, is_exact: bool) -> None:
        """Keep this rank's slice of `full`, the gathered bucket of `plan`, unless it is kept already."""
        index, second, near = plan.bucket.index, plan.second, self._communicators.get_groups(plan.bucket).hpz_group
        if near is None or second is None or index in self._kept:
            return
        own = self._slices.get(index)
        if own is None:
            own = self._slices[index] = near.allocate(second.numel, second.dtype)
        own.copy_from(full.view(near.rank * second.numel, second.numel))
        self._kept[index] = is_exact

    def gather(self, bucket: Bucket, full: Buffer, *, exact: bool, async_op: bool) -> Work | None:
        """Start to gather the bucket into `full`; None if it is not kept, or not in exact values that are asked for."""
        near = self._communicators.get_groups(bucket).hpz_group
        if near is None or bucket.index not in self._kept or (exact and not self._kept[bucket.index]):
            return None
        own = self._slices[bucket.index]
        return near.all_gather(full, own, async_op=async_op, label="parameters of near ranks", bucket=bucket.index)

    def forget(self, index: int) -> None:
        """Bucket `index` has changed. Every rank does this in the same way."""
        self._kept.pop(index, None)

    def forget_all(self) -> None:
        self._kept.clear()

    def trim(self) -> None:
        """Forget all and give the memory back."""
        self._kept.clear()
        self._slices.clear()
