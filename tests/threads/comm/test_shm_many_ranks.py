"""A host of many cores: more ranks than fit into 64 bits, here as threads with one heap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.shm.backend import ShmBackend
from polyaccel.comm.backends.shm.board import NOTE_NBYTES, ShmBoard
from polyaccel.comm.backends.shm.communicator import ShmCommunicator
from polyaccel.comm.backends.shm.group import Host, ShmGroup
from polyaccel.comm.backends.shm.library import shm_library
from polyaccel.comm.backends.shm.memory import Heap, Member, map_file, new_file
from polyaccel.types import DType, ReduceOp

pytestmark = pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux and the compiled library")
RANKS = 100


@pytest.mark.timeout(90)
def test_a_hundred_ranks_agree() -> None:
    world = tuple(range(RANKS))
    heap, accelerator = Heap(), CpuAccelerator("numpy")
    member = Member.of_this_process(heap)
    nbytes = shm_library().pa_shm_control_nbytes(RANKS)
    control = map_file(new_file("many", nbytes), nbytes)
    board = ShmBoard(map_file(new_file("board", NOTE_NBYTES), NOTE_NBYTES))
    host = Host(heap, dict.fromkeys(world, member), dict.fromkeys(world), board, symmetric=True)

    def play(rank: int) -> tuple[list[int], list[int], list[int]]:
        comm = ShmCommunicator(host, ShmGroup(host, control, rank, world, 60.0), rank, world, accelerator, 60.0)
        small, whole = comm.allocate(3, DType.INT64), comm.allocate(RANKS * 1_000, DType.INT64)
        for buffer in (small, whole):
            buffer.fill(rank)
        comm.all_reduce(small)
        comm.all_reduce(whole, ReduceOp.MAX)
        own = whole.view(rank * 1_000, 1_000)
        own.fill(rank)
        comm.all_gather(whole, own)
        found = small.raw.tolist(), sorted(set(whole.raw.tolist())), whole.raw[::1_000].tolist()
        comm.barrier()  # nobody leaves while another one looks for it
        comm.close()
        return found

    with ThreadPoolExecutor(RANKS) as threads:
        answers = list(threads.map(play, world))
    assert answers == [([sum(world)] * 3, list(world), list(world))] * RANKS
