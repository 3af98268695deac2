"""A job that is started again when it fails: new ranks, the same keeper.

[Note: State kept over restarts]
Each start is a separate job, with another id and another port, after nothing of the one before is left. What they
have in common is the secret and the keeper of each host, in which ranks find what those before them have handed over.
The ranks may be fewer: a rank that a signal killed may have taken something with it that is not there for the next one,
such as a device or memory. Whether a number of ranks suits the training, the training says.
"""

from __future__ import annotations

import os
import secrets
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event, Thread
from time import monotonic

from polyaccel.errors import LaunchError
from polyaccel.job.auth import SECRET_VARIABLE, job_secret_from_env
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.job.memory_server.start import KeeperProcess, can_keep, keeper_name
from polyaccel.launch.base import Job, JobResult, Launcher, noop
from polyaccel.launch.hosts import first_slots, is_here

RESTART_VARIABLE = "POLYACCEL_RESTART_COUNT"
"""The variable with how often the job was started before."""
BEAT_S = 2.0
"""How often the launcher sends a sign of life to a keeper on another host."""
SILENCE_S = 60.0
"""It ends when it has received nothing for so long."""
READY_S = 60.0
_AGAIN_S = 5.0
_END_S = 20.0
_MOST_FAILURES = 10
_PROGRAM = (sys.executable, "-m", "polyaccel.job.memory_server.process")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a job is started again, and with how many ranks: as many as before, or, where `least` is not None, down
    to that many: as many as `count_ranks` gives, or without it one fewer for each that a signal killed. Where only some
    numbers can train, `sizes` has them: then it is the largest of these that is not above, and not below `least`."""

    most: int
    least: int | None = None
    count_ranks: Callable[[], int] | None = None
    sizes: tuple[int, ...] | None = None

    def ranks_after(self, ranks: int, end: JobResult) -> int:
        """The ranks of the next start."""
        if self.least is None:
            return ranks
        left = ranks - end.killed if self.count_ranks is None else self.count_ranks()
        left = max(left, min(self.least, ranks))
        if self.sizes is None:
            return left
        fitting = [size for size in self.sizes if min(self.least, ranks) <= size <= left]
        return max(fitting, default=ranks)


def run_with_restarts(launcher: Launcher, job: Job, policy: RestartPolicy) -> JobResult:
    """Start a job until it ends well, was asked to end, or has been started again as often as `policy` allows (0 times
    for a launcher that does so itself), and return how it ended the last time. A keeper is there on each host from
    start to start. Where all ranks are on this host, there may be fewer ranks.

    Raises LaunchError when it cannot be started, CommError for a secret that can be guessed.
    """
    is_one_of_many = (job.node is not None and len(job.hosts) > 1) or job.elastic.most > 1
    found = job_secret_from_env({SECRET_VARIABLE: job.secret})
    secret = found or (b"" if is_one_of_many else secrets.token_hex().encode())  # the other hosts would draw others
    is_here_alone = len(job.hosts) == 1 and is_here(next(iter(job.hosts)))
    keepers = Keepers.from_job(launcher, job, secret) if secret else None
    kept = {} if keepers is None else {KEEPER_VARIABLE: keepers.name}
    look = noop if keepers is None else keepers.look
    try:
        for attempt in range(policy.most + 1):
            if keepers is not None:
                keepers.await_all()
            exports = {**job.exports, **kept, RESTART_VARIABLE: str(attempt)}
            end = launcher.run(replace(job, job_id=uuid.uuid4().hex, secret=secret.decode(), exports=exports), look)
            if end.code == 0 or end.was_asked or attempt == policy.most:
                break
            before = job.world_size
            if is_here_alone:
                job = replace(job, hosts=first_slots(job.hosts, policy.ranks_after(before, end)))
            fewer = f" with {job.world_size} of {before} ranks" if job.world_size != before else ""
            say(f"restart {attempt + 1} of {policy.most}{fewer}: {end.cause}")
        return end
    finally:
        if keepers is not None:
            keepers.close()


class Keepers:
    """One keeper on this host, if ranks are here, and one on each other host of a job; each is started again when it
    was killed, unless that fails again and again. Used by one thread."""

    def __init__(self, name: str, here: KeeperProcess | None, far: Sequence[FarKeeper]) -> None:
        self.name = name
        self._here = here
        self._far = tuple(far)
        self._failures = 0

    @classmethod
    def from_job(cls, launcher: Launcher, job: Job, secret: bytes) -> Keepers | None:
        """Return keepers of a job's hosts; None where not every host can have one. Raises LaunchError here."""
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
