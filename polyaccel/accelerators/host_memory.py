"""Memory of this process and this machine, from the operating system. Linux's /proc, else getrusage and sysconf."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from polyaccel.accelerators.base import MemoryStats

_STATUS = "/proc/self/status"
_MEMINFO = "/proc/meminfo"
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): sets VmHWM back to VmRSS


def memory_stats() -> MemoryStats:
    """Resident bytes of this process now and at most, and the machine's memory."""
    total_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        (resident, peak), (free,) = _fields(_STATUS, "VmRSS", "VmHWM"), _fields(_MEMINFO, "MemAvailable")
    except (OSError, ValueError):
        unit_nbytes = 1 if sys.platform == "darwin" else 1024
        resident = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_nbytes
        free = max(0, total_nbytes - resident)
    return MemoryStats(
        allocated_nbytes=resident,
        peak_nbytes=max(peak, resident),  # the kernel updates the two at different times
        reserved_nbytes=resident,
        total_nbytes=total_nbytes,
        free_nbytes=free,
    )


def reset_peak() -> None:
    """Let the peak start again from what is resident now; does nothing where the system has no such switch."""
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
