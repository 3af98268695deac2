"""Collectives of oneCCL between host buffers; messages, which it lacks there, go over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.arguments import check_members
from polyaccel.comm.backends.ccl.group import CclFailure, CclGroup, CclJob, CclTimeout
from polyaccel.comm.backends.ccl.library import CclOp
from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import ALL_OPERATIONS, UNEVEN_PARTS, Collective, Operation, closed_error, ended
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.work import DONE, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import CommError, CommTimeout
from polyaccel.ops.base import SCALE

_OPS = {
    Operation.BARRIER: CclOp.BARRIER,
    Operation.ALL_REDUCE: CclOp.ALL_REDUCE,
    Operation.REDUCE_SCATTER: CclOp.REDUCE_SCATTER,
    Operation.ALL_GATHER: CclOp.ALL_GATHER,
    Operation.BROADCAST: CclOp.BROADCAST,
    Operation.ALL_TO_ALL: CclOp.ALL_TO_ALL,
}
"""Operations that oneCCL does itself, in equal parts; all others go over gloo's messages."""
_WHOLE = frozenset({Operation.ALL_REDUCE, Operation.BROADCAST})
"""Where oneCCL counts the elements of the whole buffer, not of a part."""


class CclWork(Work):
    """A collective under way. What oneCCL has no reduction for, the average, is finished in `wait`."""

    def __init__(
        self, owner: CclCommunicator, job: CclJob, collective: Collective, out: Buffer | None, scale: bool
    ) -> None:
        self._owner = owner
        self._job: CclJob | None = job
        self._collective = collective
        self._out = out
        self._scale = scale

    def wait(self) -> None:
        if self._job is None:
            return
        owner = self._owner
        try:
            self._job.wait(owner.timeout_s)
        except (CclTimeout, CclFailure) as error:
            raise _explained(error, self._collective, owner.ranks[owner.rank], owner.timeout_s) from None
        self._job = None
        if self._out is not None:
            if self._scale:
                owner.accelerator.kernels()[SCALE](self._out, 1.0 / owner.world_size)
            self._out.bump_version()

    def is_done(self) -> bool:
        return self._job is None or self._job.ends_within(0)


class CclCommunicator(Communicator):
    """A group of ranks whose collectives oneCCL carries. See [Note: Single oneCCL thread].

    oneCCL chooses the order of additions by size, hence not deterministic; all ranks get the same bits. 16-bit floats
    are rounded after every addition. `messages` joins the same ranks over gloo: sends and receives, and the board.

    After a time limit it names no ranks: oneCCL does not report who has come. Only the recorder's watchdog reports
    whether a rank that computes on has started the call. So communicators of `init_distributed`, which are recorded,
    name the missing ranks.
    """

    backend = "ccl"
    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS
    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS - {Operation.REDUCE_SCATTER}

    def __init__(self, group: CclGroup, messages: Communicator, accelerator: Accelerator, timeout_s: float) -> None:
        self.rank = messages.rank
        self.world_size = messages.world_size
        self.ranks = messages.ranks
        self.accelerator = accelerator
        self.timeout_s = timeout_s
        self._group = group
        self._messages = messages
        self._closed = False

    @classmethod
    def connect(cls, messages: Communicator, accelerator: Accelerator, timeout_s: float) -> CclCommunicator:
        """Join the ranks of `messages` by oneCCL; the first makes the meeting place. Collective."""
        group = CclGroup()
        meeting = Collective(Operation.MEETING, number=0)
        try:
            address = group.host(timeout_s) if messages.rank == 0 else None
            shared_address = messages.broadcast_object(address)
            group.join(None if messages.rank == 0 else shared_address, messages.rank, messages.world_size, timeout_s)
        except (CclTimeout, CclFailure) as error:
            raise _explained(error, meeting, messages.ranks[messages.rank], timeout_s) from None
        return cls(group, messages, accelerator, timeout_s)

    def start(self, collective: Collective) -> Work:
        kind = collective.operation
        op = _OPS.get(kind)
        if op is None or collective.is_uneven:
            return self._messages.call(collective)
        collective.check(self.rank, self.world_size)
        if self._closed:
            raise closed_error(collective)
        source, target = collective.source, collective.target
        numel = collective.numel if kind in _WHOLE else collective.numel // self.world_size
        if numel == 0 and op is not CclOp.BARRIER:
            return DONE
        averages = collective.reduction is ReduceOp.AVG
        native = ReduceOp.SUM if averages else collective.reduction
        job = self._group.start(op, str(collective), numel, source, target, native, collective.root)
        return ended(CclWork(self, job, collective, target, averages), collective)

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
        return type(self).connect(part, self.accelerator, self.timeout_s)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._group.leave()
            self._messages.close()

    def board(self) -> StatusStore | None:
        return self._messages.board()


def _explained(error: CclTimeout | CclFailure, collective: Collective, rank: int, timeout_s: float) -> CommError:
    """Return the error for a failure on global rank `rank`; the recorder finds missing ranks on the board."""
    what = f"{collective} on rank {rank}"
    if isinstance(error, CclTimeout):
        return CommTimeout(
            f"{what} timed out after {timeout_s:g} s",
            hint="find out what the missing ranks do: stopped, dead, or in another call",
        )
    return CommError(f"{what} failed: {error}", hint="look for the first error among the ranks")
