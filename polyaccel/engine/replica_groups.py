"""Replica groups of a job (DiLoCo): their communicators, and where each saves."""

from __future__ import annotations

from collections.abc import Callable

from polyaccel.checkpoint import Storage, list_checkpoints
from polyaccel.comm.base import Communicator
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.zero.outer_step import ReplicaGroup

KEY = "diloco.replica_groups"


def make_replica_group(communicator: Communicator, count: int) -> ReplicaGroup:
    """Return this rank's group, one of `count` groups of neighbours. Collective. Raises ConfigError for a count that
    does not divide the ranks."""
    world = communicator.world_size
    if world % count:
        raise ConfigError([Problem(KEY, count, f"should divide {world} ranks", "start a multiple of it")])
    size = world // count
    inside = across = None
    for index in range(count):
        inside = communicator.split(range(index * size, (index + 1) * size)) or inside
    for place in range(size):
        across = communicator.split(range(place, world, size)) or across
    assert inside is not None  # every rank is in one of each
    assert across is not None
    communicator.barrier()  # every rank has joined before any may leave
    return ReplicaGroup(inside, across)


def folder_of(group: ReplicaGroup | None, folder: str) -> str:
    """The part of a folder in which the ranks of a group write: all of it without groups."""
    return folder if group is None else folder_of_group(folder, group.index)


def folder_of_group(folder: str, index: int) -> str:
    """The part of a folder that belongs to group `index`."""
    return f"{folder.rstrip('/')}/replica-group-{index}"


def find_saved(group: ReplicaGroup | None, folder: str, open_storage: Callable[[str], Storage]) -> Storage:
    """Open the storage that has a group's checkpoints: its own folder, that of the first group, or `folder` itself.
    Collective in the group."""
    if group is None:
        return open_storage(folder)
    chosen = folder
    if group.inside.rank == 0:
        own = (folder_of_group(folder, index) for index in (group.index, 0))
        chosen = next((each for each in own if _has_checkpoints(open_storage(each))), folder)
    return open_storage(group.inside.broadcast_object(chosen))


def place_among(group: ReplicaGroup | None, place: int, count: int) -> tuple[int, int]:
    """Return the place among all groups of one of `count` places in this group, and the number of all places."""
    return (place, count) if group is None else (group.index * count + place, group.count * count)


def _has_checkpoints(storage: Storage) -> bool:
    try:
        return bool(list_checkpoints(storage))
    except PolyaccelError:
        return False
