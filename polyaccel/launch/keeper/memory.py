"""How much a keeper may keep, unless somebody says."""

from __future__ import annotations

from pathlib import Path

_SHARE_OF_MEMORY = 0.75
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def default_limit_nbytes() -> int:
    """Three quarters of the memory of this host, or of what a control group leaves of it to this process."""
    found = [int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()[:1]]
    for limit in _CGROUP_LIMITS:
        try:
            found.append(int(limit.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return int(_SHARE_OF_MEMORY * min(found))
