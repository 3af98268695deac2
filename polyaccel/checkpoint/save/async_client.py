"""A rank's side of its saves in the background: hands its part to the process next to it, and asks for the outcome."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Lock, local
from time import monotonic
from typing import Any, Protocol

from polyaccel.checkpoint.save.async_image import Image
from polyaccel.checkpoint.save.async_job import GIVE_UP, LAST, SaveJob, receive, segments_of, send
from polyaccel.checkpoint.save.protocol import SavePart
from polyaccel.checkpoint.storage.owner import ProcessIdentity
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)
# See [Note: SIGTERM during a save] in `async_process`; here it is said before anything else is loaded.
_MAIN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from polyaccel.checkpoint.save.async_process import main
main(int(sys.argv[1]))
"""
_LOOK_AGAIN_S = 0.5
_LOGGED_AFTER_S = 30.0
_TAKE_S = 60.0
_END_S = 60.0
_KILLED_S = 5.0
_STATES = {"T": "is stopped by a signal", "t": "is held by a debugger", "D": "waits for its file system"}
_lock = Lock()
_thread = local()
_under_way: set[Save] = set()
"""Also those whose engines are gone: a save that has begun is looked after until it has ended."""


def can_save_in_background() -> bool:
    """Whether this system has what it takes: memory without a name that another process can be handed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a rank's part of a save went. `error` and its `hint` are empty where all went well."""

    error: str = ""
    hint: str = ""


class Save(Protocol):
    """A rank's part of a save that is under way, wherever that is."""

    is_reported: bool
    """Whether the outcome of what has ended was asked for."""
    limit_s: float
    """The longest wait for its end."""

    def outcome(self, timeout_s: float = 0.0) -> SaveOutcome | None:
        """How it went; None while it is under way, after waiting for at most `timeout_s`."""

    def describe(self) -> str:
        """A sentence about what writes it."""

    def abandon(self, waited_s: float) -> None:
        """End it where it has not ended, after a wait of so many seconds. Its outcome is an error then."""

    def give_up(self) -> None:
        """Let it stop waiting for other ranks' parts."""

    def finish_soon(self) -> None:
        """Let it wait for other ranks' parts no longer than for a while: their outcome will not be reported."""


class LimitedWait:
    """A wait for a save, which is logged when it lasts, and which ends the save at its limit."""

    def __init__(self, save: Save) -> None:
        self._save, self._began_s, self._has_logged = save, monotonic(), False

    def look(self) -> None:
        """Call it again and again while the wait lasts."""
        waited_s = monotonic() - self._began_s
        if waited_s >= self._save.limit_s:
            self._save.abandon(waited_s)
        elif waited_s >= _LOGGED_AFTER_S and not self._has_logged and self._save.outcome() is None:
            self._has_logged = True
            _log.warning(
                "the training has waited %.0f s for a save, and the save fails after %.0f s (checkpoint.timeout_s): %s",
                waited_s, self._save.limit_s, self._save.describe(),
            )  # fmt: skip


def await_end(save: Save) -> SaveOutcome:
    """Wait until `save` has ended, for no longer than its limit."""
    wait = LimitedWait(save)
    while (found := save.outcome(_LOOK_AGAIN_S)) is None:
        wait.look()
    return found


class Pending:
    """A rank's part of a save, under way in the process next to it, `writer`."""

    def __init__(self, connection: socket.socket, writer: _Process, limit_s: float) -> None:
        self._connection = connection
        self._writer = writer
        self.limit_s = limit_s
        self._outcome: SaveOutcome | None = None
        self._of = os.getpid()
        self._lock = Lock()
        self.is_reported = False
        """Whether the outcome of what has ended was asked for."""
        _under_way.add(self)

    def outcome(self, timeout_s: float = 0.0) -> SaveOutcome | None:
        """How it went; None while it is under way, after waiting for at most `timeout_s`."""
        with self._lock:  # ranks may be threads, and every reader of a checkpoint asks too
            if self._outcome is None:
                self._outcome = self._received(timeout_s)
            if self._outcome is not None:
                _under_way.discard(self)
            return self._outcome

    def describe(self) -> str:
        """A sentence about the process."""
        return self._writer.describe()

    def abandon(self, waited_s: float) -> None:
        """Kill the process where the save has not ended; the next save starts another."""
        if self.outcome() is not None:
            return
        with self._lock:
            self._outcome = SaveOutcome(
                f"it has not ended within {waited_s:.0f} s: {self.describe()}",
                "look at its file system, or raise checkpoint.timeout_s",
            )
            self._connection.close()
        _under_way.discard(self)
        self._writer.replace()

    def _received(self, timeout_s: float) -> SaveOutcome | None:
        if self._of != os.getpid():  # forked from the process whose save it is
            return SaveOutcome()
        try:
            self._connection.settimeout(timeout_s)
            self._connection.recv(1, socket.MSG_PEEK)
            self._connection.settimeout(None)
            message = receive(self._connection)
        except (BlockingIOError, TimeoutError):
            return None
        except (OSError, EOFError):
            message = None
        self._connection.close()
        return _read(message)

    def give_up(self) -> None:
        """Let the process stop waiting for other ranks' parts."""
        self._say(GIVE_UP)

    def finish_soon(self) -> None:
        """Limit how long the process waits for other ranks' parts: no rank will read their outcome."""
        self._say(LAST)

    def _say(self, word: bytes) -> None:
        with suppress(OSError):
            self._connection.send(word)


