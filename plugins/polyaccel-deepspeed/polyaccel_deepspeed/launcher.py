"""The command `deepspeed`: DeepSpeed's options and defaults, hosts and ranks as `polyaccel run` has them."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job
from polyaccel_deepspeed.hosts import DEFAULT_HOSTFILE

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file of variables that DeepSpeed's launcher passes on to other hosts; clients write it."""
_ENVIRONMENT_VARIABLE = "DS_ENV_FILE"
_PID_SUFFIX = ".deepspeed"
BEST_FILE = "ds_config_optimal.json"
"""What DeepSpeed calls the best config, in `autotuning.results_dir`."""
_OPTION = "--autotuning"
_NAMES = ("--deepspeed_config", "--deepspeed")
_OPTIONS = (
    *("--hostfile", "--include", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators", "--master_port"),
    *("--master_addr", "--node_rank", "--launcher", "--launcher_args", "--module", "--no_python", "--no_local_rank"),
    *("--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--enable_each_rank_log", "--autotuning"),
    *("--bind_cores_to_rank", "--bind_core_list", "--ssh_port", "--venv_script", "--log_level", "--quiet"),
)
"""DeepSpeed's own, of which a beginning is enough."""
EXCLUDED = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}
"""Variables that other hosts do not get where the first one is set, for each host there has its own."""
DLTS_POD_ENV_PATH = "/dlts-runtime/env/pod.env"
"""Where a pod of DLTS has its variables; another place in the variable of the same name."""
_POD_VARIABLE = "DLTS_POD_ENV_PATH"
_POD_NAMES = ("FC_TASKROLE_NAME", "FC_TASK_INDEX")
_LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
"""DeepSpeed's, which are for several hosts: ranks of this one alone are started by its own launcher."""
_PROGRAM = "from polyaccel_deepspeed.commands import launch; raise SystemExit(launch())"


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of DeepSpeed 0.19.8's launcher."""
    from polyaccel.cli.options import add_options
    from polyaccel.cli.parser import JobParser

    parser = JobParser(prog="deepspeed", description="start the ranks of a training script", allow_abbrev=False)
    add_options(parser)
    parser.abbreviated = _OPTIONS
    parser.retype("--num_nodes", _count_of_hosts)
    parser.retype("--num_gpus", _count_of_ranks)
    for name in ("--include", "--exclude"):
        parser.retype(name, _filter)
    parser.retype("--launcher", str.lower)
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("--autotuning", choices=("tune", "run"), default="", help="find the best settings; and train")
    parser.add_argument("--no_ssh_check", action="store_true", help="accepted")
    parser.add_argument("--log_level", default="info", help="accepted")
    parser.add_argument("-q", "--quiet", action="store_true", help="accepted")
    return parser


def launch_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of DeepSpeed 0.19.8's launcher."""
    given = options_parser().parse_args(argv)
    given.save_pid = given.save_pid and _PID_SUFFIX
    given.words = list(sys.argv[1:] if argv is None else argv)
    return given


def launch_ranks(given: argparse.Namespace) -> int:
    """Start the job's ranks and wait for them, with `--autotuning` after a search for its best settings, or only that.
    Returns the job's exit code, 1 where no settings fit. Raises LaunchError."""
    from polyaccel.cli.job import is_far
    from polyaccel.cli.run import run_job

    made = job(given)
    if given.launcher in _LAUNCHERS and not is_far(dict(made.hosts), made.node, force=given.force_multi):
        given.launcher = None
    if given.autotuning:
        best = tune(given, given.words, made)
        if best is None or given.autotuning == "tune":
            return 0 if best is not None else 1
        named = config_of(given.arguments)
        words = (word.replace(named, str(best)) if word.endswith(named) else word for word in made.arguments)
        made = replace(made, arguments=tuple(words))
    return run_job(made, given)


