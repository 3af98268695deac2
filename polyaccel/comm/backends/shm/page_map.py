"""Which pages of a copy-on-write mapping this process has written to, as Linux reports it.

[Note: Page map states]
A page that was written to belongs to no file any more, and the page map (`/proc/self/pagemap`) says so of each page: it
is read (a millisecond for 4 MiB), or, since Linux 6.7, searched by the system itself (PAGEMAP_SCAN, a millisecond for
20 to 140 MiB, as it looks up whose each page is). The third answer costs a millisecond for 4 GiB: pages are protected
by a userfaultfd, the system itself takes the protection off at the first write (UFFD_FEATURE_WP_ASYNC, 6.7), and
searches the page tables for those without. No process has to answer faults, and none needs a privilege.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from polyaccel.errors import CommError

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_NBYTES = 8
# In the last byte of an entry: in memory, in the swap, and of a file.
_FLAGS, _OF_A_FILE = np.uint8(0xE0), np.uint8(0x20)

_SCAN = 0xC0606610  # PAGEMAP_SCAN, of a `_Question`
_WRITTEN, _FILE, _PRESENT, _SWAPPED = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_MOST_REGIONS = 64  # a call, of pages that users wrote to

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}  # the system call
_USER_MODE_ONLY = 1
_UFFDIO_API, _UFFDIO_REGISTER, _UFFDIO_WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
_API, _MODE_WP = 0xAA, 2
_FEATURES = 1 << 12 | 1 << 13 | 1 << 15  # protection of shared memory, of pages that are not there yet, and async
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

Ranges = Sequence[tuple[int, int]]
"""The first byte and the end of stretches of pages."""


def protect(address: int, nbytes: int) -> bool:
    """Protect pages so that `unprotected` finds later writes; False if unsupported or in huge pages."""
    file = _userfaultfd(os.getpid())
    if file is None:
        return False
    try:
        fcntl.ioctl(file, _UFFDIO_REGISTER, bytearray(struct.pack("4Q", address, nbytes, _MODE_WP, 0)))
        protect_again(address, nbytes)
        return not unprotected(address, nbytes)
    except OSError:
        return False


def protect_again(address: int, nbytes: int) -> None:
    """Protect pages of a mapping for which `protect` returned True."""
    file = _userfaultfd(os.getpid())
    assert file is not None  # in the process that made the mapping
    fcntl.ioctl(file, _UFFDIO_WRITEPROTECT, bytearray(struct.pack("3Q", address, nbytes, 1)))


def unprotected(address: int, nbytes: int) -> Ranges:
    """The pages of a mapping that was protected which were written to since. Counted from `address`."""
    return _scan(address, nbytes, category_mask=_WRITTEN)


def searched(address: int, nbytes: int) -> Ranges:
    """Return private pages of a copy-on-write mapping, from `address`. Raises OSError if unsupported."""
    wanted = {"category_inverted": _FILE, "category_mask": _FILE, "category_anyof_mask": _PRESENT | _SWAPPED}
    return _scan(address, nbytes, **wanted)


def read(address: int, nbytes: int) -> Ranges:
    """`searched` where the page map can only be read. Raises CommError where it cannot."""
    page = mmap.PAGESIZE
    wanted = nbytes // page * _ENTRY_NBYTES
    entries = os.pread(_pagemap(os.getpid()), wanted, address // page * _ENTRY_NBYTES)
    if len(entries) != wanted:
        raise CommError(f"{_PAGEMAP} gives {len(entries)} of {wanted} bytes", hint="set POLYACCEL_SHM_SYMMETRIC=0")
    flags = np.frombuffer(entries, np.uint8)[_ENTRY_NBYTES - 1 :: _ENTRY_NBYTES] & _FLAGS
    (pages,) = np.nonzero((flags != 0) & (flags & _OF_A_FILE == 0))
    if not pages.size:
        return ()
    ends = np.flatnonzero(np.diff(pages) > 1)
    firsts, lasts = pages[[0, *(ends + 1)]], pages[[*ends, -1]]
    return [(int(first) * page, (int(last) + 1) * page) for first, last in zip(firsts, lasts, strict=True)]


class _Region(ctypes.Structure):
    """Linux's `struct page_region`."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("start", "end", "categories"))


class _Question(ctypes.Structure):
    """Linux's `struct pm_scan_arg`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    )


def _scan(address: int, nbytes: int, **categories: int) -> Ranges:
    found: list[tuple[int, int]] = []
    regions = (_Region * _MOST_REGIONS)()
    start, end = address, address + nbytes
    while start < end:
        question = _Question(
            size=ctypes.sizeof(_Question),
            start=start,
            end=end,
            vec=ctypes.addressof(regions),
            vec_len=_MOST_REGIONS,
            **categories,
        )
        count = fcntl.ioctl(_pagemap(os.getpid()), _SCAN, question)
        for region in regions[:count]:
            first, last = region.start - address, region.end - address
            if found and found[-1][1] == first:  # one range, cut by the end of a call
                first = found.pop()[0]
            found.append((first, last))
        start = question.walk_end
    return found


# A forked process has a page map and its own userfaultfd: descriptors are found by its id.
@cache
def _pagemap(process: int) -> int:
    return os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)


@cache
def _userfaultfd(process: int) -> int | None:
    call = _USERFAULTFD.get(platform.machine())
    if call is None or _has_huge_pages():
        return None
    file: int = ctypes.CDLL(None).syscall(call, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
    if file < 0:
        return None
    try:
        fcntl.ioctl(file, _UFFDIO_API, bytearray(struct.pack("3Q", _API, _FEATURES, 0)))
    except OSError:
        os.close(file)
        return None
    return file


def _has_huge_pages() -> bool:
    """Whether shared memory may be in huge pages here."""
    try:
        return not {"[never]", "[deny]"} & set(_HUGE_PAGES.read_text().split())
    except OSError:  # a system without them
        return False
