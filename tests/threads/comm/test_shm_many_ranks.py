"""A host of many cores: more ranks than fit into 64 bits, here as threads with one heap."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from backend_marks import needs

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.shm.communicator import NOTE_NBYTES, ShmBoard, ShmCommunicator
from polyaccel.comm.backends.shm.group import Host, ShmGroup
from polyaccel.comm.backends.shm.library import shm_library
from polyaccel.comm.backends.shm.memory import Heap, Member, map_file, new_file
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError

pytestmark = needs("shm")
RANKS = 100


def on_ranks(count: int, work: Callable[[ShmCommunicator], Any]) -> list[Any]:
    """What `work` returns on each of `count` ranks."""
    world = tuple(range(count))
    heap, accelerator = Heap(), CpuAccelerator("numpy")
    member = Member.of_this_process(heap)
    nbytes = shm_library().pa_shm_control_nbytes(count)
    control = map_file(new_file("many", nbytes), nbytes)
    board = ShmBoard(map_file(new_file("board", NOTE_NBYTES), NOTE_NBYTES))
    host = Host(heap, dict.fromkeys(world, member), dict.fromkeys(world), board, symmetric=True)

    def play(rank: int) -> Any:
        return work(ShmCommunicator(host, ShmGroup(host, control, rank, world, 200.0), rank, world, accelerator, 200.0))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(play, world))


def test_a_hundred_ranks_agree() -> None:
    world = tuple(range(RANKS))

    def work(comm: ShmCommunicator) -> tuple[list[int], list[int], list[int]]:
        rank = comm.rank
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

    assert on_ranks(RANKS, work) == [([sum(world)] * 3, list(world), list(world))] * RANKS


def test_ranks_that_gather_different_buckets_of_one_size_do_not_meet() -> None:
    """Also when the same buffers served an earlier gather that agreed."""

    def work(comm: ShmCommunicator) -> None:
        whole = comm.allocate(8, DType.FLOAT32)
        own = whole.view(4 * comm.rank, 4)
        comm.all_gather(whole, own, bucket=1)
        with pytest.raises(CommError) as caught:
            comm.all_gather(whole, own, bucket=1 + comm.rank)
        assert "all_gather" in str(caught.value)

    on_ranks(2, work)
