"""One group's control block in shared memory, and the calls into csrc/shm that use it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import c_int32, c_int64, c_uint8, c_uint64
from dataclasses import dataclass
from zlib import crc32

from polyaccel.comm.arguments import bounds_of
from polyaccel.comm.backends.shm.library import (
    DTYPE_CODES,
    DTYPES,
    REDUCE_CODES,
    REDUCES,
    CallKey,
    ShmCall,
    ShmOp,
    Status,
    shm_library,
    waiting_library,
)
from polyaccel.comm.backends.shm.memory import Bytes, Heap, HeapRange, Member, PeerFile
from polyaccel.comm.base import StatusStore
from polyaccel.comm.collective import MESSAGES, Collective, Operation
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CommError, CommTimeout, ShardingError

# Longer than a sleeper takes to wake: else two ranks in step, once one has slept, keep putting each other to sleep.
_SPIN_NS = 100_000
_SPIN_NS_OF_MANY = 20_000  # with more ranks than cores, the one that is waited for needs this core
_NOWHERE = (HeapRange(-1, 0, 0), 0)


@dataclass(frozen=True)
class Host:
    """Memory shared with the peers: this process's heap, each (global) rank's process and heap file, the board."""

    heap: Heap
    members: Mapping[int, Member]
    files: Mapping[int, PeerFile | None]
    board: StatusStore
    symmetric: bool
    """Whether large buffers are allocated where peers can read them."""


class Failure(Exception):
    """The failure of a call: its status, the group ranks concerned, and the call that the first of them was in."""

    def __init__(self, status: Status, missing: list[int], theirs: CallKey) -> None:
        self.status = status
        self.missing = missing
        self.theirs = theirs


class PreparedCall:
    """A collective whose arguments were checked, as the library takes it. It stays valid as long as the buffers stay
    where they are, and may be made again and again.

    `eager` and `patient` are addresses: of the call for a thread with a waiting caller, which looks before it sleeps
    and heeds signals, and of the call for a helper.
    """

    __slots__ = ("_held", "_patient", "_structure", "eager")

    def __init__(self, structure: ShmCall, *held: object) -> None:
        self.eager = ctypes.addressof(structure)
        self._structure, self._held = structure, held
        self._patient: ShmCall | None = None

    @property
    def patient(self) -> int:
        if self._patient is None:
            patient = ShmCall.from_buffer_copy(self._structure)
            patient.spin_ns = patient.heeds_signals = 0
            self._patient = patient
        return ctypes.addressof(self._patient)


class ShmGroup:
    """The ranks of one group. Calls come from one thread at a time, except for messages."""

    def __init__(self, host: Host, control: Bytes, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        world = self._world = len(ranks)
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
        self._theirs = CallKey()
        self._missing_at, self._theirs_at = ctypes.addressof(self._missing), ctypes.addressof(self._theirs)
        self.limit(timeout_s)
        self._spin_ns = _SPIN_NS if len(host.members) <= (os.cpu_count() or 1) else _SPIN_NS_OF_MANY
        self._waiting = waiting_library()
        self._run = self._waiting.pa_shm_collective

    def limit(self, timeout_s: float) -> None:
        """Let every call that is prepared from now on end after `timeout_s`."""
        self._timeout_ns = int(timeout_s * 1e9)

    def prepare(self, op: ShmOp, collective: Collective, whole: Buffer | None) -> PreparedCall:
        """Convert `collective` for the library; `whole` is set if peers may read all elements in place."""
        heap_range, delta = (
            _NOWHERE if whole is None else self._host.heap.book.find(whole.data_ptr(), whole.nbytes) or _NOWHERE
        )
        is_shared = heap_range.base == 0
        if is_shared and op not in (ShmOp.ALL_GATHER, ShmOp.BROADCAST):
            raise ShardingError(
                f"{collective.operation.value}: the ranks have this buffer in common, there is nothing to combine",
                hint="reduce buffers from allocate(), of which each rank has its own",
                value=collective.numel,
            )
        counts, sent = collective.counts, collective.source_counts
        bounds = None if counts is None else (c_int64 * (self._world + 1))(*bounds_of(counts, 0, self._world))
        in_bounds = None if sent is None else (c_int64 * (self._world + 1))(*bounds_of(sent, 0, self._world))
        key = CallKey(
            op=op,
            type=DTYPE_CODES[collective.dtype or DType.UINT8],
            reduce=REDUCE_CODES[collective.reduction],
            root=collective.root,
            numel=0 if sent is not None else collective.numel,
            is_shared=is_shared,
            # What each rank sends another in an all-to-all is compared part by part.
            parts=(1 if collective.pieces is None else 2) if sent is not None else _digest(counts, collective.bucket),
            most=0 if sent is None else max(sent),
            base=heap_range.base,
            length=heap_range.length,
            delta=delta,
        )
        source, target, pieces = collective.source, collective.target, collective.pieces
        addresses = (None if source is None else source.data_ptr(), None if target is None else target.data_ptr())
        where = [None if one is None else ctypes.addressof(one) for one in (bounds, in_bounds)]
        if pieces is not None:
            where += [pieces.table.data_ptr(), pieces.count, pieces.cuts_source]
        call = ShmCall(key, *addresses, self._timeout_ns, self._spin_ns, 1, 0, *where)
        return PreparedCall(call, bounds, in_bounds, pieces)

    def run(self, address: int) -> None:
        """Carry a prepared call through. Raises Failure, and whatever the handler of a signal raises."""
        status = self._run(self._group, address, self._missing_at, self._theirs_at)
        if status:
            raise self._failure(status, self._missing, self._theirs)

    def message(self, peer: int, buffer: Buffer, *, sends: bool, patient: bool) -> None:
        """Send `buffer` to `peer` or fill it; `patient`: sleep at once when idle. Raises Failure."""
        missing, theirs = (c_uint8 * len(self._missing))(), CallKey()
        key = CallKey(type=DTYPE_CODES[buffer.dtype], numel=buffer.numel)
        where = buffer.data_ptr()
        call = ShmCall(key, where, where, self._timeout_ns, 0 if patient else self._spin_ns, heeds_signals=not patient)
        asked = self._group, peer, ctypes.addressof(call), ctypes.addressof(missing)
        if sends:
            status = self._waiting.pa_shm_send(*asked)
        else:
            status = self._waiting.pa_shm_recv(*asked, ctypes.addressof(theirs))
        if status:
            raise self._failure(status, missing, theirs)

    @staticmethod
    def _failure(status: int, missing: ctypes.Array[c_uint8], theirs: CallKey) -> Failure:
        copy = CallKey()
        ctypes.memmove(ctypes.byref(copy), ctypes.byref(theirs), ctypes.sizeof(CallKey))
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
    collective: Collective,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    earlier: CommError | None,
) -> CommError:
    """Return the error for a failure in `collective` on group rank `rank`; `earlier` is the group's first."""
    missing = sorted(ranks[index] for index in failure.missing)
    what = f"{collective} on rank {ranks[rank]}"
    lost = f"ranks {missing} did not take part"
    if failure.status is Status.TIMEOUT:
        return CommTimeout(
            f"{what} timed out after {timeout_s:g} s: {lost}",
            hint="find out what the missing ranks do: stopped, or in another call",
            missing_ranks=missing,
        )
    if failure.status is Status.DEAD:
        return CommError(
            f"{what} failed: {lost} (their processes have ended)",
            hint="look for the first error among the ranks: what ended these",
            missing_ranks=missing,
        )
    if failure.status is Status.LEFT:
        return CommError(
            f"{what} failed: {lost} (they have closed the group, or an earlier call of theirs failed)",
            hint="look for the first error among the ranks",
            missing_ranks=missing,
        )
    if failure.status is Status.MISMATCH:
        return CommError(
            f"{what} failed: rank {missing[0]} called {_described(failure.theirs, collective)} instead",
            hint="every rank must call the same collectives in the same order",
            missing_ranks=missing,
        )
    if failure.status is Status.BROKEN and earlier is not None:
        return CommError(f"{what} failed, as {earlier.message}", missing_ranks=earlier.missing_ranks, hint=earlier.hint)
    if failure.status is Status.BROKEN:
        return CommError(
            f"{what} failed: a signal interrupted an earlier call",
            hint="end this process: its peers have the notice that it takes part no more",
        )
    return CommError(f"{what} failed: {failure.status.name}", hint="POLYACCEL_COMM=gloo does without shared memory")


def _digest(counts: Sequence[int] | None, bucket: int | None) -> int:
    """Return a number that differs between calls whose parts or buckets differ; 0 for equal parts of no bucket."""
    return 0 if counts is None and bucket is None else crc32(repr((counts, bucket)).encode()) | 1


def _described(key: CallKey, collective: Collective) -> str:
    """The call that a peer announced, in the words of a collective."""
    dtype = DTYPES[key.type]
    if collective.operation in MESSAGES:
        return f"a message of {key.numel} x {dtype.value}"
    if key.op == ShmOp.ALL_TO_ALL and key.parts and collective.operation is Operation.ALL_TO_ALL:
        return f"all_to_all with a part of {key.numel} x {dtype.value} for this rank"
    theirs = Collective(Operation(ShmOp(key.op).name.lower()), numel=key.numel, root=key.root)
    theirs.dtype = None if key.op == ShmOp.BARRIER else dtype
    theirs.reduction = REDUCES[key.reduce]
    text, is_other = theirs.agreed(), key.parts not in (0, _digest(collective.counts, collective.bucket))
    return text + (" in other parts or for another bucket" if is_other and text == collective.agreed() else "")
