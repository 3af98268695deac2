"""A job that is started again when it fails: new ranks, the same keeper.

[Note: State kept over restarts]
Each start is a separate job, with another id and another port, after nothing of the one before is left. What they
have in common is the secret and the keeper of each host, in which ranks find what those before them have handed over.
The ranks may be fewer: a rank that a signal killed may have taken something with it that is not there for the next one,
such as a device or memory. Whether a number of ranks suits the training, the training says.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from polyaccel.job.auth import SECRET_VARIABLE, job_secret_from_env
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.launch.base import Job, JobResult, Launcher, noop
from polyaccel.launch.hosts import first_slots, is_here
from polyaccel.launch.keepers import Keepers, say

RESTART_VARIABLE = "POLYACCEL_RESTART_COUNT"
"""The variable with how often the job was started before."""


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
    keepers = Keepers.of(launcher, job, secret) if secret else None
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
