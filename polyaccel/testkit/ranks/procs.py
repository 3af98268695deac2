"""Run a function once per rank, ranks being real processes: started once, connected once, used for many calls.

They come from a fork server that has imported torch and nothing else, which starts several times faster than spawning
and is safe, for that server never runs a kernel or a thread.

A task that fails costs the pool, for its ranks may have stopped at different places: all workers are killed, the error
names the rank, and the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.comm.join.backends import comm_backend
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.port import free_port
from polyaccel.testkit.ranks import DEFAULT_TIMEOUT_S, blame

_START_TIMEOUT_S = 60.0
_GRACE_S = 2.0
_END_TIMEOUT_S = 20.0  # from the end of a worker's pipe until the fork server tells its exit code
_PRELOAD = (
    "polyaccel.comm.backends.torch.exchange",
    "polyaccel.accelerators.memory.torch",
    "polyaccel.ops.torch.kernels",
)
Task = Callable[..., Any] | str


class RankPool:
    """`world_size` worker processes joined by `backend`, the name of a comm plugin. A context manager; `run` may be
    called any number of times.

    `comm_timeout_s` limits the workers' own collectives. After a rank's failure the others may take `grace_s` to answer
    too, and are killed then. `environ` is set in the workers. `accelerator` names a plugin;
    rank N has its device N, counted round. `memory` is that of `CpuAccelerator`.
    Ranks meet at a file; with `by_port` at an address, as those of a launcher do.
    """

    def __init__(
        self,
        world_size: int,
        *,
        comm_timeout_s: float = 30.0,
        grace_s: float = _GRACE_S,
        environ: dict[str, str] | None = None,
        backend: str = "gloo",
        memory: HostArrays | None = None,
        accelerator: str = "cpu",
        by_port: bool = False,
    ) -> None:
        self.world_size = world_size
        self._by_port = by_port
        self._accelerator = accelerator
        self._backend = backend
        self._memory = memory
        self._comm_timeout_s = comm_timeout_s
        self._grace_s = grace_s
        self._environ = {"OMP_NUM_THREADS": "1", **(environ or {})}
        self._workers: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank; empty when none run."""
        return [worker.pid or 0 for worker in self._workers]

    def run(self, task: Task, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """`[task(communicator, *args) on rank 0, ...]`; `task` pickles or is written `module:function`.

        The first exception of a worker is raised here, with attribute `rank`; its notes hold the worker's traceback and
        what the other ranks said. Raises LaunchError for a worker that died and CommTimeout if some did not answer
        within `timeout_s`.
        """
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a worker that is dead, which `_collect` finds out
                pipe.send((task, args))
        return self._collect(timeout_s)

    def close(self) -> None:
        """Kill the workers; they hold nothing that anybody needs."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        self._folder = tempfile.TemporaryDirectory(prefix="polyaccel-ranks-")
        file = f"file://{Path(self._folder.name) / 'store'}"
        where = ("127.0.0.1", free_port(), "RankPool") if self._by_port else (None, None, "RankPool", file)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            rendezvous = Rendezvous(rank, self.world_size, rank, self.world_size, *where)
            worker = context.Process(
                target=work_for_pool,
                args=(
                    *(theirs, rendezvous, self._comm_timeout_s, self._environ, self._backend),
                    *(self._memory, self._accelerator),
                ),
                name=f"rank {rank}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._collect(_START_TIMEOUT_S)

    def _collect(self, timeout_s: float) -> list[Any]:
        """Every worker's result, by rank. Raises the first failure once the others have had a moment to answer too."""
        results: dict[int, Any] = {}
        failures: dict[int, BaseException] = {}
        deadline = monotonic() + timeout_s
        while waiting := {self._pipes[r]: r for r in range(self.world_size) if r not in results and r not in failures}:
            ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                break
            for rank in sorted(waiting[pipe] for pipe in self._pipes if pipe in ready):
                error, results[rank] = self._answer(rank)
                if error is not None:
                    failures[rank] = blame(error, rank)
                    deadline = min(deadline, monotonic() + self._grace_s)
        late = sorted(waiting.values())
        if late or failures:
            self.close()  # the ranks may no longer agree on what comes next
        if failures:
            raise _first(failures, late)
        if late:
            raise CommTimeout(
                f"worker ranks {late} did not answer within {timeout_s:g} s and were killed",
                missing_ranks=late,
                cure="raise timeout_s if they were only slow",
            )
        return [results[rank] for rank in range(self.world_size)]

    def _answer(self, rank: int) -> tuple[BaseException | None, Any]:
        """A worker's error, or its result. The error is a LaunchError if the worker is dead."""
        try:
            answer: tuple[BaseException | None, Any] = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._death(rank), None
        return answer

    def _death(self, rank: int) -> LaunchError:
        self._workers[rank].join(_END_TIMEOUT_S)
        code = self._workers[rank].exitcode
        return LaunchError(
            f"worker rank {rank} died with exit code {code}",
            cure="a negative code is the signal that killed it; its own output says more",
            value=(rank, code),
        )


def _first(failures: dict[int, BaseException], late: list[int]) -> BaseException:
    """The first failure, a death before everything else, with what became of the other ranks as notes."""
    rank = next((r for r, error in failures.items() if isinstance(error, LaunchError)), _cause(failures))
    notes = [f"rank {r} raised {type(error).__name__}: {error}" for r, error in failures.items() if r != rank]
    if late:
        notes.append(f"ranks {late} did not answer and were killed")
    first = failures[rank]
    first.__dict__["__notes__"] = [*first.__dict__["__notes__"], *notes]
    return first


def _cause(failures: dict[int, BaseException]) -> int:
    """The rank whose failure came first. The news that it was gone may have overtaken its own words: a rank that ran
    out of time closes its connections, and the others see that before it has found out who was missing."""
    rank = next(iter(failures))
    error = failures[rank]
    if isinstance(error, CommError) and not isinstance(error, CommTimeout):
        rank = next((gone for gone in error.missing_ranks if gone in failures), rank)
    return rank


def work_for_pool(
    pipe: Connection,
    rendezvous: Rendezvous,
    comm_timeout_s: float,
    environ: dict[str, str],
    backend: str,
    memory: HostArrays | None,
    accelerator: str = "cpu",
) -> None:
    """The main function of a worker: connect, then run tasks until the pool is gone."""
    os.environ.update(environ)
    try:
        chosen = _accelerator(accelerator, memory, rendezvous.local_rank)
        communicator = _connect(rendezvous, comm_timeout_s, backend, chosen)
    except BaseException as error:
        pipe.send_bytes(_packed(error, None))
        return
    pipe.send_bytes(_packed(None, None))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        except Exception as error:  # a task that does not unpickle here
            pipe.send_bytes(_packed(error, None))
            continue
        task, args = job
        try:
            result = _resolve(task)(communicator, *args)
            answer = _packed(None, result)
        except BaseException as error:
            answer = _packed(error, None)
        pipe.send_bytes(answer)
    communicator.close()


def _accelerator(name: str, memory: HostArrays | None, local_rank: int) -> Accelerator:
    from polyaccel.accelerators.cpu import CpuAccelerator
    from polyaccel.accelerators.detect import choose_accelerator

    if name == CpuAccelerator.name:
        return CpuAccelerator(memory)
    accelerator = choose_accelerator(name)
    accelerator.set_device(local_rank % accelerator.device_count())
    return accelerator


def _connect(rendezvous: Rendezvous, comm_timeout_s: float, backend: str, accelerator: Accelerator) -> Communicator:
    from polyaccel.comm.default import set_default_communicator

    warnings.simplefilter("error")
    communicator = comm_backend(backend)().connect(rendezvous, accelerator, timeout_s=comm_timeout_s)
    if "torch" in sys.modules:  # OMP_NUM_THREADS comes too late for one that the server has loaded
        sys.modules["torch"].set_num_threads(1)
    set_default_communicator(communicator)
    return communicator


def _resolve(task: Task) -> Callable[..., Any]:
    if not isinstance(task, str):
        return task
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _packed(error: BaseException | None, result: Any) -> bytes:
    """An answer that surely pickles; an error that does not becomes a LaunchError with its text."""
    if error is not None:
        text = "".join(traceback.format_exception(error))
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), f"in the worker:\n{text}"]
        error.__cause__ = error.__context__ = None
    try:
        packed = pickle.dumps((error, result))
        pickle.loads(packed)
    except Exception as reason:
        what = f"{type(error).__name__}: {error}" if error is not None else f"a result of type {type(result).__name__}"
        packed = pickle.dumps((LaunchError(f"a worker's answer does not pickle ({reason}): {what}"), None))
    return packed
