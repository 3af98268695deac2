"""Every buffer that a rank will hold for a layout, in integers, before anything is allocated.

The engine allocates the buffers of this plan and no others of their kinds; memory (`memory`) and traffic (`traffic`)
of a setting are sums over it. Every rank has the same plan where shards are equal, and otherwise its own.

[Note: Unplanned buffers]
Gradients that come late (`GradientBucket`) or in a pass without a reduction take a full buffer more, for as long as
they wait. Initial values pass through one buffer of a bucket's length. Both follow from a bucket's own figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Self

from polyaccel.core.types import CODE_BLOCK, DType
from polyaccel.errors import ShardingError
from polyaccel.zero.plan.layout import Bucket, ShardLayout
from polyaccel.zero.plan.placement import NO_OFFLOAD, Offload, Place
from polyaccel.zero.plan.policy import UNQUANTIZED, Placement, StepPolicy, TrafficPolicy, ZeroPolicy

ADDED_NUMEL = 2**22
"""Elements of a gradient in host memory that are on the device at once, while a micro-batch's are added."""


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A flat buffer of one rank: `numel` elements of `dtype` in `place`."""

    numel: int
    dtype: DType
    place: Place = Place.DEVICE
    bucket: int | None = None
    """The bucket that alone uses it; None where equal ones are one."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """The parameters of one bucket on one rank."""

    bucket: Bucket
    zero: ZeroPolicy
    params: PlannedBuffer
    """The parameters between uses: this rank's shard where `is_sharded`, else the whole bucket."""
    shard_numel: int
    """The length of this rank's shard."""
    is_sharded: bool
    """The bucket is whole only while it is gathered."""
    may_share: bool
    """One memory of all ranks may hold the whole bucket, where the communicator has memory of that kind."""
    second: PlannedBuffer | None
    """The part of a gathered bucket that this rank keeps for the ranks near to it; None where nothing is kept."""
    master: PlannedBuffer | None = None
    """Master weights; None where the parameters are their own, and where nothing is trained."""

    @property
    def updates_shard(self) -> bool:
        """Whether this rank updates its own shard; else everything that is trained."""
        return self.is_sharded or (self.zero.optim is Placement.SHARDED and self.bucket.kind.trainable)

    @property
    def updated_numel(self) -> int:
        """Elements that this rank updates."""
        return self.shard_numel if self.updates_shard else self.bucket.numel

    @property
    def updates_all(self) -> bool:
        """Whether every rank that holds the bucket updates all of it."""
        return not self.updates_shard or self.bucket.world_size == 1

    @property
    def publishes(self) -> bool:
        """Whether an update ends with an all-gather of the parameters, which stay whole."""
        return self.zero.optim is Placement.SHARDED and not self.is_sharded

    def once_a_host(self) -> Self:
        """The plan of a bucket that stands whole in one memory of all ranks."""
        whole = PlannedBuffer(self.bucket.numel, self.bucket.kind.dtype)
        return replace(self, params=whole, is_sharded=False, second=None)


@dataclass(frozen=True, kw_only=True)
class TrainedBucketPlan(BucketPlan):
    """The parameters of a bucket that is trained, and the buffers of its gradients and its update."""

    place: Place
    """Where master weights and optimizer states rest, and with them the parameters if they are the master weights."""
    states: Mapping[str, PlannedBuffer]
    """Optimizer states by name."""
    scales: Mapping[str, PlannedBuffer]
    """Scales of the states that are codes of 8 bits, by the names of those."""
    gradient: PlannedBuffer
    """Where gradients accumulate and wait for the update: this rank's slice, or the whole bucket."""
    travelling: PlannedBuffer
    """The whole bucket in the type in which its gradients are reduced."""
    is_reduced_in_place: bool
    """Reductions take `gradient` as it is; else they borrow `travelling`."""
    staged_gradient: PlannedBuffer | None
    """Memory through which gradients pass to host memory where the update's kernels are: of the host for a part of a
    replicated gradient, of the device where sharded ones are added up or change their type."""
    staged_params: PlannedBuffer | None
    """Memory through which new parameters pass to where they rest, if the kernels that update them do not reach it."""


@dataclass(frozen=True)
class StepPlan:
    """All buckets of a layout, with the values that they follow from."""

    layout: ShardLayout
    zero: ZeroPolicy
    policy: StepPolicy
    micro_batches: int
    offload: Offload
    traffic: TrafficPolicy
    buckets: tuple[BucketPlan, ...]

    @cached_property
    def trained(self) -> tuple[TrainedBucketPlan, ...]:
        """The buckets that are updated, in layout order."""
        return tuple(plan for plan in self.buckets if isinstance(plan, TrainedBucketPlan))

    @cached_property
    def sharded(self) -> tuple[BucketPlan, ...]:
        """The buckets that are gathered for their uses, in layout order."""
        return tuple(plan for plan in self.buckets if plan.is_sharded)


