"""How much a keeper may keep by default."""

from __future__ import annotations

from pathlib import Path

from polyaccel.core.cgroup import memory_limit_nbytes

_SHARE_OF_MEMORY = 0.75


def default_limit_nbytes() -> int:
    """Three quarters of the memory of this host, or of what a control group leaves of it to this process."""
    total_nbytes = int(Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]) * 1024
    limit = memory_limit_nbytes()
    return int(_SHARE_OF_MEMORY * (total_nbytes if limit is None else min(total_nbytes, limit)))
