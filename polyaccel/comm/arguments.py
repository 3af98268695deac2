"""Arguments of a collective: the ranks' parts of a whole buffer, and checks of what is invalid for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from zlib import crc32

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, ShardingError

MOST_SHOWN = 8
"""Maximum number of counts, or of messages of a batch, that a text shows."""
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StridedParts:
    """Offsets of non-contiguous all-to-all parts within a buffer.

    Attributes:
        count: Pieces of each part.
    """

    table: Buffer
    """int64 on the host: for each rank `count` pairs (first element, elements), in the part's order."""
    count: int
    cuts_source: bool
    """Whether the parts of the source are not contiguous, else those of the target."""

    def check(self, counts: Counts | None, world_size: int) -> None:
        """Refuse a table that does not fit.

        Args:
            counts: Elements of each rank's part; None is refused.
            world_size: Ranks of the group.

        Raises:
            ShardingError: The table has another size or type, or there are no counts.
        """
        numel, dtype = self.table.numel, self.table.dtype
        if counts is None or numel != 2 * self.count * world_size or dtype is not DType.INT64:
            raise ShardingError(
                f"a table of {numel} x {dtype.value} for {self.count} pieces of {world_size} ranks",
                hint="give counts, and two int64 for each piece",
                value=numel,
            )


def bounds_of(counts: Counts | None, numel: int, world_size: int) -> list[int]:
    """Find where the ranks' parts begin.

    Args:
        counts: Elements of each rank's part, in rank order; None for equal parts.
        numel: Elements of the whole buffer, used for equal parts.
        world_size: Ranks of the group, used for equal parts.

    Returns:
        Offsets in elements, one for each part; the end of the last part follows.
    """
    if counts is None:
        return [rank * (numel // world_size) for rank in range(world_size + 1)]
    return [0, *accumulate(counts)]


def pieces_of(whole: Buffer, bounds: Sequence[int]) -> list[Buffer]:
    """Cut a buffer into adjacent views.

    Args:
        whole: Buffer to cut.
        bounds: Ascending offsets in elements: begin of each view, and the end of the last.

    Returns:
        Views of the same memory, one less than `bounds`.
    """
    return [whole.view(start, end - start) for start, end in pairwise(bounds)]


def check_root(kind: str, root: int, world_size: int) -> None:
    """Refuse a rank that is not in the group.

    Args:
        kind: Name of the call, for the message.
        root: Rank to check.
        world_size: Ranks of the group.

    Raises:
        CommError: The rank is outside.
    """
    if not 0 <= root < world_size:
        raise CommError(
            f"{kind}: rank {root} is not in a group of {world_size}",
            hint="ranks count inside the group, from 0",
            value=root,
        )


def check_members(kind: str, ranks: tuple[int, ...], world_size: int) -> None:
    """Refuse a sub-group that is empty, repeats a rank or names one outside.

    Args:
        kind: Name of the call, for the message.
        ranks: Members of the sub-group.
        world_size: Ranks of the group.

    Raises:
        CommError: The ranks are not a group.
    """
    for rank in ranks:
        check_root(kind, rank, world_size)
    if not ranks or len(set(ranks)) != len(ranks):
        raise CommError(f"{kind}: {list(ranks)} is not a group", hint="name each member once", value=ranks)


def check_equal_parts(kind: str, out: Buffer, source: Buffer, *, world_size: int, parts_of: str) -> None:
    """Refuse buffers of which one is not an equal part of the other.

    Args:
        kind: Name of the call, for the message.
        out: Buffer to receive into.
        source: Buffer to send.
        world_size: Ranks of the group.
        parts_of: Which buffer is the whole: "out" or "source".

    Raises:
        ShardingError: Lengths or element types do not fit.
    """
    whole, part = (out, source) if parts_of == "out" else (source, out)
    check_part(kind, whole, part, None, 0, world_size)


def is_own_part(kind: str, whole: Buffer, part: Buffer, start: int) -> bool:
    """Return whether a collective runs in place: the part is the view of the whole at this rank's place.

    Args:
        kind: Name of the call, for the message.
        whole: Buffer of all parts.
        part: Buffer of this rank's part.
        start: First element of this rank's part in `whole`.

    Returns:
        Whether they share memory. False for an empty part.

    Raises:
        ShardingError: The two overlap in any other way, which is invalid for every collective.
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
    """Refuse a part and a whole whose lengths or element types do not fit.

    Args:
        kind: Name of the call, for the message.
        whole: Buffer of all parts.
        part: Buffer of this rank's part.
        counts: Elements of each rank's part; None for equal parts.
        rank: This rank.
        world_size: Ranks of the group.

    Raises:
        ShardingError: They do not fit.
    """
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
    """Refuse a whole buffer that cannot be cut for the ranks.

    Args:
        kind: Name of the call, for the message.
        whole: Buffer of all parts.
        counts: Elements of each rank's part; None for equal parts.
        world_size: Ranks of the group.

    Raises:
        ShardingError: The length is not divisible, or `counts` do not add up to it.
    """
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
    """Refuse buffers of different element types.

    Args:
        kind: Name of the call, for the message.
        one: First buffer.
        other: Second buffer.

    Raises:
        ShardingError: The types differ.
    """
    if one.dtype is not other.dtype:
        raise ShardingError(
            f"{kind}: buffers of {one.dtype.value} and {other.dtype.value}",
            hint="cast first",
            value=(one.dtype, other.dtype),
        )


def check_reduction(kind: str, dtype: DType, op: ReduceOp) -> None:
    """Refuse averages of integers, which backends round differently, and reductions of bool, which libraries define
    differently.

    Args:
        kind: Name of the call, for the message.
        dtype: Element type.
        op: The reduction.

    Raises:
        ShardingError: The reduction is not defined for the type.
    """
    if op is ReduceOp.AVG and not dtype.is_floating:
        raise ShardingError(
            f"{kind}: the average of {dtype.value} is not defined", hint="use SUM and divide, or cast first", value=op
        )
    if dtype is DType.BOOL:
        raise ShardingError(f"{kind}: the reduction of bool is not defined", hint="cast to uint8 first", value=dtype)


def shown_counts(counts: Counts | None) -> str:
    """Show counts in a message, shortened where there are many.

    Args:
        counts: Elements of each rank's part; None is shown as an empty list.

    Returns:
        Text: all counts up to `MOST_SHOWN`, else the first ones, their number and a CRC-32 of all.
    """
    if counts is None or len(counts) <= MOST_SHOWN:
        return str(list(counts or ()))
    first = ", ".join(map(str, counts[:MOST_SHOWN]))
    return f"[{first}, ... {len(counts)} counts, checksum {crc32(repr(counts).encode()):08x}]"
