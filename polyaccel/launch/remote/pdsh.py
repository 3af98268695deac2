"""Agents on other hosts, started by one pdsh for all of them, over ssh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import ClassVar

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, JobResult, Launcher, LaunchPlan, noop
from polyaccel.launch.hosts import is_here
from polyaccel.launch.remote.callback_server import CallbackServer
from polyaccel.launch.remote.ssh import agent_command, ssh_address, ssh_options
from polyaccel.launch.remote.supervise import HostConnection, HostsSupervisor, plan_ways
from polyaccel.types import Probe

_OPTIONS_VARIABLE = "PDSH_SSH_ARGS_APPEND"


class PdshLauncher(Launcher):
    """Starts agents by pdsh and ssh; they call back, so hosts must reach this machine at any port. pdsh cuts what
    ranks print in lines past 128 KiB."""

    name: ClassVar[str] = "pdsh"

    @classmethod
    def probe(cls) -> Probe:
        missing = next((name for name in ("pdsh", "ssh") if shutil.which(name) is None), None)
        if missing is not None:
            return Probe(usable=False, reason=f"there is no command {missing} on the PATH")
        return Probe(usable=True, reason=str(shutil.which("pdsh")))

    def plan(self, job: Job) -> LaunchPlan:
        return plan_ways(job, _ways(job, "PORT"), _variables(job))

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        callers = CallbackServer()
        try:
            first = next(iter(job.hosts))
            address = None if is_here(first) else ssh_address(first, _user_options())
            return HostsSupervisor(
                job,
                _ways(job, str(callers.port)),
                first_address=address,
                look=look,
                callers=callers,
                variables=_variables(job),
            ).run()
        finally:
            callers.close()


def _ways(job: Job, port: str) -> list[HostConnection]:
    numbers = [number for number, host in enumerate(job.hosts) if not is_here(host)]
    names = [host for host in job.hosts if not is_here(host)]
    ways = [
        HostConnection(f"the agent on {host}", ("sh", "-c", agent_command(job, str(number))), (number,))
        for number, host in enumerate(job.hosts)
        if is_here(host)
    ]
    if names:
        # pdsh numbers the hosts of its list in place of %n, and makes % of %%.
        command = agent_command(job, "@AGENT@").replace("%", "%%")
        command = command.replace("@AGENT@", f"{','.join(map(str, numbers))} %n {port}")
        options = ("-S", "-N", "-R", "ssh", "-f", str(len(names)), "-w", ",".join(names))
        ways.append(
            HostConnection("pdsh", ("pdsh", *options, *job.launcher_args, command), tuple(numbers), calls_back=True)
        )
    return ways


def _user_options() -> list[str]:
    return os.environ.get(_OPTIONS_VARIABLE, "").split()


def _variables(job: Job) -> dict[str, str]:
    """What pdsh gets beyond this process's variables: it has no other way to options of ssh."""
    options = ssh_options(job)
    if any(len(option.split()) != 1 for option in options):
        raise LaunchError(f"pdsh hands on no option of ssh with a space: {options}", hint="use --launcher ssh")
    return {_OPTIONS_VARIABLE: " ".join([*_user_options(), *options])}
