"""The report of `polyaccel trace` on a trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from polyaccel.observability.traces.analysis import Trace, TracedMeeting, critical_path, exposed_s, meetings_of
from polyaccel.observability.traces.replay import what_if

_MOST_MEETINGS = 12


def report_of(trace: Trace) -> str:
    """Report exposed communication, tiers, late ranks, stragglers, the critical path and possible gains."""
    steps = {rank: [span for span in spans if span.kind == "step"] for rank, spans in trace.items()}
    if not any(steps.values()):
        return "the trace has no step"
    begin_s = min(span.begin_s for own in steps.values() for span in own)
    end_s = max(span.end_s for own in steps.values() for span in own)
    count, whole_s = max(map(len, steps.values())), end_s - begin_s
    lines = [f"{count} steps of {len(trace)} ranks, {1e3 * whole_s / count:.1f} ms each", "", "exposed communication"]
    for rank, spans in sorted(trace.items()):
        alone_s = exposed_s(spans, begin_s, end_s)
        lines.append(f"  rank {rank}: {1e3 * alone_s / count:.1f} ms a step ({100 * alone_s / whole_s:.1f} %)")
    meetings = meetings_of(trace)
    lines += _of_tiers(trace, count)
    lines += ["", "late to collectives", *_of_late(meetings, count)]
    lines += ["", "the straggler of each collective", *_of_meetings(meetings, count)] if meetings else []
    lines += ["", "critical path", *_of_path(trace, begin_s, count)]
    lines += _of_changes(trace, count)
    return "\n".join(lines)


def _of_tiers(trace: Trace, count: int) -> list[str]:
    waited: defaultdict[tuple[int, str], float] = defaultdict(float)
    nbytes: Counter[tuple[int, str]] = Counter()
    for rank, spans in trace.items():
        for span in spans:
            if span.kind == "tier":
                key = rank, span.more["tier"]
                waited[key] += span.more["waited_s"]
                nbytes[key] += span.more["nbytes"]
    if not waited:
        return []
    rows = [
        f"  rank {rank}, {tier}: waited {1e3 * waited[rank, tier] / count:.1f} ms a step for "
        f"{nbytes[rank, tier] / count / 2**20:.1f} MiB"
        for rank, tier in sorted(waited)
    ]
    return ["", "offload tiers", *rows]


def _of_late(meetings: Sequence[TracedMeeting], count: int) -> Iterator[str]:
    late: dict[int, float] = defaultdict(float)
    worst: dict[int, TracedMeeting] = {}
    for meeting in meetings:
        late[meeting.last] += meeting.late_s
        if meeting.last not in worst or meeting.late_s > worst[meeting.last].late_s:
            worst[meeting.last] = meeting
    for rank, seconds in sorted(late.items(), key=lambda item: -item[1]):
        times = sum(meeting.last == rank for meeting in meetings)
        most = worst[rank]
        bucket = "" if most.bucket is None else f" of bucket {most.bucket}"
        yield (
            f"  rank {rank}: last at {times} of {len(meetings)}, {1e3 * seconds / count:.1f} ms a step; at most "
            f"{1e3 * most.late_s:.1f} ms, {most.operation} {most.number}{bucket}"
        )


def _of_meetings(meetings: Sequence[TracedMeeting], count: int) -> Iterator[str]:
    """A line for each operation with its label and bucket, those first at which most time was lost."""
    kinds: defaultdict[tuple[str, str, int | None, tuple[int, ...]], list[TracedMeeting]] = defaultdict(list)
    for meeting in meetings:
        kinds[meeting.operation, meeting.label, meeting.bucket, meeting.group].append(meeting)
    ordered = sorted(kinds.items(), key=lambda item: -sum(one.late_s for one in item[1]))
    everybody = max((len(meeting.group) for meeting in meetings), default=0)
    for (operation, label, bucket, group), calls in ordered[:_MOST_MEETINGS]:
        lasts = Counter(one.last for one in calls)
        ((rank, times),) = lasts.most_common(1)
        of_bucket = "" if bucket is None else f"of bucket {bucket}"
        among = "" if len(group) == everybody else f"among ranks {', '.join(map(str, group))}"
        name = " ".join(filter(None, [operation, label, of_bucket, among]))
        lost_s = sum(one.late_s for one in calls)
        yield f"  {name}: rank {rank} came last {times} of {len(calls)} times, {1e3 * lost_s / count:.1f} ms a step"
    if len(ordered) > _MOST_MEETINGS:
        rest_s = sum(one.late_s for _, calls in ordered[_MOST_MEETINGS:] for one in calls)
        yield f"  {len(ordered) - _MOST_MEETINGS} more: {1e3 * rest_s / count:.1f} ms a step"


def _of_path(trace: Trace, begin_s: float, count: int) -> Iterator[str]:
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for part in critical_path(trace, begin_s):
        sums[part.what, part.rank] += part.seconds
    total = sum(sums.values()) or 1.0
    for (what, rank), seconds in sorted(sums.items(), key=lambda item: -item[1]):
        if seconds / total >= 0.005:
            share = f"({100 * seconds / total:.1f} %)"
            yield f"  {what} on rank {rank}: {1e3 * seconds / count:.1f} ms a step {share}"


def _of_changes(trace: Trace, count: int) -> list[str]:
    same, changes = what_if(trace)
    if not changes:
        return []
    lines = [
        "",
        f"what would be gained (the trace replayed without a change: {1e3 * same.seconds / count:.1f} ms a step)",
    ]
    for change in changes:
        gain = (same.seconds - change.seconds) / same.seconds if same.seconds else 0.0
        lines.append(f"  {change.what}: {1e3 * change.seconds / count:.1f} ms a step ({100 * gain:.1f} % less)")
    return [
        *lines,
        "  estimate: each rank does its own work in the same order, as long as in the trace; a collective ends when",
        "  its last rank has come and the transfer has taken what it took; messages of a pipeline wait as they did",
    ]
