"""How much a step sends: the collectives that move its buckets, by their plan, and the sum over them.

Exact for the rank of the plan.

[Note: Gather count of a bucket]
In an eager framework gathers follow events and bounds (`GatheredBuckets`): a sharded bucket is gathered for each use,
unless it is kept because its next use is near. So a step gathers everything at least once and at most twice a
micro-batch. The planned figure is that of units which run once each, in order, where a unit that ends a pass is kept
for the next one. Buckets of no named unit belong to the root, whose parameters may be used before, between and after
the units (embedding, final norm, output head): the root runs first in forward, last in backward, and is gathered once a
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polyaccel.core.types import DType
from polyaccel.zero.plan.bucket_plan import BucketPlan, StepPlan
from polyaccel.zero.plan.layout import ShardLayout
from polyaccel.zero.plan.policy import Bits, Placement, part_nbytes

ROOT_UNIT = ""
CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective of `ranks` ranks over bucket `bucket`, and what each of them sends in it, the scales of quantised
    traffic included.

    The lower bound that bandwidth-optimal algorithms reach (Patarasuk & Yuan 2009): a reduce-scatter or all-gather
    sends all of a bucket but one shard, an all-reduce is one of each.
    """

    kind: CollectiveKind
    bucket: int
    sent_numel: int
    sent_nbytes: int
    ranks: int


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Elements that each rank sends in one step, padding included, by collective, and the bytes of all of them.

    Counts the buckets only: the few scalars on which a step agrees (norm, overflow, loss) come on top.
    """

    all_reduce_numel: int
    reduce_scatter_numel: int
    all_gather_numel: int
    total_nbytes: int

    @property
    def total_numel(self) -> int:
        return self.all_reduce_numel + self.reduce_scatter_numel + self.all_gather_numel


def step_traffic(plan: StepPlan) -> StepTraffic:
    """The traffic that each rank sends in a step of `plan`."""
    sent: dict[CollectiveKind, int] = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
    nbytes = 0
    for collective in (*gathers_of(plan), *exchanges_of(plan)):
        sent[collective.kind] += collective.sent_numel
        nbytes += collective.sent_nbytes
    return StepTraffic(
        all_reduce_numel=sent["all_reduce"],
        reduce_scatter_numel=sent["reduce_scatter"],
        all_gather_numel=sent["all_gather"],
        total_nbytes=nbytes,
    )


def exchanges_of(plan: StepPlan) -> Iterator[PlannedCollective]:
    """The collectives of a step that no use of parameters governs, in the order in which every rank launches them: the
    reductions of each pass, bucket by bucket, then the all-gathers of updated parameters, bucket by bucket."""
    passes = plan.micro_batches if plan.zero.grads is Placement.SHARDED else 1
    for _ in range(passes):
        for each in plan.trained:
            kind: CollectiveKind = "reduce_scatter" if each.updates_shard else "all_reduce"
            bits = plan.traffic.gradient_bits if each.updates_shard else None
            yield _collective(kind, each, each.travelling.dtype, bits, each.bucket.world_size)
    for each in plan.trained:
        if each.publishes:
            yield _collective("all_gather", each, each.bucket.kind.dtype, None, each.bucket.world_size)


def gathers_of(plan: StepPlan) -> Iterator[PlannedCollective]:
    """The all-gathers of sharded buckets for their uses in a step, in no particular order. The first one of a bucket is
    over all ranks; near ranks that keep second copies gather it from each other again."""
    near = plan.traffic.near_ranks
    times = _gathers_a_step(plan.layout, plan.micro_batches)
    for each in plan.sharded:
        kind = each.bucket.kind
        bits = plan.traffic.gathered_bits(trainable=kind.trainable)
        first = _collective("all_gather", each, kind.dtype, bits, each.bucket.world_size)
        again = first if near == 1 else _collective("all_gather", each, kind.dtype, None, near)
        yield first
        yield from [again] * (times[kind.unit] - 1)


def _collective(
    kind: CollectiveKind, plan: BucketPlan, dtype: DType, bits: Bits | None, ranks: int
) -> PlannedCollective:
    if plan.bucket.counts is not None and kind != "all_reduce":
        own = plan.shard_numel
        numel = own * (ranks - 1) if kind == "all_gather" else plan.bucket.numel - own
        return PlannedCollective(kind, plan.bucket.index, numel, numel * dtype.itemsize, ranks)
    part = plan.bucket.numel // ranks
    sent = (ranks - 1) * (2 if kind == "all_reduce" else 1)
    return PlannedCollective(kind, plan.bucket.index, sent * part, sent * part_nbytes(part, dtype, bits), ranks)


def _gathers_a_step(layout: ShardLayout, micro_batches: int) -> dict[str, int]:
    """How often each unit is gathered; see [Note: Gather count of a bucket]."""
    units = dict.fromkeys(bucket.kind.unit for bucket in layout.buckets)
    named = [bucket.kind.unit for bucket in layout.buckets if bucket.kind.unit != ROOT_UNIT]
    times = dict.fromkeys(units, 1)
    for unit in set(named):
        times[unit] = 2 * micro_batches
        if unit == named[0]:  # the last one in forward and the first in backward
            times[unit] -= micro_batches
        if unit == named[-1] and ROOT_UNIT not in units:  # the last one in backward and the first in the next forward
            times[unit] -= micro_batches - 1
    return times
