"""Every process of a job: the ranks, and all their descendants.

[Note: Processes of a job]
A signal to a rank's process group reaches most of its descendants, but not one that made its own session, nor
those of a rank that has ended: then the number of the group may belong to strangers. On Linux a process belongs
to the job if it is in a rank's session or has the job's POLYACCEL_JOB_ID in its environment, which descendants inherit
however often they fork. Elsewhere only the groups are known, and an ended rank's group is trusted to be still its own.

[Note: Orphans of a killed launcher]
SIGKILL cannot be caught. On Linux the ranks ask the kernel to die with their launcher, but what they have started
themselves (workers of data loaders, servers) would live on, and no signal to a group reaches all of it. So the launcher
starts one more process, in its own session, and holds a pipe to it. When the pipe ends, the launcher has; then the
guard kills what `ProcessTracker` finds, and ends too. What it cannot find is a process that has left its rank's session
and has another environment too; and who kills the guard first has killed the guard.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import sleep

from polyaccel.errors import LaunchError
from polyaccel.launch.base import JOB_ID

_PROC = Path("/proc")
_ROUNDS = 200
_EVERY_S = 0.05
# Isolated: no file of the folder that the launcher was started in stands in for a module of Python.
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from polyaccel.launch.tree import main; main(sys.argv)"


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


class OrphanReaper:
    """The launcher's end: start it before the first rank, register every rank, and `dismiss` it when none is left.
    Raises LaunchError when it cannot be started."""

    def __init__(self, job_id: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, str(Path(__file__).parents[2]), job_id],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"the job's guard could not be started: {error}",
                hint="see whether memory or a limit on processes (ulimit -u) is missing",
            ) from error

    def add(self, leader: int) -> None:
        """There is a rank's process, which leads a session."""
        pipe = self._process.stdin
        if pipe is not None and self._process.poll() is None:
            try:
                pipe.write(b"%d\n" % leader)
            except BrokenPipeError:  # it was killed; the job continues without
                pipe.close()
                self._process.stdin = None

    def dismiss(self) -> None:
        """Nothing of the job is left."""
        self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def main(arguments: Sequence[str]) -> None:
    """Wait until the launcher of job `arguments[-1]` has ended, then kill what is left of the job."""
    tree = ProcessTracker(arguments[-1])
    for line in sys.stdin.buffer:
        tree.add(int(line))
    for _ in range(_ROUNDS):
        if not tree.signal(signal.SIGKILL):
            return
        sleep(_EVERY_S)
