"""The ranks of this machine, started by this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, JobResult, Launcher, LaunchPlan, noop
from polyaccel.launch.output import JobOutput, merged_log
from polyaccel.launch.plan import plan_host
from polyaccel.launch.supervise import Supervisor


class LocalLauncher(Launcher):
    """Starts the ranks as child processes. Needs nothing but a POSIX system."""

    name: ClassVar[str] = "local"

    @classmethod
    def probe(cls) -> Probe:
        if not hasattr(os, "killpg"):
            return Probe(usable=False, reason="needs POSIX process groups")
        return Probe(usable=True, reason="starts ranks on this machine")

    def plan(self, job: Job) -> LaunchPlan:
        if len(job.hosts) > 1 and job.node is None:
            raise LaunchError(
                f"the launcher 'local' starts ranks on this machine only, and the job has {', '.join(job.hosts)}",
                hint="reach the others by --launcher ssh; or give the command on each of them, with --node_rank",
                value=tuple(job.hosts),
            )
        return plan_host(job, job.node or 0)

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        plan = self.plan(job)
        return Supervisor(plan, JobOutput(plan, merged=merged_log(job)), look=look).run()
