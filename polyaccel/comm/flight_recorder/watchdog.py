"""Notes on the board: where each rank is, written by a thread that runs on while its rank hangs in a collective.

A note is JSON: when it was written, for each group the number, name and start of the last call, the rank's process, and
how that has ended, once it has. Times are wall clock seconds; between hosts they are as good as the hosts' clocks.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Event, Thread
from time import monotonic, sleep, time
from typing import Any, Protocol
from zlib import crc32

from polyaccel.comm.base import StatusStore
from polyaccel.comm.collective import Collective
from polyaccel.comm.host_address import is_running, start_of
from polyaccel.job.host_topology import host_id

ENDED_IN_ORDER = "it has ended in order"
_OUT_OF_MEMORY = re.compile("memory ?error|out ?of ?memory|can't allocate memory", re.IGNORECASE)
_LESS = "; give it less: a smaller micro-batch, offload, activation checkpointing (`polyaccel plan` shows what fits)"
_HEARTBEAT_EVERY = 5  # looks without news until the rank writes again that it lives
_STALE_BEATS = 3
_LOOKS = 2  # of the watchdog, until what its rank has called is on the board for sure
_EVERY_S = 1.0  # between looks, of a rank without a note
_ENDING_S = 0.4
# What fits on a board of 4 kB.
_MOST_GROUPS = 12
_CALL_LENGTH = 120
_ENDED_LENGTH = 200
_KEY_LENGTH = 64


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
    """A rank's note: its time, how often the rank looks for news, how old a note may become in a healthy rank, the
    rank's last call by group, and its process. `ended` is how that has ended, empty while it runs."""

    at_s: float
    every_s: float
    stale_after_s: float
    calls: Mapping[str, tuple[int, str, float]]
    process: WatchedProcess | None = None
    ended: str = ""