def job(given: argparse.Namespace) -> Job:
    """What the options describe. Raises LaunchError."""
    from polyaccel.cli.job import is_far, job_of, variables_of_files
    from polyaccel.cli.run import count_ranks

    if given.hostfile is None and given.hosts is None and DEFAULT_HOSTFILE.is_file():
        given.hostfile = DEFAULT_HOSTFILE
    elif given.hostfile is not None and not given.hostfile.is_file():
        print(
            f"deepspeed: the hostfile {given.hostfile} does not exist: ranks are started on this machine",
            file=sys.stderr,
        )
        given.hostfile = None
    named = [int(slot) for slot in re.findall(r"\d+", (given.include or "").partition(":")[2])]
    variables = variables_of_files(os.environ.get(_ENVIRONMENT_VARIABLE, DEEPSPEED_ENVIRONMENT_NAME), os.environ)
    made = job_of(given, os.environ, lambda: max(count_ranks(), 1 + max(named, default=0)), variables=variables)
    exports = exports_of(made, os.environ, is_far=is_far(dict(made.hosts), made.node, force=given.force_multi))
    return replace(made, names_local_rank=not given.no_local_rank, exports=exports)


def exports_of(made: Job, environment: Mapping[str, str], *, is_far: bool) -> dict[str, str]:
    """Return the variables that ranks get as DeepSpeed gives them: those of the job, but those that a cluster's own
    settings replace; on other hosts this folder as a place of modules; and what a DLTS pod says of itself."""
    left_out = {name for switch, names in EXCLUDED.items() if switch in environment for name in names}
    found = {name: value for name, value in made.exports.items() if name not in left_out}
    if is_far:
        found["PYTHONPATH"] = ":".join(filter(None, (os.getcwd(), found.get("PYTHONPATH", ""))))
    file = Path(environment.get(_POD_VARIABLE, DLTS_POD_ENV_PATH))
    if file.is_file():
        found |= pod_variables(file.read_text(encoding="utf-8"))
    return found


def pod_variables(text: str) -> dict[str, str]:
    """Return the role and number of a task from the lines `export NAME=VALUE` of a DLTS pod."""
    lines = (line.strip().removeprefix("export ").partition("=") for line in text.splitlines())
    return {name: value for name, mark, value in lines if mark and name in _POD_NAMES}


def _count_of_hosts(text: str) -> int | None:
    """A number of hosts; those below 1 mean all."""
    return int(text) if int(text) > 0 else None


def _count_of_ranks(text: str) -> int | None:
    """A number of ranks on each host; those below 1 mean one for each device."""
    from polyaccel.cli.options import rank_count

    is_all = text.removeprefix("-").isdecimal() and int(text) < 1
    return None if is_all else rank_count(text)


def _filter(text: str) -> str | None:
    return text or None


def config_of(arguments: Sequence[str]) -> str:
    """The config that a script's arguments name. Raises LaunchError where they name none."""
    for name in _NAMES:
        for place, word in enumerate(arguments):
            option, mark, value = word.partition("=")
            found = value if mark else next(iter(arguments[place + 1 :]), "")
            if option == name and found and not found.startswith("-"):
                return found
    raise LaunchError(
        f"{_OPTION}, and no argument of the script names a config",
        hint=f"give the script {_NAMES[0]} FILE, or use polyaccel tune FILE",
    )


def without_autotuning(argv: Sequence[str]) -> list[str]:
    """The command's words without the first `--autotuning`, which is the launcher's."""
    words = list(argv)
    place = next((at for at, word in enumerate(words) if word.partition("=")[0] == _OPTION), len(words))
    return words[:place] + words[place + (1 if "=" in "".join(words[place : place + 1]) else 2) :]


def tune(given: argparse.Namespace, argv: Sequence[str], job: Job) -> Path | None:
    """Find the best settings of `job`, whose command had the words `argv`; the file of the best config, None where
    nothing fits. Raises PolyaccelError."""
    from polyaccel.planner.autotune import results
    from polyaccel.planner.autotune.tuned_job import TunedJob, tune_job
    from polyaccel_deepspeed.config import log_changes, normalise

    file = config_of(given.arguments)
    tree, changes = normalise(file)
    log_changes(changes)
    is_here = list(job.hosts) == ["localhost"]
    tuned = TunedJob(
        config_file=file,
        tree=tree,
        command=(sys.executable, "-c", _PROGRAM, *without_autotuning(argv)),
        world_size=job.world_size,
        where=("--nproc", str(job.world_size)) if is_here else None,
    )
    answer, folder = tune_job(tuned, {})
    if answer.best is None:
        return None
    return Path(shutil.copyfile(folder / results.BEST_FILE, folder / BEST_FILE))
