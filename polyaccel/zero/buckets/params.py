"""The life of parameters: where they rest, where frontends see them, how an update becomes visible on every rank.

[Note: Parameters once a host]
Where the communicator can share memory and the optimizer is sharded, a bucket is one memory of all ranks, at stage 3
too: nothing is gathered, and each rank updates its part where everybody reads it. Two meetings make that safe. No rank
writes before the small all-reduce with which an update begins (`GradientFacts`), which each enters after its backward
pass, when it has done reading; and none reads before the all-gather that publishes a bucket, which moves nothing there
but which each enters after its last write. Rank 0 alone writes the initial values. A user who changes parameters by
hand changes them for all ranks: each rank writing the same value is well, each rank multiplying by 0.9 is not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from logging import getLogger

from polyaccel.buffer import Buffer
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.offload.tier import Tier
from polyaccel.types import DType
from polyaccel.zero.buckets.gathering import Gathering, ShardedBucket
from polyaccel.zero.buckets.rounding import WeightRounding
from polyaccel.zero.parts import StepParts, Tiers
from polyaccel.zero.plan.bucket_plan import BucketPlan, StepPlan, TrainedBucketPlan
from polyaccel.zero.plan.layout import Bucket, Slice, Slot

log = getLogger(__name__)


class ParamOwner(ABC):
    """The frontend that parameters come from: it has their first values, and sees them wherever they move."""

    @abstractmethod
    def read_param(self, fqn: str) -> Buffer:
        """The parameter's present value, flat, in the precision that the model was built with."""

    def on_bound(self, fqn: str, view: Buffer) -> None:  # noqa: B027 - an owner that does not look need not be told
        """The parameter stands in `view` from now on."""

    def on_freed(self, fqn: str) -> None:  # noqa: B027 - likewise
        """The parameter is sharded now and stands nowhere as a whole."""


class BucketParams:
    """One bucket's parameters on this rank, and their master weights, in the buffers of `plan`.

    `own` is this rank's shard. `full` is the whole bucket where that exists for good; where parameters are sharded it
    exists only while `Gathering` makes it, and `own` rests in `tier`. `master` covers the elements that this rank
    updates: its own shard, or everything under a replicated optimizer. It is a view of the parameters when those are
    of the master type already and rest as it would, so that the update needs no copy and no extra byte; else it is in
    the tier of the bucket's states.
    """

    def __init__(self, plan: BucketPlan, tiers: Tiers, communicator: Communicator) -> None:
        bucket, params = plan.bucket, plan.params
        self.full: Buffer | None = None
        if plan.may_share:
            self.full = communicator.allocate_shared(bucket.numel, params.dtype)
        self.is_shared = self.full is not None
        """`full` is one memory of all ranks. See [Note: Parameters once a host]."""
        self.plan = plan = plan.once_a_host() if self.is_shared else plan
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
    def master_is_view(self) -> bool:
        """Whether the parameters are the master weights."""
        return self.out is None

    def slices(self) -> tuple[Slice, ...]:
        """The parameters' parts of `master`."""
        low, high = self.origin, self.origin + self.master.numel
        return tuple(
            Slice(slot.param.fqn, begin - slot.offset, end - begin, begin - low)
            for slot in self.bucket.slots
            if (begin := max(low, slot.offset)) < (end := min(high, slot.end))
        )


