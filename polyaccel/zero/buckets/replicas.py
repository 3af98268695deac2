"""Parameters of which every rank of a group has its own copy: pieces of them, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyaccel.comm.base import Communicator
from polyaccel.zero.buckets.bucket_params import BucketParams
from polyaccel.zero.plan.layout import Bucket


@dataclass(frozen=True, slots=True)
class Replica:
    """Elements [start, start + numel) of parameter `fqn`, which all of `ranks` (global) hold: in bucket `bucket`, from
    its element `offset` on."""

    fqn: str
    start: int
    numel: int
    ranks: tuple[int, ...]
    bucket: int
    offset: int


def replicas_of(
    buckets: Iterable[BucketParams], holders: Callable[[Bucket], Communicator], most_numel: int
) -> tuple[Replica, ...]:
    """Every copy of a parameter that this rank has to itself while others hold the same, in pieces of at most so many
    elements. Not those of which there is one for all ranks, in memory that they share."""
    found = []
    for place in buckets:
        group = holders(place.bucket)
        if place.full is None or place.shared is not None or group.world_size == 1:
            continue
        for slot in place.bucket.slots:
            for start in range(0, slot.param.numel, most_numel):
                numel = min(most_numel, slot.param.numel - start)
                where = place.bucket.index, slot.offset + start
                found.append(Replica(slot.param.fqn, start, numel, group.ranks, *where))
    return tuple(found)
