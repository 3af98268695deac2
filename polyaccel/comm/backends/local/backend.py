"""Ranks as threads of one process, and the backend of world size 1.

`LocalWorld` is strict rather than fast: it is where the logic of everything above is tested.

[Note: Local collective semantics]
An asynchronous call returns before the others arrive, and its result appears in `wait()` and not earlier. Until then
the work owns its buffers: whatever it will overwrite is filled with NaN, and writing to an input before `wait()` is a
CommError there. What an in-place reduce-scatter leaves undefined is NaN afterwards. Calls that do not agree are errors
on every rank, and a rank that fails takes the others out of whatever they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from zlib import crc32

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.arguments import check_members, is_own_part, pieces_of
from polyaccel.comm.backends.local.thread_group import ThreadCollective, ThreadGroup, TracedCall, WorldState
from polyaccel.comm.base import DEFAULT_TIMEOUT_S, CommBackend, Communicator, Rendezvous, StatusStore
from polyaccel.comm.collective import ALL_OPERATIONS, UNEVEN_PARTS, Collective, Operation, closed_error, ended
from polyaccel.comm.collectives.reduction import reduce_parts
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import CommError


class LocalBackend(CommBackend):
    """World size 1, without connections. Ranks as threads are made with `LocalWorld` instead."""

    name: ClassVar[str] = "local"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "one process, no network", priority=0)

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        if rendezvous.world_size != 1:
            raise CommError(
                f"comm backend 'local' joins one process, not {rendezvous.world_size} (from {rendezvous.source})",
                hint="choose another backend (such as gloo), or start one process",
                value=rendezvous.world_size,
            )
        return SingleCommunicator(accelerator, timeout_s=timeout_s)


class LocalWorld:
    """`world_size` ranks in one process; thread i uses `communicators[i]`.

    `traces[i]` lists rank i's calls in order, those on sub-groups included.
    """

    def __init__(self, world_size: int, accelerator: Accelerator, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if world_size < 1:
            raise CommError(f"a world of {world_size} ranks", hint="use at least one rank", value=world_size)
        self._state = WorldState(world_size, timeout_s)
        group = ThreadGroup(tuple(range(world_size)), self._state)
        self.communicators = tuple(LocalCommunicator(rank, group, accelerator) for rank in range(world_size))

    @property
    def traces(self) -> tuple[list[TracedCall], ...]:
        return self._state.traces

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Let every present and future wait of every rank raise CommError with `reason`."""
        self._state.abort(reason, cause)


