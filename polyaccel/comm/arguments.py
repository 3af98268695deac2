"""What every backend asks of a call before it moves anything, and how a call is named in messages and traces."""

from __future__ import annotations

from typing import NamedTuple

from polyaccel.buffer import Buffer
from polyaccel.comm.base import NO_INFO, CallInfo, check_collective
from polyaccel.errors import CommError, ShardingError
from polyaccel.types import DType, ReduceOp


class Call(NamedTuple):  # made for every collective, in half the time of a frozen dataclass
    """One collective as its caller described it: what the ranks of a group must agree on, and what it is for.

    `numel` counts the buffer that is whole on this rank (the source of a reduce-scatter, the result of an all-gather).
    `detail` is whatever else must agree: the reduction, the root, the ranks of a split.
    """

    op: str
    numel: int = 0
    dtype: DType | None = None
    detail: str = ""
    info: CallInfo = NO_INFO

    def agrees_with(self, other: Call) -> bool:
        """Whether two ranks may meet with these calls; what they are for does not matter."""
        return (self.op, self.numel, self.dtype, self.detail) == (other.op, other.numel, other.dtype, other.detail)

    def agreed(self) -> str:
        """What ranks must agree on, in words."""
        size = f" {self.numel} x {self.dtype.value}" if self.dtype else ""
        return self.op + (f" {self.detail}" if self.detail else "") + size

    def purpose(self) -> str:
        """What the call is for, in words that follow `agreed`; empty if nobody said."""
        bucket = f" bucket {self.info.bucket}" if self.info.bucket is not None else ""
        return bucket + (f" '{self.info.label}'" if self.info.label else "")

    def __str__(self) -> str:
        return self.agreed() + self.purpose()


def check_reduction(kind: str, dtype: DType, op: ReduceOp) -> None:
    """Refuse an average of integers, which would be rounded differently by every backend."""
    if op is ReduceOp.AVG and not dtype.is_floating:
        raise ShardingError(
            f"{kind}: the average of {dtype.value} is not defined", cure="use SUM and divide, or cast first", value=op
        )


def check_reducible(kind: str, dtype: DType) -> None:
    """Refuse to add truth values, of which every library means something else."""
    if dtype is DType.BOOL:
        raise ShardingError(f"{kind}: the reduction of bool is not defined", cure="cast to uint8 first", value=dtype)


def check_root(kind: str, root: int, world_size: int) -> None:
    """Refuse a rank that is not in the group."""
    if not 0 <= root < world_size:
        raise CommError(
            f"{kind}: rank {root} is not in a group of {world_size}",
            cure="ranks count inside the group, from 0",
            value=root,
        )


def check_members(kind: str, ranks: tuple[int, ...], world_size: int) -> None:
    """Refuse a sub-group that is empty, repeats a rank or names one outside."""
    for rank in ranks:
        check_root(kind, rank, world_size)
    if not ranks or len(set(ranks)) != len(ranks):
        raise CommError(f"{kind}: {list(ranks)} is not a group", cure="name each member once", value=ranks)


def check_equal_parts(out: Buffer, source: Buffer, world_size: int) -> None:
    """Refuse an all-to-all whose buffers differ or do not divide into a part for every rank."""
    check_collective("all_to_all", out, source, world_size=1, parts_of="out")
    part = out.view(0, out.numel // world_size)
    check_collective("all_to_all", out, part, world_size=world_size, parts_of="out")


def closed_error(call: Call) -> CommError:
    """The error of a call after `close`."""
    return CommError(f"{call} on a closed communicator", cure="close it after the last call")


def is_own_part(kind: str, whole: Buffer, part: Buffer, rank: int) -> bool:
    """Whether `part` is the view of `whole` at `rank * part.numel`: the collective then runs in place.

    Raises ShardingError when the two overlap in any other way, which no collective can mean.
    """
    if part.numel == 0:
        return False
    offset = part.data_ptr() - whole.data_ptr()
    if offset == rank * part.nbytes:
        return True
    if -part.nbytes < offset < whole.nbytes:
        raise ShardingError(
            f"{kind}: the two buffers overlap, but the part does not start at element {rank * part.numel} of the whole",
            cure="for an in-place call pass whole.view(rank * part.numel, part.numel), else separate memory",
            value=offset,
        )
    return False
