"""The MPI library of this process, started when this module is imported."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from polyaccel.errors import CommError


def world() -> MPI.Intracomm:
    """All ranks of the job. Raises CommError after finalize."""
    if MPI.Is_finalized():
        raise CommError("MPI is finalized in this process", cure="connect before MPI.Finalize is called")
    if not MPI.Is_initialized():  # a script has told mpi4py not to
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD


def name() -> str:
    """The library and its version, in one line."""
    return str(MPI.Get_library_version()).strip("\0").split("\n")[0].split(",")[0]


def allows_threads() -> bool:
    """Whether several threads may call MPI at a time."""
    level: Any = MPI.Query_thread()
    return bool(level == MPI.THREAD_MULTIPLE)
