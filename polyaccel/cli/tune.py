"""`polyaccel tune CONFIG script.py`: the fastest settings of a config that fit, found by short trials."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyaccel.cli.argument_types import whole_number
from polyaccel.errors import LaunchError, PolyaccelError
from polyaccel.job.trial_env import TRIAL_VARIABLE

if TYPE_CHECKING:
    from polyaccel.comm.benchmark.table import CollectiveTimings
    from polyaccel.planner.autotune.hardware_probe import HardwareRates
    from polyaccel.planner.autotune.tuner import TuneResult

_DESCRIPTION = """\
Find the fastest settings of CONFIG with which a training fits its devices: ZeRO stage, micro-batch and accumulation,
offload, recomputed activations, and what else the config's section autotuning names. Samples of an optimizer step stay
as they are. What is foretold not to fit is left out; the rest is tried, the fastest first, a few steps each, in
processes of its own, until nothing faster is foretold. The script needs no change: its config gets a trial's settings
wherever it comes from, and its batches follow engine.train_micro_batch_size_per_gpu() or the engine's own loader. A
tuner that was stopped goes on where it was."""
_USAGE = "polyaccel tune [options] CONFIG [options of polyaccel run] script.py [arguments of the script]"
_COMM_OPERATIONS = "all_reduce,all_gather,reduce_scatter"
_COMM_LIMIT_S = 120.0
COMM_FILE, RATES_FILE = "comm.json", "rates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedJob:
    """A training that is tuned: the file of its config, and what is in it where that is not read as it is (`tree`), the
    command that starts its ranks, how many these are, and the options of `polyaccel run` that say where they are, for
    measuring collectives there (None: that is not done)."""

    config_file: str
    tree: Mapping[str, Any] | None = None
    command: tuple[str, ...]
    world_size: int
    where: tuple[str, ...] | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from polyaccel.cli.plan.command import parse_size

    parser = subparsers.add_parser(
        "tune",
        help="find the fastest settings of a config that fit, by short trials",
        description=_DESCRIPTION,
        usage=_USAGE,
        allow_abbrev=False,
    )
    parser.add_argument("--limit", type=parse_size, metavar="SIZE", help="in place of autotuning.memory_limit")
    count = whole_number("a number of 1 or more", 1)
    parser.add_argument("--trials", type=count, metavar="N", help="in place of autotuning.tuner_num_trials")
    parser.add_argument("--timeout", type=count, metavar="S", help="in place of autotuning.trial_timeout")
    parser.add_argument("--results", metavar="FOLDER", help="in place of autotuning.results_dir")
    parser.add_argument(
        "--comm", type=Path, metavar="FILE", help="speeds by `polyaccel comm bench --json FILE`; else they are measured"
    )
    parser.add_argument("config", metavar="CONFIG", help="path of the config")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="as for polyaccel run")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Tune, and write the results. The exit code is 1 where nothing fits. Raises PolyaccelError."""
    from polyaccel.cli.job import choose_hosts
    from polyaccel.cli.options import add_options
    from polyaccel.cli.parser import JobParser
    from polyaccel.cli.run import count_ranks
    from polyaccel.launch.program import check_not_nested

    check_not_nested(os.environ)
    parser = JobParser(prog="polyaccel tune", usage=_USAGE, allow_abbrev=False)
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
        "memory_limit": args.limit,
        "tuner_num_trials": args.trials,
        "trial_timeout": None if args.timeout is None else float(args.timeout),
        "results_dir": args.results,
    }
    answer, _ = tune_job(job, {name: value for name, value in changes.items() if value is not None}, args.comm)
    return 0 if answer.best is not None else 1


