"""The events of a framework's own profiler in a trace: below those of their rank, on the trace's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PROFILER = "profiler"
"""The category of these events, by which a reader of spans leaves them out."""
_FIRST_TRACK = 100


def kept_events(framework: str, events: Sequence[Mapping[str, Any]], shift_us: float) -> list[list[Any]]:
    """What is kept of events: [track, name, begin, length, category] of each complete one, in nanoseconds of this
    rank's wall clock: whole ones, for floating-point microseconds of it are a quarter apart, and events that are nested
    would overlap. A track is a thread of the process, or a stream of a device."""
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
    """Each of `kept_events` with the name of its row: its track, or another next to that where it would overlap an
    event without lying in it, as a message does that is under way while its thread continues. Perfetto cannot show such
    slices."""
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
    """Whether an event lies in the innermost of those that are open in a row, or behind them all. `ends_ns` are their
    ends; what has ended when it begins is taken out."""
    while ends_ns and ends_ns[-1] <= begin_ns:
        ends_ns.pop()
    return not ends_ns or end_ns <= ends_ns[-1]
