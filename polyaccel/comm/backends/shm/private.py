"""What the users of one rank see of shared memory: a mapping of the same file in which their writes stay their own.

[Note: Private pages]
The system maps one file twice: shared, for the engine, and copy-on-write, for users ([Note: One memory, private
writes]). A page that nobody here has written to is that of the file, in both. The first write through the second
mapping makes a copy of the page, for this process alone, and `/proc/self/pagemap` tells such pages from the others,
whatever wrote to them: torch, numpy or a library. Given back, they are the file's again at the next look. Reading the
page map takes about 0.05 ns a byte of parameters.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from polyaccel.buffer import Buffer
from polyaccel.comm.backends.shm.memory import Bytes, new_file, rounded_up
from polyaccel.comm.shared_memory import SharedMemory
from polyaccel.errors import CommError

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_NBYTES = 8
# In the last byte of an entry: in memory, in the swap, and of a file.
_FLAGS, _OF_A_FILE = np.uint8(0xE0), np.uint8(0x20)
_MAP_NORESERVE = 0x4000  # few pages will ever be written
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14


class PrivateMapping:
    """`nbytes` of a file, in which this process sees its own writes and the file's contents elsewhere.

    See [Note: Private pages].
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._length = rounded_up(nbytes)
        library = _system()
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = library.mmap(None, self._length, protection, mmap.MAP_PRIVATE | _MAP_NORESERVE, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise CommError(
                f"{self._length} bytes of shared memory cannot be mapped a second time",
                cure="free memory, raise the limit of address space (ulimit -v), or set POLYACCEL_SHM_SYMMETRIC=0",
                value=self._length,
            )
        self.address: int = address
        self.nbytes = nbytes
        library.madvise(address, self._length, _MADV_HUGEPAGE)  # where the system has them for shared memory
        weakref.finalize(self, library.munmap, address, self._length).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False)}

    def bytes(self) -> Bytes:
        """The bytes; the array holds the mapping."""
        return np.asarray(self)

    def written(self) -> Sequence[tuple[int, int]]:
        """The ranges of bytes, whole pages, that hold everything that was written through this mapping."""
        page = mmap.PAGESIZE
        nbytes = self._length // page * _ENTRY_NBYTES
        entries = os.pread(_pagemap(os.getpid()), nbytes, self.address // page * _ENTRY_NBYTES)
        if len(entries) != nbytes:
            raise CommError(f"{_PAGEMAP} tells {len(entries)} of {nbytes} bytes", cure="set POLYACCEL_SHM_SYMMETRIC=0")
        flags = np.frombuffer(entries, np.uint8)[_ENTRY_NBYTES - 1 :: _ENTRY_NBYTES] & _FLAGS
        (pages,) = np.nonzero((flags != 0) & (flags & _OF_A_FILE == 0))
        if not pages.size:
            return ()
        ends = np.flatnonzero(np.diff(pages) > 1)
        firsts, lasts = pages[[0, *(ends + 1)]], pages[[*ends, -1]]
        return [(int(first) * page, (int(last) + 1) * page) for first, last in zip(firsts, lasts, strict=True)]

    def forget(self) -> None:
        """Show the file's contents everywhere."""
        for start, end in self.written():
            _system().madvise(self.address + start, end - start, _MADV_DONTNEED)


class TwiceMapped(SharedMemory):
    """Shared memory whose face is a private mapping of the same file."""

    def __init__(self, whole: Buffer, face: Buffer, mapping: PrivateMapping) -> None:
        self.whole = whole
        self.face = face
        self._mapping = mapping

    def written(self) -> Sequence[tuple[int, int]]:
        size = self.face.dtype.itemsize
        ranges = ((start // size, min(end // size, self.face.numel)) for start, end in self._mapping.written())
        return [(start, end) for start, end in ranges if start < end]

    def forget(self) -> None:
        self._mapping.forget()
        self.face.mark_written()


@cache
def tells_private_pages() -> bool:
    """Whether this system says which pages of a private mapping were written to."""
    try:
        file = new_file("polyaccel-probe", 2 * rounded_up(1))
        try:
            mapping = PrivateMapping(file, 2 * rounded_up(1))
        finally:
            os.close(file)
        memory = mapping.bytes()
        before = (int(memory.sum()), mapping.written())
        memory[rounded_up(1)] = 1
        found = mapping.written()
    except (OSError, CommError):
        return False
    return before == (0, ()) and len(found) == 1 and found[0][0] == rounded_up(1)


@cache
def _pagemap(process: int) -> int:
    """A descriptor of the page map of this process, whose id is `process`; that of a forked one's parent is another."""
    return os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)


@cache
def _system() -> ctypes.CDLL:
    """The C library's functions for mappings."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library