def plan_step(
    layout: ShardLayout,
    zero: ZeroPolicy,
    policy: StepPolicy,
    *,
    state_names: Sequence[str] = (),
    state_types: Mapping[str, DType] = MappingProxyType({}),
    group_states: Mapping[int, Sequence[str]] = MappingProxyType({}),
    micro_batches: int = 1,
    offload: Offload = NO_OFFLOAD,
    traffic: TrafficPolicy = UNQUANTIZED,
    rank: int | None = None,
) -> StepPlan:
    """The buffers for training `layout` with an optimizer that has `state_names` for each trained parameter, those of
    `state_types` in their own types. Those in uint8 are codes of blocks, which have scales. Groups in `group_states`
    have those states alone.

    A step is expected to have `micro_batches` passes. The types in which they accumulate are the `Precision`'s. The
    plan is that of `rank`; None: of a rank that has the longest shard of every bucket. Raises ShardingError where
    shards of several lengths would travel in codes or have second copies.
    """
    uneven = [bucket for bucket in layout.buckets if bucket.counts is not None]
    if uneven and traffic != UNQUANTIZED:
        raise ShardingError(
            f"shards of {uneven[0].slots[0].param.fqn!r} differ in length, and ZeRO++ needs equal ones",
            hint="leave out zero_quantized_weights, zero_quantized_nontrainable_weights, zero_quantized_gradients and "
            "zero_hpz_partition_size, or use an optimizer whose update is elementwise and no mesh.capacity",
            value=uneven[0].slots[0].param.fqn,
        )
    plans = [
        _plan_params(bucket, zero, offload, traffic, _shard_numel(layout, bucket, rank)) for bucket in layout.buckets
    ]
    longest = max((plan.updated_numel for plan in plans if plan.bucket.kind.trainable), default=0)
    buckets = tuple(
        _plan_update(plan, policy, group_states.get(plan.bucket.kind.group, state_names), state_types, offload, longest)
        if plan.bucket.kind.trainable
        else plan
        for plan in plans
    )
    return StepPlan(layout, zero, policy, micro_batches, offload, traffic, buckets)


def _shard_numel(layout: ShardLayout, bucket: Bucket, rank: int | None) -> int:
    """The length of the shard of `rank` (of all ranks), the longest for None."""
    if rank is None or bucket.counts is None:
        return bucket.max_shard_numel
    return bucket.shard_numel_of(layout.mesh.place(bucket.kind.cut, rank))


def _plan_params(
    bucket: Bucket, zero: ZeroPolicy, offload: Offload, traffic: TrafficPolicy, shard_numel: int
) -> BucketPlan:
    """The plan of a bucket as if it were frozen."""
    dtype = bucket.kind.dtype
    is_sharded = zero.params is Placement.SHARDED and not bucket.kind.persistent
    keeps_second = is_sharded and traffic.near_ranks > 1
    _, place = offload.places(bucket.index)
    return BucketPlan(
        bucket=bucket,
        zero=zero,
        params=PlannedBuffer(shard_numel if is_sharded else bucket.numel, dtype, place),
        shard_numel=shard_numel,
        is_sharded=is_sharded,
        may_share=zero.optim is Placement.SHARDED and place is Place.DEVICE,
        second=PlannedBuffer(bucket.numel // traffic.near_ranks, dtype) if keeps_second else None,
    )


def _plan_update(
    frozen: BucketPlan,
    policy: StepPolicy,
    state_names: Sequence[str],
    state_types: Mapping[str, DType],
    offload: Offload,
    longest: int,
) -> TrainedBucketPlan:
    """`frozen` with what gradients and the update need. Shared staging memory is as long as the longest update."""
    bucket, precision, dtype = frozen.bucket, policy.precision, frozen.params.dtype
    place, _ = offload.places(bucket.index)
    is_far = place is not Place.DEVICE and offload.is_remote
    memory = Place.DEVICE if place is Place.DEVICE else Place.HOST  # where kernels find what is at `place`
    master_dtype, gradient_dtype = precision.master_of(dtype), precision.gradient_of(dtype)
    travelling = PlannedBuffer(bucket.numel, precision.reduce_of(dtype))
    # With equal types the optimizer works on a view of the parameters, if it works where those rest.
    is_master = master_dtype is dtype and offload.are_one(bucket.index)
    is_out_of_reach = not is_master and not offload.is_within_reach(bucket.index)
    # Then the device copies from and to memory of this bucket alone, while the host updates the next one.
    copies_itself = is_far and place is Place.HOST
    _, params_place = offload.places(bucket.index)
    keeps_whole = frozen.zero.grads is Placement.REPLICATED
    if keeps_whole:
        gradient = PlannedBuffer(bucket.numel, gradient_dtype)
        staged = _stage(frozen, longest, gradient_dtype, Place.HOST, is_own=copies_itself)
    else:
        gradient = PlannedBuffer(frozen.shard_numel, gradient_dtype, Place.HOST if is_far else Place.DEVICE)
        staged = PlannedBuffer(min(longest, ADDED_NUMEL), gradient_dtype)
    return TrainedBucketPlan(
        bucket=bucket,
        zero=frozen.zero,
        params=replace(frozen.params, place=place) if is_master else frozen.params,
        shard_numel=frozen.shard_numel,
        is_sharded=frozen.is_sharded,
        may_share=frozen.may_share,
        second=frozen.second,
        place=place,
        master=None if is_master else PlannedBuffer(frozen.updated_numel, master_dtype, place),
        states={
            name: PlannedBuffer(frozen.updated_numel, state_types.get(name, precision.states_of(dtype)), place)
            for name in state_names
        },
        scales={
            name: PlannedBuffer(frozen.updated_numel // CODE_BLOCK + len(bucket.slots), DType.FLOAT32, place)
            for name in state_names
            if state_types.get(name) is DType.UINT8
        },
        gradient=gradient,
        travelling=travelling,
        is_reduced_in_place=keeps_whole and gradient_dtype is travelling.dtype,
        staged_gradient=staged if is_far else None,
        staged_params=_stage(frozen, longest, dtype, memory, is_own=copies_itself and params_place is Place.DEVICE)
        if is_out_of_reach
        else None,
    )


def _stage(plan: BucketPlan, longest: int, dtype: DType, place: Place, *, is_own: bool) -> PlannedBuffer:
    """Memory in `place` through which what a bucket updates passes: its own, or that of all which need the same."""
    if is_own:
        return PlannedBuffer(plan.updated_numel, dtype, place, plan.bucket.index)
    return PlannedBuffer(longest, dtype, place)
