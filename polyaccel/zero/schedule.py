"""A training step as a sequence of typed operations on buckets, generated from policy and layout.

`polyaccel.testkit.interpreter` runs the sequence in numpy and thereby says what each operation means; the planner
counts its bytes (`memory`) and its traffic (`traffic`). Integers only.

[Note: The root unit]
A bucket that belongs to no named unit belongs to the root, whose parameters may be used before, between and after the
units (embedding, final norm, output head). Where parameters are sharded, the root therefore stays unsharded from the
first forward to the last backward of a step, runs first in forward and has its gradients last. Without named units the
root is the whole model, and its buckets run in plain layout order.

[Note: The plan and the events]
In an eager framework the hooks that fire govern, not this sequence: a layer may be skipped or called twice. What the
sequence fixes is what a step does to each bucket, how often, and in which order the buckets are expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from polyaccel.errors import ShardingError
from polyaccel.zero.layout import Bucket, ShardLayout
from polyaccel.zero.policy import Placement, ZeroPolicy

ROOT_UNIT = ""


class OpKind(Enum):
    """What happens to a bucket."""

    UNSHARD = "unshard"
    """Gather the parameters from the ranks' shards (all-gather). Only where parameters are sharded."""
    RESHARD = "reshard"
    """Free the gathered parameters; the own shard stays."""
    FORWARD = "forward"
    """Run the model forward as far as the parameters announced so far in this pass allow."""
    BACKWARD = "backward"
    """Run the model backward until every gradient of the bucket is complete for this micro-batch."""
    REDUCE_SCATTER = "reduce_scatter"
    """Average the gradients over the ranks and add this rank's part to its gradient shard; the rest is freed."""
    ALL_REDUCE = "all_reduce"
    """Average the gradients over the ranks; every rank keeps all of them."""
    FETCH = "fetch"
    """Bring master weights and optimizer states to where kernels reach them. Nothing to do on the device tier."""
    UPDATE = "update"
    """One optimizer step: on the own shard where optimizer states are sharded, else on the whole bucket."""
    PUBLISH = "publish"
    """Give every rank the updated parameters (all-gather). Only where they stay whole and their update was sharded."""
    EVICT = "evict"
    """The inverse of `FETCH`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`kind` applied to the bucket of that index; what follows the last backward carries the last micro-batch."""

    kind: OpKind
    bucket: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}(bucket {self.bucket}, micro-batch {self.micro_batch})"


def plan_step(policy: ZeroPolicy, layout: ShardLayout, *, micro_batches: int = 1) -> tuple[Operation, ...]:
    """One optimizer step over `micro_batches` micro-batches.

    Forward runs the buckets in reverse and backward in layout order, which is the order in which gradients appear.
    Where norm or overflow decide something, they are agreed on between the last reduction and the first `UPDATE`.
    Updates come in forward order,
    so that what the next forward needs first is published first. Frozen buckets run forward and backward and nothing
    else. Raises ShardingError when there is no micro-batch.
    """
    if micro_batches < 1:
        raise ShardingError(
            f"a step of {micro_batches} micro-batches does nothing", cure="use at least 1", value=micro_batches
        )
    forward_order = sorted(layout.buckets, key=lambda bucket: (bucket.kind.unit != ROOT_UNIT, -bucket.index))
    members: dict[str, list[int]] = {}
    for bucket in forward_order:
        members.setdefault(bucket.kind.unit, []).append(bucket.index)

    uses = _uses(forward_order, micro_batches)
    opening, closing = _live_windows(uses, layout) if policy.params is Placement.SHARDED else (set(), set())
    last = micro_batches - 1
    operations: list[Operation] = []
    for position, use in enumerate(uses):
        bucket = layout.buckets[use.bucket]
        unit = members[bucket.kind.unit]
        sharded = [index for index in unit if not layout.buckets[index].kind.persistent]
        if position in opening:
            operations += (Operation(OpKind.UNSHARD, index, use.micro_batch) for index in sharded)
        operations.append(use)
        if position in closing:
            operations += (Operation(OpKind.RESHARD, index, use.micro_batch) for index in sharded)
        if use.kind is OpKind.BACKWARD and bucket.kind.trainable:
            reduction = _reduction(policy, is_boundary=use.micro_batch == last)
            if reduction is not None:
                operations.append(Operation(reduction, use.bucket, use.micro_batch))

    for bucket in forward_order:
        if bucket.kind.trainable:
            is_whole = policy.params is Placement.REPLICATED or bucket.kind.persistent
            publishes = policy.optim is Placement.SHARDED and is_whole
            kinds = [OpKind.FETCH, OpKind.UPDATE, *[OpKind.PUBLISH] * publishes, OpKind.EVICT]
            operations += (Operation(kind, bucket.index, last) for kind in kinds)
    return tuple(operations)


def _uses(forward_order: list[Bucket], micro_batches: int) -> list[Operation]:
    """Every forward and backward of the step: passes of `len(forward_order)` operations each."""
    uses: list[Operation] = []
    for micro_batch in range(micro_batches):
        uses += (Operation(OpKind.FORWARD, bucket.index, micro_batch) for bucket in forward_order)
        uses += (Operation(OpKind.BACKWARD, bucket.index, micro_batch) for bucket in reversed(forward_order))
    return uses


def _live_windows(uses: list[Operation], layout: ShardLayout) -> tuple[set[int], set[int]]:
    """The positions in `uses` before which the unit in use is unsharded, and those after which it is resharded.

    A unit is live from its first to its last bucket of a pass; when the next pass begins with the unit that ended this
    one, it stays. The root has one window (see [Note: The root unit]).
    """
    passes = len(layout.buckets)
    windows: dict[str, list[tuple[int, int]]] = {}
    for position, use in enumerate(uses):
        unit = layout.buckets[use.bucket].kind.unit
        spans = windows.setdefault(unit, [])
        begin, end = spans[-1] if spans else (position, position)
        if spans and (unit == ROOT_UNIT or position // passes == end // passes or position == end + 1):
            spans[-1] = (begin, position)
        else:
            spans.append((position, position))
    spans = [span for unit_spans in windows.values() for span in unit_spans]
    return {begin for begin, _ in spans}, {end for _, end in spans}


def _reduction(policy: ZeroPolicy, *, is_boundary: bool) -> OpKind | None:
    """What becomes of a bucket's gradients after a backward. Replicated ones accumulate until the boundary."""
    if policy.grads is Placement.SHARDED:
        return OpKind.REDUCE_SCATTER
    if not is_boundary:
        return None
    return OpKind.REDUCE_SCATTER if policy.optim is Placement.SHARDED else OpKind.ALL_REDUCE
