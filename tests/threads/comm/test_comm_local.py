"""What ranks as threads promise beyond the contract: strictness, traces, time limits, failure of one rank."""

from __future__ import annotations

import threading

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.local.backend import LocalCommunicator, LocalWorld
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.core.types import DType
from polyaccel.errors import CommError, CommTimeout
from polyaccel.testkit.comm.values import get, put
from polyaccel.testkit.ranks.threads import run_threads


def test_a_result_appears_in_wait_and_not_earlier() -> None:
    def body(comm: LocalCommunicator) -> None:
        own = put(comm, [comm.rank + 1.0], DType.FLOAT32)
        out = comm.allocate(2, DType.FLOAT32)
        work = comm.all_gather(out, own, async_op=True)
        comm.barrier()  # now all ranks are there
        assert work.is_done()
        assert all(value != value for value in get(comm, out))  # NaN
        work.wait()
        assert list(get(comm, out)) == [1.0, 2.0]

    run_threads(2, body)


def test_an_asynchronous_call_returns_before_the_others_arrive() -> None:
    world = LocalWorld(2, CpuAccelerator())
    first = put(world.communicators[0], [1.0], DType.FLOAT32)
    second = put(world.communicators[1], [2.0], DType.FLOAT32)
    work = world.communicators[0].all_reduce(first, async_op=True)
    assert not work.is_done()
    other = world.communicators[1].all_reduce(second, async_op=True)
    work.wait()
    assert (first.raw.item(), second.raw.item()) == (3.0, 2.0)
    other.wait()
    assert second.raw.item() == 3.0


def test_writing_an_input_before_wait_is_an_error() -> None:
    def body(comm: LocalCommunicator) -> None:
        buffer = put(comm, [1.0, 2.0], DType.FLOAT32)
        work = comm.all_reduce(buffer, async_op=True)
        buffer.fill(5.0)
        work.wait()

    with pytest.raises(CommError) as caught:
        run_threads(2, body)
    assert "all_reduce" in str(caught.value)


def test_what_an_in_place_reduce_scatter_leaves_is_poison() -> None:
    def body(comm: LocalCommunicator) -> None:
        whole = put(comm, [1.0] * 4, DType.FLOAT32)
        comm.reduce_scatter(whole.view(2 * comm.rank, 2), whole)
        left = get(comm, whole)
        assert list(left[2 * comm.rank : 2 * comm.rank + 2]) == [2.0, 2.0]
        assert sum(value != value for value in left) == 2

    run_threads(2, body)


def test_every_call_is_traced_in_order_with_its_purpose() -> None:
    def body(comm: LocalCommunicator) -> list[tuple[str, int, int | None]]:
        buffer = comm.allocate(4, DType.FLOAT32)
        comm.reduce_scatter(buffer.view(2 * comm.rank, 2), buffer, label="grads", bucket=3)
        comm.all_gather(buffer, buffer.view(2 * comm.rank, 2), label="params", bucket=5)
        part = comm.split([1])
        if part is not None:
            part.barrier()
        return [(one.collective.operation, one.collective.numel, one.collective.bucket) for one in comm.trace]

    traces = run_threads(2, body)
    assert traces[0] == [("reduce_scatter", 4, 3), ("all_gather", 4, 5), ("split", 0, None)]
    assert traces[1] == [*traces[0], ("barrier", 0, None)]


def test_ranks_that_disagree_are_named_on_every_rank() -> None:
    seen: dict[int, str] = {}

    def body(comm: LocalCommunicator) -> None:
        buffer = comm.allocate(4 + comm.rank, DType.FLOAT32)
        try:
            comm.all_reduce(buffer)
        except CommError as error:
            seen[comm.rank] = str(error)

    run_threads(2, body)
    assert set(seen) == {0, 1}
    for text in seen.values():
        assert "called all_reduce sum 4 x float32" in text
        assert "called all_reduce sum 5 x float32" in text


def test_a_time_limit_names_the_missing_rank_and_where_it_is() -> None:
    world = LocalWorld(3, CpuAccelerator(), timeout_s=0.1)
    for comm in world.communicators[:2]:
        comm.all_reduce(comm.allocate(1, DType.FLOAT32), async_op=True)
    with pytest.raises(CommTimeout) as caught:
        world.communicators[0].barrier()
    assert all(part in str(caught.value) for part in ("all_reduce", "ranks [1, 2]", "rank 1"))
    assert caught.value.missing_ranks == (1, 2)
    assert "rank 2 has called nothing" in str(caught.value)


def test_a_rank_that_raises_takes_the_others_out_of_their_waits() -> None:
    aborted = []

    def body(comm: LocalCommunicator) -> None:
        if comm.rank == 1:
            raise KeyError("the culprit")
        try:
            comm.barrier()
        except CommError as error:
            aborted.append(str(error))
            raise

    with pytest.raises(KeyError) as caught:
        run_threads(3, body)
    assert caught.value.__dict__["rank"] == 1
    assert len(aborted) == 2
    assert all("rank 1 failed: KeyError" in text for text in aborted)


def test_ranks_that_hang_outside_comm_are_reported_with_their_place() -> None:
    release = threading.Event()

    def hangs_here(comm: LocalCommunicator) -> None:
        if comm.rank == 1:
            release.wait(60)

    try:  # rank 0 has all of the time limit to end in, on a machine that others use too
        with pytest.raises(CommTimeout) as caught:
            run_threads(2, hangs_here, timeout_s=4.0)
        assert caught.value.value == (1,)
        assert "ranks [1]" in str(caught.value)
        assert "hangs_here" in str(caught.value)
    finally:
        release.set()


def test_each_thread_has_its_own_default_communicator() -> None:
    def body(comm: LocalCommunicator) -> Communicator:
        assert default_communicator() is comm
        return comm

    assert [comm.rank for comm in run_threads(3, body)] == [0, 1, 2]
    with pytest.raises(CommError) as caught:
        default_communicator()
    assert "polyaccel.init_distributed()" in str(caught.value)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    def body(comm: LocalCommunicator) -> float:
        # In bfloat16 256 + 1 is 256: adding one by one would lose every one of them.
        buffer = put(comm, [256.0 if comm.rank == 0 else 1.0], DType.BFLOAT16)
        comm.all_reduce(buffer)
        return float(get(comm, buffer)[0])

    assert run_threads(5, body) == [260.0] * 5
