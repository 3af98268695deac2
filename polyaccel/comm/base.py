"""The contract of a comm plugin: `CommBackend` connects ranks, `Communicator` moves buffers between them, `Work` is a
collective under way.

A communicator belongs to one group of ranks and is used by one thread at a time. Every rank of the group calls the same
collectives in the same order. Buffers are flat and contiguous; sizes are in elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.arguments import StridedParts, check_members
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.objects import ObjectCollectives
from polyaccel.comm.shared_memory import SharedMemory
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.deadline import Deadline
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError
from polyaccel.job.host_topology import HostTopology

API_VERSION = (3, 0)
DEFAULT_TIMEOUT_S = 600.0
# Looking a member of an enumeration up in its class takes longer than a name of the module.
_SUM = ReduceOp.SUM
_ALL_REDUCE, _REDUCE_SCATTER = Operation.ALL_REDUCE, Operation.REDUCE_SCATTER
_ALL_GATHER, _BROADCAST, _ALL_TO_ALL = Operation.ALL_GATHER, Operation.BROADCAST, Operation.ALL_TO_ALL
_GATHER, _SCATTER, _BARRIER = Operation.GATHER, Operation.SCATTER, Operation.BARRIER
_SEND, _RECV, _BATCH = Operation.SEND, Operation.RECV, Operation.BATCH


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This process's rank and the place where the ranks meet. Found by `comm.discovery`.

    `source` says what it was read from, for messages. `address` is None at world size 1, where nobody needs to meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None
    source: str
    init_method: str | None = None
    """A torch-style URL (`file:///...`, `tcp://...`) that replaces address and port."""
    began_s: float | None = field(default=None, compare=False)
    """When this process began to look for the others, by time.monotonic: their time limit counts from then, and where
    this is None, from when they connect."""

    def deadline(self, timeout_s: float) -> Deadline:
        """The end of the time in which the ranks must have met."""
        return Deadline(timeout_s, self.began_s)


class StatusStore(ABC):
    """Key-value store for rank status, readable while a collective hangs."""

    @abstractmethod
    def set(self, rank: int, text: str) -> None:
        """Replace what `rank` says of itself. Never blocks longer than a second; raises nothing."""

    @abstractmethod
    def read(self, world_size: int) -> Mapping[int, str]:
        """The last note of each rank; ranks that left none, or cannot be read, are absent."""


class Communicator(ObjectCollectives):
    """One group of ranks. `rank` and `world_size` count inside the group; `ranks[i]` is the global rank of member i.

    A backend provides `start`, `split` and `close`. Everything else is made of these. Whatever it is made of:

    - Sums of float16 and bfloat16 are made in float32 and rounded once, so that what is reduced in pieces, and at any
      stage, has the same bits. `polyaccel.comm.collectives.reduction` does so.
    - The buffers of a call do not overlap, but where it says "in place": then the part is exactly the view of the whole
      at this rank's place. `Collective.check` refuses everything else.
    - Invalid arguments raise ShardingError before any communication. Ranks that do not come in time raise CommTimeout
      with `missing_ranks`. All other failures, such as a rank that has ended or a closed group, raise CommError and
      never an exception of the library below.
    """

    ranks: tuple[int, ...]
    timeout_s: float
    deterministic: bool = False
    """The order in which a reduction adds depends on nothing but the ranks: not on sizes, offsets or timing."""
    summed_first: tuple[tuple[int, ...], ...] = ()
    """Of a deterministic reduction: the ranks that are added first, in order, and whose sums, rounded to the element
    type, are then added in order; empty where all ranks are added one after another."""
    sent_numel: int = 0
    """Elements that this rank has sent to others so far (`Collective.sent_numel`); 0 where nobody counts."""
    _host_topology: HostTopology | None = None

    @property
    def host_topology(self) -> HostTopology:
        """Which ranks of the job share a host. `init_distributed` sets it, and wrappers and recorded groups keep it;
        elsewhere the group's ranks are assumed to be the job's, on one host whose id is not known."""
        return self._host_topology or HostTopology.one_host(self.ranks[self.rank], self.ranks)

    @host_topology.setter
    def host_topology(self, found: HostTopology) -> None:
        self._host_topology = found

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of those `ranks` of this group, in that order; None on ranks outside. All ranks call it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Waits for nobody; calling it twice is allowed."""

    # The calls, by name. With async_op=False the returned work is done. `label` and `bucket` say what a call is for.

    def all_reduce(
        self,
        buffer: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
    ) -> Work:
        """Combine `buffer` over all ranks, in place."""
        return self.call(
            Collective(_ALL_REDUCE, buffer, buffer, buffer.numel, buffer.dtype, op, 0, async_op, label, bucket)
        )

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
    ) -> Work:
        """Combine `source` over all ranks and keep this rank's part: `out.numel * world_size == source.numel`, or part
        r of `source` has `counts[r]` elements.

        `out` may be the view of `source` at this rank's part (in place); the rest of `source` is then undefined.
        """
        collective = Collective(
            _REDUCE_SCATTER, source, out, source.numel, source.dtype, op, 0, async_op, label, bucket
        )
        if counts is not None:
            collective.counts = tuple(counts)
        return self.call(collective)

    def all_gather(
        self,
        out: Buffer,
        source: Buffer,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
    ) -> Work:
        """Put every rank's `source` side by side into `out`: `source.numel * world_size == out.numel`, or rank r brings
        `counts[r]` elements.

        `source` may be the view of `out` at this rank's part (in place).
        """
        collective = Collective(_ALL_GATHER, source, out, out.numel, out.dtype, _SUM, 0, async_op, label, bucket)
        if counts is not None:
            collective.counts = tuple(counts)
        return self.call(collective)

    def broadcast(
        self, buffer: Buffer, root: int, *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Overwrite `buffer` with rank `root`'s (a rank of this group)."""
        return self.call(
            Collective(_BROADCAST, buffer, buffer, buffer.numel, buffer.dtype, _SUM, root, async_op, label, bucket)
        )

    def all_to_all(
        self,
        out: Buffer,
        source: Buffer,
        *,
        counts: Sequence[int] | None = None,
        source_counts: Sequence[int] | None = None,
        pieces: StridedParts | None = None,
        max_send_numel: int | None = None,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
    ) -> Work:
        """Part j of `source` goes to rank j, part i of `out` comes from rank i. Not in place.

        Equal parts, or `source_counts[j]` elements go to rank j and `counts[i]` come from rank i; what a rank sends
        another must be what that one expects. Where the communicator `supports_strided`, parts may stand in pieces on
        one side, on all ranks alike. Of uneven parts, who knows that no rank sends another one more than
        `max_send_numel` may say so, on all ranks alike: where the communicator `coalesces_small_sends`, short parts
        then travel together.
        """
        collective = Collective(_ALL_TO_ALL, source, out, out.numel, out.dtype, _SUM, 0, async_op, label, bucket)
        if counts is not None or source_counts is not None:
            collective.counts = tuple(counts) if counts is not None else None
            collective.source_counts = tuple(source_counts) if source_counts is not None else None
            collective.pieces, collective.max_send_numel = pieces, max_send_numel
        return self.call(collective)

    def gather(
        self,
        out: Buffer | None,
        source: Buffer,
        root: int,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
    ) -> Work:
        """Put every rank's `source` side by side into `out` on rank `root`; None elsewhere. All ranks give the same
        `counts`, or bring equally many elements. On the root `source` may be the view of `out` at its part."""
        numel = source.numel * self.world_size if counts is None else sum(counts)
        to = out if self.rank == root else None
        found = None if counts is None else tuple(counts)
        return self.call(
            Collective(_GATHER, source, to, numel, source.dtype, _SUM, root, async_op, label, bucket, counts=found)
        )

    def scatter(
        self,
        out: Buffer,
        source: Buffer | None,
        root: int,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        label: str = "",
        bucket: int | None = None,
    ) -> Work:
        """Put part r of rank `root`'s `source` into rank r's `out`; None elsewhere. All ranks give the same `counts`,
        or get equally many elements. On the root `out` may be the view of `source` at its part."""
        numel = out.numel * self.world_size if counts is None else sum(counts)
        whole = source if self.rank == root else None
        found = None if counts is None else tuple(counts)
        return self.call(
            Collective(_SCATTER, whole, out, numel, out.dtype, _SUM, root, async_op, label, bucket, counts=found)
        )

    def send(
        self, buffer: Buffer, to: int, *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Send `buffer` to rank `to`, which receives it. Messages from one rank to another keep their order."""
        return self.call(Collective(_SEND, buffer, None, buffer.numel, buffer.dtype, _SUM, to, async_op, label, bucket))

    def recv(
        self, buffer: Buffer, source: int, *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Fill `buffer` with what rank `source` sends."""
        return self.call(
            Collective(_RECV, None, buffer, buffer.numel, buffer.dtype, _SUM, source, async_op, label, bucket)
        )

    def batch(
        self, messages: Sequence[Collective], *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Sends and receives (`message_to`, `message_from`) that are all under way at once, so that no order of them
        can make ranks wait for each other in a circle."""
        numel = sum(message.numel for message in messages)
        dtype = messages[0].dtype if messages else None
        return self.call(
            Collective(_BATCH, None, None, numel, dtype, _SUM, 0, async_op, label, bucket, parts=tuple(messages))
        )

    def barrier(self, *, label: str = "", bucket: int | None = None) -> None:
        """Return once all ranks have called it."""
        self.call(Collective(_BARRIER, None, None, 0, None, _SUM, 0, False, label, bucket)).wait()

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Zeroed memory that this communicator moves best (registered, pinned, shared: its own business)."""
        return self.accelerator.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: DType) -> SharedMemory | None:
        """One zeroed memory that every rank of the group maps, or None where there is no such thing.

        Collective: all ranks ask for the same sizes in the same order and get the same answer. What a rank writes to
        its `whole` the others see after the next collective. An in-place `all_gather` of that moves nothing: every part
        stands where it belongs, and the call is the moment from which all ranks may read it.
        """
        return None

    def agreed_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """`ranks` of a split, on which all ranks agree. Collective. Raises CommError on every rank where they do
        not."""
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        named = self.all_gather_object(members)
        if set(named) != {members}:
            raise CommError(
                f"split: ranks name different groups: {[list(one) for one in named]}",
                hint="every rank of the group must call split with the same ranks",
                value=members,
            )
        return members

    def board(self) -> StatusStore | None:
        """Where ranks can leave notes while a collective hangs; None if the backend has no such place."""
        return None

    def _gather_frames(self, data: bytes, nbytes: int) -> list[bytes]:
        """Every rank's `data`, each padded to `nbytes`."""
        whole: Buffer = self.allocate(nbytes * self.world_size, DType.UINT8)
        own = whole.view(nbytes * self.rank, nbytes)
        own.from_bytes(data.ljust(nbytes, b"\0"))
        self.all_gather(whole, own, label="objects")
        gathered = whole.to_bytes()
        return [gathered[start : start + nbytes] for start in range(0, len(gathered), nbytes)]


def message_to(buffer: Buffer, rank: int) -> Collective:
    """`buffer` on its way to `rank`, for `Communicator.batch`."""
    return Collective(_SEND, buffer, None, buffer.numel, buffer.dtype, _SUM, rank, True)


def message_from(buffer: Buffer, rank: int) -> Collective:
    """A message from `rank` into `buffer`, for `Communicator.batch`."""
    return Collective(_RECV, None, buffer, buffer.numel, buffer.dtype, _SUM, rank, True)


class CommBackend(ABC):
    """A way to connect ranks, such as gloo, nccl or MPI. The entry point names a class of this kind."""

    API_VERSION: ClassVar[tuple[int, int]] = API_VERSION
    name: ClassVar[str]
    most_ranks: ClassVar[int | None] = None
    """The most ranks that a group may have; None where nothing limits them."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether the backend could be used here. Initialises nothing and connects to nobody."""

    @abstractmethod
    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        """Join the group of all ranks. Raises CommTimeout when they do not come, CommError when they cannot."""

    def connect_within(self, group: Communicator, board: StatusStore | None) -> Communicator:
        """A communicator of this backend over the ranks of `group`, which are on one host and meet through it.
        Collective. `board` is where they already leave notes. Raises CommError where the backend cannot."""
        raise unusable_error(self.name, f"it does not join ranks that are already joined by {group.backend}")

    @classmethod
    def named(cls, name: str) -> type[CommBackend] | None:
        """The backend of another name that this plugin can stand for, such as one that a package registers with torch;
        None if it knows none."""
        return None


def unusable_error(backend: str, reason: str) -> CommError:
    """The error of a comm backend that was asked for and cannot be used here."""
    return CommError(
        f"comm backend {backend!r} cannot be used: {reason}",
        hint="choose another one: POLYACCEL_COMM or init_distributed(dist_backend=...)",
        value=backend,
    )
