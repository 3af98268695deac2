"""One group's control block in shared memory, and the calls into csrc/shm_*.cpp that use it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import c_int32, c_uint8, c_uint64
from dataclasses import dataclass

from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import Call
from polyaccel.comm.base import Board
from polyaccel.comm.shm_library import (
    DTYPE_CODES,
    DTYPES,
    REDUCE_CODES,
    REDUCES,
    CCall,
    Op,
    Status,
    Told,
    shm_library,
    waiting_library,
)
from polyaccel.comm.shm_memory import Bytes, Heap, Member, PeerFile, Place
from polyaccel.errors import CommError, CommTimeout, ShardingError
from polyaccel.types import DType, ReduceOp

# Longer than a sleeper takes to wake: else two ranks in step, once one has slept, keep putting each other to sleep.
_SPIN_NS = 100_000
_SPIN_NS_OF_MANY = 20_000  # with more ranks than cores, the one that is waited for needs this core
_NOWHERE = (Place(-1, 0, 0), 0)


@dataclass(frozen=True)
class Host:
    """What this process shares with its peers: its heap, every (global) rank's process and heap file, the board."""

    heap: Heap
    members: Mapping[int, Member]
    files: Mapping[int, PeerFile | None]
    board: Board
    symmetric: bool
    """Whether large buffers are allocated where peers can read them."""


class Failure(Exception):
    """What a call returned instead of success: the status, the group ranks concerned, what the first of them told."""

    def __init__(self, status: Status, missing: list[int], theirs: Told) -> None:
        self.status = status
        self.missing = missing
        self.theirs = theirs


class PreparedCall:
    """A collective whose arguments were checked, as the library takes it. It stays valid as long as the buffers stay
    where they are, and may be made again and again.

    `eager` and `patient` are addresses: of the call for a thread that somebody waits for, which looks before it sleeps
    and heeds signals, and of the call for a helper.
    """

    __slots__ = ("_structures", "call", "eager", "patient")

    def __init__(self, call: Call, eager: CCall, patient: CCall) -> None:
        self.call = call
        self.eager = ctypes.addressof(eager)
        self.patient = ctypes.addressof(patient)
        self._structures = eager, patient


