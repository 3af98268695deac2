"""Ranks as threads of one process, and the backend of world size 1.

`LocalWorld` is strict rather than fast: it is where the logic of everything above is tested.

[Note: What a local collective promises]
An asynchronous call returns before the others arrive, and its result appears in `wait()` and not earlier. Until then
the work owns its buffers: whatever it will overwrite is filled with NaN, and writing to an input before `wait()` is a
CommError there. What an in-place reduce-scatter leaves undefined is NaN afterwards. Calls that do not agree are errors
on every rank, and a rank that fails takes the others out of whatever they wait for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from zlib import crc32

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import (
    Call,
    check_equal_parts,
    check_members,
    check_reduction,
    check_root,
    closed_error,
    is_own_part,
)
from polyaccel.comm.base import (
    DEFAULT_TIMEOUT_S,
    NO_INFO,
    Board,
    CallInfo,
    CommBackend,
    Communicator,
    Rendezvous,
    Work,
    check_collective,
)
from polyaccel.comm.local_meeting import Meeting, MeetingPlace, TracedCall, WorldState
from polyaccel.comm.reduction import reduce_parts
from polyaccel.comm.single import SingleCommunicator
from polyaccel.errors import CommError
from polyaccel.types import ReduceOp


class LocalBackend(CommBackend):
    """World size 1: connects to nobody. Ranks as threads are made with `LocalWorld` instead."""

    name: ClassVar[str] = "local"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "one process, no network", priority=0)

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        if rendezvous.world_size != 1:
            raise CommError(
                f"comm backend 'local' joins one process, not {rendezvous.world_size} (from {rendezvous.source})",
                cure="choose another backend (such as gloo), or start one process",
                value=rendezvous.world_size,
            )
        return SingleCommunicator(accelerator, timeout_s=timeout_s)


class LocalWorld:
    """`world_size` ranks in one process; thread i uses `communicators[i]`.

    `traces[i]` lists rank i's calls in order, those on sub-groups included.
    """

    def __init__(self, world_size: int, accelerator: Accelerator, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if world_size < 1:
            raise CommError(f"a world of {world_size} ranks", cure="use at least one rank", value=world_size)
        self._state = WorldState(world_size, timeout_s)
        place = MeetingPlace(tuple(range(world_size)), self._state)
        self.communicators = tuple(LocalCommunicator(rank, place, accelerator) for rank in range(world_size))

    @property
    def traces(self) -> tuple[list[TracedCall], ...]:
        return self._state.traces

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Let every present and future wait of every rank raise CommError with `reason`."""
        self._state.abort(reason, cause)


class LocalWork(Work):
    """A collective between threads. `finish` writes this rank's result, in this rank's `wait`."""

    def __init__(
        self, meeting: Meeting, rank: int, finish: Callable[[], None], guard: tuple[Buffer, int] | None
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
                    f"{self._meeting.call} on rank {self._rank}: its input was written before wait()",
                    cure="leave the buffers of an asynchronous call alone until its wait() has returned",
                )
        finish, self._finish = self._finish, None
        finish()
        self._meeting.leave(self._rank)

    def is_done(self) -> bool:
        return self._finish is None or self._meeting.is_complete()


