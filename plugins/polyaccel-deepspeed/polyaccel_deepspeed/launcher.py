"""The command `deepspeed`: hosts and devices as DeepSpeed's launcher names them, ranks as `polyaccel run` starts them.

polyaccel reaches no other host. A job over several is started by the same command on each of them, with `--no_ssh` and
its number in `--node_rank`; the ranks then meet at `--master_addr`.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.base import LaunchPlan
from polyaccel.seal import SECRET_VARIABLE

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file of variables that DeepSpeed's launcher passes on to other hosts; clients write it."""

Hosts = dict[str, tuple[int, ...]]
"""The devices to use on each host, by number; on a CPU each number is a rank."""
_DEFAULT_HOSTFILE = "/job/hostfile"
_DEFAULT_PORT = 29500
_HOST_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
_HERE = ("localhost", "127.0.0.1")


def launch_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of DeepSpeed 0.19.8's launcher."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="start the ranks of a training script", allow_abbrev=False
    )
    parser.add_argument(
        "-H", "--hostfile", default=_DEFAULT_HOSTFILE, help="lines `host slots=N` (default: %(default)s)"
    )
    parser.add_argument("-i", "--include", default="", help="hosts and devices to use: host1@host2:0,2")
    parser.add_argument("-e", "--exclude", default="", help="hosts and devices to leave out, written likewise")
    parser.add_argument("--num_nodes", type=int, default=-1, help="use the first hosts of the file only")
    parser.add_argument("--num_gpus", "--num_accelerators", dest="num_gpus", type=int, default=-1, help="of each host")
    parser.add_argument("--master_port", type=int, default=None, help="where ranks meet; on one host, a free port")
    parser.add_argument("--master_addr", default="", help="of the first host, where there are several")
    parser.add_argument("--node_rank", type=int, default=-1, help="with --no_ssh: the number of this host, from 0")
    parser.add_argument("--no_ssh", action="store_true", help="this command is given on every host")
    parser.add_argument("--module", action="store_true", help="the script is a module's name, as with python -m")
    parser.add_argument("--no_python", action="store_true", help="the script is a program, not Python's")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("--enable_each_rank_log", default=None, metavar="DIR", help="write each rank's output there")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="bind each rank to its share of the cores")
    parser.add_argument("--autotuning", default="", help="not available")
    parser.add_argument("--bind_core_list", default=None, help="not available")
    for name in ("launcher", "launcher_args", "ssh_port", "venv_script", "log_level"):
        parser.add_argument(f"--{name}", default="", help="accepted: no other host is reached from here")
    for name in ("no_ssh_check", "force_multi", "save_pid"):
        parser.add_argument(f"--{name}", action="store_true", help="accepted")
    parser.add_argument("-q", "--quiet", action="store_true", help="accepted")
    parser.add_argument("user_script", help="the Python file (or, with --module, module) that every rank runs")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="passed on to it")
    return parser.parse_args(argv)


def launch_ranks(given: argparse.Namespace) -> int:
    """Start the ranks of this host and wait for them. Returns the job's exit code. Raises LaunchError."""
    from polyaccel.cli.run import choose_launcher

    return choose_launcher("local").run(plan(given))


def plan(given: argparse.Namespace) -> LaunchPlan:
    """What the ranks of this host are to do. Raises LaunchError."""
    from polyaccel.launch.local import plan_local
    from polyaccel.launch.program import python_command

    for name, cure in (
        ("autotuning", "leave it out; `polyaccel plan` compares settings"),
        ("bind_core_list", "leave it out, or use --bind_cores_to_rank"),
    ):
        if getattr(given, name):
            raise LaunchError(f"--{name} {getattr(given, name)}: polyaccel has no such thing", cure=cure)
    hosts = choose_hosts(given)
    number = _this_host(hosts, given)
    slots = tuple(hosts.values())[number]
    script = [given.user_script, *given.user_args]
    command = script if given.no_python else python_command(script[0], script[1:], module=given.module)
    made = plan_local(
        command,
        nproc=len(slots),
        environment=_environment(given, slots),
        master_port=given.master_port if len(hosts) == 1 else None,
        bind_cores=given.bind_cores_to_rank,
        log_dir=Path(given.enable_each_rank_log) if given.enable_each_rank_log else None,
    )
    if len(hosts) > 1:
        made = _of_several(made, hosts, number, given)
    ranks = made.ranks
    if not given.no_local_rank:
        at = len(command) - len(given.user_args)
        ranks = tuple(
            replace(one, command=(*one.command[:at], f"--local_rank={one.local_rank}", *one.command[at:]))
            for one in ranks
        )
    return replace(made, ranks=ranks)


def _of_several(made: LaunchPlan, hosts: Hosts, number: int, given: argparse.Namespace) -> LaunchPlan:
    """`made`, the ranks of one host, as those of host `number` among several. What they send is sealed if the user has
    given all hosts one secret: each launcher would draw its own."""
    meeting = given.master_addr or next(iter(hosts))
    port = given.master_port or _DEFAULT_PORT
    before = sum(len(each) for each in tuple(hosts.values())[:number])
    shared = {
        "WORLD_SIZE": str(sum(map(len, hosts.values()))),
        "MASTER_ADDR": meeting,
        "MASTER_PORT": str(port),
        "CROSS_RANK": str(number),
        "CROSS_SIZE": str(len(hosts)),
    }
    ranks = []
    for one in made.ranks:
        environment = {**one.environment, **shared, "RANK": str(before + one.rank)}
        if SECRET_VARIABLE not in os.environ:
            del environment[SECRET_VARIABLE]
        ranks.append(replace(one, rank=before + one.rank, environment=environment))
    return replace(made, ranks=tuple(ranks), master_addr=meeting, master_port=port)


