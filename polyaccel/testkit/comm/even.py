"""The contract of collectives over equal parts: every type, reduction and length, in place or not."""

from __future__ import annotations

import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.testkit.comm.values import SIZES, combined, dtypes_of, expect, get, put, values_of
from polyaccel.testkit.comparison import same_numbers


def all_reduce_combines_everywhere(comm: Communicator) -> int:
    checks = 0
    for dtype in dtypes_of(comm):
        for op in ReduceOp:
            if op is ReduceOp.AVG and not dtype.is_floating:
                continue
            for numel in SIZES:
                buffer = put(comm, values_of(comm.rank, numel), dtype)
                work = comm.all_reduce(buffer, op, async_op=numel % 2 == 1)
                work.wait()
                checks += expect(comm, buffer, combined(comm, numel, op), f"all_reduce {op} {dtype} {numel}")
    return checks


def reduce_scatter_keeps_the_own_part(comm: Communicator) -> int:
    checks = 0
    for dtype in dtypes_of(comm):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX) if dtype.is_floating else (ReduceOp.SUM, ReduceOp.MIN):
            for numel in SIZES:
                whole = numel * comm.world_size
                own = slice(comm.rank * numel, (comm.rank + 1) * numel)
                expected = combined(comm, whole, op)[own]
                for in_place in (False, True):
                    source = put(comm, values_of(comm.rank, whole), dtype)
                    out = source.view(comm.rank * numel, numel) if in_place else comm.allocate(numel, dtype)
                    comm.reduce_scatter(out, source, op, async_op=in_place).wait()
                    checks += expect(comm, out, expected, f"reduce_scatter {op} {dtype} {numel} {in_place=}")
                    if not in_place:
                        checks += expect(comm, source, values_of(comm.rank, whole), "the source of a reduce_scatter")
    return checks


def all_gather_puts_parts_side_by_side(comm: Communicator) -> int:
    checks = 0
    for dtype in dtypes_of(comm):
        for numel in SIZES:
            expected = np.concatenate([values_of(rank, numel) for rank in range(comm.world_size)])
            for in_place in (False, True):
                out = comm.allocate(numel * comm.world_size, dtype)
                own = put(comm, values_of(comm.rank, numel), dtype)
                if in_place:
                    place = out.view(comm.rank * numel, numel)
                    place.copy_from(own)
                    own = place
                comm.all_gather(out, own, async_op=not in_place).wait()
                checks += expect(comm, out, expected, f"all_gather {dtype} {numel} {in_place=}")
    return checks


def broadcast_comes_from_any_root(comm: Communicator) -> int:
    checks = 0
    for root in range(comm.world_size):
        for numel in SIZES:
            buffer = put(comm, values_of(comm.rank, numel), DType.FLOAT32)
            comm.broadcast(buffer, root, async_op=root == 0).wait()
            checks += expect(comm, buffer, values_of(root, numel), f"broadcast from {root}")
    return checks


def all_to_all_transposes(comm: Communicator) -> int:
    checks = 0
    for numel in SIZES:
        own = slice(comm.rank * numel, (comm.rank + 1) * numel)
        expected = np.concatenate([values_of(rank, numel * comm.world_size)[own] for rank in range(comm.world_size)])
        source = put(comm, values_of(comm.rank, numel * comm.world_size), DType.FLOAT32)
        out = comm.allocate(source.numel, DType.FLOAT32)
        comm.all_to_all(out, source, async_op=numel == 7).wait()
        checks += expect(comm, out, expected, f"all_to_all {numel}")
    return checks


def views_at_odd_places_travel(comm: Communicator) -> int:
    """Each buffer begins at another odd element of its allocation."""
    checks, world = 0, comm.world_size
    for dtype in [one for one in dtypes_of(comm) if one in (DType.FLOAT32, DType.BFLOAT16, DType.UINT8)]:
        for numel in (1, 7, 641):
            mine = values_of(comm.rank, numel * world)
            everybody = np.concatenate([values_of(rank, numel) for rank in range(world)])
            total = combined(comm, numel * world, ReduceOp.SUM)
            own = slice(comm.rank * numel, (comm.rank + 1) * numel)
            whole, part, gathered = (comm.allocate(numel * world + 9, dtype) for _ in range(3))
            source, out, target = whole.view(1, numel * world), part.view(3, numel), gathered.view(5, numel * world)
            what = f"{numel} x {dtype.value} a rank from elements 1, 3 and 5"
            source.copy_from(put(comm, mine, dtype))
            comm.reduce_scatter(out, source)
            checks += expect(comm, out, total[own], f"reduce_scatter, {what}")
            out.copy_from(put(comm, values_of(comm.rank, numel), dtype))
            comm.all_gather(target, out)
            checks += expect(comm, target, everybody, f"all_gather, {what}")
            source.copy_from(put(comm, mine, dtype))
            comm.all_reduce(source)
            checks += expect(comm, source, total, f"all_reduce, {what}")
            for name, buffer, start in (("source", whole, 1), ("part", part, 3), ("target", gathered, 5)):
                used = numel if buffer is part else numel * world
                around = np.delete(get(comm, buffer), np.s_[start : start + used])
                same_numbers(around, np.zeros(around.size), f"what surrounds the {name}, {what}, on rank {comm.rank}")
    return checks
