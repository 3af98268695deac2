"""Collectives of the processes of one host, through memory that they share.

[Note: Shared memory, who waits]
A synchronous call runs in the caller's thread: it spins for a moment, then sleeps until it is woken. Asynchronous calls
run one after another on a helper thread, which sleeps at once, for its core has better things to do; a synchronous call
that finds the helper busy queues behind it, so that every rank has its calls in one order. Messages have an order of
their own between each two ranks: a helper for each direction, made when it is first needed.

[Note: Calls made before]
A training step makes the same calls on the same buffers again and again, and looking at the arguments takes several
times as long as moving a small message. So a call is kept by all that its checks and its form depend on: addresses,
sizes, types, and which memory the peers can map, whose every change empties the store. Whose turn it is and whether
the ranks agree is looked at in each call, by the library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.comm.agreement import agreed_members
from polyaccel.comm.arguments import (
    Call,
    check_equal_parts,
    check_reducible,
    check_reduction,
    check_root,
    closed_error,
    is_own_part,
)
from polyaccel.comm.background import Background, DeferredWork
from polyaccel.comm.base import NO_INFO, Board, CallInfo, Communicator, DoneWork, Work, check_collective
from polyaccel.comm.objects import gather_objects
from polyaccel.comm.shm_group import Failure, Host, PreparedCall, ShmGroup, explain
from polyaccel.comm.shm_library import Op, shm_library
from polyaccel.comm.shm_memory import AddressBook, Bytes, map_file, new_file, open_peer, rounded_up
from polyaccel.comm.single import SingleCommunicator
from polyaccel.errors import CommError, ShardingError
from polyaccel.types import DType, ReduceOp

_DONE = DoneWork()
_SHARED_NBYTES = 64 << 10  # smaller buffers go through the stages, which is faster
_MOST_PREPARED = 256
_Key = tuple[Any, ...]


class ShmCommunicator(Communicator):
    """A group of ranks on one host. See [Note: Shared memory, who waits]."""

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
        self._calls = 0
        self._prepared: dict[_Key, PreparedCall] = {}
        self._prepared_for = -1  # the address book's version
        self._closed = False
        self._first_error: CommError | None = None

    def all_reduce(
        self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, info: CallInfo = NO_INFO
    ) -> Work:
        key = (Op.ALL_REDUCE, buffer.data_ptr(), buffer.numel, buffer.dtype, op)
        known = self._known(key)
        if known is None:
            check_reduction("all_reduce", buffer.dtype, op)
            check_reducible("all_reduce", buffer.dtype)
            call = Call("all_reduce", buffer.numel, buffer.dtype, op.value)
            known = self._prepare(key, call, buffer, buffer, buffer, op)
        return self._start(known, (buffer,), async_op, info)

    def reduce_scatter(
        self,
        out: Buffer,
        source: Buffer,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
        info: CallInfo = NO_INFO,
    ) -> Work:
        key = (Op.REDUCE_SCATTER, *_two(out, source), op)
        known = self._known(key)
        if known is None:
            check_collective("reduce_scatter", out, source, world_size=self.world_size, parts_of="source")
            check_reduction("reduce_scatter", source.dtype, op)
            check_reducible("reduce_scatter", source.dtype)
            is_own_part("reduce_scatter", source, out, self.rank)
            call = Call("reduce_scatter", source.numel, source.dtype, op.value)
            known = self._prepare(key, call, source, source, out, op)
        return self._start(known, (out, source), async_op, info)

    def all_gather(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        key = (Op.ALL_GATHER, *_two(out, source))
        known = self._known(key)
        if known is None:
            check_collective("all_gather", out, source, world_size=self.world_size, parts_of="out")
            is_own_part("all_gather", out, source, self.rank)
            known = self._prepare(key, Call("all_gather", out.numel, out.dtype), out, source, out)
        return self._start(known, (out, source), async_op, info)

    def broadcast(self, buffer: Buffer, root: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        key = (Op.BROADCAST, buffer.data_ptr(), buffer.numel, buffer.dtype, root)
        known = self._known(key)
        if known is None:
            check_root("broadcast", root, self.world_size)
            call = Call("broadcast", buffer.numel, buffer.dtype, f"from {root}")
            known = self._prepare(key, call, buffer, buffer, buffer, root=root)
        return self._start(known, (buffer,), async_op, info)

    def all_to_all(self, out: Buffer, source: Buffer, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        key = (Op.ALL_TO_ALL, *_two(out, source))
        known = self._known(key)
        if known is None:
            check_equal_parts(out, source, self.world_size)
            known = self._prepare(key, Call("all_to_all", out.numel, out.dtype), None, source, out)
        return self._start(known, (out, source), async_op, info)

    def send(self, buffer: Buffer, to: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("send", to, self.world_size)
        return self._message(buffer, to, f"{self.rank} -> {to}", async_op, info, sends=True)

    def recv(self, buffer: Buffer, source: int, *, async_op: bool = False, info: CallInfo = NO_INFO) -> Work:
        check_root("recv", source, self.world_size)
        return self._message(buffer, source, f"{source} -> {self.rank}", async_op, info, sends=False)

    def barrier(self, *, info: CallInfo = NO_INFO) -> None:
        key = (Op.BARRIER,)
        known = self._known(key) or self._prepare(key, Call("barrier"), None, None, None)
        self._start(known, (), False, info)

    def all_gather_object(self, value: Any) -> list[Any]:
        return gather_objects(self, value)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        members = agreed_members(self, ranks)
        outer = tuple(self.ranks[rank] for rank in members)
        is_member = self.rank in members
        if len(members) == 1:
            alone = SingleCommunicator(
                self.accelerator, timeout_s=self.timeout_s, global_rank=outer[0], backend=self.backend
            )
            return alone if is_member else None
        nbytes = shm_library().pa_shm_control_nbytes(len(members)) if is_member else 0
        control = self._share(nbytes, members[0])
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

    def board(self) -> Board | None:
        return self._host.board

    def allocate(self, numel: int, dtype: DType) -> Buffer:
        nbytes = numel * dtype.itemsize
        if nbytes < _SHARED_NBYTES or not self._host.symmetric:
            return self.accelerator.allocate(numel, dtype)
        return self.accelerator.over_host_memory(self._host.heap.allocate(nbytes), dtype)

    def allocate_shared(self, numel: int, dtype: DType) -> Buffer | None:
        if not self._host.symmetric:
            return None
        memory = self._share(numel * dtype.itemsize, 0, self._host.heap.book)
        return self.accelerator.over_host_memory(memory, dtype)

    def _share(self, nbytes: int, owner: int, book: AddressBook | None = None) -> Bytes:
        """Zeroed memory that group rank `owner` makes for all ranks that ask for bytes. Collective."""
        file = new_file("polyaccel-shared", rounded_up(nbytes)) if self.rank == owner else -1
        try:
            answers = self.all_gather_object((file, nbytes))
            if any(theirs not in (0, answers[owner][1]) for _, theirs in answers):
                raise ShardingError(f"ranks share {[theirs for _, theirs in answers]} bytes", value=nbytes)
            if self.rank != owner and nbytes:
                first = self.ranks[owner]
                file = open_peer(self._host.members[first].pid, answers[owner][0], f"shared memory of rank {first}")
            memory = map_file(file, nbytes, book) if nbytes else np.empty(0, np.uint8)
            self.barrier()  # the owner's descriptor is what the others open
        finally:
            if file >= 0:
                os.close(file)
        return memory

    def _known(self, key: _Key) -> PreparedCall | None:
        """The call with these arguments if it was made before. See [Note: Calls made before]."""
        book = self._host.heap.book
        if self._prepared_for != book.version or len(self._prepared) > _MOST_PREPARED:
            self._prepared.clear()
            self._prepared_for = book.version
        return self._prepared.get(key)

    def _prepare(
        self,
        key: _Key,
        call: Call,
        whole: Buffer | None,
        source: Buffer | None,
        out: Buffer | None,
        reduce: ReduceOp = ReduceOp.SUM,
        root: int = 0,
    ) -> PreparedCall:
        addresses = (0 if source is None else source.data_ptr(), 0 if out is None else out.data_ptr())
        prepared = self._prepared[key] = self._group.prepare(key[0], call, *addresses, whole, reduce, root)
        return prepared

    def _start(self, prepared: PreparedCall, buffers: tuple[Buffer, ...], async_op: bool, info: CallInfo) -> Work:
        """Make the call, which writes to the first of `buffers`; they are held until it has ended."""
        if self._closed:
            raise closed_error(prepared.call)
        seq = self._calls
        self._calls += 1
        helper = self._helper
        if not async_op and (helper is None or helper.is_idle):
            self._run(prepared.eager, prepared, buffers, seq, info)
            return _DONE
        if helper is None:
            helper = self._helper = Background("polyaccel shm")
        work = helper.carry(DeferredWork(lambda: self._run(prepared.patient, prepared, buffers, seq, info)))
        if not async_op:
            work.wait()
        return work

    def _run(self, address: int, prepared: PreparedCall, buffers: tuple[Buffer, ...], seq: int, info: CallInfo) -> None:
        try:
            self._group.run(address)
        except Failure as failure:
            raise self._error(failure, seq, prepared.call._replace(info=info)) from None
        if buffers:
            buffers[0].mark_written()

    def _message(self, buffer: Buffer, peer: int, way: str, async_op: bool, info: CallInfo, *, sends: bool) -> Work:
        call = Call("message", buffer.numel, buffer.dtype, way, info)
        if peer == self.rank:
            raise CommError(f"rank {peer}: a message to itself", cure="copy the buffer instead", value=peer)
        if self._closed:
            raise closed_error(call)
        messenger = self._messengers.get((peer, sends))
        runs_here = not async_op and (messenger is None or messenger.is_idle)

        def run() -> None:
            try:
                self._group.message(peer, buffer, sends=sends, patient=not runs_here)
            except Failure as failure:
                raise self._error(failure, self._calls - 1, call) from None
            if not sends:
                buffer.mark_written()

        if runs_here:
            run()
            return _DONE
        if messenger is None:
            messenger = self._messengers[peer, sends] = Background(f"polyaccel shm {way}")
        work = messenger.carry(DeferredWork(run))
        if not async_op:
            work.wait()
        return work

    def _error(self, failure: Failure, seq: int, call: Call) -> CommError:
        error = explain(failure, seq, call, self.rank, self.ranks, self.timeout_s, self._first_error)
        self._first_error = self._first_error or error
        return error


def _two(out: Buffer, source: Buffer) -> tuple[int, int, int, int, DType, DType]:
    """All that a call depends on of its buffers."""
    return out.data_ptr(), source.data_ptr(), out.numel, source.numel, out.dtype, source.dtype
