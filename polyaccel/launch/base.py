"""The contract of a launcher plugin: `Launcher` runs a `Job`, which says what runs on which hosts; a `LaunchPlan` has
the process of every rank of one host.

Both are values: a test, or a dry run, reads them without starting a process, and a job travels to its hosts as JSON.
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
"""The variable with the id of the job that a process belongs to. Every process that a rank starts inherits it."""

DEFAULT_GRACE_S = 5.0
DEFAULT_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One process of the job: `command` run with `environment`, the whole of it and not additions.

    `cores` are the logical CPUs that the process is bound to; None leaves it where the launcher may run.
    """

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticHosts:
    """The numbers of hosts on which a job may run, from `least` to `most`, and how often its ranks are started again
    when one has failed; `sizes`, ascending, are the numbers of ranks that can train, None where all can."""

    least: int = 1
    most: int = 1
    restarts: int = 0
    sizes: tuple[int, ...] | None = None

    def largest(self, ranks: int) -> int:
        """The most of so many ranks that can train; 0 where none can."""
        return ranks if self.sizes is None else max((size for size in self.sizes if size <= ranks), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs where: every rank of every slot of `hosts`, numbered in their order, runs `command` and, after it,
    `arguments`; between the two stands `--local_rank=N` if `names_local_rank`.

    `node` is the number of this machine, where the command is given on every host; None leaves all to the launcher.
    Ranks find each other at `master_addr` and `master_port`; None leaves the choice to the launcher. `exports` are
    variables that ranks get beyond the environment of their host, and `device_variable`, if there is one, gets the
    numbers of the host's slots. `folder` is where ranks run. `job_id` is unique, and every process of the job finds it
    in POLYACCEL_JOB_ID; `secret` seals what ranks send each other (empty: nothing does).

    `launcher_args` are more options for the command that reaches other hosts, `ssh_port` is the one that their servers
    listen on, and a shell there reads `venv_script` first. Rank R listens for a debugger on its host's loopback at
    `debug_port` + R, and begins when there is one if it `debug_waits`; None lets none listen.

    `bind_cores` gives each rank's process its share of the cores, `cores` (None: all that may be used) says of which.
    After one rank failed the others get SIGTERM, and SIGKILL `grace_s` later. A stopped rank ends the job after
    `stop_timeout_s`; 0 lets it be stopped for ever. When no rank has made a step for `hang_timeout_s`, the job ends; 0
    lets it hang. `log_dir` gets one file a rank, and one of all; None keeps no files. `elastic` is for launchers whose
    `run` starts ranks again itself.
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
        """The first rank of the host of that number."""
        return sum(len(slots) for slots in tuple(self.hosts.values())[:number])

    def to_json(self) -> str:
        """The job as one line of JSON. It has the secret: hand it to the job's own processes only."""
        return json.dumps(asdict(self) | {"hosts": list(self.hosts.items())})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        tree = json.loads(text)
        for name in ("command", "arguments", "cores", "launcher_args"):
            tree[name] = None if tree[name] is None else tuple(tree[name])
        sizes = tree["elastic"]["sizes"]
        tree["elastic"] = ElasticHosts(**tree["elastic"] | {"sizes": None if sizes is None else tuple(sizes)})
        return cls(**tree | {"hosts": {host: tuple(slots) for host, slots in tree["hosts"]}})


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The ranks of a job on one host, where they meet, and how long a launcher waits for them.

    The fields that a `Job` has too mean the same here.
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
    """How a job ended: its exit `code`, and for one that is not 0 the `cause`, a sentence. `killed` counts the ranks
    that a signal had ended before the others were asked to end. `was_asked`: it ended of a signal that was passed
    on.

    The code is 0 only when every rank exited with 0, else that of the first rank that failed: its own exit code, or
    128 + N when signal N ended it.
    """

    code: int
    cause: str = ""
    killed: int = 0
    was_asked: bool = False


def noop() -> None:
    """Do nothing: the poll callback of callers that have none."""


class Launcher(ABC):
    """A way to start ranks and to stay with them until the last has ended."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)
    """Version of this contract. Plugins state the one they were written for; majors must agree."""
    name: ClassVar[str]
    """The entry point's name."""
    restarts_itself: ClassVar[bool] = False
    """Whether `run` starts ranks again, as `job.elastic` says; for others a job is run again as a whole."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether ranks could be started this way here. Starts nothing."""

    def plan(self, job: Job) -> LaunchPlan:
        """The processes that `run` would start on this machine, for people to read (`polyaccel run --dry-run`).

        Raises LaunchError for a job that cannot be started this way. As it is here, it plans nothing and says so.
        """
        raise LaunchError(
            f"the launcher {self.name!r} does not say beforehand what it starts", hint="leave --dry-run out"
        )

    def remote_command(self, job: Job, host: str, command: tuple[str, ...]) -> tuple[str, ...] | None:
        """A command that runs `command` on a host of the job, in its folder, with this command's input and output, and
        ends with it. As it is here None: nothing but ranks is started on other hosts."""
        return None

    @abstractmethod
    def run(self, job: Job, look: Callable[[], object] = noop) -> JobResult:
        """Start the ranks, wait for them, and tell how the job ended.

        The reason stands on standard error, with the rank's number. When this returns or raises, no process of the job
        is left. `look` is called while the job runs, at least when a process that is a child of this one has ended.
        Raises LaunchError when a rank cannot be started.
        """
