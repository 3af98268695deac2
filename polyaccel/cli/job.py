"""The options of `polyaccel run` that say what runs on which hosts, and the job that they describe.

Options are spelled with dashes, and as DeepSpeed spells them, with underscores.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.affinity import parse_cpulist
from polyaccel.launch.base import DEFAULT_GRACE_S, DEFAULT_STOP_TIMEOUT_S, JOB_ID, Job
from polyaccel.launch.hosts import (
    MOST_SLOTS,
    Hosts,
    excluded,
    first_hosts,
    first_slots,
    included,
    is_here,
    listed_hosts,
    read_hostfile,
)
from polyaccel.launch.program import python_command
from polyaccel.seal import SECRET_VARIABLE

ENVIRONMENT_FILE = ".polyaccel_env"
"""In the home folder and in this one: lines NAME=VALUE that ranks on other hosts get."""
DEFAULT_PORT = 29500
"""Where ranks meet whose hosts are given the command one by one; a free port elsewhere."""
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "POLYACCEL_", "DS_", "HF_", "WANDB_")
_OF_A_PROCESS = (JOB_ID, SECRET_VARIABLE, "POLYACCEL_ARRIVALS")
_THIS_HOST = "localhost"


def add_options(parser: argparse.ArgumentParser, *, with_script: bool = True) -> None:
    """Add the options and, unless the verb has a program of its own, the script and its arguments."""

    def add(*names: str, **how: object) -> None:
        dashed = [name.replace("_", "-") for name in names]
        parser.add_argument(*dict.fromkeys([*dashed, *names]), **how)  # type: ignore[arg-type]

    add("-H", "--hostfile", type=Path, metavar="FILE", help="lines `host slots=N`; without one, this machine")
    add("--hosts", metavar="HOST[:N],...", help="hosts in place of a hostfile's, with N slots each, or one: a:8,b:8")
    add("-i", "--include", metavar="HOST[:SLOTS]@...", help="use these alone: a@b:0,2-4")
    add("-e", "--exclude", metavar="HOST[:SLOTS]@...", help="leave these out")
    add("--num_nodes", "--nnodes", type=int, metavar="N", help="use the first N hosts")
    add(
        "-n",
        "--nproc",
        "--num_gpus",
        "--num_accelerators",
        type=_nproc,
        metavar="N|auto",
        help="ranks on each host; auto (the default) is one a slot, or here one a device, or on a machine without any, "
        "one a NUMA node",
    )
    add("--master_addr", metavar="ADDRESS", help="where the ranks meet, on the first host (default: its name)")
    add("--master_port", type=_port, metavar="P|auto", help="the port there; auto (the default) picks a free one")
    add("--node_rank", type=int, metavar="N", help="this host's number: the command is given on every host")
    add("--no_ssh", action="store_true", help="as --node-rank says; no other host is reached from here")
    add("--launcher", metavar="NAME", help="the plugin that starts the ranks (default: local, ssh for several hosts)")
    add("--launcher_args", default="", metavar="TEXT", help="more options of the command that the launcher uses")
    add("--force_multi", action="store_true", help="reach a single host too by the launcher for several")
    add("--ssh_port", type=_port, metavar="P", help="where the hosts' ssh servers listen")
    add("--venv_script", metavar="FILE", help="a shell script that hosts read before anything is started")
    add("--export", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for ranks on all hosts")
    add("--module", action="store_true", help="the script is a module's name, as with python -m")
    add("--no_python", action="store_true", help="the script is a program, not Python's")
    add(
        "--bind_cores",
        "--bind_cores_to_rank",
        action="store_true",
        help="bind each rank to its share of the cores, not only OMP_NUM_THREADS",
    )
    add("--bind_core_list", type=_cpus, metavar="CPUS", help="bind ranks to shares of these CPUs alone: 0-3,8")
    add(
        "--grace",
        type=_seconds,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL for the other ranks, when one failed (default: %(default)g)",
    )
    add(
        "--stop_timeout",
        type=_seconds,
        default=DEFAULT_STOP_TIMEOUT_S,
        metavar="S",
        help="seconds that a rank may be stopped (SIGSTOP) until the job ends; 0 for ever (default: %(default)g)",
    )
    add(
        "--hang_timeout",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="seconds without a step of any rank until the job ends, with each one's stack; 0 (the default) for ever",
    )
    add(
        "--log_dir",
        "--enable_each_rank_log",
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank_N.log, at its end",
    )
    add(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start the ranks again when one fails, at most N times, and keep replicas in memory for them meanwhile "
        '("checkpoint.replica" in the config); not when the job was asked to end by a signal (default: %(default)s)',
    )
    add(
        "--elastic",
        type=_nproc,
        metavar="MIN",
        help="on this machine a restart has one rank fewer for each that a signal killed, but not fewer than MIN; "
        "with --nproc auto as many as there are devices then",
    )
    add("--dry_run", action="store_true", help="show what would be started, and start nothing")
    if not with_script:
        return
    parser.add_argument("script", help="the Python file (or, with --module, module) that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on to it")


def job_of(args: argparse.Namespace, environment: Mapping[str, str], count_ranks: Callable[[], int]) -> Job:
    """The job that the options describe. Raises LaunchError, naming the option or the file's line."""
    hosts = choose_hosts(args, count_ranks)
    node = _node(args, hosts)
    given = dict(_exported(args.export, environment))
    if is_far(hosts, node, force=args.force_multi):
        given = {**_passed_on(environment), **_of_files(environment), **given}
    command = (args.script,) if args.no_python else python_command(args.script, module=args.module)
    secret = environment.get(SECRET_VARIABLE)
    job = Job(
        command=command,
        arguments=tuple(args.arguments),
        hosts=hosts,
        node=node,
        master_addr=args.master_addr or (next(iter(hosts)) if node is not None else None),
        master_port=args.master_port or (DEFAULT_PORT if node is not None and len(hosts) > 1 else None),
        exports=given,
        device_variable=_device_variable() if args.include or args.exclude else None,
        folder=os.getcwd(),
        bind_cores=args.bind_cores or args.bind_core_list is not None,
        cores=args.bind_core_list,
        grace_s=args.grace,
        stop_timeout_s=args.stop_timeout,
        hang_timeout_s=args.hang_timeout,
        log_dir=None if args.log_dir is None else str(args.log_dir),
        launcher_args=tuple(shlex.split(args.launcher_args)),
        ssh_port=args.ssh_port,
        venv_script=args.venv_script,
    )
    if node is not None and len(hosts) > 1:  # every host's command would draw another one
        secret = secret or ""
    return job if secret is None else replace(job, secret=secret)


