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
from polyaccel.comm.shm_library import DTYPE_CODES, DTYPES, REDUCE_CODES, REDUCES, CCall, Op, Status, Told, shm_library
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
        self._timeout_ns = int(timeout_s * 1e9)
        self._spin_ns = _SPIN_NS if len(host.members) <= (os.cpu_count() or 1) else _SPIN_NS_OF_MANY
        self._call = self._new_call()
        self._library_call = self._library.pa_shm_collective

    def _new_call(self) -> CCall:
        return CCall(told=Told(), timeout_ns=self._timeout_ns, spin_ns=self._spin_ns)

    def collective(
        self,
        op: Op,
        numel: int,
        dtype: DType,
        reduce: ReduceOp,
        root: int,
        source: int,
        out: int,
        whole: Buffer | None,
        *,
        patient: bool,
    ) -> None:
        """Run one collective on the addresses `source` and `out`; `whole` is the buffer of `numel` elements if peers
        may read it where it is. `patient`: sleep at once where there is nothing to do. Raises Failure."""
        call = self._call
        told = call.told
        told.op = op
        told.type = DTYPE_CODES[dtype]
        told.reduce = REDUCE_CODES[reduce]
        told.root = root
        told.numel = numel
        place, delta = (
            _NOWHERE if whole is None else self._host.heap.book.find(whole.data_ptr(), whole.nbytes) or _NOWHERE
        )
        told.is_shared = place.base == 0
        told.base, told.length, told.delta = place.base, place.length, delta
        if told.is_shared and op not in (Op.ALL_GATHER, Op.BROADCAST):
            raise ShardingError(
                f"{op.name.lower()}: the ranks have this buffer in common, there is nothing to combine",
                cure="reduce buffers from allocate(), of which each rank has its own",
                value=numel,
            )
        call.source, call.out = source, out
        call.spin_ns = 0 if patient else self._spin_ns
        status = self._library_call(self._group, call, self._missing, self._theirs)
        if status:
            raise self._failure(status, self._missing, self._theirs)

    def message(self, peer: int, buffer: Buffer, *, sends: bool, patient: bool) -> None:
        """Send `buffer` to `peer`, or fill it with what comes from there. Raises Failure."""
        call, missing, theirs = self._new_call(), (c_uint8 * len(self._missing))(), Told()
        call.told.type, call.told.numel = DTYPE_CODES[buffer.dtype], buffer.numel
        call.source = call.out = buffer.data_ptr()
        call.spin_ns = 0 if patient else self._spin_ns
        if sends:
            status = self._library.pa_shm_send(self._group, peer, call, missing)
        else:
            status = self._library.pa_shm_recv(self._group, peer, call, missing, theirs)
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


def check_reducible(kind: str, dtype: DType) -> None:
    """Refuse to add truth values, of which every library means something else."""
    if dtype is DType.BOOL:
        raise ShardingError(f"{kind}: the reduction of bool is not defined", cure="cast to uint8 first", value=dtype)


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
    return CommError(f"{what} failed: {failure.status.name}", cure="POLYACCEL_COMM=gloo does without shared memory")


def _describe(told: Told, call: Call) -> str:
    """What a peer told that it called, as `call` would be written."""
    op = "message" if call.op == "message" else Op(told.op).name.lower()
    detail = {Op.BROADCAST: f"from {told.root}"}.get(told.op, "")
    if told.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        detail = REDUCES[told.reduce].value
    dtype = None if told.op == Op.BARRIER and call.op != "message" else DTYPES[told.type]
    return str(Call(op, told.numel, dtype, detail))
