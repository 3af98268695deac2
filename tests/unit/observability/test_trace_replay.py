"""What would be gained by a change, on made-up traces whose replay can be done by hand; tiers in the report."""

from __future__ import annotations

import pytest

from polyaccel.observability.traces.analysis import meetings_of
from polyaccel.observability.traces.chrome import Span
from polyaccel.observability.traces.replay import Change, own_work_s, replayed_s, what_if
from polyaccel.observability.traces.report import report_of


def meeting(number: int, came_s: float, ended_s: float, waited_s: float, operation: str = "all_reduce") -> Span:
    more = {"group": [0, 1], "number": number, "waited_s": waited_s, "bucket": number, "label": "gradients"}
    return Span("collective", operation, came_s, ended_s, more)


TRACE = {
    0: [
        Span("step", "step 1", 0.0, 10.0, {"step": 1}),
        meeting(0, 2.0, 7.0, 4.0),  # does a second's work beside it, then waits from 3 to 7
        Span("unit", "again layer", 8.0, 9.0),
    ],
    1: [
        Span("step", "step 1", 0.0, 10.0, {"step": 1}),
        meeting(0, 6.0, 7.0, 1.0),  # comes at 6, and the transfer takes until 7
    ],
}


def test_a_replay_without_a_change_takes_what_it_took() -> None:
    assert own_work_s(TRACE) == {0: 6.0, 1: 9.0}
    assert replayed_s(TRACE, meetings_of(TRACE), Change("")) == pytest.approx(10.0)


def test_the_changes_by_hand() -> None:
    """Without the transfer both go on at 6. With rank 1 at two thirds of its work it comes at 4; the transfer ends at
    5, rank 1 at 7 and rank 0, which has 3 seconds left, at 8. Without the second that rank 0 does again rank 1 ends
    last, at 10, as before."""
    same, changes = what_if(TRACE)
    assert same.seconds == pytest.approx(10.0)
    assert {one.what: one.seconds for one in changes} == {
        "rank 1 works as fast as the median of the others": pytest.approx(8.0),
        "communication takes no time": pytest.approx(9.0),
        "layer is not computed again in backward": pytest.approx(10.0),
    }
    assert [one.seconds for one in changes] == sorted(one.seconds for one in changes)


def test_messages_wait_as_they_did() -> None:
    trace = {rank: [Span("step", "step 1", 0.0, 4.0), meeting(0, 1.0, 3.0, 2.0, "batch")] for rank in (0, 1)}
    assert replayed_s(trace, meetings_of(trace), Change("", transfer=0.0)) == pytest.approx(4.0)
    assert own_work_s(trace) == {0: 4.0, 1: 4.0}


def test_several_meetings_under_way_at_once() -> None:
    """Two gathers were begun before the first was waited for."""
    trace = {
        0: [Span("step", "step 1", 0.0, 6.0), meeting(0, 0.0, 3.0, 2.0), meeting(1, 0.5, 5.0, 1.0)],
        1: [Span("step", "step 1", 0.0, 6.0), meeting(0, 0.5, 3.0, 0.5), meeting(1, 2.0, 5.0, 2.0)],
    }
    meetings = meetings_of(trace)
    assert replayed_s(trace, meetings, Change("")) == pytest.approx(6.0)
    assert replayed_s(trace, meetings, Change("", transfer=0.0)) < 6.0
    assert replayed_s(trace, meetings, Change("", work={0: 0.0, 1: 0.0}, transfer=0.0)) == pytest.approx(0.0)


def test_the_report_tells_meetings_tiers_and_gains() -> None:
    moved = {"tier": "nvme", "nbytes": 3 << 20, "waited_s": 0.5}
    trace = {**TRACE, 0: [*TRACE[0], Span("tier", "nvme: read group 0", 9.0, 9.5, moved)]}
    said = report_of(trace)
    assert "  rank 0, nvme: waited 500.0 ms a step for 3.0 MiB" in said
    assert "  all_reduce gradients of bucket 0: rank 1 came last 1 of 1 times, 4000.0 ms a step" in said
    assert "what would be gained (the trace replayed without a change: 10000.0 ms a step)" in said
    assert "  rank 1 works as fast as the median of the others: 8000.0 ms a step (20.0 % less)" in said
    assert "estimate: each rank does its own work in the same order" in said
