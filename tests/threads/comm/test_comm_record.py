"""The recorder: traffic equals the formulas, entries say what happened, errors say where the missing ranks are."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from time import sleep
from typing import Any

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.local.backend import LocalCommunicator, LocalWorld
from polyaccel.comm.backends.local.thread_group import DictBoard
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.flight_recorder import watchdog
from polyaccel.comm.flight_recorder.record import Entry, FlightRecorder, RecordingCommunicator
from polyaccel.comm.flight_recorder.watchdog import (
    ENDED_IN_ORDER,
    Watchdog,
    WatchedProcess,
    describe_missing_ranks,
    read_notes,
)
from polyaccel.comm.host_address import start_of
from polyaccel.comm.work import Work
from polyaccel.core.types import DType
from polyaccel.errors import CommError, CommTimeout
from polyaccel.testkit.ranks.threads import run_threads


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_traffic_is_what_the_formulas_say(world_size: int) -> None:
    numel = 6

    def body(inner: LocalCommunicator) -> tuple[dict[str, float], dict[str, int]]:
        comm = RecordingCommunicator(inner, watch_s=None)
        whole, part = comm.allocate(numel * world_size, DType.FLOAT32), comm.allocate(numel, DType.FLOAT32)
        comm.all_reduce(whole)
        comm.reduce_scatter(part, whole, async_op=True).wait()
        comm.all_gather(whole, part)
        comm.all_gather(whole, part)
        comm.broadcast(part, 0)
        comm.barrier()
        return dict(comm.recorder.sent_numel), dict(comm.recorder.calls)

    others = world_size - 1
    for rank, (sent, calls) in enumerate(run_threads(world_size, body)):
        assert sent["all_reduce"] == 2 * numel * others
        assert sent["reduce_scatter"] == numel * others
        assert sent["all_gather"] == 2 * numel * others
        assert sent["broadcast"] == (numel if rank == 0 and others else 0)
        assert calls["all_gather"] == 2


def test_entries_are_numbered_by_group_and_done_after_wait() -> None:
    def body(inner: LocalCommunicator) -> list[tuple[int, int, str, bool]]:
        comm = RecordingCommunicator(inner, FlightRecorder(length=4), watch_s=None)
        buffer = comm.allocate(4, DType.FLOAT32)
        comm.barrier()
        part = comm.split([0, 1])
        assert part is not None
        part.barrier()
        done = comm.all_reduce(buffer, async_op=True)
        pending = comm.all_reduce(comm.allocate(4, DType.FLOAT32), async_op=True, label="late", bucket=9)
        done.wait()
        found = [(len(one.group), one.seq, one.collective.described(), one.done) for one in comm.recorder.entries]
        pending.wait()
        return found

    for found in run_threads(2, body):
        assert found == [  # the first barrier has left the ring of four
            (2, 1, "split [0, 1]", True),
            (2, 0, "barrier", True),
            (2, 2, "all_reduce sum 4 x float32", True),
            (2, 3, "all_reduce sum 4 x float32 bucket 9 'late'", False),
        ]


def test_debug_mode_names_both_calls_on_every_rank() -> None:
    seen: dict[int, str] = {}

    def body(inner: LocalCommunicator) -> None:
        comm = RecordingCommunicator(inner, debug=True, watch_s=None)
        buffer = comm.allocate(4, DType.FLOAT32 if comm.rank < 2 else DType.INT32)
        comm.barrier()
        try:
            comm.all_reduce(buffer)
        except CommError as error:
            seen[comm.rank] = error.message

    run_threads(3, body)
    assert seen == dict.fromkeys(
        range(3),
        "ranks disagree about a collective: rank 0 called #1 all_reduce sum 4 x float32, "
        "rank 2 called #1 all_reduce sum 4 x int32",
    )


NOW_S = 1e6


def note(seq: int, text: str, *, age_s: float = 0.0, group: str = "0,1,2", **more: Any) -> str:
    calls = {group: [seq, text, NOW_S - 605]}
    return json.dumps({"at": NOW_S - age_s, "every_s": 1.0, "stale_after_s": 15.0, "calls": calls, **more})


def process(pid: int, start: int) -> dict[str, Any]:
    return {**asdict(WatchedProcess.this()), "pid": pid, "start": start, "host": "node7"}


ELSEWHERE = {"pid": 1, "start": 1, "host": "node7", "system": "another one"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (note(41, "all_gather bucket 3"), "rank 2 last entered #41 all_gather bucket 3, 605 s ago"),
        (note(42, "barrier"), "rank 2 called #42 barrier instead"),
        (note(42, "all_reduce"), None),
        (note(43, "barrier"), "rank 2 is already at #43 barrier"),
        (note(42, "all_reduce", age_s=612), "rank 2 has not reported for 612 s: stopped or dead? It last entered #42"),
        (note(5, "barrier", group="2,3"), "rank 2 has called nothing on this group"),
        (None, "rank 2 has never reported"),
        ("null", "rank 2 has never reported"),
        ('{"at": 1', "rank 2 has never reported"),
        ('{"at": {}, "calls": []}', "rank 2 has never reported"),
        (
            note(41, "barrier", process=process(os.getpid(), 1)),
            f"rank 2 (process {os.getpid()} on node7) has ended without a word, after #41 barrier: killed",
        ),
        (
            note(41, "barrier", process=process(os.getpid(), 1), ended=ENDED_IN_ORDER),
            f"rank 2 (process {os.getpid()} on node7) has ended in order, after #41 barrier: out of data, or",
        ),
        (
            note(41, "barrier", process=ELSEWHERE, ended="uncaught ValueError"),
            "rank 2 (process 1 on node7) takes part no more, after #41 barrier: uncaught ValueError",
        ),
        (
            note(41, "barrier", process=ELSEWHERE, ended="uncaught MemoryError: 2 GiB"),
            "rank 2 (process 1 on node7) takes part no more, after #41 barrier: uncaught MemoryError: 2 GiB; give it",
        ),
        (note(42, "all_reduce", process=ELSEWHERE), None),
        (note(42, "all_reduce", process=process(os.getpid(), start_of("self"))), None),
    ],
    ids=[  # no process ids among them: every worker of a run must find the same tests
        *("behind", "another call", "the same call", "ahead", "silent", "another group", "no note"),
        *("null", "no JSON", "no note of ours", "dead", "ended in order", "gave up", "no memory", "of another host"),
        "alive",
    ],
)
def test_the_board_tells_where_a_rank_is(text: str | None, expected: str | None) -> None:
    places = told(text, (), started_s=NOW_S - 600)
    if expected is None:
        assert places == {}
    else:
        assert list(places) == [2]
        assert places[2].startswith(expected)


def told(text: str | None, missing: tuple[int, ...], *, started_s: float, is_late: bool = True) -> dict[int, str]:
    """What rank 0 is told of the others in call #42, where rank 1 is too and rank 2 has posted `text`."""
    board = DictBoard()
    board.set(0, note(42, "all_reduce"))
    board.set(1, note(42, "all_reduce"))
    if text is not None:
        board.set(2, text)
    notes = read_notes(board, 3)
    return describe_missing_ranks(
        (0, 1, 2), 0, 42, "all_reduce", notes, missing, now_s=NOW_S, started_s=started_s, is_late=is_late
    )


