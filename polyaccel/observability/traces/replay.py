"""What would be: a trace replayed with a change, by the work and the meetings that it has.

Each rank's own work is what it did outside its waits. In the replay a rank does its work in the same order, comes to
each collective when it has done what it had done before it, and continues behind a wait when the last rank has come and
the transfer has taken what it took in the trace. So a change on one rank reaches the others as they wait for it, and
waits that it only moves are not counted as gained. Messages of a pipeline count as work: they wait as long as they did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from polyaccel.observability.traces.analysis import MESSAGES, Trace, TracedMeeting, meetings_of
from polyaccel.observability.traces.chrome import AGAIN, Span

_LEAST_WAIT_S = 1e-6


@dataclass(frozen=True, slots=True)
class Change:
    """What is otherwise: `transfer` multiplies the time of each transfer, `work` that of a rank's own work, and the
    work inside the spans of `without` is left out."""

    what: str
    transfer: float = 1.0
    work: Mapping[int, float] = field(default_factory=dict)
    without: Callable[[Span], bool] = lambda span: False


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The seconds of the steps with a change."""

    what: str
    seconds: float


@dataclass(slots=True)
class _Moment:
    """Where a rank comes to a meeting, or has waited for it."""

    at_s: float
    meeting: int
    is_wait: bool
    waited_s: float


def what_if(trace: Trace) -> tuple[WhatIf, list[WhatIf]]:
    """The steps replayed as they were, and with each change that there is something of, best first."""
    meetings = meetings_of(trace)
    same = WhatIf("as it was", replayed_s(trace, meetings, Change("as it was")))
    changes = [Change("communication takes no time", transfer=0.0)] if meetings else []
    own_s = own_work_s(trace)
    if len(own_s) > 1:
        slowest = max(own_s, key=lambda rank: own_s[rank])
        usual_s = median(seconds for rank, seconds in own_s.items() if rank != slowest)
        if 0 < usual_s < own_s[slowest]:
            what = f"rank {slowest} works as fast as the median of the others"
            changes.append(Change(what, work={slowest: usual_s / own_s[slowest]}))
    again = _longest_recomputation(trace)
    if again is not None:
        name = again.removeprefix(AGAIN)
        changes.append(Change(f"{name} is not computed again in backward", without=lambda span: span.name == again))
    found = [WhatIf(change.what, replayed_s(trace, meetings, change)) for change in changes]
    return same, sorted(found, key=lambda one: one.seconds)


def own_work_s(trace: Trace) -> dict[int, float]:
    """How long each rank did its own work in the steps, by rank."""
    found = {}
    for rank, spans in trace.items():
        bounds = _bounds(spans)
        if bounds is not None:
            waits = [
                (span.end_s - span.more["waited_s"], span.end_s)
                for span in spans
                if span.kind == "collective" and span.more.get("operation", span.name) not in MESSAGES
            ]
            found[rank] = bounds[1] - bounds[0] - _covered_s(waits, *bounds)
    return found


def replayed_s(trace: Trace, meetings: Sequence[TracedMeeting], change: Change) -> float:
    """How long the steps take with `change`, from the first rank's begin to the last one's end."""
    bounds = {rank: ends for rank, spans in trace.items() if (ends := _bounds(spans)) is not None}
    if not bounds:
        return 0.0
    begin_s = min(begin for begin, _ in bounds.values())
    moments = {rank: _moments(rank, meetings, *bounds[rank]) for rank in bounds}
    left_out = {rank: [(one.begin_s, one.end_s) for one in trace[rank] if change.without(one)] for rank in bounds}
    transfers = [_transfer_s(meeting) for meeting in meetings]
    expected = [0] * len(meetings)
    for own in moments.values():
        for moment in own:
            expected[moment.meeting] += not moment.is_wait
    came: list[list[float]] = [[] for _ in meetings]
    now = {rank: bounds[rank][0] - begin_s for rank in bounds}
    """Where each rank is in the replay, and up to where it has been taken in the trace."""
    until = {rank: bounds[rank][0] for rank in bounds}
    next_at = dict.fromkeys(bounds, 0)

    def work(rank: int, to_s: float) -> None:
        from_s, until[rank] = until[rank], max(until[rank], to_s)
        if to_s > from_s:
            seconds = to_s - from_s - _covered_s(left_out[rank], from_s, to_s)
            now[rank] += seconds * change.work.get(rank, 1.0)

    is_moving = True
    while is_moving:
        is_moving = False
        for rank, own in moments.items():
            while next_at[rank] < len(own):
                moment = own[next_at[rank]]
                if moment.is_wait and len(came[moment.meeting]) < expected[moment.meeting]:
                    break
                work(rank, moment.at_s)
                if moment.is_wait:
                    done_s = max(came[moment.meeting], default=0.0) + change.transfer * transfers[moment.meeting]
                    now[rank] = max(now[rank], done_s)
                    until[rank] = max(until[rank], moment.at_s + moment.waited_s)
                else:
                    came[moment.meeting].append(now[rank])
                next_at[rank] += 1
                is_moving = True
    for rank in bounds:
        work(rank, bounds[rank][1])
    return max(now.values())


def _moments(rank: int, meetings: Sequence[TracedMeeting], begin_s: float, end_s: float) -> list[_Moment]:
    """What a rank has to do with meetings, in order of time."""
    found = []
    for number, meeting in enumerate(meetings):
        if rank not in meeting.came_s or not begin_s <= meeting.came_s[rank] <= end_s:
            continue
        found.append(_Moment(meeting.came_s[rank], number, False, 0.0))
        waited_s = meeting.waited_s[rank]
        found.append(_Moment(meeting.ended_s[rank] - waited_s, number, True, waited_s))
    return sorted(found, key=lambda one: (one.at_s, one.is_wait))


def _transfer_s(meeting: TracedMeeting) -> float:
    """How long after the last arrival a meeting ended: for the first rank that had waited; 0 where none had."""
    last_s = meeting.came_s[meeting.last]
    waited = [meeting.ended_s[rank] - last_s for rank, seconds in meeting.waited_s.items() if seconds > _LEAST_WAIT_S]
    return max(0.0, min(waited, default=0.0))


def _bounds(spans: Sequence[Span]) -> tuple[float, float] | None:
    steps = [span for span in spans if span.kind == "step"]
    return (min(span.begin_s for span in steps), max(span.end_s for span in steps)) if steps else None


def _covered_s(parts: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """How much of a stretch lies in `parts`; what overlaps counts once."""
    total, until = 0.0, begin_s
    for begin, end in sorted(parts):
        begin, end = max(begin, until), min(end, end_s)
        if end > begin:
            total, until = total + end - begin, end
    return total


def _longest_recomputation(trace: Trace) -> str | None:
    """The name of the spans of the recomputation that takes a rank longest."""
    sums: dict[tuple[int, str], float] = {}
    for rank, spans in trace.items():
        for span in spans:
            if span.kind == "unit" and span.name.startswith(AGAIN):
                sums[rank, span.name] = sums.get((rank, span.name), 0.0) + span.seconds
    return max(sums, key=lambda key: sums[key])[1] if sums else None
