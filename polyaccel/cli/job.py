"""From the options of `polyaccel run` to the job that they describe."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.launch.base import JOB_ID, Job, Launcher
from polyaccel.launch.environment_file import read_environment
from polyaccel.launch.hosts import (
    Hosts,
    address_of,
    excluded,
    first_hosts,
    first_slots,
    included,
    is_here,
    listed_hosts,
    read_hostfile,
)
from polyaccel.launch.program import check_debugger, python_command
from polyaccel.registry import PluginGroup, load_plugin

ENVIRONMENT_FILE = ".polyaccel_env"
"""In the home folder and in this one: variables that ranks on other hosts get."""
DEFAULT_PORT = 29500
"""The port of the rendezvous where each host is given the command; a free port elsewhere."""
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "POLYACCEL_", "DS_", "HF_", "WANDB_")
_OF_A_PROCESS = (JOB_ID, SECRET_VARIABLE, "POLYACCEL_READY_FD")
_THIS_HOST = "localhost"


def job_of(
    args: argparse.Namespace,
    environment: Mapping[str, str],
    count_ranks: Callable[[], int],
    *,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Return the job that the options describe; `variables` None: other hosts read files `ENVIRONMENT_FILE`."""
    hosts = choose_hosts(args, count_ranks)
    node = _node(args, hosts)
    given = {**(variables or {}), **dict(_exported(args.export, environment))}
    if is_far(hosts, node, force=args.force_multi):
        of_files = variables_of_files(ENVIRONMENT_FILE, environment) if variables is None else {}
        given = {**_passed_on(environment), **of_files, **given}
    command = (args.script,) if args.no_python else python_command(args.script, module=args.module)
    if args.debugpy is not None:
        check_debugger(is_python=not args.no_python)
    elif args.wait:
        raise LaunchError("--wait is for a debugger, and none is asked for", hint="give --debugpy too, or leave it out")
    secret = environment.get(SECRET_VARIABLE)
    job = Job(
        command=command,
        arguments=tuple(args.arguments),
        hosts=hosts,
        node=node,
        master_addr=args.master_addr or (address_of(next(iter(hosts))) if node is not None else None),
        master_port=args.master_port or (DEFAULT_PORT if node is not None and len(hosts) > 1 else None),
        exports=given,
        device_variable=_device_variable() if args.include or args.exclude else None,
        folder=os.getcwd(),
        bind_cores=args.bind_cores or args.bind_core_list is not None,
        cores=args.bind_core_list,
        grace_s=args.grace_period,
        stop_timeout_s=args.stop_timeout,
        hang_timeout_s=args.hang_timeout,
        log_dir=None if args.log_dir is None else str(args.log_dir),
        launcher_args=tuple(_split(args.launcher_args)),
        ssh_port=args.ssh_port,
        venv_script=args.venv_script,
        debug_port=args.debugpy,
        debug_waits=args.wait,
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
        both = " and ".join([*named, "--ranks"][:2])
        raise LaunchError(f"{both} cannot be given together", hint="choose hosts and slots by one of them")
    if args.hosts is not None and args.hostfile is not None:
        raise LaunchError("--hosts and --hostfile cannot be given together", hint="name the hosts by one of them")
    if args.hosts is not None:
        hosts: Hosts = listed_hosts(args.hosts)
    elif args.hostfile is None:
        hosts = _default_hosts(args, count_ranks)
    else:
        hosts = read_hostfile(args.hostfile)
    if args.include is not None:
        hosts = included(hosts, args.include)
    if args.exclude is not None:
        hosts = excluded(hosts, args.exclude)
    if args.num_nodes is not None:
        hosts = first_hosts(hosts, args.num_nodes)
    return hosts if args.nproc is None else first_slots(hosts, args.nproc)


def _default_hosts(args: argparse.Namespace, count_ranks: Callable[[], int]) -> Hosts:
    """Where nothing names hosts: those of the scheduler's job that the launcher sees, otherwise this one."""
    found = None if args.launcher is None else load_launcher(args.launcher).allocation(os.environ)
    names, count = ((_THIS_HOST,), None) if found is None else (found.hosts, found.ranks_per_host)
    return dict.fromkeys(names, tuple(range(args.nproc or count or count_ranks())))


def load_launcher(name: str) -> type[Launcher]:
    """Return the launcher plugin called `name`. Raises what `load_plugin` does."""
    return load_plugin(PluginGroup.LAUNCHERS, name, Launcher, Launcher.API_VERSION)


def _node(args: argparse.Namespace, hosts: Hosts) -> int | None:
    if args.node_rank is None and not args.no_ssh:
        return None
    if args.node_rank is None and len(hosts) == 1:
        return 0
    if args.node_rank is None or not 0 <= args.node_rank < len(hosts):
        shown = "--no-ssh" if args.node_rank is None else f"--node-rank {args.node_rank}"
        hint = f"give each host its number, from --node-rank 0 to {len(hosts) - 1}"
        raise LaunchError(f"{shown}, and {len(hosts)} hosts", hint=hint, value=args.node_rank)
    return int(args.node_rank)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        hint = "write it as for a shell: quotes come in pairs"
        raise LaunchError(f"--launcher_args cannot be read: {error}", hint=hint, value=text) from error


def _exported(texts: list[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, mark, value = text.partition("=")
        if not name or (not mark and name not in environment):
            hint = "write --export NAME=VALUE, or --export NAME for a variable of this shell"
            raise LaunchError(f"--export {name}{mark}: the variable is not set", hint=hint, value=name)
        yield name, value if mark else environment[name]


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What other hosts get of this shell's variables."""
    from polyaccel.accelerators.detect import choose_accelerator  # may import torch

    prefixes = (*_EXPORTED, *choose_accelerator(None).exported_variables)
    return {
        name: value for name, value in environment.items() if name.startswith(prefixes) and name not in _OF_A_PROCESS
    }


def variables_of_files(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the files of that name in the home folder and in this one. Raises LaunchError."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys((Path(environment.get("HOME", "/")), Path.cwd())):
        file = folder / name
        if file.is_file():
            found |= read_environment(file, {**environment, **found})
    return found


def _device_variable() -> str | None:
    from polyaccel.accelerators.detect import choose_accelerator  # may import torch

    return choose_accelerator(None).visible_devices_variable
