"""What is under way over MPI: who carries it on, who owns it, and what a wait says that ends without it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any

import pytest
from backend_marks import needs
from failing_ranks import LIMIT_S, PATIENCE_S, WATCH_S

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CommError, CommTimeout
from polyaccel.testkit.ranks.mpi import MpiRankPool

pytestmark = needs("mpi")


@pytest.fixture(scope="module")
def trio() -> Iterator[MpiRankPool]:
    with MpiRankPool(3, comm_timeout_s=PATIENCE_S, memory="numpy") as pool:
        yield pool


@pytest.fixture(scope="module")
def timeouts() -> Iterator[tuple[Future[list[Any]], ...]]:
    """What ranks say that wait for a limit: those of a late one, and those that part. They wait at the same time."""

    def run(world_size: int, body: Any) -> list[Any]:
        with MpiRankPool(world_size, comm_timeout_s=LIMIT_S, memory="numpy") as ranks:
            return ranks.run(body)

    with ThreadPoolExecutor() as pool:
        yield pool.submit(run, 3, a_late_rank_is_named_and_may_still_come), pool.submit(run, 2, takes_another_way)


def filled(comm: Communicator, value: float, numel: int = 30_000) -> Buffer:
    buffer = comm.allocate(numel, DType.FLOAT32)
    buffer.fill(value)
    return buffer


def a_late_rank_is_named_and_may_still_come(comm: Communicator) -> tuple[int, ...]:
    """Rank 1 comes to the all-reduce only when the others have given up waiting once."""
    from polyaccel.comm.mpi.progress import PROGRESS

    buffer = filled(comm, comm.rank + 1.0)
    missing: tuple[int, ...] = ()
    if comm.rank != 1:
        work = comm.all_reduce(buffer, async_op=True)
        with pytest.raises(CommTimeout) as caught:
            work.wait()
        assert all(part in str(caught.value) for part in ("all_reduce", "30000", "float32"))
        missing = caught.value.missing_ranks
        assert not work.is_done()
        comm.send(filled(comm, 0.0, 1), 1)
    else:
        words = [comm.recv(comm.allocate(1, DType.FLOAT32), peer, async_op=True) for peer in (0, 2)]
        while not all(word.is_done() for word in words):
            continue  # until both have given up
        work = comm.all_reduce(buffer, async_op=True)
    work.wait()
    assert set(buffer.raw.tolist()) == {6.0}
    comm.barrier()
    assert PROGRESS.running == []
    return missing


def test_a_late_rank_is_named_and_may_still_come(timeouts: tuple[Future[list[Any]], ...]) -> None:
    assert timeouts[0].result() == [(1,), (), (1,)]


def work_owns_its_buffers(comm: Communicator) -> bool:
    """Nobody holds the buffer or the work; it is carried through, and then let go of."""
    from polyaccel.comm.mpi.progress import PROGRESS

    buffer = filled(comm, 1.0)
    alive = weakref.ref(buffer)
    comm.all_reduce(buffer, async_op=True)
    del buffer
    gc.collect()
    was_alive = alive() is not None
    while PROGRESS.running:
        PROGRESS.poll()
    comm.barrier()
    gc.collect()
    return was_alive and alive() is None


def test_a_work_that_nobody_holds_owns_its_buffers_to_the_end(trio: MpiRankPool) -> None:
    assert trio.run(work_owns_its_buffers) == [True] * 3


def a_rank_in_another_call_answers(comm: Communicator) -> float:
    """The second round of an all-reduce needs every rank; those that wait for something else still take part."""
    pair = comm.split([0, 1])
    buffer = filled(comm, 1.0)
    work = comm.all_reduce(buffer, async_op=True)
    if comm.rank == 2:
        work.wait()
        comm.send(filled(comm, 0.0, 1), 0)
    if comm.rank == 0:
        comm.recv(comm.allocate(1, DType.FLOAT32), 2)
    if pair is not None:
        pair.barrier()
        pair.close()
    work.wait()
    return float(buffer.raw[0])


def test_a_rank_that_waits_for_something_else_answers(trio: MpiRankPool) -> None:
    assert trio.run(a_rank_in_another_call_answers) == [3.0] * 3


def two_threads_with_a_group_each(comm: Communicator) -> list[float]:
    groups = [comm.split([0, 1, 2]) for _ in range(2)]
    sums: list[float] = []

    def reduce_often(group: Communicator) -> None:
        total = 0.0
        for turn in range(50):
            buffer = filled(group, group.rank + turn, 9_000)
            group.all_reduce(buffer)
            total += float(buffer.raw[-1])
        sums.append(total)

    threads = [Thread(target=reduce_often, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_two_threads_may_wait_at_a_time(trio: MpiRankPool) -> None:
    expected = float(sum(3 + 3 * turn for turn in range(50)))
    assert trio.run(two_threads_with_a_group_each) == [[expected, expected]] * 3


def takes_another_way(comm: Communicator) -> str:
    recorded = RecordingCommunicator(comm, watch_s=WATCH_S)
    buffer = filled(comm, 1.0, 60)
    recorded.barrier()
    ways = (
        lambda: recorded.all_reduce(buffer, label="norm"),
        lambda: recorded.all_gather(buffer, buffer.view(30, 30)),
    )
    with pytest.raises(CommTimeout) as caught:
        ways[comm.rank]()
    return str(caught.value)


def test_a_rank_in_another_call_is_named_with_that_call(timeouts: tuple[Future[list[Any]], ...]) -> None:
    first, second = timeouts[1].result()
    assert "ranks [1] did not take part" in first
    assert "rank 1 called #1 all_gather 60 x float32 instead" in first
    assert "rank 0 called #1 all_reduce sum 60 x float32 'norm' instead" in second


def groups_of_different_ranks(comm: Communicator) -> str:
    with pytest.raises(CommError) as caught:
        comm.split([0, 1] if comm.rank else [0, 2])
    assert caught.value.value == ((0, 1) if comm.rank else (0, 2))
    return str(caught.value)


def test_groups_are_agreed_on(trio: MpiRankPool) -> None:
    assert len(set(trio.run(groups_of_different_ranks))) == 1