def tune_job(job: TunedJob, section: Mapping[str, Any], speeds_file: Path | None = None) -> tuple[TuneResult, Path]:
    """Tune a job, with other values of the config's `section` autotuning, write the results and tell them; what was
    found, and the folder of the results. Raises PolyaccelError, ConfigError for the config."""
    from polyaccel.config.load import read_tree
    from polyaccel.planner.assumptions import planned_config
    from polyaccel.planner.autotune.candidates import own_candidate
    from polyaccel.planner.autotune.records import TrialLog
    from polyaccel.planner.autotune.results import BEST_FILE, table_of, write_results
    from polyaccel.planner.autotune.trials import TrialPlan
    from polyaccel.planner.autotune.tuner import TuneRequest, tune

    if TRIAL_VARIABLE in os.environ:
        raise PolyaccelError(
            f"{TRIAL_VARIABLE} is set: this is a trial of a tuner already", hint=f"unset {TRIAL_VARIABLE}"
        )
    planned = planned_config(job.config_file if job.tree is None else job.tree, job.world_size)
    tree = read_tree(job.config_file)[0] if job.tree is None else job.tree
    config = planned.config
    tuning = config.autotuning.model_copy(update=dict(section))
    config = config.model_copy(update={"autotuning": tuning})
    results = Path(tuning.results_dir)
    plan = TrialPlan(
        command=job.command,
        config_file=job.config_file,
        config_tree=tree,
        train_batch_size=config.train_batch_size,
        first_step=tuning.start_profile_step,
        last_step=tuning.end_profile_step,
        limit_s=tuning.trial_timeout,
        mapped={key: str(option) for key, option in tuning.arg_mappings.items()},
    )
    question = TuneRequest(
        config=config,
        world_size=job.world_size,
        plan=plan,
        trials_folder=Path(tuning.exps_dir) if "results_dir" not in section else results / "trials",
        limit_nbytes=tuning.memory_limit,
    )
    log = TrialLog(results, question.key, overwrite=tuning.overwrite)
    for sentence in planned.assumptions:
        print(f"Assumed: {sentence}.")
    if log.records:
        print(f"{len(log.records)} trials of before count: {results}")
    question = replace(question, speeds=_speeds(job, speeds_file, results), rates=_rates(results))
    answer = tune(question, log, lambda sentence: print(sentence, flush=True))
    write_results(answer, own_candidate(config), tree, config.train_batch_size, results)
    print(f"\n{table_of(answer)}\n\nStopped: {answer.why}.")
    if answer.best is None:
        print("Nothing that was tried fits.")
    else:
        print(f"Best: {answer.best.candidate}. Its config: {results / BEST_FILE}")
    return answer, results


def _rates(results: Path) -> HardwareRates:
    from polyaccel.planner.autotune.hardware_probe import HardwareRates, rates_here

    file = results / RATES_FILE
    with suppress(OSError, ValueError, TypeError):
        return HardwareRates(**json.loads(file.read_text(encoding="utf-8")))
    found = rates_here(results)
    file.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
    return found


def _speeds(job: TunedJob, given: Path | None, results: Path) -> CollectiveTimings | None:
    """The speeds of collectives among the job's ranks: those of a file, those of before, or measured now. None where
    that is not possible."""
    from polyaccel.comm.benchmark.table import CollectiveTimings

    if given is not None:
        return CollectiveTimings.read(given)
    if job.world_size < 2 or job.where is None:
        return None
    file = results / COMM_FILE
    if not file.exists() and (said := _measure_speeds(job.where, job.config_file, file)):
        print(f"Collectives could not be measured, 1 GB/s is assumed: {said}")
        return None
    return CollectiveTimings.read(file)


def _measure_speeds(where: Sequence[str], config_file: str, file: Path) -> str:
    """Measure collectives into a file. What went wrong, or ""."""
    sizes = ("--smallest", "64K", "--largest", "16M", "--rounds", "5", "--budget", "0.1")
    own = ("--operations", _COMM_OPERATIONS, *sizes, "--config", config_file, "--json", str(file))
    command = [sys.executable, "-m", "polyaccel", "comm", "bench", *own, *where]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMM_LIMIT_S, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 and file.exists() else " | ".join(done.stderr.splitlines()[-3:])
