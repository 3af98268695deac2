"""The contract of launchers as tests: subclass `LauncherContract` and say how to make yours.

Ranks are this Python running a line of code, on this machine. A launcher that needs other hosts plans for them itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Launcher, LaunchPlan, RankSpec
from polyaccel.port import free_port
from polyaccel.types import Probe

_WRITE = "import os; open(os.path.join({folder!r}, os.environ['RANK']), 'w').write(os.environ['WORLD_SIZE'])"
_WAIT = "import os, signal; open(os.path.join({folder!r}, 'pid'), 'w').write(str(os.getpid())); signal.pause()"


class LauncherContract(ABC):
    """The tests that every launcher passes."""

    @abstractmethod
    def make(self) -> Launcher: ...

    def test_probes(self) -> None:
        probe = type(self.make()).probe()
        assert isinstance(probe, Probe)
        assert probe.reason

    def test_every_rank_runs_with_its_own_environment(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            code = self.make().run(_plan([_WRITE.format(folder=folder)] * 3))
            assert code == 0, f"exit code {code} of ranks that all ended with 0"
            found = {file.name: file.read_text() for file in Path(folder).iterdir()}
            assert found == {"0": "3", "1": "3", "2": "3"}, f"ranks wrote {found}"

    def test_the_code_of_the_first_failing_rank_is_the_jobs(self) -> None:
        code = self.make().run(_plan(["pass", "raise SystemExit(7)"]))
        assert code == 7, f"exit code {code} where a rank ended with 7"

    def test_a_signal_is_told_from_a_code(self) -> None:
        code = self.make().run(_plan(["import os; os.kill(os.getpid(), 9)"]))
        assert code == 137, f"exit code {code} where SIGKILL ended the rank"

    def test_a_failing_rank_ends_the_others(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            wait = _WAIT.format(folder=folder)
            fail = (
                f"import os, time\nwhile not os.path.exists({str(Path(folder, 'pid'))!r}): time.sleep(0.01)\n"
                "raise SystemExit(5)"
            )
            code = self.make().run(_plan([wait, fail]))
            assert code == 5, f"exit code {code} where a rank ended with 5"
            pid = int(Path(folder, "pid").read_text() or 0)
            assert not Path(f"/proc/{pid}").exists(), f"process {pid} of the job was left behind"

    def test_a_rank_that_cannot_be_started_is_an_error(self) -> None:
        plan = _plan(["pass"], python="/no/such/program")
        try:
            code = self.make().run(plan)
        except LaunchError:
            return
        assert code != 0, "a job whose program does not exist ended with 0"


def _plan(codes: list[str], *, python: str = sys.executable) -> LaunchPlan:
    job, port = uuid.uuid4().hex, free_port()
    ranks = tuple(
        RankSpec(rank, rank, (python, "-c", code), _environment(job, rank, len(codes), port))
        for rank, code in enumerate(codes)
    )
    return LaunchPlan(job, ranks, "127.0.0.1", port, grace_s=1.0)


def _environment(job: str, rank: int, world_size: int, port: int) -> Mapping[str, str]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "POLYACCEL_JOB_ID": job}
    return {**os.environ, **{name: str(value) for name, value in variables.items()}, **meeting}
