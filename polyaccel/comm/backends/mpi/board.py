"""A notice board over MPI: every rank sends every other one its notes, in messages that do not wait."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from mpi4py import MPI

from polyaccel.comm.base import StatusStore

_MOST_NBYTES = 4096
_TAG = 0


class MpiBoard(StatusStore):
    """Notes as small messages on their own communicator; the last one that arrived from a rank counts.

    Notes are written by a thread next to the one that hangs, so MPI must allow calls of several threads at a time. A
    rank that does not fetch its messages gets no second one before the first has left.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank = comm.Get_rank()
        self._sending: dict[int, MPI.Request] = {}
        self._notes: dict[int, str] = {}
        self._lock = Lock()

    def set(self, rank: int, text: str) -> None:
        data = text.encode()[:_MOST_NBYTES]
        with self._lock:
            self._notes[rank] = text
            if MPI.Is_finalized():
                return
            try:
                for peer in range(self._comm.Get_size()):
                    earlier = self._sending.get(peer)
                    if peer != self._rank and (earlier is None or earlier.Test()):
                        self._sending[peer] = self._comm.Isend([data, MPI.BYTE], peer, _TAG)
                self._fetch()
            except MPI.Exception:
                return  # a board that cannot be reached is silent; the error being reported matters more

    def read(self, world_size: int) -> Mapping[int, str]:
        with self._lock:
            if not MPI.Is_finalized():
                try:
                    self._fetch()
                except MPI.Exception:
                    return {}
            return {rank: text for rank, text in self._notes.items() if rank < world_size}

    def _fetch(self) -> None:
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
            self._notes[status.Get_source()] = data.decode(errors="replace")
