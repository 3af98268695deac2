"""The flight recorder on disk: one JSON file a rank, written when a collective fails, when the process gets SIGUSR1 or
SIGTERM, or when it ends by an uncaught exception. A rank that is killed leaves none: a launcher ends the others by
SIGTERM, and what these were in shows whom they waited for.

[Note: Signal handling in a hang]
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
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any

from polyaccel.comm.collective import MESSAGES
from polyaccel.comm.flight_recorder.record import Entry, FlightRecorder
from polyaccel.comm.flight_recorder.watchdog import uncaught
from polyaccel.comm.host_address import start_of
from polyaccel.core.user_dirs import atomic_write_private, ensure_private_dir, runtime_folder
from polyaccel.errors import CommError
from polyaccel.job.readiness import FAILS, report_to_launcher

_log = logging.getLogger(__name__)

FORMAT = 1
FOLDER_VARIABLE = "POLYACCEL_DUMP_DIR"
_DEFAULT_ACTION = 0  # SIG_DFL of the C library
_WRITING_S = 2.0  # until the thread has written, unless the disk stands still
_SAYING_S = 0.2
_HANGS_AFTER_S = 2.0
_MOST_NBYTES = 1 << 26
_MOST_RANKS = 1 << 20
_JOB_PREFIX = "dump-"
MOST_OLD_JOBS = 16
"""Jobs that have ended whose dumps are kept."""


@dataclass(frozen=True, slots=True)
class DumpedCall:
    """A call as a rank recorded it. `is_message`: a send or receive, which has no number."""

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
    """Write `rank-N.json` into `folder`, which exists, whole or not at all, over an older one. Raises OSError."""
    path = folder / _file_name(dump.rank)
    atomic_write_private(path, json.dumps({"format": FORMAT, **_as_json(dump)}).encode())
    return path


def read_dump(path: Path) -> Dump:
    """Read what `write_dump` wrote. Raises CommError that names the file."""
    from pydantic import TypeAdapter  # ranks write, and need none of it

    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise ValueError(f"it is longer than {_MOST_NBYTES} bytes")
        tree = json.loads(path.read_bytes())
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise ValueError("written by another version of polyaccel, or by another program")
        dump = TypeAdapter(Dump).validate_python(tree)
        if not 0 <= dump.rank < dump.world_size <= _MOST_RANKS:
            raise ValueError(f"rank {dump.rank} is not in a world of {dump.world_size}")
        strange = next((call for call in dump.calls if dump.rank not in call.group), None)
        if strange is not None:
            raise ValueError(f"rank {dump.rank} called #{strange.seq} on a group that it is not in: {strange.group}")
        return dump
    except (OSError, ValueError, RecursionError) as error:
        raise CommError(
            f"{path} is not a dump of the flight recorder: {error}",
            hint="name the rank-N.json files of one job, or the folder that holds them",
            value=str(path),
        ) from error


def job_folder(environ: Mapping[str, str]) -> Path:
    """The folder of this job's dumps, by the process that launched it, in the user's runtime folder."""
    launcher = os.getppid()
    return runtime_folder(environ) / f"{_JOB_PREFIX}{launcher}-{_start_of(launcher)}"


def forget_old_jobs(runtime: Path) -> None:
    """Remove dumps of ended jobs except the last MOST_OLD_JOBS; other ranks may do the same."""
    old = []
    for folder in runtime.glob(f"{_JOB_PREFIX}*"):
        launcher, _, start = folder.name.removeprefix(_JOB_PREFIX).partition("-")
        is_known = launcher.isdecimal() and start.isdecimal() and int(start) > 0
        if not (is_known and _start_of(int(launcher)) == int(start)):
            with suppress(OSError):
                old.append((folder.lstat().st_mtime, folder))
    for _, folder in sorted(old, reverse=True)[MOST_OLD_JOBS:]:
        shutil.rmtree(folder, ignore_errors=True)


class FlightRecorderDumper:
    """Writes this rank's dump when something goes wrong. One a process, from `start` to `stop`.

    `folder` is the user's choice; None is the job's in the runtime folder, which is made when there is something to
    write. An event is written once; SIGUSR1 writes again each time, so that a job can write twice.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        rank: int,
        world_size: int,
        folder: Path | None,
        leave: Callable[[str], object] = lambda why: None,
    ) -> None:
        """`leave` is called before this process ends by an exception, with how it ends."""
        self._recorder = recorder
        self._leave = leave
        self._rank = rank
        self._world_size = world_size
        self._is_chosen = folder is not None
        self._folder = folder or job_folder(os.environ)
        self._undo: list[Callable[[], object]] = []
        self._writing = threading.Lock()
        self._main_is_writing = False
        self._after_writing: Callable[[], object] | None = None

    def start(self) -> None:
        """Listen for failures, exceptions and signals; keep an earlier job's files as `rank-N.earlier`."""
        if not self._is_chosen:
            forget_old_jobs(self._folder.parent)
        left = self._folder / _file_name(self._rank)
        with suppress(OSError):  # as a rule there is nothing
            left.replace(left.with_suffix(".earlier"))
        self._recorder.on_failure = self._record_failure
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
        return self._write_and_log(reason, level)[0]

    def _record_failure(self, reason: str) -> str:
        """Write the dump; return the sentence on it, which the caller logs."""
        return self._write_and_log(reason, logging.DEBUG)[1]

    def _write_and_log(self, reason: str, level: int) -> tuple[Path | None, str]:
        is_main = _is_main_thread()
        self._main_is_writing = self._main_is_writing or is_main
        with self._writing:
            path, said = self._write(reason)
            _log.log(level, said)
        if is_main:
            self._main_is_writing = False
            after, self._after_writing = self._after_writing, None
            if after is not None:
                after()
        return path, said

    def _write(self, reason: str) -> tuple[Path | None, str]:
        """Write the dump. Returns its path and a sentence on it; None where it could not be written."""
        try:
            if self._is_chosen:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            else:
                ensure_private_dir(ensure_private_dir(self._folder.parent) / self._folder.name)
            dump = dump_of(list(self._recorder.entries), self._rank, self._world_size, reason)
            path = write_dump(dump, self._folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: another thread made a call meanwhile
            return None, f"the flight recorder could not be written to {self._folder}: {error}"
        compare = f"polyaccel comm diff {path.parent}"
        return path, f"{reason}; the last calls are in {path}, compare all ranks with `{compare}`"

    def _write_last(self, reason: str) -> None:
        """Write the dump of a process that ends now; show a line only for a stuck call and a free log."""
        hangs = self._hangs()
        with self._writing:
            path, said = self._write(reason)
        if path is not None and not hangs:
            return
        line = threading.Thread(target=_log.warning, args=(said,), daemon=True, name="polyaccel last line")
        line.start()
        line.join(_SAYING_S)

    def _hangs(self) -> bool:
        """Whether a call has not ended for a while."""
        waits_since_s = min((each.started_s for each in [*self._recorder.entries] if each.ended_s is None), default=inf)
        return time() - waits_since_s >= _HANGS_AFTER_S

    def _watch_exceptions(self) -> None:
        of_main, of_threads = sys.excepthook, threading.excepthook

        def on_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not (hasattr(sys, "ps1") or sys.flags.interactive):  # where a prompt follows, the process continues
                if not issubclass(kind, CommError):  # which follows a failure elsewhere, as a rule
                    report_to_launcher(os.environ, self._rank, FAILS)  # before peers can notice
                self._leave(uncaught(error))
            if not issubclass(kind, KeyboardInterrupt):
                is_logged = issubclass(kind, CommError)  # with the collective that failed
                self.write(f"uncaught {kind.__name__}", level=logging.DEBUG if is_logged else logging.WARNING)
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
        """See [Note: Signal handling in a hang]."""
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
                # A script that continued could end well before the thread has written. But what this thread is writing
                # itself, the other one waits for.
                if self._main_is_writing:
                    self._after_writing = wait_for_the_end
                else:
                    wait_for_the_end()

        def wait_for_the_end() -> None:
            reader.join(_WRITING_S)

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
                        # The script's own way to end; it has the word, unless it cannot.
                        self.write("SIGTERM", level=logging.INFO if self._hangs() else logging.DEBUG)
                    elif number == signal.SIGTERM:
                        self._write_last("SIGTERM")
                        # Python lets only the main thread, which may hang, give a signal its default action back.
                        ctypes.CDLL(None).signal(number, ctypes.c_void_p(_DEFAULT_ACTION))
                        os.kill(os.getpid(), number)


def _start_of(process: int) -> int:
    """`start_of`; 0 where the process does not exist, or no way to ask."""
    try:
        return start_of(process)
    except (OSError, ValueError, IndexError):
        return 0


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
