"""The contract of a launcher plugin. Read first: `Launcher`, `Job`.

A `Job` and the `LaunchPlan` of one host are values: a test, or a dry run, reads them without starting a process, and a
job is sent to its hosts as JSON.
"""

from __future__ import annotations

import json
import secrets
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import LaunchError

JOB_ID = "POLYACCEL_JOB_ID"
"""Variable with the id of a process's job. Every process that a rank starts inherits it."""

DEFAULT_GRACE_S = 5.0
DEFAULT_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One process of the job.

    Attributes:
        rank: Rank in the job, from 0.
        local_rank: Rank among those of this host, from 0.
        command: Program and arguments.
        environment: All variables of the process, not additions.
        cores: Logical CPUs that the process is bound to; None for those of the launcher.
    """

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticHosts:
    """Limits of an elastic job: hosts, restarts and world sizes.

    Attributes:
        least: Fewest hosts on which the job may run.
        most: Most hosts on which the job may run.
        restarts: How often ranks are started again after one has failed.
        sizes: Numbers of ranks that can train, ascending; None where all can.
    """

    least: int = 1
    most: int = 1
    restarts: int = 0
    sizes: tuple[int, ...] | None = None

    def largest(self, ranks: int) -> int:
        """Find the most ranks that can train.

        Args:
            ranks: Ranks that are there.

        Returns:
            The largest of `sizes` up to `ranks`; 0 where there is none.
        """
        return ranks if self.sizes is None else max((size for size in self.sizes if size <= ranks), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs where: every rank of every slot of `hosts`, numbered in their order.

    Attributes:
        command: Program of each rank, and its first arguments.
        hosts: Slots by host: the numbers of the devices, one rank each.
        arguments: Arguments after `command`.
        names_local_rank: Insert `--local_rank=N` between `command` and `arguments`.
        node: Number of this machine, where the command is given on every host; None leaves all to the launcher.
        master_addr: Host where ranks find each other; None leaves the choice to the launcher.
        master_port: TCP port there; None leaves the choice to the launcher.
        exports: Variables of ranks in addition to the environment of their host.
        device_variable: Variable that is set to the numbers of the host's slots; None for none.
        folder: Working directory of the ranks.
        job_id: Unique id, which every process of the job finds in POLYACCEL_JOB_ID.
        secret: Key that authenticates what ranks send each other; "" for no authentication.
        bind_cores: Bind each rank's process to its share of `cores`.
        cores: Logical CPUs to share; None for all that may be used.
        grace_s: Seconds from SIGTERM to SIGKILL for the other ranks after one has failed.
        stop_timeout_s: Seconds after which a stopped rank ends the job; 0 for no limit.
        hang_timeout_s: Seconds without a step of any rank after which the job ends; 0 for no limit.
        log_dir: Folder with one log of each rank and one of all; None for no files.
        launcher_args: Further options of the command that reaches other hosts.
        ssh_port: Port of the hosts' ssh servers; None for the default.
        venv_script: Script that a shell on each host reads first; None for none.
        debug_port: Rank R listens for a debugger on its host's loopback at this port + R; None for no debugger.
        debug_waits: Ranks begin when a debugger is attached.
        elastic: Limits for launchers whose `run` restarts ranks itself.
    """

    command: tuple[str, ...]
    hosts: Mapping[str, tuple[int, ...]]
    arguments: tuple[str, ...] = ()
    names_local_rank: bool = False
    node: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    exports: Mapping[str, str] = field(default_factory=dict)
    device_variable: str | None = None
    folder: str = "."
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    secret: str = field(default_factory=secrets.token_hex, repr=False)
    bind_cores: bool = False
    cores: tuple[int, ...] | None = None
    grace_s: float = DEFAULT_GRACE_S
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S
    hang_timeout_s: float = 0.0
    log_dir: str | None = None
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    venv_script: str | None = None
    debug_port: int | None = None
    debug_waits: bool = False
    elastic: ElasticHosts = ElasticHosts()

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return sum(map(len, self.hosts.values()))

    def first_rank(self, number: int) -> int:
        """Return the first rank of a host.

        Args:
            number: Number of the host, from 0.

        Returns:
            The rank.
        """
        return sum(len(slots) for slots in tuple(self.hosts.values())[:number])

    def to_json(self) -> str:
        """Return the job as one line of JSON. It contains the secret: pass it to the job's own processes only."""
        return json.dumps(asdict(self) | {"hosts": list(self.hosts.items())})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Parse the line of `to_json`.

        Args:
            text: The line.

        Returns:
            An equal job.
        """
        tree = json.loads(text)
        for name in ("command", "arguments", "cores", "launcher_args"):
            tree[name] = None if tree[name] is None else tuple(tree[name])
        sizes = tree["elastic"]["sizes"]
        tree["elastic"] = ElasticHosts(**tree["elastic"] | {"sizes": None if sizes is None else tuple(sizes)})
        return cls(**tree | {"hosts": {host: tuple(slots) for host, slots in tree["hosts"]}})


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The ranks of a job on one host, where they join, and how long a launcher waits for them.

    Attributes:
        job_id: See `Job`.
        ranks: Processes of this host, by local rank.
        master_addr: Host where ranks find each other.
        master_port: TCP port there.
        grace_s: See `Job`.
        stop_timeout_s: See `Job`.
        log_dir: See `Job`.
        hang_timeout_s: See `Job`.
    """

    job_id: str
    ranks: tuple[RankSpec, ...]
    master_addr: str
    master_port: int
    grace_s: float = DEFAULT_GRACE_S
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S
    log_dir: Path | None = None
    hang_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        code: 0 only when every rank exited with 0, else that of the first rank that failed: its exit code, or 128 + N
            when signal N ended it.
        cause: Sentence for a code that is not 0.
        killed: Ranks that a signal had ended before the others were asked to end.
        was_asked: The job ended because of a signal that was passed on.
    """

    code: int
    cause: str = ""
    killed: int = 0
    was_asked: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler has given the job that this process belongs to.

    Attributes:
        hosts: Its hosts, in the order of their ranks.
        ranks_per_host: Ranks that the job asked for on each host, None where it named no number.
    """

    hosts: tuple[str, ...]
    ranks_per_host: int | None = None


