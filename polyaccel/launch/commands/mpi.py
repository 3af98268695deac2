"""Ranks that an MPI's mpirun starts, as its own processes: they may use MPI, and be reached by what MPI uses."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.launch.base import Job
from polyaccel.launch.commands.base import CommandLauncher
from polyaccel.launch.commands.task import JOB_VARIABLE

_VERSION_S = 5.0
"""An mpirun that waits for something, as one without its daemon, does not hold a report up."""


class MpiLauncher(CommandLauncher):
    """The mpirun of an MPI."""

    mpi: ClassVar[str]
    """The MPI whose command `program` must be: that of another has the same name, and other arguments."""
    marks: ClassVar[tuple[str, ...]]
    """Text that `program --version` of this MPI prints, each in lower case."""

    @classmethod
    def probe(cls) -> Probe:
        found = super().probe()
        if not found.usable:
            return found
        answer = _version_of(found.reason)
        if all(mark in answer.lower() for mark in cls.marks):
            return replace(found, reason=f"{found.reason} of {cls.mpi}")
        said = answer.strip().partition("\n")[0] or "nothing"
        return Probe(usable=False, reason=f"{found.reason} is not that of {cls.mpi}: --version prints {said!r}")


def _version_of(program: str) -> str:
    """What the program prints of its version, in another process; "" where it does not end."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


class OpenMpiLauncher(MpiLauncher):
    """Open MPI, 4 or 5."""

    name: ClassVar[str] = "openmpi"
    mpi: ClassVar[str] = "Open MPI"
    marks: ClassVar[tuple[str, ...]] = ("open mpi",)
    program: ClassVar[str] = "mpirun"
    rank_variable: ClassVar[str] = "OMPI_COMM_WORLD_RANK"

    def options(self, job: Job, task: tuple[str, ...]) -> tuple[str, ...]:
        hosts = ",".join(f"{host}:{len(slots)}" for host, slots in job.hosts.items())
        port = () if job.ssh_port is None else ("--mca", "plm_rsh_args", f"-p {job.ssh_port}")
        passed = (each for name in (JOB_VARIABLE, *job.exports) for each in ("-x", name))
        where = ("-n", str(job.world_size), "--host", hosts, "--map-by", "slot", "--bind-to", "none")
        return (*where, *port, *passed, *job.launcher_args, *task)


class HydraLauncher(MpiLauncher):
    """MPICH, whose mpiexec is Hydra. Environments are passed on as they are."""

    name: ClassVar[str] = "mpich"
    mpi: ClassVar[str] = "MPICH"
    marks: ClassVar[tuple[str, ...]] = ("hydra",)
    program: ClassVar[str] = "mpiexec"
    rank_variable: ClassVar[str] = "PMI_RANK"

    def options(self, job: Job, task: tuple[str, ...]) -> tuple[str, ...]:
        hosts = ",".join(f"{host}:{len(slots)}" for host, slots in job.hosts.items())
        return (*job.launcher_args, "-hosts", hosts, "-n", str(job.world_size), *task)


class IntelMpiLauncher(HydraLauncher):
    """Intel MPI. Its `-hosts` takes no numbers of slots. Its pinning of processes is off: each would get one core, and
    torch one thread."""

    name: ClassVar[str] = "impi"
    mpi: ClassVar[str] = "Intel MPI"
    marks: ClassVar[tuple[str, ...]] = ("intel(r) mpi library",)
    program: ClassVar[str] = "mpirun"
    variables: ClassVar[Mapping[str, str]] = MappingProxyType({"I_MPI_PIN": "0"})

    def options(self, job: Job, task: tuple[str, ...]) -> tuple[str, ...]:
        sets: list[str] = []
        for host, slots in job.hosts.items():
            sets += [":"] if sets else []
            sets += ["-host", host, "-n", str(len(slots)), *task]
        return (*job.launcher_args, *sets)


class MvapichLauncher(HydraLauncher):
    """MVAPICH. Its pinning is off too; it may be loaded by a program that was not linked to it."""

    name: ClassVar[str] = "mvapich"
    mpi: ClassVar[str] = "MVAPICH"
    marks: ClassVar[tuple[str, ...]] = ("hydra", "mvapich")
    program: ClassVar[str] = "mpirun"
    variables: ClassVar[Mapping[str, str]] = MappingProxyType({"MV2_ENABLE_AFFINITY": "0", "MV2_SUPPORT_DL": "1"})
