"""What Linux says of this process and this machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of this process: resident, the most that ever were since `reset_peak`, and its part of shared pages."""

    rss_nbytes: int
    peak_nbytes: int
    pss_nbytes: int


def read_memory() -> ProcessMemory:
    status = parse_kib(_PROC.joinpath("status").read_text())
    rollup = parse_kib(_PROC.joinpath("smaps_rollup").read_text())
    return ProcessMemory(status["VmRSS"], status["VmHWM"], rollup["Pss"])


def reset_peak() -> None:
    """Let the highest RSS count from now."""
    _PROC.joinpath("clear_refs").write_text("5")


def parse_kib(text: str) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file in /proc, in bytes; others are left out."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            values[name] = int(words[0]) * 1024
    return values


def minor_faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds at one moment: the clock, and CPU time of the whole machine and of this process."""

    wall_s: float
    machine_s: float
    process_s: float

    @classmethod
    def now(cls) -> CpuTime:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        busy = user + nice + system + irq + softirq + steal
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(perf_counter(), busy / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime)


class PhaseClock:
    """Adds up seconds by phase: `with clock("forward"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - began