def choose_hosts(given: argparse.Namespace) -> Hosts:
    """The hosts and devices that the options ask for. Raises LaunchError."""
    chosen = [f"--{name}" for name in ("include", "exclude") if getattr(given, name)]
    counted = [f"--{name}" for name in ("num_nodes", "num_gpus") if getattr(given, name) >= 0]
    if len(chosen) == 2 or (chosen and counted):
        named = " and ".join([*chosen, *counted][:2])
        raise LaunchError(f"{named} cannot be given together", cure="choose devices by one of them")
    for name in ("num_nodes", "num_gpus"):
        if getattr(given, name) == 0:
            raise LaunchError(f"--{name} 0: there would be no rank", cure="write 1 or more, or leave it out")
    hosts = _listed(given)
    if given.include:
        hosts = _only(hosts, _filter(given.include, hosts, "include"))
    elif given.exclude:
        out = _filter(given.exclude, hosts, "exclude")
        hosts = _only(hosts, {host: tuple(set(slots) - set(out.get(host, ()))) for host, slots in hosts.items()})
    if given.num_nodes > len(hosts):
        cure = f"name them in a hostfile, with lines `host slots=N` (--hostfile, by default {_DEFAULT_HOSTFILE})"
        raise LaunchError(f"--num_nodes {given.num_nodes}, but only {len(hosts)} hosts are known", cure=cure)
    if given.num_nodes > 0:
        hosts = dict(list(hosts.items())[: given.num_nodes])
    if given.num_gpus > 0:
        hosts = {host: tuple(range(given.num_gpus)) for host in hosts}
    if not hosts:
        raise LaunchError("no host and no device is left", cure="leave --exclude out, or exclude less")
    return hosts


def _listed(given: argparse.Namespace) -> Hosts:
    """The hosts of the file, or this one with as many devices as it has, or as the options name."""
    file = Path(given.hostfile)
    if file.is_file():
        return read_hostfile(file)
    if given.hostfile != _DEFAULT_HOSTFILE:
        print(f"deepspeed: there is no hostfile {file}: ranks are started on this machine only", file=sys.stderr)
    if given.num_gpus > 0:
        return {"localhost": tuple(range(given.num_gpus))}
    from polyaccel.cli.run import count_ranks

    named = [int(slot) for slot in re.findall(r"\d+", given.include.partition(":")[2])]
    return {"localhost": tuple(range(max(count_ranks(), 1 + max(named, default=0))))}


def read_hostfile(file: Path) -> Hosts:
    """The hosts of a file of lines `host slots=N`; empty lines and comments are passed over. Raises LaunchError."""
    hosts: Hosts = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        found = _HOST_LINE.fullmatch(text)
        if text and (found is None or found[1] in hosts):
            what = "is no line `host slots=N`" if found is None else "names its host a second time"
            raise LaunchError(f"{file}, line {number}: {text!r} {what}", cure="write each host once, as `host slots=2`")
        if found is not None:
            hosts[found[1]] = tuple(range(int(found[2])))
    if not hosts:
        raise LaunchError(f"{file} names no host", cure="write lines `host slots=2`, or leave --hostfile out")
    return hosts


def _filter(text: str, hosts: Mapping[str, tuple[int, ...]], option: str) -> Hosts:
    """`host1@host2:0,2` as hosts and devices, all devices of a host without numbers. Raises LaunchError."""
    found: Hosts = {}
    for part in text.split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in hosts:
            cure = f"there are {', '.join(hosts)}; the hostfile names others"
            raise LaunchError(f"--{option} {text}: there is no host {host!r}", cure=cure, value=text)
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            cure = f"write {host}:0,1"
            raise LaunchError(f"--{option} {text}: {numbers!r} are no numbers of devices", cure=cure, value=text)
        slots = tuple(sorted({int(one) for one in numbers.split(",")})) if colon else hosts[host]
        unknown = sorted(set(slots) - set(hosts[host]))
        if unknown:
            cure = f"its devices are 0 to {len(hosts[host]) - 1}"
            raise LaunchError(f"--{option} {text}: {host} has no device {unknown[0]}", cure=cure, value=text)
        found[host] = slots
    return found


def _only(hosts: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Hosts:
    """Of `hosts`, in their order, those with anything `wanted`."""
    return {host: tuple(sorted(wanted[host])) for host in hosts if wanted.get(host)}


def _this_host(hosts: Hosts, given: argparse.Namespace) -> int:
    """The place of this machine among `hosts`. Raises LaunchError where its ranks cannot be started from here."""
    if given.no_ssh and len(hosts) > 1:
        if not 0 <= given.node_rank < len(hosts):
            cure = f"give each host its number, from 0 to {len(hosts) - 1}"
            raise LaunchError(f"--no_ssh with --node_rank {given.node_rank}", cure=cure, value=given.node_rank)
        return int(given.node_rank)
    names = {*_HERE, socket.gethostname(), socket.gethostname().partition(".")[0]}
    elsewhere = [host for host in hosts if host not in names]
    if len(hosts) > 1 or (elsewhere and not given.no_ssh):
        shown = ", ".join(elsewhere or hosts)
        raise LaunchError(
            f"{shown}: polyaccel starts no processes on other hosts",
            cure="give this command on each host with --no_ssh, --node_rank=N and --master_addr; or use mpirun or srun",
            value=shown,
        )
    return 0


def _environment(given: argparse.Namespace, slots: tuple[int, ...]) -> dict[str, str]:
    """The variables of every rank, with those that show it the chosen devices only, where they were chosen."""
    found = dict(os.environ)
    if given.include or given.exclude:
        from polyaccel.accelerators.detect import choose_accelerator

        variable = choose_accelerator(None).visible_devices_variable
        if variable is not None:
            found[variable] = ",".join(map(str, slots))
    return found
