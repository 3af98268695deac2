"""Launchers that are a command: `CommandLauncher` stays with it as with a rank."""

from __future__ import annotations

import os
import shutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.job.ports import free_port
from polyaccel.launch.base import JOB_ID, Job, JobResult, Launcher, LaunchPlan, RankSpec, noop
from polyaccel.launch.commands.task import JOB_VARIABLE
from polyaccel.launch.hosts import is_here, without_user
from polyaccel.launch.output import JobOutput, merged_log
from polyaccel.launch.process import RankProcess, exit_code, start_rank
from polyaccel.launch.supervise import JobFailure, Supervisor

_FIRST_PORT, _PORTS = 20000, 9000
"""The port of the rendezvous on a host whose free ports cannot be asked for: outside what systems hand out."""
_LAST_WORDS_S = 2.0
_LATER_S = 3.0
"""The command's own way to end its tasks gets so much more time than ranks do."""


class CommandProcess(RankProcess):
    """The process of the command."""

    @property
    def name(self) -> str:
        return f"{self.spec.command[0]} (pid {self.pid})"

    @property
    def prefix(self) -> bytes:
        return b""

    @property
    def first_code(self) -> int:
        """The exit code of the first rank that failed, as far as the command reports it; 0 if none has."""
        return exit_code(self.returncode or 0)


class CommandLauncher(Launcher):
    """Starts the ranks by a command that starts tasks on hosts, numbers them, and ends them with one another."""

    program: ClassVar[str]
    """The command."""
    rank_variable: ClassVar[str]
    """Where its tasks find their number."""
    process: ClassVar[type[CommandProcess]] = CommandProcess
    """The state of its process."""
    variables: ClassVar[Mapping[str, str]] = {}
    """What the command gets beyond this process's environment, unless that has it."""

    @abstractmethod
    def options(self, job: Job, task: tuple[str, ...]) -> tuple[str, ...]:
        """The arguments of the command that starts `task` for every slot of the job, host by host in order."""

    @classmethod
    def probe(cls) -> Probe:
        found = shutil.which(cls.program)
        return Probe(usable=found is not None, reason=found or f"the command {cls.program} is not on the PATH")

    def plan(self, job: Job) -> LaunchPlan:
        met = self._met(job)
        task = (sys.executable, "-m", "polyaccel.launch.commands.task", self.rank_variable)
        environment = {**self.variables, **os.environ, **met.exports, JOB_ID: job.job_id, JOB_VARIABLE: met.to_json()}
        command = RankSpec(0, 0, (self.program, *self.options(met, task)), environment)
        place = met.master_addr or "", met.master_port or 0
        return LaunchPlan(job.job_id, (command,), *place, job.grace_s + _LATER_S, job.stop_timeout_s)

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        plan = self.plan(job)
        return _CommandSupervisor(plan, JobOutput(plan, merged=merged_log(job)), self.process, look).run()

    def _met(self, job: Job) -> Job:
        """Return the job with a rendezvous, on hosts as the command names them."""
        job = replace(job, hosts=without_user(job.hosts, self.name))
        first = next(iter(job.hosts))
        if job.master_port is not None:
            port = job.master_port
        elif is_here(first):
            port = free_port()
        else:
            port = _FIRST_PORT + int(job.job_id[:8], 16) % _PORTS
        is_alone = len(job.hosts) == 1 and is_here(first)
        return replace(job, master_port=port, master_addr=job.master_addr or ("127.0.0.1" if is_alone else first))


class _CommandSupervisor(Supervisor):
    """Runs one job by a command, once."""

    def __init__(
        self, plan: LaunchPlan, output: JobOutput, kind: type[CommandProcess], look: Callable[[], object]
    ) -> None:
        super().__init__(plan, output, look=look)
        self._kind = kind

    def _started(self, spec: RankSpec) -> RankProcess:
        owns_stdout, owns_stderr = self._output.owns(spec)
        return start_rank(spec, self._arrivals, owns_stdout=owns_stdout, owns_stderr=owns_stderr, kind=self._kind)

    def _note_failures(self, changed: list[RankProcess]) -> None:
        for each in changed:
            if isinstance(each, CommandProcess) and each.returncode:
                self._output.await_end(each.spec.rank, _LAST_WORDS_S)
                was_asked = each.first_code - 128 in self._passed_on
                sentence = f"the ranks of {each.name} failed with code {each.first_code}; see its output"
                self._fail(JobFailure(each.first_code, sentence, was_asked=was_asked))
