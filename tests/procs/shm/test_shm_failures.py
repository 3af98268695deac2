"""Over shared memory too, a rank that dies, stops or goes another way is named by the others, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from failing_ranks import (
    LIMIT_S,
    PATIENCE_S,
    what_is_said_of_a_stopped_rank,
    what_survivors_say_of_a_killed_rank,
)

from polyaccel.comm.backends.shm.communicator import ShmCommunicator
from polyaccel.comm.backends.shm.memory import Heap, Member, PeerFile, open_peer
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, LaunchError
from polyaccel.testkit.ranks.procs import RankPool

NEVER_S = 500.0
OTHER_BUCKET = " in other parts or for another bucket"
KILLS = int(os.environ.get("POLYACCEL_SHM_KILLS", "5"))


@pytest.fixture(scope="module")
def trio() -> Iterator[RankPool]:
    with RankPool(3, comm_timeout_s=PATIENCE_S, grace_s=PATIENCE_S, backend="shm") as pool:
        yield pool


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test, whatever it kills, leaves a segment behind."""
    before = set(Path("/dev/shm").iterdir())
    yield
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "polyaccel" in path.name}


def test_a_killed_peer_is_named_by_the_survivors(trio: RankPool) -> None:
    said = what_survivors_say_of_a_killed_rank(trio)
    assert "ranks [1] did not take part (their processes have ended)" in said


def test_a_stopped_peer_is_named_within_the_time_limit() -> None:
    with RankPool(3, comm_timeout_s=LIMIT_S, backend="shm") as trio:
        what_is_said_of_a_stopped_rank(trio)


def other_way(comm: Communicator, kind: str) -> None:
    buffer = comm.allocate(60, DType.FLOAT32)
    if comm.rank != 1:
        comm.all_reduce(buffer, label="norm")
    elif kind == "op":
        comm.all_gather(buffer, buffer.view(20, 20))
    elif kind == "reduction":
        comm.all_reduce(buffer, ReduceOp.MAX)
    elif kind == "size":
        comm.all_reduce(buffer.view(0, 59))
    elif kind == "bucket":
        comm.all_reduce(buffer, bucket=1)
    elif kind == "both":
        comm.all_reduce(buffer, ReduceOp.MAX, bucket=1)
    else:
        comm.all_reduce(comm.allocate(60, DType.INT32))


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        ("op", "all_gather 60 x float32"),
        ("reduction", "all_reduce max 60 x float32"),
        ("size", "all_reduce sum 59 x float32"),
        ("type", "all_reduce sum 60 x int32"),
        ("bucket", f"all_reduce sum 60 x float32{OTHER_BUCKET}"),
        ("both", "all_reduce max 60 x float32"),
    ],
)
def test_another_call_is_named_at_once_on_every_rank(trio: RankPool, kind: str, called: str) -> None:
    with pytest.raises(CommError) as caught:
        trio.run(other_way, kind)
    everybody = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f" all_reduce sum 60 x float32 'norm' on rank 0 failed: rank 1 called {called} instead" in everybody
    assert f" all_reduce sum 60 x float32 'norm' on rank 2 failed: rank 1 called {called} instead" in everybody
    own = called.removesuffix(OTHER_BUCKET) + (" bucket 1" if kind in ("bucket", "both") else "")
    assert f" {own} on rank 1 failed: rank 0 called all_reduce sum 60 x float32 instead" in everybody


def goes_on_after_an_error(comm: Communicator) -> str:
    """What the others hear when rank 1 leaves, and what they hear of the group from then on."""
    if comm.rank == 1:
        comm.close()
        return ""
    with pytest.raises(CommError) as caught:
        comm.barrier()
    assert caught.value.value == (1,)
    assert "ranks [1]" in str(caught.value)
    with pytest.raises(CommError) as caught:
        comm.all_reduce(comm.allocate(3, DType.FLOAT32))
    assert caught.value.value == (1,)
    assert "all_reduce" in str(caught.value)
    return str(caught.value)


