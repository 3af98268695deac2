"""The backend `shm`: all ranks on one Linux host, by memory that they share."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import count
from typing import Any, ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous
from polyaccel.comm.shm_board import NOTE_NBYTES, ShmBoard
from polyaccel.comm.shm_communicator import ShmCommunicator
from polyaccel.comm.shm_group import Host, ShmGroup
from polyaccel.comm.shm_library import MOST_RANKS, probe_library, shm_library
from polyaccel.comm.shm_memory import Heap, Member, PeerFile, map_file, new_file, open_peer, rounded_up
from polyaccel.comm.single import SingleCommunicator
from polyaccel.comm.torch_pg import GlooBackend, exchange_notes, join_default_group
from polyaccel.errors import CommError, RanksApart

SYMMETRIC_VARIABLE = "POLYACCEL_SHM_SYMMETRIC"
"""Environment variable: "0" keeps all buffers private, so that everything goes through stages (to compare)."""

_connections = count()


class ShmBackend(CommBackend):
    """Ranks meet as gloo's do, and torch's default group (gloo) is theirs to use; our collectives go through memory."""

    name: ClassVar[str] = "shm"

    @classmethod
    def probe(cls) -> Probe:
        probe = probe_library()
        meeting = GlooBackend.probe()
        return probe if not probe.usable or meeting.usable else Probe(False, f"ranks meet by gloo: {meeting.reason}")

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        self._check(rendezvous, accelerator)
        join_default_group(GlooBackend, rendezvous, timeout_s)
        if rendezvous.world_size == 1:
            return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
        rank, world = rendezvous.rank, rendezvous.world_size
        control_nbytes = rounded_up(shm_library().pa_shm_control_nbytes(world))
        nbytes = control_nbytes + NOTE_NBYTES * world
        heap = Heap()
        # The control block and the board, which rank 0 makes for all.
        file = new_file("polyaccel-control", rounded_up(nbytes)) if rank == 0 else -1
        try:
            found = self._meet(rendezvous, heap, file, timeout_s)
            members = tuple(Member(**one["member"]) for one in found)
            _check_one_host(members)
            files = tuple(None if peer == rank else PeerFile(peer, member) for peer, member in enumerate(members))
            if rank:
                file = open_peer(members[0].pid, found[0]["control"], "rank 0's control block")
            blocks = map_file(file, nbytes)
            symmetric = all(one["symmetric"] for one in found)
            host = Host(heap, members, files, ShmBoard(blocks[control_nbytes:]), symmetric)
            ranks = tuple(range(world))
            group = ShmGroup(host, blocks[:control_nbytes], rank, ranks, timeout_s)
            communicator = ShmCommunicator(host, group, rank, ranks, accelerator, timeout_s)
            communicator.barrier()  # from here on everybody has opened what it needs
        finally:
            if file >= 0:
                os.close(file)
        return communicator

    @staticmethod
    def _meet(rendezvous: Rendezvous, heap: Heap, file: int, timeout_s: float) -> list[dict[str, Any]]:
        note = {
            "member": asdict(Member.of_this_process(heap)),
            "control": file,
            "symmetric": os.environ.get(SYMMETRIC_VARIABLE) != "0",
        }
        rank, world = rendezvous.rank, rendezvous.world_size
        notes = exchange_notes(f"shm/{next(_connections)}", rank, world, json.dumps(note), timeout_s)
        return [json.loads(text) for text in notes]

    def _check(self, rendezvous: Rendezvous, accelerator: Accelerator) -> None:
        probe = self.probe()
        reason, world = probe.reason, rendezvous.world_size
        if probe.usable and accelerator.current_device().type != "cpu":
            reason = f"{accelerator.name} has memory of its own"
        elif probe.usable and rendezvous.local_world_size != world:
            reason = f"{rendezvous.local_world_size} of {world} ranks are on this host ({rendezvous.source})"
        elif probe.usable and world > MOST_RANKS:
            reason = f"{world} ranks are more than {MOST_RANKS}"
        elif probe.usable:
            return
        raise CommError(
            f"comm backend 'shm' cannot be used: {reason}",
            cure="choose another one: POLYACCEL_COMM or init_distributed(dist_backend=...)",
            value=self.name,
        )


def _check_one_host(members: tuple[Member, ...]) -> None:
    elsewhere = [rank for rank, member in enumerate(members) if member.host != members[0].host]
    if elsewhere:
        raise RanksApart(
            f"ranks {elsewhere} are not on the host (or not in the container) of rank 0",
            cure="choose a backend that crosses hosts: POLYACCEL_COMM=gloo",
            value=tuple(elsewhere),
        )
