"""Memory that the ranks of a host map together.

[Note: Unnamed shared memory]
Nothing here has a name in /dev/shm: every piece is a memfd, which a peer opens through /proc/PID/fd while its owner
lives and holds by a descriptor or a mapping from then on. The system takes the pages back when the last process that
maps them ends, however it ends, so there is nothing to leave behind and nothing to clean up; nor does the size of
/dev/shm matter. A peer's file is taken only from a process of the same user, readable by that user alone, and when it
begins with the secret that the peer announced at the rendezvous.

Each rank has one file, its heap, in which every allocation has its own place for good: a place is never used again, so
a peer that still maps a freed one sees zeros and no other data.
"""

from __future__ import annotations

import os
import secrets
import weakref
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.accelerators.memory.host import aligned_shift, spare_nbytes
from polyaccel.comm.backends.shm.library import shm_library
from polyaccel.comm.host_address import start_of
from polyaccel.errors import CommError
from polyaccel.job.host_topology import host_id

_TOKEN_NBYTES = 32
_ROUND_NBYTES = 1 << 16  # no page of any architecture is larger
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Member:
    """A rank's process and its heap file, as it announces itself: what peers need to open the one and watch the
    other."""

    pid: int
    start: int
    file: int
    token: str
    host: str

    @classmethod
    def of_this_process(cls, heap: Heap) -> Member:
        return cls(os.getpid(), start_of("self"), heap.file, heap.token, host_id())


@dataclass(frozen=True)
class HeapRange:
    """`length` bytes at `base` of a heap file, the first useful one `shift` further on. No heap has
    anything at 0: there, with `length` 0, is the memory that all ranks share."""

    base: int
    length: int
    shift: int


class MappedMemory:
    """Mapped bytes, and the array over them, which keeps them mapped."""

    def __init__(self, file: int, heap_range: HeapRange, nbytes: int) -> None:
        address = shm_library().pa_shm_map(file, heap_range.base, heap_range.length)
        if not address:
            raise CommError(
                f"{heap_range.length} bytes of shared memory cannot be mapped",
                hint="free memory, or raise the limit of address space (ulimit -v); POLYACCEL_COMM=gloo does without",
                value=heap_range.length,
            )
        self.mapped: int = address
        self.address: int = address + heap_range.shift
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False)}

    def bytes(self) -> Bytes:
        """The bytes, zeroed when new; the array holds the region."""
        return np.asarray(self)


class AddressBook:
    """Which piece of shared memory an address of this process belongs to. `version` changes with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._starts: list[int] = []
        self._found: list[tuple[int, HeapRange]] = []
        self._gone: deque[int] = deque()
        self._lock = Lock()

    def add(self, start: int, nbytes: int, heap_range: HeapRange) -> None:
        with self._lock:
            self._forget()
            at = bisect_right(self._starts, start)
            self._starts.insert(at, start)
            self._found.insert(at, (start + nbytes, heap_range))
        self.version += 1

    def remove(self, start: int) -> None:
        """Forget what starts there. Takes no lock: finalizers call this, at any time and in any thread."""
        self._gone.append(start)
        self.version += 1  # after the change: who reads the new number sees it

    def find(self, address: int, nbytes: int) -> tuple[HeapRange, int] | None:
        """The place that holds these bytes, and how far behind its `base` they begin."""
        with self._lock:
            self._forget()
            at = bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            start, (end, heap_range) = self._starts[at], self._found[at]
        return (heap_range, address - start + heap_range.shift) if address + nbytes <= end else None

    def _forget(self) -> None:
        while self._gone:
            at = bisect_right(self._starts, self._gone.popleft()) - 1
            del self._starts[at], self._found[at]


class Heap:
    """This process's own file of shared memory. See [Note: Unnamed shared memory]."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(_TOKEN_NBYTES // 2)
        self.file = new_file("polyaccel-heap", _ROUND_NBYTES)
        weakref.finalize(self, os.close, self.file).atexit = False
        os.write(self.file, self.token.encode())
        self.book = AddressBook()
        self._end = _ROUND_NBYTES
        self._lock = Lock()

    def allocate(self, nbytes: int) -> Bytes:
        """Return zeroed bytes that peers can map. Raises CommError when there is no room for them."""
        length = rounded_up(nbytes + spare_nbytes(nbytes))
        with self._lock:
            base, self._end = self._end, self._end + length
            lengthen(self.file, self._end)
        region = MappedMemory(self.file, HeapRange(base, length, 0), nbytes)
        shift = aligned_shift(region.mapped, nbytes)
        region.address += shift
        heap_range = HeapRange(base, length, shift)
        self.book.add(region.address, nbytes, heap_range)
        weakref.finalize(region, self._free, region.mapped, region.address, heap_range, os.getpid()).atexit = False
        return region.bytes()

    def _free(self, mapped: int, address: int, heap_range: HeapRange, owner: int) -> None:
        # In a forked child the memory is the parent's still.
        is_owner = os.getpid() == owner
        if is_owner:
            self.book.remove(address)
        shm_library().pa_shm_unmap(mapped, self.file, heap_range.base, heap_range.length, is_owner)


