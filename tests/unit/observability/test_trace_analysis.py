"""Traces as files, and what is said of them: on a made-up run whose times are known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polyaccel.cli.main import main
from polyaccel.errors import PolyaccelError
from polyaccel.observability.traces.analysis import critical_path, exposed_s, meetings_of
from polyaccel.observability.traces.chrome import ClockOffset, Span, clock_offsets, kept_events, read_trace, write_trace
from polyaccel.observability.traces.report import report_of
from polyaccel.testkit.ranks.threads import run_threads


def call(number: int, begin_s: float, end_s: float, waited_s: float, operation: str = "all_reduce") -> Span:
    of_call = {"group": [0, 1], "number": number, "waited_s": waited_s, "bucket": number}
    what = {"numel": 8, "dtype": "float32", "label": "gradients"}
    return Span("collective", operation, begin_s, end_s, {**of_call, **what})


RANKS = {
    0: [
        Span("step", "step 1", 0.0, 10.0, {"step": 1}),
        Span("phase", "forward", 0.0, 2.0),
        Span("phase", "backward", 2.0, 8.0),
        call(0, 3.0, 6.0, 2.5),  # waits from 3.5 on for rank 1, who comes at 5.5
        call(1, 7.0, 8.0, 0.5),  # is waited for from 7.5 to 8, by both
        Span("phase", "update", 8.0, 10.0),
    ],
    1: [
        Span("step", "step 1", 0.0, 9.5, {"step": 1}),
        Span("phase", "forward", 0.0, 4.0),
        Span("phase", "backward", 4.0, 8.0),
        call(0, 5.5, 6.0, 0.5),
        call(1, 6.5, 8.0, 0.5),
        Span("phase", "update", 8.0, 9.5),
        Span("unit", "forward layers.0", 1.0, 3.0),
    ],
}
OFFSETS = (ClockOffset(0.0, 0.0), ClockOffset(-5.0, 0.001))
"""Rank 1's clock is five seconds fast."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    told = [
        [replace(one, begin_s=one.begin_s + 100 - by.ahead_s, end_s=one.end_s + 100 - by.ahead_s) for one in own]
        for own, by in zip(RANKS.values(), OFFSETS, strict=True)
    ]
    write_trace(path, (0, 1), told, OFFSETS)
    return path


def overlaps(events: list[dict[str, Any]]) -> list[str]:
    """The complete events of a file that overlap one of their row and do not lie in it, in its order and in whole
    nanoseconds, as Perfetto takes them."""
    ends_ns: dict[tuple[int, int], list[int]] = {}
    found = []
    for event in events:
        if event["ph"] == "X":
            begin_ns, length_ns = round(1e3 * event["ts"]), round(1e3 * event["dur"])
            open_ = ends_ns.setdefault((event["pid"], event["tid"]), [])
            while open_ and open_[-1] <= begin_ns:
                open_.pop()
            if open_ and open_[-1] < begin_ns + length_ns:
                found.append(event["name"])
            open_.append(begin_ns + length_ns)
    return found


def test_a_file_is_read_as_it_was_written_on_one_clock(file: Path) -> None:
    read = read_trace(file)
    for rank, spans in RANKS.items():
        wanted = sorted(spans, key=lambda span: span.begin_s)
        assert [(one.kind, one.begin_s, one.end_s) for one in read[rank]] == [
            (one.kind, pytest.approx(one.begin_s, abs=1e-5), pytest.approx(one.end_s, abs=1e-5)) for one in wanted
        ]


def test_the_file_has_the_form_of_trace_events(file: Path) -> None:
    """What Chrome's document of its Trace Event Format asks of events. `make test-traces` has Perfetto's own parser."""
    whole = json.loads(file.read_text())
    assert overlaps(whole["traceEvents"]) == []
    begun: set[tuple[int, str]] = set()
    for event in (one for one in whole["traceEvents"] if "ts" in one):
        assert {"name", "cat", "pid", "tid", "ts", "ph"} <= event.keys()
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "b":
            assert (event["pid"], event["id2"]["local"]) not in begun
            begun.add((event["pid"], event["id2"]["local"]))
        else:
            assert event["ph"] == "e"
            begun.remove((event["pid"], event["id2"]["local"]))
    assert begun == set()
    names = {event["args"].get("name") for event in whole["traceEvents"] if event["ph"] == "M"}
    assert {"rank 0", "rank 1", "collectives"} <= names
    rows = {
        name: [(one["pid"], one["tid"]) for one in whole["traceEvents"] if one["name"] == name]
        for name in ("thread_name", "thread_sort_index")
    }
    assert rows["thread_name"] == rows["thread_sort_index"], "or the row whose number is the rank's comes first"


