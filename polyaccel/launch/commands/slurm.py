"""Ranks that Slurm's srun starts, within an allocation or by its own."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Allocation, Job
from polyaccel.launch.commands.base import CommandLauncher, CommandProcess
from polyaccel.launch.hosts import is_here

_PATIENCE_S = 60.0
_FAILURE = re.compile(rb"srun: error: .*: tasks? [0-9,-]+: (?:Exited with exit code (\d+)|(\S.*\S))")


class SrunProcess(CommandProcess):
    """srun, whose own exit code is the largest of its tasks': the first that failed is the first that it reports."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._code = 0
        self._line = b""

    def filter_output(self, data: bytes, *, is_error: bool) -> bytes:
        if is_error and not self._code:
            *lines, self._line = (self._line + data).split(b"\n")
            codes = (_code(found[1], found[2]) for line in lines if (found := _FAILURE.match(line)))
            self._code = next(filter(None, codes), 0)
        return data

    @property
    def first_code(self) -> int:
        return self._code or super().first_code


class SlurmLauncher(CommandLauncher):
    """Slurm: as many tasks a node as the job has slots, the same on every node."""

    name: ClassVar[str] = "slurm"
    program: ClassVar[str] = "srun"
    rank_variable: ClassVar[str] = "SLURM_PROCID"
    process: ClassVar[type[CommandProcess]] = SrunProcess

    @classmethod
    def allocation(cls, environment: Mapping[str, str]) -> Allocation | None:
        nodes = environment.get("SLURM_JOB_NODELIST")
        if "SLURM_JOB_ID" not in environment or nodes is None:
            return None
        hosts = _names(nodes)
        counts = {name: environment.get(name, "") for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")}
        each, tasks = (int(count) if count.isdigit() else 0 for count in counts.values())
        return Allocation(hosts, each or (tasks // len(hosts) if tasks % len(hosts) == 0 else 0) or None)

    def options(self, job: Job, task: tuple[str, ...]) -> tuple[str, ...]:
        counts = {len(slots) for slots in job.hosts.values()}
        if len(counts) > 1:
            shown = ", ".join(f"{host}: {len(slots)}" for host, slots in job.hosts.items())
            raise LaunchError(
                f"srun starts equally many ranks on every node, and the job has {shown}",
                hint="choose as many slots of each: --ranks N",
                value=shown,
            )
        hosts = tuple(job.hosts)
        nodes = () if len(hosts) == 1 and is_here(hosts[0]) else ("--nodelist", ",".join(hosts))
        each = ("--nodes", str(len(hosts)), "--ntasks-per-node", str(counts.pop()))
        how = ("--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=1")
        return ("-n", str(job.world_size), *nodes, *each, *how, *job.launcher_args, *task)


def _names(nodes: str) -> tuple[str, ...]:
    """The hosts of Slurm's short form, by Slurm's own program. Raises LaunchError."""
    command = ("scontrol", "show", "hostnames", nodes)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
        if hosts := tuple(done.stdout.split()):
            return hosts
        why = "it names none"
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip() or f"it exits with {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    raise LaunchError(
        f"`{' '.join(command)}` does not list the hosts of the allocation: {why}",
        hint="name them: --hosts node1:8,node2:8",
        value=nodes,
    )


def _code(code: bytes | None, how: bytes | None) -> int:
    """The exit code in srun's message about a task: its own, or that of a signal's description."""
    if code is not None:
        return int(code)
    text = (how or b"").decode(errors="replace").partition(" (")[0]
    return 128 + _signals()[text] if text in _signals() else 0


@cache
def _signals() -> dict[str, int]:
    return {signal.strsignal(number) or "": int(number) for number in signal.valid_signals()}
