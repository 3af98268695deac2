"""`polyaccel doctor` on the machine. Standard library only; a fact that cannot be had has the reason in its row."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from polyaccel.core.cgroup import memory_limit_nbytes

_SHARED_MEMORY = Path("/dev/shm")
_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "asimd", "asimdhp", "bf16", "sve", "sve2"),
)
"""Of the processor's flags, those that decide how fast kernels are; x86's, then Arm's."""
_LIMITS = (("open files", "RLIMIT_NOFILE", 1), ("locked memory", "RLIMIT_MEMLOCK", 1 << 20))
_GIB = 1 << 30


def machine() -> dict[str, str]:
    """Every fact under its name."""
    facts: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "platform": platform.platform,
        "processor": _processor,
        "features": _features,
        "cores": _cores,
        "memory": _memory,
        "/dev/shm": _shared_memory,
        "limits": _limits,
        "kernels": _kernels,
        "matrix kernels": _matrix_kernels,
    }
    return guarded(facts)


def guarded(facts: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """The answers; of what raises, the error."""
    return {name: _guarded(fact) for name, fact in facts.items()}


def _guarded(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _cpuinfo(*keys: str) -> str | None:
    """The first processor's value in /proc/cpuinfo under one of `keys`."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


def _processor() -> str:
    name = _cpuinfo("model name")
    return f"{name} ({platform.machine()})" if name else platform.processor() or platform.machine()


def _features() -> str:
    flags = _cpuinfo("flags", "Features")
    if flags is None:
        return "unknown (no /proc/cpuinfo)"
    present = set(flags.split())
    return " ".join(feature for feature in _FEATURES if feature in present) or "none that kernels ask for"


def _cores() -> str:
    installed = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    return f"{usable} usable of {installed}"


def _memory() -> str:
    total = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB"
    meminfo, limit_nbytes = Path("/proc/meminfo"), memory_limit_nbytes()
    if meminfo.exists():
        available_kib = next(int(row.split()[1]) for row in meminfo.read_text().splitlines() if "MemAvailable" in row)
        total += f", {available_kib / 2**20:.1f} GiB available"
    if limit_nbytes is not None:
        total += f", limited to {limit_nbytes / _GIB:.1f} GiB by the container"
    return total


def _shared_memory() -> str:
    if not _SHARED_MEMORY.is_dir():
        return "not there"
    usage = shutil.disk_usage(_SHARED_MEMORY)
    # Our own segments are memfds, which it does not limit; data loaders of torch use it.
    return f"{usage.total / _GIB:.1f} GiB, {usage.free / _GIB:.1f} GiB free"


def _limits() -> str:
    return ", ".join(f"{name} {_limit(constant, unit)}" for name, constant, unit in _LIMITS)


def _limit(constant: str, unit: int) -> str:
    soft, _ = resource.getrlimit(getattr(resource, constant))
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{soft / unit:.0f} MiB" if unit > 1 else str(soft)


def _kernels() -> str:
    """The compiled kernels of the host, or why there are none."""
    return str(importlib.import_module("polyaccel.ops.native").describe_native())


def _matrix_kernels() -> str:
    """The measured gain of matrix products on the host, one line."""
    return str(importlib.import_module("polyaccel.ops.matmul_autotune").describe_matrix_kernels())
