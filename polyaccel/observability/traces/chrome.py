"""A trace as a file: Chrome's trace events, which Perfetto reads too, and back from there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel.observability.traces.clock import ClockOffset
from polyaccel.observability.traces.profiled import PROFILER, merged

AGAIN = "again "
"""The name of a unit's span begins so where its forward pass is computed again in backward."""


@dataclass(frozen=True, slots=True)
class Span:
    """`kind` is step, phase, unit, pipeline, tier or collective. Seconds are those of the rank's own wall clock, or of
    rank 0's once a trace is read. A collective has in `more`: `group` (global ranks), `number` on that group, `bucket`,
    `label`, `numel`, `dtype`, and `waited_s`, how long at its end the rank did nothing else. A tier's transfer has
    `waited_s`, `tier` and `nbytes`.
    """

    kind: str
    name: str
    begin_s: float
    end_s: float
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


_TRACKS = {"step": 1, "phase": 2, "unit": 3, "pipeline": 4, "collective": 5, "tier": 6}
"""Of each kind its row below the rank. What of a kind overlaps, as collectives do, is shown by asynchronous events."""
_OVERLAPS = ("collective", "tier", "unit")
_VERSION = 2


def write_trace(
    path: Path,
    ranks: Sequence[int],
    spans: Sequence[Sequence[Span]],
    offsets: Sequence[ClockOffset],
    profiled: Mapping[int, Sequence[Sequence[Any]]] = MappingProxyType({}),
) -> None:
    """Write the spans of each rank, on rank 0's clock, which begins with the first of them, and by rank what a profiler
    recorded (`kept_events`). Raises OSError."""
    pairs = list(zip(spans, offsets, strict=True))
    begin_s = min((span.begin_s + at.ahead_s for own, at in pairs for span in own), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, own, offset in zip(ranks, spans, offsets, strict=True):
        events += _names(rank)
        shift_s = offset.ahead_s - begin_s
        for number, span in enumerate(own):
            events += _events(rank, number, span, shift_s)
        events += merged(rank, profiled.get(rank, ()), round(1e9 * shift_s))
    # Of slices that begin at once the outer one comes first, or Perfetto would have the inner one around it.
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    clock = [
        {"rank": rank, "offset_s": one.ahead_s, "error_s": one.error_s}
        for rank, one in zip(ranks, offsets, strict=True)
    ]
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"polyaccel_trace": _VERSION, "clock": clock, "begin_s": begin_s},
    }
    path.write_text(json.dumps(whole), encoding="utf-8")


def read_trace(path: Path) -> dict[int, list[Span]]:
    """The spans of each rank, in order of their begin, seconds since the trace's. Raises PolyaccelError for a file that
    is not a trace of ours."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if whole["otherData"]["polyaccel_trace"] != _VERSION:
            raise KeyError("polyaccel_trace")
        found: dict[int, list[Span]] = {int(one["rank"]): [] for one in whole["otherData"]["clock"]}
        open_: dict[tuple[int, str], dict[str, Any]] = {}
        for event in whole["traceEvents"]:
            if event.get("cat") == PROFILER:
                continue
            if event["ph"] == "X":
                begin_s = event["ts"] / 1e6
                found[event["pid"]].append(
                    Span(event["cat"], event["name"], begin_s, begin_s + event["dur"] / 1e6, event["args"])
                )
            elif event["ph"] == "b":
                open_[event["pid"], event["id2"]["local"]] = event
            elif event["ph"] == "e":
                begin = open_.pop((event["pid"], event["id2"]["local"]))
                found[event["pid"]].append(
                    Span(begin["cat"], begin["name"], begin["ts"] / 1e6, event["ts"] / 1e6, begin["args"])
                )
    except OSError as error:
        raise PolyaccelError(f"no trace at {path}: {error.strerror}", hint="name its folder") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PolyaccelError(
            f"{path} is not a trace that polyaccel wrote: {error}",
            hint='add "trace": {"steps": [10, 12]} to the config',
        ) from error
    return {rank: sorted(own, key=lambda span: span.begin_s) for rank, own in found.items()}


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for kind, track in _TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": f"{kind}s"}}
        # Perfetto takes a row whose number is the rank's for the main thread, and would have it on top.
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


def _events(rank: int, number: int, span: Span, shift_s: float) -> Iterator[dict[str, Any]]:
    # Perfetto rounds begin and length to nanoseconds. A slice that would end behind the next one's begin for that, or
    # behind the end of the one around it, is taken out of its row; so both are whole nanoseconds here.
    begin_ns, end_ns = (round(1e9 * (moment + shift_s)) for moment in (span.begin_s, span.end_s))
    name = span.name
    if span.kind == "collective" and span.more.get("label"):
        name = f"{name} {span.more['label']}"
    where = {"pid": rank, "tid": _TRACKS[span.kind], "cat": span.kind, "name": name}
    if span.kind not in _OVERLAPS:
        yield {"ph": "X", **where, "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3, "args": span.more}
        return
    # An `id` belongs to the whole trace, and Perfetto has a row of all ranks for what has one.
    own = {"id2": {"local": str(number)}}
    yield {"ph": "b", **where, **own, "ts": begin_ns / 1e3, "args": {"operation": span.name, **span.more}}
    yield {"ph": "e", **where, **own, "ts": end_ns / 1e3}
