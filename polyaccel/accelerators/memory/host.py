"""Host memory: start of an allocation, figures of this process, and freed blocks in malloc.

[Note: Staggered allocation]
An optimizer reads four equally long buffers in parallel. The system places large allocations next to each other, so
lengths that are powers of two put the four streams 4 KiB apart modulo 64 KiB, where the processor's prefetchers disturb
one another: Adam over 16 M elements ran at 31 GB/s there and at 50 GB/s elsewhere (one EPYC core). So each large host
allocation starts at the next of several offsets into a 64 KiB window, whatever the allocator did.
"""

from __future__ import annotations

import ctypes
import os
import sys
from itertools import count
from pathlib import Path
from typing import Literal

from polyaccel.accelerators.base import MemoryStats
from polyaccel.core.cgroup import memory_free_nbytes

HostArrays = Literal["torch", "numpy"]
"""Framework of the arrays below buffers in host memory."""
ALIGNMENT_NBYTES = 64
"""Alignment of every allocation: a cache line, a vector register, and what DLPack importers require."""

_LARGE_NBYTES = 1 << 20
_WINDOW_NBYTES = 1 << 16
_STAGGER_NBYTES = 5 << 12  # odd in pages: sixteen allocations in a row have sixteen different offsets
_turns = count()

_STATUS = "/proc/self/status"
_MEMINFO = "/proc/meminfo"
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): sets VmHWM back to VmRSS

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_ in malloc.h
_MMAP_THRESHOLD_NBYTES = (4 << 20) * ctypes.sizeof(ctypes.c_long)  # the most that glibc allows
_NEVER = -1
_COMPATIBLE = "glibc.malloc.hugetlb="  # a tunable about the pages themselves, which the launcher sets
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def spare_nbytes(nbytes: int) -> int:
    """Return the additional bytes that a host allocation needs so that `aligned_shift` finds its start.

    Args:
        nbytes: Bytes that will be used.

    Returns:
        Bytes to allocate in addition to `nbytes`.
    """
    return _WINDOW_NBYTES if nbytes >= _LARGE_NBYTES else ALIGNMENT_NBYTES


def aligned_shift(address: int, nbytes: int) -> int:
    """Find the start of an allocation: aligned, and staggered when it is large. See [Note: Staggered allocation].

    Args:
        address: Address of the allocated memory.
        nbytes: Bytes that will be used; `spare_nbytes` more are allocated.

    Returns:
        Bytes between `address` and the start.
    """
    if nbytes < _LARGE_NBYTES:
        return -address % ALIGNMENT_NBYTES
    return (next(_turns) * _STAGGER_NBYTES - address) % _WINDOW_NBYTES


def memory_stats() -> MemoryStats:
    """Return resident bytes of this process, now and at most, and the machine's memory. A control group may leave less
    free."""
    total_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        (resident, peak), (free,) = _fields(_STATUS, "VmRSS", "VmHWM"), _fields(_MEMINFO, "MemAvailable")
    except (OSError, ValueError):
        import resource  # not on every system

        unit_nbytes = 1 if sys.platform == "darwin" else 1024
        resident = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_nbytes
        free = max(0, total_nbytes - resident)
    left = memory_free_nbytes()
    free = free if left is None else min(free, left)
    return MemoryStats(
        allocated_nbytes=resident,
        peak_nbytes=max(peak, resident),  # the kernel updates the two at different times
        reserved_nbytes=resident,
        total_nbytes=total_nbytes,
        free_nbytes=free,
    )


def own_nbytes() -> int:
    """Count the bytes that this process has allocated, in memory or swapped out, shared memory included.

    Pages of its libraries are left out: the system drops and reloads them as it likes.

    Returns:
        Bytes that no file backs; resident bytes where the system does not count these.
    """
    try:
        return sum(_fields(_STATUS, "RssAnon", "RssShmem", "VmSwap"))
    except (OSError, ValueError):
        return memory_stats().allocated_nbytes


def reset_peak() -> None:
    """Restart the peak at what is resident now. Does nothing where the system does not support it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return


def _fields(path: str, *names: str) -> list[int]:
    """The values of the `name:  value kB` lines of a /proc file, in bytes; ValueError if one is missing."""
    with open(path, "rb", buffering=0) as file:
        text = file.read()
    starts = (text.index(f"\n{name}:".encode()) + len(name) + 2 for name in names)
    return [int(text[start : text.index(b"kB", start)]) * 1024 for start in starts]


def keep_freed_memory() -> bool:
    """Let malloc keep the memory that a training step frees, because the next step needs it again.

    Left to itself, glibc gives the end of its heap back to the system with every large block that is freed there, and
    touches new pages for the next one: up to 6,000 page faults of 1 to 2 us in each step of a model of 29 M parameters,
    or none, as the blocks happen to lie. Blocks of more than 32 MiB still come from the system and return to it.

    Returns:
        Whether that was done. False for a C library other than glibc, and where the user has set malloc up in the
        environment.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    is_set_up = any("glibc.malloc" in tunable and not tunable.startswith(_COMPATIBLE) for tunable in tunables)
    if sys.platform != "linux" or is_set_up or any(name in os.environ for name in _USERS_OWN):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    # The first alone would freeze the other at 128 KiB, and map every larger block again.
    is_set = library.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_NBYTES) and library.mallopt(_TRIM_THRESHOLD, _NEVER)
    return bool(is_set)
