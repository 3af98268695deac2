"""`Collective`: one call of a communicator as a value."""

from __future__ import annotations

from enum import Enum

from polyaccel.comm.arguments import (
    MOST_SHOWN,
    Counts,
    StridedParts,
    bounds_of,
    check_dtypes,
    check_part,
    check_reduction,
    check_root,
    check_whole,
    is_own_part,
    shown_counts,
)
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, ShardingError


class Operation(str, Enum):
    """The kind of a collective. The value is its name in messages, records and logs."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BATCH = "batch"
    """Several messages at once: `Collective.parts`."""
    BARRIER = "barrier"
    # Never started: what the record shows of calls that are made of the others.
    OBJECTS = "all_gather_object"
    SHARED = "allocate_shared"
    SPLIT = "split"
    MEETING = "meeting"


MESSAGES = frozenset({Operation.SEND, Operation.RECV, Operation.BATCH})
"""Operations between some ranks of a group, in which the other ranks take no part."""
EQUAL_PARTS = frozenset(
    {
        *(Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.BROADCAST),
        *(Operation.ALL_TO_ALL, Operation.SEND, Operation.RECV, Operation.BARRIER),
    }
)
"""Operations that every backend must have, for equal parts."""
ALL_OPERATIONS = EQUAL_PARTS | {Operation.GATHER, Operation.SCATTER, Operation.BATCH}
UNEVEN_PARTS = frozenset(
    {Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.GATHER, Operation.SCATTER}
)
"""Operations whose parts may have different sizes."""
_ALL_REDUCE = Operation.ALL_REDUCE
_EVERYBODYS = frozenset({Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL})
_REDUCING = frozenset({Operation.ALL_REDUCE, Operation.REDUCE_SCATTER})
_ROOTED = frozenset({Operation.BROADCAST, Operation.GATHER, Operation.SCATTER})


class Collective:
    """One call of a communicator: operation, buffers, and the number that records and errors show.

    Ranks count inside the group. A collective is called once. The record keeps it, and releases its buffers when it has
    ended.

    Args:
        operation: Kind of the call.
        source: Buffer that this rank sends; None where it sends nothing. The same object as `target` for an all-reduce
            and a broadcast.
        target: Buffer that this rank receives; None where it receives nothing.
        numel: Elements of the whole buffer: `source` of a reduce-scatter and a scatter, `target` of an all-gather, an
            all-to-all and a gather.
        dtype: Element type of the whole buffer; None without buffers.
        reduction: How a reducing operation combines elements.
        root: Sender of a broadcast and a scatter, receiver of a gather, and the other rank of a message.
        async_op: False: the call has ended when it returns.
        label: Purpose of the call, for records and errors.
        bucket: Index of the bucket that the call is for.
        number: Sequence number in the group, from 0, set by `call`. The calls that a composed one is made of have the
            same number. A message has the number of the last collective before it.
        counts: Elements of each rank's part of the whole buffer, in rank order; None for equal parts. In an all-to-all,
            elements received from each rank.
        source_counts: Elements that an all-to-all sends to each rank.
        parts: Messages of a batch.
        members: Ranks of a split.
        pieces: Places of all-to-all parts that are not contiguous.
        max_send_numel: Upper bound of the elements that any rank of an all-to-all sends another; None where it is not
            known.
    """

    __slots__ = (
        "async_op",
        "bucket",
        "counts",
        "dtype",
        "label",
        "max_send_numel",
        "members",
        "number",
        "numel",
        "operation",
        "parts",
        "pieces",
        "reduction",
        "root",
        "source",
        "source_counts",
        "target",
    )

    # Positional, and no keyword in the hot calls: this runs for every collective.
    def __init__(
        self,
        operation: Operation,
        source: Buffer | None = None,
        target: Buffer | None = None,
        numel: int = 0,
        dtype: DType | None = None,
        reduction: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
        number: int | None = None,
        counts: Counts | None = None,
        source_counts: Counts | None = None,
        parts: tuple[Collective, ...] = (),
        members: tuple[int, ...] = (),
        pieces: StridedParts | None = None,
        max_send_numel: int | None = None,
    ) -> None:
        self.operation = operation
        self.source = source
        self.target = target
        self.numel = numel
        self.dtype = dtype
        self.reduction = reduction
        self.root = root
        self.async_op = async_op
        self.label = label
        self.bucket = bucket
        self.number = number
        self.counts = counts
        self.source_counts = source_counts
        self.parts = parts
        self.members = members
        self.pieces = pieces
        self.max_send_numel = max_send_numel

    def on(self, source: Buffer | None, target: Buffer | None) -> Collective:
        """Copy the call with other buffers.

        Args:
            source: Buffer to send, as long as the former one.
            target: Buffer to receive into, as long as the former one.

        Returns:
            A new collective with the same number.
        """
        return Collective(
            self.operation,
            source,
            target,
            self.numel,
            self.dtype,
            self.reduction,
            self.root,
            self.async_op,
            self.label,
            self.bucket,
            self.number,
            self.counts,
            self.source_counts,
            self.parts,
            self.members,
            self.pieces,
            self.max_send_numel,
        )

    def without_buffers(self) -> Collective:
        """Return a copy without buffers, for records that outlive them."""
        copy = self.on(None, None)
        copy.pieces = None
        if self.parts:
            copy.parts = tuple(part.without_buffers() for part in self.parts)
        return copy

    def let_go(self) -> None:
        """Release the buffers: the call has ended."""
        self.source = self.target = self.pieces = None
        for part in self.parts:
            part.let_go()

    @property
    def is_uneven(self) -> bool:
        """Whether the call gives the sizes of the ranks' parts."""
        return self.counts is not None

    def buffer_sent(self) -> Buffer:
        """Check that this rank sends, and return `source`.

        Returns:
            The buffer that this rank sends.

        Raises:
            CommError: This rank has nothing to send.
        """
        if self.source is None:
            raise CommError(f"{self}: this rank has nothing to send", hint="pass the buffer that it sends")
        return self.source

    def buffer_received(self) -> Buffer:
        """Check that this rank receives, and return `target`.

        Returns:
            The buffer that this rank receives into.

        Raises:
            CommError: This rank has nowhere to receive.
        """
        if self.target is None:
            raise CommError(f"{self}: this rank has nowhere to receive", hint="pass the buffer that it receives into")
        return self.target

    def sent_numel(self, rank: int, world_size: int) -> float:
        """Count the elements that this rank sends, by the algorithm that sends least.

        With a whole of M elements in equal parts over N ranks: 2 M (N-1)/N for an all-reduce, M (N-1)/N for a
        reduce-scatter, an all-gather and an all-to-all, M for a message and for the root of a broadcast.

        Args:
            rank: This rank.
            world_size: Ranks of the group.

        Returns:
            Elements; a fraction where the whole does not divide.
        """
        kind = self.operation
        if not self.numel:
            return 0
        if kind is _ALL_REDUCE:
            return 2 * _share(self.numel, world_size)
        if kind in _EVERYBODYS:
            if self.counts is None:
                return _share(self.numel, world_size)
            if kind is Operation.ALL_GATHER:
                return self.counts[rank] * (world_size - 1)
            sent = self.source_counts or self.counts
            return sum(sent) - sent[rank]
        if kind is Operation.BROADCAST:
            return self.numel if rank == self.root and world_size > 1 else 0
        if kind is Operation.SEND:
            return self.numel
        if kind is Operation.GATHER:
            return 0 if rank == self.root else self.length_of(rank, world_size)
        if kind is Operation.SCATTER:
            return self.numel - self.length_of(rank, world_size) if rank == self.root else 0
        return sum(part.sent_numel(rank, world_size) for part in self.parts)

    def length_of(self, rank: int, world_size: int) -> int:
        """Count the elements of a rank's part of the whole buffer.

        Args:
            rank: The rank.
            world_size: Ranks of the group.

        Returns:
            Elements.
        """
        return self.numel // world_size if self.counts is None else self.counts[rank]

    def bounds(self, world_size: int) -> list[int]:
        """Find where the ranks' parts begin in the whole buffer.

        Args:
            world_size: Ranks of the group.

        Returns:
            `world_size + 1` offsets in elements; the last one is the end.
        """
        return bounds_of(self.counts, self.numel, world_size)

    def source_bounds(self, world_size: int) -> list[int]:
        """Find where the parts begin that an all-to-all sends.

        Args:
            world_size: Ranks of the group.

        Returns:
            `world_size + 1` offsets in elements of `source`; the last one is the end.
        """
        return bounds_of(self.source_counts, self.numel, world_size)

    def agrees_with(self, other: Collective) -> bool:
        """Return whether two ranks can make these calls together. Labels do not matter.

        Args:
            other: Call of another rank.

        Returns:
            Whether their `agreed_key` is the same.
        """
        return self.agreed_key() == other.agreed_key()

    def agreed_key(self) -> tuple[object, ...]:
        """Return the properties that the ranks of a group, or the two of a message, must agree on."""
        kind = self.operation
        if kind in MESSAGES:
            return "message", self.numel, self.dtype and self.dtype.value
        if kind is Operation.ALL_TO_ALL and self.counts is not None:
            return kind.value, self.dtype and self.dtype.value, self.max_send_numel
        detail = self.reduction.value if kind in _REDUCING else self.root if kind in _ROOTED else self.members
        return kind.value, self.numel, self.dtype and self.dtype.value, detail, self.counts, self.bucket

    def agreed(self) -> str:
        """Return the properties that the ranks must agree on, in words."""
        kind, detail = self.operation, ""
        if kind in _REDUCING:
            detail = f" {self.reduction.value}"
        elif kind in _ROOTED or kind is Operation.RECV:
            detail = f" {'to' if kind is Operation.GATHER else 'from'} {self.root}"
        elif kind is Operation.SEND:
            detail = f" to {self.root}"
        elif kind is Operation.BATCH:
            detail = f" of {', '.join(part.agreed() for part in self.parts[:MOST_SHOWN])}"
        elif kind is Operation.SPLIT:
            detail = f" {list(self.members)}"
        if self.dtype is None:
            return kind.value + detail
        if kind is Operation.ALL_TO_ALL and self.counts is not None:
            most = "" if self.max_send_numel is None else f" of at most {self.max_send_numel}"
            return f"{kind.value} of uneven parts{most} x {self.dtype.value}"
        parts = f" in parts of {shown_counts(self.counts)}" if self.counts is not None else ""
        return f"{kind.value}{detail} {self.numel} x {self.dtype.value}{parts}"

    def purpose(self) -> str:
        """Return bucket and label in words that follow `agreed`; empty without them."""
        bucket = f" bucket {self.bucket}" if self.bucket is not None else ""
        return bucket + (f" '{self.label}'" if self.label else "")

    def described(self) -> str:
        """Return the call in words, without its number."""
        return self.agreed() + self.purpose()

    def __str__(self) -> str:
        is_numbered = self.number is not None and self.number >= 0
        return f"#{self.number} {self.described()}" if is_numbered else self.described()

    def check(self, rank: int, world_size: int) -> None:
        """Refuse sizes, types, roots and overlaps that are invalid for every backend, before anything is sent.

        Args:
            rank: This rank.
            world_size: Ranks of the group.

        Raises:
            ShardingError: Buffers do not fit or overlap.
            CommError: A rank is outside the group, or a buffer is missing.
        """
        kind, source, target = self.operation, self.source, self.target
        if kind in _REDUCING and self.dtype is not None:
            check_reduction(kind.value, self.dtype, self.reduction)
        if kind in _ROOTED or kind in MESSAGES:
            _check_peers(self, rank, world_size)
        if kind not in UNEVEN_PARTS:
            return
        if kind is Operation.ALL_TO_ALL:
            source, target = self.buffer_sent(), self.buffer_received()
            check_dtypes(kind.value, source, target)
            check_whole(kind.value, target, self.counts, world_size)
            check_whole(kind.value, source, self.source_counts, world_size)
            if (self.counts is None) != (self.source_counts is None):
                raise ShardingError(f"{kind.value}: counts of one buffer only", hint="give counts of both, or of none")
            if self.counts is None and source.numel != target.numel:
                raise ShardingError(
                    f"{kind.value}: {source.numel} elements in, {target.numel} out",
                    hint="give counts where the parts are uneven",
                    value=(source.numel, target.numel),
                )
            if self.pieces is not None:
                self.pieces.check(self.counts, world_size)
            return
        cuts_source = kind is Operation.REDUCE_SCATTER or kind is Operation.SCATTER
        whole, part = (source, target) if cuts_source else (target, source)
        if part is None:
            raise CommError(f"{self}: this rank's part is missing", hint="pass the buffer of this rank's part")
        if whole is None:
            if kind in _ROOTED and rank != self.root:
                return
            raise CommError(f"{self}: the whole buffer is missing", hint="pass the buffer of all parts")
        check_part(kind.value, whole, part, self.counts, rank, world_size)
        is_own_part(kind.value, whole, part, self.bounds(world_size)[rank])


def ended(work: Work, collective: Collective) -> Work:
    """Wait for a work unless its call is asynchronous.

    Args:
        work: Work of the call.
        collective: The call.

    Returns:
        `work`.
    """
    if not collective.async_op:
        work.wait()
    return work


def closed_error(collective: Collective) -> CommError:
    """Make the error of a call after `close`.

    Args:
        collective: The call.

    Returns:
        The error, which the caller raises.
    """
    return CommError(f"{collective.described()} on a closed communicator", hint="close it after the last call")


def _check_peers(collective: Collective, rank: int, world_size: int) -> None:
    kind = collective.operation
    for message in collective.parts if kind is Operation.BATCH else (collective,):
        check_root(message.operation.value, message.root, world_size)
        if kind in MESSAGES and message.root == rank:
            raise CommError(f"rank {rank}: a message to itself", hint="copy the buffer instead", value=rank)


def _share(numel: int, world_size: int) -> float:
    """Elements that leave a rank when everybody's parts of `numel` elements go round: exact where it divides."""
    part, rest = divmod(numel, world_size)
    return numel * (world_size - 1) / world_size if rest else part * (world_size - 1)
