"""A job is started again as often as was said, with the ranks that are left, and the last start decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from polyaccel.core.types import Probe
from polyaccel.job.memory_server.client import KeeperClient
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.job.memory_server.start import can_keep
from polyaccel.launch.base import Job, JobResult, Launcher, LaunchPlan, noop
from polyaccel.launch.plan import plan_host
from polyaccel.launch.restarts import RESTART_VARIABLE, RestartPolicy, run_with_restarts

KILLED = JobResult(137, "rank 1 (pid 5) was killed by SIGKILL after 3 s", killed=1)


@dataclass
class Ended(Launcher):
    """Starts that end as they are told."""

    ends: Sequence[JobResult]
    plans: list[LaunchPlan] = field(default_factory=list)
    during: Callable[[LaunchPlan, Callable[[], object]], None] = lambda plan, look: None
    name = "ended"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="starts nothing")

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        given = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.plans.append(plan_host(job, 0, given))
        self.during(self.plans[-1], look)
        return self.ends[len(self.plans) - 1]


def run(launcher: Launcher, policy: RestartPolicy, *, ranks: int = 3) -> int:
    job = Job(command=("true",), hosts={"localhost": tuple(range(ranks))})
    return run_with_restarts(launcher, job, policy).code


def ranks_of(launcher: Ended) -> list[int]:
    return [len(plan.ranks) for plan in launcher.plans]


def test_a_job_that_ends_well_is_not_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    launcher = Ended([JobResult(0)])
    assert run(launcher, RestartPolicy(3)) == 0
    assert ranks_of(launcher) == [3]
    assert capfd.readouterr().err == ""


def test_the_last_start_decides_and_each_restart_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    launcher = Ended([KILLED, JobResult(7, "rank 0 (pid 9) exited with code 7 after 1.0 s"), JobResult(5, "rank 2")])
    assert run(launcher, RestartPolicy(2)) == 5
    assert ranks_of(launcher) == [3, 3, 3]
    assert capfd.readouterr().err.splitlines() == [
        "polyaccel: restart 1 of 2: rank 1 (pid 5) was killed by SIGKILL after 3 s",
        "polyaccel: restart 2 of 2: rank 0 (pid 9) exited with code 7 after 1.0 s",
    ]


def test_a_job_that_was_asked_to_end_is_not_started_again() -> None:
    launcher = Ended([JobResult(143, "ended by SIGTERM, which was passed on to the ranks", was_asked=True)])
    assert run(launcher, RestartPolicy(3)) == 143
    assert ranks_of(launcher) == [3]


def test_only_numbers_of_ranks_that_can_train_are_started() -> None:
    launcher = Ended([KILLED, KILLED, JobResult(137, "two", killed=2), KILLED, JobResult(0)])
    assert run(launcher, RestartPolicy(9, least=2, sizes=(1, 2, 3, 4, 6)), ranks=6) == 0
    assert ranks_of(launcher) == [6, 4, 3, 2, 2]


def test_ranks_that_were_killed_are_left_out_down_to_the_least(capfd: pytest.CaptureFixture[str]) -> None:
    """One that ends with a code of its own has lost no place."""
    launcher = Ended([KILLED, JobResult(1, "rank 0 exited"), JobResult(137, "two", killed=2), KILLED, JobResult(0)])
    assert run(launcher, RestartPolicy(9, least=2), ranks=4) == 0
    assert ranks_of(launcher) == [4, 3, 3, 2, 2]
    assert "restart 1 of 9 with 3 of 4 ranks: rank 1 (pid 5)" in capfd.readouterr().err


def test_devices_are_counted_anew() -> None:
    launcher, counts = Ended([KILLED, KILLED, JobResult(0)]), iter([4, 1])
    assert run(launcher, RestartPolicy(9, least=2, count_ranks=lambda: next(counts)), ranks=4) == 0
    assert ranks_of(launcher) == [4, 4, 2]


def test_starts_have_a_secret_and_a_count_in_common_and_nothing_else() -> None:
    launcher = Ended([KILLED, KILLED, JobResult(0)])
    run(launcher, RestartPolicy(2))
    environments = [plan.ranks[0].environment for plan in launcher.plans]
    assert len({each["POLYACCEL_JOB_SECRET"] for each in environments}) == 1
    assert [each[RESTART_VARIABLE] for each in environments] == ["0", "1", "2"]
    assert len({plan.job_id for plan in launcher.plans}) == 3


@pytest.mark.skipif(not can_keep(), reason="sockets and memory without names are Linux's")
def test_the_keeper_stays_from_start_to_start_and_goes_with_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    """Killed, it begins anew: in the middle of a start too, where the launcher looks."""
    found: list[dict[str, int]] = []
    names: list[str] = []

    def keep(plan: LaunchPlan, look: Callable[[], object]) -> None:
        client = KeeperClient.from_environment(plan.ranks[0].environment)
        assert client is not None
        found.append(client.names(""))
        client.put(f"{len(found)}", b"kept")
        client.close()
        names.append(plan.ranks[0].environment[KEEPER_VARIABLE])
        if len(found) == 2:
            (pid,) = children_with(names[0])
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            look()
            keep(plan, look)

    launcher = Ended([KILLED, KILLED, JobResult(0)], during=keep)
    assert run(launcher, RestartPolicy(2)) == 0
    assert found == [{}, {"1": 0}, {}, {"3": 0}]
    assert len(set(names)) == 1
    assert children_with(names[0]) == []
    assert "polyaccel: the keeper of replicas was killed, and begins again" in capfd.readouterr().err


def children_with(word: str) -> list[int]:
    """Living processes whose command line has that word."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if word.encode() in file.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            continue
    return found


def test_on_several_hosts_all_ranks_are_started_again() -> None:
    launcher = Ended([KILLED, JobResult(0)])
    job = Job(command=("true",), hosts={"a": (0, 1), "b": (0,)}, master_addr="a", master_port=29500)
    assert run_with_restarts(launcher, job, RestartPolicy(2, least=1)).code == 0
    assert [plan.ranks[0].environment["WORLD_SIZE"] for plan in launcher.plans] == ["3", "3"]
    assert KEEPER_VARIABLE not in launcher.plans[0].ranks[0].environment
