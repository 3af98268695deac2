"""Which tiers hold each bucket's master weights and optimizer states, and its sharded parameters.

Integers, but for the tiers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polyaccel.errors import ShardingError
from polyaccel.zero.layout import Bucket, ShardLayout
from polyaccel.zero.policy import Placement, ZeroPolicy

if TYPE_CHECKING:
    from polyaccel.offload.tier import Tier


@dataclass(frozen=True)
class StatePlacement:
    """Trainable buckets in `offloaded` have their states in `tier`, the others in `device`.

    The shards of the buckets in `params`, which are sharded, rest in those tiers, all other parameters on the device.
    """

    device: Tier
    tier: Tier
    offloaded: frozenset[int] = frozenset()
    params: Mapping[int, Tier] = field(default_factory=dict)

    def tier_of(self, bucket: Bucket) -> Tier:
        """Where the states are."""
        return self.tier if bucket.index in self.offloaded else self.device

    def gradients_tier_of(self, bucket: Bucket, policy: ZeroPolicy) -> Tier:
        """Where this rank's reduced gradient rests: with the states, unless it is a part of a whole bucket's."""
        return self.tier_of(bucket) if policy.grads is Placement.SHARDED else self.device

    def params_tier_of(self, bucket: Bucket) -> Tier:
        """Where this rank's part of the parameters is."""
        return self.params.get(bucket.index, self.device)

    def are_one(self, bucket: Bucket) -> bool:
        """Whether master weights of the parameters' own type are the parameters: both on the device, or both off it.

        Files for parameters save nothing when the master weights are in memory anyway, so those are both then. But
        parameters that were put in memory do not move into files with their master weights.
        """
        params, states = self.params_tier_of(bucket), self.tier_of(bucket)
        if self.device in (params, states):
            return params is states
        return states.is_resident or not params.is_resident

    def is_within_reach(self, bucket: Bucket) -> bool:
        """Whether the kernels that update the bucket's states can write its parameters where these rest."""
        params = self.params_tier_of(bucket)
        return params.is_resident and params.compute is self.tier_of(bucket).compute

    def close(self) -> None:
        """Close all tiers; every buffer in them is lost."""
        for tier in dict.fromkeys((*self.params.values(), self.tier, self.device)):
            tier.close()


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


def first_shards(layout: ShardLayout, max_numel: int) -> frozenset[int]:
    """The first sharded buckets, as many as have shards of at most `max_numel` elements together on each rank."""
    found = set()
    for bucket in layout.buckets:
        max_numel -= 0 if bucket.kind.persistent else bucket.shard_numel
        if max_numel < 0:
            break
        if not bucket.kind.persistent:
            found.add(bucket.index)
    return frozenset(found)
