"""Bytes that one rank holds, by place and purpose, computed before anything is allocated.

Model states only: activations and the framework's own memory come on top. Every rank holds the same, because shards are
equal. Source of the model-state arithmetic: Rajbhandari et al. 2020, sections 3.1 and 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from polyaccel.errors import ShardingError
from polyaccel.types import DType
from polyaccel.zero.in_flight import in_flight_nbytes
from polyaccel.zero.layout import Bucket, ShardLayout
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.precision import DEFAULT_PRECISION, Precision
from polyaccel.zero.schedule import OpKind, plan_step
from polyaccel.zero.travel import AS_THEY_ARE, Bits, TravelPolicy, part_nbytes


class Purpose(Enum):
    """What memory is for. The value is its name in tables."""

    PARAMS = "parameters"
    MASTER = "master weights"
    OPTIM = "optimizer states"
    GRADS = "gradients"
    GRADS_IN_FLIGHT = "gradient buckets in flight"
    GRAD_OUTSIDE = "gradient outside its bucket"
    GATHERED = "gathered parameters"
    SECOND = "second copies for near ranks"
    CODES = "quantised parameters and gradients on their way"
    STAGING = "staging of offloaded states"

    @property
    def is_transient(self) -> bool:
        """Whether it is in use only inside a step."""
        return self not in (Purpose.PARAMS, Purpose.MASTER, Purpose.OPTIM, Purpose.GRADS, Purpose.SECOND)


class Place(Enum):
    """Which memory, by the name of the tier."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Offload:
    """Which buckets' master weights and states stand where, the others on the device, and what that needs beside them.

    `file_buffers` is how many host buffers, each as long as the largest file, stand between files and kernels. Between
    parameters in files and a device that is not the host stand at most `piece_buffers`, or `state_piece_buffers` where
    the parameters are their own master weights, of at most `piece_numel` elements each.
    `is_remote`: the host's kernels do not reach the device's memory, so sharded gradients rest in the host's, and other
    gradients and new parameters are staged there. `params` says where the shards of sharded buckets rest, the others
    on the device.
    """

    places: Mapping[int, Place] = field(default_factory=dict)
    file_buffers: int = 0
    is_remote: bool = True
    params: Mapping[int, Place] = field(default_factory=dict)
    piece_buffers: int = 0
    state_piece_buffers: int = 0
    piece_numel: int = 0

    def are_one(self, index: int) -> bool:
        """As `StatePlacement.are_one`."""
        params, states = self.params.get(index, Place.DEVICE), self.places.get(index, Place.DEVICE)
        if Place.DEVICE in (params, states):
            return params is states
        return states is Place.HOST or params is Place.NVME

    def is_device_memory(self, place: Place) -> bool:
        """Whether the device computes with what rests there."""
        return place is Place.DEVICE or (place is Place.HOST and not self.is_remote)


NO_OFFLOAD = Offload()


