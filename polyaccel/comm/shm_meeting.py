"""How the ranks of one host come to share memory: each announces its process and its heap, and opens the others'."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Board
from polyaccel.comm.shm_board import NOTE_NBYTES, ShmBoard
from polyaccel.comm.shm_communicator import ShmCommunicator
from polyaccel.comm.shm_group import Host, ShmGroup
from polyaccel.comm.shm_library import shm_library
from polyaccel.comm.shm_memory import Heap, Member, PeerFile, map_file, new_file, open_peer, rounded_up
from polyaccel.errors import RanksApart

SYMMETRIC_VARIABLE = "POLYACCEL_SHM_SYMMETRIC"
"""Environment variable: "0" keeps all buffers private, so that everything goes through stages (to compare)."""


def share_memory(
    ranks: tuple[int, ...],
    rank: int,
    accelerator: Accelerator,
    timeout_s: float,
    exchange: Callable[[str], Sequence[str]],
    board: Board | None = None,
) -> ShmCommunicator:
    """A communicator over the memory of one host for the global `ranks`, of which this is number `rank`. Collective.

    `exchange(note)` gives every rank's note, in that order. Without a `board` the ranks make one for `ranks` counted
    from 0. Raises RanksApart when they are on several hosts, CommError when they cannot open each other's memory.
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
            "symmetric": os.environ.get(SYMMETRIC_VARIABLE) != "0",
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
        communicator.barrier()  # from here on everybody has opened what it needs
    finally:
        if file >= 0:
            os.close(file)
    return communicator


def _check_one_host(members: dict[int, Member]) -> None:
    first, *others = members
    elsewhere = [rank for rank in others if members[rank].host != members[first].host]
    if elsewhere:
        raise RanksApart(
            f"ranks {elsewhere} are not on the host (or not in the container) of rank {first}",
            cure="choose a backend that crosses hosts: POLYACCEL_COMM=gloo",
            value=tuple(elsewhere),
        )
