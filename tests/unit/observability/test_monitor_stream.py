"""Figures reach monitors off the training thread, all of them, and no monitor stops training."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyaccel.errors import PolyaccelError
from polyaccel.observability import stream
from polyaccel.observability.metrics import Event, Monitor, StepMetrics
from polyaccel.observability.stream import MonitorStream

_LIMIT_S = 60.0


class Kept(Monitor):
    """Keeps what it is given, and which thread gave it."""

    name = "kept"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: set[threading.Thread] = set()
        self.closed = 0

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        pass

    def write_events(self, events: Iterable[Event]) -> None:
        self.threads.add(threading.current_thread())
        self.events += events

    def close(self) -> None:
        self.closed += 1


class Held(Kept):
    """Writes nothing until it is let go."""

    name = "held"

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let_go = threading.Event(), threading.Event()

    def write_events(self, events: Iterable[Event]) -> None:
        self.begun.set()
        assert self.let_go.wait(_LIMIT_S)
        super().write_events(events)


class Failing(Kept):
    name = "failing"

    def write_events(self, events: Iterable[Event]) -> None:
        raise SystemExit("no room")


def step(number: int) -> StepMetrics:
    return StepMetrics(step=number, loss=1 / number, lr=(0.1,))


def test_all_is_written_in_order_by_another_thread() -> None:
    kept = Kept()
    records = MonitorStream([kept])
    assert records.enabled
    for number in range(1, 201):
        records.write(step(number))
        records.write_events([("own", number, number)])
    assert records.flush(_LIMIT_S)
    assert [event for event in kept.events if event[0] == "loss"] == [("loss", 1 / n, n) for n in range(1, 201)]
    assert [event for event in kept.events if event[0] == "own"] == [("own", float(n), n) for n in range(1, 201)]
    assert threading.main_thread() not in kept.threads
    assert len(kept.threads) == 1
    records.close()
    records.close()
    assert kept.closed == 1


def test_nobody_waits_for_a_slow_monitor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stream, "MOST_WAITING", 5)
    kept, held = Kept(), Held()
    records = MonitorStream([held, kept])
    records.write_events([("x", 0, 0)])
    assert held.begun.wait(_LIMIT_S)
    with caplog.at_level(logging.WARNING, "polyaccel"):
        for number in range(1, 20):
            records.write_events([("x", number, number)])
            assert records._lanes[1].ask().wait(_LIMIT_S)  # the other one keeps up
    assert not records.flush(0.0)
    held.let_go.set()
    records.close()
    assert [at for _, _, at in kept.events] == list(range(20))
    assert [at for _, _, at in held.events] == [0, 16, 17, 18, 19]  # and the question, where 15 was
    assert [record.getMessage() for record in caplog.records] == [
        "monitor held is 5 records behind: the oldest are left out"
    ]


def test_a_monitor_that_fails_is_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    kept, failing = Kept(), Failing()
    records = MonitorStream([failing, kept])
    with caplog.at_level(logging.WARNING, "polyaccel"):
        for number in range(1, 4):
            records.write(step(number))
            records.flush(_LIMIT_S)
        records.close()
    assert [record.getMessage() for record in caplog.records] == ["monitor failing failed and is dropped: no room"]
    assert failing.closed == kept.closed == 1
    assert {at for _, _, at in kept.events} == {1, 2, 3}
    assert not MonitorStream([]).enabled


def test_one_that_does_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    records = MonitorStream([held], limit_s=0.01)
    records.write(step(1))
    with caplog.at_level(logging.WARNING, "polyaccel"):
        records.close()
    assert "held has not ended and is left behind" in caplog.text
    held.let_go.set()


@pytest.mark.parametrize("event", ["tag", ("tag", 1.0), ("tag", "much", 1), ("tag", 1.0, None)], ids=str)
def test_what_is_no_event_is_refused(event: Any) -> None:
    records = MonitorStream([Kept()])
    with pytest.raises(PolyaccelError) as caught:
        records.write_events([event])
    assert caught.value.value == event
    records.close()
    MonitorStream().write_events([event])  # where nobody writes, nobody looks


@pytest.mark.parametrize("ends", ["pass", "raise ValueError('bad batch')", "sys.exit(3)"], ids=["end", "raise", "exit"])
def test_a_process_that_ends_has_written_all(tmp_path: Path, ends: str) -> None:
    code = f"""
import sys
from pathlib import Path
from polyaccel.observability.metrics import JsonlMonitor, StepMetrics
from polyaccel.observability.stream import MonitorStream
monitor = JsonlMonitor()
monitor.open(Path({str(tmp_path)!r}), {{}})
stream = MonitorStream([monitor])
for step in range(1, 501):
    stream.write(StepMetrics(step=step, loss=0.5, lr=()))
{ends}
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 500
