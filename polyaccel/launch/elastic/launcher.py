"""The launcher `torchelastic`: it starts the ranks of this host whenever the elastic agent next to it requests it.

[Note: Roles on an elastic host]
The agent is torch's, in a process of its own (`agent`): with those of the other hosts it agrees on which hosts there
are, on their numbers and on where their ranks meet. Then it sends the launcher the job with exactly these hosts, and
the launcher stays with this host's ranks as `polyaccel run --node-rank` does, until they have ended or the agent wants
them to: because a host has come or is lost. The launcher says how they ended, the agents meet again, and so on. An
agent that is killed, stopped or cut off ends this host's part: the others have given it up by then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from math import inf
from time import monotonic
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, JobResult, Launcher, LaunchPlan, RankSpec, noop
from polyaccel.launch.hosts import is_here
from polyaccel.launch.output import JobOutput, merged_log
from polyaccel.launch.plan import plan_host
from polyaccel.launch.process import exit_code, signal_name
from polyaccel.launch.program import check_not_nested
from polyaccel.launch.remote.agent import LauncherChannel
from polyaccel.launch.remote.supervise import ANSWER_S
from polyaccel.launch.signals import ENDING, PASSED_ON, SignalInbox
from polyaccel.launch.supervise import Supervisor

_AGENT = "polyaccel.launch.elastic.torch_agent"
_NAME = "the elastic agent"
_LEAVES_S = 5.0
"""An agent whose launcher has hung up notifies the others, and ends within this time."""


class TorchElasticLauncher(Launcher):
    """The command is given on every host, at any time: the rendezvous of agents is `--master-addr`, whose host keeps
    what they agree on, and ranks are started again whenever a host comes or is lost."""

    name: ClassVar[str] = "torchelastic"
    restarts_itself: ClassVar[bool] = True

    @classmethod
    def probe(cls) -> Probe:
        if find_spec("torch") is None:
            return Probe(usable=False, reason="the agent is torch's, and torch is not installed: pip install torch")
        return Probe(usable=True, reason="the elastic agent of torch.distributed")

    def plan(self, job: Job) -> LaunchPlan:
        check_not_nested(os.environ)
        if len(job.hosts) > 1 or job.node is not None or not is_here(next(iter(job.hosts))):
            raise LaunchError(
                "the launcher 'torchelastic' starts the ranks of this host, and others may come and go",
                hint="give the command on every host, without --hostfile and --node-rank, "
                "with one --master-addr and --master-port",
                value=tuple(job.hosts),
            )
        if job.elastic.most > 1 and (job.master_addr is None or job.master_port is None):
            raise LaunchError(
                f"agents of up to {job.elastic.most} hosts have no rendezvous address",
                hint="give --master-addr and --master-port, the same on every host, of one that stays to the end",
            )
        agent = RankSpec(0, 0, (sys.executable, "-m", _AGENT), dict(os.environ))
        place = job.master_addr or "", job.master_port or 0
        return LaunchPlan(job.job_id, (agent,), *place, job.grace_s, job.stop_timeout_s)

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        (agent,) = self.plan(job).ranks
        try:
            process = subprocess.Popen(
                agent.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=dict(agent.environment),
                start_new_session=True,  # the interrupt from a keyboard is this process's to pass on
            )
        except OSError as error:
            raise LaunchError(f"{_NAME} cannot be started: {error}", value=agent.command) from error
        with process:
            try:
                return _ElasticHost(job, process, look).run()
            finally:
                assert process.stdin is not None
                process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LEAVES_S)
                process.kill()


class AgentOrders(LauncherChannel):
    """The lines of the elastic agent, read from a descriptor: jobs to start, one after the other."""

    sender: ClassVar[str] = _NAME

    def __init__(self, read_fd: int) -> None:
        super().__init__(read_fd, 0)
        self.silent_at_s = monotonic() + ANSWER_S
        os.set_blocking(read_fd, False)
        self._start: Job | None = None

    def next_start(self) -> Job | None:
        """The job that is to be started, if one has come; an order to end is for one that has ended already."""
        self.take()
        start, self._start = self._start, None
        return start

    def report(self, code: int, sentence: str) -> None:
        """It stands on standard error."""

    def _answer(self) -> None:
        """The elastic agent sees when this process has gone."""

    def _lines(self) -> list[str]:
        lines = super()._lines()
        for line in lines:
            if line.startswith("{"):
                self._start = Job.from_json(line)
        return [line for line in lines if not line.startswith("{")]


class _ElasticHost:
    """This host's part of a job, from its first start to its last."""

    def __init__(self, job: Job, agent: subprocess.Popen[bytes], look: Callable[[], object]) -> None:
        assert agent.stdin is not None  # it was started with pipes
        assert agent.stdout is not None
        self._agent, self._look = agent, look
        self._to_agent = agent.stdin.fileno()
        self._orders = AgentOrders(agent.stdout.fileno())
        self._said = job.to_json()

    def run(self) -> JobResult:
        """How the last start ended. Signals are collected before the agent gets the job, and between starts."""
        with SignalInbox((*PASSED_ON, signal.SIGCHLD), [self._orders.read_fd]) as inbox:
            self._tell(self._said)
            return self._run_starts(inbox)

    def _run_starts(self, inbox: SignalInbox) -> JobResult:
        last: JobResult | None = None
        while True:
            start = self._await_start(inbox)
            if isinstance(start, JobResult):
                return start
            if start is None:
                return self._end_of_agent(last)
            plan = plan_host(start, start.node or 0)
            output = JobOutput(plan, merged=merged_log(start))
            last = Supervisor(plan, output, orders=self._orders, look=self._look).run()
            if last.was_asked:
                return last
            self._tell(f"ended {last.code}")

    def _await_start(self, inbox: SignalInbox) -> Job | JobResult | None:
        """The next job; the end where a signal came first; None where the agent has ended."""
        while True:
            self._look()
            start = self._orders.next_start()
            if start is not None or self._orders.is_lost:
                return start
            asked = [each for each in inbox.wait(self._silent_in_s()) if each in ENDING]
            if asked:
                why = f"ended by {signal_name(asked[0])}, during the rendezvous"
                return JobResult(128 + asked[0], why, was_asked=True)

    def _silent_in_s(self) -> float | None:
        silent_at_s = self._orders.silent_at_s
        return None if silent_at_s == inf else max(0.0, silent_at_s - monotonic())

    def _tell(self, line: str) -> None:
        data = line.encode() + b"\n"
        with suppress(BrokenPipeError):  # then its own pipe ends too
            while data:
                data = data[os.write(self._to_agent, data) :]

    def _end_of_agent(self, last: JobResult | None) -> JobResult:
        try:
            code = exit_code(self._agent.wait(_LEAVES_S))
        except subprocess.TimeoutExpired:  # stopped, for nothing was received from it
            self._agent.kill()
            self._agent.wait()
            return _said(1, f"nothing was received from {_NAME}")
        if code == 0:
            return JobResult(0)
        if last is not None and last.code == code:
            return last
        name = signal_name(code - 128) if code > 128 else ""
        return _said(code, f"{_NAME} was killed by {name}" if name else f"{_NAME} ended with code {code}")


def _said(code: int, sentence: str) -> JobResult:
    with suppress(OSError):
        os.write(2, f"polyaccel: {sentence}\n".encode())
    return JobResult(code, sentence)