def noop() -> None:
    """Do nothing: the poll callback of callers that have none."""


class Launcher(ABC):
    """A way to start ranks and to wait until the last has ended."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 1)
    """Version of this contract. Plugins state the one they were written for; majors must agree."""
    name: ClassVar[str]
    """The entry point's name."""
    restarts_itself: ClassVar[bool] = False
    """Whether `run` starts ranks again, as `job.elastic` says; for others a job is run again as a whole."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether ranks could be started this way here. Starts nothing."""

    @classmethod
    def allocation(cls, environment: Mapping[str, str]) -> Allocation | None:
        """Return the hosts where ranks run unless the command names others.

        Args:
            environment: Variables of this process.

        Returns:
            Hosts of the scheduler's job around this process. None, the default, where there is none: ranks run here.

        Raises:
            LaunchError: There is such a job, and its hosts cannot be found.
        """
        return None

    def plan(self, job: Job) -> LaunchPlan:
        """Return the processes that `run` would start on this machine, for `polyaccel run --dry-run`.

        Args:
            job: What runs where.

        Returns:
            The plan.

        Raises:
            LaunchError: The job cannot be started this way. The default raises it always.
        """
        raise LaunchError(
            f"the launcher {self.name!r} does not say beforehand what it starts", hint="leave --dry-run out"
        )

    def remote_command(self, job: Job, host: str, command: tuple[str, ...]) -> tuple[str, ...] | None:
        """Wrap a command so that it runs on a host of the job, in its folder.

        Args:
            job: What runs where.
            host: One of its hosts.
            command: Program and arguments for that host.

        Returns:
            A command for this machine that passes input and output through and ends with `command`. None, the default,
            where only ranks are started on other hosts.
        """
        return None

    @abstractmethod
    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        """Start the ranks and block until the last has ended.

        The reason of a failure is written to standard error, with the rank's number. When this returns or raises, no
        process of the job is left.

        Args:
            job: What runs where.
            look: Called while the job runs, at least when a child process of this one has ended.

        Returns:
            How the job ended.

        Raises:
            LaunchError: A rank cannot be started.
        """