@pytest.mark.parametrize("text", [note(41, "barrier"), note(5, "barrier", group="2,3"), None])
def test_a_rank_that_had_no_time_to_report_is_not_blamed(text: str | None) -> None:
    assert told(text, (), started_s=NOW_S - 0.5) == {}
    assert list(told(text, (2,), started_s=NOW_S - 0.5)) == [2]


def test_a_call_that_failed_before_its_limit_is_not_explained_by_ranks_that_are_only_behind() -> None:
    assert told(note(41, "barrier"), (1,), started_s=NOW_S - 60, is_late=False) == {
        1: "rank 1 entered this call too, but did not carry it through"
    }
    assert told(note(5, "barrier", group="2,3"), (2,), started_s=NOW_S - 0.5, is_late=False) == {}
    ended = note(41, "barrier", process=process(os.getpid(), 1))
    assert list(told(ended, (1,), started_s=NOW_S - 60, is_late=False)) == [1, 2]


@pytest.mark.parametrize("named", [(), (2,)], ids=["nobody is named", "it is named"])
def test_a_rank_is_given_a_moment_to_be_seen_ended_after_its_connections_closed(
    named: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system closes a dying process's connections, which its peers are told of, before it is seen to have ended."""
    looks = iter([True] * 5)
    monkeypatch.setattr(watchdog, "is_running", lambda pid, start: pid != 7 or next(looks, False))
    board = DictBoard()
    for rank, pid in ((1, 6), (2, 7)):
        board.set(rank, note(41, "barrier", process=process(pid, 1)))
    notes = read_notes(board, 3)
    watchdog.wait_for_ends(notes, (0, 1, 2), named)
    assert watchdog.have_ended(notes, (0, 1, 2)) == (2,)


def test_a_note_fits_on_a_board_of_shared_memory_however_many_groups_there_are() -> None:
    posted: list[str] = []

    class Narrow(DictBoard):
        def set(self, rank: int, text: str) -> None:
            super().set(rank, text)
            posted.append(text)

    last = {}
    for number in range(100):
        group = tuple(range(number + 100))
        last[group] = Entry(group, Collective(Operation.BARRIER, number=number, label="a long name " * 30))
    board = Narrow()
    Watchdog(board, 3, last, 60.0).stop("done")
    assert max(map(len, posted)) < 4000
    assert read_notes(board, 4)[3].ended == "done"


def test_a_known_missing_rank_is_told_even_if_it_seems_to_be_there() -> None:
    board = DictBoard()
    board.set(1, note(42, "all_reduce", group="0,1"))
    notes = read_notes(board, 2)
    places = describe_missing_ranks((0, 1), 0, 42, "all_reduce", notes, (1,), now_s=NOW_S, started_s=NOW_S)
    assert places == {1: "rank 1 entered this call too, but did not carry it through"}


def test_a_time_limit_tells_what_the_watchdog_posted() -> None:
    world = LocalWorld(2, CpuAccelerator(), timeout_s=0.5)
    recorded = [RecordingCommunicator(comm, watch_s=1.0) for comm in world.communicators]
    board = recorded[0].board()
    assert board is not None
    try:
        work = recorded[1].all_reduce(recorded[1].allocate(3, DType.FLOAT32), async_op=True)
        while "all_reduce" not in board.read(2).get(1, ""):
            sleep(0.01)
        recorded[0].all_reduce(recorded[0].allocate(3, DType.FLOAT32), async_op=True).wait()
        with pytest.raises(CommTimeout) as caught:
            recorded[0].barrier(label="end of step")
        assert all(part in str(caught.value) for part in ("all_reduce", "float32", "rank 1"))
        assert "#1 barrier 'end of step'" in str(caught.value)
        assert caught.value.missing_ranks == (1,)
        work.wait()
    finally:
        for comm in recorded:
            comm.close()


def test_a_call_has_one_number_which_its_errors_and_its_parts_have() -> None:
    """Also what the backend makes of it, and whatever the backend calls on its own account."""
    seen: list[Collective] = []

    class Late(LocalCommunicator):
        def start(self, collective: Collective) -> Work:
            seen.append(collective)
            if collective.operation is Operation.ALL_GATHER:
                return super().start(collective)
            raise CommTimeout(f"{collective} on rank 0 timed out", missing_ranks=(1,))

        def all_gather_bytes(self, data: bytes) -> list[bytes]:
            return Communicator.all_gather_bytes(self, data)

    def body(inner: LocalCommunicator) -> None:
        recorded = RecordingCommunicator(Late(inner.rank, inner._group, inner.accelerator), watch_s=None)
        recorded.all_gather_object("x" * 4000)
        with pytest.raises(CommTimeout) as caught:
            recorded.barrier(label="step")
        assert caught.value.value == (1,)
        assert all(part in str(caught.value) for part in ("'step'", "rank 0"))
        with (
            pytest.raises(CommTimeout) as caught,
            recorded._recorded(Collective(Operation.OBJECTS)),
        ):
            recorded.inner.broadcast(recorded.allocate(3, DType.FLOAT32), 0)
        assert caught.value.value == (1,)
        assert all(part in str(caught.value) for part in ("all_gather_object", "float32", "rank 0"))
        if inner.rank == 0:
            assert [(one.operation.value, one.number) for one in seen] == [
                *[("all_gather", 0)] * 2,
                ("barrier", 1),
                ("broadcast", 2),
            ]

    run_threads(1, body)


def test_who_is_missing_is_logged_before_the_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LocalCommunicator):
        def start(self, collective: Collective) -> Work:
            raise CommError(f"{collective} failed", missing_ranks=(1,))

    inner = LocalWorld(2, CpuAccelerator(), timeout_s=5.0).communicators[0]
    recorded = RecordingCommunicator(Broken(inner.rank, inner._group, inner.accelerator), watch_s=None)
    reasons: list[str] = []

    def record(reason: str) -> str:
        reasons.append(reason)
        return "a dump was written"

    recorded.recorder.on_failure = record
    with caplog.at_level("WARNING", logger="polyaccel"), pytest.raises(CommError) as caught:
        recorded.barrier(label="step")
    assert len(reasons) == 1
    assert caught.value.missing_ranks == (1,)
    assert [record.args[0] for record in caplog.records if record.name.endswith("flight_recorder.record")] == [0]