class LocalCommunicator(Communicator):
    """One thread's membership of a `LocalWorld` or of a part of it. See [Note: What a local collective promises]."""

    deterministic = True
    backend = "local"

    def __init__(self, rank: int, place: MeetingPlace, accelerator: Accelerator) -> None:
        self.rank = rank
        self.world_size = len(place.ranks)
        self.ranks = place.ranks
        self.accelerator = accelerator
        self.timeout_s = place.state.timeout_s
        self._place = place
        self._closed = False

    @property
    def trace(self) -> list[TracedCall]:
        """This rank's calls in order, on every group of its world."""
        return self._place.state.traces[self.ranks[self.rank]]

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        check_reduction("all_reduce", buffer.dtype, op)
        call = Call("all_reduce", buffer.numel, buffer.dtype, op.value, info)
        meeting = self._meet(call, self._copy(buffer))
        return self._work(meeting, lambda: buffer.copy_from(self._reduced(meeting, op)), async_op, buffer)

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        check_collective("reduce_scatter", out, source, world_size=self.world_size, parts_of="source")
        check_reduction("reduce_scatter", source.dtype, op)
        in_place = is_own_part("reduce_scatter", source, out, self.rank)
        meeting = self._meet(Call("reduce_scatter", source.numel, source.dtype, op.value, info), self._copy(source))
        if not in_place:
            _poison(out)

        def finish() -> None:
            if in_place:
                _poison(source)
            out.copy_from(self._reduced(meeting, op).view(self.rank * out.numel, out.numel))

        return self._work(meeting, finish, async_op, source)

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_collective("all_gather", out, source, world_size=self.world_size, parts_of="out")
        meeting = self._meet(Call("all_gather", out.numel, out.dtype, info=info), self._copy(source))
        begin, end = self.rank * source.numel, (self.rank + 1) * source.numel
        if is_own_part("all_gather", out, source, self.rank):
            _poison(out.view(0, begin))
            _poison(out.view(end, out.numel - end))
        else:
            _poison(out)

        def finish() -> None:
            for rank in range(self.world_size):
                out.view(rank * source.numel, source.numel).copy_from(meeting.brought[rank])

        return self._work(meeting, finish, async_op, source)

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("broadcast", root, self.world_size)
        is_root = self.rank == root
        call = Call("broadcast", buffer.numel, buffer.dtype, f"from {root}", info)
        meeting = self._meet(call, self._copy(buffer) if is_root else None)
        if is_root:
            return self._work(meeting, lambda: None, async_op, buffer)
        _poison(buffer)
        return self._work(meeting, lambda: buffer.copy_from(meeting.brought[root]), async_op, None)

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_equal_parts(out, source, self.world_size)
        numel = out.numel // self.world_size
        meeting = self._meet(Call("all_to_all", out.numel, out.dtype, info=info), self._copy(source))
        _poison(out)

        def finish() -> None:
            for rank in range(self.world_size):
                out.view(rank * numel, numel).copy_from(meeting.brought[rank].view(self.rank * numel, numel))

        return self._work(meeting, finish, async_op, source)

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("send", to, self.world_size)
        meeting = self._meet_one("send", buffer, self.rank, to, info)
        return self._work(meeting, lambda: None, async_op, buffer)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("recv", source, self.world_size)
        meeting = self._meet_one("recv", buffer, source, self.rank, info)
        _poison(buffer)
        return self._work(meeting, lambda: buffer.copy_from(meeting.brought[source]), async_op, None)

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        self._work(self._meet(Call("barrier", info=info), None), lambda: None, False, None)

    def all_gather_object(self, value: Any) -> list[Any]:
        meeting = self._meet(Call("all_gather_object"), pickle.dumps(value))
        values: list[Any] = []
        self._work(
            meeting,
            lambda: values.extend(pickle.loads(meeting.brought[rank]) for rank in range(self.world_size)),
            False,
            None,
        )
        return values

    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        meeting = self._meet(Call("split", detail=str(list(members))), None)
        meeting.wait_for_all(self.rank)
        outer = tuple(self.ranks[rank] for rank in members)
        place = meeting.once(lambda: MeetingPlace(outer, self._place.state))
        meeting.leave(self.rank)
        return LocalCommunicator(members.index(self.rank), place, self.accelerator) if self.rank in members else None

    def close(self) -> None:
        self._closed = True

    def board(self) -> Board:
        return self._place.state.board

    def _meet(self, call: Call, brings: Any) -> Meeting:
        self._check_open(call)
        return self._place.meet(self.rank, call, brings)

    def _meet_one(self, op: str, buffer: Buffer, source: int, to: int, info: CallInfo) -> Meeting:
        if source == to:
            raise CommError(f"rank {source}: {op} to itself", cure="copy the buffer instead", value=source)
        call = Call("send/recv", buffer.numel, buffer.dtype, f"{source} -> {to}", info)
        self._check_open(call)
        return self._place.meet_pair(self.rank, source, to, call, self._copy(buffer) if op == "send" else None)

    def _check_open(self, call: Call) -> None:
        if self._closed:
            raise closed_error(call)

    def _work(self, meeting: Meeting, finish: Callable[[], None], async_op: bool, source: Buffer | None) -> LocalWork:
        guard = (source, crc32(source.to_bytes())) if async_op and source is not None else None
        work = LocalWork(meeting, self.rank, finish, guard)
        if not async_op:
            work.wait()
        return work

    def _copy(self, buffer: Buffer) -> Buffer:
        copy = self.accelerator.allocate(buffer.numel, buffer.dtype)
        copy.copy_from(buffer)
        self.accelerator.current_stream().synchronize()  # the ranks that read it have streams of their own
        return copy

    def _reduced(self, meeting: Meeting, op: ReduceOp) -> Buffer:
        """The whole reduction, computed once by the first rank that waits."""

        def reduce() -> Buffer:
            parts: list[Buffer] = [meeting.brought[rank] for rank in range(self.world_size)]
            reduce_parts(self.accelerator, parts, parts[0], op)
            self.accelerator.current_stream().synchronize()
            return parts[0]

        return meeting.once(reduce)


def _poison(buffer: Buffer) -> None:
    if buffer.numel and buffer.dtype.is_floating:
        buffer.fill(float("nan"))