class ParamStore:
    """All parameters of a layout on one rank: bound to buckets, gathered while sharded, published after an update.

    They start from what `owner` reads on rank 0, in its precision. `waiting` is entered around waits for other ranks.
    """

    def __init__(
        self,
        plan: StepPlan,
        parts: StepParts,
        owner: ParamOwner,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._layout = plan.layout
        self._communicator = parts.communicators.exact
        self._accelerator = parts.accelerator
        self._owner = owner
        self._waiting = waiting
        self.steps: dict[str, int] = {param.fqn: 0 for param in plan.layout.params if param.trainable}
        """How many updates each parameter has had: none while no rank had a gradient for it, as in plain torch."""
        self.rounding = WeightRounding(self.steps, parts.accelerator, is_stochastic=plan.policy.stochastic_rounding)
        self._publishing: dict[int, Work] = {}
        self._has_warned = False
        self.buckets: list[BucketParams] = []
        for bucket in plan.buckets:
            self.buckets.append(self._bind(BucketParams(bucket, parts.tiers, self._communicator)))
        self.is_any_sharded = any(place.is_sharded for place in self.buckets)
        """Some bucket is whole only while it is gathered; the same on every rank."""
        self.gathering = Gathering(
            [ShardedBucket(place.plan, place.own, self._source(place)) for place in self.buckets if place.is_sharded],
            plan.policy.gathering,
            parts.communicators,
            self._show,
            self._hide,
            waiting,
        )

    def __getitem__(self, index: int) -> BucketParams:
        return self.buckets[index]

    def __iter__(self) -> Iterator[BucketParams]:
        return iter(self.buckets)

    def locate(self, fqn: str) -> tuple[BucketParams, Slot]:
        """The place of a parameter."""
        bucket, slot = self._layout.locate(fqn)
        return self.buckets[bucket.index], slot

    def full(self, index: int) -> Buffer:
        """The whole bucket, up to date. Raises ShardingError while it is sharded."""
        self.wait_published(index)
        whole = self.buckets[index].full
        return whole if whole is not None else self.gathering.full(index)

    def _bind(self, place: BucketParams) -> BucketParams:
        """Move a bucket's parameters into it. Bucket after bucket, so that few parameters exist twice."""
        bucket = place.bucket
        originals = {slot.param.fqn: self._owner.read_param(slot.param.fqn) for slot in bucket.slots}
        precise = _common_dtype({original.dtype for original in originals.values()})
        direct = place.full if precise is bucket.kind.dtype else None
        staging = direct if direct is not None else self._accelerator.allocate(bucket.numel, precise)
        writes = not place.is_shared or self._communicator.rank == 0
        for slot in bucket.slots if writes or direct is None else ():
            staging.view(slot.offset, slot.param.numel).copy_from(originals[slot.param.fqn])
        self._communicator.broadcast(staging, 0, label="initial parameters", bucket=bucket.index)
        if direct is None and writes:
            kept = place.own if place.full is None else place.full
            kept.copy_from(self._extent(staging, place))
        if not place.master_is_view:
            place.master.copy_from(staging.view(place.origin, place.master.numel))
        place.own.mark_written()
        if place.full is not None and place.is_shared:
            self._meet(place.full, place.own, bucket)  # what rank 0 wrote is there
        del originals, staging  # before views are handed out, which free the frontend's own copies
        if place.full is not None:
            self._show(bucket, [place.full.view(slot.offset, slot.param.numel) for slot in bucket.slots])
        else:
            self._hide(bucket)
        return place

    def _meet(self, full: Buffer, own: Buffer, bucket: Bucket) -> None:
        """Wait until every rank has come here and its writes to a bucket in shared memory are visible."""
        self._communicator.all_gather(full, own, label="shared parameters", bucket=bucket.index)

    def settle_shared(self, indices: Iterable[int]) -> None:
        """Wait until every rank has come here, if one of these buckets is shared: a user is about to write to it by
        hand, and the others must have done reading. Collective."""
        for index in indices:
            place = self.buckets[index]
            if place.full is not None and place.is_shared:
                self.wait_published(index)
                self._meet(place.full, place.own, place.bucket)

    def note_change(self, fqn: str) -> None:
        """A user changed a parameter by hand. Where it is shared, warn once that all ranks of the host see the
        change."""
        place, _ = self.locate(fqn)
        if place.is_shared and not self._has_warned:
            self._has_warned = True
            log.warning(
                "parameter %r was changed in place. The ranks of this host have one memory for it: each rank setting "
                "the same values is fine, but a change like mul_ happens once for each rank that makes it. Make such "
                "changes inside GatheredParameters(..., modifier_rank=0), or set POLYACCEL_SHM_SYMMETRIC=0",
                fqn,
            )

    def _source(self, place: BucketParams) -> Tier | None:
        """The tier that a shard must be read from to be on the device; None where it is there."""
        is_there = place.tier.is_resident and place.tier.compute is self._accelerator
        return None if is_there else place.tier

    def _extent(self, whole: Buffer, place: BucketParams) -> Buffer:
        """The part of a whole bucket that this rank keeps."""
        if place.full is not None:
            return whole
        low, high = place.bucket.shard_bounds(self._communicator.rank)
        return whole.view(low, high - low)

    def _show(self, bucket: Bucket, views: Sequence[Buffer]) -> None:
        for slot, view in zip(bucket.slots, views, strict=True):
            self._owner.on_bound(slot.param.fqn, view)

    def _hide(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            self._owner.on_freed(slot.param.fqn)

    # After an update.

    def publish(self, index: int) -> None:
        """Start making an updated bucket whole on every rank; a sharded one is whole only when it is gathered next."""
        place = self.buckets[index]
        if place.full is not None and place.plan.publishes:
            self._publishing[index] = self._communicator.all_gather(
                place.full, place.own, async_op=True, label="updated parameters", bucket=index
            )
        self._mark_written(place)

    def publish_masters(self) -> None:
        """Write master weights to the parameters and make them whole on every rank, as after loading a checkpoint."""
        for place in self.buckets:
            if place.bucket.kind.trainable or place.is_sharded:
                self.publish_master(place.bucket.index)

    @property
    def arriving(self) -> Collection[int]:
        """The buckets that are being published: `wait_published` comes before a look at them."""
        return self._publishing.keys()

    def publish_master(self, index: int) -> None:
        """Write bucket `index`'s master weights to the parameters and make them whole where they were. Collective."""
        place = self.buckets[index]
        if place.out is not None:
            for piece in place.slices():
                _, slot = self._layout.locate(piece.fqn)
                window = (piece.shard_offset, piece.length)
                self.rounding.write(place.master.view(*window), place.out.view(*window), slot.param, piece.start)
        if place.is_sharded:
            self.gathering.refresh(index)
        self.publish(index)
        self.wait_published(index)

    def wait_published(self, index: int) -> None:
        """Return once bucket `index` has the updated parameters of all ranks."""
        work = self._publishing.pop(index, None)
        if work is not None:
            work.wait()

    def fence(self) -> None:
        """Return once every parameter is up to date."""
        with self._waiting():
            for index in list(self._publishing):
                self.wait_published(index)

    # Values that come from outside.

    def hold(self, index: int) -> Buffer:
        """The whole bucket, kept whole until a matching `drop`. Collective where it is sharded."""
        if index in self.gathering:
            self.gathering.hold(index, learn=False, exact=True)
        return self.full(index)

    @contextmanager
    def peek(self, index: int) -> Iterator[Buffer]:
        """The whole bucket, to be read at once; no parameter is bound to it. Collective where it is sharded."""
        if index in self.gathering:
            with self.gathering.peek(index) as whole:
                yield whole
        else:
            yield self.full(index)

    def drop(self, index: int) -> None:
        """Undo one `hold`. A sharded bucket without holds is freed, and whatever was written there is lost."""
        if index in self.gathering:
            self.gathering.drop(index, keep=False)

    def write(self, fqn: str, value: Buffer) -> None:
        """Overwrite a parameter with `value`, flat and equal on all ranks: in the bucket where that is whole, in this
        rank's slice, and in the master weights in full precision. Not collective."""
        place, slot = self.locate(fqn)
        index = place.bucket.index
        self.wait_published(index)
        whole = place.full if place.full is not None else self.gathering.whole_or_none(index)
        if whole is not None:
            self.rounding.write(value, whole.view(slot.offset, slot.param.numel), slot.param, 0)
        for start, own, master, part in self._parts(place, slot, value):
            if own is not None:
                self.rounding.write(part, own, slot.param, start)
            if master is not None:
                master.copy_from(part)
        self._mark_written(place)

    def adopt(self, fqn: str) -> None:
        """Take over the values that were written into the whole parameter, alike on all ranks. Raises ShardingError
        while it is sharded.

        Master weights that round to the very values that stand there keep their precision.
        """
        place, slot = self.locate(fqn)
        value = self.full(place.bucket.index).view(slot.offset, slot.param.numel)
        for start, own, master, part in self._parts(place, slot, value):
            if own is not None:
                own.copy_from(part)
            if master is not None and not self.rounding.leads_to(part, master, slot.param, start):
                master.copy_from(part)
        self._mark_written(place)

    def _mark_written(self, place: BucketParams) -> None:
        place.own.mark_written()
        if place.is_sharded:
            self.gathering.note_change(place.bucket.index)

    def differs(self, fqn: str) -> bool:
        """Whether the whole parameter has other values than this rank's slice and master weights know."""
        place, slot = self.locate(fqn)
        value = self.full(place.bucket.index).view(slot.offset, slot.param.numel)
        return any(
            not self.rounding.leads_to(part, known, slot.param, start)
            for start, own, master, part in self._parts(place, slot, value)
            for known in (own, master)
            if known is not None
        )

    def _parts(
        self, place: BucketParams, slot: Slot, value: Buffer
    ) -> Iterator[tuple[int, Buffer | None, Buffer | None, Buffer]]:
        """Where a parameter rests on this rank beside its whole: (start, slice, master weights, part of `value`)."""
        for piece in place.slices():
            if piece.fqn == slot.param.fqn:
                window = (piece.shard_offset, piece.length)
                own = place.own.view(*window) if place.is_sharded else None
                master = None if place.master_is_view else place.master.view(*window)
                yield piece.start, own, master, value.view(piece.start, piece.length)

    def close(self) -> None:
        """Let go of all buffers. Views that frontends hold keep their memory alive."""
        self.fence()
        self.gathering.close()
        self.buckets.clear()


def _common_dtype(dtypes: set[DType]) -> DType:
    """A type that holds values of all `dtypes` exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return DType.FLOAT64 if DType.FLOAT64 in dtypes else DType.FLOAT32
