"""The contract of a launcher plugin: `Launcher` runs a `LaunchPlan`, which describes the process of every rank
beforehand.

A plan is a value: a test, or a dry run, reads it without starting a process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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


class Launcher(ABC):
    """A way to start ranks and to stay with them until the last has ended."""

    API_VERSION: ClassVar[tuple[int, int]] = (1, 0)
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