class PeerFile:
    """A peer's heap file, opened and verified. Raises CommError for one that is not what the peer announced."""

    def __init__(self, rank: int, member: Member) -> None:
        self.file = open_peer(member.pid, member.file, f"rank {rank}'s shared memory")
        weakref.finalize(self, os.close, self.file).atexit = False
        token = os.pread(self.file, _TOKEN_NBYTES, 0).decode(errors="replace")
        if not secrets.compare_digest(token.encode(), member.token.encode()):
            raise CommError(
                f"the shared memory of process {member.pid} is not rank {rank}'s",
                hint="start the job again; do not mix processes of several jobs in one rendezvous",
                value=member.pid,
            )


def map_file(file: int, nbytes: int, book: AddressBook | None = None) -> Bytes:
    """Map the first bytes of a new file, kept until the last process unmaps it; `book` registers them."""
    region = MappedMemory(file, HeapRange(0, rounded_up(nbytes), 0), nbytes)
    unmap = shm_library().pa_shm_unmap
    weakref.finalize(region, unmap, region.mapped, -1, 0, rounded_up(nbytes), 0).atexit = False
    if book is not None:
        book.add(region.address, nbytes, HeapRange(0, 0, 0))
        weakref.finalize(region, book.remove, region.address).atexit = False
    return region.bytes()


def new_file(name: str, nbytes: int) -> int:
    """A file of zeros in memory that only this user may open."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(file, 0o600)
    lengthen(file, nbytes)
    return file


def lengthen(file: int, nbytes: int) -> None:
    """Let the file have `nbytes`; pages come when they are touched."""
    try:
        os.ftruncate(file, nbytes)
    except OSError as error:
        raise CommError(
            f"{nbytes} bytes of shared memory cannot be had: {error.strerror}",
            hint="raise the limit of file sizes (ulimit -f); POLYACCEL_COMM=gloo does without shared memory",
            value=nbytes,
        ) from error


def open_peer(pid: int, file: int, what: str) -> int:
    """A descriptor of another process's file in memory. Raises CommError unless it belongs to this user alone."""
    path = f"/proc/{pid}/fd/{file}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommError(
            f"{what} cannot be opened ({path}: {error.strerror})",
            hint="all ranks must be processes of one user that see each other in /proc, or use POLYACCEL_COMM=gloo",
            value=path,
        ) from error
    status = os.fstat(opened)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(opened)
        raise CommError(
            f"{what} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}",
            hint="run all ranks as one user",
            value=(status.st_uid, status.st_mode & 0o777),
        )
    return opened


def rounded_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ROUND_NBYTES) * _ROUND_NBYTES
