"""Where the time of a trace went: exposed communication, who was late to which meeting, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from polyaccel.observability.traces.chrome import Span

_LEAST_WAIT_S = 1e-5
MESSAGES = ("send", "recv", "batch")
"""Operations in which not all ranks of a group take part."""
Trace = Mapping[int, Sequence[Span]]


@dataclass(frozen=True, slots=True)
class TracedMeeting:
    """A collective of a group: when each rank came, and how long each did nothing but wait for it at its end."""

    operation: str
    group: tuple[int, ...]
    number: int
    bucket: int | None
    label: str
    came_s: Mapping[int, float]
    ended_s: Mapping[int, float]
    waited_s: Mapping[int, float]

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.came_s, key=lambda rank: self.came_s[rank])

    @property
    def late_s(self) -> float:
        """How long after the one before it the last rank came."""
        *_, before, last = sorted(self.came_s.values())
        return last - before


@dataclass(frozen=True, slots=True)
class PathPart:
    """A stretch of the critical path, on one rank: of a phase, or `communication`."""

    rank: int
    what: str
    seconds: float


def meetings_of(trace: Trace) -> list[TracedMeeting]:
    """The collectives in which at least two ranks took part, by their first arrival. Messages are none."""
    found: dict[tuple[tuple[int, ...], int, str], dict[int, Span]] = defaultdict(dict)
    for rank, spans in trace.items():
        for span in spans:
            if span.kind == "collective":
                operation = span.more.get("operation", span.name)
                if operation in MESSAGES:
                    continue
                key = tuple(span.more["group"]), span.more["number"], operation
                found[key].setdefault(rank, span)
    meetings = [
        TracedMeeting(
            operation,
            group,
            number,
            next(iter(own.values())).more.get("bucket"),
            next(iter(own.values())).more.get("label") or "",
            {rank: span.begin_s for rank, span in own.items()},
            {rank: span.end_s for rank, span in own.items()},
            {rank: span.more["waited_s"] for rank, span in own.items()},
        )
        for (group, number, operation), own in found.items()
        if len(own) > 1
    ]
    return sorted(meetings, key=lambda meeting: min(meeting.came_s.values()))


def exposed_s(spans: Sequence[Span], begin_s: float, end_s: float) -> float:
    """How long between two moments a rank did nothing but wait for collectives; what overlaps counts once."""
    waits = sorted(
        (max(begin_s, span.end_s - span.more["waited_s"]), min(end_s, span.end_s))
        for span in spans
        if span.kind == "collective" and span.end_s > begin_s and span.end_s - span.more["waited_s"] < end_s
    )
    total, until = 0.0, begin_s
    for begin, end in waits:
        begin = max(begin, until)
        if end > begin:
            total, until = total + end - begin, end
    return total


def critical_path(trace: Trace, begin_s: float) -> list[PathPart]:
    """Return the chain of work and last waits that decided the end, back to `begin_s`, in time order."""
    meetings = [each for each in meetings_of(trace) if max(each.waited_s.values()) > _LEAST_WAIT_S]
    ends = {rank: _last_step_end(spans, begin_s) for rank, spans in trace.items()}
    rank = max(ends, key=lambda one: ends[one])
    now_s, parts = ends[rank], []
    while now_s > begin_s:
        before = [
            each
            for each in meetings
            if rank in each.came_s
            and each.ended_s[rank] <= now_s
            and each.waited_s[rank] > _LEAST_WAIT_S
            and each.came_s[each.last] < now_s
        ]
        meeting = max(before, key=lambda each: each.ended_s[rank], default=None)
        if meeting is None or meeting.came_s[meeting.last] <= begin_s:
            parts += _work(trace[rank], rank, begin_s, now_s)
            break
        ended_s, came_s = meeting.ended_s[rank], meeting.came_s[meeting.last]
        parts += _work(trace[rank], rank, ended_s, now_s)
        parts.append(PathPart(rank, "communication", max(0.0, ended_s - came_s)))
        rank, now_s = meeting.last, came_s
    return parts[::-1]


def _last_step_end(spans: Sequence[Span], begin_s: float) -> float:
    return max((span.end_s for span in spans if span.kind == "step"), default=begin_s)


def _work(spans: Sequence[Span], rank: int, begin_s: float, end_s: float) -> list[PathPart]:
    """The phases of a rank between two moments, latest first: the innermost counts."""
    if end_s <= begin_s:
        return []
    phases = [span for span in spans if span.kind == "phase" and span.end_s > begin_s and span.begin_s < end_s]
    moments = sorted(
        {begin_s, end_s, *(m for span in phases for m in (span.begin_s, span.end_s) if begin_s < m < end_s)}
    )
    sums: dict[str, float] = {}
    for left, right in pairwise(moments):
        inside = [span for span in phases if span.begin_s <= left and span.end_s >= right]
        name = max(inside, key=lambda span: span.begin_s).name if inside else "other"
        sums[name] = sums.get(name, 0.0) + right - left
    return [PathPart(rank, name, seconds) for name, seconds in reversed(sums.items())]
