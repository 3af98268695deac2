"""The backend `shm`: all ranks on one Linux host, by memory that they share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.backends.shm.communicator import NOTE_NBYTES, ShmBoard, ShmCommunicator
from polyaccel.comm.backends.shm.cow_mapping import can_track_dirty_pages
from polyaccel.comm.backends.shm.group import Host, ShmGroup
from polyaccel.comm.backends.shm.library import MOST_RANKS, probe_library, shm_library
from polyaccel.comm.backends.shm.memory import Heap, Member, PeerFile, map_file, new_file, open_peer, rounded_up
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous, StatusStore, unusable_error
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.rendezvous.ranks import RendezvousGroup
from polyaccel.core.deadline import Deadline
from polyaccel.errors import HostsDifferError

SYMMETRIC_VARIABLE = "POLYACCEL_SHM_SYMMETRIC"
"""Environment variable: "0" keeps all buffers private, so that everything goes through stages (to compare)."""


class ShmBackend(CommBackend):
    """The rendezvous is gloo's, and torch's default group (gloo) is theirs to use; our collectives go through memory.
    Without torch the rendezvous is on the host."""

    name: ClassVar[str] = "shm"
    most_ranks: ClassVar[int | None] = MOST_RANKS

    @classmethod
    def probe(cls) -> Probe:
        return probe_library()

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        self._check(rendezvous, accelerator)
        members = RendezvousGroup(rendezvous, timeout_s=timeout_s)
        if members.world_size == 1:
            return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
        ranks, deadline = tuple(range(members.world_size)), members.deadline
        return share_memory(ranks, members.rank, accelerator, timeout_s, members.exchange, deadline=deadline)

    def connect_within(self, group: Communicator, board: StatusStore | None) -> Communicator:
        return share_memory(group.ranks, group.rank, group.accelerator, group.timeout_s, group.all_gather_object, board)

    def _check(self, rendezvous: Rendezvous, accelerator: Accelerator) -> None:
        probe = self.probe()
        reason, world = probe.reason, rendezvous.world_size
        if probe.usable and accelerator.current_device().type != "cpu":
            reason = f"{accelerator.name} has its own memory"
        elif probe.usable and rendezvous.local_world_size != world:
            reason = f"{rendezvous.local_world_size} of {world} ranks are on this host ({rendezvous.source})"
        elif probe.usable and world > MOST_RANKS:
            reason = f"{world} ranks are more than {MOST_RANKS}"
        elif probe.usable:
            return
        raise unusable_error(self.name, reason)


def share_memory(
    ranks: tuple[int, ...],
    rank: int,
    accelerator: Accelerator,
    timeout_s: float,
    exchange: Callable[[str], Sequence[str]],
    board: StatusStore | None = None,
    *,
    deadline: Deadline | None = None,
) -> ShmCommunicator:
    """A communicator over the memory of one host for the global `ranks`, of which this is number `rank`. Collective.

    `exchange(note)` gives every rank's note, in that order. Without a `board` the ranks make one for `ranks` counted
    from 0. Ranks that have not come by the `deadline` (`timeout_s` from now) are given up; `timeout_s` limits later
    calls. Raises HostsDifferError when they are on several hosts, CommError when they cannot open each other's memory.
    """
    world = len(ranks)
    control_nbytes = rounded_up(shm_library().pa_shm_control_nbytes(world))
    nbytes = control_nbytes + NOTE_NBYTES * world
    heap = Heap()
    # The control block and the board, which the first rank makes for all.
    file = new_file("polyaccel-control", rounded_up(nbytes)) if rank == 0 else -1
    try:
        note = {
            "member": asdict(Member.of_this_process(heap)),
            "control": file,
            "symmetric": os.environ.get(SYMMETRIC_VARIABLE) != "0" and can_track_dirty_pages(),
        }
        found = [json.loads(text) for text in exchange(json.dumps(note))]
        members = {one: Member(**said["member"]) for one, said in zip(ranks, found, strict=True)}
        _check_one_host(members)
        files = {one: None if one == ranks[rank] else PeerFile(one, member) for one, member in members.items()}
        if rank:
            file = open_peer(members[ranks[0]].pid, found[0]["control"], f"rank {ranks[0]}'s control block")
        blocks = map_file(file, nbytes)
        symmetric = all(said["symmetric"] for said in found)
        host = Host(heap, members, files, board or ShmBoard(blocks[control_nbytes:]), symmetric)
        group = ShmGroup(host, blocks[:control_nbytes], rank, ranks, timeout_s)
        communicator = ShmCommunicator(host, group, rank, ranks, accelerator, timeout_s)
        communicator.connect(deadline or Deadline(timeout_s))
    finally:
        if file >= 0:
            os.close(file)
    return communicator


def _check_one_host(members: dict[int, Member]) -> None:
    """Raise HostsDifferError where `members` are on several hosts, before a communicator exists."""
    first, *others = members
    elsewhere = [rank for rank in others if members[rank].host != members[first].host]
    if elsewhere:
        raise HostsDifferError(
            f"ranks {elsewhere} are not on the host (or not in the container) of rank {first}",
            hint="choose a backend that crosses hosts: POLYACCEL_COMM=gloo",
            value=tuple(elsewhere),
        )
