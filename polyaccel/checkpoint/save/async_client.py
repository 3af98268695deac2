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
from threading import Lock, local
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

    def outcome(self, timeout_s: float | None = 0.0) -> SaveOutcome | None:
        """How it went; None while it is under way, after waiting for at most `timeout_s` (None: until it has ended)."""

    def give_up(self) -> None:
        """Let it stop waiting for other ranks' parts."""

    def finish_soon(self) -> None:
        """Let it wait for other ranks' parts no longer than for a while: their outcome will not be reported."""


class Pending:
    """A rank's part of a save, under way in the process next to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outcome: SaveOutcome | None = None
        self._of = os.getpid()
        self._lock = Lock()
        self.is_reported = False
        """Whether the outcome of what has ended was asked for."""
        _under_way.add(self)

    def outcome(self, timeout_s: float | None = 0.0) -> SaveOutcome | None:
        """How it went; None while it is under way, after waiting for at most `timeout_s` (None: until it has ended)."""
        with self._lock:  # ranks may be threads, and every reader of a checkpoint asks too
            if self._outcome is None:
                self._outcome = self._received(timeout_s)
            if self._outcome is not None:
                _under_way.discard(self)
            return self._outcome

    def _received(self, timeout_s: float | None) -> SaveOutcome | None:
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
        """Let the process wait for other ranks' parts no longer than for a while: their outcome will not be
        reported."""
        self._say(LAST)

    def _say(self, word: bytes) -> None:
        with suppress(OSError):
            self._connection.send(word)


def start(part: SavePart, image: Image, **job: Any) -> Pending:
    """Hand a part, which `image` has been filled with, to the process next to this one; `job` are the fields of
    `SaveJob` that the part does not have. The image stays as it is until the outcome is there.

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
    ours, theirs = socket.socketpair()
    with theirs:
        _process().take(save_job.to_bytes(), (image.descriptor, theirs.fileno()))
    return Pending(ours)


def owner() -> ProcessIdentity:
    """The process next to this one, which is started if there is none."""
    return ProcessIdentity.of(_process().pid)


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
        self._of = os.getpid()
        self.pid = self._child.pid

    def is_ours(self) -> bool:
        """Whether it lives, and is not that of a process from which this one was forked."""
        return self._of == os.getpid() and self._child.poll() is None

    def close(self) -> None:
        """Wait until it has done its jobs and ended; nothing of one that was this process's parent's."""
        self._socket.close()
        if self._of == os.getpid():
            self._child.wait()

    def take(self, job: bytes, descriptors: tuple[int, ...]) -> None:
        """Hand over a job."""
        try:
            with _lock:
                send(self._socket, job, descriptors)
        except OSError as error:
            raise CheckpointError(f"the process that writes checkpoints has ended: {error}") from error


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
        pending.outcome(timeout_s=None)


def _at_exit() -> None:
    """A script that ends right after a save has saved: its process waits for it, and reports a failure."""
    for pending in list(_under_way):
        pending.finish_soon()
        outcome = pending.outcome(timeout_s=None)
        if outcome is not None and outcome.error and not pending.is_reported:
            _log.error("a checkpoint was not saved: %s", outcome.error)
    stop()


atexit.register(_at_exit)
Finalize(None, _at_exit, exitpriority=0)  # processes of multiprocessing leave the others out
