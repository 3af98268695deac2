"""The contract of parts whose sizes differ, of gathers and scatters, and of batches of messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polyaccel.comm.arguments import StridedParts
from polyaccel.comm.base import Communicator, message_from, message_to
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, ShardingError
from polyaccel.testkit.comm.values import SIZES, combined, dtypes_of, expect, put, refused, values_of

Counts = list[int]
_KINDS: dict[str, Callable[[int, int], int]] = {
    "growing": lambda rank, numel: numel * rank,
    "only the last": lambda rank, numel: 0,
    "none for the first": lambda rank, numel: 0 if rank == 0 else numel + rank % 2,
    "all equal": lambda rank, numel: numel,
}


def counts_of(kind: str, numel: int, world_size: int) -> Counts:
    """A count for each rank: of the last one there is always something."""
    counts = [_KINDS[kind](rank, numel) for rank in range(world_size)]
    return [*counts[:-1], counts[-1] or numel]


def cases(world_size: int) -> list[tuple[str, Counts]]:
    """Counts of every kind and size, with what to call them."""
    found = [("nothing at all", [0] * world_size)]
    for kind in _KINDS:
        found += [(f"{kind}, {numel}", counts_of(kind, numel, world_size)) for numel in SIZES[1:]]
    return found


def _own(counts: Counts, rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def all_gather_takes_uneven_parts(comm: Communicator) -> int:
    checks = 0
    for name, counts in cases(comm.world_size):
        expected = np.concatenate([values_of(rank, count) for rank, count in enumerate(counts)])
        for dtype in dtypes_of(comm)[:3]:
            for in_place in (False, True):
                out = comm.allocate(sum(counts), dtype)
                own = put(comm, values_of(comm.rank, counts[comm.rank]), dtype)
                if in_place:
                    place = out.view(_own(counts, comm.rank).start, own.numel)
                    place.copy_from(own)
                    own = place
                comm.all_gather(out, own, counts=counts, async_op=in_place).wait()
                checks += expect(comm, out, expected, f"all_gather, uneven: {name}, {in_place=}")
    return checks


def reduce_scatter_takes_uneven_parts(comm: Communicator) -> int:
    """Also bit for bit what the all-reduce gives, where the communicator is deterministic."""
    checks = 0
    for name, counts in cases(comm.world_size):
        own, whole = _own(counts, comm.rank), sum(counts)
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            for in_place in (False, True):
                source = put(comm, values_of(comm.rank, whole), DType.FLOAT32)
                numel = counts[comm.rank]
                out = source.view(own.start, numel) if in_place else comm.allocate(numel, DType.FLOAT32)
                comm.reduce_scatter(out, source, op, counts=counts, async_op=in_place).wait()
                checks += expect(comm, out, combined(comm, whole, op)[own], f"reduce_scatter, uneven: {name}, {op}")
        if comm.deterministic:
            mine = np.random.default_rng(comm.rank).standard_normal(whole) * 1e3
            source, total = put(comm, mine, DType.FLOAT32), put(comm, mine, DType.FLOAT32)
            out = comm.allocate(counts[comm.rank], DType.FLOAT32)
            comm.reduce_scatter(out, source, counts=counts)
            comm.all_reduce(total)
            if out.to_bytes() != total.to_bytes()[4 * own.start : 4 * own.stop]:
                raise AssertionError(f"reduce_scatter, uneven: {name}: not the bits of the all-reduce")
            checks += 1
    return checks


def _exchanged(kind: str, source: int, to: int, numel: int, world_size: int) -> int:
    """How many elements `source` sends to `to`."""
    if kind == "to the next alone":
        return numel if to == (source + 1) % world_size else 0
    if kind == "from the first alone":
        return numel + to if source == 0 else 0
    return (source + 2 * to) % 3 * numel


def all_to_all_takes_uneven_parts(comm: Communicator) -> int:
    checks, world = 0, comm.world_size
    for numel in SIZES:
        for kind in ("by sender and receiver", "to the next alone", "from the first alone"):
            sent = [_exchanged(kind, comm.rank, to, numel, world) for to in range(world)]
            arrives = [_exchanged(kind, source, comm.rank, numel, world) for source in range(world)]
            # Other values for every pair.
            parts = [values_of(comm.rank, count, salt=to) for to, count in enumerate(sent)]
            expected = [values_of(source, count, salt=comm.rank) for source, count in enumerate(arrives)]
            mine = put(comm, np.concatenate(parts), DType.FLOAT32)
            most = max(_exchanged(kind, source, to, numel, world) for source in range(world) for to in range(world))
            for longest in (None, most):
                out = comm.allocate(sum(arrives), DType.FLOAT32)
                work = comm.all_to_all(
                    out, mine, counts=arrives, source_counts=sent, max_send_numel=longest, async_op=numel == 7
                )
                work.wait()
                checks += expect(comm, out, np.concatenate(expected), f"all_to_all {kind}, {numel}, {longest=}")
    return checks


def all_to_all_takes_pieces(comm: Communicator) -> int:
    """What arrives in pieces, and goes back from there, is what was sent; a communicator without them refuses."""
    return sum(_goes_in_pieces(comm, numel) for numel in (SIZES if comm.supports_strided else SIZES[:1]))


def _goes_in_pieces(comm: Communicator, numel: int) -> int:
    world = comm.world_size
    counts = [(comm.rank + 2 * to) % 3 * numel + to for to in range(world)]
    arrives = [(source + 2 * comm.rank) % 3 * numel + comm.rank for source in range(world)]
    sent = np.concatenate([values_of(comm.rank, one, salt=to) for to, one in enumerate(counts)])
    parts = [values_of(source, count, salt=comm.rank) for source, count in enumerate(arrives)]
    lengths = [(count // 2, 0, count - count // 2) for count in arrives]
    table, whole, end = np.empty((world, 3, 2), np.int64), np.empty(sum(arrives), np.float32), 0
    for piece in range(3):  # in their own order
        for source in reversed(range(world)):
            length, first = lengths[source][piece], sum(lengths[source][:piece])
            table[source, piece] = end, length
            whole[end : end + length] = parts[source][first : first + length]
            end += length
    places = put(comm, table.reshape(-1), DType.INT64)
    mine = put(comm, sent, DType.FLOAT32)
    out, again = (comm.allocate(sum(one), DType.FLOAT32) for one in (arrives, counts))

    def exchange(to: Buffer, source: Buffer, received: Counts, given: Counts, *, back: bool) -> None:
        pieces = StridedParts(places, 3, cuts_source=back)
        work = comm.all_to_all(to, source, counts=received, source_counts=given, pieces=pieces, async_op=numel == 7)
        work.wait()

    if not comm.supports_strided:
        return refused(CommError, lambda: exchange(out, mine, arrives, counts, back=False), "parts in pieces")
    exchange(out, mine, arrives, counts, back=False)
    checks = expect(comm, out, whole, f"all_to_all into pieces, {numel}")
    exchange(again, out, counts, arrives, back=True)
    return checks + expect(comm, again, sent, f"all_to_all of pieces, {numel}")


def gather_and_scatter_have_any_root(comm: Communicator) -> int:
    """Equal and uneven parts, in place on the root and not."""
    checks = 0
    for root in range(comm.world_size):
        for name, counts in cases(comm.world_size)[root::2]:
            given = None if len(set(counts)) == 1 else counts
            whole, own = sum(counts), _own(counts, comm.rank)
            parts = np.concatenate([values_of(rank, count) for rank, count in enumerate(counts)])
            is_root, in_place = comm.rank == root, len(name) % 2 == 1
            mine = put(comm, values_of(comm.rank, counts[comm.rank]), DType.FLOAT32)
            out = comm.allocate(whole, DType.FLOAT32) if is_root else None
            if out is not None and in_place:
                place = out.view(own.start, mine.numel)
                place.copy_from(mine)
                mine = place
            comm.gather(out, mine, root, counts=given, async_op=in_place).wait()
            if out is not None:
                checks += expect(comm, out, parts, f"gather to {root}: {name}, {in_place=}")
            source = put(comm, parts, DType.FLOAT32) if is_root else None
            part = comm.allocate(counts[comm.rank], DType.FLOAT32)
            if source is not None and in_place:
                part = source.view(own.start, part.numel)
            comm.scatter(part, source, root, counts=given, async_op=not in_place).wait()
            checks += expect(comm, part, parts[own], f"scatter from {root}: {name}, {in_place=}")
    return checks


def batches_of_messages_wait_for_no_order(comm: Communicator) -> int:
    """Everybody sends to everybody, in orders that would make ranks wait for each other one by one."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    if not others:
        comm.batch([]).wait()
        return refused(CommError, lambda: comm.batch([message_to(comm.allocate(1, DType.FLOAT32), 0)]), "to itself")
    checks = 0
    for numel in SIZES[1:]:
        inbox = {rank: comm.allocate(numel + rank, DType.FLOAT32) for rank in others}
        sent = put(comm, values_of(comm.rank, numel + comm.rank), DType.FLOAT32)
        messages = [message_to(sent, rank) for rank in others]
        messages += [message_from(buffer, rank) for rank, buffer in reversed(inbox.items())]
        comm.batch(messages, async_op=numel == 7).wait()
        checks += sum(
            expect(comm, buffer, values_of(rank, numel + rank), f"a batch, from {rank}")
            for rank, buffer in inbox.items()
        )
    comm.batch([]).wait()
    return checks


def wrong_counts_are_refused_on_the_spot(comm: Communicator) -> int:
    """Before anything is sent: the ranks can continue together afterwards."""
    n = comm.world_size
    whole, part = comm.allocate(4 * n, DType.FLOAT32), comm.allocate(4, DType.FLOAT32)
    fours = [4] * n
    checks = refused(ShardingError, lambda: comm.all_gather(whole, part, counts=[*fours, 0]), "a count too many")
    checks += refused(ShardingError, lambda: comm.all_gather(whole, part, counts=[3] * n), "counts of another size")
    checks += refused(
        ShardingError, lambda: comm.reduce_scatter(part, whole, counts=[-4, 8, *fours][:n]), "a negative count"
    )
    checks += refused(ShardingError, lambda: comm.all_to_all(whole, part, counts=fours), "counts of one buffer")
    checks += refused(CommError, lambda: comm.gather(whole, part, n), "a root outside the group")
    checks += refused(CommError, lambda: comm.gather(None, part, comm.rank), "a gather to nowhere")
    comm.barrier()
    return checks
