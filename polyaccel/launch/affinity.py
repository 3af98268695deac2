"""The cores of this machine, and how ranks share them.

A *core* here is a physical one, written as the logical CPUs ("hardware threads") that it runs: threads that compute
gain nothing from a second logical CPU of the same core. Only cores that this process may use are counted. Where the
machine does not report them (anything but Linux), each logical CPU is a core and all are on one node.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its NUMA node, and those of its logical CPUs that may be used, at least one, ascending."""

    node: int
    cpus: tuple[int, ...]


def usable_cpus() -> frozenset[int]:
    """The logical CPUs that the operating system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def find_cores(cpus: Iterable[int], sysfs: Path = SYSFS) -> tuple[Core, ...]:
    """The physical cores that `cpus` are on, neighbours next to each other: by node, then by first CPU."""
    allowed = frozenset(cpus)
    node_of = _nodes(sysfs)
    siblings = {_siblings(cpu, sysfs) & allowed for cpu in allowed}
    cores = [Core(node_of.get(min(group), 0), tuple(sorted(group))) for group in siblings]
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def split_cores(cores: Sequence[Core], ranks: int) -> tuple[tuple[Core, ...], ...]:
    """Split `cores` into runs of neighbours for `ranks` ranks, sizes differing by one; may share cores."""
    if ranks >= len(cores):
        return tuple((cores[rank * len(cores) // ranks],) for rank in range(ranks))
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return tuple(tuple(cores[low:high]) for low, high in pairwise(bounds))


def node_count(cores: Iterable[Core]) -> int:
    """How many NUMA nodes `cores` are on."""
    return len({core.node for core in cores})


def memory_binding(cpus: Iterable[int], sysfs: Path = SYSFS) -> Callable[[], None] | None:
    """Return a function that binds the memory of this process, and of programs that it becomes, to the NUMA node of
    `cpus`; None where they are on several nodes, or the system has no call for it.

    The call is prepared here, for a child between fork and exec should do little. A refusal has no effect.
    """
    number = _SET_MEMPOLICY.get(platform.machine()) if sys.platform == "linux" else None
    nodes = {core.node for core in find_cores(cpus, sysfs)}
    if number is None or len(nodes) != 1:
        return None
    (node,) = nodes
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[-1] = 1 << node % _WORD_BITS
    call = ctypes.CDLL(None).syscall

    def bind() -> None:
        call(number, _MPOL_BIND, mask, ctypes.c_ulong(words * _WORD_BITS + 1))

    return bind


_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}
"""The number of the system call by machine."""
_MPOL_BIND = 2
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def parse_cpulist(text: str) -> frozenset[int]:
    """The numbers in the kernel's list format: "0-3,8" is 0, 1, 2, 3, 8. Raises ValueError for anything else."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def _siblings(cpu: int, sysfs: Path) -> frozenset[int]:
    return _read_cpulist(sysfs / f"cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}


def _nodes(sysfs: Path) -> dict[int, int]:
    nodes = {}
    for directory in sysfs.glob("node/node[0-9]*"):
        number = int(directory.name.removeprefix("node"))
        nodes.update(dict.fromkeys(_read_cpulist(directory / "cpulist"), number))
    return nodes


def _read_cpulist(path: Path) -> frozenset[int]:
    try:
        return parse_cpulist(path.read_text())
    except (OSError, ValueError):  # some containers hide or garble sysfs
        return frozenset()
