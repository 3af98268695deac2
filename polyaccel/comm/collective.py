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
"""Operations between some ranks of a group, of which the other ranks know nothing."""
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
"""Operations whose parts may have sizes of their own."""
_ALL_REDUCE = Operation.ALL_REDUCE
_EVERYBODYS = frozenset({Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL})
_REDUCING = frozenset({Operation.ALL_REDUCE, Operation.REDUCE_SCATTER})
_ROOTED = frozenset({Operation.BROADCAST, Operation.GATHER, Operation.SCATTER})


class Collective:
    """One call: what it does, with which buffers, and the number that the record and every error speak of.

    `source` is what this rank sends and `target` what it receives; one buffer may be both (all-reduce, broadcast), and
    None stands where a rank sends or receives nothing. `numel` and `dtype` are those of the buffer that is whole: the
    source of a reduce-scatter and of a scatter, the target of an all-gather, of an all-to-all and of a gather.
    `root` is the rank from which a broadcast and a scatter come and to which a gather goes; of a message, the rank at
    its other end. Ranks count inside the group. `counts` are the elements of each rank's part of the whole buffer, in
    rank order (None: equal parts); in an all-to-all those that arrive from each rank, and `source_counts` those that
    go to each, `pieces` say where a part stands that is not in one piece, and no rank sends another one more than
    `max_send_numel`, if that is known. `parts` are the messages of a batch; `members` the ranks of a split.

    `label` and `bucket` say what the call is for. With `async_op` False the call has ended when it returns. `number`
    counts the collectives of the group from 0; it is set when the collective is called, and whatever that call is made
    of has the same number. A message has the number of the last collective before it. A collective is called once: the
    record keeps it, and lets go of its buffers when it has ended.
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
        """The same call on other buffers of the same sizes."""
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
        """A copy without buffers, for records that outlive them."""
        copy = self.on(None, None)
        copy.pieces = None
        if self.parts:
            copy.parts = tuple(part.without_buffers() for part in self.parts)
        return copy

    def let_go(self) -> None:
        """Forget the buffers: the call has ended."""
        self.source = self.target = self.pieces = None
        for part in self.parts:
            part.let_go()

    @property
    def is_uneven(self) -> bool:
        """Whether the ranks' parts have sizes of their own."""
        return self.counts is not None

    def buffer_sent(self) -> Buffer:
        """`source`, of a rank that sends."""
        if self.source is None:
            raise CommError(f"{self}: this rank has nothing to send", hint="pass the buffer that it sends")
        return self.source

    def buffer_received(self) -> Buffer:
        """`target`, of a rank that receives."""
        if self.target is None:
            raise CommError(f"{self}: this rank has nowhere to receive", hint="pass the buffer that it receives into")
        return self.target

    def sent_numel(self, rank: int, world_size: int) -> float:
        """The elements that this rank sends, by the algorithm that sends least.

        Of a whole of M elements over N ranks in equal parts: 2 M (N-1)/N for an all-reduce, M (N-1)/N for a
        reduce-scatter, an all-gather and an all-to-all, M for a message and for the root of a broadcast.
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
        """The elements of `rank`'s part of the whole buffer."""
        return self.numel // world_size if self.counts is None else self.counts[rank]

    def bounds(self, world_size: int) -> list[int]:
        """Where the ranks' parts begin in the whole buffer, and where the last one ends."""
        return bounds_of(self.counts, self.numel, world_size)

    def source_bounds(self, world_size: int) -> list[int]:
        """The same for what an all-to-all sends."""
        return bounds_of(self.source_counts, self.numel, world_size)

    def agrees_with(self, other: Collective) -> bool:
        """Whether two ranks may meet with these calls: alike, and of the same bucket; labels do not matter."""
        return self.agreed_key() == other.agreed_key()

    def agreed_key(self) -> tuple[object, ...]:
        """The properties that the ranks of a group, or the two of a message, must agree on."""
        kind = self.operation
        if kind in MESSAGES:
            return "message", self.numel, self.dtype and self.dtype.value
        if kind is Operation.ALL_TO_ALL and self.counts is not None:
            return kind.value, self.dtype and self.dtype.value, self.max_send_numel
        detail = self.reduction.value if kind in _REDUCING else self.root if kind in _ROOTED else self.members
        return kind.value, self.numel, self.dtype and self.dtype.value, detail, self.counts, self.bucket

    def agreed(self) -> str:
        """The properties that the ranks must agree on, in words."""
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
        """The call's bucket and label, in words that follow `agreed`; empty without them."""
        bucket = f" bucket {self.bucket}" if self.bucket is not None else ""
        return bucket + (f" '{self.label}'" if self.label else "")

    def described(self) -> str:
        """The call in words, without its number."""
        return self.agreed() + self.purpose()

    def __str__(self) -> str:
        is_numbered = self.number is not None and self.number >= 0
        return f"#{self.number} {self.described()}" if is_numbered else self.described()

    def check(self, rank: int, world_size: int) -> None:
        """Refuse sizes, types, roots and overlaps that no backend can mean, before anything is sent.

        Raises ShardingError for buffers that do not fit, CommError for a rank outside the group.
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
    """`work`, waited for unless `collective` is asynchronous."""
    if not collective.async_op:
        work.wait()
    return work


def closed_error(collective: Collective) -> CommError:
    """The error of a call after `close`."""
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