def is_far(hosts: Hosts, node: int | None, *, force: bool) -> bool:
    """Whether ranks are started on other hosts from here; `force` reaches this one like another."""
    return node is None and (force or len(hosts) > 1 or not is_here(next(iter(hosts))))


def choose_hosts(args: argparse.Namespace, count_ranks: Callable[[], int]) -> Hosts:
    """The hosts and slots that the options ask for; `count_ranks` gives those of this machine. Raises LaunchError."""
    named = [
        option
        for option, value in (("--include", args.include), ("--exclude", args.exclude), ("--num-nodes", args.num_nodes))
        if value is not None
    ]
    if len(named) > 1 or (args.nproc is not None and (args.include or args.exclude)):
        both = " and ".join([*named, "--nproc"][:2])
        raise LaunchError(f"{both} cannot be given together", cure="choose hosts and slots by one of them")
    if args.hosts is not None and args.hostfile is not None:
        raise LaunchError("--hosts and --hostfile cannot be given together", cure="name the hosts by one of them")
    if args.hosts is not None:
        hosts: Hosts = listed_hosts(args.hosts)
    elif args.hostfile is None:
        hosts = {_THIS_HOST: tuple(range(args.nproc or count_ranks()))}
    else:
        hosts = read_hostfile(args.hostfile)
    if args.include is not None:
        hosts = included(hosts, args.include)
    if args.exclude is not None:
        hosts = excluded(hosts, args.exclude)
    if args.num_nodes is not None:
        hosts = first_hosts(hosts, args.num_nodes)
    return hosts if args.nproc is None else first_slots(hosts, args.nproc)


def _node(args: argparse.Namespace, hosts: Hosts) -> int | None:
    if args.node_rank is None and not args.no_ssh:
        return None
    if args.node_rank is None and len(hosts) == 1:
        return 0
    if args.node_rank is None or not 0 <= args.node_rank < len(hosts):
        shown = "--no-ssh" if args.node_rank is None else f"--node-rank {args.node_rank}"
        cure = f"give each host its number, from --node-rank 0 to {len(hosts) - 1}"
        raise LaunchError(f"{shown}, and {len(hosts)} hosts", cure=cure, value=args.node_rank)
    return int(args.node_rank)


def _exported(texts: list[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, mark, value = text.partition("=")
        if not name or (not mark and name not in environment):
            cure = "write --export NAME=VALUE, or --export NAME for a variable of this shell"
            raise LaunchError(f"--export {text}: there is no such variable", cure=cure, value=text)
        yield name, value if mark else environment[name]


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What other hosts get of this shell's variables."""
    from polyaccel.accelerators.detect import choose_accelerator  # may import torch

    prefixes = (*_EXPORTED, *choose_accelerator(None).exported_variables)
    return {
        name: value for name, value in environment.items() if name.startswith(prefixes) and name not in _OF_A_PROCESS
    }


def _of_files(environment: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in dict.fromkeys((Path(environment.get("HOME", "/")), Path.cwd())):
        file = folder / ENVIRONMENT_FILE
        if file.is_file():
            found |= read_environment(file)
    return found


def read_environment(file: Path) -> dict[str, str]:
    """The variables of a file of lines NAME=VALUE; empty lines and comments are passed over. Raises LaunchError."""
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        name, mark, value = line.strip().partition("=")
        if name and not name.startswith("#"):
            if not mark:
                raise LaunchError(f"{file}, line {number}: {line!r} is no line NAME=VALUE", cure="write NAME=VALUE")
            found[name.strip()] = value
    return found


def _device_variable() -> str | None:
    from polyaccel.accelerators.detect import choose_accelerator  # may import torch

    return choose_accelerator(None).visible_devices_variable


def _nproc(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_SLOTS:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is neither a number of ranks from 1 to {MOST_SLOTS} nor auto")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of restarts")
    return int(text)


def _port(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a port from 1 to 65535 nor auto")
    return int(text)


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(parse_cpulist(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of CPUs such as 0-3,8") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
