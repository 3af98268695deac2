"""One group's communicator in oneCCL, and the calls under way in it.

[Note: Single oneCCL thread]
Its calls block until all peers have come, and it is not safe to call from several threads (three groups in three
threads hang). So one thread of csrc/ccl makes all calls of a process, those of different groups too, in the order in
which they were started. Ranks that are in several groups must therefore start calls in one order across groups. A
caller that waits can give up; the thread cannot: after a call that ran out of time, no other call of the process can
succeed.
"""

from __future__ import annotations

import ctypes
from collections import deque
from time import monotonic

from polyaccel.comm.backends.ccl.library import (
    ADDRESS_NBYTES,
    DTYPE_CODES,
    REDUCE_CODES,
    CclCall,
    CclOp,
    State,
    ccl_library,
)
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp

_SLICE_S = 0.2  # how long a signal, such as Ctrl-C, may have to wait for a waiting thread
_LEAVE_S = 2.0
_stuck: list[CclJob] = []
"""The call that ran out of time, if there is one: its memory stays, for the peers may yet come."""


class CclTimeout(Exception):
    """A call did not end in time."""


class CclFailure(Exception):
    """A call failed; the text is oneCCL's, or names the earlier call that is in the way."""


class CclJob:
    """A call on the way. Owns `held`, the memory that it reads and writes, until it has ended."""

    def __init__(self, handle: int, what: str, *held: object) -> None:
        self._library = ccl_library()
        self._handle = handle
        self._what = what
        self._held = held

    def wait(self, timeout_s: float) -> None:
        """Wait for the end. Raises CclTimeout, or CclFailure."""
        if self._is_behind_a_stuck_call():
            raise CclFailure(f"{_stuck[0]} timed out and is still in the way")
        end_s = monotonic() + timeout_s
        while not self.ends_within(min(_SLICE_S, max(0.0, end_s - monotonic()))):
            if monotonic() >= end_s:
                _stuck[:] = [self]
                raise CclTimeout
        self._held = ()
        if self._state(0) is State.FAILED:
            raise CclFailure(self._library.pa_ccl_error(self._handle).decode(errors="replace"))

    def ends_within(self, seconds: float) -> bool:
        """Wait that long at most; whether it has ended."""
        return self._state(seconds) is not State.PENDING

    def _state(self, seconds: float) -> State:
        return State(self._library.pa_ccl_wait(self._handle, int(seconds * 1e9)))

    def _is_behind_a_stuck_call(self) -> bool:
        return bool(_stuck) and not _stuck[0].ends_within(0) and not self.ends_within(0)

    def __str__(self) -> str:
        return self._what

    def __del__(self) -> None:
        self._library.pa_ccl_free(self._handle)


class CclGroup:
    """The ranks of one group. See [Note: Single oneCCL thread]."""

    def __init__(self) -> None:
        self._library = ccl_library()
        self._group = self._library.pa_ccl_new_group()
        self._address = ctypes.create_string_buffer(ADDRESS_NBYTES)
        self._under_way: deque[CclJob] = deque()

    def host(self, timeout_s: float) -> bytes:
        """Make the meeting place; its address is for the other ranks."""
        handle = self._library.pa_ccl_host(self._group, self._address)
        CclJob(handle, "a meeting place", self._address).wait(timeout_s)
        return self._address.raw

    def join(self, address: bytes | None, rank: int, world_size: int, timeout_s: float) -> None:
        """Connect to the others at `address`; None on the rank that is `host`."""
        handle = self._library.pa_ccl_join(self._group, address, rank, world_size)
        CclJob(handle, f"meeting {world_size - 1} ranks").wait(timeout_s)

    def start(
        self,
        op: CclOp,
        what: str,
        numel: int = 0,
        source: Buffer | None = None,
        out: Buffer | None = None,
        reduce: ReduceOp = ReduceOp.SUM,
        root: int = 0,
    ) -> CclJob:
        """Start one collective; `numel` as csrc/ccl/ccl.h counts it, `what` is its name in messages."""
        buffers = tuple(buffer for buffer in (source, out) if buffer is not None)
        call = CclCall(
            op,
            DTYPE_CODES[buffers[0].dtype if buffers else DType.UINT8],
            REDUCE_CODES[reduce],
            root,
            numel,
            source.data_ptr() if source is not None else None,
            out.data_ptr() if out is not None else None,
        )
        while self._under_way and self._under_way[0].ends_within(0):
            self._under_way.popleft()
        job = CclJob(self._library.pa_ccl_collective(self._group, call), what, *buffers)
        self._under_way.append(job)  # whatever becomes of the caller that should wait for it
        return job

    def leave(self) -> None:
        """Leave once everything started has ended; waits a moment for that."""
        CclJob(self._library.pa_ccl_leave(self._group), "leaving").ends_within(0 if _stuck else _LEAVE_S)
