"""The arguments of a collective: how a whole buffer is cut into the ranks' parts, and what no backend can mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from zlib import crc32

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, ShardingError

MOST_SHOWN = 8
"""Counts, or messages of a batch, that a text shows."""
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StridedParts:
    """Offsets of non-contiguous all-to-all parts within a buffer."""

    table: Buffer
    """int64 on the host: for each rank `count` pairs (first element, elements), in the part's order."""
    count: int
    cuts_source: bool
    """Whether it is the source that has its parts in pieces, or the target."""

    def check(self, counts: Counts | None, world_size: int) -> None:
        """Raises ShardingError for a table of another size or type, and for parts without counts."""
        numel, dtype = self.table.numel, self.table.dtype
        if counts is None or numel != 2 * self.count * world_size or dtype is not DType.INT64:
            raise ShardingError(
                f"a table of {numel} x {dtype.value} for {self.count} pieces of {world_size} ranks",
                hint="give counts, and two int64 for each piece",
                value=numel,
            )


def bounds_of(counts: Counts | None, numel: int, world_size: int) -> list[int]:
    """Where parts of these `counts` (None: `numel` in equal parts) begin, and where the last one ends."""
    if counts is None:
        return [rank * (numel // world_size) for rank in range(world_size + 1)]
    return [0, *accumulate(counts)]


def pieces_of(whole: Buffer, bounds: Sequence[int]) -> list[Buffer]:
    """`whole`, cut at `bounds`."""
    return [whole.view(start, end - start) for start, end in pairwise(bounds)]


def check_root(kind: str, root: int, world_size: int) -> None:
    """Refuse a rank that is not in the group."""
    if not 0 <= root < world_size:
        raise CommError(
            f"{kind}: rank {root} is not in a group of {world_size}",
            hint="ranks count inside the group, from 0",
            value=root,
        )


def check_members(kind: str, ranks: tuple[int, ...], world_size: int) -> None:
    """Refuse a sub-group that is empty, repeats a rank or names one outside."""
    for rank in ranks:
        check_root(kind, rank, world_size)
    if not ranks or len(set(ranks)) != len(ranks):
        raise CommError(f"{kind}: {list(ranks)} is not a group", hint="name each member once", value=ranks)


def check_equal_parts(kind: str, out: Buffer, source: Buffer, *, world_size: int, parts_of: str) -> None:
    """Refuse buffers of which one is not a part for every rank of the other. `parts_of` is which one is cut: `out` or
    `source`."""
    whole, part = (out, source) if parts_of == "out" else (source, out)
    check_part(kind, whole, part, None, 0, world_size)


def is_own_part(kind: str, whole: Buffer, part: Buffer, start: int) -> bool:
    """Whether `part` is the view of `whole` at element `start`: the collective then runs in place.

    Raises ShardingError when the two overlap in any other way, which no collective can mean.
    """
    if part.numel == 0:
        return False
    offset = part.data_ptr() - whole.data_ptr()
    if offset == start * part.dtype.itemsize:
        return True
    if -part.nbytes < offset < whole.nbytes:
        raise ShardingError(
            f"{kind}: the two buffers overlap, but the part does not start at element {start} of the whole",
            hint=f"for an in-place call pass whole.view({start}, part.numel), else separate memory",
            value=offset,
        )
    return False


def check_part(kind: str, whole: Buffer, part: Buffer, counts: Counts | None, rank: int, world_size: int) -> None:
    if counts is None and part.numel * world_size != whole.numel:
        raise ShardingError(
            f"{kind}: {part.numel} elements a rank times {world_size} ranks are not {whole.numel}",
            hint="pad the whole so that every rank has an equal part, or give counts",
            value=(part.numel, whole.numel),
        )
    check_whole(kind, whole, counts, world_size)
    if counts is not None and part.numel != counts[rank]:
        raise ShardingError(
            f"{kind}: a part of {part.numel} elements, but rank {rank}'s count is {counts[rank]}",
            hint="give every rank's count in rank order",
            value=(part.numel, counts),
        )
    check_dtypes(kind, part, whole)


def check_whole(kind: str, whole: Buffer, counts: Counts | None, world_size: int) -> None:
    if counts is None:
        if whole.numel % world_size:
            raise ShardingError(
                f"{kind}: {whole.numel} elements are no equal parts for {world_size} ranks",
                hint="pad the whole so that every rank has an equal part, or give counts",
                value=whole.numel,
            )
    elif len(counts) != world_size or min(counts) < 0 or sum(counts) != whole.numel:
        raise ShardingError(
            f"{kind}: counts {shown_counts(counts)} do not cut {whole.numel} elements for {world_size} ranks",
            hint="give one count a rank, which together are the whole buffer",
            value=counts,
        )


def check_dtypes(kind: str, one: Buffer, other: Buffer) -> None:
    if one.dtype is not other.dtype:
        raise ShardingError(
            f"{kind}: buffers of {one.dtype.value} and {other.dtype.value}",
            hint="cast first",
            value=(one.dtype, other.dtype),
        )


def check_reduction(kind: str, dtype: DType, op: ReduceOp) -> None:
    """An average of integers would be rounded differently by every backend, and every library means something else by a
    sum of truth values."""
    if op is ReduceOp.AVG and not dtype.is_floating:
        raise ShardingError(
            f"{kind}: the average of {dtype.value} is not defined", hint="use SUM and divide, or cast first", value=op
        )
    if dtype is DType.BOOL:
        raise ShardingError(f"{kind}: the reduction of bool is not defined", hint="cast to uint8 first", value=dtype)


def shown_counts(counts: Counts | None) -> str:
    """The counts, shortened where there are many: messages and notes have little room."""
    if counts is None or len(counts) <= MOST_SHOWN:
        return str(list(counts or ()))
    first = ", ".join(map(str, counts[:MOST_SHOWN]))
    return f"[{first}, ... {len(counts)} counts, checksum {crc32(repr(counts).encode()):08x}]"
