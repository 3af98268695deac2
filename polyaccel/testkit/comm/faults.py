"""The contract of communicators where a rank fails: the others name it, and none hangs.

The ranks are processes that may be lost, so every test has its own pool:

    class TestGlooFaults(CommFaultContract):
        def pool(self, world_size, comm_timeout_s, grace_s):
            return RankPool(world_size, backend="gloo", comm_timeout_s=comm_timeout_s, grace_s=grace_s)

Communicators are tested as `init_distributed` returns them, behind the recorder: where a library cannot detect which
rank is missing, the recorder does, by the board.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import sleep
from typing import Any, ClassVar

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.testkit.ranks.procs import RankPool

FAULTY = 1
COMM_TIMEOUT_S = 10.0  # a rank that does its part may stand still for seconds on a busy machine
GRACE_S = 30.0
CALL = "all_reduce sum 300 x float32 bucket 7 'grads'"


class CommFaultContract(ABC):
    """Tests of the errors on the other ranks of a group when one is missing; every method `test_*` is a test."""

    world_size: ClassVar[int] = 3

    @abstractmethod
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        """Make new ranks, which a test may lose.

        Args:
            world_size: Number of ranks.
            comm_timeout_s: Time limit of their collectives, in seconds.
            grace_s: Seconds that the pool waits for the answers of the others once a rank has failed.

        Returns:
            The pool, which the caller closes.
        """

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on each rank of a pool. A subclass may pass another communicator to `body`.

        Args:
            pool: The ranks.
            body: Called with the rank's communicator and `args`. It pickles where ranks are processes.
            *args: Further arguments, which pickle.

        Returns:
            The results in rank order.
        """
        return pool.run(body, *args)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        """When a rank stays away the others get a CommTimeout within their time limit that names it and the call: a
        hang of hours has no message."""
        with self._pool() as pool:
            try:
                answers = self.run(pool, one_stays_away)
            except CommTimeout as error:
                raise AssertionError(
                    f"{CALL} to which rank {FAULTY} does not come: expected a CommTimeout after {COMM_TIMEOUT_S:g} s, "
                    f"got none: {error.message}"
                ) from error
        for rank, answer in enumerate(answers):
            if rank == FAULTY:
                continue
            missing, text = answer
            if FAULTY not in missing or rank in missing:
                raise AssertionError(
                    f"ranks that did not come, by the error of rank {rank}: expected {FAULTY} and not {rank}, "
                    f"got {list(missing)}: {text}"
                )
            if CALL not in text:
                raise AssertionError(f"the error of rank {rank}: expected it to name {CALL}, got {text}")

    def test_a_rank_that_dies_is_named_and_nobody_waits_for_it(self) -> None:
        """When a rank dies the others get its number at once, or their launcher ends them too, as those of MPI do."""
        with self._pool() as pool:
            try:
                self.run(pool, one_dies)
            except LaunchError as error:
                said = [note.splitlines()[0] for note in getattr(error, "__notes__", ()) if note.startswith("rank")]
            else:
                raise AssertionError(f"rank {FAULTY} was killed, and no rank noticed")
        for note in said:
            if "did not answer" in note:
                raise AssertionError(f"rank {FAULTY} was killed, and others waited for it: {note}")
            is_ended, is_named = ("raised LaunchError" in note), (f"rank {FAULTY}" in note or f"[{FAULTY}]" in note)
            if not is_ended and not (is_named and ("raised CommError" in note or "raised CommTimeout" in note)):
                raise AssertionError(f"rank {FAULTY} was killed, and another one does not report it: {note}")

    def _pool(self) -> RankPool:
        return self.pool(self.world_size, COMM_TIMEOUT_S, GRACE_S)


def disagreement_is_seen_by_all(comm: Communicator) -> int:
    """In debug mode, in which ranks compare every call before they make it; they can continue together afterwards."""
    debugged = RecordingCommunicator(comm, debug=True, watch_s=None)
    buffer = comm.allocate(4 * comm.world_size, DType.FLOAT32)
    last = comm.world_size - 1
    calls: tuple[Callable[[], object], ...] = (
        lambda: debugged.broadcast(buffer, 0),
        lambda: debugged.all_reduce(buffer.view(0, 4)),
        lambda: debugged.all_reduce(buffer, ReduceOp.MAX),
    )
    for number, other in enumerate(calls):
        error_text = ""
        try:
            other() if comm.rank == last else debugged.all_reduce(buffer)
        except CommError as error:
            error_text = str(error)
        if comm.world_size > 1 and not (
            f"rank {comm.ranks[0]} called" in error_text and f"rank {comm.ranks[last]} " in error_text
        ):
            raise AssertionError(f"ranks made different calls ({number}), and rank {comm.rank} received {error_text!r}")
    debugged.barrier()
    return len(calls)


def recorded(comm: Communicator) -> Communicator:
    """`comm` behind the recorder, after a barrier that is in this rank's note on the board."""
    behind = RecordingCommunicator(comm, watch_s=0.05)
    behind.barrier()
    board, rank = behind.board(), behind.ranks[behind.rank]
    while board is not None and "barrier" not in board.read(max(behind.ranks) + 1).get(rank, ""):
        sleep(0.01)
    return behind


def all_reduce(comm: Communicator) -> None:
    """On the last rank at once, on the others in two steps."""
    buffer = comm.allocate(300, DType.FLOAT32)
    comm.all_reduce(buffer, async_op=comm.rank != comm.world_size - 1, label="grads", bucket=7).wait()


def one_stays_away(comm: Communicator) -> tuple[tuple[int, ...], str] | None:
    """The missing ranks and the message, as the others receive them."""
    comm = recorded(comm)
    if comm.rank == FAULTY:
        return None
    try:
        all_reduce(comm)
    except CommTimeout as error:
        return error.missing_ranks, str(error)
    except CommError as error:
        raise AssertionError(f"a rank that does not come is a CommTimeout, not {error!r}") from error
    raise AssertionError(f"an all-reduce without rank {FAULTY} ended well on rank {comm.rank}")


def one_dies(comm: Communicator) -> None:
    comm = recorded(comm)
    comm.barrier()
    if comm.rank == FAULTY:
        board = comm.board()
        while board is not None and not board.read(comm.world_size).get(comm.rank):
            sleep(0.01)  # one that dies before it has sent its number cannot be named
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(comm)
