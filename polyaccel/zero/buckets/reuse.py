"""Two ways to spare gathers: the learned order of use of sharded buckets, and second copies among near ranks.

[Note: Second copies]
Where some ranks reach each other faster than the rest (those of a host), they keep what was gathered first in a step
among them, each a slice, and gather it from each other when it is needed again: in the backward pass, and in later
micro-batches (ZeRO++, Wang et al. 2023, section 3.2). The values are those of the first gather, bit for bit. The copy
is forgotten whenever parameters change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from logging import INFO, WARNING, getLogger
from math import inf

from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.zero.plan.bucket_plan import BucketPlan
from polyaccel.zero.plan.layout import Bucket

log = getLogger(__name__)


class UseOrder:
    """The order in which buckets were held in the last step, and where the present step stands in it."""

    def __init__(self, numels: Mapping[int, int], *, warn: bool) -> None:
        self._numels = numels
        self._warn = warn
        self._learned: list[int] = []
        self._present: list[int] = []
        self._position = 0
        self._has_deviated = False
        self._is_changing = self._may_deviate = False

    def note(self, index: int) -> None:
        """Bucket `index` is used now."""
        self._present.append(index)
        if not self._learned:
            return
        try:
            expected = self._learned.index(index, self._position)
        except ValueError:
            expected = -1
        if expected != self._position and not self._has_deviated and not self._may_deviate:
            self._has_deviated = True
            level = WARNING if self._warn else INFO
            log.log(level, "buckets are used in another order than in the last step; they are gathered on demand")
        if expected >= 0:
            self._position = expected + 1

    def upcoming(self) -> Iterator[int]:
        """The buckets that come next, nearest first, if the order holds."""
        yield from self._learned[self._position :]

    def distance(self, index: int) -> float:
        """Elements that will be used before bucket `index` is; infinite if it is not expected again."""
        passed = 0
        for upcoming in self.upcoming():
            if upcoming == index:
                return passed
            passed += self._numels[upcoming]
        return inf

    def end_step(self) -> None:
        """The step is over: expect its order from now on."""
        if self._present:
            self._learned, self._present = self._present, []
        self._position = 0
        self._has_deviated &= not self._warn
        self._may_deviate, self._is_changing = self._is_changing, False

    def will_change(self) -> None:
        """A use was found out in this step, and will come earlier in the next one: no reason to tell anybody."""
        self._is_changing = True


class SecondCopies:
    """This rank's slices of gathered buckets. See [Note: Second copies]. Without `near` it keeps nothing."""

    def __init__(self, near: Communicator | None) -> None:
        self._near = near
        self._slices: dict[int, Buffer] = {}
        self._kept: dict[int, bool] = {}
        """The buckets that are kept, and whether their values are exact."""

    def keep(self, plan: BucketPlan, full: Buffer, *, is_exact: bool) -> None:
        """Keep this rank's slice of `full`, the gathered bucket of `plan`, unless it is kept already."""
        index, second = plan.bucket.index, plan.second
        if self._near is None or second is None or index in self._kept:
            return
        own = self._slices.get(index)
        if own is None:
            own = self._slices[index] = self._near.allocate(second.numel, second.dtype)
        own.copy_from(full.view(self._near.rank * second.numel, second.numel))
        self._kept[index] = is_exact

    def gather(self, bucket: Bucket, full: Buffer, *, exact: bool, async_op: bool) -> Work | None:
        """Start to gather the bucket into `full`; None if it is not kept, or not in exact values that are asked for."""
        if self._near is None or bucket.index not in self._kept or (exact and not self._kept[bucket.index]):
            return None
        own = self._slices[bucket.index]
        return self._near.all_gather(
            full, own, async_op=async_op, label="parameters of near ranks", bucket=bucket.index
        )

    def forget(self, index: int) -> None:
        """Bucket `index` has changed. Every rank does this alike."""
        self._kept.pop(index, None)

    def forget_all(self) -> None:
        self._kept.clear()

    def trim(self) -> None:
        """Forget all and give the memory back."""
        self._kept.clear()
        self._slices.clear()
