"""A worker of `RankPool`: a process that joins the others, and runs the tasks that it receives.

Read first: `work_for_pool`. A worker sends answers, and notes of what it does next (`Doing`).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.comm.init.backends import comm_backend
from polyaccel.errors import LaunchError
from polyaccel.job.host_topology import HostTopology, host_id
from polyaccel.job.process_guard import end_with
from polyaccel.testkit.progress import listen

SHOW_STACK = getattr(signal, "SIGUSR2", None)
"""The signal at which a worker writes the stacks of its threads."""
Task = Callable[..., Any] | str


class Doing(NamedTuple):
    """A worker's note of what it is about to do."""

    what: str


def work_for_pool(
    pipe: Connection,
    rendezvous: Rendezvous,
    comm_timeout_s: float,
    environ: dict[str, str],
    backend: str,
    memory: HostArrays | None,
    accelerator: str = "cpu",
    stack_file: str | None = None,
    warnings_fail: bool = True,
) -> None:
    """Connect, then run tasks until the pool is closed; `stack_file` (None: none) gets stacks of crashes."""
    _end_with_pool()
    os.environ.update(environ)
    if stack_file is not None:
        _show_stacks_in(stack_file)
    listen(lambda what: pipe.send_bytes(pickle.dumps((None, Doing(what)))))
    pipe.send_bytes(pickle.dumps((None, Doing(f"connect by {backend}"))))
    try:
        chosen = _accelerator(accelerator, memory, rendezvous.local_rank)
        warnings.simplefilter("error" if warnings_fail else "default")
        communicator = _connect(rendezvous, comm_timeout_s, backend, chosen)
    except BaseException as error:
        pipe.send_bytes(_packed(error, None))
        return
    pipe.send_bytes(_packed(None, None))
    while True:
        seed_generators(0)  # of what the files draw that are imported with a task
        try:
            job = pipe.recv()
        except EOFError:
            break
        except Exception as error:  # a task that does not unpickle here
            pipe.send_bytes(_packed(error, None))
            continue
        seed, task, args = job
        try:
            function = _resolve(task)
            seed_generators(seed)
            result = function(communicator, *args)
            answer = _packed(None, result)
        except BaseException as error:
            answer = _packed(error, None)
        pipe.send_bytes(answer)
    communicator.close()


def seed_generators(seed: int) -> None:
    """Seed the generators of `random`, and those of numpy and torch where these are imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _end_with_pool() -> None:
    """Let this worker be killed with the pool's process. The fork server lives as long as its workers do."""
    pool = multiprocessing.parent_process()
    if pool is not None and pool.pid is not None:
        end_with(pool.pid)
        if not pool.is_alive():  # its number may be another process's by now
            os.kill(os.getpid(), signal.SIGKILL)


def _show_stacks_in(file: str) -> None:
    """Let a crash of this process, and the signal of a pool that has waited too long, write its stacks to `file`."""
    stream = open(file, "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the process lives
    faulthandler.enable(stream)
    if SHOW_STACK is not None:
        faulthandler.register(SHOW_STACK, stream)


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

    communicator = comm_backend(backend)().connect(rendezvous, accelerator, timeout_s=comm_timeout_s)
    with suppress(OSError):  # no Linux
        communicator.host_topology = HostTopology.one_host(communicator.rank, communicator.ranks, host_id())
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
