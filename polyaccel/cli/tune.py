"""`polyaccel tune CONFIG script.py`: the fastest settings of a config that fit, found by short trials."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from polyaccel.cli.argument_types import whole_number
from polyaccel.cli.parser import JobParser, add_hidden_aliases, describe
from polyaccel.errors import LaunchError

_DESCRIPTION = """\
Find the fastest settings of CONFIG with which a training fits its devices: ZeRO stage, micro-batch and accumulation,
offload, recomputed activations, and what else the config's section autotuning names. Samples of an optimizer step stay
as they are. What is estimated not to fit is left out; the rest is tried, the fastest first, a few steps each, in
separate processes, until nothing faster is estimated. The script needs no change: its config gets a trial's settings
wherever it comes from, and its batches follow engine.train_micro_batch_size_per_gpu() or the engine's own loader. A
tuner that was stopped continues where it was."""
_USAGE = "polyaccel tune [options] CONFIG [options of polyaccel run] script.py [arguments of the script]"
_MISSING = "give a config and a script: polyaccel tune ds_config.json train.py"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from polyaccel.cli.plan.command import parse_size

    parser = subparsers.add_parser(
        "tune",
        help="find the fastest settings of a config that fit, by short trials",
        description=_DESCRIPTION,
        usage=_USAGE,
        allow_abbrev=False,
    )
    memory = parser.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="memory of a rank's device, in place of autotuning.memory_limit",
    )
    add_hidden_aliases(parser, memory, ["--limit"])
    count = whole_number("a number of 1 or more", 1)
    parser.add_argument("--trials", type=count, metavar="N", help="in place of autotuning.tuner_num_trials")
    parser.add_argument("--timeout", type=count, metavar="S", help="in place of autotuning.trial_timeout")
    parser.add_argument("--results", metavar="FOLDER", help="in place of autotuning.results_dir")
    parser.add_argument(
        "--comm", type=Path, metavar="FILE", help="speeds by `polyaccel comm bench --json FILE`; else they are measured"
    )
    parser.add_argument("config", metavar="CONFIG", help="path of the config")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="as for polyaccel run")
    describe(
        parser,
        examples=(
            "polyaccel tune ds_config.json --ranks 2 train.py",
            "polyaccel tune --memory 16GiB ds_config.json train.py",
        ),
        codes={1: "nothing fits, or an error, stated on standard error"},
        missing=_MISSING,
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Tune, and write the results. The exit code is 1 where nothing fits. Raises PolyaccelError."""
    from polyaccel.cli.job import choose_hosts
    from polyaccel.cli.options import add_options
    from polyaccel.cli.run import count_ranks
    from polyaccel.launch.program import check_not_nested
    from polyaccel.planner.autotune.tuned_job import TunedJob, tune_job

    check_not_nested(os.environ)
    parser = JobParser(prog="polyaccel tune", usage=_USAGE, allow_abbrev=False)
    describe(parser, missing=_MISSING)
    add_options(parser)
    given = parser.parse_args(args.rest)
    if not given.module and not given.no_python and not Path(given.script).exists():
        hint = "options of polyaccel run stand behind the config, then the script"
        raise LaunchError(f"no script {given.script!r} in {os.getcwd()}", hint=hint, value=given.script)
    hosts = choose_hosts(given, count_ranks)
    job = TunedJob(
        config_file=args.config,
        command=(sys.executable, "-m", "polyaccel", "run", *args.rest),
        world_size=sum(map(len, hosts.values())),
        where=tuple(args.rest[: len(args.rest) - 1 - len(given.arguments)]),
    )
    changes = {
        "memory_limit": args.memory,
        "tuner_num_trials": args.trials,
        "trial_timeout": None if args.timeout is None else float(args.timeout),
        "results_dir": args.results,
    }
    answer, _ = tune_job(job, {name: value for name, value in changes.items() if value is not None}, args.comm)
    return 0 if answer.best is not None else 1
