"""Ranks that measure collectives on command: ours, and those of other environments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import AF_UNIX, socket
from tempfile import TemporaryDirectory
from typing import Any, Protocol

_ROOT = Path(__file__).resolve().parents[2]
_START_LIMIT_S = 60.0
_CALL_LIMIT_S = 120.0


class Team(Protocol):
    """Ranks with the same cases, of which one at a time is measured."""

    def prepare(self, nbytes: int) -> Sequence[str]:
        """Make buffers of `nbytes`; returns the names of the cases."""

    def measure(self, case: str, repeats: int) -> float:
        """Mean seconds of a call on rank 0."""


class Peers:
    """Ranks of `kind`, "deepspeed" or "mpi", in the environment of the interpreter `python`. A context manager."""

    def __init__(self, kind: str, python: Path, ranks: int) -> None:
        self._kind = kind
        self._folder = TemporaryDirectory(prefix="polyaccel-bench-")
        address = str(Path(self._folder.name, "driver"))
        self._door = socket(AF_UNIX)
        self._door.bind(address)
        self._door.listen(ranks)
        self._door.settimeout(_START_LIMIT_S)
        self._log = Path(self._folder.name, "log")
        command = [str(python), "-m", "bench.collectives.peer", kind, address]
        with socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_ROOT)}
        shared["PATH"] = f"{python.parent}{os.pathsep}{shared['PATH']}"  # compilers' helpers of that environment
        if kind == "mpi":
            mpirun = [str(python.with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
            started = [([*mpirun, *command], shared)]
        else:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(ranks)} for rank in range(ranks)]
            started = [(command, shared | variables) for variables in own]
        with self._log.open("ab") as log:
            self._processes = [
                subprocess.Popen(line, env=env, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT)
                for line, env in started
            ]
        self._pipes = self._accept(ranks)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        self._end()

    def prepare(self, nbytes: int) -> Sequence[str]:
        names: Sequence[str] = self._ask(nbytes // 4)
        return names

    def measure(self, case: str, repeats: int) -> float:
        seconds: float = self._ask((case, repeats))
        return seconds

    def _ask(self, command: object) -> Any:
        for pipe in self._pipes:
            pipe.send(command)
        answers = [self._answer(pipe) for pipe in self._pipes]
        return answers[0]

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(_CALL_LIMIT_S):
            raise self._failure(f"did not answer within {_CALL_LIMIT_S:.0f} s")
        try:
            return pipe.recv()
        except EOFError:
            raise self._failure("ended") from None

    def _accept(self, ranks: int) -> list[Connection]:
        found: dict[int, Connection] = {}
        try:
            for _ in range(ranks):
                pipe = Connection(self._door.accept()[0].detach())
                found[pipe.recv()] = pipe
        except (TimeoutError, EOFError):
            raise self._failure("did not start") from None
        return [found[rank] for rank in range(ranks)]

    def _failure(self, what: str) -> SystemExit:
        said = self._log.read_text(errors="replace")
        self._end()
        return SystemExit(f"ranks of {self._kind} {what}:\n{said[-2000:]}")

    def _end(self) -> None:
        for process in self._processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._door.close()
        self._folder.cleanup()
