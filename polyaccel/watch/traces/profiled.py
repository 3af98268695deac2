"""The events of a framework's own profiler in a trace: below those of their rank, on the trace's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PROFILER = "profiler"
"""The category of these events, by which a reader of spans leaves them out."""
_FIRST_TRACK = 100


def kept_events(framework: str, events: Sequence[Mapping[str, Any]], shift_us: float) -> list[list[Any]]:
    """What is kept of events: [track, name, begin, length, category] of each complete one, in microseconds of this
    rank's wall clock. A track is a thread of the process, or a stream of a device."""
    names: dict[Any, str] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[event.get("pid"), event.get("tid")] = str(event["args"]["name"])
    kept = []
    for event in events:
        if event.get("ph") == "X" and "ts" in event:
            where = event.get("pid"), event.get("tid")
            track = f"{framework}: {names.get(where, where[1])}"
            kept.append(
                [track, str(event["name"]), event["ts"] + shift_us, event.get("dur", 0.0), event.get("cat", "")]
            )
    return kept


def merged(rank: int, kept: Sequence[Sequence[Any]], shift_us: float) -> Iterator[dict[str, Any]]:
    """`kept_events` of a rank as events of the whole trace, on whose clock they are `shift_us` later."""
    tracks = {name: _FIRST_TRACK + at for at, name in enumerate(dict.fromkeys(one[0] for one in kept))}
    for name, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}
    for name, what, begin_us, length_us, category in kept:
        yield {
            "ph": "X", "pid": rank, "tid": tracks[name], "cat": PROFILER, "name": what, "ts": begin_us + shift_us,
            "dur": length_us, "args": {"category": category} if category else {},
        }  # fmt: skip
