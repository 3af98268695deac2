"""A communicator's bookkeeping as tests: it notes that a result was written, keeps nothing of ended calls, and has a
group for what hosts know."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from polyaccel.comm.base import Communicator
from polyaccel.comm.work import DoneWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.testkit.comm.values import combined, expect, put, values_of
from polyaccel.testkit.growth import host_nbytes, keeps_nothing

T = TypeVar("T")

_LARGE = 20_000  # beyond what backends call small
_ROUNDS = 20
_OPEN_FILES = Path("/proc/self/fd")


def results_are_marked_written(comm: Communicator) -> int:
    if comm.world_size == 1:
        return 1  # nothing need be written
    for numel in (3, _LARGE):
        whole, part = comm.allocate(numel * comm.world_size, DType.FLOAT32), comm.allocate(numel, DType.FLOAT32)
        for what, target, call in (
            ("all_reduce", whole, partial(comm.all_reduce, whole)),
            ("reduce_scatter", part, partial(comm.reduce_scatter, part, whole)),
            ("all_gather", whole, partial(comm.all_gather, whole, part)),
            ("in-place all_gather", whole, partial(comm.all_gather, whole, whole.view(comm.rank * numel, numel))),
            ("broadcast", part, partial(comm.broadcast, part, 0)),
        ):
            before = target.version
            call()
            if target.version <= before and not (what == "broadcast" and comm.rank == 0):
                raise AssertionError(f"{what} wrote a buffer without counting it in its generation")
    return 1


def finished_calls_leave_nothing_behind(comm: Communicator) -> int:
    """Works and buffers are released once waited for, those of the last calls excepted, and with them the library's
    requests, which own their buffers; no thread or open file is added."""
    for _ in range(2):  # what is made once
        _call_everything(comm)
    before = _in_turn(comm, _held_by_process)
    refs = [ref for _ in range(_ROUNDS) for ref in _call_everything(comm)]
    after = _in_turn(comm, _held_by_process)
    _in_turn(comm, gc.collect)
    of_last_round = len(refs) // _ROUNDS
    left = [type(one).__name__ for ref in refs[:-of_last_round] if (one := ref()) is not None]
    if left:
        raise AssertionError(f"after {_ROUNDS} rounds of calls rank {comm.rank} still holds {len(left)} of {left[:5]}")
    if any(now > then for now, then in zip(after, before, strict=True)):
        raise AssertionError(f"threads and open files were {before}, and are {after} after {_ROUNDS} rounds of calls")
    return 1


def calls_keep_no_memory(comm: Communicator) -> int:
    """On the host and on the device. A round takes eight MiB of each rank's."""
    numel = 1 << 18
    whole, part = (comm.allocate(many * numel, DType.FLOAT32) for many in (comm.world_size, 1))

    def use() -> None:
        for _ in range(8):
            comm.all_reduce(part)
            comm.reduce_scatter(part, whole)
            comm.all_gather(whole, part)

    def agreed(growth: int) -> int:
        return max(map(int, comm.all_gather_object(growth)))

    def held() -> int:
        is_host = comm.accelerator.current_device().type == "cpu"
        comm.barrier()  # ranks may be threads: none looks while another's call still has its own memory
        nbytes = host_nbytes() + (0 if is_host else comm.accelerator.memory_stats().allocated_nbytes)
        comm.barrier()
        return nbytes

    keeps_nothing(use, 8 << 20, f"memory of rank {comm.rank} after collectives", held=held, agree=agreed)
    return 1


def host_groups_work_next_to_their_parent(comm: Communicator) -> int:
    everybody = put(comm, values_of(comm.rank, 7), DType.FLOAT32)
    outer = comm.all_reduce(everybody, async_op=True)
    hosts = comm.new_host_group()
    if hosts is not None:
        if (hosts.ranks, hosts.rank) != (comm.ranks, comm.rank):
            raise AssertionError(f"the host group of ranks {comm.ranks} has {hosts.ranks}, rank {hosts.rank}")
        own = put(hosts, values_of(comm.rank, 5), DType.FLOAT64)
        hosts.all_reduce(own)
        expect(hosts, own, combined(comm, 5, ReduceOp.SUM), "all_reduce in host memory")
        if hosts.all_gather_object(comm.rank) != list(range(comm.world_size)):
            raise AssertionError("objects of the ranks in a host group")
        hosts.close()
    outer.wait()
    if len(set(comm.all_gather_object(hosts is None))) != 1:
        raise AssertionError("a host group is there on some ranks only")
    return expect(comm, everybody, combined(comm, 7, ReduceOp.SUM), "the parent's all_reduce")


def _call_everything(comm: Communicator) -> list[weakref.ref[Work | Buffer]]:
    """References to the works and the buffers of one call of each kind, large and small."""
    whole, other = (comm.allocate(_LARGE * comm.world_size, DType.FLOAT32) for _ in range(2))
    part, inbox = (comm.allocate(_LARGE, DType.FLOAT32) for _ in range(2))
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    works = [
        comm.all_reduce(whole, async_op=True),
        comm.reduce_scatter(part, other, async_op=True),
    ]
    for work in works:
        work.wait()
    works += [
        comm.all_gather(whole, part, async_op=True),
        comm.broadcast(inbox, 0, async_op=True),
    ]
    for work in works:
        work.wait()
    works.append(comm.all_to_all(whole, other, async_op=True))
    if comm.world_size > 1:
        works += [comm.recv(inbox, before, async_op=True), comm.send(part, after, async_op=True)]
    for work in works:
        work.wait()
    comm.all_reduce(part)
    made: list[Work | Buffer] = [whole, other, part, inbox]
    made += [work for work in works if not isinstance(work, DoneWork)]  # of those there may be one for all calls
    return [weakref.ref(one) for one in made]


def _in_turn(comm: Communicator, act: Callable[[], T]) -> T:
    """What `act` gives. One rank after another: ranks may be threads, counting open files opens one, and a collection
    of garbage does nothing while another thread is at it."""
    comm.barrier()
    found: list[T] = []
    for rank in range(comm.world_size):
        if rank == comm.rank:
            found.append(act())
        comm.barrier()
    return found[0]


def _held_by_process() -> tuple[int, int]:
    """Threads, and open files where the system reports them."""
    return threading.active_count(), len(os.listdir(_OPEN_FILES)) if _OPEN_FILES.is_dir() else 0
