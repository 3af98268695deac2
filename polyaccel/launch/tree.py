"""Every process of a job: the ranks, and all their descendants.

[Note: Processes of a job]
A signal to a rank's process group reaches most of its descendants, but not one that made its own session, nor
those of a rank that has ended: then the number of the group may belong to strangers. On Linux a process belongs
to the job if it is in a rank's session or has the job's POLYACCEL_JOB_ID in its environment, which descendants inherit
however often they fork. Elsewhere only the groups are known, and an ended rank's group is trusted to be still its own.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from polyaccel.launch.base import JOB_ID

_PROC = Path("/proc")


class ProcessTracker:
    """The processes of job `job_id`. Rank processes are added as they start; see [Note: Processes of a job]. Other
    callers may mark their processes by another `variable` of the environment."""

    def __init__(self, job_id: str, variable: str = JOB_ID) -> None:
        self._mark = f"{variable}={job_id}".encode()
        self._leaders: set[int] = set()

    def add(self, leader: int) -> None:
        """Add a rank's process, which leads a session and a group."""
        self._leaders.add(leader)

    def members(self) -> set[int]:
        """The process ids alive now (elsewhere than on Linux, the group ids)."""
        if sys.platform != "linux":
            return {leader for leader in self._leaders if _signal_group(leader, 0)}
        return {int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and self._is_member(entry)}

    def signal(self, signum: signal.Signals) -> set[int]:
        """Send `signum` to each of `members()`, which are returned."""
        members = self.members()
        for member in members:
            if sys.platform != "linux":
                _signal_group(member, signum)
            else:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signum)
        return members

    def _is_member(self, entry: Path) -> bool:
        try:
            # The command's name stands in parentheses and may hold anything; then state, parent, group, session.
            state, _, _, session = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state in b"ZX" or int(entry.name) == os.getpid():
                return False
            return int(session) in self._leaders or self._mark in (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):  # gone meanwhile, or another user's
            return False


def _signal_group(group: int, signum: int) -> bool:
    """Whether the group has a process to send `signum` to; 0 only asks."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
