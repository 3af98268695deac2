"""The backend `mpi`: ranks that an MPI's mpirun has started, joined by mpi4py alone. Light to import.

Importing `mpi4py.MPI` starts MPI, so that happens only when ranks connect that a launcher of MPI has started; see
[Note: MPI import condition] in `launchers/mpi.py`. mpi4py asks MPI for calls by several threads, and finalizes
it when the interpreter ends; a job whose rank dies is ended by its launcher.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.launchers.mpi import look, may_start
from polyaccel.comm.launchers.request import Request
from polyaccel.core.install_line import install_line
from polyaccel.errors import CommError


class MpiBackend(CommBackend):
    """The group is MPI.COMM_WORLD, which must be the ranks that the rendezvous names."""

    name: ClassVar[str] = "mpi"

    @classmethod
    def probe(cls) -> Probe:
        if find_spec("mpi4py") is None:
            return Probe(False, "mpi4py is not installed")
        return Probe(True, "mpi4py is installed")

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        if rendezvous.world_size == 1:
            return SingleCommunicator(accelerator, timeout_s=timeout_s, backend=self.name)
        self._check_startable(rendezvous)
        # These start MPI.
        from polyaccel.comm.backends.mpi.board import MpiBoard
        from polyaccel.comm.backends.mpi.communicator import MpiCommunicator
        from polyaccel.comm.mpi import library
        from polyaccel.comm.mpi.abort import abort_on_failure
        from polyaccel.comm.mpi.library import takes_memory_of
        from polyaccel.comm.mpi.progress import PROGRESS
        from polyaccel.comm.wrappers.staged import StagedCommunicator

        world = library.world()
        if (world.rank, world.size) != (rendezvous.rank, rendezvous.world_size):
            raise CommError(
                f"{library.name()} has rank {world.rank} of {world.size}, "
                f"but {rendezvous.source} has rank {rendezvous.rank} of {rendezvous.world_size}",
                hint="start the ranks with the mpirun of the MPI that mpi4py was built for",
                value=(world.rank, world.size),
            )
        abort_on_failure()
        if rendezvous.local_world_size > (os.cpu_count() or 1):
            PROGRESS.share_cores()
        device = accelerator.current_device().type
        is_direct = device == "cpu" or takes_memory_of(device)
        worker = accelerator if is_direct else host_accelerator(accelerator)
        ranks = tuple(range(world.size))
        # MPI's copies of a communicator have no time limit, so all must have come before.
        MpiCommunicator(world, ranks, worker, timeout_s).barrier(label="connect")
        board = MpiBoard(world.Dup()) if library.allows_threads() else None
        communicator = MpiCommunicator(world.Dup(), ranks, worker, timeout_s, board)
        return communicator if is_direct else StagedCommunicator(communicator, accelerator)

    def _check_startable(self, rendezvous: Rendezvous) -> None:
        probe = self.probe()
        if not probe.usable:
            reason, hint = probe.reason, f"{install_line('mpi')}, with the MPI whose mpirun starts the ranks"
        elif not may_start(os.environ) and "mpi4py.MPI" not in sys.modules:
            seen = look(Request(os.environ)).text
            reason, hint = f"no launcher of MPI started this process: {seen}", "start the ranks with mpirun"
        else:
            return
        raise CommError(
            f"comm backend 'mpi' cannot join {rendezvous.world_size} ranks ({rendezvous.source}): {reason}",
            hint=f"{hint}; or choose another backend: POLYACCEL_COMM or init_distributed(dist_backend=...)",
            value=self.name,
        )
