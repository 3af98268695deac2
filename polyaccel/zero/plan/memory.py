"""Bytes that one rank holds, by place and purpose: the sum over the plan of its buckets.

Model states only: activations and the framework's own memory come on top. Every rank holds the same where shards are
equal. Source of the model-state arithmetic: Rajbhandari et al. 2020, sections 3.1 and 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count, product

from polyaccel.core.types import DType
from polyaccel.zero.plan.bucket_plan import BucketPlan, PlannedBuffer, StepPlan, TrainedBucketPlan
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.plan.policy import Bits, Placement, part_nbytes
from polyaccel.zero.plan.pool import BufferPool, InFlight


class Purpose(Enum):
    """The purpose that memory serves. The value is its name in tables."""

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


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one purpose in one place."""

    purpose: Purpose
    nbytes: int
    place: Place = Place.DEVICE


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank: one row for every purpose on the device, and one for each that has memory elsewhere."""

    rows: tuple[MemoryRow, ...]

    @property
    def total_nbytes(self) -> int:
        """The peak over all places, in the backward of the last micro-batch, when everything is there at once."""
        return sum(row.nbytes for row in self.rows)

    @property
    def resident_nbytes(self) -> int:
        """Bytes in use between steps."""
        return sum(row.nbytes for row in self.rows if not row.purpose.is_transient)

    def nbytes(self, purpose: Purpose) -> int:
        """Bytes for `purpose`, over all places."""
        return sum(row.nbytes for row in self.rows if row.purpose is purpose)

    def peak_nbytes(self, place: Place) -> int:
        """The peak in one place."""
        return sum(row.nbytes for row in self.rows if row.place is place)


def estimate_memory(plan: StepPlan) -> MemoryEstimate:
    """Bytes of `plan`, padding included: exact, except for gathered parameters and quantised traffic, which are
    bounded.

    Parameters are gathered up to `GatherPolicy.max_live_numel`; `prefetch_numel` of them are gathered ahead of their
    use, which, like the number of buckets in flight, bounds what stands in codes where traffic is quantised.
    """
    nbytes: Counter[tuple[Place, Purpose]] = Counter()

    def add(purpose: Purpose, *buffers: PlannedBuffer | None) -> None:
        for buffer in buffers:
            if buffer is not None:
                nbytes[buffer.place, purpose] += buffer.nbytes

    for bucket in plan.buckets:
        add(Purpose.PARAMS, bucket.params)
        add(Purpose.SECOND, bucket.second)
        add(Purpose.MASTER, bucket.master)
    for each in plan.trained:
        add(Purpose.OPTIM, *each.states.values(), *each.scales.values())
        add(Purpose.GRADS, each.gradient)
    add(Purpose.STAGING, *_staging(plan))
    nbytes[Place.HOST, Purpose.STAGING] += _file_buffers_nbytes(plan) + _pieces_nbytes(plan)
    device = Place.DEVICE
    in_flight = follow_reductions(plan).held()
    nbytes[device, Purpose.GRADS_IN_FLIGHT] = sum(numel * dtype.itemsize for numel, dtype in in_flight)
    outside = (param.nbytes for param in plan.layout.params if param.trainable)
    nbytes[device, Purpose.GRAD_OUTSIDE] = max(outside, default=0)
    nbytes[device, Purpose.GATHERED] = _gathered_nbytes(plan)
    nbytes[device, Purpose.CODES] = _codes_nbytes(plan)
    return MemoryEstimate(
        tuple(
            MemoryRow(purpose, nbytes[place, purpose], place)
            for place in Place
            for purpose in Purpose
            if place is Place.DEVICE or nbytes[place, purpose]
        )
    )


class _Length:
    """A buffer as the planner's pool lends it."""

    _addresses = count()

    def __init__(self, numel: int, dtype: DType) -> None:
        self.numel = numel
        self.dtype = dtype
        self._address = next(self._addresses)

    def view(self, offset: int, numel: int) -> _Length:
        part = _Length(numel, self.dtype)
        part._address = self._address
        return part

    def data_ptr(self) -> int:
        return self._address


class _PlannedReduction:
    """A reduction that holds `buffer` until it is finished."""

    def __init__(self, pool: BufferPool[_Length], buffer: _Length) -> None:
        self._pool = pool
        self._buffer = buffer
        self.is_pending = True

    def finish(self) -> None:
        self.is_pending = False
        self._pool.release(self._buffer)


def follow_reductions(plan: StepPlan) -> BufferPool[_Length]:
    """The pool of gradient buckets in flight after two steps that borrow as the engine does.

    A buffer serves whatever fits into it and is kept for the next borrower, so a pool may hold more than the largest
    buckets that are ever under way together. Gradients are taken to come in layout order; of the buckets under way the
    one that was launched first is finished first. Where parameters are sharded, a unit's buckets are launched together,
    and those of persistent parameters at the end of the pass.
    """
    flight = InFlight(_Length, plan.policy.reduction)
    groups: list[list[TrainedBucketPlan]] = []
    lasting: list[TrainedBucketPlan] = []
    by_unit, before = plan.zero.params is Placement.SHARDED, None
    for each in plan.trained:
        kind = each.bucket.kind
        if each.is_reduced_in_place:
            continue
        if by_unit and kind.persistent:
            lasting.append(each)
            continue
        if not by_unit or kind.unit != before:
            groups.append([])
        groups[-1].append(each)
        before = kind.unit

    def borrow(each: TrainedBucketPlan) -> _PlannedReduction:
        flight.make_room()
        return _PlannedReduction(flight.pool, flight.pool.acquire(each.travelling.numel, each.travelling.dtype))

    passes = plan.micro_batches if plan.zero.grads is Placement.SHARDED else 1
    for _ in range(2):
        launched: list[_PlannedReduction] = []

        def launch(reductions: list[_PlannedReduction], launched: list[_PlannedReduction] = launched) -> None:
            launched += reductions
            for reduction in reductions:
                flight.add(reduction)

        for _ in range(passes):
            last = [borrow(each) for each in lasting]
            for group in groups:
                launch([borrow(each) for each in group])
            launch(last)
        for reduction in launched:
            if reduction.is_pending:
                reduction.finish()
        flight.clear()
    return flight.pool