@dataclass(frozen=True, slots=True)
class MemoryRow:
    purpose: Purpose
    nbytes: int
    place: Place = Place.DEVICE


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank: one row for every purpose on the device, and one for what stands elsewhere."""

    rows: tuple[MemoryRow, ...]

    @property
    def total_nbytes(self) -> int:
        """The peak over all places, in the backward of the last micro-batch, when everything is there at once."""
        return sum(row.nbytes for row in self.rows)

    @property
    def resident_nbytes(self) -> int:
        """What is in use between steps."""
        return sum(row.nbytes for row in self.rows if not row.purpose.is_transient)

    def nbytes(self, purpose: Purpose) -> int:
        """What is for `purpose`, over all places."""
        return sum(row.nbytes for row in self.rows if row.purpose is purpose)

    def peak_nbytes(self, place: Place) -> int:
        """The peak in one place."""
        return sum(row.nbytes for row in self.rows if row.place is place)


def estimate_layout(
    policy: ZeroPolicy,
    layout: ShardLayout,
    *,
    precision: Precision = DEFAULT_PRECISION,
    state_count: int = 2,
    micro_batches: int = 1,
    buckets_in_flight: int = 3,
    max_gathered_numel: int | None = None,
    offload: Offload = NO_OFFLOAD,
    travel: TravelPolicy = AS_THEY_ARE,
    prefetch_numel: int = 0,
) -> MemoryEstimate:
    """Bytes of `layout` under `policy`, padding included: exact, but for gathered parameters, which are bounded.

    `state_count` is the optimizer's tensors per parameter (Adam 2, momentum 1, plain SGD 0), `buckets_in_flight` how
    many full gradient buckets may exist at once where gradients are sharded or change their type on the way.
    `max_gathered_numel` bounds gathered parameters (`GatherPolicy.max_live_numel`); None takes the peak of the
    schedule, which frees a unit as soon as it is done. `prefetch_numel` of them are gathered ahead of their use; that,
    like `buckets_in_flight`, bounds what stands in codes where `travel` quantises.
    """
    accumulates = micro_batches > 1
    nbytes: Counter[tuple[Place, Purpose]] = Counter()
    for bucket in layout.buckets:
        place = offload.places.get(bucket.index, Place.DEVICE)
        leaves = place is not Place.DEVICE and offload.is_remote and policy.grads is Placement.SHARDED
        params = offload.params.get(bucket.index, Place.DEVICE)
        places = _Places(place, Place.HOST if leaves else Place.DEVICE, params, offload.are_one(bucket.index))
        nbytes.update(_model_states(policy, _Extent.of(bucket), precision, state_count, accumulates, places))
    device = Place.DEVICE
    nbytes[device, Purpose.GRADS_IN_FLIGHT] = in_flight_nbytes(
        policy, layout, precision, micro_batches=micro_batches, most_in_use=buckets_in_flight
    )
    outside = (param.nbytes for param in layout.params if param.trainable)
    nbytes[device, Purpose.GRAD_OUTSIDE] = max(outside, default=0)
    nbytes[device, Purpose.GATHERED] = _gathered_nbytes(policy, layout, max_gathered_numel, offload)
    if policy.params is Placement.SHARDED:
        nbytes[device, Purpose.SECOND] = _second_nbytes(layout, travel)
        nbytes[device, Purpose.CODES] = _codes_nbytes(layout, travel, prefetch_numel, buckets_in_flight)
    nbytes[Place.HOST, Purpose.STAGING] = _staging_nbytes(policy, layout, precision, accumulates, offload)
    nbytes[Place.HOST, Purpose.STAGING] += _pieces_nbytes(layout, precision, offload)
    nbytes.update(_outgoing(policy, layout, precision, offload))
    return _estimate(nbytes)


def estimate(
    param_numel: int,
    *,
    policy: ZeroPolicy,
    world_size: int,
    dtype: DType,
    precision: Precision = DEFAULT_PRECISION,
    state_count: int = 2,
    micro_batches: int = 1,
) -> MemoryEstimate:
    """What stays between steps for a model of `param_numel` trained parameters of which nothing else is known.

    The formula of the paper: 16 bytes a parameter for Adam on one rank, of which sharding leaves 1/N piece by piece. No
    padding, nothing transient. Raises ShardingError for fewer than no parameters or less than one rank.
    """
    if param_numel < 0 or world_size < 1:
        raise ShardingError(f"{param_numel=} must not be negative and {world_size=} must be at least 1")
    extent = _Extent(param_numel, -(-param_numel // world_size), dtype, trainable=True, persistent=False)
    return _estimate(_model_states(policy, extent, precision, state_count, micro_batches > 1, _Places()))


@dataclass(frozen=True, slots=True)
class _Extent:
    """A run of parameters of one type: `numel` elements, `shard_numel` of them one rank's."""

    numel: int
    shard_numel: int
    dtype: DType
    trainable: bool
    persistent: bool

    @classmethod
    def of(cls, bucket: Bucket) -> _Extent:
        kind = bucket.kind
        return cls(bucket.numel, bucket.shard_numel, kind.dtype, kind.trainable, kind.persistent)

    def held(self, placement: Placement) -> int:
        return self.shard_numel if placement is Placement.SHARDED else self.numel


