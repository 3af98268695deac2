"""Time and memory of this process and machine: `measured` for steps, `interleave` for calls in turn.

Standard library only: every rank imports it, also in environments without polyaccel.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar

T = TypeVar("T")


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return `names` in the order of round `turn`, so that every name comes first in some round."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def interleave(calls: Mapping[str, Callable[[], T]], rounds: int, warmup: int = 1) -> dict[str, list[T]]:
    """Run all calls in each round; return the results by name, those of `warmup` rounds left out."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    for turn in range(-warmup, rounds):
        for name in rotated(list(calls), turn):
            value = calls[name]()
            if turn >= 0:
                found[name].append(value)
    return found


def seconds_of(run: Callable[[], object], repeats: int = 1, barrier: Callable[[], object] | None = None) -> float:
    """Return the mean seconds of a call. Before several calls run as many warm-up calls."""
    for _ in range(repeats - 1):
        run()
    if barrier is not None:
        barrier()
    began = perf_counter()
    for _ in range(repeats):
        run()
    return (perf_counter() - began) / repeats


def measured(
    step: Callable[[int], float], steps: int, warmup: int, barrier: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Run `step` with its number; return the figures of a rank.

    `seconds`, `cpu` and `faults` (minor page faults) have an item a measured step, `losses` an item for every step.
    `peak` is the peak RSS in bytes since the first step, `pss` the PSS at the end, and `busy` the mean number of CPUs
    that all processes of the machine used.
    """
    figures: dict[str, Any] = {name: [] for name in ("seconds", "cpu", "faults", "losses")}
    began = machine = 0.0
    reset_peak()
    for number in range(warmup + steps):
        if number == warmup:
            began, machine = perf_counter(), machine_seconds()
        if barrier is not None:
            barrier()
        faults, cpu, start = minor_faults(), process_time(), perf_counter()
        loss = step(number)
        spent = perf_counter() - start, process_time() - cpu, minor_faults() - faults
        figures["losses"].append(loss)
        if number >= warmup:
            for name, value in zip(("seconds", "cpu", "faults"), spent, strict=True):
                figures[name].append(value)
    memory = read_memory()
    busy = (machine_seconds() - machine) / (perf_counter() - began)
    return {**figures, "peak": memory["VmHWM"], "pss": memory["Pss"], "busy": busy}


def read_memory() -> dict[str, int]:
    """Return VmRSS, VmHWM and Pss of this process in bytes."""
    return parse_kib("".join(Path("/proc/self", name).read_text() for name in ("status", "smaps_rollup")))


def reset_peak() -> None:
    """Reset VmHWM to the present RSS."""
    Path("/proc/self/clear_refs").write_text("5")


def parse_kib(text: str) -> dict[str, int]:
    """Parse the lines `Name:  123 kB` of a file in /proc to bytes. Other lines are left out."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if rest.endswith(" kB")}


def minor_faults() -> int:
    """Return the page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def machine_seconds() -> float:
    """Return the CPU seconds of all processes of the machine."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
