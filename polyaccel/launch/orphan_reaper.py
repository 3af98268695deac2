"""The guard of a job: a process that does nothing while its launcher lives, and ends the job of one that was killed.

[Note: Orphans of a killed launcher]
SIGKILL cannot be caught. On Linux the ranks ask the kernel to die with their launcher, but what they have started
themselves (workers of data loaders, servers) would live on, and no signal to a group reaches all of it. So the launcher
starts one more process, in its own session, and holds a pipe to it. When the pipe ends, the launcher has; then the
guard kills what `ProcessTracker` finds, and ends too. What it cannot find is a process that has left its rank's session
and has another environment too; and who kills the guard first has killed the guard.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from polyaccel.errors import LaunchError
from polyaccel.launch.tree import ProcessTracker

_ROUNDS = 200
_EVERY_S = 0.05
# Isolated: no file of the folder that the launcher was started in stands in for a module of Python.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from polyaccel.launch.orphan_reaper import main; main(sys.argv)"
)


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
