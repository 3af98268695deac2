"""Description of the machine and the software: `describe_machine`. Figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from bench.measure import parse_kib


def describe_machine() -> str:
    """Return CPU, memory, system, versions, commit, time (UTC) and load in one line."""
    versions = {"Python": platform.python_version()}
    for name in ("polyaccel", "torch", "deepspeed"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    memory = parse_kib(Path("/proc/meminfo").read_text())["MemTotal"] / (1 << 30)
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{cpu_model(Path('/proc/cpuinfo').read_text())}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}; {software}; "
        f"commit {_commit()}; {datetime.now(timezone.utc):%Y-%m-%d %H:%M}, load {os.getloadavg()[0]:.1f}"
    )


def cpu_model(cpuinfo: str) -> str:
    """Return the model's name, with the instruction sets that decide the speed of matrix products."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    abilities = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve") if name in flags]
    name = fields.get("model name") or platform.machine()
    return f"{name} ({' '.join(abilities)})" if abilities else name


def _commit() -> str:
    """Return the commit of this checkout, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
