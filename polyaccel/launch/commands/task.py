"""A task of a command that starts ranks, which becomes a rank: `python -m polyaccel.launch.commands.task VARIABLE`.

The command has numbered its tasks in VARIABLE, and passes on the job in POLYACCEL_JOB. The task finds its place among
the job's hosts, and continues as the rank's program with the environment that every launcher of ours gives.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job
from polyaccel.launch.plan import plan_host
from polyaccel.launch.process import end_with_parent

JOB_VARIABLE = "POLYACCEL_JOB"


def main(variable: str) -> None:
    """Become the rank. Raises LaunchError where this is not a task of a job."""
    text, number = os.environ.pop(JOB_VARIABLE, ""), os.environ.get(variable, "")
    if not text or not number.isdecimal():
        missing = JOB_VARIABLE if not text else variable
        raise LaunchError(f"{missing} is not set: this is not a task of a job of polyaccel run", value=missing)
    job = Job.from_json(text)
    rank, host = int(number), 0
    while rank >= job.first_rank(host + 1) and host + 1 < len(job.hosts):
        host += 1
    os.chdir(job.folder)
    spec = plan_host(replace(job, node=host), host).ranks[rank - job.first_rank(host)]
    if spec.cores is not None:
        os.sched_setaffinity(0, spec.cores)
    os.execvpe(spec.command[0], spec.command, dict(spec.environment))


if __name__ == "__main__":
    if (ask := end_with_parent(os.getppid())) is not None:
        ask()  # execve keeps the request: tasks of MPIs outlive the daemon of their host otherwise
    main(sys.argv[1])