class LocalWork(Work):
    """A collective between threads. `finish` writes this rank's result, in this rank's `wait`."""

    def __init__(
        self, meeting: ThreadCollective, rank: int, finish: Callable[[], None], guard: tuple[Buffer, int] | None
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._finish: Callable[[], None] | None = finish
        self._guard = guard

    def wait(self) -> None:
        if self._finish is None:
            return
        self._meeting.wait_for_all(self._rank)
        if self._guard is not None:
            buffer, checksum = self._guard
            if crc32(buffer.to_bytes()) != checksum:
                raise CommError(
                    f"{self._meeting.collective} on rank {self._rank}: its input was written before wait()",
                    hint="leave the buffers of an asynchronous call alone until its wait() has returned",
                )
        finish, self._finish = self._finish, None
        finish()
        self._meeting.leave(self._rank)

    def is_done(self) -> bool:
        return self._finish is None or self._meeting.is_complete()


class LocalCommunicator(Communicator):
    """One thread's membership of a `LocalWorld` or of a part of it. See [Note: Local collective semantics]."""

    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS - {Operation.BATCH}
    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS

    deterministic = True
    backend = "local"

    def __init__(self, rank: int, group: ThreadGroup, accelerator: Accelerator) -> None:
        self.rank = rank
        self.world_size = len(group.ranks)
        self.ranks = group.ranks
        self.accelerator = accelerator
        self.timeout_s = group.state.timeout_s
        self.host_topology = group.state.host_topology(self.ranks[rank])
        self._group = group
        self._closed = False

    @property
    def trace(self) -> list[TracedCall]:
        """This rank's calls in order, on every group of its world."""
        return self._group.state.traces[self.ranks[self.rank]]

    def start(self, collective: Collective) -> Work:
        collective.check(self.rank, self.world_size)
        kind, source, target = collective.operation, collective.source, collective.target
        if kind is Operation.SEND or kind is Operation.RECV:
            return self._message(collective)
        if kind is Operation.BROADCAST and self.rank != collective.root:
            source = None
        in_place = self._in_place(collective)
        meeting = self._meet(collective, self._brought(collective, source))
        if target is not None and target is not source:
            if in_place and kind in (Operation.ALL_GATHER, Operation.GATHER):
                for piece in (
                    piece for rank, piece in enumerate(self._parts_of(collective, target)) if rank != self.rank
                ):
                    _poison(piece)
            elif not in_place:
                _poison(target)

        def finish() -> None:
            if target is None or kind is Operation.BARRIER:
                return
            if kind is Operation.ALL_REDUCE:
                target.copy_from(self._reduced(meeting, collective.reduction))
            elif kind is Operation.REDUCE_SCATTER:
                if in_place and source is not None:
                    _poison(source)
                start = collective.bounds(self.world_size)[self.rank]
                target.copy_from(self._reduced(meeting, collective.reduction).view(start, target.numel))
            elif kind is Operation.BROADCAST:
                if source is None:
                    target.copy_from(meeting.brought[collective.root][0])
            elif kind is Operation.SCATTER:
                target.copy_from(meeting.brought[collective.root][self.rank])
            else:
                own = self.rank if kind is Operation.ALL_TO_ALL else 0
                for rank, piece in enumerate(self._parts_of(collective, target)):
                    self._check_sent(collective, meeting.brought[rank][own], piece, rank)
                    piece.copy_from(meeting.brought[rank][own])

        return self._work(meeting, finish, collective, source)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        collective = Collective(Operation.OBJECTS, number=self.next_number())
        meeting = self._meet(collective, data)
        gathered: list[bytes] = []

        def finish() -> None:
            gathered.extend(meeting.brought[rank] for rank in range(self.world_size))

        self._work(meeting, finish, collective, None)
        return gathered

    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        meeting = self._meet(Collective(Operation.SPLIT, number=self.next_number(), members=members), None)
        meeting.wait_for_all(self.rank)
        outer = tuple(self.ranks[rank] for rank in members)
        group = meeting.once(lambda: ThreadGroup(outer, self._group.state))
        meeting.leave(self.rank)
        return LocalCommunicator(members.index(self.rank), group, self.accelerator) if self.rank in members else None

    def close(self) -> None:
        self._closed = True

    def board(self) -> StatusStore:
        return self._group.state.board

    def _meet(self, collective: Collective, brings: Any) -> ThreadCollective:
        if self._closed:
            raise closed_error(collective)
        return self._group.join(self.rank, collective.without_buffers(), brings)

    def _message(self, collective: Collective) -> Work:
        if self._closed:
            raise closed_error(collective)
        source, target = collective.source, collective.target
        pair = (collective.root, self.rank) if source is None else (self.rank, collective.root)
        brings = None if source is None else self._copy(source)
        meeting = self._group.join_pair(self.rank, *pair, collective.without_buffers(), brings)
        if target is None:
            return self._work(meeting, lambda: None, collective, source)
        _poison(target)

        def finish() -> None:
            target.copy_from(meeting.brought[collective.root])

        return self._work(meeting, finish, collective, None)

    def _brought(self, collective: Collective, source: Buffer | None) -> list[Buffer] | None:
        """A copy of this rank's contribution to the meeting, cut where each rank takes its own part."""
        if source is None:
            return None
        copy = self._copy(source)
        if collective.operation is Operation.ALL_TO_ALL:
            return pieces_of(copy, collective.source_bounds(self.world_size))
        if collective.operation is Operation.SCATTER:
            return self._parts_of(collective, copy)
        return [copy]

    def _parts_of(self, collective: Collective, whole: Buffer) -> list[Buffer]:
        return pieces_of(whole, collective.bounds(self.world_size))

    def _in_place(self, collective: Collective) -> bool:
        """Whether this rank's part lies where it belongs in the whole buffer."""
        source, target, kind = collective.source, collective.target, collective.operation
        if source is None or target is None or kind not in UNEVEN_PARTS or kind is Operation.ALL_TO_ALL:
            return False
        cuts_source = kind is Operation.REDUCE_SCATTER or kind is Operation.SCATTER
        whole, part = (source, target) if cuts_source else (target, source)
        return is_own_part(kind.value, whole, part, collective.bounds(self.world_size)[self.rank])

    def _check_sent(self, collective: Collective, sent: Buffer, expected: Buffer, rank: int) -> None:
        if sent.numel != expected.numel:
            raise CommError(
                f"{collective} on rank {self.ranks[self.rank]}: rank {self.ranks[rank]} sent {sent.numel} elements, "
                f"and {expected.numel} were expected",
                hint="a rank's source_counts are what the others' counts expect",
                value=(self.ranks[rank],),
            )

    def _work(
        self, meeting: ThreadCollective, finish: Callable[[], None], collective: Collective, source: Buffer | None
    ) -> Work:
        is_guarded = collective.async_op and source is not None
        guard = (source, crc32(source.to_bytes())) if is_guarded and source is not None else None
        return ended(LocalWork(meeting, self.rank, finish, guard), collective)

    def _copy(self, buffer: Buffer) -> Buffer:
        copy = self.accelerator.allocate(buffer.numel, buffer.dtype)
        copy.copy_from(buffer)
        self.accelerator.current_stream().synchronize()  # the ranks that read it have their own streams
        return copy

    def _reduced(self, meeting: ThreadCollective, op: ReduceOp) -> Buffer:
        """The whole reduction, computed once by the first rank that waits."""

        def reduce() -> Buffer:
            parts: list[Buffer] = [meeting.brought[rank][0] for rank in range(self.world_size)]
            reduce_parts(self.accelerator, parts, parts[0], op)
            self.accelerator.current_stream().synchronize()
            return parts[0]

        return meeting.once(reduce)


def _poison(buffer: Buffer) -> None:
    if buffer.numel and buffer.dtype.is_floating:
        buffer.fill(float("nan"))
