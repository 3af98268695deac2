"""Ending the whole MPI job when this rank fails, so that no rank waits for it forever.

An uncaught exception ends one process only: it would wait inside MPI's finalize for ranks that wait for it in a
collective. So it is printed as always, and then `MPI.Abort` ends all ranks. A rank that ends normally aborts nothing;
but where calls are still under way then, it carries them through first, within their time limit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import redirect_stderr
from threading import ExceptHookArgs
from time import monotonic, sleep
from types import TracebackType
from typing import TextIO

from mpi4py import MPI

from polyaccel.comm.mpi.progress import PROGRESS
from polyaccel.errors import CommError

_EXIT_CODE = 1
_READ_WITHIN_S = 1.0


class AbortOnFailure:
    """The hooks of one process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._previous = sys.excepthook, threading.excepthook
        sys.excepthook = self._on_error
        threading.excepthook = self._on_thread_error
        atexit.register(self._at_exit)

    def abort(self) -> None:
        """End the job at once, on every rank. A forked child is not a rank and ends only itself."""
        for stream in (sys.stdout, sys.stderr):
            _pass_on(stream)
        if os.getpid() == self._process and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(_EXIT_CODE)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            # torch's hook, which calls this one, collects what is written to sys.stderr, to print it later.
            with redirect_stderr(sys.__stderr__ or sys.stderr):
                self._previous[0](kind, error, trace)
        finally:
            self.abort()

    def _on_thread_error(self, what: ExceptHookArgs) -> None:
        try:
            self._previous[1](what)
        finally:
            # A thread that has called no collective may fail without anybody waiting for it.
            if what.thread is not None and what.thread.ident in PROGRESS.threads:
                self.abort()

    def _at_exit(self) -> None:
        if os.getpid() != self._process or MPI.Is_finalized():
            return
        try:
            for work in PROGRESS.running:
                work.wait()
        except CommError as error:
            print(f"rank {MPI.COMM_WORLD.Get_rank()} cannot end: {error}", file=sys.stderr)
            self.abort()


_installed: AbortOnFailure | None = None


def abort_on_failure() -> None:
    """Install the hooks, once a process."""
    global _installed
    _installed = _installed or AbortOnFailure()


def _pass_on(stream: TextIO | None) -> None:
    """Flush, and wait until the launcher has read what is in its pipe: MPICH's drops the rest when a rank aborts."""
    if stream is None or sys.platform == "win32":
        return
    import fcntl
    import termios

    deadline = monotonic() + _READ_WITHIN_S
    try:
        stream.flush()
        while any(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4))) and monotonic() < deadline:
            sleep(0.001)
    except (OSError, ValueError):
        return  # closed already, or nothing that is read from
