"""Collectives of the processes of one host, through memory that they share.

[Note: Waiting in shared memory]
A synchronous call runs in the caller's thread: it spins for a moment, then sleeps until it is woken. Asynchronous calls
run one after another on a helper thread, which sleeps at once, for its core has better things to do; a synchronous call
that finds the helper busy queues behind it, so that every rank has its calls in one order. Messages have their own
order between each two ranks: a helper for each direction, made when it is first needed.

[Note: Call cache]
A training step makes the same calls on the same buffers again and again, and looking at the arguments takes several
times as long as moving a small message. So a call is kept by all that its checks and its form depend on: addresses,
sizes, types, and which memory the peers can map, whose every change empties the store. Whose turn it is and whether
the ranks agree is looked at in each call, by the library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any, ClassVar
from zlib import crc32

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.backends.shm.cow_mapping import CowMapping, PrivateMapping
from polyaccel.comm.backends.shm.group import Failure, Host, PreparedCall, ShmGroup, explain
from polyaccel.comm.backends.shm.library import ShmOp, shm_library
from polyaccel.comm.backends.shm.memory import Bytes, map_file, new_file, open_peer, rounded_up
from polyaccel.comm.base import Communicator, StatusStore
from polyaccel.comm.collective import ALL_OPERATIONS, UNEVEN_PARTS, Collective, Operation, closed_error, ended
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.shared_memory import SharedMemory
from polyaccel.comm.work import DONE, Background, DeferredWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.deadline import Deadline
from polyaccel.core.types import DType
from polyaccel.errors import CommError, ShardingError

NOTE_NBYTES = 4096
_HEAD = Struct("<II")  # length and checksum of the text
_TRIES = 100


class ShmBoard(StatusStore):
    """One area of `NOTE_NBYTES` for each global rank."""

    def __init__(self, notes: Bytes) -> None:
        self._notes = notes

    def set(self, rank: int, text: str) -> None:
        data = text.encode()[: NOTE_NBYTES - _HEAD.size]
        note = _HEAD.pack(len(data), crc32(data)) + data
        area = self._notes.data
        area[rank * NOTE_NBYTES : rank * NOTE_NBYTES + len(note)] = note

    def read(self, world_size: int) -> Mapping[int, str]:
        found = {rank: self._read(rank) for rank in range(world_size)}
        return {rank: text for rank, text in found.items() if text}

    def _read(self, rank: int) -> str:
        """The note; empty if there is none, or if it was never whole while it was looked at."""
        area = self._notes.data[rank * NOTE_NBYTES : (rank + 1) * NOTE_NBYTES]
        for _ in range(_TRIES):
            note = bytes(area)
            length, checksum = _HEAD.unpack_from(note)
            text = note[_HEAD.size : _HEAD.size + length]
            if length == len(text) and crc32(text) == checksum:
                return text.decode(errors="replace")
        return ""


_SHARED_NBYTES = 64 << 10  # smaller buffers go through the stages, which is faster
_MOST_PREPARED = 256
_OPS = {
    Operation.BARRIER: ShmOp.BARRIER,
    Operation.ALL_REDUCE: ShmOp.ALL_REDUCE,
    Operation.REDUCE_SCATTER: ShmOp.REDUCE_SCATTER,
    Operation.ALL_GATHER: ShmOp.ALL_GATHER,
    Operation.BROADCAST: ShmOp.BROADCAST,
    Operation.ALL_TO_ALL: ShmOp.ALL_TO_ALL,
    Operation.GATHER: ShmOp.GATHER,
    Operation.SCATTER: ShmOp.SCATTER,
}
# Buffers that peers may read where they are.
_WHOLE_IS_TARGET = frozenset({ShmOp.ALL_REDUCE, ShmOp.ALL_GATHER, ShmOp.BROADCAST})
_WHOLE_IS_SOURCE = frozenset({ShmOp.REDUCE_SCATTER})


class ShmCommunicator(Communicator):
    """A group of ranks on one host. See [Note: Waiting in shared memory]."""

    native_ops: ClassVar[frozenset[Operation]] = ALL_OPERATIONS - {Operation.BATCH}
    native_uneven_ops: ClassVar[frozenset[Operation]] = UNEVEN_PARTS
    supports_strided = True
    deterministic = True
    backend = "shm"

    def __init__(
        self, host: Host, group: ShmGroup, rank: int, ranks: tuple[int, ...], accelerator: Accelerator, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self.ranks = ranks
        self.accelerator = accelerator
        self.timeout_s = timeout_s
        self._host = host
        self._group = group
        self._helper: Background | None = None
        self._messengers: dict[tuple[int, bool], Background] = {}
        self._prepared: dict[tuple[Any, ...], PreparedCall] = {}
        self._prepared_for = -1  # the address book's version
        self._closed = False
        self._first_error: CommError | None = None

    def start(self, collective: Collective) -> Work:
        op = _OPS.get(collective.operation)
        if op is None:
            return self._message(collective)
        source, target = collective.source, collective.target
        key: tuple[Any, ...]
        bucket = collective.bucket
        if source is None or target is None:
            one = target if source is None else source
            address = 0 if one is None else one.data_ptr()
            key = (op, address, collective.numel, collective.dtype, collective.root, collective.counts, bucket)
        elif source is target:
            reduction = collective.reduction
            key = (op, source.data_ptr(), collective.numel, collective.dtype, reduction, collective.root, bucket)
        else:
            key = (
                op,
                source.data_ptr(),
                target.data_ptr(),
                source.numel,
                target.numel,
                source.dtype,
                target.dtype,
                collective.reduction,
                collective.root,
                collective.counts,
                collective.source_counts,
                bucket,
            )
        # See [Note: Call cache].
        book = self._host.heap.book
        if self._prepared_for != book.version or len(self._prepared) > _MOST_PREPARED:
            self._prepared.clear()
            self._prepared_for = book.version
        prepared = self._prepared.get(key) if collective.pieces is None else None
        if prepared is None and collective.pieces is not None:
            collective.check(self.rank, self.world_size)
            prepared = self._group.prepare(op, collective, source)
        elif prepared is None:
            collective.check(self.rank, self.world_size)
            whole = target if op in _WHOLE_IS_TARGET else source if op in _WHOLE_IS_SOURCE else None
            prepared = self._prepared[key] = self._group.prepare(op, collective, whole)
        if self._closed:
            raise closed_error(collective)
        helper = self._helper
        if not collective.async_op and (helper is None or helper.is_idle):
            self._run(prepared.eager, collective)
            return DONE
        if helper is None:
            helper = self._helper = Background("polyaccel shm")
        later = prepared
        return ended(helper.carry(DeferredWork(lambda: self._run(later.patient, collective))), collective)

    def connect(self, deadline: Deadline) -> None:
        """Wait until every rank has opened what it needs of the others. Raises CommTimeout at the `deadline`."""
        self._group.limit(deadline.remaining_s())
        self.barrier(label="opening shared memory")
        self._group.limit(self.timeout_s)
        self._prepared.clear()  # calls that would keep the deadline for a limit

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        members = self.agreed_members(ranks)
        outer = tuple(self.ranks[rank] for rank in members)
        is_member = self.rank in members
        if len(members) == 1:
            alone = SingleCommunicator(
                self.accelerator, timeout_s=self.timeout_s, global_rank=outer[0], backend=self.backend
            )
            return alone if is_member else None
        nbytes = shm_library().pa_shm_control_nbytes(len(members)) if is_member else 0
        with self._shared_file(nbytes, members[0]) as file:
            control = map_file(file, nbytes) if is_member else np.empty(0, np.uint8)
        if not is_member:
            return None
        rank = members.index(self.rank)
        group = ShmGroup(self._host, control, rank, outer, self.timeout_s)
        return ShmCommunicator(self._host, group, rank, outer, self.accelerator, self.timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        helpers = [self._helper, *self._messengers.values()]
        is_idle = all(helper is None or helper.is_idle for helper in helpers)
        for helper in helpers:
            if helper is not None:
                helper.close()
        self._group.close(is_idle=is_idle)

    def board(self) -> StatusStore | None:
        return self._host.board

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        nbytes = numel * dtype.itemsize
        if nbytes < _SHARED_NBYTES or not self._host.symmetric:
            return self.accelerator.allocate(numel, dtype)
        return self.accelerator.from_host_memory(self._host.heap.allocate(nbytes), dtype)

    def allocate_shared(self, numel: int, dtype: DType) -> SharedMemory | None:
        if not self._host.symmetric:
            return None
        nbytes, over = numel * dtype.itemsize, self.accelerator.from_host_memory
        with self._shared_file(nbytes, 0) as file:
            whole = over(map_file(file, nbytes, self._host.heap.book), dtype)
            face = PrivateMapping(file, nbytes)
            return CowMapping(whole, over(face.bytes(), dtype), face)

    @contextmanager
    def _shared_file(self, nbytes: int, owner: int) -> Iterator[int]:
        """Map a zeroed file that group rank `owner` makes, until every rank has done with it. Collective."""
        file = new_file("polyaccel-shared", rounded_up(nbytes)) if self.rank == owner else -1
        try:
            answers = self.all_gather_object((file, nbytes))
            if any(theirs not in (0, answers[owner][1]) for _, theirs in answers):
                raise ShardingError(f"ranks share {[theirs for _, theirs in answers]} bytes", value=nbytes)
            if self.rank != owner and nbytes:
                first = self.ranks[owner]
                file = open_peer(self._host.members[first].pid, answers[owner][0], f"shared memory of rank {first}")
            yield file
            self.barrier()  # the owner's descriptor is what the others open
        finally:
            if file >= 0:
                os.close(file)

    def _run(self, address: int, collective: Collective) -> None:
        try:
            self._group.run(address)
        except Failure as failure:
            raise self._error(failure, collective) from None
        if collective.target is not None:
            collective.target.bump_version()

    def _message(self, collective: Collective) -> Work:
        collective.check(self.rank, self.world_size)
        if self._closed:
            raise closed_error(collective)
        peer, sends = collective.root, collective.operation is Operation.SEND
        buffer = collective.buffer_sent() if sends else collective.buffer_received()
        messenger = self._messengers.get((peer, sends))
        runs_here = not collective.async_op and (messenger is None or messenger.is_idle)

        def run() -> None:
            try:
                self._group.message(peer, buffer, sends=sends, patient=not runs_here)
            except Failure as failure:
                raise self._error(failure, collective) from None
            if not sends:
                buffer.bump_version()

        if runs_here:
            run()
            return DONE
        if messenger is None:
            way = f"{self.rank} -> {peer}" if sends else f"{peer} -> {self.rank}"
            messenger = self._messengers[peer, sends] = Background(f"polyaccel shm {way}")
        return ended(messenger.carry(DeferredWork(run)), collective)

    def _error(self, failure: Failure, collective: Collective) -> CommError:
        error = explain(failure, collective, self.rank, self.ranks, self.timeout_s, self._first_error)
        self._first_error = self._first_error or error
        return error
