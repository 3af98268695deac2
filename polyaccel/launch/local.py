"""The ranks of this machine, started by this process."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from polyaccel.errors import LaunchError
from polyaccel.launch.affinity import find_cores, split_cores, usable_cpus
from polyaccel.launch.base import DEFAULT_GRACE_S, DEFAULT_STOP_TIMEOUT_S, JobEnd, Launcher, LaunchPlan, RankSpec
from polyaccel.launch.output import JobOutput
from polyaccel.launch.program import check_not_nested, rank_environment
from polyaccel.launch.supervise import Supervisor
from polyaccel.port import free_port, is_free
from polyaccel.types import Probe

_LOOPBACK = "127.0.0.1"  # the number, because some machines cannot look up even "localhost"


def plan_local(
    command: Sequence[str],
    *,
    nproc: int,
    environment: Mapping[str, str],
    master_port: int | None = None,
    bind_cores: bool = False,
    grace_s: float = DEFAULT_GRACE_S,
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
    log_dir: Path | None = None,
) -> LaunchPlan:
    """A job of `nproc` ranks on this machine, each running `command` in `environment` plus the rank variables.

    `master_port` None picks a free one. `bind_cores` gives each rank's process a share of the cores; without it the
    share only decides OMP_NUM_THREADS, where the environment has none. Raises LaunchError when `environment` is that of
    a rank already, when the port is taken, and when cores cannot be bound.
    """
    check_not_nested(environment)
    if nproc < 1:
        raise LaunchError(f"{nproc} ranks cannot be started", cure="give --nproc 1 or more", value=nproc)
    if bind_cores and not hasattr(os, "sched_setaffinity"):
        raise LaunchError("this operating system binds no process to cores", cure="leave out --bind-cores")
    if master_port is not None and not is_free(master_port):
        cure = "end what listens there, or let a free one be picked: --master-port auto"
        raise LaunchError(f"port {master_port} cannot be bound", cure=cure, value=master_port)

    job_id, secret = uuid.uuid4().hex, secrets.token_hex()
    port = master_port or free_port()
    shares = split_cores(find_cores(usable_cpus()), nproc)
    threads = max(1, sum(map(len, shares)) // nproc)
    ranks = tuple(
        RankSpec(
            rank=rank,
            local_rank=rank,
            command=tuple(command),
            environment=rank_environment(
                environment,
                job_id=job_id,
                secret=secret,
                local_rank=rank,
                local_world_size=nproc,
                master_addr=_LOOPBACK,
                master_port=port,
                threads=threads,
            ),
            cores=tuple(cpu for core in share for cpu in core.cpus) if bind_cores else None,
        )
        for rank, share in enumerate(shares)
    )
    return LaunchPlan(job_id, ranks, _LOOPBACK, port, grace_s, stop_timeout_s, log_dir)


class LocalLauncher(Launcher):
    """Starts the ranks as child processes. Needs nothing but a POSIX system."""

    name: ClassVar[str] = "local"

    @classmethod
    def probe(cls) -> Probe:
        if not hasattr(os, "killpg"):
            return Probe(usable=False, reason="needs POSIX process groups")
        return Probe(usable=True, reason="starts ranks on this machine")

    def run(self, plan: LaunchPlan) -> int:
        return self.run_to_end(plan).code

    def run_to_end(self, plan: LaunchPlan, look: Callable[[], object] = lambda: None) -> JobEnd:
        return Supervisor(plan, JobOutput(plan), look).run()
