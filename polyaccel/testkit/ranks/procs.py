"""Ranks as processes, for tests: `RankPool`. They are started once, connected once, and used for many calls.

They come from a fork server that has imported torch and nothing else. That starts several times faster than spawning
and is safe, for that server never runs a kernel or a thread.

A task that fails costs the pool, for its ranks may have stopped at different places: all workers are killed, the error
names the rank, and the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.init.threads import DEFAULT_TIMEOUT_S, blame
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.job.ports import free_port
from polyaccel.testkit.ranks.worker import SHOW_STACK, Doing, Task, work_for_pool

_START_TIMEOUT_S = 120.0
_GRACE_S = 2.0
_END_TIMEOUT_S = 20.0  # from the end of a worker's pipe until the fork server sends its exit code
_STACK_TIMEOUT_S = 10.0
_PRELOAD = (
    "polyaccel.comm.backends.torch.exchange",
    "polyaccel.accelerators.memory.torch",
    "polyaccel.ops.torch.kernels",
)


class RankPool:
    """Worker processes joined by a comm backend. A context manager; `run` may be called any number of times.

    The processes start at the first `run`, and again at the next one after a failure.

    Args:
        world_size: Number of workers.
        comm_timeout_s: Time limit of the workers' collectives, in seconds.
        grace_s: Seconds for the other ranks to answer after one has failed. They are killed then.
        environ: Variables to set in the workers.
        backend: Name of the comm plugin.
        memory: Arrays of `CpuAccelerator`; None for its default.
        accelerator: Name of the accelerator plugin. Rank N uses device N modulo their number.
        by_port: Ranks join at an address, as those of a launcher do; else at a file.
        start_timeout_s: Seconds for the ranks to join, once their processes run.
        warnings_fail: A warning in a worker is an error there.
        seed: Seed of the workers' generators (`random`, numpy, torch) at the start of each task.
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
        start_timeout_s: float = _START_TIMEOUT_S,
        warnings_fail: bool = True,
        seed: int = 0,
    ) -> None:
        self.world_size = world_size
        self._seed = seed
        self._start_timeout_s = start_timeout_s
        self._warnings_fail = warnings_fail
        self._said: dict[int, str] = {}
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
        """Run a task on every rank. Blocks until all have answered.

        The first exception of a worker is raised here, with the attribute `rank`. Its notes hold the worker's traceback
        and the errors of the other ranks.

        Args:
            task: Called with the rank's communicator and `args`. It pickles, or is written `module:function`.
            *args: Further arguments, which pickle.
            timeout_s: Seconds for an answer, counted from the last `testkit.progress.doing` of any worker.

        Returns:
            The results in rank order.

        Raises:
            LaunchError: A worker died.
            CommTimeout: Some did not answer in time. Notes have their stacks.
        """
        if not self._pipes:
            self._start()
        self._said = {}
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a worker that is dead, which `_collect` finds out
                pipe.send((self._seed, task, args))
        return self._collect(timeout_s)

    def close(self) -> None:
        """Kill the workers, which hold nothing that is needed."""
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
                    *(self._memory, self._accelerator, self._stack_file(rank), self._warnings_fail),
                ),
                name=f"rank {rank}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._collect(self._start_timeout_s, first_s=_START_TIMEOUT_S)

    def _stack_file(self, rank: int) -> str:
        """Where a worker writes what it was doing when it crashed or was asked."""
        return str(Path(self._folder.name if self._folder else "", f"stack-{rank}"))

    def _collect(self, timeout_s: float, first_s: float | None = None) -> list[Any]:
        """Every worker's result, by rank. Raises the first failure once the others have had a moment to answer too.
        `first_s` is the limit until a worker announces what it does."""
        results: dict[int, Any] = {}
        failures: dict[int, BaseException] = {}
        deadline = monotonic() + (first_s or timeout_s)
        while waiting := {self._pipes[r]: r for r in range(self.world_size) if r not in results and r not in failures}:
            ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                break
            for rank in sorted(waiting[pipe] for pipe in self._pipes if pipe in ready):
                error, result = self._answer(rank)
                if isinstance(result, Doing):
                    self._said[rank] = result.what
                    if not failures:
                        deadline = monotonic() + timeout_s
                    continue
                results[rank] = result
                if error is not None:
                    failures[rank] = blame(error, rank)
                    deadline = min(deadline, monotonic() + self._grace_s)
        late = sorted(waiting.values())
        stacks = {rank: self._stack(rank) for rank in late} if late and not failures else {}
        if late or failures:
            self.close()  # the ranks may no longer agree on what comes next
        if failures:
            raise _first(failures, late)
        if late:
            raise self._hung(stacks, timeout_s)
        return [results[rank] for rank in range(self.world_size)]

    def _hung(self, stacks: dict[int, str], timeout_s: float) -> CommTimeout:
        """The error for workers that did not answer, with their stacks as notes."""
        late = list(stacks)
        places = [f"rank {rank} stood at {place}" for rank, text in stacks.items() if (place := _innermost(text))]
        said = [f"rank {rank} was at: {self._said[rank]}" for rank in late if rank in self._said]
        details = "".join(f"; {detail}" for detail in (*said[:1], *places))
        error = CommTimeout(
            f"worker ranks {late} did not answer within {timeout_s:g} s and were killed{details}",
            missing_ranks=late,
            hint="fix what waits there; allow more time if they were only slow (`plugins check --timeout`)",
        )
        notes = [f"rank {rank} stood at\n{text}" for rank, text in stacks.items() if text]
        error.__dict__["__notes__"] = notes  # add_note is younger than Python 3.10
        return error

    def _stack(self, rank: int) -> str:
        """The stacks of a worker's threads, which its signal handler writes, even while another thread holds the
        interpreter's lock."""
        file = Path(self._stack_file(rank))
        if SHOW_STACK is None or not file.exists():
            return ""
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], SHOW_STACK)
        end = monotonic() + _STACK_TIMEOUT_S
        while not (text := file.read_text(errors="replace")).endswith("\n") and monotonic() < end:
            sleep(0.01)
        return text

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
        crash = ""
        with suppress(OSError):
            crash = Path(self._stack_file(rank)).read_text(errors="replace")
        name = f" ({signal.Signals(-code).name})" if code and -code in set(signal.Signals) else ""
        place = f" at {_innermost(crash)}" if _innermost(crash) else ""
        error = LaunchError(
            f"worker rank {rank} died with exit code {code}{name}{place}",
            hint=f"{'fix what that line calls' if place else 'see its standard error'}; -v shows its stacks",
            value=(rank, code),
        )
        if crash:
            error.__dict__["__notes__"] = [crash]
        return error


def _innermost(stacks: str) -> str:
    """The place of the innermost frame of the thread that was asked, or that crashed, those of Python's own library
    left out: `file:line in function`."""
    _, _, own = stacks.rpartition("Current thread ")
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', own)
    library = f"{Path(os.__file__).parent}{os.sep}"
    outside = [frame for frame in frames if not frame[0].startswith(library) or "site-packages" in frame[0]]
    return next((f"{Path(file).name}:{line} in {function}" for file, line, function in (*outside, *frames)), "")


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
