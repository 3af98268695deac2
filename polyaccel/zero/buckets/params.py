"""The life of parameters: where they rest, where frontends see them, how an update becomes visible on every rank.

[Note: Shared parameters per host]
Where the communicator can share memory and the optimizer is sharded, a bucket is one memory of all ranks, at stage 3
too: nothing is gathered, and each rank updates its part where everybody reads it. Two meetings make that safe. No rank
writes before the small all-reduce with which an update begins (`GradNormReducer`), which each enters after its backward
pass, when it has done reading; and none reads before the all-gather that publishes a bucket, which moves nothing there
but which each enters after its last write. Rank 0 alone writes the initial values. Frontends see another face of that
memory (`SharedMemory`), in which each rank's users write for themselves ([Note: User writes to parameters]).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.offload.tier import Tier
from polyaccel.zero.buckets.bucket_params import BucketParams, Replica, replicas_of
from polyaccel.zero.buckets.gathered_buckets import GatheredBuckets
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.buckets.rounding import WeightRounding
from polyaccel.zero.buckets.sharded_bucket import ShardedBucket
from polyaccel.zero.plan.bucket_plan import StepPlan
from polyaccel.zero.plan.layout import Bucket, Slot
from polyaccel.zero.resources import StepResources


class ParamBuckets:
    """All parameters of a layout on one rank: bound to buckets, gathered while sharded, published after an update.

    They start from what `owner` reads on the first of the ranks that hold the same, in its precision. `waiting` is
    entered around waits for other ranks.
    """

    def __init__(
        self,
        plan: StepPlan,
        parts: StepResources,
        owner: ParamListener,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.layout = plan.layout
        self._communicators = parts.communicators
        self._accelerator = parts.accelerator
        self._tiers = parts.tiers
        self._owner = owner
        self._waiting = waiting
        self.steps: dict[str, int] = {param.fqn: 0 for param in plan.layout.params if param.trainable}
        """How many updates each parameter has had: none while no rank had a gradient for it, as in plain torch."""
        self.rounding = WeightRounding(self.steps, parts.accelerator, is_stochastic=plan.policy.stochastic_rounding)
        self._publishing: dict[int, Work] = {}
        self.buckets: list[BucketParams] = []
        for bucket in plan.buckets:
            self.buckets.append(self._bind(BucketParams(bucket, parts.tiers, self.exact(bucket.bucket))))
        self.is_any_sharded = any(params.is_sharded for params in self.buckets)
        """Some bucket is whole only while it is gathered; the same on every rank."""
        self.gathered = GatheredBuckets(
            [
                ShardedBucket(params.plan, params.own, self._source(params))
                for params in self.buckets
                if params.is_sharded
            ],
            plan.policy.gathering,
            parts.communicators,
            owner,
            waiting,
        )

    def __getitem__(self, index: int) -> BucketParams:
        return self.buckets[index]

    def __iter__(self) -> Iterator[BucketParams]:
        return iter(self.buckets)

    def locate(self, fqn: str) -> tuple[BucketParams, Slot]:
        """Return the bucket and the slot of a parameter."""
        bucket, slot = self.layout.locate(fqn)
        return self.buckets[bucket.index], slot

    def exact(self, bucket: Bucket) -> Communicator:
        """The communicator of the ranks that hold the parameters of `bucket`."""
        return self._communicators.get_groups(bucket).exact

    def full(self, index: int) -> Buffer:
        """The whole bucket, up to date. Raises ShardingError while it is sharded."""
        self.wait_all_gather(index)
        whole = self.buckets[index].full
        return whole if whole is not None else self.gathered.full(index)

    def _bind(self, params: BucketParams) -> BucketParams:
        """Move a bucket's parameters into it. Bucket after bucket, so that few parameters exist twice."""
        bucket = params.bucket
        originals = {slot.param.fqn: self._owner.read_param(slot.param.fqn) for slot in bucket.slots}
        precise = _common_dtype({original.dtype for original in originals.values()})
        direct = params.full if precise is bucket.kind.dtype else None
        staging = direct if direct is not None else self._accelerator.allocate(bucket.numel, precise)
        communicator = self.exact(bucket)
        writes = params.shared is None or communicator.rank == 0
        for slot in bucket.slots if writes or direct is None else ():
            staging.view(slot.offset, slot.param.numel).copy_from(originals[slot.param.fqn])
        communicator.broadcast(staging, 0, label="initial parameters", bucket=bucket.index)
        if direct is None and writes:
            kept = params.own if params.full is None else params.full
            kept.copy_from(self._extent(staging, params))
        if not params.master_is_view:
            params.master.copy_from(staging.view(params.origin, params.master.numel))
        params.own.bump_version()
        self.wait_shared_writes(params)  # what the first rank wrote is there
        del originals, staging  # before views are handed out, which free the frontend's own copies
        if params.private_view is not None:
            self._owner.show(bucket, [params.private_view.view(slot.offset, slot.param.numel) for slot in bucket.slots])
        else:
            self._owner.hide(bucket)
        return params

    def wait_shared_writes(self, params: BucketParams) -> None:
        """Where a bucket is in shared memory, wait until every rank has come here and its writes are visible."""
        if params.shared is not None:
            whole, index = params.shared.whole, params.bucket.index
            self.exact(params.bucket).all_gather(
                whole, params.own, counts=params.bucket.counts, label="shared parameters", bucket=index
            )

    def _source(self, params: BucketParams) -> Tier | None:
        """The tier that a shard must be read from to be on the device; None where it is there."""
        is_there = params.tier.is_resident and params.tier.compute is self._accelerator
        return None if is_there else params.tier

    def _extent(self, whole: Buffer, params: BucketParams) -> Buffer:
        """The part of a whole bucket that this rank keeps."""
        if params.full is not None:
            return whole
        low, high = params.bucket.shard_bounds(self.exact(params.bucket).rank)
        return whole.view(low, high - low)

    # After an update.

    def all_gather_updated(self, index: int) -> None:
        """Start making an updated bucket whole on every rank; a sharded one is whole only when it is gathered next."""
        params = self.buckets[index]
        if params.full is not None and params.plan.publishes:
            self._publishing[index] = self.exact(params.bucket).all_gather(
                *(params.full, params.own),
                counts=params.bucket.counts,
                async_op=True,
                label="updated parameters",
                bucket=index,
            )
        self.bump_version(params)

    def all_gather_masters(self) -> None:
        """Write master weights to the parameters and make them whole on every rank, as after loading a checkpoint."""
        for params in self.buckets:
            if params.bucket.kind.trainable or params.is_sharded:
                self.all_gather_master(params.bucket.index)

    @property
    def arriving(self) -> Collection[int]:
        """The buckets that are being published: `wait_all_gather` comes before a look at them."""
        return self._publishing.keys()

    def all_gather_master(self, index: int) -> None:
        """Write bucket `index`'s master weights to the parameters and make them whole where they were. Collective."""
        params = self.buckets[index]
        if params.out is not None:
            self.end_fetches()
            for piece in params.slices():
                _, slot = self.layout.locate(piece.fqn)
                window = (piece.shard_offset, piece.length)
                self.rounding.write(params.master.view(*window), params.out.view(*window), slot.param, piece.start)
        if params.is_sharded:
            self.gathered.refresh(index)
        self.all_gather_updated(index)
        self.wait_all_gather(index)

    def wait_all_gather(self, index: int) -> None:
        """Return once bucket `index` has the updated parameters of all ranks."""
        work = self._publishing.pop(index, None)
        if work is not None:
            work.wait()

    def wait_all_gathers(self) -> None:
        """Return once every parameter is up to date."""
        with self._waiting():
            for index in list(self._publishing):
                self.wait_all_gather(index)

    def end_fetches(self) -> None:
        """Return when the host may write to the memory from which the device takes sharded parameters."""
        for tier in dict.fromkeys((*self._tiers.params.values(), *self._tiers.states.values())):
            tier.end_fetches()

    # Values that come from outside.

    def unshard(self, index: int) -> Buffer:
        """The whole bucket, kept whole until a matching `reshard`. Collective where it is sharded."""
        if index in self.gathered:
            self.gathered.unshard(index, exact=True)
        return self.full(index)

    @contextmanager
    def unsharded_view(self, index: int) -> Iterator[Buffer]:
        """The whole bucket, to be read at once; no parameter is bound to it. Collective where it is sharded."""
        if index in self.gathered:
            with self.gathered.unsharded_view(index) as whole:
                yield whole
        else:
            yield self.full(index)

    def reshard(self, index: int) -> None:
        """Undo one `unshard`. A sharded bucket without holds is freed, and whatever was written there is lost."""
        if index in self.gathered:
            self.gathered.reshard(index, keep=False)

    def write(self, fqn: str, value: Buffer) -> None:
        """Overwrite a parameter by flat `value`: bucket, slice and master weights. Not collective."""
        params, slot = self.locate(fqn)
        index = params.bucket.index
        self.wait_all_gather(index)
        whole = params.full if params.full is not None else self.gathered.unsharded_or_none(index)
        if whole is not None:
            self.rounding.write(value, whole.view(slot.offset, slot.param.numel), slot.param, 0)
        for start, own, master, part in self.parts(params, slot, value):
            if own is not None:
                self.rounding.write(part, own, slot.param, start)
            if master is not None:
                master.copy_from(part)
        self.bump_version(params)
        self.refresh_private_view(fqn)

    def refresh_private_view(self, fqn: str) -> None:
        """Show users a shared parameter's present values, and keep what they wrote."""
        params, slot = self.locate(fqn)
        if params.shared is not None and params.shared.written():
            window = slot.offset, slot.param.numel
            params.shared.private_view.view(*window).copy_from(params.shared.whole.view(*window))

    def replicas(self, most_numel: int) -> tuple[Replica, ...]:
        """The copies that this rank has for itself of what others hold too; see `replicas_of`."""
        return replicas_of(self.buckets, self.exact, most_numel)

    def replica_bytes(self, piece: Replica) -> bytes:
        """The bits of one of `replicas`."""
        return self.full(piece.bucket).view(piece.offset, piece.numel).to_bytes()

    def bump_version(self, params: BucketParams) -> None:
        params.own.bump_version()
        if params.is_sharded:
            self.gathered.note_change(params.bucket.index)

    def parts(
        self, params: BucketParams, slot: Slot, value: Buffer
    ) -> Iterator[tuple[int, Buffer | None, Buffer | None, Buffer]]:
        """Where a parameter rests on this rank next to its whole: (start, slice, master weights, part of `value`)."""
        self.end_fetches()
        for piece in params.slices():
            if piece.fqn == slot.param.fqn:
                window = (piece.shard_offset, piece.length)
                own = params.own.view(*window) if params.is_sharded else None
                if params.shared is not None:
                    own = params.shared.whole.view(slot.offset + piece.start, piece.length)
                master = None if params.master_is_view else params.master.view(*window)
                yield piece.start, own, master, value.view(piece.start, piece.length)

    def close(self) -> None:
        """Release all buffers. Views that frontends hold keep their memory alive."""
        self.wait_all_gathers()
        self.gathered.close()
        self.buckets.clear()


def _common_dtype(dtypes: set[DType]) -> DType:
    """A type that holds values of all `dtypes` exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return DType.FLOAT64 if DType.FLOAT64 in dtypes else DType.FLOAT32
