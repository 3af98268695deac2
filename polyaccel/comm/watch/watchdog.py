"""Notes on the board: where each rank is, written by a thread that runs on while its rank hangs in a collective.

A note is JSON: when it was written, and for each group the number, name and start of the last call. Times are wall
clock seconds; between hosts they are as good as the hosts' clocks.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from threading import Event, Thread
from time import time
from typing import Any, Protocol

from polyaccel.comm.base import Board
from polyaccel.comm.collective import Collective

_HEARTBEAT_EVERY = 5  # looks without news until the rank says again that it lives
_STALE_BEATS = 3


class LastCall(Protocol):
    """A group's last call, as a note has it."""

    @property
    def seq(self) -> int: ...

    @property
    def collective(self) -> Collective: ...

    @property
    def started_s(self) -> float: ...


@dataclass(frozen=True)
class Heartbeat:
    """A rank's note: its time, how old it may become in a healthy rank, and the rank's last call by group."""

    at_s: float
    stale_after_s: float
    calls: Mapping[str, tuple[int, str, float]]


class Watchdog:
    """Posts this rank's last calls when they changed, and a sign of life now and then."""

    def __init__(self, board: Board, rank: int, last: Mapping[tuple[int, ...], LastCall], interval_s: float) -> None:
        self._board = board
        self._rank = rank
        self._last = last
        self._interval_s = interval_s
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True, name="polyaccel watchdog")
        self._thread.start()
        atexit.register(self.stop)  # a thread inside the store's client must not outlive the interpreter

    def stop(self) -> None:
        """End the thread; its last note stays on the board."""
        self._stop.set()
        self._thread.join(2.0)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        posted: dict[str, Any] | None = None
        beats = 0
        while True:
            last = dict(self._last)  # at once, as `list(items())` is not: another thread adds groups
            calls = {_key(group): (one.seq, one.collective.described(), one.started_s) for group, one in last.items()}
            if calls != posted or beats >= _HEARTBEAT_EVERY:
                stale_s = self._interval_s * _HEARTBEAT_EVERY * _STALE_BEATS
                self._board.post(self._rank, json.dumps({"at": time(), "stale_after_s": stale_s, "calls": calls}))
                posted, beats = calls, 0
            beats += 1
            if self._stop.wait(self._interval_s):
                return


def read_notes(board: Board, world_size: int) -> dict[int, Heartbeat]:
    """Every rank's note; those that cannot be read are absent."""
    notes = {}
    for rank, text in board.read(world_size).items():
        fields = json.loads(text)
        calls = {group: (int(seq), str(call), float(start)) for group, (seq, call, start) in fields["calls"].items()}
        notes[rank] = Heartbeat(float(fields["at"]), float(fields["stale_after_s"]), calls)
    return notes


def where_ranks_are(
    group: tuple[int, ...],
    own_rank: int,
    seq: int,
    call: str,
    notes: Mapping[int, Heartbeat],
    missing: Collection[int],
    *,
    now_s: float,
) -> dict[int, str]:
    """A sentence on each rank of `group` that is not in call number `seq` with this rank, as its note tells.

    `missing` are ranks known to be missing: there is a sentence on each of them, whatever the notes say. Without any
    note (a board that cannot be reached) nothing can be said.
    """
    if not notes:
        return {}
    places: dict[int, str] = {}
    for rank in group:
        if rank == own_rank:
            continue
        place = _place(notes.get(rank), _key(group), seq, call, now_s)
        if place is not None:
            places[rank] = f"rank {rank} {place}"
        elif rank in missing:
            places[rank] = f"rank {rank} entered this call too, but did not carry it through"
    return places


def _place(note: Heartbeat | None, group: str, seq: int, call: str, now_s: float) -> str | None:
    """A sentence on a rank with this note; None if the rank seems to be in the same call."""
    if note is None:
        return "has never reported: not started, or dead?"
    at, text, started_s = note.calls.get(group, (-1, "", 0.0))
    where = f"last entered #{at} {text}, {now_s - started_s:.0f} s ago" if text else "has called nothing on this group"
    silent_s = now_s - note.at_s
    if silent_s > note.stale_after_s:
        return f"has not reported for {silent_s:.0f} s: stopped or dead? It {where}"
    if at < seq:
        return where
    if at == seq and text != call:
        return f"called #{at} {text} instead"
    return None if at == seq else f"is already at #{at} {text}"


def _key(group: tuple[int, ...]) -> str:
    return ",".join(map(str, group))
