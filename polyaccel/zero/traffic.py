"""How much a step sends, counted from its schedule. Exact: buckets divide evenly, so (N-1)/N of one is an integer.

Where parameters are sharded, an eager framework's gathers follow events and bounds (`zero.gathering`): a bucket is
gathered for each use, forward or backward, unless it is kept because its next use is near. So a step gathers everything
at least once and at most twice a micro-batch; the schedule's figure is what it does when units run once each and what a
pass ends with is kept for the next, with the root kept throughout. Reductions are as scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyaccel.zero.layout import ShardLayout
from polyaccel.zero.precision import DEFAULT_PRECISION, Precision
from polyaccel.zero.schedule import Operation, OpKind
from polyaccel.zero.travel import AS_THEY_ARE, TravelPolicy, part_nbytes

_REDUCTIONS = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER)


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


def step_traffic(
    operations: Iterable[Operation],
    layout: ShardLayout,
    precision: Precision = DEFAULT_PRECISION,
    travel: TravelPolicy = AS_THEY_ARE,
) -> StepTraffic:
    """What `operations` send at the lower bound that bandwidth-optimal algorithms reach (Patarasuk & Yuan 2009).

    A reduce-scatter or all-gather of a bucket sends all of it but one shard; an all-reduce is one of each. Gradients
    travel in the type that `precision` says, parameters in their own, unless `travel` says otherwise; quantised ones
    count with their scales. Near ranks gather from each other what is gathered again.
    """
    sent = dict.fromkeys(OpKind, 0)
    nbytes = 0
    gathered: set[int] = set()
    for operation in operations:
        bucket = layout.buckets[operation.bucket]
        dtype, bits, ranks = bucket.kind.dtype, None, layout.world_size
        if operation.kind is OpKind.UNSHARD:
            bits = travel.gathered_bits(trainable=bucket.kind.trainable)
            if bucket.index in gathered and travel.near_ranks > 1:
                bits, ranks = None, travel.near_ranks
            gathered.add(bucket.index)
        elif operation.kind is OpKind.REDUCE_SCATTER:
            bits = travel.gradient_bits
        numel = bucket.numel // ranks
        parts = (ranks - 1) * (2 if operation.kind is OpKind.ALL_REDUCE else 1)
        sent[operation.kind] += parts * numel
        if operation.kind in _REDUCTIONS:
            nbytes += parts * part_nbytes(numel, precision.reduce_of(dtype), bits)
        elif operation.kind in (OpKind.UNSHARD, OpKind.PUBLISH):
            nbytes += parts * part_nbytes(numel, dtype, bits)
    return StepTraffic(
        all_reduce_numel=sent[OpKind.ALL_REDUCE],
        reduce_scatter_numel=sent[OpKind.REDUCE_SCATTER],
        all_gather_numel=sent[OpKind.UNSHARD] + sent[OpKind.PUBLISH],
        total_nbytes=nbytes,
    )