class _Places(NamedTuple):
    """Where a bucket's master weights and states are, where its gradients and parameters rest, and whether master
    weights of the parameters' own type are the parameters."""

    states: Place = Place.DEVICE
    grads: Place = Place.DEVICE
    params: Place = Place.DEVICE
    are_one: bool = True


def _estimate(nbytes: Mapping[tuple[Place, Purpose], int]) -> MemoryEstimate:
    return MemoryEstimate(
        tuple(
            MemoryRow(purpose, nbytes.get((place, purpose), 0), place)
            for place in Place
            for purpose in Purpose
            if place is Place.DEVICE or nbytes.get((place, purpose))
        )
    )


def _model_states(
    policy: ZeroPolicy, extent: _Extent, precision: Precision, state_count: int, accumulates: bool, places: _Places
) -> Counter[tuple[Place, Purpose]]:
    params = Placement.REPLICATED if extent.persistent else policy.params
    master = precision.master_of(extent.dtype)
    # With equal types the optimizer works on a view of the bucket, if it works where the bucket is.
    is_view = extent.trainable and master is extent.dtype and places.are_one
    place = places.states if is_view else places.params
    nbytes = Counter({(place, Purpose.PARAMS): extent.held(params) * extent.dtype.itemsize})
    if extent.trainable:
        updated = extent.held(policy.optim)
        nbytes[places.states, Purpose.MASTER] = 0 if is_view else updated * master.itemsize
        nbytes[places.states, Purpose.OPTIM] = state_count * updated * precision.states.itemsize
        gradient = precision.gradient_of(extent.dtype, accumulates=accumulates)
        nbytes[places.grads, Purpose.GRADS] = extent.held(policy.grads) * gradient.itemsize
    return nbytes


def _staging_nbytes(
    policy: ZeroPolicy, layout: ShardLayout, precision: Precision, accumulates: bool, offload: Offload
) -> int:
    """Host memory through which offloaded states and gradients pass; see `StateStore`."""
    moved = [bucket for bucket in layout.buckets if bucket.index in offload.places]
    if not moved:
        return 0
    trainable = (_Extent.of(bucket) for bucket in layout.buckets if bucket.kind.trainable)
    most = max(extent.held(policy.optim) for extent in trainable)
    files = [bucket for bucket in moved if offload.places[bucket.index] is Place.NVME]
    largest = max((_Extent.of(bucket).held(policy.optim) for bucket in files), default=0)
    nbytes = offload.file_buffers * largest * precision.master.itemsize
    if offload.is_remote:
        dtypes = {bucket.kind.dtype for bucket in moved}
        if policy.grads is Placement.REPLICATED:
            gradients = {precision.gradient_of(dtype, accumulates=accumulates) for dtype in dtypes}
        else:  # what is added to a gradient that rests there already
            gradients = {precision.reduce_of(dtype) for dtype in dtypes if accumulates}
        nbytes += most * sum(dtype.itemsize for dtype in gradients)
    return nbytes


def _pieces_nbytes(layout: ShardLayout, precision: Precision, offload: Offload) -> int:
    """The most host memory through which parameters in files pass to a device that is not the host."""
    longest: Counter[tuple[bool, DType]] = Counter()
    for bucket in layout.buckets if offload.is_remote else ():
        dtype, index = bucket.kind.dtype, bucket.index
        is_master = bucket.kind.trainable and precision.master_of(dtype) is dtype and offload.are_one(index)
        where = offload.places if is_master else offload.params
        if index in offload.params and where.get(index) is Place.NVME:
            piece = min(bucket.shard_numel, offload.piece_numel)
            longest[is_master, dtype] = max(longest[is_master, dtype], piece)
    counts = {True: offload.state_piece_buffers, False: offload.piece_buffers}
    return sum(counts[is_master] * numel * dtype.itemsize for (is_master, dtype), numel in longest.items())