def test_slices_that_meet_do_not_overlap(tmp_path: Path) -> None:
    """Steps without a gap, each with a phase of its whole length in which another one lies, which is told of first."""
    moments = [1.79e9 + 0.0123457 * at for at in range(300)]
    spans = []
    for begin_s, end_s in pairwise(moments):
        inner = Span("phase", "inner", begin_s, (begin_s + end_s) / 2)
        spans += [inner, Span("phase", "outer", begin_s, end_s), Span("step", "step", begin_s, end_s)]
    write_trace(tmp_path / "trace.json", (0,), [spans], (ClockOffset(1 / 3, 0.0),))
    assert overlaps(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == []


def test_what_a_profiler_tells_nests_in_its_rows(tmp_path: Path) -> None:
    """A call with one of its own at its end; and a message that is under way while its thread goes on."""
    call = {"ph": "X", "pid": 4, "tid": 7, "name": "call", "ts": 5176618.25, "dur": 1.696}
    own = {**call, "name": "own", "ts": 5176618.859, "dur": 1.087}
    message = {**call, "name": "message", "ts": 5176619.5, "dur": 40.0}
    kept = kept_events("torch", [own, message, call], 1.79e15 + 1 / 3)
    path = tmp_path / "trace.json"
    write_trace(path, (0,), [[Span("step", "step", 1.79e9, 1.79e9 + 60)]], OFFSETS[:1], {0: kept})
    events = json.loads(path.read_text())["traceEvents"]
    assert overlaps(events) == []
    rows = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    found = [(one["name"], rows[one["tid"]], one["dur"]) for one in events if one.get("cat") == "profiler"]
    assert found == [("call", "torch: 7", 1.696), ("own", "torch: 7", 1.087), ("message", "torch: 7 (2)", 40.0)]


def test_who_was_late_and_who_waited() -> None:
    first, second = meetings_of(RANKS)
    assert (first.number, first.last, first.late_s) == (0, 1, 2.5)
    assert (second.number, second.last, second.late_s) == (1, 0, 0.5)
    assert exposed_s(RANKS[0], 0.0, 10.0) == pytest.approx(3.0)
    assert exposed_s(RANKS[1], 0.0, 10.0) == pytest.approx(1.0)
    overlapping = [call(0, 0.0, 4.0, 3.0), call(1, 1.0, 5.0, 3.0)]
    assert exposed_s(overlapping, 0.0, 10.0) == pytest.approx(4.0)


def test_the_critical_path_goes_through_the_late_rank() -> None:
    """Rank 1's forward, and its backward until it comes to the first meeting, hold up everybody; then rank 0's
    backward, until it comes to the second; then rank 0's update."""
    path = [(part.rank, part.what, round(part.seconds, 6)) for part in critical_path(RANKS, 0.0)]
    assert path == [
        (1, "forward", 4.0),
        (1, "backward", 1.5),
        (0, "communication", 0.5),
        (0, "backward", 1.0),
        (0, "communication", 1.0),
        (0, "update", 2.0),
    ]
    assert sum(seconds for _, _, seconds in path) == pytest.approx(10.0)


def test_the_command_says_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 steps of 2 ranks, 10000.0 ms each")
    assert "rank 0: 3000.0 ms a step (30.0 %)" in said
    assert "rank 1: last at 1 of 2, 2500.0 ms a step; at most 2500.0 ms, all_reduce 0 of bucket 0" in said
    assert "forward on rank 1: 4000.0 ms a step (40.0 %)" in said
    assert main(["trace", str(tmp_path / "nothing")]) == 1
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    assert main(["trace", str(tmp_path / "other.json")]) == 1
    assert "is not a trace that polyaccel wrote" in capsys.readouterr().err
    assert report_of({0: []}) == "the trace has no step"
    with pytest.raises(PolyaccelError):
        read_trace(tmp_path / "other.json")


def test_clocks_of_one_host_agree() -> None:
    for offsets in run_threads(3, clock_offsets):
        assert offsets[0] == ClockOffset(0.0, 0.0)
        assert len(offsets) == 3
        for one in offsets[1:]:
            assert abs(one.ahead_s) <= one.error_s
