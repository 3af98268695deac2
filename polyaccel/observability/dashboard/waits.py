"""Who waits for whom: from every rank's own waiting in each step, and from a trace, where there is one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.figures import rounded
from polyaccel.observability.traces.analysis import Trace, meetings_of
from polyaccel.observability.traces.chrome import read_trace
from polyaccel.observability.traces.report import report_of

_MOST_OPEN = 1000
_MOST_SPANS = 3000
_MOST_ROWS = 16


class WaitTable:
    """Adds up how long each rank waited for which other, step by step.

    Of what a rank waited in a step, the part that exceeds the least waiting of any rank counts as waiting for the rank
    that waited least: that one came last, on the whole. A trace shows exactly which rank came last to which call.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, dict[int, float]] = {}
        self._sums: dict[tuple[int, int], float] = defaultdict(float)
        self._steps = 0

    def add(self, step: int, rank: int, waited_s: float) -> None:
        """Rank `rank` waited so long in `step`."""
        if self._ranks < 2:
            return
        totals = self._open.setdefault(step, {})
        totals[rank] = waited_s
        if len(totals) == self._ranks:
            del self._open[step]
            last = min(totals, key=lambda one: totals[one])
            self._steps += 1
            for one, seconds in totals.items():
                if one != last:
                    self._sums[one, last] += seconds - totals[last]
        elif len(self._open) > _MOST_OPEN:  # some rank writes no file
            del self._open[min(self._open)]

    def shown(self) -> dict[str, Any] | None:
        """`steps`, and in `pairs` the waiting rank, the one that it waited for, and the seconds; None without any."""
        if not self._sums:
            return None
        return {"steps": self._steps, "pairs": _pairs(self._sums)}


def shown_trace(path: Path) -> dict[str, Any] | None:
    """Return the page's view of the trace at `path`: report, waits, phases; None if unreadable."""
    try:
        trace = read_trace(path)
    except PolyaccelError:
        return None
    return waits_of(trace)


def waits_of(trace: Trace) -> dict[str, Any] | None:
    """`shown_trace` of spans that are there already."""
    steps = [span for spans in trace.values() for span in spans if span.kind == "step"]
    if not steps:
        return None
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for meeting in meetings_of(trace):
        for rank, waited_s in meeting.waited_s.items():
            if rank != meeting.last:
                sums[rank, meeting.last] += waited_s
    begin_s, end_s = min(span.begin_s for span in steps), max(span.end_s for span in steps)
    return {
        "report": report_of(trace),
        "steps": len({span.name for span in steps}),
        "pairs": _pairs(sums),
        "tiers": _tiers(trace),
        "rows": _rows(trace, begin_s),
        "seconds": rounded(end_s - begin_s),
    }


def _tiers(trace: Trace) -> list[list[Any]]:
    """Rank, tier, bytes that were moved, and seconds in which the rank did nothing but wait for them."""
    sums: dict[tuple[int, str], list[float]] = {}
    for rank, spans in trace.items():
        for span in spans:
            if span.kind == "tier":
                totals = sums.setdefault((rank, str(span.more["tier"])), [0, 0.0])
                totals[0] += span.more["nbytes"]
                totals[1] += span.more["waited_s"]
    return [[rank, tier, nbytes, rounded(waited_s)] for (rank, tier), (nbytes, waited_s) in sorted(sums.items())]


def _rows(trace: Trace, begin_s: float) -> list[dict[str, Any]]:
    """Of the first ranks, the longest phases and waits as name, begin and length in seconds; outer ones come first."""
    rows = []
    ranks = sorted(trace)[:_MOST_ROWS]
    for rank in ranks:
        found = [(span.name, span.begin_s - begin_s, span.seconds) for span in trace[rank] if span.kind == "phase"]
        for span in trace[rank]:
            if span.kind in ("collective", "tier") and (waited_s := span.more["waited_s"]) > 0:
                found.append(("waiting", span.end_s - waited_s - begin_s, waited_s))
        found.sort(key=lambda one: -one[2])
        spans = sorted(found[: _MOST_SPANS // len(ranks)], key=lambda one: (one[0] == "waiting", one[1], -one[2]))
        rows.append({"rank": rank, "spans": [[name, rounded(at), rounded(length)] for name, at, length in spans]})
    return rows


def _pairs(sums: Mapping[tuple[int, int], float]) -> list[list[float]]:
    return [[waiting, last, rounded(seconds)] for (waiting, last), seconds in sorted(sums.items()) if seconds > 0]