def _staging(plan: StepPlan) -> list[PlannedBuffer | None]:
    """Memory through which gradients and new parameters pass that rest where kernels do not reach them.

    One buffer serves all buckets that need one of its type in a place, unless it is a bucket's own. Sharded gradients
    pass through it only where they are added to those of an earlier micro-batch, or change their type.
    """
    adds = plan.zero.grads is Placement.REPLICATED or plan.policy.precision.accumulates
    gradients = (
        each.staged_gradient for each in plan.trained if adds or each.gradient.dtype is not each.travelling.dtype
    )
    return [*dict.fromkeys(gradients), *dict.fromkeys(each.staged_params for each in plan.trained)]


def _file_buffers_nbytes(plan: StepPlan) -> int:
    """Host memory through which states in files pass to the kernels."""
    in_files = [each for each in plan.trained if plan.offload.places(each.bucket.index)[0] is Place.NVME]
    largest = max((each.updated_numel for each in in_files), default=0)
    return plan.offload.file_buffers * largest * plan.policy.precision.master.itemsize


def _pieces_nbytes(plan: StepPlan) -> int:
    """The most host memory through which parameters in files pass to a device that is not the host."""
    longest: Counter[tuple[bool, DType]] = Counter()
    for each in plan.sharded if plan.offload.is_remote else ():
        if each.params.place is Place.NVME:
            is_master = each.bucket.kind.trainable and each.master is None
            key = (is_master, each.params.dtype)
            longest[key] = max(longest[key], min(each.params.numel, plan.offload.piece_numel))
    counts = {True: plan.offload.state_piece_buffers, False: plan.offload.piece_buffers}
    return sum(counts[is_master] * numel * dtype.itemsize for (is_master, dtype), numel in longest.items())


def _gathered_nbytes(plan: StepPlan) -> int:
    """The most bytes of parameters that are unsharded at once; more micro-batches change nothing about it."""
    is_there = plan.offload.is_device_memory
    # Where the only shard is the bucket, and is there, nothing is gathered.
    gathered = [each for each in plan.sharded if each.bucket.world_size > 1 or not is_there(each.params.place)]
    left, most = plan.policy.gathering.max_live_numel, 0
    for each in sorted(gathered, key=lambda each: -each.params.dtype.itemsize):  # the bound is one of elements
        numel = min(each.bucket.numel, left)
        left, most = left - numel, most + numel * each.params.dtype.itemsize
    return most


def _codes_nbytes(plan: StepPlan) -> int:
    """The most bytes of codes and scales at once, and of two parts in float32 in which gradients are added."""
    traffic = plan.traffic
    if all(each.bucket.world_size == 1 for each in plan.buckets):
        return 0

    def whole(each: BucketPlan, bits: Bits | None) -> int:
        bucket, ranks = each.bucket, each.bucket.world_size
        is_coded = bits is not None and ranks > 1
        return part_nbytes(bucket.max_shard_numel, bucket.kind.dtype, bits) * ranks if is_coded else 0

    gathers = [
        (each.bucket.numel, whole(each, traffic.gathered_bits(trainable=each.bucket.kind.trainable)))
        for each in plan.sharded
    ]
    most, ahead = max((nbytes for _, nbytes in gathers), default=0), 0
    prefetch_numel = plan.policy.gathering.prefetch_numel
    for numel, nbytes in sorted(gathers, reverse=True):
        if numel <= prefetch_numel:
            prefetch_numel -= numel
            ahead += nbytes
    gradients = sorted((2 * whole(each, traffic.gradient_bits) for each in plan.trained), reverse=True)
    parts = 0
    if traffic.gradient_bits is not None:
        parts = 2 * max((each.bucket.max_shard_numel for each in plan.trained), default=0) * DType.FLOAT32.itemsize
    if traffic.feedback is not None:
        parts += sum(whole(each, 8) for each in plan.trained)  # the errors that wait for the next gradients
    return most + ahead + sum(gradients[: plan.policy.reduction.most_in_flight]) + parts


def memory_by_purpose(plan: StepPlan) -> list[tuple[str, int]]:
    """Bytes of `plan` by purpose, in words."""
    return in_words({(row.place, row.purpose): row.nbytes for row in estimate_memory(plan).rows})


def in_words(nbytes: Mapping[tuple[Place, Purpose], int]) -> list[tuple[str, int]]:
    """Bytes by purpose in words, the device's first; what is elsewhere says where."""
    return [(words, number) for (_, words), number in sorted((_WORDS[key], number) for key, number in nbytes.items())]


_WORDS = {
    key: (at, key[1].value if key[0] is Place.DEVICE else f"{key[1].value} ({key[0].value})")
    for at, key in enumerate(product(Place, Purpose))
}
"""The rank of each place and purpose in tables, and its words: looked up in every step that is watched."""
