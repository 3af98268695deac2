"""Collectives over MPI: direct messages of bytes, added up by the accelerator's kernels. See [Note: Direct exchange].

Every element type moves as bytes, so none needs a name in MPI, and buffers go in where they lie. Sums are those of
`collectives/reduction.py`: in rank order, 16-bit floats in float32, hence the bits that gloo's and shm's ranks get.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import Collective, ended
from polyaccel.comm.collectives.p2p import Exchange, Message, P2PCollectives, Steps
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.mpi.progress import PROGRESS, MpiWork
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.errors import CommError, CommTimeout

_MOST_NBYTES = 1 << 30
"""Of one message: below what a count of MPI before version 4 holds, and every library's own limits."""


class MpiExchange(Exchange):
    """Messages by Isend and Irecv, of at most `_MOST_NBYTES`; the pieces of a larger one keep their order."""

    def __init__(self, owner: MpiCommunicator, collective: Collective) -> None:
        super().__init__(owner, collective, most_tag=owner.most_tag)
        self._owner = owner

    def start(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Message:
        comm = self._owner.comm
        begin = comm.Isend if sends else comm.Irecv
        # MPI has no streams: kernels still queued may write what is sent, or read what is overwritten.
        self._owner.accelerator.current_stream().synchronize()
        start, nbytes = buffer.data_ptr(), buffer.nbytes
        requests = []
        for offset in range(0, nbytes, _MOST_NBYTES):
            memory = MPI.buffer.fromaddress(start + offset, min(_MOST_NBYTES, nbytes - offset))
            requests.append(begin([memory, MPI.BYTE], peer, tag))
        return Message(peer, requests)


class MpiCommunicator(P2PCollectives[MpiExchange]):
    """A group of MPI's ranks. `comm` is an MPI communicator of our own, in which nothing else is sent."""

    backend = "mpi"

    def __init__(
        self,
        comm: MPI.Comm,
        ranks: tuple[int, ...],
        accelerator: Accelerator,
        timeout_s: float,
        board: StatusStore | None = None,
    ) -> None:
        self.rank = comm.Get_rank()
        self.world_size = comm.Get_size()
        self.ranks = ranks
        self.accelerator = accelerator
        self.timeout_s = timeout_s
        self.pool = ScratchPool(accelerator)
        self.most_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self._comm: MPI.Comm | None = comm
        self._board = board
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py makes exceptions

    @property
    def comm(self) -> MPI.Comm:
        """MPI's communicator. Raises CommError once closed."""
        if self._comm is None or MPI.Is_finalized():
            raise CommError("the mpi communicator is closed", hint="close it after the last call")
        return self._comm

    def new_exchange(self, collective: Collective) -> MpiExchange:
        self.comm  # noqa: B018 - a closed communicator raises also for a call that sends nothing
        return MpiExchange(self, collective)

    def carry(self, exchange: MpiExchange, steps: Steps, written: Buffer | None, *, rounds: int) -> Work:
        def failed(error: Exception | None, peers: list[int]) -> CommError:
            return self._failure(exchange, error, peers)

        return ended(MpiWork(steps, written, self.timeout_s, failed), exchange.collective)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        # MPI's own split has no time limit, and must not be entered before all have come.
        members = self.agreed_members(ranks)
        is_member = self.rank in members
        outer = tuple(self.ranks[rank] for rank in members)
        if len(members) == 1:
            alone = SingleCommunicator(
                self.accelerator, timeout_s=self.timeout_s, global_rank=outer[0], backend=self.backend
            )
            return alone if is_member else None
        group_rank = members.index(self.rank) if is_member else 0
        part = self.comm.Split(0 if is_member else MPI.UNDEFINED, group_rank)
        if not is_member:
            return None
        return MpiCommunicator(part, outer, self.accelerator, self.timeout_s, self._board)

    def close(self) -> None:
        comm, self._comm = self._comm, None
        # With messages under way, or after finalize, MPI's communicator is left to the end of the process.
        if comm is not None and not PROGRESS.running and not MPI.Is_finalized():
            comm.Free()

    def board(self) -> StatusStore | None:
        return self._board

    def _failure(self, exchange: MpiExchange, error: Exception | None, peers: Sequence[int]) -> CommError:
        """The error of a call in which `peers` of this group did not take part; `error` None: not in time."""
        missing = tuple(sorted(self.ranks[peer] for peer in peers))
        who = f"{exchange.collective} on rank {self.ranks[self.rank]}"
        lost = f": ranks {list(missing)} did not take part" if missing else ""
        if error is None:
            return CommTimeout(
                f"{who} timed out after {self.timeout_s:g} s{lost}",
                missing_ranks=missing,
                hint="find out what the missing ranks do: stopped, dead, or in another call",
            )
        return CommError(f"{who} failed{lost} ({type(error).__name__}: {error})", missing_ranks=missing)