class ShmGroup:
    """The ranks of one group. Calls come from one thread at a time, but for messages."""

    def __init__(self, host: Host, control: Bytes, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        world = len(ranks)
        self._library = shm_library()
        self._host = host
        self._control = control
        members = [host.members[global_rank] for global_rank in ranks]
        files = [host.files[global_rank] for global_rank in ranks]
        heaps = [peer.file if peer is not None else host.heap.file for peer in files]
        self._group: int | None = self._library.pa_shm_open(
            control.ctypes.data,
            rank,
            world,
            (c_int32 * world)(*[member.pid for member in members]),
            (c_uint64 * world)(*[member.start for member in members]),
            (c_int32 * world)(*heaps),
        )
        if not self._group:
            raise CommError(f"a group of {world} ranks cannot be opened", value=tuple(ranks))
        self._missing = (c_uint8 * world)()
        self._theirs = Told()
        self._missing_at, self._theirs_at = ctypes.addressof(self._missing), ctypes.addressof(self._theirs)
        self._timeout_ns = int(timeout_s * 1e9)
        self._spin_ns = _SPIN_NS if len(host.members) <= (os.cpu_count() or 1) else _SPIN_NS_OF_MANY
        self._waiting = waiting_library()
        self._run = self._waiting.pa_shm_collective

    def prepare(
        self, op: Op, call: Call, source: int, out: int, whole: Buffer | None, reduce: ReduceOp, root: int
    ) -> PreparedCall:
        """`call` on the addresses `source` and `out`; `whole` is the buffer of `call.numel` elements if peers may read
        it where it is. Raises ShardingError when the ranks have in common what each should have of its own."""
        place, delta = (
            _NOWHERE if whole is None else self._host.heap.book.find(whole.data_ptr(), whole.nbytes) or _NOWHERE
        )
        is_shared = place.base == 0
        if is_shared and op not in (Op.ALL_GATHER, Op.BROADCAST):
            raise ShardingError(
                f"{op.name.lower()}: the ranks have this buffer in common, there is nothing to combine",
                cure="reduce buffers from allocate(), of which each rank has its own",
                value=call.numel,
            )
        dtype = DTYPE_CODES[call.dtype or DType.UINT8]
        told = Told(op, dtype, REDUCE_CODES[reduce], root, call.numel, is_shared, 0, place.base, place.length, delta)
        return PreparedCall(
            call,
            CCall(told, source, out, self._timeout_ns, self._spin_ns, heeds_signals=1),
            CCall(told, source, out, self._timeout_ns, spin_ns=0),
        )

    def run(self, address: int) -> None:
        """Carry a prepared call through. Raises Failure, and whatever the handler of a signal raises."""
        status = self._run(self._group, address, self._missing_at, self._theirs_at)
        if status:
            raise self._failure(status, self._missing, self._theirs)

    def message(self, peer: int, buffer: Buffer, *, sends: bool, patient: bool) -> None:
        """Send `buffer` to `peer`, or fill it with what comes from there. `patient`: sleep at once where there is
        nothing to do, whatever signals come. Raises Failure, and what the handler of a signal raises."""
        missing, theirs = (c_uint8 * len(self._missing))(), Told()
        told = Told(type=DTYPE_CODES[buffer.dtype], numel=buffer.numel)
        where = buffer.data_ptr()
        call = CCall(told, where, where, self._timeout_ns, 0 if patient else self._spin_ns, heeds_signals=not patient)
        asked = self._group, peer, ctypes.addressof(call), ctypes.addressof(missing)
        if sends:
            status = self._waiting.pa_shm_send(*asked)
        else:
            status = self._waiting.pa_shm_recv(*asked, ctypes.addressof(theirs))
        if status:
            raise self._failure(status, missing, theirs)

    @staticmethod
    def _failure(status: int, missing: ctypes.Array[c_uint8], theirs: Told) -> Failure:
        copy = Told()
        ctypes.memmove(ctypes.byref(copy), ctypes.byref(theirs), ctypes.sizeof(Told))
        return Failure(Status(status), [rank for rank, flag in enumerate(missing) if flag], copy)

    def close(self, *, is_idle: bool) -> None:
        """Leave. The block stays mapped where a thread may still be inside a call (`is_idle` False)."""
        if self._group is not None:
            self._library.pa_shm_leave(self._group)
            if is_idle:
                self._library.pa_shm_free(self._group)
                self._group = None


def explain(
    failure: Failure,
    seq: int,
    call: Call,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    earlier: CommError | None,
) -> CommError:
    """The error for what went wrong in `call` on group rank `rank`; messages name global ranks. `earlier` is the first
    error of the group, after which no call can succeed."""
    missing = sorted(ranks[index] for index in failure.missing)
    what = f"#{seq} {call} on rank {ranks[rank]}"
    lost = f"ranks {missing} did not take part"
    if failure.status is Status.TIMEOUT:
        return CommTimeout(
            f"{what} timed out after {timeout_s:g} s: {lost}",
            missing_ranks=missing,
            cure="find out what the missing ranks do: stopped, or in another call",
            value=tuple(missing),
        )
    if failure.status is Status.DEAD:
        return CommError(
            f"{what} failed: {lost} (their processes have ended)",
            cure="look for the first error among the ranks: what ended these",
            value=tuple(missing),
        )
    if failure.status is Status.LEFT:
        return CommError(
            f"{what} failed: {lost} (they have closed the group, or an earlier call of theirs failed)",
            cure="look for the first error among the ranks",
            value=tuple(missing),
        )
    if failure.status is Status.MISMATCH:
        return CommError(
            f"{what} failed: rank {missing[0]} called {_describe(failure.theirs, call)} instead",
            cure="every rank must call the same collectives in the same order",
            value=tuple(missing),
        )
    if failure.status is Status.BROKEN and earlier is not None:
        return CommError(f"{what} failed, as {earlier.message}", cure=earlier.cure, value=earlier.value)
    if failure.status is Status.BROKEN:
        return CommError(
            f"{what} failed: a signal interrupted an earlier call",
            cure="end this process: its peers were told that it takes part no more",
        )
    return CommError(f"{what} failed: {failure.status.name}", cure="POLYACCEL_COMM=gloo does without shared memory")


def _describe(told: Told, call: Call) -> str:
    """What a peer told that it called, as `call` would be written."""
    op = "message" if call.op == "message" else Op(told.op).name.lower()
    detail = {Op.BROADCAST: f"from {told.root}"}.get(told.op, "")
    if told.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        detail = REDUCES[told.reduce].value
    dtype = None if told.op == Op.BARRIER and call.op != "message" else DTYPES[told.type]
    return str(Call(op, told.numel, dtype, detail))
