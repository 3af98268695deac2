"""The contract of launchers as tests: subclass `LauncherContract` and implement `make`.

Ranks are this Python running a line of code, on this machine. A launcher that needs other hosts plans for them itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, Launcher
from polyaccel.testkit.comparison import equal

_WRITE = "import os; open(os.path.join({folder!r}, os.environ['RANK']), 'w').write(os.environ['WORLD_SIZE'])"
_WAIT = (
    "import os, signal; signal.alarm(200); open(os.path.join({folder!r}, 'pid'), 'w').write(str(os.getpid())); "
    "signal.pause()"
)


class LauncherContract(ABC):
    """The tests that every launcher passes."""

    @abstractmethod
    def make(self) -> Launcher:
        """Return a new launcher."""

    def test_probes(self) -> None:
        """The probe reports whether the launcher could be used here, and why: `doctor` shows it."""
        probe = type(self.make()).probe()
        equal(type(probe), Probe, "type of what probe() gives")
        equal(bool(probe.reason), True, "whether probe() gives a reason")

    def test_every_rank_runs_with_its_own_environment(self) -> None:
        """Each rank of the job runs once, with its environment: rank and world size are read from there."""
        with tempfile.TemporaryDirectory() as folder:
            code = self.make().run(_job([_WRITE.format(folder=folder)] * 3)).code
            equal(code, 0, "exit code of a job whose ranks ended with 0")
            found = {file.name: file.read_text() for file in Path(folder).iterdir()}
            equal(found, {"0": "3", "1": "3", "2": "3"}, "world sizes that the ranks found")

    def test_the_code_of_the_first_failing_rank_is_the_jobs(self) -> None:
        """The job ends with the code of the rank that failed: schedulers decide by it."""
        code = self.make().run(_job(["pass", "raise SystemExit(7)"])).code
        equal(code, 7, "exit code of a job of which a rank ended with 7")

    def test_a_signal_is_told_from_a_code(self) -> None:
        """A rank that signal N ended gives 128 + N, as shells have it: a kill for memory is seen so."""
        code = self.make().run(_job(["import os; os.kill(os.getpid(), 9)"])).code
        equal(code, 137, "exit code of a job whose rank was killed by signal 9")

    def test_a_failing_rank_ends_the_others(self) -> None:
        """When a rank fails the others are ended and waited for: they would hold their devices."""
        with tempfile.TemporaryDirectory() as folder:
            wait = _WAIT.format(folder=folder)
            fail = (
                f"import os, time\nwhile not os.path.exists({str(Path(folder, 'pid'))!r}): time.sleep(0.01)\n"
                "raise SystemExit(5)"
            )
            code = self.make().run(_job([wait, fail])).code
            equal(code, 5, "exit code of a job of which a rank ended with 5")
            pid = int(Path(folder, "pid").read_text() or 0)
            equal(Path(f"/proc/{pid}").exists(), False, f"whether process {pid} of the ended job is still there")

    def test_a_rank_that_cannot_be_started_is_an_error(self) -> None:
        """A program that does not exist is a LaunchError or a code that is not 0: nothing ran."""
        job = _job(["pass"], python="/no/such/program")
        try:
            code = self.make().run(job).code
        except LaunchError:
            return
        equal(code != 0, True, "whether a job whose program does not exist fails")


def _job(codes: list[str], *, python: str = sys.executable) -> Job:
    """A job on this machine whose ranks run these lines, each its own."""
    program = f"import os; exec({codes!r}[int(os.environ['RANK'])])"
    slots = tuple(range(len(codes)))
    return Job(command=(python, "-c", program), hosts={"localhost": slots}, grace_s=1.0, folder=os.getcwd())
