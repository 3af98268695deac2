"""The contract of a launcher plugin: `Launcher` runs a `LaunchPlan`, which describes the process of every rank
beforehand.

A plan is a value: a test, or a dry run, reads it without starting a process.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from polyaccel.types import Probe

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


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A job: its ranks, where they meet, and how long a launcher waits for them.

    `job_id` is unique, and every process of the job finds it in POLYACCEL_JOB_ID. After one rank failed the others get
    SIGTERM, and SIGKILL `grace_s` later. A stopped rank ends the job after `stop_timeout_s`; 0 lets it be stopped for
    ever. `log_dir` gets one file a rank; None keeps no files.
    """

    job_id: str
    ranks: tuple[RankSpec, ...]
    master_addr: str
    master_port: int
    grace_s: float = DEFAULT_GRACE_S
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S
    log_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: its exit `code`, and for one that is not 0 the `cause`, a sentence. `killed` counts the ranks
    that a signal had ended before the others were asked to end. `was_asked`: it ended of a signal that was passed
    on."""

    code: int
    cause: str = ""
    killed: int = 0
    was_asked: bool = False


def _nothing() -> None:
    pass


class Launcher(ABC):
    """A way to start ranks and to stay with them until the last has ended."""

    API_VERSION: ClassVar[tuple[int, int]] = (1, 1)
    """Version of this contract. Plugins state the one they were written for; majors must agree."""
    name: ClassVar[str]
    """The entry point's name."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether ranks could be started this way here. Starts nothing."""

    @abstractmethod
    def run(self, plan: LaunchPlan) -> int:
        """Start the ranks, wait for them, and return the exit code of the job.

        The code is 0 only when every rank exited with 0, else that of the first rank that failed: its own exit code, or
        128 + N when signal N ended it. The reason stands on standard error, with the rank's number. When this returns
        or raises, no process of the job is left. Raises LaunchError when a rank cannot be started.
        """

    def run_to_end(self, plan: LaunchPlan, look: Callable[[], object] = _nothing) -> JobEnd:
        """As `run`, and how the job ended, for whoever starts it again. `look` is called while it runs, at least when a
        process that is a child of this one has ended. New in version 1.1; what a launcher without a method of its own
        knows is the code."""
        code = self.run(plan)
        names = {128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        return JobEnd(code, f"the job ended with code {code}", was_asked=code in names)
