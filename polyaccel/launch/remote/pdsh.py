"""Agents on other hosts, started by one pdsh for all of them, over ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job, JobResult, Launcher, LaunchPlan, noop
from polyaccel.launch.hosts import is_here
from polyaccel.launch.remote.control_messages import AgentPipe, shell_word
from polyaccel.launch.remote.ssh import agent_command, ssh_address, ssh_options
from polyaccel.launch.remote.supervise import HostConnection, HostsSupervisor, plan_ways

_MORE_OPTIONS = "PDSH_SSH_ARGS_APPEND"
_OPTIONS = "PDSH_SSH_ARGS"
_DEFAULT_OPTIONS = "-a -x"
_LOOKUP_S = 10.0


class PdshLauncher(Launcher):
    """Starts agents by pdsh and ssh. Needs pdsh's module `exec`. pdsh cuts what ranks print in lines past 128 KiB."""

    name: ClassVar[str] = "pdsh"

    @classmethod
    def probe(cls) -> Probe:
        missing = next((name for name in ("pdsh", "ssh") if shutil.which(name) is None), None)
        if missing is not None:
            return Probe(usable=False, reason=f"the command {missing} is not on the PATH")
        if not os.path.isdir("/proc/self/fd"):
            return Probe(usable=False, reason="agents read pipes that Linux names below /proc, and there is none")
        if "exec" not in _modules():
            return Probe(usable=False, reason="pdsh has no module exec: install pdsh-rcmd-exec")
        return Probe(usable=True, reason=str(shutil.which("pdsh")))

    def plan(self, job: Job) -> LaunchPlan:
        return plan_ways(job, _ways(job, {}))

    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        first = next(iter(job.hosts))
        address = None if is_here(first) else ssh_address(first, _more_options())
        with ExitStack() as stack:
            inputs = {number: stack.enter_context(closing(AgentPipe())) for number in _others(job)}
            return HostsSupervisor(job, _ways(job, inputs), first_address=address, look=look).run()


def pdsh_command(job: Job, paths: Mapping[int, str]) -> tuple[str, ...]:
    """The command that starts the agents of the hosts of these numbers, each with the file at its path as input.

    pdsh replaces %n (a host's place in the list), %u (its user), %h (its name) and %% (%), and cuts off the words after
    an empty one. As under pdsh's module ssh, ssh gets the user only where it is another one than this.
    """
    if any(option.startswith("-R") for option in job.launcher_args):
        raise LaunchError(
            "pdsh starts ssh by its module exec, and no other module can be chosen",
            hint=f"leave -R out of --launcher-args; options of ssh are those of {_MORE_OPTIONS}",
            value=job.launcher_args,
        )
    names = [host for number, host in enumerate(job.hosts) if number in paths]
    cases = " ".join(
        f"{place}) agent={number} input={shlex.quote(path)};;" for place, (number, path) in enumerate(paths.items())
    )
    script = (
        f'case $0 in {cases} esac; user=$1; shift; [ "$user" = "$(id -un)" ] || set -- "$@" -l "$user"; '
        f'"$@" -- {shlex.quote(agent_command(job, ""))}"$agent" <"$input"; code=$?; '
        f'{shell_word(number="agent", way="code")}; exit "$code"'
    )
    chosen = [option for option in os.environ.get(_OPTIONS, _DEFAULT_OPTIONS).split() if option != "-l%u"]
    host = [] if any("%h" in option for option in chosen) else ["%h"]
    ssh = ("ssh", *_more_options(), *ssh_options(job), *chosen, *host)
    options = ("-S", "-N", "-R", "exec", "-f", str(len(names)), "-w", ",".join(names))
    return ("pdsh", *options, *job.launcher_args, "sh", "-c", script.replace("%", "%%"), "%n", "%u", *ssh)


def _more_options() -> list[str]:
    return os.environ.get(_MORE_OPTIONS, "").split()


def _others(job: Job) -> list[int]:
    return [number for number, host in enumerate(job.hosts) if not is_here(host)]


def _ways(job: Job, inputs: Mapping[int, AgentPipe]) -> list[HostConnection]:
    """The agents on this machine and one pdsh for the others, whose `inputs` a plan does not have yet."""
    others = _others(job)
    ways = [
        HostConnection(f"the agent on {host}", ("sh", "-c", agent_command(job, str(number))), (number,))
        for number, host in enumerate(job.hosts)
        if number not in others
    ]
    if others:
        paths = {number: inputs[number].path if number in inputs else "PIPE" for number in others}
        ways.append(HostConnection("pdsh", pdsh_command(job, paths), tuple(others), inputs))
    return ways


def _modules() -> list[str]:
    """The names of the modules by which pdsh can reach hosts."""
    try:
        said = subprocess.run(
            ["pdsh", "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LOOKUP_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    listed = next((line for line in said.splitlines() if line.startswith("rcmd modules:")), "")
    return listed.partition(":")[2].partition("(")[0].replace(",", " ").split()
