"""The contract of a comm plugin. Read first: `CommBackend`, which connects ranks, and `Communicator`.

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

API_VERSION = (3, 1)
DEFAULT_TIMEOUT_S = 600.0
# Looking a member of an enumeration up in its class takes longer than a name of the module.
_SUM = ReduceOp.SUM
_ALL_REDUCE, _REDUCE_SCATTER = Operation.ALL_REDUCE, Operation.REDUCE_SCATTER
_ALL_GATHER, _BROADCAST, _ALL_TO_ALL = Operation.ALL_GATHER, Operation.BROADCAST, Operation.ALL_TO_ALL
_GATHER, _SCATTER, _BARRIER = Operation.GATHER, Operation.SCATTER, Operation.BARRIER
_SEND, _RECV, _BATCH = Operation.SEND, Operation.RECV, Operation.BATCH


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This process's rank and the place where the ranks join. Found by `comm.discovery`.

    Attributes:
        rank: Rank in the job, from 0.
        world_size: Ranks of the job.
        local_rank: Rank among those of this host, from 0.
        local_world_size: Ranks of this host.
        address: Host where the ranks join; None at world size 1, or with `init_method`.
        port: TCP port there; None where `address` is.
        source: Where the values were read, for messages.
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
    """Start of the rendezvous by time.monotonic, from which its time limit counts; None: it counts from `connect`."""

    def deadline(self, timeout_s: float) -> Deadline:
        """Return the end of the time in which all ranks must have joined.

        Args:
            timeout_s: Time limit in seconds, counted from `began_s`, or from now where that is None.

        Returns:
            The deadline.
        """
        return Deadline(timeout_s, self.began_s)


class StatusStore(ABC):
    """Key-value store for rank status, readable while a collective hangs."""

    @abstractmethod
    def set(self, rank: int, text: str) -> None:
        """Replace the note of a rank. Blocks a second at most and raises nothing.

        Args:
            rank: Rank that the note is about.
            text: The note. Some stores have room for a short one only.
        """

    @abstractmethod
    def read(self, world_size: int) -> Mapping[int, str]:
        """Read the last note of each rank.

        Args:
            world_size: Ranks to read, from 0.

        Returns:
            Notes by rank. Ranks without a note, or whose note cannot be read, are absent.
        """


class Communicator(ObjectCollectives):
    """One group of ranks. `rank` and `world_size` count inside the group; `ranks[i]` is the global rank of member i.

    A backend provides `start`, `split` and `close`. Everything else is composed of these. Every implementation obeys
    these rules:

    - Sums of float16 and bfloat16 are computed in float32 and rounded once, so that a reduction in pieces, and at any
      stage, has the same bits. `polyaccel.comm.collectives.reduction` does so.
    - The buffers of a call do not overlap, except where it says "in place": then the part is exactly the view of the
      whole at this rank's place. `Collective.check` refuses everything else.
    - Invalid arguments raise ShardingError before any communication. Ranks that do not come in time raise CommTimeout
      with `missing_ranks`. All other failures, such as a rank that has ended or a closed group, raise CommError and
      never an exception of the library below.
    """

    ranks: tuple[int, ...]
    timeout_s: float
    deterministic: bool = False
    """The order in which a reduction adds depends only on the ranks: not on sizes, offsets or timing."""
    summed_first: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that a deterministic reduction adds first, in order. Their sums, rounded to the element type, are
    then added in order. Empty: all ranks are added one after another."""
    sent_numel: int = 0
    """Elements that this rank has sent to others so far (`Collective.sent_numel`); 0 where they are not counted."""
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
        """Make a communicator of some ranks of this group. Collective: all ranks of this group call it.

        Args:
            ranks: Members by their rank in this group, in the order of their new ranks. Equal on all ranks.

        Returns:
            The communicator; None on ranks outside.

        Raises:
            CommError: The ranks are not a group, or differ between ranks.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Waits for no rank. Calling it twice is allowed."""

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
        """Combine a buffer over all ranks, in place.

        Args:
            buffer: Elements of this rank, overwritten with the result. Equal `numel` and `dtype` on all ranks.
            op: How elements are combined. AVG is for floating-point types.
            async_op: False: the returned work is done. True: the call may return while it is under way, and the work
                owns the buffers until `wait`.
            label: Purpose of the call, for records and errors, such as "grads".
            bucket: Index of the bucket that the call is for. Ranks must agree on it.

        Returns:
            The work. Buffers may be read and written again after its `wait`.

        Raises:
            ShardingError: Invalid arguments, before any communication.
            CommTimeout: Ranks did not come within `timeout_s`; `missing_ranks` names them. `wait` raises it too.
            CommError: Every other failure, such as a rank that has ended. `wait` raises it too.
        """
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
        """Combine a buffer over all ranks and keep this rank's part.

        Args:
            out: This rank's part of the result. It may be the view of `source` at this rank's part (in place); the rest
                of `source` is then undefined.
            source: The whole buffer, in rank order: `out.numel * world_size` elements, or `sum(counts)`.
            op: How elements are combined. AVG is for floating-point types.
            counts: Elements of each rank's part, in rank order; None for equal parts.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
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
        """Concatenate every rank's buffer in rank order, on all ranks.

        Args:
            out: The whole buffer: `source.numel * world_size` elements, or `sum(counts)`.
            source: This rank's part. It may be the view of `out` at this rank's part (in place).
            counts: Elements of each rank's part, in rank order; None for equal parts.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
        """
        collective = Collective(_ALL_GATHER, source, out, out.numel, out.dtype, _SUM, 0, async_op, label, bucket)
        if counts is not None:
            collective.counts = tuple(counts)
        return self.call(collective)

    def broadcast(
        self, buffer: Buffer, root: int, *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Overwrite a buffer on all ranks with that of one.

        Args:
            buffer: Elements to send on `root`, to overwrite elsewhere.
            root: Rank of this group that sends.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
        """
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
        """Send part j of `source` to rank j and receive part i of `out` from rank i. Not in place.

        Args:
            out: Received parts, in rank order.
            source: Parts to send, in rank order.
            counts: Elements from each rank; None for equal parts. Given together with `source_counts`.
            source_counts: Elements to each rank. They equal what the receiver expects in its `counts`.
            pieces: Places of parts that are not contiguous in one of the buffers, the same one on all ranks. Needs
                `supports_strided`.
            max_send_numel: Upper bound of the elements that any rank sends another, equal on all ranks; None where it
                is not known. Short parts are coalesced by it where the communicator `coalesces_small_sends`.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
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
        """Concatenate every rank's buffer in rank order, on one rank.

        Args:
            out: The whole buffer on `root`; ignored elsewhere, where it may be None.
            source: This rank's part. On `root` it may be the view of `out` at its part.
            root: Rank of this group that receives.
            counts: Elements of each rank's part, in rank order, equal on all ranks; None for equal parts.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
        """
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
        """Send each rank its part of one rank's buffer.

        Args:
            out: This rank's part. On `root` it may be the view of `source` at its part.
            source: The whole buffer on `root`, in rank order; ignored elsewhere, where it may be None.
            root: Rank of this group that sends.
            counts: Elements of each rank's part, in rank order, equal on all ranks; None for equal parts.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
        """
        numel = out.numel * self.world_size if counts is None else sum(counts)
        whole = source if self.rank == root else None
        found = None if counts is None else tuple(counts)
        return self.call(
            Collective(_SCATTER, whole, out, numel, out.dtype, _SUM, root, async_op, label, bucket, counts=found)
        )

    def send(
        self, buffer: Buffer, to: int, *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Send a buffer to one rank. Messages from one rank to another keep their order.

        Args:
            buffer: Elements to send.
            to: Rank of this group that receives, with a `recv` of equal length and type.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
        """
        return self.call(Collective(_SEND, buffer, None, buffer.numel, buffer.dtype, _SUM, to, async_op, label, bucket))

    def recv(
        self, buffer: Buffer, source: int, *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Fill a buffer with the next message of one rank.

        Args:
            buffer: Overwritten. It has the length and type of the message.
            source: Rank of this group that sends.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            The work. See `all_reduce`, also for errors.
        """
        return self.call(
            Collective(_RECV, None, buffer, buffer.numel, buffer.dtype, _SUM, source, async_op, label, bucket)
        )

    def batch(
        self, messages: Sequence[Collective], *, async_op: bool = False, label: str = "", bucket: int | None = None
    ) -> Work:
        """Start sends and receives all at once, so that no order of them can deadlock ranks.

        Args:
            messages: Values of `message_to` and `message_from`, each used once.
            async_op: See `all_reduce`.
            label: See `all_reduce`.
            bucket: See `all_reduce`.

        Returns:
            One work of all messages. See `all_reduce`, also for errors.
        """
        numel = sum(message.numel for message in messages)
        dtype = messages[0].dtype if messages else None
        return self.call(
            Collective(_BATCH, None, None, numel, dtype, _SUM, 0, async_op, label, bucket, parts=tuple(messages))
        )

    def barrier(self, *, label: str = "", bucket: int | None = None) -> None:
        """Block until all ranks have called it.

        Args:
            label: See `all_reduce`.
            bucket: See `all_reduce`.
        """
        self.call(Collective(_BARRIER, None, None, 0, None, _SUM, 0, False, label, bucket)).wait()

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        """Allocate zero-filled memory that this communicator sends fastest, such as registered or pinned memory.

        Args:
            numel: Elements of the buffer.
            dtype: Element type.

        Returns:
            A buffer on the accelerator's device, which the caller owns.
        """
        return self.accelerator.allocate(numel, dtype)

    def allocate_shared(self, numel: int, dtype: DType) -> SharedMemory | None:
        """Allocate one zero-filled memory that every rank of the group maps. Collective: equal arguments in equal
        order.

        What a rank writes to its `whole` is visible to the others after the next collective. An in-place `all_gather`
        of `whole` moves nothing: every part is already in its place, and all ranks may read it after the call.

        Args:
            numel: Elements of the whole memory.
            dtype: Element type.

        Returns:
            The shared memory; None, on all ranks, where it is not supported.
        """
        return None

    def new_host_group(self) -> Communicator | None:
        """Make a communicator of the same ranks for host memory, whose calls do not wait for the device. Collective.

        Ranks agree there on what they know without the device, while streams carry out the calls of this group.

        Returns:
            The communicator, which the caller closes. None, on all ranks, where there is none, or where the calls of
            this group run on the host themselves.
        """
        return None

    def agreed_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Check that all ranks pass the same members to a split. Collective.

        Args:
            ranks: Members by their rank in this group.

        Returns:
            `ranks` as a tuple.

        Raises:
            CommError: The ranks are not a group, or differ between ranks. In the latter case every rank raises it.
        """
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
        """Return the store for notes of ranks that hang in a collective; None where the backend has none."""
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
    """Describe a send, for `Communicator.batch`.

    Args:
        buffer: Elements to send.
        rank: Rank of the group that receives.

    Returns:
        The message.
    """
    return Collective(_SEND, buffer, None, buffer.numel, buffer.dtype, _SUM, rank, True)


def message_from(buffer: Buffer, rank: int) -> Collective:
    """Describe a receive, for `Communicator.batch`.

    Args:
        buffer: Overwritten with the message.
        rank: Rank of the group that sends.

    Returns:
        The message.
    """
    return Collective(_RECV, None, buffer, buffer.numel, buffer.dtype, _SUM, rank, True)


class CommBackend(ABC):
    """A way to connect ranks, such as gloo, nccl or MPI. The entry point names a class of this kind."""

    API_VERSION: ClassVar[tuple[int, int]] = API_VERSION
    name: ClassVar[str]
    most_ranks: ClassVar[int | None] = None
    """Maximum number of ranks of a group; None for no limit."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether the backend could be used here. Initialises nothing and connects to nothing."""

    @abstractmethod
    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        """Join the group of all ranks. Collective; blocks until all have joined.

        Args:
            rendezvous: This process's rank and the place where the ranks join.
            accelerator: Device of the buffers that will be sent: its current device is the rank's.
            timeout_s: Time limit of the joining and of each later collective, in seconds.

        Returns:
            The communicator of all ranks, in rank order.

        Raises:
            CommTimeout: Ranks did not come in time; `missing_ranks` names them.
            CommError: The backend cannot be used, or a rank has ended.
        """

    def connect_within(self, group: Communicator, board: StatusStore | None) -> Communicator:
        """Make a communicator of this backend over ranks of one host that are already joined. Collective.

        Args:
            group: Their communicator, through which they exchange addresses.
            board: Store where they already leave notes; None without one.

        Returns:
            A communicator over the ranks of `group`, in their order.

        Raises:
            CommError: The backend does not support it. The default raises it always.
        """
        raise unusable_error(self.name, f"it does not join ranks that are already joined by {group.backend}")

    def connect_apart(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        """Join a group next to the job's own, whose members may come from several jobs. Collective; blocks.

        Args:
            rendezvous: This process's rank in that group and the place where its members meet.
            accelerator: Device of the buffers that will be sent.
            timeout_s: Time limit of the joining and of each later collective, in seconds.

        Returns:
            The communicator of its members. It need not support `split`.

        Raises:
            CommTimeout: Members did not come in time.
            CommError: The backend does not support it; the default raises it always. Or a member has ended.
        """
        raise unusable_error(self.name, "it does not join processes of several jobs")

    @classmethod
    def named(cls, name: str) -> type[CommBackend] | None:
        """Return a backend of another name that this plugin can stand for, such as one that a package registers with
        torch.

        Args:
            name: Name that the user asked for, without a plugin of that name.

        Returns:
            A class with that `name`; None where the plugin does not support it.
        """
        return None


def unusable_error(backend: str, reason: str) -> CommError:
    """Make the error of a comm backend that was asked for and cannot be used here.

    Args:
        backend: Name of the backend.
        reason: Why, as a clause.

    Returns:
        The error, which the caller raises.
    """
    return CommError(
        f"comm backend {backend!r} cannot be used: {reason}",
        hint="choose another one: POLYACCEL_COMM or init_distributed(dist_backend=...)",
        value=backend,
    )
