"""Bytes that one rank holds, by purpose, computed before anything is allocated.

Model states only: activations and the framework's own memory come on top. Every rank holds the same, because shards are
equal. Source of the model-state arithmetic: Rajbhandari et al. 2020, sections 3.1 and 5.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from polyaccel.errors import ShardingError
from polyaccel.types import DType
from polyaccel.zero.layout import Bucket, ShardLayout
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.schedule import OpKind, plan_step


class Purpose(Enum):
    """What memory is for. The value is its name in tables."""

    PARAMS = "parameters"
    MASTER = "master weights"
    OPTIM = "optimizer states"
    GRADS = "gradients"
    GRADS_IN_FLIGHT = "gradient buckets in flight"
    GRAD_OUTSIDE = "gradient outside its bucket"
    GATHERED = "gathered parameters"

    @property
    def is_transient(self) -> bool:
        """Whether it is in use only inside a step."""
        return self in (Purpose.GRADS_IN_FLIGHT, Purpose.GRAD_OUTSIDE, Purpose.GATHERED)


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types of what surrounds the parameters, whose own types are those of their buckets.

    `master` is that of master weights and optimizer states (never narrower than the parameter). `reduce` is that in
    which gradients travel, `accumulate` that in which they are added over micro-batches.
    """

    master: DType = DType.FLOAT32
    reduce: DType | None = None
    """None: the bucket's own."""
    accumulate: DType | None = None
    """None: float32 for 16-bit buckets, else as `reduce`."""

    def master_of(self, param: DType) -> DType:
        return self.master if self.master.itemsize >= param.itemsize else param

    def reduce_of(self, param: DType) -> DType:
        return self.reduce or param

    def gradient_of(self, param: DType, micro_batches: int) -> DType:
        """In which type gradients of `param`-typed parameters wait for the update."""
        if micro_batches == 1:
            return self.reduce_of(param)
        return self.accumulate or (DType.FLOAT32 if param.itemsize == 2 else self.reduce_of(param))


@dataclass(frozen=True, slots=True)
class MemoryRow:
    purpose: Purpose
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank, one row for every purpose."""

    rows: tuple[MemoryRow, ...]

    @property
    def total_nbytes(self) -> int:
        """The peak, in the backward of the last micro-batch, when everything is there at once."""
        return sum(row.nbytes for row in self.rows)

    @property
    def resident_nbytes(self) -> int:
        """What is in use between steps."""
        return sum(row.nbytes for row in self.rows if not row.purpose.is_transient)

    def nbytes(self, purpose: Purpose) -> int:
        return next(row.nbytes for row in self.rows if row.purpose is purpose)


@dataclass(frozen=True, slots=True)
class _Extent:
    """A run of parameters of one type: `numel` elements, `shard_numel` of them one rank's."""

    numel: int
    shard_numel: int
    dtype: DType
    trainable: bool

    @classmethod
    def of(cls, bucket: Bucket) -> _Extent:
        return cls(bucket.numel, bucket.shard_numel, bucket.kind.dtype, bucket.kind.trainable)

    def held(self, placement: Placement) -> int:
        return self.shard_numel if placement is Placement.SHARDED else self.numel


def estimate_layout(
    policy: ZeroPolicy,
    layout: ShardLayout,
    *,
    precision: Precision = Precision(),
    state_count: int = 2,
    micro_batches: int = 1,
    buckets_in_flight: int = 3,
) -> MemoryEstimate:
    """Exact bytes of `layout` under `policy`, padding included.

    `state_count` is the optimizer's tensors per parameter (Adam 2, momentum 1, plain SGD 0), `buckets_in_flight` how
    many full gradient buckets may exist at once where gradients are sharded or change their type on the way.
    """
    nbytes: Counter[Purpose] = Counter()
    in_flight: list[int] = []
    for bucket in layout.buckets:
        extent = _Extent.of(bucket)
        nbytes.update(_model_states(policy, extent, precision, state_count, micro_batches))
        if extent.trainable:
            reduce = precision.reduce_of(extent.dtype)
            recast = precision.gradient_of(extent.dtype, micro_batches) is not reduce
            if policy.grads is Placement.SHARDED or recast:
                in_flight.append(bucket.numel * reduce.itemsize)
    nbytes[Purpose.GRADS_IN_FLIGHT] = sum(sorted(in_flight, reverse=True)[:buckets_in_flight])
    nbytes[Purpose.GRAD_OUTSIDE] = max((param.nbytes for param in layout.params if param.trainable), default=0)
    nbytes[Purpose.GATHERED] = _peak_gathered_nbytes(policy, layout)
    return _estimate(nbytes)


def estimate(
    param_numel: int,
    *,
    policy: ZeroPolicy,
    world_size: int,
    dtype: DType,
    precision: Precision = Precision(),
    state_count: int = 2,
    micro_batches: int = 1,
) -> MemoryEstimate:
    """What stays between steps for a model of `param_numel` trained parameters of which nothing else is known.

    The formula of the paper: 16 bytes a parameter for Adam on one rank, of which sharding leaves 1/N piece by piece. No
    padding, nothing transient. Raises ShardingError for fewer than no parameters or less than one rank.
    """
    if param_numel < 0 or world_size < 1:
        raise ShardingError(f"{param_numel=} must not be negative and {world_size=} must be at least 1")
    extent = _Extent(param_numel, -(-param_numel // world_size), dtype, trainable=True)
    return _estimate(_model_states(policy, extent, precision, state_count, micro_batches))


def _estimate(nbytes: Counter[Purpose]) -> MemoryEstimate:
    return MemoryEstimate(tuple(MemoryRow(purpose, nbytes[purpose]) for purpose in Purpose))


def _model_states(
    policy: ZeroPolicy, extent: _Extent, precision: Precision, state_count: int, micro_batches: int
) -> Counter[Purpose]:
    nbytes = Counter({Purpose.PARAMS: extent.held(policy.params) * extent.dtype.itemsize})
    if extent.trainable:
        master = precision.master_of(extent.dtype)
        updated = extent.held(policy.optim) * master.itemsize
        # With equal types the optimizer works on a view of the bucket.
        nbytes[Purpose.MASTER] = 0 if master is extent.dtype else updated
        nbytes[Purpose.OPTIM] = state_count * updated
        gradient = precision.gradient_of(extent.dtype, micro_batches)
        nbytes[Purpose.GRADS] = extent.held(policy.grads) * gradient.itemsize
    return nbytes


def _peak_gathered_nbytes(policy: ZeroPolicy, layout: ShardLayout) -> int:
    """The most bytes of parameters that are unsharded at once; more micro-batches change nothing about it."""
    if layout.world_size == 1:
        return 0  # the only shard is the bucket
    live = peak = 0
    for operation in plan_step(policy, layout):
        bucket = layout.buckets[operation.bucket]
        sign = (operation.kind is OpKind.UNSHARD) - (operation.kind is OpKind.RESHARD)
        live += sign * bucket.numel * bucket.kind.dtype.itemsize
        peak = max(peak, live)
    return peak
