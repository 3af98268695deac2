"""Agents on other hosts, reached by ssh: one connection a host, and none where the host is this one."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, JobResult, Launcher, LaunchPlan, noop
from polyaccel.launch.hosts import is_here
from polyaccel.launch.remote.supervise import HostConnection, HostsSupervisor, plan_ways

_AGENT = "polyaccel.launch.remote.agent"
# Questions are not answered; a connection over which nothing comes is given up after nine seconds.
_OPTIONS = {"BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "3", "ServerAliveCountMax": "3"}
_LOOKUP_S = 10.0


class SshLauncher(Launcher):
    """Starts an agent on each host by ssh. Needs ssh here, its server there, and the same Python at the same place."""

    name: ClassVar[str] = "ssh"

    @classmethod
    def probe(cls) -> Probe:
        found = shutil.which("ssh")
        return Probe(
            usable=found is not None, reason=found or "the command ssh is not installed: install openssh-client"
        )

    def plan(self, job: Job) -> LaunchPlan:
        return plan_ways(job, _ways(job))

    def remote_command(self, job: Job, host: str, command: tuple[str, ...]) -> tuple[str, ...]:
        return _ssh(job, host, host_command(job, shlex.join(command)))

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        first = next(iter(job.hosts))
        address = None if is_here(first) else ssh_address(first, job.launcher_args)
        return HostsSupervisor(job, _ways(job), first_address=address, look=look).run()


def host_command(job: Job, command: str) -> str:
    """What a shell on a host does: go to the job's folder and become `command`."""
    before = f". {shlex.quote(job.venv_script)} && " if job.venv_script else ""
    return f"{before}cd {shlex.quote(job.folder)} && exec {command}"


def agent_command(job: Job, number: str) -> str:
    """What a shell on a host does to become its agent of that number."""
    return host_command(job, f"{shlex.quote(sys.executable)} -m {_AGENT} {number}")


def ssh_options(job: Job) -> list[str]:
    """The options of every ssh."""
    port = [] if job.ssh_port is None else ["-p", str(job.ssh_port)]
    return [*(f"-o{name}={value}" for name, value in _OPTIONS.items()), *port]


def ssh_address(host: str, options: Sequence[str] = ()) -> str:
    """The address or name that ssh's configuration has for a host, which other hosts need not have by its name."""
    try:
        said = subprocess.run(
            ["ssh", *options, "-G", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOOKUP_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"ssh does not report how it reaches {host!r}: {error}", hint="give --master_addr") from error
    return next((line.split()[1] for line in said.splitlines() if line.startswith("hostname ")), host)


def _ways(job: Job) -> list[HostConnection]:
    return [_way(job, number, host) for number, host in enumerate(job.hosts)]


def _way(job: Job, number: int, host: str) -> HostConnection:
    command = agent_command(job, str(number))
    if is_here(host):
        return HostConnection(f"the agent on {host}", ("sh", "-c", command), (number,))
    return HostConnection(f"ssh {host}", _ssh(job, host, command), (number,))


def _ssh(job: Job, host: str, command: str) -> tuple[str, ...]:
    return ("ssh", *ssh_options(job), *job.launcher_args, host, "--", command)
