"""The life of parameters: a full flat buffer a bucket, seen by frontends through views, updated slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.base import CallInfo, Communicator, Work
from polyaccel.types import DType
from polyaccel.zero.layout import Bucket, ShardLayout, Slice
from polyaccel.zero.policy import Placement, ZeroPolicy


class BucketParams:
    """One bucket's parameters: the full flat buffer that the frontend's views lie in, and the master weights.

    `master` covers what this rank updates: its own shard, or everything under a replicated optimizer. It is a view of
    the parameters when those are of the master type already, so that the update needs no copy and no extra byte.
    """

    def __init__(
        self,
        bucket: Bucket,
        policy: ZeroPolicy,
        master_dtype: DType,
        communicator: Communicator,
        accelerator: Accelerator,
    ) -> None:
        self.bucket = bucket
        self.full = communicator.allocate(bucket.numel, bucket.kind.dtype)
        low, high = bucket.shard_bounds(communicator.rank)
        self.own = self.full.view(low, high - low)
        sharded = policy.optim is Placement.SHARDED and bucket.kind.trainable
        self.origin = low if sharded else 0
        """The bucket's element where `master` starts."""
        extent = self.own if sharded else self.full
        self.master_is_view = not bucket.kind.trainable or bucket.kind.dtype is master_dtype
        self.master = extent if self.master_is_view else accelerator.allocate(extent.numel, master_dtype)
        self.out: Buffer | None = None if self.master_is_view else extent

    def slices(self) -> tuple[Slice, ...]:
        """The parameters' parts of `master`."""
        low, high = self.origin, self.origin + self.master.numel
        return tuple(
            Slice(slot.param.fqn, begin - slot.offset, end - begin, begin - low)
            for slot in self.bucket.slots
            if (begin := max(low, slot.offset)) < (end := min(high, slot.end))
        )


class ParamStore:
    """All parameters of a layout on one rank: bound to their buckets, published after an update.

    `read_param(fqn)` gives a parameter's original value, flat, in its original precision; rank 0's values are
    broadcast. `on_bound(fqn, view)` is told where each parameter stands from then on. `waiting` is entered around
    waits.
    """

    def __init__(
        self,
        layout: ShardLayout,
        policy: ZeroPolicy,
        communicator: Communicator,
        accelerator: Accelerator,
        read_param: Callable[[str], Buffer],
        on_bound: Callable[[str, Buffer], None],
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._layout = layout
        self._policy = policy
        self._communicator = communicator
        self._accelerator = accelerator
        self._waiting = waiting
        self._publishing: dict[int, Work] = {}
        self.buckets: list[BucketParams] = []
        for bucket in layout.buckets:
            self.buckets.append(self._bind(bucket, read_param, on_bound))

    def __getitem__(self, index: int) -> BucketParams:
        return self.buckets[index]

    def __iter__(self) -> Iterator[BucketParams]:
        return iter(self.buckets)

    def view(self, fqn: str) -> Buffer:
        """Where the parameter stands, flat, in its bucket."""
        bucket, slot = self._layout.locate(fqn)
        return self.buckets[bucket.index].full.view(slot.offset, slot.param.numel)

    def _bind(
        self, bucket: Bucket, read_param: Callable[[str], Buffer], on_bound: Callable[[str, Buffer], None]
    ) -> BucketParams:
        """Move a bucket's parameters into it. Bucket after bucket, so that few parameters exist twice."""
        place = BucketParams(
            bucket, self._policy, _master_dtype(bucket.kind.dtype), self._communicator, self._accelerator
        )
        originals = {slot.param.fqn: read_param(slot.param.fqn) for slot in bucket.slots}
        precise = _common_dtype({original.dtype for original in originals.values()})
        direct = precise is bucket.kind.dtype
        staging = place.full if direct else self._accelerator.allocate(bucket.numel, precise)
        for slot in bucket.slots:
            staging.view(slot.offset, slot.param.numel).copy_from(originals[slot.param.fqn])
        self._communicator.broadcast(staging, 0, info=CallInfo("initial parameters", bucket.index))
        if not direct:
            place.full.copy_from(staging)
        if not place.master_is_view:
            place.master.copy_from(staging.view(place.origin, place.master.numel))
        place.full.mark_written()
        del originals, staging  # before views are handed out, which free the frontend's own copies
        for slot in bucket.slots:
            on_bound(slot.param.fqn, place.full.view(slot.offset, slot.param.numel))
        return place

    def publish(self, index: int) -> None:
        """Start making an updated bucket whole on every rank."""
        place = self.buckets[index]
        if self._policy.optim is Placement.SHARDED:
            info = CallInfo("updated parameters", index)
            self._publishing[index] = self._communicator.all_gather(place.full, place.own, async_op=True, info=info)
        place.full.mark_written()

    def publish_masters(self) -> None:
        """Write master weights to the parameters and make them whole on every rank, as after loading a checkpoint."""
        for place in self.buckets:
            if place.bucket.kind.trainable:
                if place.out is not None:
                    place.out.copy_from(place.master)
                self.publish(place.bucket.index)
        self.fence()

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

    def close(self) -> None:
        """Let go of all buffers. Views that frontends hold keep their memory alive."""
        self.fence()
        self.buckets.clear()


def _master_dtype(dtype: DType) -> DType:
    """What a parameter of `dtype` is updated in: at least fp32."""
    return dtype if dtype in (DType.FLOAT32, DType.FLOAT64) else DType.FLOAT32


def _common_dtype(dtypes: set[DType]) -> DType:
    """A type that holds values of all `dtypes` exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return DType.FLOAT64 if DType.FLOAT64 in dtypes else DType.FLOAT32
