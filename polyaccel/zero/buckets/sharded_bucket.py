"""One bucket of sharded parameters on one rank: its slice for good, and the whole while it is needed."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer, BufferViews
from polyaccel.offload.tier import Fetch, Tier
from polyaccel.zero.plan.bucket_plan import BucketPlan


@dataclass(eq=False, slots=True)
class RetainedBucket:
    """A gathered bucket that the ranks together have freed and this one still uses. `references` to its memory were
    there when it was lent."""

    full: Buffer
    references: int
    is_exact: bool


class ShardedBucket:
    """One bucket's parameters where they are sharded: this rank's slice for good, all of it only while needed.

    `source` is the tier that `own` rests in, off the device; None for one on the device, which is used as it is.
    """

    def __init__(self, plan: BucketPlan, own: Buffer, source: Tier | None) -> None:
        self.plan = plan
        self.bucket = bucket = plan.bucket
        self.own = own
        self.source = source
        self.full: Buffer | None = None
        self.slots = BufferViews((slot.offset, slot.param.numel) for slot in bucket.slots)
        """The parameters in `full`."""
        self.fetch: Fetch | None = None
        """This rank's part of `full` is under way from `source`, and the gather not launched yet."""
        self.work: Work | None = None
        self.holds = 0
        self.uses = 0
        """By this rank alone. See [Note: Rank-local bucket use]."""
        self.kept: RetainedBucket | None = None
        self.is_exact = True
        """`full` has the values of the slices, not what is left of them after a quantised gather."""
        self.is_ahead = False
        """Gathered before it was needed."""
        self.references = 0
        """To the memory of `full` when it was lent."""
        self.began_in = 0
        """The period in which the fetch began."""

    @property
    def is_whole(self) -> bool:
        return self.full is not None and self.fetch is None and self.work is None

    @property
    def is_own(self) -> bool:
        """Return whether the own slice is the bucket: with one rank nothing is gathered."""
        return self.source is None and self.bucket.world_size == 1

    def own_part(self, full: Buffer, rank: int) -> Buffer:
        """Rank `rank`'s slice in the whole bucket."""
        low, high = self.bucket.shard_bounds(rank)
        return full.view(low, high - low)

    @property
    def is_slow(self) -> bool:
        """Whether fetching takes so long that it is worth beginning ahead of the gather."""
        return self.source is not None and not self.source.is_resident