def _outgoing(
    policy: ZeroPolicy, layout: ShardLayout, precision: Precision, offload: Offload
) -> Counter[tuple[Place, Purpose]]:
    """Memory through which new parameters pass that rest where the kernels that update them do not write."""
    trained = [bucket for bucket in layout.buckets if bucket.kind.trainable]
    staged: set[tuple[Place, DType]] = set()
    for bucket in trained:
        dtype = bucket.kind.dtype
        params, states = (where.get(bucket.index, Place.DEVICE) for where in (offload.params, offload.places))
        is_view = precision.master_of(dtype) is dtype and offload.are_one(bucket.index)
        is_apart = offload.is_remote and (params is Place.DEVICE) is not (states is Place.DEVICE)
        if not is_view and (is_apart or params is Place.NVME):
            staged.add((Place.DEVICE if states is Place.DEVICE else Place.HOST, dtype))
    most = max((_Extent.of(bucket).held(policy.optim) for bucket in trained), default=0)
    nbytes: Counter[tuple[Place, Purpose]] = Counter()
    for place, dtype in staged:
        nbytes[place, Purpose.STAGING] += most * dtype.itemsize
    return nbytes


def _second_nbytes(layout: ShardLayout, travel: TravelPolicy) -> int:
    """Slices of gathered buckets that this rank keeps for its neighbours."""
    if travel.near_ranks == 1:
        return 0
    sharded = (bucket for bucket in layout.buckets if not bucket.kind.persistent)
    return sum(bucket.numel // travel.near_ranks * bucket.kind.dtype.itemsize for bucket in sharded)


def _codes_nbytes(layout: ShardLayout, travel: TravelPolicy, prefetch_numel: int, buckets_in_flight: int) -> int:
    """The most bytes of codes and scales at once, and of two parts in float32 in which gradients are added."""
    if layout.world_size == 1:
        return 0

    def whole(bucket: Bucket, bits: Bits | None) -> int:
        nbytes = part_nbytes(bucket.shard_numel, bucket.kind.dtype, bits) * layout.world_size
        return 0 if bits is None else nbytes

    gathers = [
        (bucket.numel, whole(bucket, travel.gathered_bits(trainable=bucket.kind.trainable)))
        for bucket in layout.buckets
        if not bucket.kind.persistent
    ]
    most, ahead = max((nbytes for _, nbytes in gathers), default=0), 0
    for numel, nbytes in sorted(gathers, reverse=True):
        if numel <= prefetch_numel:
            prefetch_numel -= numel
            ahead += nbytes
    trained = [bucket for bucket in layout.buckets if bucket.kind.trainable]
    gradients = sorted((2 * whole(bucket, travel.gradient_bits) for bucket in trained), reverse=True)
    parts = 0
    if travel.gradient_bits is not None:
        parts = 2 * max((bucket.shard_numel for bucket in trained), default=0) * DType.FLOAT32.itemsize
    return most + ahead + sum(gradients[:buckets_in_flight]) + parts


def _gathered_nbytes(policy: ZeroPolicy, layout: ShardLayout, max_numel: int | None, offload: Offload) -> int:
    """The most bytes of parameters that are unsharded at once; more micro-batches change nothing about it."""
    is_there = all(offload.is_device_memory(place) for place in offload.params.values())
    if policy.params is not Placement.SHARDED or (layout.world_size == 1 and is_there):
        return 0  # the only shard is the bucket
    gathered = [bucket for bucket in layout.buckets if not bucket.kind.persistent]
    if max_numel is not None:
        largest_itemsize = max((bucket.kind.dtype.itemsize for bucket in gathered), default=0)
        everything = sum(bucket.numel * bucket.kind.dtype.itemsize for bucket in gathered)
        return min(everything, max_numel * largest_itemsize)
    live = peak = 0
    for operation in plan_step(policy, layout):
        bucket = layout.buckets[operation.bucket]
        sign = (operation.kind is OpKind.UNSHARD) - (operation.kind is OpKind.RESHARD)
        live += sign * bucket.numel * bucket.kind.dtype.itemsize
        peak = max(peak, live)
    return peak
