"""torch's elastic agents on two hosts: one is lost and comes back, and the training goes on from memory with the same
global batch, to the losses of the run that nobody disturbs. TESTS_ELASTIC=full (`make test-elastic`) loses hosts in
every way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep, time

import pytest
import torchelastic_job
from elastic_job import Numbered, build
from host_jobs import Hosts
from ssh_hosts import SshHost
from waiting_job import reset_signals

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

LIMIT_S = 120.0
SUPPORT = Path(torchelastic_job.__file__).parent
STEPS = 5
"""So many steps are seen before something else happens: a replica of the first takes its time."""
OPTIONS = "--elastic-training --min-elastic-nodes 1 --max-elastic-nodes 2 --max-restarts 9 --nproc 1 --grace-period 2"
Way = Callable[[SshHost], object]


class Agents:
    """`polyaccel run --elastic-training` on hosts, with one rank each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._log = folder / "log"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Give the command on the host of that number."""
        place = ["--master-addr", self._hosts.up.hosts[0].address, "--master-port", "29400"]
        command = [sys.executable, "-m", "polyaccel", "run", *OPTIONS.split(), *place]
        variables = {"PYTHONPATH": str(SUPPORT), "POLYACCEL_JOB_SECRET": "a secret of this test, long enough"}
        with open(self._folder / f"said{len(self._running)}", "wb") as said:
            process = subprocess.Popen(
                self._hosts.up.hosts[number].entered(*command, torchelastic_job.__file__, str(self._folder)),
                cwd=self._folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=reset_signals,
            )
        self._running.append(process)
        return process

    def await_steps(self, ranks: int, after_s: float) -> float:
        """When the first step ended that `ranks` ranks made after that time, once there are a few."""
        until_s = monotonic() + LIMIT_S
        while monotonic() < until_s:
            assert self._running[0].poll() is None, self.said()
            now_ranks, steps = 0, []
            for line in self._log.read_text().splitlines() if self._log.exists() else []:
                what, *rest = line.split()
                if what == "begins":
                    now_ranks = int(rest[1])
                elif now_ranks == ranks and len(rest) == 3 and float(rest[2]) > after_s:
                    steps.append(float(rest[2]))
            if len(steps) >= STEPS:
                return steps[0]
            sleep(0.05)
        raise AssertionError(self.said())

    def end(self) -> None:
        """Let the training end, and await it."""
        (self._folder / "end").touch()
        for process in self._running:
            process.wait(LIMIT_S)

    def found(self, what: str) -> list[list[str]]:
        """The lines of the log that begin so."""
        return [line.split()[1:] for line in self._log.read_text().splitlines() if line.startswith(what)]

    def said(self) -> str:
        """All that was said and logged."""
        files = [*sorted(self._folder.glob("said*")), self._log]
        return "\n".join(file.read_text() for file in files if file.exists())

    def close(self) -> None:
        """Leave nothing, however a test ended."""
        for host in self._hosts.up.hosts:
            host.heal()
            kill_all(host)
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def agents(two_hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    started = Agents(two_hosts, tmp_path)
    yield started
    started.close()


def kill_agent(host: SshHost) -> None:
    host.run("pkill", "-KILL", "-f", "polyaccel.launch.elastic.torch_agent")


def stop_agent(host: SshHost) -> None:
    host.run("pkill", "-STOP", "-f", "polyaccel.launch.elastic.torch_agent")


def kill_all(host: SshHost) -> None:
    host.run("pkill", "-KILL", "-f", "polyaccel")


def kill_launcher(host: SshHost) -> None:
    host.run("pkill", "-KILL", "-f", "polyaccel run")


WAYS: dict[str, Way] = {"agent": kill_agent}
if os.environ.get("TESTS_ELASTIC") == "full":
    WAYS |= {"stopped agent": stop_agent, "launcher": kill_launcher, "all": kill_all, "network": SshHost.cut}


@pytest.mark.parametrize("way", WAYS)
def test_a_host_is_lost_and_comes_back(two_hosts: Hosts, agents: Agents, way: str) -> None:
    host = two_hosts.up.hosts[1]
    first, second = agents.start(0), agents.start(1)
    agents.await_steps(2, 0.0)
    lost_s = time()
    WAYS[way](host)
    shrunk_s = agents.await_steps(1, lost_s) - lost_s
    assert second.wait(LIMIT_S) != 0  # it ends by itself
    host.heal()
    came_s = time()
    second = agents.start(1)
    grown_s = agents.await_steps(2, came_s) - came_s
    agents.end()
    assert (first.returncode, second.returncode) == (0, 0), agents.said()
    print(f"{way}: a step again {shrunk_s:.1f} s after the host was lost, and {grown_s:.1f} s after it came back")

    begins = agents.found("begins")
    assert {batch for *_, batch in begins} == {"12"}
    assert [ranks for _, ranks, *_ in begins][-3:] == ["2", "1", "2"]
    said = agents.said()
    assert len(re.findall(r"continuing from the replica of step \d+ in memory", said)) >= 2, said
    assert "[rank 0] " in said
    wanted = undisturbed(max(int(step) for step, *_ in agents.found("step")))
    found = {int(step): float(loss) for step, loss, _ in agents.found("step")}
    assert [found[step] for step in sorted(found)] == pytest.approx(wanted, rel=1e-4)
    two_hosts.wait_until_nothing_is_left()


def undisturbed(steps: int) -> list[float]:
    """The losses on one rank that nobody disturbs."""

    def work(communicator: Communicator) -> list[float]:
        model, config = build(), {**torchelastic_job.CONFIG, "checkpoint": {}}
        engine, *_ = polyaccel.initialize(model=model, config=config, training_data=Numbered())
        losses = [torchelastic_job.train(engine, model) for _ in range(steps)]
        engine.destroy()
        return losses

    return list(run_threads(1, work)[0])


@pytest.mark.skipif(len(WAYS) == 1, reason="TESTS_ELASTIC=full runs it")
def test_a_signal_ends_one_hosts_part(two_hosts: Hosts, agents: Agents) -> None:
    first, second = agents.start(0), agents.start(1)
    agents.await_steps(2, 0.0)
    asked_s = time()
    two_hosts.up.hosts[1].run("pkill", "-TERM", "-o", "-f", "polyaccel run")
    assert second.wait(LIMIT_S) == 128 + signal.SIGTERM, agents.said()
    agents.await_steps(1, asked_s)
    agents.end()
    assert first.returncode == 0, agents.said()
    two_hosts.wait_until_nothing_is_left()