def test_a_rank_that_leaves_is_not_waited_for(trio: RankPool) -> None:
    answers = trio.run(goes_on_after_an_error)
    assert [bool(answer) for answer in answers] == [True, False, True]
    trio.close()


def work_without_end(comm: Communicator) -> None:
    """Collectives of all sizes and kinds until somebody is missing."""
    rng = Random(5)
    buffer = comm.allocate(1 << 18, DType.FLOAT32)
    while True:
        numel = comm.world_size * rng.randrange(1, (1 << 18) // comm.world_size)
        whole = buffer.view(0, numel)
        own = whole.view(comm.rank * numel // comm.world_size, numel // comm.world_size)
        work = comm.all_reduce(whole, async_op=rng.random() < 0.5)
        comm.all_gather(whole, own)
        work.wait()


@pytest.mark.timeout(300 + 10 * KILLS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_kills_at_random_moments_never_hang_the_others(world_size: int) -> None:
    rng = Random(world_size)
    limits = {"comm_timeout_s": NEVER_S, "grace_s": PATIENCE_S}
    with RankPool(world_size, backend="shm", **limits) as pool, ThreadPoolExecutor(1) as runner:
        for _ in range(-(-KILLS // 2)):
            pool.run(nothing)
            pids = pool.pids
            running = runner.submit(pool.run, work_without_end)
            time.sleep(rng.uniform(0.0, 0.1))  # the random moment, not a wait for anything
            victim = rng.randrange(world_size)
            os.kill(pids[victim], signal.SIGKILL)
            with pytest.raises(LaunchError) as caught:
                running.result(timeout=100)
            assert str(victim) in str(caught.value)
            notes = "\n".join(caught.value.__notes__)
            assert "did not answer" not in notes
            assert notes.count("raised CommError") == world_size - 1
            assert f"ranks [{victim}] did not take part" in notes


def nothing(comm: Communicator) -> None:
    comm.barrier()


def test_a_rank_that_died_before_its_task_is_named(trio: RankPool) -> None:
    trio.run(nothing)
    os.kill(trio.pids[1], signal.SIGKILL)
    trio._workers[1].join(20.0)
    with pytest.raises(LaunchError) as caught:
        trio.run(nothing)
    assert caught.value.value == (1, -9)
    assert "rank 1" in str(caught.value)


def test_a_stranger_s_memory_is_refused(tmp_path: Path) -> None:
    heap = Heap()
    mine = Member.of_this_process(heap)
    assert PeerFile(1, mine).file >= 0
    with pytest.raises(CommError) as caught:
        PeerFile(1, Member(mine.pid, mine.start, mine.file, "0" * 32, mine.host))
    assert "rank 1" in str(caught.value)
    os.fchmod(heap.file, 0o644)
    with pytest.raises(CommError) as caught:
        open_peer(mine.pid, mine.file, "a file")
    assert caught.value.value == (0, 420)
    assert "644" in str(caught.value)
    with pytest.raises(CommError) as caught:
        open_peer(mine.pid, 999_999, "a file")
    assert "POLYACCEL_COMM=gloo" in str(caught.value)


def test_there_is_no_room_without_end() -> None:
    with pytest.raises(CommError) as caught:
        Heap().allocate(1 << 60)
    assert "POLYACCEL_COMM=gloo" in str(caught.value)


def own_file_descriptors(comm: Communicator) -> Any:
    assert isinstance(comm, ShmCommunicator)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        comm.allocate(100_000, DType.FLOAT32)
        part = comm.split(list(range(comm.world_size)))
        assert part is not None
        shared = part.allocate_shared(1000, DType.FLOAT32)
        assert shared is not None
        part.close()
    return len(os.listdir("/proc/self/fd")) - before


def test_buffers_and_groups_hold_no_descriptors(trio: RankPool) -> None:
    assert trio.run(own_file_descriptors) == [0, 0, 0]