def start(part: SavePart, image: Image, limit_s: float, **job: Any) -> Pending:
    """Hand a part, which `image` has been filled with, to the process next to this one, which has at most `limit_s`
    while training waits for it; `job` are the fields of `SaveJob` that the part does not have. The image stays as it is
    until the outcome is there.

    Raises CheckpointError when there is no process.
    """
    for earlier in list(_under_way):
        earlier.outcome()
    layout = part.layout
    save_job = SaveJob(
        name=layout.name,
        nbytes=layout.nbytes,
        header=layout.header.decode("latin-1"),
        segments=segments_of(layout),
        scalars=dict(part.scalars),
        about=dict(part.about),
        **job,
    )
    writer = _process()
    ours, theirs = socket.socketpair()
    with theirs:
        writer.take(save_job.to_bytes(), (image.descriptor, theirs.fileno()))
    return Pending(ours, writer, limit_s)


def owner() -> ProcessIdentity:
    """The process next to this one, which is started if there is none."""
    return ProcessIdentity.from_pid(_process().pid)


class _Process:
    """The process next to this one. It ends when this one does, after its jobs."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environ = dict(os.environ, OMP_NUM_THREADS="1")
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environ,
                    start_new_session=True,  # the interrupt from a keyboard ends training, not a save
                )
            except OSError as error:
                raise CheckpointError(
                    f"the process that writes checkpoints cannot be started: {error}",
                    hint='set "checkpoint.async": false',
                ) from error
        self._socket = ours
        self._socket.settimeout(_TAKE_S)
        self._of = os.getpid()
        self.pid = self._child.pid

    def is_ours(self) -> bool:
        """Whether it lives, and is not that of a process from which this one was forked."""
        return self._of == os.getpid() and self._child.poll() is None

    def close(self) -> None:
        """Wait until it has ended after its jobs; kill it if that takes too long. Ignores a forked parent's."""
        self._socket.close()
        if self._of == os.getpid():
            try:
                self._child.wait(_END_S)
            except subprocess.TimeoutExpired:
                _log.warning("a process is killed that does not end: %s", self.describe())
                self._kill()

    def replace(self) -> None:
        """Kill it, and let the next save start another."""
        with _lock:
            if self in _processes:
                _processes.remove(self)
        self._socket.close()
        if self._of == os.getpid():
            self._kill()

    def _kill(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits for its file system ends when that answers
            self._child.wait(_KILLED_S)

    def take(self, job: bytes, descriptors: tuple[int, ...]) -> None:
        """Hand over a job."""
        try:
            with _lock:
                send(self._socket, job, descriptors)
        except OSError as error:
            message = f"{self.describe()}, and takes no save: {error}"
            self.replace()
            raise CheckpointError(message, hint="save again: another process is started then") from error

    def describe(self) -> str:
        """A sentence about it, with the cause of a wait where the system knows one."""
        state = ""
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return f"process {self.pid}, which writes checkpoints, {_STATES.get(state, 'has not answered')}"


_processes: list[_Process] = []


def _process() -> _Process:
    with _lock:
        if _processes and not _processes[0].is_ours():
            _processes.pop().close()
        if not _processes:
            _processes.append(_Process())
        return _processes[0]


def stop() -> None:
    """Let the process next to this one end after its jobs, and wait for that. The next save starts another."""
    with _lock:
        while _processes:
            _processes.pop().close()


def _read(message: tuple[bytes, list[int]] | None) -> SaveOutcome:
    if message is None:
        return SaveOutcome(
            "the process that writes checkpoints has ended", "save again; if it was killed, look for its cause there"
        )
    tree: Mapping[str, Any] = json.loads(message[0])
    for level, line in tree["log"]:
        _log.log(level, "%s", line)
    return SaveOutcome() if tree["error"] is None else SaveOutcome(*tree["error"])


def register_pending(save: Save) -> None:
    """From now on each open of a checkpoint in this process waits for a save first, and so does its end."""
    _under_way.difference_update([each for each in _under_way if each.outcome() is not None])
    _under_way.add(save)


@contextmanager
def waiting_for_nobody() -> Iterator[None]:
    """This thread is itself in the middle of a save, and waits for none."""
    _thread.is_saving = True
    try:
        yield
    finally:
        _thread.is_saving = False


def settle() -> None:
    """Wait until what this process has handed over is written. The outcome is raised where it is asked for."""
    if getattr(_thread, "is_saving", False):
        return
    for pending in list(_under_way):
        await_end(pending)


def _at_exit() -> None:
    """A script that ends right after a save has saved: its process waits for it, and reports a failure."""
    for pending in list(_under_way):
        pending.finish_soon()
        outcome = await_end(pending)
        if outcome.error and not pending.is_reported:
            _log.error("a checkpoint was not saved: %s", outcome.error)
    stop()


atexit.register(_at_exit)
Finalize(None, _at_exit, exitpriority=0)  # processes of multiprocessing leave the others out
