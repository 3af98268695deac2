"""The memory that a control group leaves this process: the limit of a container, or of a job of a scheduler.

/proc/meminfo is about the whole machine. A process that goes past its group's limit is killed, however much of the
machine is free.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

_MOST_NBYTES = 1 << 60
"""A limit above this means no limit: the first version of control groups writes one that is not a number of bytes."""
_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """How a version of control groups calls a limit, what is used of it, and what of that are files' pages that it
    takes back by itself."""

    limit: str
    used: str
    reclaimable: str


_SECOND = _Names("memory.max", "memory.current", "inactive_file")
_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_limit_nbytes() -> int | None:
    """Return the memory limit of this process's control groups; None without one."""
    return min((limit for _, _, limit in _groups()), default=None)


def memory_free_nbytes() -> int | None:
    """What its control groups leave this process now, next to what they use; None where nothing limits them."""
    free = list[int]()
    for folder, names, limit in _groups():
        try:
            used = int((folder / names.used).read_text())
            stated = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # moved to another group, or deleted
            continue
        free.append(max(0, limit - used + int(stated.get(names.reclaimable, 0))))
    return min(free, default=None)


@cache
def _groups() -> tuple[tuple[Path, _Names, int], ...]:
    """The groups of this process that have a limit."""
    return tuple(_limited(_OWN_GROUPS, _ROOT))


def _limited(own_groups: Path, root: Path) -> list[tuple[Path, _Names, int]]:
    """Return folders of control groups with a byte limit, ancestors included."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # no Linux
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = _FIRST if "memory" in controllers.split(",") else _SECOND
        if controllers and names is _SECOND:
            continue
        top = root / "memory" if names is _FIRST else root
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            try:
                limit = int((each / names.limit).read_text())
            except (OSError, ValueError):  # no file, or "max"
                limit = _MOST_NBYTES
            if limit < _MOST_NBYTES:
                found.append((each, names, limit))
            if each == top:
                break
    return found
