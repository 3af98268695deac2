"""Ranks that Slurm's `srun` started.

[Note: Slurm jobs and steps]
Slurm sets SLURM_JOB_ID, SLURM_NTASKS and in batch scripts also SLURM_PROCID=0 wherever a job runs, and what runs there
is one process: the script itself, or the shell of `salloc`. Only `srun` starts the tasks of a step, and sets
SLURM_STEP_ID; the numbers that hold are the step's. A step may be smaller than its job, and on other nodes of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from zlib import crc32

from polyaccel.comm.base import Rendezvous
from polyaccel.comm.launchers.request import (
    LOOPBACK,
    Detection,
    LaunchedRank,
    Request,
    check_agreement,
    check_rank,
    integer,
    meeting_port,
    shown,
)
from polyaccel.errors import CommError

NAME = "Slurm"
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PORTS = range(15000, 29500)
"""Below those that any system hands out by itself, and below torchrun's default."""
_BRACKETS = re.compile(r"\[(?P<first>\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]")


def look(request: Request) -> Detection:
    env = request.environ
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return Detection(True, _shown(env))
    if "SLURM_JOB_ID" in env:
        tasks = env.get("SLURM_NTASKS", "1")
        return Detection(False, f"job {env['SLURM_JOB_ID']} of {tasks} tasks, but srun did not start this process")
    return Detection(False, "SLURM_PROCID, SLURM_STEP_ID unset")


def _shown(environ: Mapping[str, str]) -> str:
    """The variables of a task that are read, as they are set."""
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return shown(environ, ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_STEP_ID"))


def find_rank(request: Request) -> LaunchedRank | None:
    """Find the task of the step that this process is; None outside of steps. Raises CommError."""
    if not look(request).applies:
        return None
    env = request.environ
    found = _shown(env)
    rank = integer(env, "SLURM_PROCID", 0)
    world_size = integer(env, "SLURM_STEP_NUM_TASKS", integer(env, "SLURM_NTASKS", 1))
    check_rank(rank, world_size, found, "SLURM_PROCID", "SLURM_NTASKS")
    here = [task for task in env.get("SLURM_GTIDS", "").split(",") if task]
    local_world_size = len(here) or (world_size if integer(env, "SLURM_STEP_NUM_NODES", 0) == 1 else None)
    return LaunchedRank(NAME, rank, world_size, integer(env, "SLURM_LOCALID", 0), local_world_size, found)


def read(request: Request) -> Rendezvous:
    env = request.environ
    task = find_rank(request)
    if task is None:
        raise CommError("srun did not start this process", hint="start the ranks with srun")
    check_agreement(env, task)
    if task.world_size == 1 or not task.is_complete:
        return task.meeting(None, None, request.init_method)
    address = env.get("MASTER_ADDR") or _address(request, task)
    job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    port = meeting_port(env, request.port or _PORTS[crc32(job.encode()) % len(_PORTS)])
    return task.meeting(address, port, request.init_method)


def _address(request: Request, task: LaunchedRank) -> str:
    """Return the host of rank 0, which every task works out alone: before the rendezvous there is no other source."""
    env = request.environ
    if task.local_world_size == task.world_size:
        return LOOPBACK
    nodes = next((env[name] for name in _NODE_LISTS if name in env), None)
    if nodes is None:
        raise CommError(
            f"{task.world_size} tasks of srun on several nodes, but none of {', '.join(_NODE_LISTS)} is set",
            hint="set MASTER_ADDR to rank 0's host",
            value=None,
        )
    if task.rank == 0 and integer(env, "SLURM_NODEID", 0) != 0:
        raise CommError(
            f"task 0 runs on node {env['SLURM_NODEID']} of {nodes}, not on the first: {task.shown}",
            hint="set MASTER_ADDR to rank 0's host, or leave out srun's --distribution",
            value=env["SLURM_NODEID"],
        )
    return first_host(nodes)


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: `gpu008-ib0` of `gpu[008-011,20]-ib[0-1],login`. Raises CommError."""
    # The first comma outside brackets ends it.
    first = re.split(r",(?![^\[]*\])", nodes.strip(), maxsplit=1)[0]
    host = _BRACKETS.sub(lambda found: found["first"], first)
    if not host or not host.isprintable() or any(character in "[], " for character in host):
        raise CommError(
            f"{nodes!r} is not a list of hosts as Slurm writes them",
            hint="set MASTER_ADDR to rank 0's host",
            value=nodes,
        )
    return host
