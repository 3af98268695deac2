"""Which machine, which software, when: without it no figure means anything."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from bench.measure import parse_kib


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory_nbytes: int
    system: str
    versions: dict[str, str]
    """Of Python and of what is measured, as far as it is installed."""
    commit: str
    date: str
    """UTC."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        memory = f"{self.memory_nbytes / (1 << 30):.0f} GiB"
        return f"{self.cpu}, {self.cores} cores, {memory}, {self.system}; {versions}; commit {self.commit}; {self.date}"


def describe_machine() -> Machine:
    versions = {"Python": platform.python_version()}
    for name in ("polyaccel", "torch", "deepspeed"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
        cores=len(os.sched_getaffinity(0)),
        memory_nbytes=parse_kib(Path("/proc/meminfo").read_text())["MemTotal"],
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
        commit=_commit(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    )


def cpu_model(cpuinfo: str) -> str:
    """The model's name, and of its abilities those that decide how fast it multiplies."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    abilities = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve") if name in flags]
    name = fields.get("model name") or platform.machine()
    return f"{name} ({' '.join(abilities)})" if abilities else name


def _commit() -> str:
    """The commit of this checkout, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
