"""Keepers on other hosts live as long as somebody holds them and says so, and a way that was lost is found anew."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from served_keeper import SECRET

from polyaccel.core.types import Probe
from polyaccel.job.memory_server.client import KeeperClient, KeeperGone
from polyaccel.job.memory_server.protocol import KEEPER_VARIABLE
from polyaccel.job.memory_server.start import KeeperProcess, can_keep
from polyaccel.launch.base import Job, JobResult, Launcher, noop
from polyaccel.launch.restarts import RestartPolicy, run_with_restarts

pytestmark = pytest.mark.skipif(not can_keep(), reason="sockets and memory without names are Linux's")
WAY = (sys.executable, "-m", "polyaccel.job.memory_server.process")
"""To a host that is this one."""


def wait_for_end(pid: int) -> None:
    """Raises AssertionError when the process does not end within a minute."""
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)


def test_a_keeper_that_hears_nothing_ends() -> None:
    keeper = KeeperProcess(SECRET, way=WAY, silence_s=0.2)
    wait_for_end(keeper.pid)
    assert not keeper.answers()
    keeper.close()


def test_a_keeper_that_is_spoken_to_answers_and_ends_with_its_launcher() -> None:
    keeper = KeeperProcess(SECRET, way=WAY, silence_s=600)
    assert keeper.answers()
    assert keeper.answers()
    keeper.close()
    with pytest.raises(KeeperGone):
        KeeperClient(keeper.name, SECRET)


def test_what_is_kept_stays_when_the_way_to_it_is_another() -> None:
    """A second keeper of the name holds the first in the launcher's place; when it ends, both do."""
    first = KeeperProcess(SECRET, way=WAY, silence_s=600)
    client = KeeperClient(first.name, SECRET)
    client.put("kept", b"1")
    second = KeeperProcess(SECRET, name=first.name, way=WAY, silence_s=600)
    assert first._process.stdin is not None
    first._process.stdin.close()  # the way that was lost is noticed at last
    assert second.answers()
    assert client.names("") == {"kept": 0}
    second.close()
    wait_for_end(first.pid)
    first.close()
    with pytest.raises(KeeperGone):
        client.names("")


class Reaching(Launcher):
    """Starts nothing, and reaches every host: all are this one."""

    name = "reaching"

    def __init__(self, during: Callable[[str, str], None], way: tuple[str, ...] | None = ()) -> None:
        self.during = during
        self.way = way
        self.starts = 0

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="starts nothing")

    def remote_command(self, job: Job, host: str, command: tuple[str, ...]) -> tuple[str, ...] | None:
        return None if self.way is None else (*self.way, *command)

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        self.starts += 1
        self.during(job.exports.get(KEEPER_VARIABLE, ""), job.secret)
        return JobResult(1 if self.starts < 3 else 0, "a rank has failed")


def run(launcher: Reaching) -> int:
    job = Job(command=("true",), hosts={"a": (0,), "b": (0,)})
    return run_with_restarts(launcher, job, RestartPolicy(5)).code


def pids_with(name: str) -> list[int]:
    """The keepers of a name: one, and those that hold it for others."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if name.encode() in file.read().split(b"\0"):
                found.append(int(pid))
    return found


def test_every_host_has_a_keeper_from_start_to_start(capfd: pytest.CaptureFixture[str]) -> None:
    """Killed, there is one again, empty, when the next start begins; at the end nothing is left."""
    found: list[dict[str, int]] = []
    names: set[str] = set()

    def keep(name: str, secret: str) -> None:
        client = KeeperClient(name, secret.encode())
        found.append(client.names(""))
        client.put(f"{len(found)}", b"kept")
        client.close()
        names.add(name)
        if len(found) == 2:
            for pid in pids_with(name):
                os.kill(pid, signal.SIGKILL)

    assert run(Reaching(keep)) == 0
    assert found == [{}, {"1": 0}, {}]
    (name,) = names
    assert pids_with(name) == []
    assert capfd.readouterr().err.count(", or the way to it, was lost, and there is one again") == 2


def test_hosts_that_only_ranks_are_started_on_have_none() -> None:
    found: list[str] = []
    assert run(Reaching(lambda name, secret: found.append(name), way=None)) == 0
    assert found == ["", "", ""]


def test_a_host_that_has_none_does_not_hold_up_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    found: list[str] = []
    assert run(Reaching(lambda name, secret: found.append(name), way=("false",))) == 0
    assert len(found) == 3
    said = capfd.readouterr().err
    assert "on a, the keeper of replicas could not be started: it has ended with code 1: the job continues" in said