@dataclass(frozen=True)
class WatchedProcess:
    """A rank's process: its id and start on `host`, whose running system is `system` (empty where that is unknown)."""

    pid: int
    start: int
    host: str
    system: str

    @classmethod
    def this(cls) -> WatchedProcess:
        try:
            return cls(os.getpid(), start_of("self"), socket.gethostname(), host_id())
        except OSError:  # a system without /proc
            return cls(os.getpid(), 0, socket.gethostname(), "")

    def has_ended(self) -> bool | None:
        """Return whether it has ended; None where this process cannot find out."""
        if not self.system or self.system != WatchedProcess.this().system:
            return None
        return not is_running(self.pid, self.start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Watchdog:
    """Posts this rank's last calls when they changed, a sign of life now and then, and at last that it ends."""

    def __init__(
        self, board: StatusStore, rank: int, last: Mapping[tuple[int, ...], LastCall], interval_s: float
    ) -> None:
        self._board = board
        self._rank = rank
        self._last = last
        self._interval_s = interval_s
        self._process = WatchedProcess.this()
        self._stop = Event()
        self._ended = ""
        self._thread = Thread(target=self._run, daemon=True, name="polyaccel watchdog")
        self._thread.start()
        atexit.register(self._exit)  # a thread inside the store's client must not outlive the interpreter

    def stop(self, ended: str = "it has closed its communicator") -> None:
        """End the thread; its last note, that this rank takes part no more and why, stays on the board."""
        self._ended = ended
        self._stop.set()
        self._thread.join(2.0)
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception that the interpreter has shown
        self.stop(ENDED_IN_ORDER if error is None else uncaught(error))

    def _run(self) -> None:
        posted: dict[str, Any] | None = None
        beats = 0
        while True:
            is_over = self._stop.is_set()
            last = dict(self._last)  # at once, as `list(items())` is not: another thread adds groups
            newest = sorted(last.items(), key=lambda item: item[1].started_s)[-_MOST_GROUPS:]
            calls = {_key(group): (one.seq, shown(one.collective), one.started_s) for group, one in newest}
            if calls != posted or beats >= _HEARTBEAT_EVERY or is_over:
                stale_s = self._interval_s * _HEARTBEAT_EVERY * _STALE_BEATS
                note = {
                    "at": time(),
                    "every_s": self._interval_s,
                    "stale_after_s": stale_s,
                    "calls": calls,
                    "process": asdict(self._process),
                    "ended": self._ended,
                }
                self._board.set(self._rank, json.dumps(note))
                posted, beats = calls, 0
            if is_over:
                return
            beats += 1
            self._stop.wait(self._interval_s)


def uncaught(error: BaseException) -> str:
    """How a process ends by `error`, as notes have it: its type and the first line of its message."""
    said = str(error).strip().partition("\n")[0]
    return f"uncaught {type(error).__name__}{': ' if said else ''}{said}"[:_ENDED_LENGTH]


def shown(collective: Collective) -> str:
    """The call as notes have it: a board has little room."""
    return collective.described()[:_CALL_LENGTH]


def read_notes(board: StatusStore, world_size: int) -> dict[int, Heartbeat]:
    """Every rank's note; those that cannot be read, or understood, are absent."""
    notes = {}
    for rank, text in board.read(world_size).items():
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            notes[rank] = _heartbeat(json.loads(text))
    return notes


def _heartbeat(fields: dict[str, Any]) -> Heartbeat:
    calls = {group: (int(seq), str(call), float(start)) for group, (seq, call, start) in fields["calls"].items()}
    process = WatchedProcess(**fields["process"]) if fields.get("process") else None
    at_s, every_s, stale_s = (float(fields[name]) for name in ("at", "every_s", "stale_after_s"))
    return Heartbeat(at_s, every_s, stale_s, calls, process, str(fields.get("ended", "")))


def wait_for_ends(notes: Mapping[int, Heartbeat], group: Collection[int], closed: Collection[int]) -> None:
    """Give ranks whose connections have closed a moment to end: the system closes a process's connections before it
    lets others see that the process has ended. `closed` are the ones that the transport names; where it names no ranks,
    the first of `group` to end is waited for. Ranks on other hosts, and of this process, are not."""
    until_s, this = monotonic() + _ENDING_S, WatchedProcess.this()
    asked = [notes[rank] for rank in closed or group if rank in notes]
    if not closed and any(one.ended for one in asked):
        return
    running = [one.process for one in asked if not one.ended and one.process not in (None, this)]
    while monotonic() < until_s:
        ended = [one.has_ended() for one in running if one is not None]
        if False not in ended or (True in ended and not closed):
            return
        sleep(_ENDING_S / 20)


def describe_missing_ranks(
    group: tuple[int, ...],
    own_rank: int,
    seq: int,
    call: str,
    notes: Mapping[int, Heartbeat],
    missing: Collection[int],
    *,
    now_s: float,
    started_s: float,
    is_late: bool = True,
) -> dict[int, str]:
    """A sentence on each rank of `group` that is not in call number `seq` with this rank, by its note.

    `started_s` is when this rank entered the call: a rank counts as behind only if it has had the time to report that
    it came after. `missing` are ranks that are certainly missing: there is a sentence on each of them, whatever the
    notes have. `is_late` False is for a call that failed before its limit: then only `missing` ranks and those that
    have ended explain it. Without any note (a board that cannot be reached) nothing can be reported. A board that has
    not even this rank's own note cannot be reached any more, and its notes are what was remembered.
    """
    if not notes:
        return {}
    descriptions: dict[int, str] = {}
    for rank in group:
        if rank == own_rank:
            continue
        note = notes.get(rank)
        is_news = now_s - started_s > _LOOKS * (note.every_s if note is not None else _EVERY_S)
        end = _end(note, _key(group), is_board_lost=own_rank not in notes)
        if end is not None:
            descriptions[rank] = f"rank {rank} {end}"
        elif rank in missing or is_late:
            # a call that fails at once can precede the first note that has the group
            is_certain = rank in missing and (is_late or note is None or _key(group) in note.calls)
            description = _describe_call(note, _key(group), seq, call, now_s, is_news=is_news or is_certain)
            if description is not None:
                descriptions[rank] = f"rank {rank} {description}"
            elif is_certain:
                descriptions[rank] = f"rank {rank} entered this call too, but did not carry it through"
    return descriptions


def have_ended(notes: Mapping[int, Heartbeat], group: Collection[int]) -> tuple[int, ...]:
    """The ranks of `group` whose process has ended, or that have a note that they take part no more."""
    return tuple(rank for rank in group if rank in notes and _end(notes[rank], "") is not None)


def _end(note: Heartbeat | None, group: str, *, is_board_lost: bool = False) -> str | None:
    """A sentence on the end of a rank with this note; None if it seems to run."""
    if note is None or not (note.ended or (note.process is not None and note.process.has_ended())):
        return None
    at, text, _ = note.calls.get(group, (-1, "", 0.0))
    none = "before its first call on this group" if note.ended else "before it noted a call on this group"
    last = f"after #{at} {text}" if text else none
    who = f"({note.process}) " if note.process is not None else ""
    if not note.ended and is_board_lost:
        return f"{who}has ended, and the store in which ranks note how they end cannot be reached: see its own output"
    if not note.ended:
        return f"{who}has ended without a word, {last}: killed, out of memory, or os._exit?"
    if note.ended == ENDED_IN_ORDER:
        hint = "Give all ranks equally many batches (drop_last)"
        return f"{who}has ended in order, {last}: out of data, or sys.exit? {hint}"
    return f"{who}takes part no more, {last}: {note.ended}{_LESS if _OUT_OF_MEMORY.search(note.ended) else ''}"


def _describe_call(
    note: Heartbeat | None, group: str, seq: int, call: str, now_s: float, *, is_news: bool
) -> str | None:
    """A sentence on a rank with this note; None if the rank seems to be in the same call. `is_news`: what the rank has
    not reported has not happened."""
    if note is None:
        return "has never reported: not started, or dead?" if is_news else None
    at, text, started_s = note.calls.get(group, (-1, "", 0.0))
    where = f"last entered #{at} {text}, {now_s - started_s:.0f} s ago" if text else "has called nothing on this group"
    silent_s = now_s - note.at_s
    if silent_s > note.stale_after_s:
        return f"has not reported for {silent_s:.0f} s: stopped or dead? It {where}"
    if at < seq:
        return where if is_news else None
    if at == seq and text != call:
        return f"called #{at} {text} instead"
    return None if at == seq else f"is already at #{at} {text}"


def _key(group: tuple[int, ...]) -> str:
    text = ",".join(map(str, group))
    return text if len(text) <= _KEY_LENGTH else f"{len(group)} ranks {crc32(text.encode()):08x}"
