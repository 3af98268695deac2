"""The options of `polyaccel run` for what runs on which hosts, and how a job lives and ends.

The help has one spelling of each. The names of torchrun and DeepSpeed work too, as does an underscore for a dash.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from polyaccel.cli.argument_types import non_negative, port, port_or_auto, whole_number
from polyaccel.cli.parser import add_hidden_aliases
from polyaccel.launch.affinity import parse_cpulist
from polyaccel.launch.base import DEFAULT_GRACE_S, DEFAULT_STOP_TIMEOUT_S
from polyaccel.launch.hosts import MOST_SLOTS

DEBUG_PORT = 5678
"""Where debuggers of Python look."""


def add_options(parser: argparse.ArgumentParser, *, with_script: bool = True) -> None:
    """Add the options and, unless the verb has its own program, the script and its arguments."""
    _add_ranks(_Adder(parser.add_argument_group("ranks")))
    _add_hosts(_Adder(parser.add_argument_group("hosts")))
    _add_failures(_Adder(parser.add_argument_group("failures and restarts")))
    _add_elastic(_Adder(parser.add_argument_group("hosts that come and go")))
    _add_debugging(_Adder(parser.add_argument_group("output and debugging")))
    if not with_script:
        return
    parser.add_argument("script", help="the Python file, or with --module the module, that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


class _Adder:
    """Adds options to a group: each with one spelling in the help, and its other names without a line there."""

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group

    def __call__(self, *names: str, also: Sequence[str] = (), **how: object) -> None:
        """Add an option. Every name works with dashes and with underscores."""
        action = self._group.add_argument(*names, **how)  # type: ignore[arg-type]
        every = [name for name in (*names, *also) if name.startswith("--")]
        every += [f"--{name[2:].replace('-', '_')}" for name in every]
        add_hidden_aliases(self._group, action, set(every) - set(names))


def _add_ranks(add: _Adder) -> None:
    add(
        "-n",
        "--ranks",
        dest="nproc",
        also=("--nproc", "--nproc-per-node", "--num-gpus", "--num-accelerators"),
        type=rank_count,
        metavar="N|auto",
        help="ranks per host (default: slots in the hostfile, else devices, else NUMA nodes)",
    )
    add("--module", action="store_true", help="the script is a module's name, as with python -m")
    add("--no-python", action="store_true", help="the script is a program, not Python's")
    add(
        "--bind-cores",
        also=("--bind-cores-to-rank",),
        action="store_true",
        help="bind each rank to its share of the cores, not only OMP_NUM_THREADS",
    )
    add("--bind-core-list", type=_cpus, metavar="CPUS", help="bind ranks to shares of these CPUs alone: 0-3,8")
    add("--export", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for ranks on all hosts")


def _add_hosts(add: _Adder) -> None:
    add("-H", "--hostfile", type=Path, metavar="FILE", help="lines `host slots=N` (default: this machine)")
    add("--hosts", metavar="HOST[:N],...", help="hosts in place of a hostfile, with N slots each (default: 1): a:8,b:8")
    add("-i", "--include", metavar="HOST[:SLOTS]@...", help="use these alone: a@b:0,2-4")
    add("-e", "--exclude", metavar="HOST[:SLOTS]@...", help="leave these out")
    add("--num-nodes", also=("--nnodes",), type=int, metavar="N", help="use the first N hosts")
    add("--master-addr", metavar="ADDRESS", help="address of the rendezvous, on the first host (default: its name)")
    add("--master-port", type=_port, metavar="P|auto", help="port of the rendezvous (default: auto, a free one)")
    add("--node-rank", type=int, metavar="N", help="this host's number: the command is given on every host")
    add("--no-ssh", action="store_true", help="start only this host's ranks (needs --node-rank)")
    add("--launcher", metavar="NAME", help="plugin that starts the ranks (default: local, ssh for several hosts)")
    add("--launcher-args", default="", metavar="TEXT", help="more options of the command that the launcher uses")
    add("--force-multi", action="store_true", help="reach a single host too by the launcher for several")
    add("--ssh-port", type=_port, metavar="P", help="port of the hosts' ssh servers")
    add("--venv-script", metavar="FILE", help="shell script that hosts read before anything is started")


def _add_failures(add: _Adder) -> None:
    seconds = non_negative("a number of seconds")
    add(
        "--restarts",
        also=("--max-restarts",),
        type=whole_number("a number of restarts"),
        metavar="N",
        help="start the ranks again when one fails, at most N times, and keep replicas in memory for them meanwhile "
        '("checkpoint.in_memory" in the config); not when a signal asked the job to end (default: 0; 3 with '
        "--elastic-training)",
    )
    add(
        "--elastic",
        type=rank_count,
        metavar="MIN",
        help="a restart on this machine has one rank fewer for each that a signal killed, but at least MIN; with "
        "--ranks auto as many as there are devices then, and only as many as elasticity in the config allows",
    )
    add(
        "--grace-period",
        type=seconds,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL for the other ranks, when one failed (default: %(default)g)",
    )
    add(
        "--stop-timeout",
        type=seconds,
        default=DEFAULT_STOP_TIMEOUT_S,
        metavar="S",
        help="seconds that a rank may be stopped (SIGSTOP) until the job ends; 0: no limit (default: %(default)g)",
    )
    add(
        "--hang-timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds without a step of any rank until the job ends, with each one's stack (default: 0, no limit)",
    )


def _add_elastic(add: _Adder) -> None:
    hosts = whole_number("a number of hosts", 1)
    add(
        "--elastic-training",
        action="store_true",
        help="give the command on each host, with one --master-addr and --master-port (--launcher torchelastic)",
    )
    add("--min-elastic-nodes", type=hosts, metavar="N", help="the fewest hosts (default: 1)")
    add("--max-elastic-nodes", type=hosts, metavar="N", help="the most hosts (default: the fewest)")
    add(
        "--elastic-config",
        type=Path,
        metavar="FILE",
        help="config whose section elasticity sets how many ranks can train (default: the script's --deepspeed_config)",
    )


def _add_debugging(add: _Adder) -> None:
    add(
        "--log-dir",
        also=("--enable-each-rank-log",),
        type=_folder,
        metavar="DIR",
        help="also write each rank's output to DIR/rank_N.log, and all of it to DIR/all.log, each line with its rank "
        "(DIR/host_N.log where each host is given the command)",
    )
    add(
        "--debugpy",
        nargs="?",
        const=DEBUG_PORT,
        type=port,
        metavar="PORT",
        help="let each rank listen for a debugger on PORT plus its number, on its host's loopback (default: "
        f"{DEBUG_PORT}); needs the package debugpy",
    )
    add("--wait", action="store_true", help="with --debugpy: ranks begin when a debugger is there")
    add(
        "--save-pid",
        action="store_const",
        const=".polyaccel",
        help="keep the launcher's process id in a file until it ends, and print the file's name",
    )
    add("--dry-run", action="store_true", help="show what would be started, and start nothing")


def rank_count(text: str) -> int | None:
    """The value of --ranks, None for auto. Raises argparse.ArgumentTypeError."""
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
