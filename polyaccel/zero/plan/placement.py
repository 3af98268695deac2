"""Which memory holds each bucket's master weights, optimizer states and sharded parameters. Integers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from polyaccel.errors import ShardingError
from polyaccel.zero.plan.layout import ShardLayout


class Place(Enum):
    """A kind of memory, by the name of the tier that holds it."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Offload:
    """The buckets whose master weights and states leave the device, and those whose sharded parameters do.

    Buckets that `states` (`params`) does not name stay on the device. `is_remote`: the host's kernels do not reach the
    device's memory, so sharded gradients rest in the host's, and other gradients and new parameters are staged there.
    `file_buffers` is how many host buffers, each as long as the largest file, stand between files and kernels. Between
    parameters in files and a device that is not the host stand at most `piece_buffers`, or `state_piece_buffers` where
    the parameters are their own master weights, of at most `piece_numel` elements each.
    """

    states: Mapping[int, Place] = field(default_factory=dict)
    params: Mapping[int, Place] = field(default_factory=dict)
    is_remote: bool = False
    file_buffers: int = 0
    piece_buffers: int = 0
    state_piece_buffers: int = 0
    piece_numel: int = 0

    def places(self, index: int) -> tuple[Place, Place]:
        """Where bucket `index` has its master weights and states, and its parameters if they are sharded."""
        return self.states.get(index, Place.DEVICE), self.params.get(index, Place.DEVICE)

    def are_one(self, index: int) -> bool:
        """Whether master weights of the parameters' own type are the parameters: both on the device, or both off it.

        Files for parameters save nothing when the master weights are in memory anyway, so those are both then. But
        parameters that were put in memory do not move into files with their master weights.
        """
        states, params = self.places(index)
        if Place.DEVICE in (params, states):
            return params is states
        return states is Place.HOST or params is Place.NVME

    def is_within_reach(self, index: int) -> bool:
        """Whether the kernels that update the states of bucket `index` can write its parameters where these rest."""
        states, params = self.places(index)
        is_near = not self.is_remote or (params is Place.DEVICE) is (states is Place.DEVICE)
        return params is not Place.NVME and is_near

    def is_device_memory(self, place: Place) -> bool:
        """Whether the device's kernels reach buffers that rest in `place`."""
        return place is Place.DEVICE or (place is Place.HOST and not self.is_remote)


NO_OFFLOAD = Offload()


def offloaded_buckets(layout: ShardLayout, ratio: float) -> frozenset[int]:
    """The trainable buckets whose states leave the device, so that they have the share `ratio` of all states.

    The first buckets stay, as many as fit into the rest; hence at least `ratio` leaves. Raises ShardingError outside of
    0..1.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ShardingError(f"a share of {ratio} of the states cannot be offloaded", hint="use 0 to 1", value=ratio)
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
        max_numel -= 0 if bucket.kind.persistent else bucket.max_shard_numel
        if max_numel < 0:
            break
        if not bucket.kind.persistent:
            found.add(bucket.index)
    return frozenset(found)
