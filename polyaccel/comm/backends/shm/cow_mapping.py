"""What the users of one rank see of shared memory: a mapping of the same file in which their writes stay their own.

[Note: Copy-on-write pages]
The system maps one file twice: shared, for the engine, and copy-on-write, for users
([Note: Shared memory, private writes]). A page without a write of this process is that of the file, in both. The first
write through the second mapping makes a copy of the page, for this process alone, and the system marks such pages
([Note: Page map states]), whatever wrote to them: torch, numpy or a library. Given back, they are the file's again at
the next look.
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

from polyaccel.comm.backends.shm import page_map
from polyaccel.comm.backends.shm.memory import Bytes, new_file, rounded_up
from polyaccel.comm.shared_memory import SharedMemory
from polyaccel.core.buffer import Buffer
from polyaccel.errors import CommError

_MAP_NORESERVE = 0x4000  # few pages will ever be written
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14


class PrivateMapping:
    """`nbytes` of a file, in which this process sees its own writes and the file's contents elsewhere.

    See [Note: Copy-on-write pages].
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._length = rounded_up(nbytes)
        library = _system()
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = library.mmap(None, self._length, protection, mmap.MAP_PRIVATE | _MAP_NORESERVE, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise CommError(
                f"{self._length} bytes of shared memory cannot be mapped a second time",
                hint="free memory, raise the limit of address space (ulimit -v), or set POLYACCEL_SHM_SYMMETRIC=0",
                value=self._length,
            )
        self.address: int = address
        self.nbytes = nbytes
        library.madvise(address, self._length, _MADV_HUGEPAGE)  # where the system has them for shared memory
        self.is_protected = page_map.protect(address, self._length)
        weakref.finalize(self, library.munmap, address, self._length).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False)}

    def bytes(self) -> Bytes:
        """The bytes; the array holds the mapping."""
        return np.asarray(self)

    def written(self) -> page_map.Ranges:
        """The ranges of bytes, whole pages, that hold everything that was written through this mapping."""
        if self.is_protected:
            return page_map.unprotected(self.address, self._length)
        if _are_searched():
            return page_map.searched(self.address, self._length)
        return page_map.read(self.address, self._length)

    def forget(self) -> None:
        """Show the file's contents everywhere."""
        for start, end in self.written():
            _system().madvise(self.address + start, end - start, _MADV_DONTNEED)
            if self.is_protected:
                page_map.protect_again(self.address + start, end - start)


class CowMapping(SharedMemory):
    """Shared memory whose face is a private mapping of the same file."""

    def __init__(self, whole: Buffer, private_view: Buffer, mapping: PrivateMapping) -> None:
        self.whole = whole
        self.private_view = private_view
        self._mapping = mapping

    def written(self) -> Sequence[tuple[int, int]]:
        size = self.private_view.dtype.itemsize
        ranges = ((start // size, min(end // size, self.private_view.numel)) for start, end in self._mapping.written())
        return [(start, end) for start, end in ranges if start < end]

    def forget(self) -> None:
        self._mapping.forget()
        self.private_view.bump_version()


@cache
def _are_searched() -> bool:
    """Whether this system searches its page map itself: Linux since 6.7, where nothing in between forbids it."""
    file = new_file("polyaccel-probe", rounded_up(1))
    try:
        mapping = PrivateMapping(file, rounded_up(1))
        return page_map.searched(mapping.address, mapping.nbytes) == []
    except OSError:
        return False
    finally:
        os.close(file)


@cache
def can_track_dirty_pages() -> bool:
    """Return whether this system reports which pages of a private mapping were written to."""
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
    return before[0] == 0 and not before[1] and len(found) == 1 and found[0][0] == rounded_up(1)


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
