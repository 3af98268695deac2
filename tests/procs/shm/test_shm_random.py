"""Random collectives over shared memory: every kind, size, type and kind of memory, bit by bit against one process."""

from __future__ import annotations

import os
from random import Random

import numpy as np
import pytest

from polyaccel.comm.base import Communicator
from polyaccel.comm.collectives.reduction import reduce_parts
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.testkit.ranks.procs import RankPool

COLLECTIVES = int(os.environ.get("POLYACCEL_SHM_COLLECTIVES", "2000"))
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64, DType.INT64, DType.INT32, DType.INT8)
IN_FLIGHT = 4


def filled(comm: Communicator, rank: int, index: int, buffer: Buffer) -> Buffer:
    """`buffer` with what `rank` brings to collective `index`."""
    rng = np.random.default_rng((index, rank))
    values = rng.standard_normal(buffer.numel) * 50 if buffer.dtype.is_floating else rng.integers(-9, 9, buffer.numel)
    wide = DType.FLOAT64 if buffer.dtype.is_floating else DType.INT64
    staged = comm.accelerator.allocate(buffer.numel, wide)
    staged.from_bytes(values.tobytes())
    buffer.copy_from(staged)
    return buffer


def check(found: Buffer, expected: Buffer, what: str) -> None:
    if found.to_bytes() != expected.to_bytes():
        raise AssertionError(f"{what}: other bits than one process computes")


def random_collectives(comm: Communicator, seed: int, count: int) -> int:
    """Run `count` of them and return how many results were compared; every rank draws the same numbers."""
    rng = Random(seed)
    n, me, accelerator = comm.world_size, comm.rank, comm.accelerator
    flights: list[tuple[Work, Buffer, Buffer, str]] = []
    checked = 0
    for index in range(count):
        kind = rng.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"])
        dtype = rng.choice(DTYPES)
        most = rng.choice([8, 3_000, 30_000, 300_000 if rng.random() < 0.3 else 9_000])
        numel = rng.randrange(most) // n * n if kind != "all_reduce" else rng.randrange(most)
        op = rng.choice([one for one in ReduceOp if one is not ReduceOp.AVG or dtype.is_floating])
        in_place, root = rng.random() < 0.5, rng.randrange(n)
        # Memory that peers can map and memory that they cannot, not the same on all ranks.
        takes = [rng.choice([comm.allocate, accelerator.allocate]) for _ in range(2 * n)]
        part = numel // n
        everybody = [filled(comm, rank, index, accelerator.allocate(numel, dtype)) for rank in range(n)]
        whole = takes[me](numel, dtype)
        own = whole.view(me * part, part)
        expected = accelerator.allocate(numel, dtype)
        if kind in ("all_reduce", "reduce_scatter"):
            reduce_parts(accelerator, everybody, expected, op)
        later = rng.random() < 0.4
        if kind == "all_reduce":
            whole.copy_from(everybody[me])
            work, found = comm.all_reduce(whole, op, async_op=later), whole
        elif kind == "reduce_scatter":
            whole.copy_from(everybody[me])
            found = own if in_place else takes[n + me](part, dtype)
            work, expected = comm.reduce_scatter(found, whole, op, async_op=later), expected.view(me * part, part)
        elif kind == "all_gather":
            source = own if in_place else takes[n + me](part, dtype)
            source.copy_from(everybody[me].view(me * part, part))
            for rank in range(n):
                expected.view(rank * part, part).copy_from(everybody[rank].view(rank * part, part))
            work, found = comm.all_gather(whole, source, async_op=later), whole
        elif kind == "broadcast":
            whole.copy_from(everybody[me])
            expected.copy_from(everybody[root])
            work, found = comm.broadcast(whole, root, async_op=later), whole
        else:
            found = takes[n + me](numel, dtype)
            whole.copy_from(everybody[me])
            for rank in range(n):
                expected.view(rank * part, part).copy_from(everybody[rank].view(me * part, part))
            work = comm.all_to_all(found, whole, async_op=later)
        flights.append((work, found, expected, f"#{index} {kind} {op} {dtype} {numel} {in_place=} {later=}"))
        while flights and (len(flights) > IN_FLIGHT or not later):
            work, found, expected, what = flights.pop(0)
            work.wait()
            check(found, expected, what)
            checked += 1
    for work, found, expected, what in flights:
        work.wait()
        check(found, expected, what)
    return checked + len(flights)


@pytest.mark.timeout(300 + COLLECTIVES // 10)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_collectives_give_the_bits_of_one_process(world_size: int) -> None:
    count = -(-COLLECTIVES // 3)
    with RankPool(world_size, backend="shm") as pool:
        seed = world_size
        assert pool.run(random_collectives, seed, count, timeout_s=200 + COLLECTIVES // 10) == [count] * world_size


def same_call_on_other_memory(comm: Communicator) -> tuple[int, list[set[float]]]:
    """How many addresses the buffers had, and what each sum was."""
    addresses, sums = set(), []
    for turn in range(12):
        buffer = comm.allocate(100_000, DType.FLOAT32)
        addresses.add(buffer.data_ptr())
        buffer.fill(turn + comm.rank)
        comm.all_reduce(buffer)
        sums.append(set(buffer.raw.tolist()))
        comm.barrier()  # or a peer might still write when the memory goes
        del buffer
    return len(addresses), sums


def test_memory_in_the_place_of_other_memory_is_looked_at_anew() -> None:
    """The calls are equal in all that can be seen of them, yet each buffer lies elsewhere in the heap file."""
    with RankPool(2, backend="shm") as pool:
        for addresses, sums in pool.run(same_call_on_other_memory):
            assert addresses < len(sums)
            assert sums == [{2.0 * turn + 1.0} for turn in range(12)]
