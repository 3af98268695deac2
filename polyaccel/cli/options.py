"""The options of `polyaccel run` for what runs on which hosts, and how a job lives and ends.

Options are spelled with dashes, and as DeepSpeed spells them, with underscores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from polyaccel.cli.parser import non_negative, port, port_or_auto, whole_number
from polyaccel.launch.affinity import parse_cpulist
from polyaccel.launch.base import DEFAULT_GRACE_S, DEFAULT_STOP_TIMEOUT_S
from polyaccel.launch.hosts import MOST_SLOTS

DEBUG_PORT = 5678
"""Where debuggers of Python look."""


def add_options(parser: argparse.ArgumentParser, *, with_script: bool = True) -> None:
    """Add the options and, unless the verb has its own program, the script and its arguments."""

    def add(*names: str, **how: object) -> None:
        dashed = [name.replace("_", "-") for name in names]
        parser.add_argument(*dict.fromkeys([*dashed, *names]), **how)  # type: ignore[arg-type]

    seconds, hosts = non_negative("a number of seconds"), whole_number("a number of hosts", 1)
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
        type=rank_count,
        metavar="N|auto",
        help="ranks on each host; auto (the default) is one a slot, or here one a device, or on a machine without any, "
        "one a NUMA node",
    )
    add("--master_addr", metavar="ADDRESS", help="address of the rendezvous, on the first host (default: its name)")
    add("--master_port", type=_port, metavar="P|auto", help="the port there; auto (the default) or 0 picks a free one")
    add("--node_rank", type=int, metavar="N", help="this host's number: the command is given on every host")
    add("--no_ssh", action="store_true", help="as with --node-rank; no other host is reached from here")
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
        "--grace-period",
        type=seconds,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL for the other ranks, when one failed (default: %(default)g)",
    )
    add(
        "--stop_timeout",
        type=seconds,
        default=DEFAULT_STOP_TIMEOUT_S,
        metavar="S",
        help="seconds that a rank may be stopped (SIGSTOP) until the job ends; 0 for ever (default: %(default)g)",
    )
    add(
        "--hang_timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds without a step of any rank until the job ends, with each one's stack; 0 (the default) for ever",
    )
    add(
        "--log_dir",
        "--enable_each_rank_log",
        type=_folder,
        metavar="DIR",
        help="also write each rank's output to DIR/rank_N.log, at its end, and all that is shown to DIR/all.log, each "
        "line with its rank (DIR/host_N.log where each host is given the command)",
    )
    add(
        "--restarts",
        "--max_restarts",
        type=whole_number("a number of restarts"),
        metavar="N",
        help="start the ranks again when one fails, at most N times, and keep replicas in memory for them meanwhile "
        '("checkpoint.in_memory" in the config); not when the job was asked to end by a signal (default: 0, and 3 with '
        "--elastic-training)",
    )
    add(
        "--elastic",
        type=rank_count,
        metavar="MIN",
        help="on this machine a restart has one rank fewer for each that a signal killed, but not fewer than MIN; "
        "with --nproc auto as many as there are devices then, and only as many as elasticity in the config allows",
    )
    add(
        "--elastic_training",
        action="store_true",
        help="hosts may come and go: the command is given on each, with one --master-addr and --master-port "
        "(--launcher torchelastic)",
    )
    add("--min_elastic_nodes", type=hosts, metavar="N", help="with it: the fewest hosts (default: 1)")
    add("--max_elastic_nodes", type=hosts, metavar="N", help="with it: the most hosts (default: the fewest)")
    add(
        "--elastic_config",
        type=Path,
        metavar="FILE",
        help="the config whose section elasticity sets how many ranks can train (default: the script's own "
        "--deepspeed_config)",
    )
    add(
        "--debugpy",
        nargs="?",
        const=DEBUG_PORT,
        type=port,
        metavar="PORT",
        help="let each rank listen for a debugger on PORT plus its number, on its host's loopback (without PORT: "
        f"{DEBUG_PORT}); needs the package debugpy",
    )
    add("--wait", action="store_true", help="with --debugpy: ranks begin when a debugger is there")
    add(
        "--save_pid",
        action="store_const",
        const=".polyaccel",
        help="keep the launcher's process id in a file, which it names, until it ends",
    )
    add("--dry_run", action="store_true", help="show what would be started, and start nothing")
    if not with_script:
        return
    parser.add_argument("script", help="the Python file (or, with --module, module) that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on to it")


def rank_count(text: str) -> int | None:
    """The value of --nproc, None for auto. Raises argparse.ArgumentTypeError."""
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_SLOTS:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is neither a number of ranks from 1 to {MOST_SLOTS} nor auto")
    return int(text)


def _folder(text: str) -> Path | None:
    return None if text == "None" else Path(text)  # what programs that start this one write for no folder


def _port(text: str) -> int | None:
    if text in ("auto", "0"):
        return None
    return port_or_auto(text)


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(parse_cpulist(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of CPUs, as 0-3,8 is") from error
