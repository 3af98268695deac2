"""A trace as a file: Chrome's trace events, which Perfetto reads too, and back from there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from types import MappingProxyType
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError

AGAIN = "again "
"""The name of a unit's span begins so where its forward pass is computed again in backward."""
_ROUNDS = 8
PROFILER = "profiler"
"""The category of these events, by which a reader of spans leaves them out."""
_FIRST_TRACK = 100
_TRACKS = {"step": 1, "phase": 2, "unit": 3, "pipeline": 4, "collective": 5, "tier": 6}
"""Of each kind its row below the rank. What of a kind overlaps, as collectives do, is shown by asynchronous events."""
_OVERLAPS = ("collective", "tier", "unit")
_VERSION = 2


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


def write_trace(
    path: Path,
    ranks: Sequence[int],
    spans: Sequence[Sequence[Span]],
    offsets: Sequence[ClockOffset],
    profiled: Mapping[int, Sequence[Sequence[Any]]] = MappingProxyType({}),
) -> None:
    """Write ranks' spans on rank 0's clock, and profilers' `kept_events` by rank."""
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
    """Read ranks' spans, ordered by begin, in seconds since the trace's."""
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


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Lead of rank 0's clock before a rank's, within `error_s`: half the shortest round trip of a few messages."""

    ahead_s: float
    error_s: float


def clock_offsets(communicator: Communicator) -> tuple[ClockOffset, ...]:
    """The offset of each rank. Collective."""
    token = communicator.allocate(1, DType.FLOAT32)
    samples: list[tuple[float, float]] = []
    """On rank 0, when the messages of all ranks came, in turn; elsewhere when one was sent, and its answer came."""
    for rank in range(1, communicator.world_size):
        for _ in range(_ROUNDS):
            if communicator.rank == 0:
                communicator.recv(token, rank).wait()
                samples.append((time(), 0.0))
                communicator.send(token, rank).wait()
            elif communicator.rank == rank:
                sent_s = time()
                communicator.send(token, 0).wait()
                communicator.recv(token, 0).wait()
                samples.append((sent_s, time()))
    came, *others = communicator.all_gather_object(samples)
    offsets = [ClockOffset(0.0, 0.0)]
    for at, journeys in enumerate(others):
        turns = zip(came[at * _ROUNDS : (at + 1) * _ROUNDS], journeys, strict=True)
        took, ahead = min((back - sent, there - (sent + back) / 2) for (there, _), (sent, back) in turns)
        offsets.append(ClockOffset(ahead, took / 2))
    return tuple(offsets)


def kept_events(framework: str, events: Sequence[Mapping[str, Any]], shift_us: float) -> list[list[Any]]:
    """Return [track, name, begin, length, category] in whole ns: rounded microseconds would overlap."""
    names: dict[Any, str] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[event.get("pid"), event.get("tid")] = str(event["args"]["name"])
    kept, shift_ns = [], round(1e3 * shift_us)
    for event in events:
        if event.get("ph") == "X" and "ts" in event:
            where = event.get("pid"), event.get("tid")
            track = f"{framework}: {names.get(where, where[1])}"
            begin_ns, end_ns = (round(1e3 * moment) for moment in (event["ts"], event["ts"] + event.get("dur", 0.0)))
            kept.append([track, str(event["name"]), begin_ns + shift_ns, end_ns - begin_ns, event.get("cat", "")])
    return kept


def merged(rank: int, kept: Sequence[Sequence[Any]], shift_ns: int) -> Iterator[dict[str, Any]]:
    """`kept_events` of a rank as events of the whole trace, on whose clock they are `shift_ns` later."""
    of_rows = list(_in_rows(kept))
    tracks = {row: _FIRST_TRACK + at for at, row in enumerate(sorted({row for row, _ in of_rows}))}
    for row, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": row}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}
    for row, (_, what, begin_ns, length_ns, category) in of_rows:
        yield {
            "ph": "X", "pid": rank, "tid": tracks[row], "cat": PROFILER, "name": what,
            "ts": (begin_ns + shift_ns) / 1e3, "dur": length_ns / 1e3,
            "args": {"category": category} if category else {},
        }  # fmt: skip


def _in_rows(kept: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Return events with row names; those that overlap without nesting get another row, for Perfetto."""
    open_: dict[str, list[list[int]]] = {}
    for one in sorted(kept, key=lambda one: (one[2], -one[3])):
        track, _, begin_ns, length_ns, _ = one
        rows = open_.setdefault(track, [])
        end_ns = begin_ns + length_ns
        at = next((at for at, ends_ns in enumerate(rows) if _has_room(ends_ns, begin_ns, end_ns)), len(rows))
        if at == len(rows):
            rows.append([])
        rows[at].append(end_ns)
        yield f"{track} ({at + 1})" if at else track, one


def _has_room(ends_ns: list[int], begin_ns: int, end_ns: int) -> bool:
    """Return whether an event fits into a row whose open ends are `ends_ns`; drops ended ones."""
    while ends_ns and ends_ns[-1] <= begin_ns:
        ends_ns.pop()
    return not ends_ns or end_ns <= ends_ns[-1]
