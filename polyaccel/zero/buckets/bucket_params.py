"""The buffers of one bucket's parameters on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.zero.plan.bucket_plan import BucketPlan, TrainedBucketPlan
from polyaccel.zero.plan.layout import Bucket, Slice, Slot
from polyaccel.zero.resources import Tiers


class BucketParams:
    """One bucket's parameters on this rank, and their master weights, in the buffers of `plan`.

    `own` is this rank's shard. `full` is the whole bucket where that exists for good; where parameters are sharded it
    exists only while `GatheredBuckets` makes it, and `own` rests in `tier`. `master` covers the elements that this rank
    updates: its own shard, or everything under a replicated optimizer. It is a view of the parameters when those are
    of the master type already and rest as it would, so that the update needs no copy and no extra byte; else it is in
    the tier of the bucket's states.
    """

    def __init__(self, plan: BucketPlan, tiers: Tiers, communicator: Communicator) -> None:
        bucket, params = plan.bucket, plan.params
        self.shared = communicator.allocate_shared(bucket.numel, params.dtype) if plan.may_share else None
        """One memory of all ranks, which is `full` then. See [Note: Shared parameters per host]."""
        self.full: Buffer | None = None if self.shared is None else self.shared.whole
        self.plan = plan = plan if self.shared is None else plan.once_a_host()
        self.bucket = bucket
        self.is_sharded = plan.is_sharded
        self.tier = tiers.of_params(plan)
        low, high = bucket.shard_bounds(communicator.rank)
        if plan.is_sharded:
            self.own = self.tier.allocate(f"bucket{bucket.index}.params", params.numel, params.dtype)
        else:
            self.full = communicator.allocate(params.numel, params.dtype) if self.full is None else self.full
            self.own = self.full.view(low, high - low)
        self.origin = low if plan.updates_shard else 0
        """The bucket's element where `master` starts."""
        self.master = extent = self.own if plan.updates_shard or self.full is None else self.full
        self.out: Buffer | None = None
        """Where new parameters go; None where they are the master weights."""
        if isinstance(plan, TrainedBucketPlan) and plan.master is not None:
            key = f"bucket{bucket.index}.master"
            self.master = tiers.of_update(plan).allocate(key, plan.master.numel, plan.master.dtype)
            self.out = extent

    @property
    def private_view(self) -> Buffer | None:
        """The whole bucket as frontends see it, where it exists for good."""
        return self.full if self.shared is None else self.shared.private_view

    @property
    def updates_all(self) -> bool:
        """Whether `master` is the whole bucket, on every rank."""
        return self.plan.updates_all

    @property
    def master_is_view(self) -> bool:
        """Whether the parameters are the master weights."""
        return self.out is None

    def slices(self) -> tuple[Slice, ...]:
        """The parameters' parts of `master`."""
        return tuple(piece for slot in self.bucket.slots if (piece := self.slice_of(slot)) is not None)

    def slice_of(self, slot: Slot) -> Slice | None:
        """The part of `master` that a parameter of the bucket has; None where it has none."""
        low, high = self.origin, self.origin + self.master.numel
        begin, end = max(low, slot.offset), min(high, slot.end)
        return Slice(slot.param.fqn, begin - slot.offset, end - begin, begin - low) if begin < end else None


@dataclass(frozen=True, slots=True)
class Replica:
    """Elements [start, start + numel) of parameter `fqn`, which all of `ranks` (global) hold: in bucket `bucket`, from
    its element `offset` on."""

    fqn: str
    start: int
    numel: int
    ranks: tuple[int, ...]
    bucket: int
    offset: int


def replicas_of(
    buckets: Iterable[BucketParams], holders: Callable[[Bucket], Communicator], most_numel: int
) -> tuple[Replica, ...]:
    """Return copies of parameters that this rank holds alone, in pieces, without shared memory."""
    found = []
    for params in buckets:
        group = holders(params.bucket)
        if params.full is None or params.shared is not None or group.world_size == 1:
            continue
        for slot in params.bucket.slots:
            for start in range(0, slot.param.numel, most_numel):
                numel = min(most_numel, slot.param.numel - start)
                where = params.bucket.index, slot.offset + start
                found.append(Replica(slot.param.fqn, start, numel, group.ranks, *where))
    return tuple(found)
