"""Plan of a job's processes on one host: `plan_host`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.job.ports import free_port, is_free
from polyaccel.launch.affinity import find_cores, split_cores, usable_cpus
from polyaccel.launch.base import Job, LaunchPlan, RankSpec
from polyaccel.launch.program import check_not_nested, debugged, rank_environment

LOOPBACK = "127.0.0.1"  # the number, because some machines cannot look up even "localhost"


def plan_host(job: Job, number: int = 0, environment: Mapping[str, str] | None = None) -> LaunchPlan:
    """Plan the ranks of one host. Runs on that host: reads its cores and ports.

    A job of one host without an address joins here, at a free port. Unless the job binds cores, a rank's share of them
    only sets OMP_NUM_THREADS where the environment does not.

    Args:
        job: What runs where.
        number: Number of the host, from 0.
        environment: Variables of each rank, to which the job's exports and the variables of a rank are added; None for
            this process's.

    Returns:
        The plan.

    Raises:
        LaunchError: `environment` is that of a rank already, the port is taken, cores cannot be bound, or ranks of
            several hosts have no address to join.
    """
    environment = os.environ if environment is None else environment
    check_not_nested(environment)
    slots = tuple(job.hosts.values())[number]
    if not slots:
        raise LaunchError("0 ranks cannot be started", hint="give --ranks 1 or more", value=0)
    is_alone = len(job.hosts) == 1
    if not is_alone and (job.master_addr is None or job.master_port is None):
        raise LaunchError(
            f"the rendezvous address of ranks on {len(job.hosts)} hosts is missing",
            hint="give --master_addr and --master_port",
        )
    if job.bind_cores and not hasattr(os, "sched_setaffinity"):
        raise LaunchError("this operating system binds no process to cores", hint="leave out --bind-cores")
    if is_alone and job.node is None and job.master_port is not None and not is_free(job.master_port):
        hint = "end what listens there, or let a free one be picked: --master-port auto"
        raise LaunchError(f"port {job.master_port} cannot be bound", hint=hint, value=job.master_port)

    address, port = job.master_addr or LOOPBACK, job.master_port or free_port()
    usable = usable_cpus()
    shares = split_cores(find_cores(usable if job.cores is None else _checked(job.cores, usable)), len(slots))
    threads = max(1, sum(map(len, shares)) // len(slots))
    given = {**environment, **job.exports}
    if job.device_variable is not None:
        given[job.device_variable] = ",".join(map(str, slots))
    first = job.first_rank(number)
    ranks = tuple(
        RankSpec(
            rank=first + local_rank,
            local_rank=local_rank,
            command=_command(job, first + local_rank, local_rank),
            environment=rank_environment(
                given,
                job,
                number,
                local_rank=local_rank,
                master_addr=address,
                master_port=port,
                threads=threads,
            ),
            cores=tuple(cpu for core in share for cpu in core.cpus) if job.bind_cores else None,
        )
        for local_rank, share in enumerate(shares)
    )
    log_dir = None if job.log_dir is None else Path(job.log_dir)
    return LaunchPlan(job.job_id, ranks, address, port, job.grace_s, job.stop_timeout_s, log_dir, job.hang_timeout_s)


def _command(job: Job, rank: int, local_rank: int) -> tuple[str, ...]:
    named = (f"--local_rank={local_rank}",) if job.names_local_rank else ()
    command = job.command if job.debug_port is None else debugged(job.command, job.debug_port + rank, job.debug_waits)
    return (*command, *named, *job.arguments)


def _checked(cores: tuple[int, ...], usable: frozenset[int]) -> tuple[int, ...]:
    absent = sorted(set(cores) - usable)
    if absent:
        raise LaunchError(
            f"CPU {absent[0]} cannot be used here",
            hint=f"choose among {', '.join(map(str, sorted(usable)))}",
            value=cores,
        )
    return cores
