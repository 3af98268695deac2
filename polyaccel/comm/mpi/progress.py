"""Calls under way over MPI: they progress only while a caller waits, or asks whether one is done.

[Note: MPI progress]
MPI libraries move messages inside MPI calls only, and a helper thread that makes such calls all the time would take a
core from the computation. So nothing progresses in the background here: every wait, and every `is_done`, takes all
calls of this process one step further, on whichever group and in whichever order they were started. That is what lets
ranks wait at different times: a rank that waits for another call still answers those that wait for this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock, get_ident
from time import monotonic, sleep
from typing import Any

from mpi4py import MPI

from polyaccel.comm.collectives.p2p import Message, Steps
from polyaccel.comm.work import Work
from polyaccel.core.buffer import Buffer
from polyaccel.errors import CommError

_EAGER_POLLS = 20  # a message that is about to arrive is not worth a call of the scheduler
_NAP_S = 50e-6  # see `Progress.awake_s`
_yield_core = getattr(os, "sched_yield", lambda: None)

Failed = Callable[[Exception | None, list[int]], CommError]
"""Makes the error of a call from MPI's own (None: it timed out) and the group's ranks whose messages are missing."""


class Progress:
    """Everything that this process has under way. Any thread may poll; one at a time does.

    `awake_s`: how long a wait looks all the time before it takes naps between looks. Naps cost a third of the speed of
    messages that take that long, but leave the core to late ranks; where ranks share cores they are late for want of
    one.
    """

    def __init__(self) -> None:
        self.awake_s = 0.05
        self.threads: set[int] = set()
        """Those that have started a call."""
        self._running: dict[MpiWork, None] = {}
        self.failed: list[MpiWork] = []
        """Kept for good: MPI may still write to their buffers."""
        self._lock = Lock()

    @property
    def running(self) -> list[MpiWork]:
        """The calls that are not complete, in the order in which they were started."""
        return list(self._running)

    def share_cores(self) -> None:
        """There are more ranks than cores."""
        self.awake_s = 100e-6

    def add(self, work: MpiWork) -> None:
        self._running[work] = None

    def poll(self) -> None:
        """Take every call one step further. Returns at once while another thread does so."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for work in list(self._running):
                if work.advance():
                    del self._running[work]
        finally:
            self._lock.release()


PROGRESS = Progress()
"""One for the process: a wait on one group must carry on the calls of all others."""


class MpiWork(Work):
    """A collective whose messages are under way. It and `PROGRESS` own its buffers until the last one is through, also
    when a wait has timed out or without a waiter."""

    def __init__(self, steps: Steps, written: Buffer | None, timeout_s: float, failed: Failed) -> None:
        self._steps = steps
        self._written = written
        self._timeout_s = timeout_s
        self._failed = failed
        self._error: CommError | None = None
        self._is_complete = False
        self._awaited: list[Message] = []
        self._requests: list[Any] = []
        self._go_on()
        PROGRESS.threads.add(get_ident())
        if not self._is_complete:
            PROGRESS.add(self)

    def wait(self) -> None:
        polls, began = 0, None
        while not self._is_complete:
            PROGRESS.poll()
            polls += 1
            if polls <= _EAGER_POLLS:
                continue
            now = monotonic()
            began = now if began is None else began
            if now - began < PROGRESS.awake_s:
                _yield_core()
            elif now - began < self._timeout_s:
                sleep(_NAP_S)
            elif not self._is_complete:
                raise self._failed(None, self._missing())
        if self._error is not None:
            raise self._error
        if self._written is not None:
            self._written.bump_version()
            self._written = None

    def is_done(self) -> bool:
        if not self._is_complete:
            PROGRESS.poll()
        return self._is_complete

    def advance(self) -> bool:
        """Look once whether the messages are through that the next step waits for; if so, take it. True at the end."""
        try:
            while not self._is_complete and MPI.Request.Testall(self._requests):
                self._go_on()
        except MPI.Exception as error:
            self._end(self._failed(error, self._missing()))
        return self._is_complete

    def _go_on(self) -> None:
        try:
            awaited = next(self._steps, None)
        except Exception as error:
            self._end(error if isinstance(error, CommError) else self._failed(error, []))
            return
        if awaited is None:
            self._end(None)
        else:
            self._awaited = awaited
            self._requests = [request for message in awaited for request in message.work]

    def _end(self, error: CommError | None) -> None:
        self._error = error
        if error is not None:
            PROGRESS.failed.append(self)
        else:
            self._awaited, self._requests = [], []
            self._steps = iter(())  # releases the buffers
        self._is_complete = True

    def _missing(self) -> list[int]:
        """The group's ranks whose messages have not come, or were not fetched."""
        return sorted({message.peer for message in self._awaited if not _is_through(message)})


def _is_through(message: Message) -> bool:
    try:
        return bool(MPI.Request.Testall(message.work))
    except MPI.Exception:
        return False
