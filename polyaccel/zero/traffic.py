"""How much a step sends, counted from its schedule. Exact: buckets divide evenly, so (N-1)/N of one is an integer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyaccel.zero.layout import ShardLayout
from polyaccel.zero.schedule import Operation, OpKind


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Elements that each rank sends in one step, padding included, by collective.

    Counts the buckets only: the few scalars on which a step agrees (norm, overflow, loss) come on top.
    """

    all_reduce_numel: int
    reduce_scatter_numel: int
    all_gather_numel: int

    @property
    def total_numel(self) -> int:
        return self.all_reduce_numel + self.reduce_scatter_numel + self.all_gather_numel


def step_traffic(operations: Iterable[Operation], layout: ShardLayout) -> StepTraffic:
    """What `operations` send at the lower bound that bandwidth-optimal algorithms reach (Patarasuk & Yuan 2009).

    A reduce-scatter or all-gather of a bucket sends all of it but one shard; an all-reduce is one of each.
    """
    sent = dict.fromkeys(OpKind, 0)
    for operation in operations:
        bucket = layout.buckets[operation.bucket]
        sent[operation.kind] += bucket.numel - bucket.shard_numel
    return StepTraffic(
        all_reduce_numel=2 * sent[OpKind.ALL_REDUCE],
        reduce_scatter_numel=sent[OpKind.REDUCE_SCATTER],
        all_gather_numel=sent[OpKind.UNSHARD] + sent[OpKind.PUBLISH],
    )
