"""A rank that dies, stops or goes another way ends the others' collectives with an error that names it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from failing_ranks import (
    CALL,
    LIMIT_S,
    PATIENCE_S,
    WATCH_S,
    what_is_said_of_a_stopped_rank,
    what_survivors_say_of_a_killed_rank,
)

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.types import DType
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.testkit.ranks.procs import RankPool


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2, comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S) as pool:
        yield pool


def test_a_killed_peer_is_named_by_the_survivors() -> None:
    with RankPool(3, comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S) as trio:
        assert "ranks [1] did not take part" in what_survivors_say_of_a_killed_rank(trio)


def one_dies_and_one_is_late(comm: Communicator, said: Path) -> None:
    """Rank 1 dies before the second call, and rank 2 comes to it when rank 0 has failed."""
    buffer = comm.allocate(300, DType.FLOAT32)
    comm.all_reduce(buffer)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 2:
        while not said.exists():
            sleep(0.01)
        return
    try:
        comm.reduce_scatter(buffer.view(0, 100), buffer)
    except CommError as error:
        part = said.with_suffix(".part")
        part.write_text(str(error))
        part.rename(said)


def test_a_peer_that_is_only_late_is_not_named(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with (
        RankPool(3, comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S) as pool,
        pytest.raises(LaunchError) as caught,
    ):
        pool.run(one_dies_and_one_is_late, said)
    assert caught.value.value == (1, -9)
    assert "rank 1" in str(caught.value)
    assert "ranks [1] did not take part" in said.read_text()


def stopped() -> CommTimeout:
    with RankPool(3, comm_timeout_s=LIMIT_S, grace_s=LIMIT_S) as trio:
        return what_is_said_of_a_stopped_rank(trio)


def test_a_stopped_peer_is_named_within_the_time_limit(timeouts: tuple[Future[CommTimeout], ...]) -> None:
    error = timeouts[0].result()
    assert CALL in str(error)
    assert "stopped or dead? It last entered #1 barrier" in str(error)
    # Of the others one has said this, and one may be late.
    assert re.search(r"ranks \[(0, )?1(, 2)?\] did not answer and were killed", "\n".join(error.__notes__))


def other_way(comm: Communicator, debug: bool) -> None:
    comm = RecordingCommunicator(comm, debug=debug, watch_s=WATCH_S)
    buffer = comm.accelerator.allocate(60, DType.FLOAT32)
    comm.barrier()
    if comm.rank == 1:
        comm.all_gather(buffer, buffer.view(30, 30))
    else:
        comm.all_reduce(buffer, label="norm")


def parted() -> CommTimeout:
    with RankPool(2, comm_timeout_s=LIMIT_S, grace_s=PATIENCE_S) as pair, pytest.raises(CommTimeout) as caught:
        pair.run(other_way, False)
    return caught.value


@pytest.fixture(scope="module")
def timeouts() -> Iterator[tuple[Future[CommTimeout], ...]]:
    """Those of `stopped` and `parted`, which wait at the same time."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit(stopped), pool.submit(parted)


def test_another_call_is_named_after_the_time_limit(timeouts: tuple[Future[CommTimeout], ...]) -> None:
    error = timeouts[1].result()
    expected = "rank 1 called #1 all_gather 60 x float32 instead"
    if error.__dict__["rank"] == 1:
        expected = "rank 0 called #1 all_reduce sum 60 x float32 'norm' instead"
    assert expected in str(error)


def test_debug_mode_names_another_call_at_once_on_every_rank(pair: RankPool) -> None:
    with pytest.raises(CommError) as caught:
        pair.run(other_way, True)
    assert not isinstance(caught.value, CommTimeout)
    text = "ranks disagree about a collective: rank 0 called #1 all_reduce sum 60 x float32 'norm', "
    assert text + "rank 1 called #1 all_gather 60 x float32" in str(caught.value)
    assert sum(text in note for note in caught.value.__notes__) >= 2


def fails_on_one(comm: Communicator) -> int:
    if comm.rank == 1:
        raise KeyError("of rank 1")
    return os.getpid()


def test_a_worker_that_raises_is_named_and_all_are_replaced(pair: RankPool) -> None:
    before = pair.run(process_id)
    with pytest.raises(KeyError) as caught:
        pair.run(fails_on_one)
    assert "rank 1" in str(caught.value)
    assert caught.value.__dict__["rank"] == 1
    assert not set(pair.run(process_id)) & set(before)


def process_id(comm: Communicator) -> int:
    return os.getpid()


def unpicklable(comm: Communicator) -> Any:
    return lambda: None


def test_an_answer_that_does_not_pickle_is_an_error(pair: RankPool) -> None:
    with pytest.raises(LaunchError) as caught:
        pair.run(unpicklable)
    assert "pickle" in str(caught.value)


def test_ranks_that_do_not_answer_are_killed_and_replaced() -> None:
    with RankPool(2) as pool:
        before = pool.run(process_id)
        with pytest.raises(CommTimeout) as caught:
            pool.run(wait_for_a_signal, timeout_s=0.5)
        assert caught.value.value == (0, 1)
        assert all(part in str(caught.value) for part in ("0.5", "ranks [0, 1]"))
        after = pool.run(process_id)
    assert not set(before) & set(after)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def wait_for_a_signal(comm: Communicator) -> None:
    signal.pause()
