"""Which tier holds the master weights and optimizer states of each bucket. Integers, but for the tiers themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyaccel.errors import ShardingError
from polyaccel.zero.layout import Bucket, ShardLayout

if TYPE_CHECKING:
    from polyaccel.offload.tier import Tier


@dataclass(frozen=True)
class StatePlacement:
    """Trainable buckets in `offloaded` have their states in `tier`, the others in `device`."""

    device: Tier
    tier: Tier
    offloaded: frozenset[int] = frozenset()

    def tier_of(self, bucket: Bucket) -> Tier:
        return self.tier if bucket.index in self.offloaded else self.device

    def close(self) -> None:
        """Close both tiers; every buffer in them is lost."""
        self.tier.close()
        self.device.close()


def offloaded_buckets(layout: ShardLayout, ratio: float) -> frozenset[int]:
    """The trainable buckets whose states leave the device, so that they have the share `ratio` of all states.

    The first buckets stay, as many as fit into the rest; hence at least `ratio` leaves. Raises ShardingError outside of
    0..1.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ShardingError(f"a share of {ratio} of the states cannot be offloaded", cure="use 0 to 1", value=ratio)
    trainable = [bucket for bucket in layout.buckets if bucket.kind.trainable]
    room = (1.0 - ratio) * sum(bucket.numel for bucket in trainable)
    offloaded = set()
    for bucket in trainable:
        room -= bucket.numel
        if room < 0:
            offloaded.add(bucket.index)
    return frozenset(offloaded)
