"""The flight recorder on disk: one JSON file a rank, written when a collective fails, when the process gets SIGUSR1 or
SIGTERM, or when it ends by an exception that nobody caught. A rank that is killed leaves none: a launcher ends the
others by SIGTERM, and what these were in shows whom they waited for.

[Note: Signals while a collective hangs]
Python runs a signal handler between two of its own instructions, and a rank that hangs inside a library gets to none.
But the C part of the handler writes the signal's number to the wake-up file descriptor at once, and a thread that reads
there runs all the same. A script that has its own wake-up descriptor keeps it. One that has its own handlers, whether
it had them before or has replaced ours, keeps these, and what becomes of a signal is its business; but its calls are
written down at SIGTERM too, for it may hang, and be killed when it has not ended in time.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any

from polyaccel.comm.collective import MESSAGES
from polyaccel.comm.watch.record import Entry, Recorder
from polyaccel.errors import CommError

_log = logging.getLogger(__name__)

FORMAT = 1
FOLDER_VARIABLE = "POLYACCEL_DUMP_DIR"
_DEFAULT_ACTION = 0  # SIG_DFL of the C library
_WRITING_S = 2.0  # the thread may be waiting for what the main thread was writing when the signal came


@dataclass(frozen=True, slots=True)
class DumpedCall:
    """A call as a rank recorded it. `is_message`: a send or receive, which has no number of its own."""

    group: tuple[int, ...]
    seq: int
    what: str
    """Operation, reduction or root, size and type: what ranks must agree on."""
    purpose: str
    started_s: float
    ended_s: float | None
    is_message: bool = False


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's last calls, oldest first, why they were written down and when (seconds of the wall clock)."""

    rank: int
    world_size: int
    reason: str
    at_s: float
    host: str
    pid: int
    calls: tuple[DumpedCall, ...]


def dump_of(entries: Iterable[Entry], rank: int, world_size: int, reason: str) -> Dump:
    """The recorder's `entries` as they are written to a dump."""
    return Dump(rank, world_size, reason, time(), socket.gethostname(), os.getpid(), tuple(map(_dumped, entries)))


