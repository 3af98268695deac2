"""The communication log over real collectives: what was called is counted, and what stragglers cost is seen."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from polyaccel import comm
from polyaccel.accelerators.base import NullEvent, NullStream
from polyaccel.comm.backends.local.backend import LocalCommunicator
from polyaccel.comm.default import set_thread_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.flight_recorder.summary import start_log
from polyaccel.config import load_config
from polyaccel.core.types import DType
from polyaccel.engine.runtime import build
from polyaccel.errors import CommError, ConfigError
from polyaccel.testkit.ranks.threads import run_threads


def recording(inner: LocalCommunicator, **options: Any) -> RecordingCommunicator:
    communicator = RecordingCommunicator(inner, watch_s=None)
    if options.pop("log", True):
        start_log(communicator, **options)
    set_thread_communicator(communicator)
    return communicator


def test_every_call_is_counted_once_by_operation_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    def body(inner: LocalCommunicator) -> Any:
        communicator = recording(inner)
        buffer, part = communicator.allocate(30, DType.FLOAT32), communicator.allocate(10, DType.FLOAT32)
        for _ in range(3):
            communicator.all_reduce(buffer)
        work = communicator.reduce_scatter(part, buffer, async_op=True, label="grads")
        work.wait()
        work.wait()
        communicator.all_gather(buffer, part)
        group = communicator.split([0, 2])
        if group is not None:
            group.all_reduce(part)
        figures = comm.log_summary(return_dict=True)
        comm.reset_log()
        assert communicator.log is not None
        assert not communicator.log.latencies_ms()
        return figures

    for rank, figures in enumerate(run_threads(3, body)):
        counts = {(op, nbytes): row["count"] for op, sizes in figures.items() for nbytes, row in sizes.items()}
        assert counts.pop(("all_reduce", 40), 0) == (1 if rank != 1 else 0)
        assert counts == {("all_reduce", 120): 3, ("reduce_scatter", 120): 1, ("all_gather", 120): 1, ("split", 0): 1}
        row = figures["all_reduce"][120]
        assert row["bus_gbps"] == pytest.approx(row["algorithm_gbps"] * 4 / 3)
        assert row["total_ms"] == pytest.approx(3 * row["mean_ms"])
    printed = capsys.readouterr().out
    assert printed.count("operation") == 1, "only rank 0 prints"
    assert "reduce_scatter" in printed


class Clock(NullStream):
    """A stream that tells the times it is given, in milliseconds."""

    def __init__(self, *times_ms: float) -> None:
        self._times_ms = iter(times_ms)

    def record(self) -> NullEvent:
        return NullEvent(next(self._times_ms) / 1e3)


def test_waiting_for_a_late_rank_is_the_stragglers_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 comes to the second call 90 ms before rank 1, which finds it there."""
    clocks = [Clock(0, 10, 20, 120), Clock(0, 12, 110, 120)]

    def body(inner: LocalCommunicator) -> Any:
        communicator = recording(inner, ops=["reduce_scatter_tensor", "all_reduce"])
        assert communicator.log is not None
        communicator.log.current_stream = lambda: clocks[inner.rank]
        buffer = communicator.allocate(4, DType.FLOAT32)
        communicator.all_reduce(buffer)
        communicator.all_reduce(buffer)
        communicator.barrier()
        return comm.log_summary(show_straggler=True, return_dict=True)

    figures = run_threads(2, body)
    assert [set(one) for one in figures] == [{"all_reduce"}] * 2, "a barrier was not chosen"
    waited, late = (one["all_reduce"][16] for one in figures)
    assert waited["straggler_ms"] == pytest.approx(90.0)
    assert late["straggler_ms"] == pytest.approx(2.0)
    assert waited["total_ms"] == pytest.approx(110.0)
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["straggler", "ms"]
    assert row.split()[-1] == "90.00"


def test_the_config_starts_the_log() -> None:
    def body(inner: LocalCommunicator) -> Any:
        communicator = recording(inner, log=False)
        section = {"enabled": True, "prof_all": False, "prof_ops": ["barrier"], "debug": True}
        build(load_config({"train_batch_size": 1, "comms_logger": section}))
        communicator.barrier()
        communicator.all_reduce(communicator.allocate(4, DType.FLOAT32))
        return comm.log_summary(return_dict=True)

    (figures,) = run_threads(1, body)
    caller = body.__qualname__ if sys.version_info >= (3, 11) else "body"
    assert list(figures) == ["barrier by " + caller]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"enabled": True, "prof_all": False}, "comms_logger"),
        ({"enabled": True, "prof_ops": ["all_reduced"]}, "comms_logger.prof_ops[0]"),
    ],
)
def test_a_log_of_nothing_is_refused(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "comms_logger": section})
    assert caught.value.problems[0].key == key


def test_without_a_log_the_summary_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    def body(inner: LocalCommunicator) -> Any:
        recording(inner, log=False)
        return comm.log_summary(), comm.log_summary(return_dict=True)

    assert run_threads(1, body) == [(None, {})]
    assert '"comms_logger": {"enabled": true}' in capsys.readouterr().out


def test_only_a_recorded_communicator_has_a_log() -> None:
    def body(inner: LocalCommunicator) -> None:
        with pytest.raises(CommError) as caught:
            start_log(inner)
        assert "LocalCommunicator" in str(caught.value)

    run_threads(1, body)
