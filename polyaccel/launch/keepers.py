"""The keepers of a job, one on each of its hosts, as the launcher looks after them from start to start.

All have one name. A name of a socket without a file is that of a host (of a network namespace), so every rank finds the
keeper of its own host under it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from time import monotonic

from polyaccel.errors import LaunchError
from polyaccel.job.memory_server.start import KeeperProcess, can_keep, keeper_name
from polyaccel.launch.base import Job, Launcher
from polyaccel.launch.hosts import is_here

BEAT_S = 2.0
"""How often the launcher sends a sign of life to a keeper on another host."""
SILENCE_S = 60.0
"""It ends when it has received nothing for so long."""
READY_S = 60.0
_AGAIN_S = 5.0
_END_S = 20.0
_MOST_FAILURES = 10
_PROGRAM = (sys.executable, "-m", "polyaccel.job.memory_server.process")


class Keepers:
    """One keeper on this host, if ranks are here, and one on each other host of a job; each is started again when it
    was killed, unless that fails again and again. Used by one thread."""

    def __init__(self, name: str, here: KeeperProcess | None, far: Sequence[FarKeeper]) -> None:
        self.name = name
        self._here = here
        self._far = tuple(far)
        self._failures = 0

    @classmethod
    def of(cls, launcher: Launcher, job: Job, secret: bytes) -> Keepers | None:
        """Those of a job's hosts; None where not every host can have one. Raises LaunchError when the one on this host
        cannot be started."""
        if not can_keep():
            return None
        name, ways = keeper_name(), dict[str, tuple[str, ...]]()
        others = [] if job.node is not None else [host for host in job.hosts if not is_here(host)]
        for host in others:
            way = launcher.remote_command(job, host, _PROGRAM)
            if way is None:
                return None
            ways[host] = way
        has_ranks_here = job.node is not None or len(others) < len(job.hosts)
        here = KeeperProcess(secret, name=name) if has_ranks_here else None
        return cls(name, here, [FarKeeper(host, way, name, secret) for host, way in ways.items()])

    def look(self) -> None:
        """See whether the one on this host is there."""
        if self._here is None or self._failures >= _MOST_FAILURES:
            return
        try:
            if self._here.ensure():
                self._failures = 0
                say("the keeper of replicas was killed, and begins again")
        except LaunchError as error:
            self._failures += 1
            say(f"{error.message}: the job continues without replicas for now")

    def await_all(self) -> None:
        """Return when all are there, or have been tried."""
        self.look()
        until_s = monotonic() + READY_S
        for each in self._far:
            each.look()
        for each in self._far:
            each.await_tried(max(0.0, until_s - monotonic()))

    def close(self) -> None:
        """Let all of them end, with all that they keep."""
        for each in self._far:
            each.ask_to_end()
        if self._here is not None:
            self._here.close()
        for each in self._far:
            each.await_end()


class FarKeeper:
    """The keeper of another host, and a thread that stays with it: a way to a host takes its time."""

    def __init__(self, host: str, way: tuple[str, ...], name: str, secret: bytes) -> None:
        self._host, self._way, self._name, self._secret = host, way, name, secret
        self._is_tried, self._has_work, self._is_over = Event(), Event(), False
        self._thread = Thread(target=self._stay, name=f"keeper on {host}", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """See whether it is there; `await_tried` waits for that."""
        self._is_tried.clear()
        self._has_work.set()

    def await_tried(self, timeout_s: float) -> None:
        """Return when it is there, or could not be started the last time, or after so long."""
        self._is_tried.wait(timeout_s)

    def ask_to_end(self) -> None:
        """Let it end; `await_end` waits for that."""
        self._is_over = True
        self._has_work.set()

    def await_end(self) -> None:
        self._thread.join(_END_S)

    def _stay(self) -> None:
        failures, starts = 0, 0
        while not self._is_over and failures < _MOST_FAILURES:
            try:
                process = KeeperProcess(self._secret, name=self._name, way=self._way, silence_s=SILENCE_S)
            except LaunchError as error:
                failures += 1
                say(f"on {self._host}, {error.message}: the job continues without replicas there for now")
                self._is_tried.set()
                self._pause(_AGAIN_S)
                continue
            if starts:
                say(f"the keeper of replicas on {self._host}, or the way to it, was lost, and there is one again")
            failures, starts = 0, starts + 1
            while not self._is_over and process.answers():
                self._is_tried.set()
                self._pause(BEAT_S)
            process.close()
        self._is_tried.set()

    def _pause(self, seconds: float) -> None:
        self._has_work.wait(seconds)
        self._has_work.clear()


def say(sentence: str) -> None:
    """A sentence of the launcher's, on standard error."""
    with suppress(OSError):
        os.write(2, f"polyaccel: {sentence}\n".encode(errors="backslashreplace"))
