"""Latencies become bandwidths by the formulas of nccl-tests; what is not chosen is not recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from polyaccel.accelerators.base import NullEvent, NullStream
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.flight_recorder.log import CallKey, CommLog
from polyaccel.comm.flight_recorder.summary import as_dict, as_table, bus_factor, row_of, straggler_ms
from polyaccel.core.types import DType

BARRIER = Collective(Operation.BARRIER)


@dataclass(frozen=True)
class Clock(NullStream):
    """A stream that a test moves on by hand."""

    now_s: list[float] = field(default_factory=lambda: [0.0])

    def record(self) -> NullEvent:
        return NullEvent(self.now_s[0])


def record(log: CommLog, clock: Clock, call: Collective, milliseconds: float, world_size: int = 4) -> None:
    timing = log.begin(call, world_size)
    clock.now_s[0] += milliseconds / 1e3
    if timing is not None:
        log.end(timing)


@pytest.mark.parametrize(
    ("op", "world_size", "factor"),
    [
        ("all_reduce", 4, 1.5),
        ("all_reduce", 1, 0.0),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 2, 0.5),
        ("all_to_all", 3, 2 / 3),
        ("broadcast", 8, 1.0),
        ("send", 8, 1.0),
    ],
)
def test_bus_bandwidth_counts_what_must_move(op: str, world_size: int, factor: float) -> None:
    assert bus_factor(op, world_size) == pytest.approx(factor)


def test_latencies_are_kept_by_operation_and_size() -> None:
    clock = Clock()
    log = CommLog(lambda: clock)
    small, large = (
        Collective(Operation.ALL_REDUCE, numel=256, dtype=DType.FLOAT32),
        Collective(Operation.ALL_REDUCE, numel=1 << 20, dtype=DType.BFLOAT16),
    )
    for call, milliseconds in ((small, 1.0), (large, 4.0), (small, 3.0), (BARRIER, 0.5)):
        record(log, clock, call, milliseconds)
    found = {key: list(latencies) for key, latencies in log.latencies_ms().items()}
    assert {(key.op, key.nbytes) for key in found} == {("all_reduce", 1024), ("all_reduce", 2 << 20), ("barrier", 0)}
    assert found[CallKey("all_reduce", 1024, 4)] == pytest.approx([1.0, 3.0])
    row = row_of(CallKey("all_reduce", 2 << 20, 4), found[CallKey("all_reduce", 2 << 20, 4)])
    assert (row.count, row.mean_ms) == (1, pytest.approx(4.0))
    assert row.algorithm_gbps == pytest.approx((2 << 20) * 8 / 4e-3 / 1e9)
    assert row.bus_gbps == pytest.approx(1.5 * row.algorithm_gbps)
    log.reset()
    assert not log.latencies_ms()


def test_many_calls_are_read_before_their_points_pile_up() -> None:
    clock = Clock()
    log = CommLog(lambda: clock)
    for _ in range(1000):
        record(log, clock, BARRIER, 1.0)
    assert len(log._unread) < 256
    assert len(log.latencies_ms()[CallKey("barrier", 0, 4)]) == 1000


def test_only_chosen_operations_are_recorded_and_said() -> None:
    clock, said = Clock(), list[tuple[CallKey, float]]()
    log = CommLog(lambda: clock, frozenset({"all_gather"}), lambda key, ms: said.append((key, ms)))
    record(log, clock, Collective(Operation.ALL_REDUCE, numel=4, dtype=DType.FLOAT32), 1.0)
    record(log, clock, Collective(Operation.ALL_GATHER, numel=4, dtype=DType.FLOAT32), 2.0)
    assert list(log.latencies_ms()) == [CallKey("all_gather", 16, 4)]
    assert said == [(CallKey("all_gather", 16, 4), pytest.approx(2.0))]


def test_callers_are_counted_apart() -> None:
    clock = Clock()
    log = CommLog(lambda: clock, callers=True)
    record(log, clock, BARRIER, 1.0)
    (key,) = log.latencies_ms()
    assert key.caller == "record"


def test_time_beyond_the_shortest_of_each_call_is_the_stragglers() -> None:
    assert straggler_ms([3.0, 5.0], [[3.0, 5.0], [1.0, 9.0]]) == pytest.approx(2.0)
    assert straggler_ms([3.0, 5.0], [[3.0, 5.0], [1.0]]) is None


def test_the_table_is_sorted_and_fits_the_terminal() -> None:
    rows = [
        row_of(CallKey("all_reduce", 4 << 30, 4), [100.0] * 9_999),
        row_of(CallKey("all_gather_object", 0, 4), [1.0]),
    ]
    head, first, second = as_table(reversed(rows)).splitlines()
    assert max(map(len, (head, first, second))) <= 80
    assert first.split()[:3] == ["all_reduce", str(4 << 30), "9999"]
    assert second.startswith("all_gather_object")
    assert as_dict(rows)["all_reduce"][4 << 30]["count"] == 9_999
