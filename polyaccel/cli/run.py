"""`polyaccel run`: the ranks of a training script on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polyaccel.errors import LaunchError
from polyaccel.launch.affinity import find_cores, node_count, usable_cpus
from polyaccel.launch.base import DEFAULT_GRACE_S, DEFAULT_STOP_TIMEOUT_S, Launcher, LaunchPlan
from polyaccel.launch.local import plan_local
from polyaccel.launch.program import check_not_nested, python_command
from polyaccel.launch.restarts import RestartPolicy, run_with_restarts
from polyaccel.registry import PATIENCE_S, PluginGroup, find_plugin, list_plugins, load_plugin, probe_plugin

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULT_LAUNCHER = "local"
_MOST_RANKS = 4096
"""More processes than this on one machine are a slip of the pen."""
_DESCRIPTION = """\
Start one process a rank, each with the variables of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) and of DeepSpeed (CROSS_RANK, CROSS_SIZE, LOCAL_SIZE), show what they print with the rank's
number before each line, and end all of them when one fails. The exit code is that of the first rank that failed."""


def add_parser(subparsers: _SubParsers) -> None:
    """Add `run` to the command."""
    parser = subparsers.add_parser(
        "run",
        help="start the ranks of a training script on this machine",
        description=_DESCRIPTION,
        usage="polyaccel run [options] script.py [arguments of the script]",
        allow_abbrev=False,  # or an option of the script that is a prefix of ours would be taken from it
    )
    parser.add_argument(
        "--nproc",
        type=_nproc,
        metavar="N|auto",
        help="ranks to start; auto (the default) is one a device, or on a machine without any, one a NUMA node",
    )
    parser.add_argument(
        "--launcher",
        default=_DEFAULT_LAUNCHER,
        metavar="NAME",
        help="the launcher plugin that starts them (default: %(default)s; `polyaccel plugins` lists them)",
    )
    parser.add_argument(
        "--master-port", type=_port, metavar="P|auto", help="where the ranks meet; auto (the default) picks a free one"
    )
    parser.add_argument("--module", action="store_true", help="the script is a module's name, as with python -m")
    parser.add_argument(
        "--bind-cores", action="store_true", help="bind each rank to its share of the cores, not only OMP_NUM_THREADS"
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL for the other ranks, when one failed (default: %(default)g)",
    )
    parser.add_argument(
        "--stop-timeout",
        type=_seconds,
        default=DEFAULT_STOP_TIMEOUT_S,
        metavar="S",
        help="seconds that a rank may be stopped (SIGSTOP) until the job ends; 0 for ever (default: %(default)g)",
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="also write each rank's output to DIR/rank_N.log, at its end"
    )
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start the ranks again when one fails, at most N times, and keep replicas in memory for them meanwhile "
        '("checkpoint.replica" in the config); not when the job was asked to end by a signal (default: %(default)s)',
    )
    parser.add_argument(
        "--elastic",
        type=_nproc,
        metavar="MIN",
        help="a restart has one rank fewer for each that a signal killed, but not fewer than MIN; with --nproc auto as "
        "many as there are devices then",
    )
    parser.add_argument("script", help="the Python file (or, with --module, module) that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on to it")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Start the job that the arguments describe. Returns its exit code.

    Raises PluginNotFound for a launcher that is not installed, LaunchError for one that cannot be used here.
    """
    check_not_nested(os.environ)
    launcher = choose_launcher(args.launcher)
    command = python_command(args.script, args.arguments, module=args.module)

    def plan(ranks: int, environment: Mapping[str, str]) -> LaunchPlan:
        return plan_local(
            command,
            nproc=ranks,
            environment=environment,
            master_port=args.master_port,
            bind_cores=args.bind_cores,
            grace_s=args.grace,
            stop_timeout_s=args.stop_timeout,
            log_dir=args.log_dir,
        )

    if not args.restarts:
        return launcher.run(plan(args.nproc or count_ranks(), os.environ))
    counted = count_ranks if args.nproc is None and args.elastic is not None else None
    policy = RestartPolicy(args.restarts, args.elastic, counted)
    return run_with_restarts(launcher, plan, args.nproc or count_ranks(), policy, os.environ)


def choose_launcher(name: str) -> Launcher:
    """The launcher plugin called `name`. Raises what `load_plugin` does, and LaunchError if it cannot be used here."""
    plugin: type[Launcher] = load_plugin(PluginGroup.LAUNCHERS, name, Launcher, Launcher.API_VERSION)
    probe = probe_plugin(find_plugin(PluginGroup.LAUNCHERS, name), plugin, limit_s=PATIENCE_S)
    if not probe.usable:
        others = [info.name for info in list_plugins(PluginGroup.LAUNCHERS) if info.name != name]
        cure = f"provide what it lacks, or choose another one: --launcher {' or '.join(others) or 'NAME'}"
        raise LaunchError(f"launcher {name!r} cannot be used here: {probe.reason}", cure=cure, value=name)
    return plugin()


def count_ranks() -> int:
    """The ranks that `--nproc auto` means: one a device of the accelerator that would be chosen.

    The CPU is one device, however many sockets it has; ranks that each stay within a NUMA node use its memory better
    than one that spans several, so there it is one rank a node.
    """
    from polyaccel.accelerators.detect import (
        choose_accelerator,
    )  # may import torch, which an explicit --nproc has no use for

    accelerator = choose_accelerator(None)
    if accelerator.name == "cpu":
        return node_count(find_cores(usable_cpus()))
    return accelerator.device_count()


def _nproc(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MOST_RANKS:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is neither a number of ranks from 1 to {_MOST_RANKS} nor auto")
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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
