"""Ranks that an MPI's launcher started: mpirun of Open MPI, MPICH, Intel MPI or MVAPICH, and PMIx.

[Note: MPI import condition]
Importing `mpi4py.MPI` starts MPI, and without a launcher that aborts or hangs on some machines. So the ranks come from
the launcher's variables, and only where those are set is mpi4py imported: to verify them, and to agree on the
rendezvous. Slurm's own tasks have PMI variables too (`srun --mpi=pmi2`), but MPI need not be installed there: they are
Slurm's, unless a launcher's other variables show that it stands between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyaccel.comm.launchers import slurm
from polyaccel.comm.launchers.request import (
    Detection,
    LaunchedRank,
    Request,
    check_agreement,
    check_rank,
    integer,
    shown,
)
from polyaccel.errors import CommError


class MpiVariables(NamedTuple):
    """A launcher's variables. It is seen where `rank` is set; `world_size` may be in MPI alone."""

    name: str
    rank: str
    world_size: str | None = None
    local_rank: str | None = None
    local_world_size: str | None = None

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.rank, self.world_size, self.local_rank, self.local_world_size)))


OPEN_MPI = MpiVariables(
    "Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_LAUNCHERS = (
    OPEN_MPI,
    MpiVariables("MVAPICH2", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    MpiVariables("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # Cray MPICH
    MpiVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI, MVAPICH 3
    MpiVariables("PMIx", "PMIX_RANK"),
)
NAMES = tuple(launcher.name for launcher in _LAUNCHERS)
_OF_SLURM_TOO = ("PMI_RANK", "PMIX_RANK")


def look(request: Request) -> Detection:
    seen = _seen(request)
    if seen:
        return Detection(
            True, "; ".join(f"{launcher.name}: {shown(request.environ, launcher.variables)}" for launcher in seen)
        )
    own = [name for name in _OF_SLURM_TOO if name in request.environ]
    if own:
        return Detection(False, f"{shown(request.environ, own)}, but from Slurm itself")
    return Detection(False, f"none of {', '.join(launcher.rank for launcher in _LAUNCHERS)} is set")


def may_start(environ: Mapping[str, str]) -> bool:
    """Whether a launcher, Slurm with PMI among them, has prepared this process for MPI's start."""
    return any(launcher.rank in environ for launcher in _LAUNCHERS)


def find_rank(request: Request) -> LaunchedRank | None:
    """Return the rank that the launchers' variables set; None without them. Raises CommError where two disagree."""
    found = [read_rank(launcher, request.environ) for launcher in _seen(request)]
    for other in found[1:]:
        sizes = {launched.world_size for launched in (found[0], other)} - {None}
        if other.rank != found[0].rank or len(sizes) > 1:
            raise CommError(
                f"{found[0].launcher} and {other.launcher} disagree: {found[0].shown}; {other.shown}",
                hint="one of them is left over of a job around this one: unset its variables",
                value=(found[0].rank, other.rank),
            )
    return found[0] if found else None


def read_rank(launcher: MpiVariables, environ: Mapping[str, str]) -> LaunchedRank:
    """Read the rank from the variables of `launcher`, which must be set. Raises CommError."""
    numbers = [integer(environ, name, -1) if name in environ else None for name in launcher[1:] if name is not None]
    rank, world_size, local_rank, local_world_size = [*numbers, None, None, None][:4]
    found = shown(environ, launcher.variables)
    if rank is None:
        raise CommError(f"{launcher.rank} is unset: {found}", hint="start the ranks with mpirun", value=None)
    if launcher.world_size is not None and world_size is not None:
        check_rank(rank, world_size, found, launcher.rank, launcher.world_size)
    return LaunchedRank(launcher.name, rank, world_size, local_rank, local_world_size, found)


def checked_rank(request: Request) -> LaunchedRank:
    """Return the rank on which launchers of MPI and variables set by others agree. Raises CommError."""
    here = find_rank(request)
    if here is None:
        raise CommError("no launcher of MPI started this process", hint="start the ranks with mpirun")
    check_agreement(request.environ, here)
    return here


def _seen(request: Request) -> list[MpiVariables]:
    """The launchers whose ranks are set. See [Note: MPI import condition]."""
    env = request.environ
    in_step = slurm.look(request).applies
    return [
        launcher
        for launcher in _LAUNCHERS
        if launcher.rank in env and not (in_step and launcher.rank in _OF_SLURM_TOO and launcher.local_rank not in env)
    ]
