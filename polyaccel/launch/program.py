"""A rank's program: the command line that every rank executes, and the environment variables that it finds.

The variables are those of torchrun, and those that DeepSpeed's launcher adds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.launch.base import JOB_ID, Job
from polyaccel.launch.hosts import is_here

_DEBUGGER = "debugpy"
_LOOPBACK = "127.0.0.1"
_OF_A_RANK = (JOB_ID, "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "CROSS_RANK")
"""What launchers of ranks set next to RANK and WORLD_SIZE, and operators of clusters do not."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""The value of `GLIBC_TUNABLES` that lets malloc ask for huge pages (glibc 2.35 and later; others ignore it).

It has to be set before the process starts. XLA on the CPU maps its temporary memory again in every step: in pages of 4
KiB that is 22,800 page faults, a tenth of the step, for a model of 29 M parameters."""


def python_command(target: str, arguments: Sequence[str] = (), *, module: bool = False) -> tuple[str, ...]:
    """Return the command line that runs `target`, a script or module. Raises LaunchError if missing."""
    if module:
        _check_module(target)
        return (sys.executable, "-m", target, *arguments)
    if not Path(target).exists():
        hint = (
            "give the path of a Python file; options of `polyaccel run` stand before it, those of the script after it"
        )
        if _has_module(target):
            hint = f"to run the module of that name: polyaccel run --module {target}"
        raise LaunchError(f"no script {target!r} in {os.getcwd()}", hint=hint, value=target)
    return (sys.executable, target, *arguments)


def check_debugger(*, is_python: bool) -> None:
    """Raise LaunchError where ranks could not listen for a debugger."""
    if not is_python:
        raise LaunchError("--debugpy is for programs of Python", hint="leave out --no-python, or --debugpy")
    if not _has_module(_DEBUGGER):
        raise LaunchError(f"--debugpy needs the package {_DEBUGGER}", hint=f"pip install {_DEBUGGER}, on every host")


def debugged(command: Sequence[str], port: int, waits: bool) -> tuple[str, ...]:
    """Return the command line that listens for a debugger on the loopback only: it may run anything."""
    python, *rest = command
    wait = ("--wait-for-client",) if waits else ()
    # Frozen modules cannot be stepped into, of which debugpy would warn.
    return (python, "-Xfrozen_modules=off", "-m", _DEBUGGER, "--listen", f"{_LOOPBACK}:{port}", *wait, *rest)


def how_to_attach(job: Job) -> list[str]:
    """A sentence for each rank that listens for a debugger."""
    if job.debug_port is None:
        return []
    said, waits = [], ", and waits for it" if job.debug_waits else ""
    places = ((number, host) for number, (host, slots) in enumerate(job.hosts.items()) for _ in slots)
    for rank, (number, host) in enumerate(places):
        port = job.debug_port + rank
        if job.node not in (None, number):
            continue
        way = "" if job.node is not None or is_here(host) else f", after `ssh -N -L {port}:{_LOOPBACK}:{port} {host}`"
        said.append(f"rank {rank} listens for a debugger{waits}: attach to {_LOOPBACK}:{port}{way}")
    return said


def check_not_nested(environment: Mapping[str, str]) -> None:
    """Raise LaunchError in a rank's `environment`; Kubernetes sets RANK and WORLD_SIZE too, in pods."""
    found = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    if found and any(name in environment for name in _OF_A_RANK):
        shown = " ".join(f"{name}={value}" for name, value in found.items())
        ours = f"job {environment[JOB_ID]} of polyaccel run" if JOB_ID in environment else "another launcher"
        raise LaunchError(
            f"{shown} is set: this process is a rank of {ours} already, and would start a whole job in each rank",
            hint=f"let that launcher start the script itself, or unset {' and '.join(found)} if they are left over",
            value=found,
        )


def rank_environment(
    inherited: Mapping[str, str],
    job: Job,
    number: int,
    *,
    local_rank: int,
    master_addr: str,
    master_port: int,
    threads: int,
) -> dict[str, str]:
    """Return a rank's environment on host `number`, with OpenMP's `threads` and the job's secret."""
    local_world_size = len(tuple(job.hosts.values())[number])
    ranks = {
        "RANK": job.first_rank(number) + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "LOCAL_SIZE": local_world_size,
        "CROSS_RANK": number,
        "CROSS_SIZE": len(job.hosts),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
    }
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last words of a rank that is killed are worth more than faster prints
        "GLIBC_TUNABLES": HUGE_PAGES,
    }
    if job.secret:
        defaults[SECRET_VARIABLE] = job.secret
    return {**defaults, **inherited, **{name: str(value) for name, value in ranks.items()}, JOB_ID: job.job_id}


def _check_module(name: str) -> None:
    if name.endswith(".py") or os.sep in name:
        hint = f"leave out --module, or write the dotted name: {Path(name).stem}"
        raise LaunchError(f"--module takes a module's name, and {name!r} is a path", hint=hint, value=name)
    if not _has_module(name):
        hint = "install the package, or start from the directory that it is in"
        raise LaunchError(f"no module {name!r} in {os.getcwd()} or on sys.path", hint=hint, value=name)


def _has_module(name: str) -> bool:
    """Whether the top package of `name` is there. Looks no deeper: to find a submodule is to run its package."""
    top = name.partition(".")[0]
    return bool(top) and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
