"""The command `deepspeed`: DeepSpeed's options and defaults, hosts and ranks as `polyaccel run` has them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job
from polyaccel_deepspeed.hosts import DEFAULT_HOSTFILE

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file of variables that DeepSpeed's launcher passes on to other hosts; clients write it."""
_ENVIRONMENT_VARIABLE = "DS_ENV_FILE"
_PID_SUFFIX = ".deepspeed"


def launch_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of DeepSpeed 0.19.8's launcher."""
    from polyaccel.cli.options import add_options
    from polyaccel.cli.parser import JobParser

    parser = JobParser(prog="deepspeed", description="start the ranks of a training script", allow_abbrev=False)
    add_options(parser)
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("--autotuning", default="", help="not available")
    parser.add_argument("--no_ssh_check", action="store_true", help="accepted")
    parser.add_argument("--log_level", default="info", help="accepted")
    parser.add_argument("-q", "--quiet", action="store_true", help="accepted")
    given = parser.parse_args(argv)
    given.save_pid = given.save_pid and _PID_SUFFIX
    return given


def launch_ranks(given: argparse.Namespace) -> int:
    """Start the job's ranks and wait for them. Returns the job's exit code. Raises LaunchError."""
    from polyaccel.cli.run import run_job

    return run_job(job(given), given)


def job(given: argparse.Namespace) -> Job:
    """What the options describe. Raises LaunchError."""
    from polyaccel.cli.job import job_of, read_environment
    from polyaccel.cli.run import count_ranks

    if given.autotuning:
        raise LaunchError(
            f"--autotuning {given.autotuning}: polyaccel has no such thing",
            cure="leave it out; `polyaccel plan` compares settings",
        )
    if given.hostfile is None and given.hosts is None and DEFAULT_HOSTFILE.is_file():
        given.hostfile = DEFAULT_HOSTFILE
    elif given.hostfile is not None and not given.hostfile.is_file():
        print(f"deepspeed: there is no hostfile {given.hostfile}: ranks are started on this machine", file=sys.stderr)
        given.hostfile = None
    named = [int(slot) for slot in re.findall(r"\d+", (given.include or "").partition(":")[2])]
    made = job_of(given, os.environ, lambda: max(count_ranks(), 1 + max(named, default=0)))
    exports: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        file = folder / os.environ.get(_ENVIRONMENT_VARIABLE, DEEPSPEED_ENVIRONMENT_NAME)
        if file.is_file():
            exports |= read_environment(file)
    return replace(made, exports={**exports, **made.exports}, names_local_rank=not given.no_local_rank)