def write_dump(dump: Dump, folder: Path) -> Path:
    """Write `rank-N.json` into `folder`, whole or not at all, over an older one. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / _file_name(dump.rank)
    part = path.with_suffix(f".{dump.pid}.part")
    part.write_text(json.dumps({"format": FORMAT, **_as_json(dump)}))
    part.replace(path)
    return path


def read_dump(path: Path) -> Dump:
    """Read what `write_dump` wrote. Raises CommError that names the file."""
    try:
        fields = json.loads(path.read_text())
        if fields.pop("format") != FORMAT:
            raise ValueError("written by another version of polyaccel")
        calls = tuple(DumpedCall(**{**call, "group": tuple(call["group"])}) for call in fields.pop("calls"))
        return Dump(**fields, calls=calls)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommError(
            f"{path} is not a dump of the flight recorder: {error}",
            cure="name the rank-N.json files of one job, or the folder that holds them",
            value=str(path),
        ) from error


def default_folder(environ: Mapping[str, str]) -> Path:
    """`POLYACCEL_DUMP_DIR`, else a folder of this user and job (by the launcher's process) beside temporary files."""
    chosen = environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(tempfile.gettempdir(), f"polyaccel-{os.getuid()}", f"dump-{os.getppid()}")


class Dumper:
    """Writes this rank's dump when something goes wrong. One a process, from `start` to `stop`.

    An event is written once; SIGUSR1 writes anew each time, so that a job can be asked twice.
    """

    def __init__(self, recorder: Recorder, rank: int, world_size: int, folder: Path) -> None:
        self._recorder = recorder
        self._rank = rank
        self._world_size = world_size
        self._folder = folder
        self._undo: list[Callable[[], object]] = []
        self._writing = threading.Lock()

    def start(self) -> None:
        """Listen for failures, uncaught exceptions and, in the main thread of a process, signals.

        What this rank of an earlier job left in the folder becomes `rank-N.earlier`, lest it be taken for this one's.
        """
        left = self._folder / _file_name(self._rank)
        with suppress(OSError):  # as a rule there is nothing
            left.replace(left.with_suffix(".earlier"))
        self._recorder.on_failure = self.write
        self._watch_exceptions()
        if _is_main_thread():
            self._watch_signals()

    def stop(self) -> None:
        """Listen no more, and give signals and hooks back."""
        self._recorder.on_failure = None
        while self._undo:
            self._undo.pop()()

    def write(self, reason: str, *, level: int = logging.WARNING) -> Path | None:
        """Write the dump and log where; None, and a log line, when that is not possible. Raises nothing."""
        try:
            with self._writing:
                dump = dump_of(list(self._recorder.entries), self._rank, self._world_size, reason)
                path = write_dump(dump, self._folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: another thread made a call meanwhile
            _log.warning("the flight recorder could not be written to %s: %s", self._folder, error)
            return None
        compare = f"polyaccel comm diff {path.parent}"
        _log.log(level, "%s; the last calls are in %s, compare all ranks with `%s`", reason, path, compare)
        return path

    def _watch_exceptions(self) -> None:
        of_main, of_threads = sys.excepthook, threading.excepthook

        def on_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not issubclass(kind, KeyboardInterrupt):
                self.write(f"uncaught {kind.__name__}")
            of_main(kind, error, trace)

        def on_thread(args: threading.ExceptHookArgs) -> None:
            self.write(f"uncaught {args.exc_type.__name__} in a thread")
            of_threads(args)

        sys.excepthook, threading.excepthook = on_main, on_thread

        def undo() -> None:
            if sys.excepthook is on_main:
                sys.excepthook = of_main
            if threading.excepthook is on_thread:
                threading.excepthook = of_threads

        self._undo.append(undo)

    def _watch_signals(self) -> None:
        """See [Note: Signals while a collective hangs]."""
        wanted = [each for each in (signal.SIGUSR1, signal.SIGTERM) if signal.getsignal(each) is signal.SIG_DFL]
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        earlier = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if earlier != -1:
            signal.set_wakeup_fd(earlier)
            ours.close()
            theirs.close()
            return
        owner = os.getpid()

        def on_signal(number: int, _: object) -> None:
            """The thread answers, unless the C handler could not reach it; it ends the process."""
            if number == signal.SIGTERM:
                theirs.send(bytes([number]))
                reader.join(_WRITING_S)  # a script that went on could end well before the thread has written

        reader = threading.Thread(target=self._answer, args=(ours, on_signal), daemon=True, name="polyaccel dumps")
        reader.start()
        for each in wanted:
            signal.signal(each, on_signal)

        def undo() -> None:
            if os.getpid() == owner and _is_main_thread():
                signal.set_wakeup_fd(-1)
                for each in wanted:
                    if signal.getsignal(each) is on_signal:
                        signal.signal(each, signal.SIG_DFL)
                theirs.close()  # ends the thread
                reader.join(1.0)

        self._undo.append(undo)
        # A signal to a worker of a data loader is not ours: it does what it did before us. One that comes while the
        # worker begins waits until then; it may be the only one, and Python drops what is pending at a fork.
        before_fork = threading.local()

        def block() -> None:
            before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)

        def unblock() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before_fork.mask)

        def let_go() -> None:
            if undo in self._undo:
                signal.set_wakeup_fd(-1)
                for each in wanted:
                    if signal.getsignal(each) is on_signal:
                        signal.signal(each, signal.SIG_DFL)
            unblock()

        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=let_go)

    def _answer(self, numbers: socket.socket, ours: Callable[[int, Any], None]) -> None:
        with numbers:
            while received := numbers.recv(64):
                for number in received:
                    is_ours = signal.getsignal(number) is ours
                    if number == signal.SIGUSR1 and is_ours:
                        self.write("SIGUSR1")
                    elif number == signal.SIGTERM and not is_ours:
                        self.write("SIGTERM", level=logging.INFO)
                    elif number == signal.SIGTERM:
                        self.write("SIGTERM")
                        # Python lets only the main thread, which may hang, give a signal its default action back.
                        ctypes.CDLL(None).signal(number, ctypes.c_void_p(_DEFAULT_ACTION))
                        os.kill(os.getpid(), number)


def _file_name(rank: int) -> str:
    return f"rank-{rank}.json"


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _dumped(entry: Entry) -> DumpedCall:
    collective = entry.collective
    return DumpedCall(
        entry.group,
        entry.seq,
        collective.agreed(),
        collective.purpose(),
        entry.started_s,
        entry.ended_s,
        collective.operation in MESSAGES,
    )


def _as_json(dump: Dump) -> dict[str, Any]:
    fields = {name: getattr(dump, name) for name in ("rank", "world_size", "reason", "at_s", "host", "pid")}
    names = DumpedCall.__slots__
    return {**fields, "calls": [{name: getattr(call, name) for name in names} for call in dump.calls]}
