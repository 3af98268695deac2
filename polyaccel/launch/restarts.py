"""A job that is started again when it fails: its ranks anew, its keeper the same.

[Note: What a restart has]
Each start is a job of its own, with another id and another port, after nothing of the one before is left. What they
have in common is the secret and the keeper, in which ranks find what those before them have handed over. The ranks may
be fewer: a rank that a signal killed may have taken something with it that is not there for the next one, such as a
device or memory. Whether a number of ranks suits the training, the training says.
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, JobEnd, Launcher, look_at_nothing
from polyaccel.launch.hosts import first_slots, is_here
from polyaccel.launch.keeper.protocol import KEEPER_VARIABLE
from polyaccel.launch.keeper.start import KeeperProcess, can_keep
from polyaccel.seal import SECRET_VARIABLE, secret_in

RESTART_VARIABLE = "POLYACCEL_RESTART_COUNT"
"""The variable with how often the job was started before."""
_MOST_FAILURES = 10


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a job is started again, and with how many ranks: as many as before, or, where `least` is not None, down
    to that many: as many as `count_ranks` says, or without it one fewer for each that a signal killed."""

    most: int
    least: int | None = None
    count_ranks: Callable[[], int] | None = None

    def ranks_after(self, ranks: int, end: JobEnd) -> int:
        """The ranks of the next start."""
        if self.least is None:
            return ranks
        left = ranks - end.killed if self.count_ranks is None else self.count_ranks()
        return max(left, min(self.least, ranks))


def run_with_restarts(launcher: Launcher, job: Job, policy: RestartPolicy) -> JobEnd:
    """Start a job until it ends well, was asked to end, or has been started again as often as `policy` allows, and
    tell how it ended the last time. Where all ranks are on this host, a keeper is there from start to start, and there
    may be fewer ranks.

    Raises LaunchError when it cannot be started, CommError for a secret that can be guessed.
    """
    secret = secret_in({SECRET_VARIABLE: job.secret}) or secrets.token_hex().encode()
    is_here_alone = len(job.hosts) == 1 and is_here(next(iter(job.hosts)))
    keeper = _Keeping.started(secret) if is_here_alone and can_keep() else None
    kept = {} if keeper is None else {KEEPER_VARIABLE: keeper.name}
    look = look_at_nothing if keeper is None else keeper.look
    try:
        for attempt in range(policy.most + 1):
            look()
            exports = {**job.exports, **kept, RESTART_VARIABLE: str(attempt)}
            end = launcher.run(replace(job, job_id=uuid.uuid4().hex, secret=secret.decode(), exports=exports), look)
            if end.code == 0 or end.was_asked or attempt == policy.most:
                break
            before = job.world_size
            if is_here_alone:
                job = replace(job, hosts=first_slots(job.hosts, policy.ranks_after(before, end)))
            fewer = f" with {job.world_size} of {before} ranks" if job.world_size != before else ""
            _say(f"restart {attempt + 1} of {policy.most}{fewer}: {end.cause}")
        return end
    finally:
        if keeper is not None:
            keeper.close()


class _Keeping:
    """A keeper that is started again when somebody has killed it, unless that fails again and again."""

    def __init__(self, process: KeeperProcess) -> None:
        self._process = process
        self._failures = 0

    @classmethod
    def started(cls, secret: bytes) -> _Keeping:
        return cls(KeeperProcess(secret))

    @property
    def name(self) -> str:
        return self._process.name

    def look(self) -> None:
        """See whether it is there."""
        if self._failures < _MOST_FAILURES:
            try:
                if self._process.ensure():
                    self._failures = 0
                    _say("the keeper of replicas was killed, and begins anew")
            except LaunchError as error:
                self._failures += 1
                _say(f"{error.message}: the job goes on without replicas for now")

    def close(self) -> None:
        self._process.close()


def _say(sentence: str) -> None:
    with suppress(OSError):
        os.write(2, f"polyaccel: {sentence}\n".encode(errors="backslashreplace"))
