"""Memory of this process and this machine, from the operating system. Linux's /proc, else getrusage and sysconf."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from polyaccel.accelerators.base import MemoryStats

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): sets VmHWM back to VmRSS


def memory_stats() -> MemoryStats:
    """Resident bytes of this process now and at most, and the machine's memory."""
    total_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        status, meminfo = _fields(_STATUS), _fields(_MEMINFO)
        resident, peak, free = status["VmRSS"], status["VmHWM"], meminfo["MemAvailable"]
    except (OSError, KeyError):
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


def _fields(path: Path) -> dict[str, int]:
    """The `name:  value kB` lines of a /proc file, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
