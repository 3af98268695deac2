"""Collectives of oneCCL between host buffers; messages, which it lacks there, go over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import (
    Call,
    check_equal_parts,
    check_members,
    check_reducible,
    check_reduction,
    check_root,
    closed_error,
    is_own_part,
)
from polyaccel.comm.base import NO_INFO, Board, CallInfo, Communicator, DoneWork, Work, check_collective
from polyaccel.comm.ccl_group import CclFailure, CclGroup, CclJob, CclTimeout
from polyaccel.comm.ccl_library import Op
from polyaccel.comm.objects import gather_objects
from polyaccel.comm.single import SingleCommunicator
from polyaccel.errors import CommError, CommTimeout
from polyaccel.ops.base import SCALE
from polyaccel.types import ReduceOp

_DONE = DoneWork()


class CclWork(Work):
    """A collective under way. What oneCCL has no reduction for, the average, is finished in `wait`."""

    def __init__(
        self, owner: CclCommunicator, job: CclJob, seq: int, call: Call, out: Buffer | None, scale: bool
    ) -> None:
        self._owner = owner
        self._job: CclJob | None = job
        self._seq = seq
        self._call = call
        self._out = out
        self._scale = scale

    def wait(self) -> None:
        if self._job is None:
            return
        owner = self._owner
        try:
            self._job.wait(owner.timeout_s)
        except (CclTimeout, CclFailure) as error:
            raise _explained(error, self._seq, self._call, owner.ranks[owner.rank], owner.timeout_s) from None
        self._job = None
        if self._out is not None:
            if self._scale:
                owner.accelerator.kernels()[SCALE](self._out, 1.0 / owner.world_size)
            self._out.mark_written()

    def is_done(self) -> bool:
        return self._job is None or self._job.ends_within(0)


class CclCommunicator(Communicator):
    """A group of ranks whose collectives oneCCL carries. See [Note: One thread calls oneCCL].

    oneCCL chooses the order of additions by size, hence not deterministic; all ranks get the same bits. 16-bit floats
    are rounded after every addition. `messages` joins the same ranks over gloo: sends and receives, and the board.

    After a time limit it names nobody: oneCCL does not say who has come, and whether a rank that computes on has
    started the call is known only where something speaks for it meanwhile. That is the recorder's watchdog, and so the
    missing ranks are named in all that `init_distributed` gives.
    """

    backend = "ccl"

    def __init__(self, group: CclGroup, messages: Communicator, accelerator: Accelerator, timeout_s: float) -> None:
        self.rank = messages.rank
        self.world_size = messages.world_size
        self.ranks = messages.ranks
        self.accelerator = accelerator
        self.timeout_s = timeout_s
        self._group = group
        self._messages = messages
        self._calls = 0
        self._closed = False

    @classmethod
    def meet(cls, messages: Communicator, accelerator: Accelerator, timeout_s: float) -> CclCommunicator:
        """Join the ranks of `messages` by oneCCL; the first makes the meeting place. Collective."""
        group = CclGroup()
        call = Call("meeting")
        try:
            address = group.host(timeout_s) if messages.rank == 0 else None
            place = messages.broadcast_object(address)
            group.join(None if messages.rank == 0 else place, messages.rank, messages.world_size, timeout_s)
        except (CclTimeout, CclFailure) as error:
            raise _explained(error, 0, call, messages.ranks[messages.rank], timeout_s) from None
        return cls(group, messages, accelerator, timeout_s)

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        check_reduction("all_reduce", buffer.dtype, op)
        check_reducible("all_reduce", buffer.dtype)
        call = Call("all_reduce", buffer.numel, buffer.dtype, op.value, info)
        return self._start(Op.ALL_REDUCE, call, async_op, buffer.numel, buffer, buffer, reduce=op)

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
        check_reducible("reduce_scatter", source.dtype)
        is_own_part("reduce_scatter", source, out, self.rank)
        call = Call("reduce_scatter", source.numel, source.dtype, op.value, info)
        return self._start(Op.REDUCE_SCATTER, call, async_op, out.numel, source, out, reduce=op)

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_collective("all_gather", out, source, world_size=self.world_size, parts_of="out")
        is_own_part("all_gather", out, source, self.rank)
        call = Call("all_gather", out.numel, out.dtype, info=info)
        return self._start(Op.ALL_GATHER, call, async_op, source.numel, source, out)

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("broadcast", root, self.world_size)
        call = Call("broadcast", buffer.numel, buffer.dtype, f"from {root}", info)
        return self._start(Op.BROADCAST, call, async_op, buffer.numel, buffer, buffer, root=root)

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_equal_parts(out, source, self.world_size)
        call = Call("all_to_all", out.numel, out.dtype, info=info)
        return self._start(Op.ALL_TO_ALL, call, async_op, out.numel // self.world_size, source, out)

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self._messages.send(buffer, to, async_op=async_op, info=info)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        return self._messages.recv(buffer, source, async_op=async_op, info=info)

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        self._start(Op.BARRIER, Call("barrier", info=info), False)

    def all_gather_object(self, value: Any) -> list[Any]:
        return gather_objects(self, value)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        members = tuple(ranks)
        check_members("split", members, self.world_size)
        part = self._messages.split(members)
        if part is None:
            return None
        if part.world_size == 1:
            return SingleCommunicator(
                self.accelerator, timeout_s=self.timeout_s, global_rank=part.ranks[0], backend=self.backend
            )
        return type(self).meet(part, self.accelerator, self.timeout_s)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._group.leave()
            self._messages.close()

    def board(self) -> Board | None:
        return self._messages.board()

    def _start(
        self,
        op: Op,
        call: Call,
        async_op: bool,
        numel: int = 0,
        source: Buffer | None = None,
        out: Buffer | None = None,
        *,
        reduce: ReduceOp = ReduceOp.SUM,
        root: int = 0,
    ) -> Work:
        if self._closed:
            raise closed_error(call)
        seq = self._calls
        self._calls += 1
        if numel == 0 and op is not Op.BARRIER:
            return _DONE
        averages = reduce is ReduceOp.AVG
        native = ReduceOp.SUM if averages else reduce
        job = self._group.start(op, f"#{seq} {call}", numel, source, out, native, root)
        work = CclWork(self, job, seq, call, out, averages)
        if not async_op:
            work.wait()
        return work


def _explained(error: CclTimeout | CclFailure, seq: int, call: Call, rank: int, timeout_s: float) -> CommError:
    """The error for what went wrong in `call` on global rank `rank`; who is missing the board tells (`comm.record`)."""
    what = f"#{seq} {call} on rank {rank}"
    if isinstance(error, CclTimeout):
        return CommTimeout(
            f"{what} timed out after {timeout_s:g} s",
            cure="find out what the missing ranks do: stopped, dead, or in another call",
        )
    return CommError(f"{what} failed: {error}", cure="look for the first error among the ranks")
